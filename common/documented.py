"""Settings as a documented YAML file; called by the ``settings`` command of either side.

The text comes from where the settings are defined, so it cannot go out of date, and what is printed
is a settings file that holds the defaults: it can be saved, changed and given to ``--config``.
"""

import math
import textwrap
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import yaml
from pydantic import BaseModel

WIDTH = 100
_BOUNDS = (
    ("minimum", "at least"),
    ("exclusiveMinimum", "above"),
    ("maximum", "at most"),
    ("exclusiveMaximum", "below"),
)


def documented_yaml(model: type[BaseModel], prefix: str, nested: str = "__") -> str:
    """Every setting of ``model`` with its default, and above it what it means and may be.

    Args:
        model: settings whose fields carry docstrings and defaults; sections are models too.
        prefix: of the environment variables that set them, such as ``FEDSCHED_AGENT_``; empty
            where no variable does.
        nested: what joins a section and its setting in such a variable.
    """
    lines = _comment(model.__doc__ or "", "")
    if prefix:
        some = _first_plain(model)
        lines += [f"# {prefix}{some.upper()} in the environment wins over '{some}' here."]
        if any(_section(model, name) for name in model.model_fields):
            lines += [f"# {nested!r} joins a section and its setting there."]
    return "\n".join([*lines, *_fields(model, 0)]) + "\n"


def _fields(model: type[BaseModel], depth: int) -> list[str]:
    schema = model.model_json_schema()["properties"]
    indent = "  " * depth
    lines = []
    for name, field in model.model_fields.items():
        section = _section(model, name)
        if section is not None:
            about = section.__doc__ or ""
            lines += [
                "",
                *_comment(about, indent),
                f"{indent}{name}:",
                *_fields(section, depth + 1),
            ]
            continue
        about = " ".join(filter(None, (field.description, _range(schema[name]))))
        lines += ["", *_comment(about, indent)]
        lines += [f"{indent}{name}: {_inline(field.get_default(call_default_factory=True))}"]
    return lines


def _section(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    default = model.model_fields[name].get_default(call_default_factory=True)
    return type(default) if isinstance(default, BaseModel) else None


def _first_plain(model: type[BaseModel]) -> str:
    return next(name for name in model.model_fields if _section(model, name) is None)


def _range(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return f"One of {', '.join(map(str, schema['enum']))}."
    found = [f"{word} {schema[key]:g}" for key, word in _BOUNDS if key in schema]
    return f"{', '.join(found).capitalize()}." if found else ""


def _comment(text: str, indent: str) -> list[str]:
    mark = f"{indent}# "
    plain = " ".join(text.replace("``", "").split())
    return textwrap.wrap(plain, WIDTH, initial_indent=mark, subsequent_indent=mark)


def _inline(value: Any) -> str:
    plain = str(value) if isinstance(value, PurePath) else value
    text: str = yaml.safe_dump(plain, default_flow_style=True, width=math.inf)
    return text.removesuffix("...\n").strip()  # the end mark of a document that is one scalar
