"""Rules ``level`` and ``fgd`` as agents offer them: the mix they learn, and where they place."""

from statistics import fmean

import numpy as np
import pytest

from agent.cluster.fragments import (
    COUNT,
    CPU,
    EACH,
    GPU,
    KEEP,
    MEMORY,
    Mix,
    fragment,
    record_request,
)
from agent.cluster.records import Node, Pod
from agent.cluster.state import ClusterState
from agent.cluster.view import (
    GPUS,
    PENDING,
    REQUESTS_KEPT,
    SHARE,
    View,
    bind,
    empty_view,
    enqueue,
    remove,
    set_node,
)
from agent.scheduling.candidates import new_candidates, survey_queue
from agent.scheduling.decision import seed_kernels
from agent.scheduling.outlook import observe
from agent.scheduling.rules import RULES
from agent.simulator.filling import FRAGMENTED, fill
from agent.simulator.fragmentation import (
    Fleet,
    Requests,
    arrivals,
    gpu_models,
    open_fleet,
    requests_of,
    typical_mix,
)
from agent.simulator.tables import SHIPPED
from agent.simulator.traces import read_openb_nodes, read_openb_pods
from tests.unit.small_cluster import add_pod, small_view


def place_next(view: View, rule: str, pod: int) -> int:
    """The node that a rule takes for the one pending pod; −1 for none."""
    eligible = np.zeros(len(view.kind), np.bool_)
    eligible[pod] = True
    out = new_candidates(64)
    return survey_queue(view, observe(view), RULES[rule], eligible, out, False)[1]


def asked(view: View) -> dict[tuple[int, ...], float]:
    """Counts by CPU, GPUs, how much of each, and models."""
    return {
        (*map(int, view.asked[row, [CPU, COUNT, EACH]]), int(view.asked_models[row])): float(count)
        for row, count in enumerate(view.asked_count)
        if count > 0.0
    }


def test_requests_are_counted_by_what_they_ask_for_and_fade() -> None:
    view = small_view([(0, 8)])
    for pod, gpus, share, cpu in ((0, 2.0, 0.0, 8.0), (1, 0.0, 0.25, 1.5), (2, 2.0, 0.0, 8.0)):
        add_pod(view, pod, kind=2, gpus=gpus, share=share, cpu=cpu)
        record_request(view, pod)
    add_pod(view, 3, gpus=0.0, cpu=1.0)
    view.allowed[3] = 0b10
    record_request(view, 3)
    assert asked(view) == {
        (8000, 2, 1000, -1): pytest.approx(KEEP**3 + KEEP),
        (1500, 1, 250, -1): pytest.approx(KEEP**2),
        (1000, 0, 0, 0b10): 1.0,
    }
    assert view.asked_total[0] == pytest.approx(KEEP**3 + KEEP**2 + KEEP + 1.0)
    assert view.asked_total[1] == pytest.approx(8000 * (KEEP**3 + KEEP) + 1500 * KEEP**2 + 1000)
    assert view.asked_total[2] == pytest.approx(2000 * (KEEP**3 + KEEP) + 250 * KEEP**2)


def test_what_is_frequent_is_kept_among_ever_new_requests() -> None:
    view, rng = small_view([(0, 8)]), np.random.default_rng(0)
    for turn in range(2000):
        often = rng.random() < 0.5
        view.request[0, [CPU, GPUS, SHARE]] = 4.0 if often else 10.0 + turn / 1000.0, 1.0, 0.0
        record_request(view, 0)
    counts = asked(view)
    assert len(counts) == REQUESTS_KEPT
    total = float(view.asked_total[0])
    assert counts[4000, 1, 1000, -1] / total == pytest.approx(0.5, abs=0.05)
    assert sum(counts.values()) == pytest.approx(total)


def test_level_keeps_cpu_for_the_gpus_that_are_left() -> None:
    # The pods ask for 4 cores a GPU. Node 0 (5 cores, 2 GPUs) would keep a GPU without CPU.
    view = small_view([(0, 2), (0, 2)])
    view.capacity[0, CPU], view.capacity[1, CPU] = 5.0, 8.0
    for pod in range(2):
        add_pod(view, pod, cpu=4.0)
        record_request(view, pod)
    remove(view, PENDING, 1)
    assert place_next(view, "level", 0) == 1


@pytest.mark.parametrize("rule", ["level", "fgd"])
def test_a_shared_pod_leaves_whole_gpus_to_those_that_ask_for_them(rule: str) -> None:
    view = small_view([(0, 2), (0, 2)])
    for pod, share in ((0, 0.5), (1, 0.0), (2, 0.5)):
        add_pod(view, pod, gpus=0.0 if share else 1.0, share=share)
        record_request(view, pod)
    remove(view, PENDING, 1)
    bind(view, 0, 1)
    assert place_next(view, rule, 2) == 1


def test_a_cluster_counts_each_pod_once_and_knows_models_that_come_later() -> None:
    state = ClusterState(
        clock=lambda: 1000.0, emit=lambda _: None, spec=lambda _: None, assume_seconds=30.0
    )
    pods = [
        Pod(uid=f"u{n}", name=f"u{n}", cpu=2.0, memory=1.0, gpus=1, gpu_models=("k",))
        for n in range(3)
    ]
    state.replace_pods(pods)
    state.replace_pods(pods)
    state.apply_pod(pods[0])
    assert asked(state.view) == {(2000, 1, 1000, 0): pytest.approx(KEEP**2 + KEEP + 1.0)}
    state.replace_nodes(
        Node(name=f"n{n}", cpu=8.0, memory=64.0, gpus=2, gpu_model=model)
        for n, model in enumerate("vk")
    )
    assert asked(state.view) == {(2000, 1, 1000, 0b10): pytest.approx(KEEP**2 + KEEP + 1.0)}


def test_a_pod_counts_when_it_comes_and_not_when_it_is_asked_about() -> None:
    now = [1000.0]
    state = ClusterState(
        clock=lambda: now[0], emit=lambda _: None, spec=lambda _: None, assume_seconds=30.0
    )
    pod = Pod(uid="u", name="u", cpu=2.0, memory=1.0, gpus=1)
    assert state.introduce(pod)
    assert not asked(state.view)
    now[0] += 31.0
    state.tick()
    assert not state.pods  # no watch showed it
    assert state.introduce(pod)
    for _ in range(2):
        state.apply_pod(pod)
    assert asked(state.view) == {(2000, 1, 1000, -1): 1.0}


def test_the_first_list_counts_in_order_of_arrival_and_leaves_out_what_no_node_holds() -> None:
    state = ClusterState(
        clock=lambda: 1e6, emit=lambda _: None, spec=lambda _: None, assume_seconds=30.0
    )
    state.replace_nodes([Node(name="n", cpu=64.0, memory=64.0, gpus=2, gpu_model="v")])
    pods = [
        Pod(uid=name, name=name, cpu=cpu, memory=1.0, gpus=1, created=created)
        for name, cpu, created in (
            ("a", 1.0, 9e5),
            ("b", 2.0, 8e5),
            ("c", 2.0, 7e5),
            ("d", 1e30, 1),
        )
    ]
    state.replace_pods(pods)
    expected = {(1000, 1, 1000, -1): 1.0, (2000, 1, 1000, -1): KEEP + KEEP**2}
    assert asked(state.view) == {row: pytest.approx(count) for row, count in expected.items()}
    state.replace_pods(pods[:1])  # a later list forgets nobody
    assert len(asked(state.view)) == 2
    state.apply_pod(Pod(uid="e", name="e", cpu=1e6, memory=1.0, gpus=1))
    assert len(asked(state.view)) == 2


def openb(every: int) -> tuple[Fleet, Requests, np.ndarray, Mix]:
    """Each ``every``-th GPU node of the openb trace; a mix of requests that a view has rows for."""
    nodes = read_openb_nodes(SHIPPED / "openb" / "openb_node_list_gpu_node.csv")
    jobs = read_openb_pods(SHIPPED / "openb" / "openb_pod_list_default.csv")
    models = gpu_models(nodes)
    whole = open_fleet(nodes)
    fleet = Fleet(*(array[::every].copy() for array in whole))
    requests, kind = requests_of(jobs, models)
    mix = typical_mix(jobs, models)
    table, share = mix.table[:REQUESTS_KEPT], mix.share[:REQUESTS_KEPT]
    allowed = mix.allowed[:REQUESTS_KEPT]
    return fleet, requests, kind, Mix(table, share, allowed, share.sum(), mix.cores_per_gpu)


def view_of(fleet: Fleet, requests: Requests, pods: np.ndarray) -> View:
    """The fleet as agents see it, with a slot for each pod that will come."""
    types = int(fleet.model.max()) + 1
    view = empty_view(
        nodes=len(fleet.cpu), pods=len(pods), gpu_spec=np.ones((types, 3)),
        kind_type=np.zeros(1, np.int64), kind_gpus=np.ones(1, np.int64),
    )  # fmt: skip
    for n in range(len(fleet.cpu)):
        size = [fleet.cpu_total[n] / 1000, fleet.memory_total[n] / 1024, fleet.gpus[n]]
        set_node(view, n, np.array(size), int(fleet.model[n]), 16.0)
    rows = requests.table[pods]
    whole = rows[:, EACH] == GPU
    view.request[:, CPU], view.request[:, MEMORY] = rows[:, CPU] / 1000, rows[:, MEMORY] / 1024
    view.request[:, GPUS] = np.where(whole, rows[:, COUNT], 0)
    view.request[:, SHARE] = np.where(whole, 0.0, rows[:, EACH] / GPU)
    view.allowed[:], view.arrival[:] = requests.allowed[pods], np.arange(len(pods))
    return view


def know(view: View, mix: Mix) -> None:
    """Let the view have seen just this mix."""
    count = len(mix.share)
    view.asked[:count], view.asked_models[:count] = mix.table, mix.allowed
    view.asked_count[:count] = mix.share
    view.asked_total[:] = mix.total, mix.cores_per_gpu, 1.0


def fragmented(rule: str, view: View, mix: Mix, *, learn: bool) -> float:
    """Percent of all GPUs that are fragmented after all pods came, one after the other."""
    seed_kernels(0)
    for pod in range(len(view.kind)):
        enqueue(view, pod)
        if learn:
            record_request(view, pod)
        node = place_next(view, rule, pod)
        if node >= 0:
            bind(view, pod, node)
        else:
            remove(view, PENDING, pod)
    lost = 0.0
    for n in range(len(view.gpu_type)):
        free = np.rint((1.0 - view.gpu_share[n]) * GPU).astype(np.int64)
        cpu = round((view.capacity[n, CPU] - view.requested[n, CPU]) * 1000.0)
        lost += fragment(cpu, free, int(view.gpu_type[n]), mix)
    return float(100.0 * lost / (GPU * view.capacity[:, GPUS].sum()))


def test_agents_place_as_the_suite_does_and_nearly_so_with_a_mix_learned_from_nothing() -> None:
    fleet, requests, kind, mix = openb(20)
    shares: dict[str, list[float]] = {}
    for seed in range(4):
        pods, rank = arrivals(requests, kind, fleet, 1.0, seed)
        suite = fill("level", fleet, requests, mix, pods, rank, seed).track
        shares.setdefault("suite", []).append(float(suite[100, FRAGMENTED]))
        for name, rule in (
            ("known", "level"), ("learned", "level"), ("spread", "least-allocated"),
            ("best fit", "most-allocated"),
        ):  # fmt: skip
            view = view_of(fleet, requests, pods)
            if name == "known":
                know(view, mix)
            found = fragmented(rule, view, mix, learn=name == "learned")
            shares.setdefault(name, []).append(found)
    means = {name: fmean(found) for name, found in shares.items()}
    assert means["known"] == pytest.approx(means["suite"], abs=0.3), means
    assert means["learned"] == pytest.approx(means["suite"], abs=0.6), means
    assert means["learned"] < min(means["spread"], means["best fit"]) - 0.5, means
