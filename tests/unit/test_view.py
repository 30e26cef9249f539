"""The arrays of a cluster: who fits where, which GPUs a pod gets, and that nothing leaks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.cluster.view import (
    CPU,
    GPUS,
    MEMORY,
    PENDING,
    RUNNING,
    bind,
    copy_view,
    fits,
    pick_gpus,
    record_run_time,
    set_node,
    unbind,
)
from tests.unit.small_cluster import add_pod, small_view


def test_a_gang_takes_idle_gpus_and_gives_them_back() -> None:
    view = small_view([(0, 4)])
    add_pod(view, 0, kind=2, gpus=2.0, cpu=3.0, memory=5.0)
    bind(view, 0, 0)
    assert view.gpu_mask[0] == 0b11
    assert view.requested[0].tolist() == [3.0, 5.0, 2.0]
    assert view.gpu_share[0].tolist() == [1, 1, 0, 0, 1, 1, 1, 1]
    assert view.counts.tolist() == [0, 1]
    unbind(view, 0)
    assert view.requested[0].tolist() == [0.0, 0.0, 0.0]
    assert view.gpu_share[0].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert view.counts.tolist() == [0, 0]
    assert view.node[0] == -1


def test_a_shared_pod_goes_to_the_fullest_gpu_with_room_for_its_memory() -> None:
    view = small_view([(0, 2)])
    add_pod(view, 0, gpus=0.0, share=0.5, gpu_memory=6.0)
    add_pod(view, 1, gpus=0.0, share=0.5, gpu_memory=6.0)
    add_pod(view, 2, gpus=0.0, share=0.5, gpu_memory=11.0)
    bind(view, 0, 0)
    assert pick_gpus(view, 1, 0) == view.gpu_mask[0]
    assert pick_gpus(view, 2, 0) == 0b10  # 6 + 11 GiB would pass the first GPU's 16
    bind(view, 1, 0)
    assert view.gpu_share[0, 0] == 1.0
    assert view.requested[0, GPUS] == 1.0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"cpu": 9.0}, "CPU"),
        ({"memory": 33.0}, "memory"),
        ({"gpus": 2.0}, "GPUs"),
        ({"gpu_memory": 17.0}, "GPU memory"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_pod_does_not_fit_a_node_that_lacks(change: dict[str, float], reason: str) -> None:
    view = small_view([(0, 1)])
    add_pod(view, 0)
    assert fits(view, 0, 0)
    add_pod(view, 1, **change)
    assert not fits(view, 1, 0), reason


def test_a_pod_fits_only_the_gpu_types_that_it_accepts_and_ready_nodes() -> None:
    view = small_view([(0, 1), (1, 1), (-1, 0)])
    add_pod(view, 0)
    view.allowed[0] = 0b10
    assert [bool(fits(view, 0, n)) for n in range(3)] == [False, True, False]
    view.ready[1] = False
    assert not fits(view, 0, 1)


def test_a_pod_without_gpu_fits_a_node_without_gpu() -> None:
    view = small_view([(-1, 0)])
    add_pod(view, 0, kind=3, gpus=0.0, gpu_memory=0.0)
    assert fits(view, 0, 0)
    bind(view, 0, 0)
    assert view.gpu_mask[0] == 0
    assert view.requested[0, CPU] == 1.0


def test_pending_pods_keep_their_order_when_one_leaves() -> None:
    view = small_view([(0, 8)])
    for pod in range(4):
        add_pod(view, pod)
    bind(view, 1, 0)
    assert view.queue[PENDING, :3].tolist() == [0, 2, 3]
    assert view.queue[RUNNING, :1].tolist() == [1]


def test_a_copy_shares_nothing() -> None:
    view = small_view([(0, 1)])
    add_pod(view, 0)
    copy = copy_view(view)
    bind(copy, 0, 0)
    assert view.counts.tolist() == [1, 0]
    assert view.requested[0, MEMORY] == 0.0


def test_more_gpus_than_a_view_holds_are_refused() -> None:
    view = small_view([(0, 1)])
    with pytest.raises(ValueError, match="at most 8"):
        set_node(view, 0, np.array([1.0, 1.0, 9.0]), 0, 16.0)


def test_a_run_time_counts_for_its_kind_its_job_type_and_its_gang_size() -> None:
    view = small_view([(0, 8)])
    add_pod(view, 0, kind=2, gpus=2.0)
    record_run_time(view, 0, 5.0)
    assert view.history_kind[2].tolist() == [1.0, 5.0]
    assert view.history_type[0].tolist() == [1.0, 5.0]
    assert view.history_gpus[1].tolist() == [1.0, 5.0]
    assert view.history_kind.sum() == 6.0


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 2)), max_size=40))
def test_whatever_comes_and_goes_the_node_ends_empty(moves: list[tuple[int, int]]) -> None:
    view = small_view([(0, 8), (1, 4)])
    sizes = [(1.0, 0.0), (0.0, 0.25), (2.0, 0.0)]
    running: set[int] = set()
    for pod, size in moves:
        if pod in running:
            unbind(view, pod)
            running.discard(pod)
            continue
        add_pod(view, pod, gpus=sizes[size][0], share=sizes[size][1])
        node = next((n for n in range(2) if fits(view, pod, n)), -1)
        assert view.gpu_share.max() <= 1.0 + 1e-9
        if node < 0:
            view.counts[PENDING] = 0
            continue
        bind(view, pod, node)
        running.add(pod)
    for pod in running:
        unbind(view, pod)
    assert np.abs(view.requested).max() < 1e-9
    assert view.gpu_share[0].max() < 1e-9
    assert np.abs(view.gpu_memory_requested).max() < 1e-9
