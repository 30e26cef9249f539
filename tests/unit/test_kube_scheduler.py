"""The embedded scheduler behaves like kube-scheduler, towards its queue and towards extenders."""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from agent.cluster.view import View, bind, empty_view, enqueue, fits, set_node
from agent.simulator.extender_client import Extender, ExtenderSettings
from agent.simulator.kube_scheduler import (
    KubeScheduler,
    SchedulingQueue,
    feasible_nodes,
    nodes_to_find,
    plugin_scores,
)

NAMES = ("a", "b", "c")
Reply = Callable[[web.Request], Awaitable[web.StreamResponse]]
PATIENT: dict[str, Any] = {"timeout_seconds": 60.0}
"""A call of a test must not fail for a machine that is busy."""


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def small_view(cpu: tuple[float, ...] = (10.0, 10.0, 10.0), pods: int = 4) -> View:
    """Nodes of the given cores and 100 GiB; each pod asks for 1 core and 10 GiB."""
    view = empty_view(
        nodes=len(cpu),
        pods=pods,
        gpu_spec=np.zeros((1, 3)),
        kind_type=np.zeros(1, np.int64),
        kind_gpus=np.zeros(1, np.int64),
    )
    for row, cores in enumerate(cpu):
        set_node(view, row, np.array([cores, 100.0, 0.0]), -1, 0.0)
    view.request[:, :2] = (1.0, 10.0)
    for pod in range(pods):
        enqueue(view, pod)
    return view


class Bench:
    """A scheduler over a small view that notes what it binds and refuses."""

    def __init__(self, view: View, extender: Extender | None = None, seed: int = 0) -> None:
        self.view, self.clock = view, Clock()
        self.bound: list[tuple[int, int]] = []
        self.refused: list[tuple[int, str]] = []
        self.scheduler = KubeScheduler(
            view,
            NAMES[: len(view.capacity)],
            clock=self.clock,
            pod_json=lambda pod: b'{"metadata":{"name":"pod-%d"}}' % pod,
            bind=self._bind,
            refused=lambda pod, why: self.refused.append((pod, why)),
            rng=np.random.default_rng(seed),
            extender=extender,
        )

    def _bind(self, pod: int, row: int) -> bool:
        assert fits(self.view, pod, row)
        bind(self.view, pod, row)
        self.bound.append((pod, row))
        return True


@asynccontextmanager
async def serving(reply: Reply, *, verb: str = "prioritize") -> AsyncIterator[str]:
    """A real extender on loopback that answers ``verb`` by ``reply``."""
    app = web.Application()
    app.router.add_post(f"/{verb}", reply)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def text(body: str, status: int = 200) -> Reply:
    async def reply(_: web.Request) -> web.Response:
        return web.Response(text=body, status=status, content_type="application/json")

    return reply


# The queue ----------------------------------------------------------------------------------


def test_pods_leave_the_queue_by_priority_and_then_by_time() -> None:
    clock = Clock()
    queue = SchedulingQueue(clock)
    for now, pod, priority in ((0.0, 1, 0), (1.0, 2, 0), (2.0, 3, 5)):
        clock.now = now
        queue.add(pod, priority)
    assert [queue.pop() for _ in range(4)] == [3, 1, 2, None]


def test_a_pod_that_failed_queues_behind_those_that_came_meanwhile() -> None:
    clock = Clock()
    queue = SchedulingQueue(clock)
    queue.add(1)
    assert queue.pop() == 1
    clock.now = 5.0
    queue.add(2)
    clock.now = 6.0
    queue.unschedulable(1)
    clock.now = 7.0
    queue.event()
    assert [queue.pop(), queue.pop()] == [2, 1]


def test_backoff_doubles_from_one_to_ten_seconds_and_an_event_does_not_shorten_it() -> None:
    clock = Clock()
    queue = SchedulingQueue(clock)
    queue.add(1)
    waits = []
    for _ in range(6):
        assert queue.pop() == 1
        queue.unschedulable(1)
        queue.event()
        waits.append(queue.next_timer() - clock.now)
        clock.now = queue.next_timer() - 0.01
        assert queue.pop() is None
        clock.now += 0.01
    assert waits == pytest.approx([1.0, 2.0, 4.0, 8.0, 10.0, 10.0])


def test_an_unschedulable_pod_waits_for_an_event_or_five_minutes() -> None:
    clock = Clock()
    queue = SchedulingQueue(clock)
    queue.add(1)
    assert queue.pop() == 1
    queue.unschedulable(1)
    clock.now = 299.0
    assert queue.pop() is None
    assert queue.next_timer() == 300.0
    clock.now = 300.0
    assert queue.pop() == 1
    queue.bound(1)
    assert len(queue) == 0
    assert queue.next_timer() == math.inf


def test_an_event_during_an_attempt_is_not_missed() -> None:
    clock = Clock()
    queue = SchedulingQueue(clock)
    queue.add(1)
    assert queue.pop() == 1
    queue.event()  # room was made while the attempt was under way
    queue.unschedulable(1)
    clock.now = 1.0
    assert queue.pop() == 1


# Filters and plugin scores ------------------------------------------------------------------


@pytest.mark.parametrize(("nodes", "wanted"), [(9, 9), (99, 99), (100, 100), (1000, 420)])
def test_number_of_nodes_to_find(nodes: int, wanted: int) -> None:
    assert nodes_to_find(nodes) == wanted
    assert nodes_to_find(5000) == 500


def test_filters_go_round_from_the_node_after_the_last_one_looked_at() -> None:
    view = small_view(cpu=(10.0, 0.5, 10.0))
    assert feasible_nodes(view, 0, 2, 1).tolist() == [2, 1]
    assert feasible_nodes(view, 0, 1, 2).tolist() == [2, 0, 3]
    assert feasible_nodes(view, 0, 0, 3).tolist() == [0, 2, 3]


def test_plugin_scores_are_least_allocated_plus_balanced_allocation() -> None:
    view = small_view(cpu=(10.0, 20.0, 4.0))
    view.requested[0, :2] = (4.0, 0.0)
    # a: CPU 5/10, memory 10/100: least (50 + 90) // 2 = 70, balance 100 − 40 / 2 = 80.
    # b: CPU 1/20, memory 10/100: least (95 + 90) // 2 = 92, balance 100 − 5 / 2 → 97.
    # c: CPU 1/4, memory 10/100: least (75 + 90) // 2 = 82, balance 100 − 15 / 2 → 92.
    assert plugin_scores(view, 0, np.array([0, 1, 2])).tolist() == [150, 189, 174]


async def test_without_an_extender_the_emptiest_node_wins_and_the_full_waits() -> None:
    bench = Bench(small_view(cpu=(1.0, 2.0), pods=4))
    for pod in range(4):
        bench.scheduler.queue.add(pod)
    while await bench.scheduler.schedule_one():
        pass
    assert bench.bound[0] == (0, 1)  # 1 of 2 cores left beats 0 of 1
    assert sorted(row for _, row in bench.bound) == [0, 1, 1]
    assert [pod for pod, _ in bench.refused] == [3]
    assert "0/2 nodes are available" in bench.refused[0][1]


async def test_ties_are_broken_at_random_by_seed() -> None:
    async def first(seed: int) -> int:
        bench = Bench(small_view(), seed=seed)
        bench.scheduler.queue.add(0)
        await bench.scheduler.schedule_one()
        return bench.bound[0][1]

    rows = [await first(seed) for seed in range(20)]
    assert set(rows) == {0, 1, 2}
    assert rows == [await first(seed) for seed in range(20)]


# Extenders ----------------------------------------------------------------------------------


async def placed(
    url: str, view: View | None = None, **settings: Any
) -> tuple[int | None, Extender, Bench]:
    """Where pod 0 goes with an extender at ``url``; node b is the plugins' favourite."""
    if view is None:
        view = small_view(cpu=(10.0, 20.0, 4.0))
        view.requested[0, 0] = 4.0
    async with Extender(ExtenderSettings(**{"url": url, **PATIENT, **settings})) as extender:
        bench = Bench(view, extender)
        bench.scheduler.queue.add(0)
        await bench.scheduler.schedule_one()
    return (bench.bound[0][1] if bench.bound else None), extender, bench


async def test_prioritize_gets_names_only_and_its_scores_dominate() -> None:
    seen: list[Any] = []

    async def reply(request: web.Request) -> web.Response:
        seen.append((request.headers["Content-Type"], await request.json()))
        return web.json_response([{"Host": "a", "Score": 3}, {"Host": "c", "Score": 4}])

    async with serving(reply) as url:
        row, extender, _ = await placed(url)
    assert row == 2
    body = {
        "Pod": {"metadata": {"name": "pod-0"}},
        "Nodes": None,
        "NodeNames": ["a", "b", "c"],
    }
    assert seen == [("application/json", body)]
    assert extender.calls == {"prioritize": 1}
    assert not extender.failures


@pytest.mark.parametrize(("weight", "row"), [(1, 1), (2, 0)])
async def test_a_score_counts_ten_times_its_weight(weight: int, row: int) -> None:
    # Plugins: a 150, b 189. Score 3 adds 30 at weight 1 and 60 at weight 2.
    async with serving(text('[{"Host":"a","Score":3}]')) as url:
        assert (await placed(url, weight=weight))[0] == row


@pytest.mark.parametrize("body", ["null", "[]", '[{"Host":"stranger","Score":10}]'])
async def test_an_empty_opinion_leaves_the_choice_to_the_plugins(body: str) -> None:
    async with serving(text(body)) as url:
        row, extender, _ = await placed(url)
    assert row == 1
    assert not extender.failures


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        ('[{"Host":"a","Score":10},{"Host":"c","Score":7.0}]', 200, "bad_reply"),
        ('[{"Host":"a","Score":10},{"Host":"c","Score":"7"}]', 200, "bad_reply"),
        ('[{"Host":"a","Score":1e1}]', 200, "bad_reply"),
        ('[{"Host":"a","Score":99999999999999999999}]', 200, "bad_reply"),
        ('{"Host":"a","Score":10}', 200, "bad_reply"),
        ('[{"Host":"a","Score":10}', 200, "bad_json"),
        ('[{"Host":"a","Score":10}]', 500, "status"),
        ('[{"Host":"a","Score":10}]', 204, "status"),
    ],
)
async def test_one_bad_part_spoils_the_reply_which_is_counted_and_ignored(
    body: str, status: int, kind: str
) -> None:
    async with serving(text(body, status)) as url:
        row, extender, _ = await placed(url)
    assert row == 1
    assert extender.failures == {kind: 1}
    assert extender.latencies == []


async def test_a_hanging_extender_costs_the_timeout_and_no_more() -> None:
    released = asyncio.Event()

    async def reply(_: web.Request) -> web.Response:
        await released.wait()
        return web.json_response([{"Host": "a", "Score": 10}])

    async with serving(reply) as url:
        row, extender, _ = await placed(url, timeout_seconds=0.05)
        released.set()
    assert row == 1
    assert extender.failures == {"timeout": 1}


async def test_an_extender_that_is_gone_is_counted_and_ignored() -> None:
    async with serving(text("[]")) as url:
        pass
    row, extender, _ = await placed(url)
    assert row == 1
    assert extender.failures == {"connection": 1}


async def test_prioritize_is_skipped_for_a_single_candidate() -> None:
    async with serving(text('[{"Host":"a","Score":10}]')) as url:
        row, extender, bench = await placed(url, small_view(cpu=(0.5, 10.0, 0.5)))
    assert row == 1
    assert not extender.calls
    assert bench.scheduler.counts["single_candidate"] == 1


async def test_all_calls_share_one_connection() -> None:
    peers = set()

    async def reply(request: web.Request) -> web.Response:
        assert request.transport is not None
        peers.add(request.transport.get_extra_info("peername"))
        return web.json_response([])

    async with (
        serving(reply) as url,
        Extender(ExtenderSettings(url=url, **PATIENT)) as extender,
    ):
        bench = Bench(small_view(), extender)
        for pod in range(4):
            bench.scheduler.queue.add(pod)
        while await bench.scheduler.schedule_one():
            pass
    assert extender.calls == {"prioritize": 4}
    assert len(extender.latencies) == 4
    assert len(peers) == 1


async def test_the_extender_filters_after_the_plugins() -> None:
    seen: list[Any] = []

    async def reply(request: web.Request) -> web.Response:
        seen.append((await request.json())["NodeNames"])
        return web.json_response({"NodeNames": ["c"], "FailedNodes": {"b": "too warm"}})

    async with serving(reply, verb="filter") as url:
        settings: dict[str, Any] = {"filter_verb": "filter", "prioritize_verb": ""}
        row, extender, _ = await placed(url, small_view(cpu=(0.5, 10.0, 10.0)), **settings)
    assert row == 2
    assert seen == [["b", "c"]]
    assert extender.calls == {"filter": 1}


async def test_a_pod_whose_nodes_the_extender_refuses_is_unschedulable_with_reasons() -> None:
    body = '{"NodeNames":[],"FailedNodes":{"a":"too warm","b":"too warm","c":"full"}}'
    async with serving(text(body), verb="filter") as url:
        row, _, bench = await placed(url, filter_verb="filter")
    assert row is None
    assert "c: full" in bench.refused[0][1]


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ('{"NodeNames":["a"],"Error":"no data"}', "error"),
        ('{"NodeNames":["stranger"]}', "bad_reply"),
        ("{", "bad_json"),
    ],
)
async def test_a_failed_filter_fails_the_attempt_unless_ignorable(body: str, kind: str) -> None:
    async with serving(text(body), verb="filter") as url:
        settings: dict[str, Any] = {"filter_verb": "filter", "prioritize_verb": ""}
        row, extender, bench = await placed(url, **settings)
        assert row is None
        assert extender.failures == {kind: 1}
        bench.clock.now = 1.0
        assert bench.scheduler.queue.pop() == 0  # tried again after the backoff
        row, extender, _ = await placed(url, ignorable=True, **settings)
        assert row == 1
        assert extender.failures == {kind: 1}
