"""Fixtures of the tests of kube-scheduler's behaviour."""

from collections.abc import Iterator

import pytest

from examples.lab.control_plane import ControlPlane
from tests.kubernetes.facts.bench import Bench
from tests.kubernetes.facts.recording import RecordingExtender


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """One bare control plane for all of these tests."""
    folder = tmp_path_factory.mktemp("facts")
    with ControlPlane(folder, name="facts", controllers=False, kwok=False) as plane:
        yield Bench(plane)


@pytest.fixture(scope="module")
def server() -> Iterator[RecordingExtender]:
    """An extender for the schedulers of one module."""
    with RecordingExtender() as started:
        yield started
