"""Reads YAML files of data into typed records; called by the benchmark's suites and the splits."""

from pathlib import Path
from typing import TypeVar

import msgspec
import yaml

T = TypeVar("T")


class DataFileError(ValueError):
    """A data file says what cannot be; the message names file, key and what is expected there."""


def read_data(path: Path, kind: type[T]) -> T:
    """The file as a record of ``kind``, a msgspec Struct.

    Structs that forbid unknown fields have misspelt keys refused; a Struct's own checks belong into
    ``__post_init__`` and raise ValueError.

    Raises:
        DataFileError: the file cannot be read, is no YAML or does not say what ``kind`` needs.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataFileError(f"{path}: cannot be read as text: {error}") from error
    try:
        return msgspec.convert(yaml.safe_load(text), kind)
    except yaml.YAMLError as error:
        raise DataFileError(f"{path}: no YAML, correct it there: {error}") from error
    except msgspec.ValidationError as error:
        # msgspec says what it wants and where, as in "Expected `float`, got `str` - at `$.loads`".
        problem, _, key = str(error).partition(" - at ")
        place = f", key {key.strip('`').removeprefix('$.')}" if key else ""
        raise DataFileError(f"{path}{place}: {problem}; correct it there") from error
