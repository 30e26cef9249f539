"""The agent's own time: steps of the wall clock and an API server with another one."""

from email.utils import formatdate

import pytest

from agent.cluster.clock import SteadyClock
from agent.cluster.records import Pod
from agent.cluster.state import ClusterState
from agent.cluster.view import PENDING
from agent.journal import PodEvent, Progress


class Machine:
    """A wall clock that is set and a monotonic one that only goes on, with a state on them."""

    def __init__(self, scale: float = 1.0) -> None:
        self.wall, self.up = 1_000_000.0, 50.0
        self.events: list[PodEvent] = []
        self.clock = SteadyClock(lambda: self.wall, lambda: self.up)
        self.state = ClusterState(
            clock=self.clock.now,
            ahead=self.clock.ahead,
            emit=self._emit,
            spec=lambda _: None,
            scale=scale,
        )

    def _emit(self, record: PodEvent | Progress) -> None:
        assert isinstance(record, PodEvent)
        self.events.append(record)

    def wait(self, seconds: float) -> None:
        self.wall += seconds
        self.up += seconds

    def server_says(self, ahead: float) -> None:
        self.clock.hear(formatdate(int(self.wall + ahead), usegmt=True))

    def waited(self, uid: str) -> float:
        """How long the pod has waited as rules see it, seconds."""
        now = self.state.tick()
        return now - float(self.state.view.arrival[self.state.slots[uid]])


@pytest.mark.parametrize("step", [3600.0, -3600.0, 1e9])
def test_a_step_of_the_wall_clock_changes_no_waiting_time(step: float) -> None:
    machine = Machine()
    machine.state.apply_pod(Pod(uid="a", name="a"))
    machine.wait(10.0)
    machine.wall += step
    machine.state.apply_pod(Pod(uid="b", name="b"))
    machine.wait(5.0)
    assert (machine.waited("a"), machine.waited("b")) == (15.0, 5.0)
    assert machine.state.job_seconds == pytest.approx(10.0 + 2 * 5.0)
    machine.state.apply_pod(Pod(uid="a", name="a", node="n"))
    created, bound = (e.time for e in machine.events if e.uid == "a")
    assert bound - created == 15.0


@pytest.mark.parametrize("step", [3600.0, -3600.0])
def test_after_a_step_the_api_servers_times_are_told_in_the_agents_own(step: float) -> None:
    machine = Machine()
    machine.wall += step  # the API server's clock and the wall clock agree, the agent's is older
    machine.server_says(0.0)
    machine.state.replace_pods([Pod(uid="a", name="a", created=machine.wall - 90.0)])
    assert machine.waited("a") == pytest.approx(90.0, abs=1.0)


@pytest.mark.parametrize("ahead", [3600.0, -3600.0, 86_400.0])
def test_ages_of_pods_are_right_though_the_api_servers_clock_is_another(ahead: float) -> None:
    machine = Machine(scale=10.0)
    machine.server_says(ahead)
    server = machine.wall + ahead
    machine.state.replace_pods(
        [
            Pod(
                uid="a",
                name="a",
                created=server - 100.0,
                started=server - 60.0,
                finished=server - 20.0,
                deadline=server + 50.0,
                node="n",
                phase="Succeeded",
            ),
            Pod(uid="b", name="b", created=server - 100.0, deadline=server + 50.0),
        ]
    )
    now = machine.state.tick()
    ages = {e.kind: now - e.time for e in machine.events if e.uid == "a"}
    wanted = {"created": 1000.0, "bound": 600.0, "started": 600.0, "finished": 200.0}
    assert ages == {kind: pytest.approx(age, abs=10.0) for kind, age in wanted.items()}
    view, slot = machine.state.view, machine.state.slots["b"]
    assert view.deadline[slot] - now == pytest.approx(500.0, abs=10.0)
    assert view.counts[PENDING] == 1


def test_a_second_of_difference_is_the_headers_resolution_and_not_believed() -> None:
    machine = Machine()
    for ahead in (-1.0, 0.0, 1.0, 1.4):
        machine.server_says(ahead)
        assert machine.clock.ahead() == 0.0
    machine.server_says(30.0)
    first = machine.clock.ahead()
    assert first == pytest.approx(30.0, abs=1.0)
    machine.wait(0.7)
    machine.server_says(30.0)
    assert machine.clock.ahead() == first  # it does not wander with each answer
    machine.server_says(0.0)
    assert machine.clock.ahead() == 0.0  # it was set right


@pytest.mark.parametrize("date", ["", "yesterday", "Thu, 99 Foo 2026 99:99:99 GMT"])
def test_a_header_that_is_no_date_is_passed_over(date: str) -> None:
    machine = Machine()
    machine.clock.hear(date)
    assert machine.clock.ahead() == 0.0
