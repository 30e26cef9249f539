"""Real clusters for the tests: one that they share, others of their own, namespaces within."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import kubernetes
import pytest

from examples.lab.build import binaries
from examples.lab.control_plane import ControlPlane, until
from examples.lab.manifests import sample_nodes
from examples.processes import ExampleError

HERE = Path(__file__).parent
SECONDS = 600.0
"""Longest time of a test that names none; it only bounds a hanging one on a slow machine."""
_NUMBERS = itertools.count(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give these tests the time that processes take on a machine that is busy with others."""
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SECONDS))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build what the cache lacks before the first test, with progress and outside its time."""
    if any(HERE in item.path.parents for item in session.items):
        terminal = session.config.pluginmanager.getplugin("terminalreporter")
        try:
            binaries(terminal.write_line)
        except ExampleError as error:
            pytest.exit(str(error), returncode=1)


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """The cluster that tests share, with four nodes (two of four GPUs) and kube-scheduler.

    Whoever kills something, or needs nodes or a scheduler of a kind, takes ``own_lab``.
    """
    with ControlPlane(tmp_path_factory.mktemp("lab")) as cluster:
        cluster.start_scheduler({})
        cluster.create_nodes(sample_nodes(4))
        yield cluster


@pytest.fixture
def namespace(lab: ControlPlane) -> Iterator[str]:
    """A new namespace of the shared cluster; gone, with its pods, when the test is over."""
    core = kubernetes.client.CoreV1Api(lab.api())
    name = f"test-{next(_NUMBERS)}"
    lab.kubectl("create", "namespace", name)
    lab.wait_for_service_account(name)
    yield name
    lab.kubectl("delete", "namespace", name, "--wait=false")

    def empty() -> bool:
        # The namespace's controller would come by again, but only after seconds.
        core.delete_collection_namespaced_pod(name, grace_period_seconds=0)
        return not core.list_namespaced_pod(name).items

    until(empty, f"the pods of namespace {name} are gone")


OwnLab = Callable[..., ControlPlane]


@pytest.fixture
def own_lab(tmp_path: Path) -> Iterator[OwnLab]:
    """Starts clusters for one test alone; a second one needs a ``name`` of its own."""
    with contextlib.ExitStack() as stack:

        def start(
            *, name: str = "lab", controllers: bool = True, kwok: bool = True
        ) -> ControlPlane:
            plane = ControlPlane(tmp_path / name, name=name, controllers=controllers, kwok=kwok)
            return stack.enter_context(plane)

        yield start
