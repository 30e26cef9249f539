"""The live cluster state: places, assumptions, growth, events told once, and the integrals."""

import math
from typing import Any

import numpy as np
import pytest

from agent.cluster.records import Node, Pod
from agent.cluster.speeds_file import KindSpeeds, SpeedsFile
from agent.cluster.state import ClusterState
from agent.cluster.view import CPU, GPUS, PENDING, RUNNING, USAGE_CPU, USAGE_DISK
from agent.journal import PodEvent, Progress


class Cluster:
    """A state with a clock to turn and the events it told."""

    def __init__(self, **options: Any) -> None:
        self.now = 1000.0
        self.events: list[PodEvent | Progress] = []
        self.state = ClusterState(
            clock=lambda: self.now, emit=self.events.append, spec=lambda _: None, **options
        )

    def kinds(self, uid: str) -> list[str]:
        return [e.kind for e in self.events if isinstance(e, PodEvent) and e.uid == uid]

    def queue(self, which: int) -> list[str]:
        view = self.state.view
        return [self.state.pod_name(int(s)) for s in view.queue[which, : view.counts[which]]]


def node(name: str, **changes: Any) -> Node:
    values = {"cpu": 8.0, "memory": 64.0, "gpus": 4, "gpu_model": "v100", "gpu_memory": 16.0}
    return Node(name=name, **{**values, **changes})


def pod(uid: str, **changes: Any) -> Pod:
    values: dict[str, Any] = {"name": uid, "cpu": 2.0, "memory": 4.0, "gpus": 1, "job_type": "a"}
    return Pod(uid=uid, **{**values, **changes})


def test_the_view_grows_and_keeps_all_that_it_held() -> None:
    c = Cluster(nodes=1, pods=1)
    c.state.replace_nodes([node(f"n{i}", gpu_model=f"m{i % 3}") for i in range(5)])
    for i in range(20):
        c.state.apply_pod(pod(f"u{i}", job_type=f"j{i % 4}", node=f"n{i % 5}"))
    view = c.state.view
    rows = [c.state.rows[f"n{i}"] for i in range(5)]
    assert view.requested[rows, CPU].tolist() == [8.0] * 5
    assert view.requested[rows, GPUS].tolist() == [4.0] * 5
    assert view.counts.tolist() == [0, 20]
    assert view.slowdown.shape == (4, 3)
    assert view.interference.shape == (4, 4)
    assert len(set(rows)) == 5


def test_a_slot_is_used_again_with_nothing_left_of_the_old_pod() -> None:
    c = Cluster(nodes=1, pods=1)
    c.state.apply_node(node("n0"))
    c.state.apply_pod(pod("a", node="n0", gpu_memory=9.0, deadline=5.0))
    c.state.apply_pod(pod("a", node="n0", phase="Succeeded"))
    c.state.apply_pod(pod("b"))
    slot = c.state.slots["b"]
    assert len(c.state.view.kind) == 1
    assert c.state.view.request[slot].tolist() == [2.0, 4.0, 1.0, 0.0, 0.0]
    assert math.isinf(c.state.view.deadline[slot])
    assert c.state.view.requested[c.state.rows["n0"]].tolist() == [0.0, 0.0, 0.0]


def test_pods_of_other_schedulers_hold_their_place() -> None:
    c = Cluster()
    c.state.apply_node(node("n0"))
    c.state.apply_pod(pod("x", scheduler="somebody", node="n0", phase="Running"))
    assert c.state.view.requested[0].tolist() == [2.0, 4.0, 1.0]


def test_a_pod_seen_before_its_node_takes_its_place_when_the_node_comes() -> None:
    c = Cluster()
    c.state.apply_pod(pod("x", node="late", phase="Running"))
    assert c.queue(PENDING) == c.queue(RUNNING) == []
    c.now += 50
    c.state.apply_node(node("late"))
    assert c.queue(RUNNING) == ["x"]
    assert c.state.view.start[c.state.slots["x"]] == 1000.0


def test_a_node_that_goes_leaves_an_empty_row_and_one_that_changes_keeps_its_pods() -> None:
    c = Cluster()
    c.state.apply_node(node("n0"))
    c.state.apply_pod(pod("x", node="n0"))
    c.state.apply_node(node("n0", gpus=2))
    assert c.state.view.requested[0].tolist() == [2.0, 4.0, 1.0]
    assert (c.state.view.gpu_share[0] > 0).tolist() == [True, False] + [True] * 6
    c.state.replace_nodes([])
    assert c.state.rows == {}
    assert not c.state.view.ready[0]
    assert c.state.view.requested[0].tolist() == [0.0, 0.0, 0.0]
    assert c.queue(RUNNING) == []


def test_an_assumed_pod_occupies_its_node_until_the_watch_says_where_it_is() -> None:
    c = Cluster()
    c.state.replace_nodes([node("n0"), node("n1")])
    c.state.apply_pod(pod("x"))
    c.state.assume("x", "n0")
    assert c.state.view.requested[:2, CPU].tolist() == [2.0, 0.0]
    assert c.queue(PENDING) == []
    c.state.apply_pod(pod("x", node="n1"))
    assert c.state.view.requested[:2, CPU].tolist() == [0.0, 2.0]
    assert c.kinds("x") == ["created", "bound"]


def test_an_assumption_lapses_and_the_pod_waits_again_in_order_of_arrival() -> None:
    c = Cluster(assume_seconds=30.0, scale=10.0)
    c.state.apply_node(node("n0"))
    for uid in ("a", "b", "c"):
        c.now += 1
        c.state.apply_pod(pod(uid))
    c.state.assume("a", "n0")
    c.now += 29.9
    c.state.tick()
    assert c.queue(PENDING) == ["b", "c"]
    c.now += 0.2
    c.state.tick()
    assert c.queue(PENDING) == ["a", "b", "c"]
    assert c.state.view.requested[0].tolist() == [0.0, 0.0, 0.0]


def test_a_pod_known_from_kube_scheduler_alone_goes_when_no_watch_confirms_it() -> None:
    c = Cluster(assume_seconds=30.0)
    assert c.state.introduce(pod("ghost"))
    assert c.state.introduce(pod("real"))
    c.state.apply_pod(pod("real"))
    c.state.replace_pods([pod("real")])  # a list that began before kube-scheduler's call
    assert set(c.state.pods) == {"ghost", "real"}
    c.now += 31
    c.state.tick()
    assert set(c.state.pods) == {"real"}


def test_a_pod_that_is_bound_or_done_is_not_introduced() -> None:
    c = Cluster()
    c.state.apply_pod(pod("bound", node="n0"))
    c.state.apply_pod(pod("done", node="n0", phase="Succeeded"))
    assert not c.state.introduce(pod("bound"))
    assert not c.state.introduce(pod("done"))


def test_each_event_is_told_once_through_relists_and_repeats() -> None:
    c = Cluster(scale=2.0)
    c.state.apply_node(node("n0"))
    life = [
        pod("x", created=1000.0),
        pod("x", created=1000.0, node="n0"),
        pod("x", created=1000.0, node="n0", phase="Running", started=1001.0),
        pod("x", created=1000.0, node="n0", phase="Succeeded", started=1001.0, finished=1010.0),
    ]
    for step in life:
        c.now += 10
        c.state.apply_pod(step)
        c.state.apply_pod(step)
        c.state.replace_pods([step])
    c.state.apply_pod(life[2])  # an old word that comes late
    assert c.state.pods == {}
    assert c.kinds("x") == ["created", "bound", "started", "finished"]
    end = c.events[-1]
    assert isinstance(end, PodEvent)
    assert (end.time, end.run_seconds, end.gpu_model) == (2080.0, 40.0, "v100")
    c.state.apply_pod(life[3], deleted=True)
    assert c.kinds("x") == ["created", "bound", "started", "finished"]


@pytest.mark.parametrize(
    ("last", "deleted", "kind"),
    [
        ({"phase": "Succeeded"}, False, "finished"),
        ({"phase": "Failed", "reason": "OOMKilled"}, False, "oom"),
        ({"phase": "Failed", "reason": "Evicted"}, False, "evicted"),
        ({"phase": "Failed", "reason": "OutOfcpu"}, False, "misplaced"),
        ({"phase": "Running"}, True, "deleted"),
    ],
)
def test_how_a_pod_ended_is_told(last: dict[str, str], deleted: bool, kind: str) -> None:
    c = Cluster()
    c.state.apply_pod(pod("x", node="n0", phase="Running"))
    c.state.apply_pod(pod("x", node="n0", **last), deleted=deleted)
    assert c.kinds("x")[-1] == kind
    assert "x" not in c.state.pods


def test_what_happened_while_the_agent_was_away_is_told_with_the_api_servers_times() -> None:
    c = Cluster(scale=10.0)
    c.state.apply_node(node("n0"))
    done = pod("x", created=100.0, node="n0", started=200.0, finished=500.0, phase="Succeeded")
    c.state.replace_pods([done])
    times = {e.kind: e.time for e in c.events if isinstance(e, PodEvent)}
    assert times == {"created": 1000.0, "bound": 2000.0, "started": 2000.0, "finished": 5000.0}
    assert c.state.view.history_kind[0].tolist() == [1.0, math.log(3000.0)]


def test_a_run_time_counts_as_on_the_fastest_model() -> None:
    c = Cluster()
    c.state.replace_nodes([node("fast", gpu_model="v"), node("slow", gpu_model="k")])
    c.state.set_speeds(
        SpeedsFile(
            gpu_models=["k", "v"],
            job_types=["a"],
            kinds=[KindSpeeds(job_type="a", gpus=1, slowdown=[math.log(4.0), 0.0])],
            interference=[[0.25]],
        )
    )
    c.state.apply_pod(pod("x", node="slow"))
    assert c.state.view.slowdown[0].tolist() == [0.0, math.log(4.0)]
    assert c.state.view.interference[0, 0] == 0.25
    c.now += 400.0
    c.state.apply_pod(pod("x", node="slow", phase="Succeeded"))
    assert c.state.view.history_kind[0, 1] == pytest.approx(math.log(100.0))


def test_speeds_stay_when_a_new_kind_or_model_makes_the_view_grow() -> None:
    c = Cluster()
    c.state.apply_node(node("n0", gpu_model="v"))
    c.state.set_speeds(
        SpeedsFile(
            gpu_models=["v", "k"],
            job_types=["a"],
            kinds=[KindSpeeds(job_type="a", gpus=1, slowdown=[0.0, 1.5])],
            interference=[[0.0]],
            prior=[0.0, 0.7],
            prior_interference=0.1,
        )
    )
    c.state.apply_pod(pod("x"))
    c.state.apply_pod(pod("y", job_type="b"))
    c.state.apply_node(node("n1", gpu_model="k"))
    assert c.state.view.slowdown.tolist() == [[0.0, 1.5], [0.0, 0.7]]
    assert c.state.view.interference.tolist() == [[0.0, 0.1], [0.1, 0.1]]


def test_accepted_models_are_known_when_they_come_later() -> None:
    c = Cluster()
    c.state.apply_pod(pod("x", gpu_models=("k",)))
    assert c.state.view.allowed[c.state.slots["x"]] == 0
    c.state.replace_nodes([node("n0", gpu_model="v"), node("n1", gpu_model="k")])
    assert c.state.view.allowed[c.state.slots["x"]] == 0b10


def test_the_integrals_are_those_worked_out_by_hand() -> None:
    c = Cluster(scale=10.0)
    c.state.replace_nodes([node("n0"), node("n1")])
    c.state.apply_pod(pod("x", node="n0"))  # a quarter of n0's GPUs
    c.state.apply_pod(pod("y"))
    c.now += 5.0
    c.state.tick()
    assert c.state.job_seconds == 100.0
    assert c.state.imbalance_seconds == pytest.approx(50.0 * 2 * 0.125**2)
    c.now -= 3.0  # the wall clock is set back
    c.state.tick()
    assert c.state.job_seconds == 100.0


def test_progress_is_told_once_a_reading_with_the_neighbours_on_the_gpu() -> None:
    c = Cluster()
    c.state.apply_node(node("n0", gpus=1))
    share = {"gpus": 0, "gpu_share": 0.5, "node": "n0", "phase": "Running"}
    c.state.apply_pod(pod("x", job_type="b", **share))
    for rate, cpu in ((2.0, 2.0), (2.0, 2.5), (3.0, 2.5)):
        c.state.apply_pod(pod("y", steps_per_second=rate, **{**share, "cpu": cpu}))
    seen = [e for e in c.events if isinstance(e, Progress)]
    assert [(p.steps_per_second, p.gpus, p.gpu_model, p.neighbours) for p in seen] == [
        (2.0, 1, "v100", ["b"]),
        (3.0, 1, "v100", ["b"]),
    ]


def test_use_is_unknown_where_it_is_not_measured() -> None:
    c = Cluster()
    c.state.replace_nodes([node("n0"), node("n1")])
    c.state.set_use(USAGE_DISK, {"n0": 0.75, "elsewhere": 1.0})
    assert c.state.view.usage[0, USAGE_DISK] == 0.75
    assert np.isnan(c.state.view.usage[1]).all()
    c.state.set_use(USAGE_DISK, {})
    assert np.isnan(c.state.view.usage).all()


def test_only_what_decisions_depend_on_counts_as_a_change() -> None:
    changes: list[int] = []
    c = Cluster(changed=lambda: changes.append(1))
    c.state.apply_node(node("n0"))
    c.state.apply_pod(pod("x", node="n0"))
    before = len(changes)
    c.state.apply_pod(pod("x", node="n0", steps_per_second=2.0, phase="Running"))
    c.state.set_use(USAGE_CPU, {"n0": 0.125})
    assert len(changes) == before
    c.state.apply_pod(pod("x", node="n0", phase="Succeeded"))
    assert len(changes) == before + 1
