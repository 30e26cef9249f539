"""Places in the view where there are many: orders, growth, bursts and nodes that come late."""

import random

import pytest

from agent.cluster.records import GATE, Node, Pod
from agent.cluster.state import ClusterState
from agent.cluster.view import CPU, PENDING, RUNNING


class Cluster:
    """A state with a clock to turn."""

    def __init__(self, nodes: int = 0) -> None:
        self.now = 1000.0
        self.state = ClusterState(
            clock=lambda: self.now, emit=lambda _: None, spec=lambda _: None, assume_seconds=30.0
        )
        self.state.replace_nodes(node(n) for n in range(nodes))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.state.tick()

    def queue(self, which: int) -> list[str]:
        view = self.state.view
        return [self.state.pod_name(int(s)) for s in view.queue[which, : view.counts[which]]]


def node(number: int) -> Node:
    return Node(name=f"n{number}", cpu=8.0, memory=64.0)


def pod(uid: str, place: str = "", created: float = 0.0, job_type: str = "a") -> Pod:
    return Pod(
        uid=uid, name=uid, cpu=2.0, memory=1.0, node=place, created=created, job_type=job_type
    )


def test_pods_that_are_listed_in_any_order_wait_in_the_order_in_which_they_came() -> None:
    cluster, rng = Cluster(), random.Random(1)
    created = {f"u{n}": 500.0 + rng.randrange(40) for n in range(200)}
    created["u7"] = 499.0
    cluster.state.replace_pods(pod(uid, created=at) for uid, at in created.items())
    assert cluster.queue(PENDING) == sorted(created, key=created.__getitem__)  # a stable sort
    cluster.state.apply_pod(pod("new"))
    cluster.state.assume("u7", "nowhere")
    cluster.state.forget("u7")
    assert cluster.queue(PENDING) == [*sorted(created, key=created.__getitem__), "new"]


def test_nodes_that_come_after_their_pods_get_each_of_them() -> None:
    cluster = Cluster()
    cluster.state.replace_pods(pod(f"u{n}", f"n{n % 50}") for n in range(200))
    assert cluster.queue(RUNNING) == cluster.queue(PENDING) == []
    cluster.state.replace_nodes(node(n) for n in range(50))
    state = cluster.state
    assert sorted(cluster.queue(RUNNING)) == sorted(state.pods)
    assert all(state.view.requested[row, CPU] == 8.0 for row in state.rows.values())
    cluster.state.replace_nodes(node(n) for n in range(0, 50, 2))
    assert len(cluster.queue(RUNNING)) == 100
    cluster.state.replace_pods([])
    cluster.state.replace_nodes(node(n) for n in range(50))  # nobody is left to come back
    assert not state.view.requested.any()


def test_a_new_kind_of_work_leaves_the_arrays_of_nodes_and_pods_where_they_are() -> None:
    cluster = Cluster(nodes=4)
    cluster.state.apply_pod(pod("u", "n0"))
    before = cluster.state.view
    cluster.state.apply_pod(pod("v", "n1", job_type="another"))
    view = cluster.state.view
    assert len(view.kind_gpus) == 2
    assert view.request is before.request
    assert view.queue is before.queue
    assert view.capacity is before.capacity


def test_an_assumption_that_is_renewed_lapses_after_those_that_were_made_meanwhile() -> None:
    cluster = Cluster(nodes=1)
    for uid in ("a", "b"):
        cluster.state.apply_pod(pod(uid))
    cluster.state.assume("a", "n0")
    cluster.wait(10.0)
    cluster.state.assume("b", "n0")
    cluster.wait(10.0)
    cluster.state.assume("a", "n0")
    cluster.wait(20.5)
    assert cluster.queue(PENDING) == ["b"]
    cluster.wait(10.0)
    assert sorted(cluster.queue(PENDING)) == ["a", "b"]


def test_changes_of_one_burst_count_for_the_time_after_it() -> None:
    cluster = Cluster(nodes=2)
    cluster.now += 50.0
    for number in range(4):  # within a millisecond; n0 is full then, n1 is empty
        cluster.state.apply_pod(pod(f"u{number}", "n0"))
        cluster.now += 0.0002
    cluster.now += 100.0
    cluster.state.tick()
    assert cluster.state.imbalance_seconds == pytest.approx(100.0 * 2 * 0.5**2, abs=0.01)
    assert cluster.state.job_seconds == pytest.approx(400.0, abs=0.01)


def test_the_gated_pods_are_known_without_looking_through_all() -> None:
    cluster = Cluster(nodes=1)

    def gated(uid: str, on: bool, place: str = "", phase: str = "Pending") -> Pod:
        gates = (GATE,) if on else ()
        return Pod(uid=uid, name=uid, gated=on, gates=gates, node=place, phase=phase)

    cluster.state.replace_pods([gated("a", True), gated("b", True), gated("c", False)])
    assert list(cluster.state.gated) == ["a", "b"]
    cluster.state.apply_pod(gated("a", False))
    cluster.state.apply_pod(gated("b", True), deleted=True)
    assert list(cluster.state.gated) == []
