"""Fixtures of the federation tests; what they start, they stop."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.federation.support import Hub


@pytest.fixture
def closing() -> Iterator[Callable[[Any], Any]]:
    """Register something with ``stop`` or ``close``; it is called at the end, last first."""
    things: list[Any] = []

    def register(thing: Any) -> Any:
        things.append(thing)
        return thing

    yield register
    for thing in reversed(things):
        getattr(thing, "stop", None) and thing.stop()
        getattr(thing, "close", None) and thing.close()


@pytest.fixture
def make_hub(tmp_path: Path, closing: Callable[[Any], Any]) -> Callable[..., Hub]:
    """Start a hub in the test's directory, with settings by name."""

    def make(**settings: Any) -> Hub:
        hub = Hub(tmp_path, **settings)
        closing(hub)
        return hub.start()

    return make
