"""What the agent's picture of a cluster survives: faults of the API server and of the network."""

import asyncio
import itertools
import time

import pytest

from examples.lab.fleet import PodState, node_name, pod_uid
from examples.lab.stream import Kind, ListFault
from tests.unit.api_server import until
from tests.unit.replay import change_much, following

KINDS: tuple[Kind, ...] = ("nodes", "pods")


@pytest.mark.parametrize("fault", ["gone", "cut", "error"])
async def test_a_page_that_fails_costs_nothing_but_another_list(fault: ListFault) -> None:
    async with following() as follower:
        follower.server.list_faults["pods"] = [fault, fault]
        lists = follower.pods.counts["lists"]
        known = len(follower.state.pods)
        follower.server.forget("pods")
        await until(lambda: not follower.server.list_faults["pods"])
        assert len(follower.state.pods) == known  # half a list takes nobody away
        change_much(follower)
        await follower.agree()
        await until(lambda: follower.pods.counts["lists"] == lists + 1)
        assert follower.server.counts["lists pods"] == 4


async def test_what_happened_while_the_version_was_gone_is_made_up_for() -> None:
    async with following() as follower:
        for kind in KINDS:
            follower.server.fall_silent(kind)
        change_much(follower)
        ended = [uid for uid, kind in follower.told if kind == "deleted"]
        assert not ended
        for kind in KINDS:
            follower.server.forget(kind)
            follower.server.fall_silent(kind, False)
        await follower.agree()
        assert follower.pods.counts["gone"] == follower.nodes.counts["gone"] == 1
        assert sum(kind == "deleted" for _, kind in follower.told) == 2


@pytest.mark.parametrize("mid_line", [False, True])
async def test_a_connection_that_drops_is_taken_up_where_it_was(mid_line: bool) -> None:
    async with following() as follower:
        for turn in range(3):
            follower.server.break_off("pods", mid_line=mid_line)
            follower.server.break_off("nodes", mid_line=mid_line)
            change_much(follower)
            await follower.agree()
            while follower.pods.counts["watches"] < turn + 2:
                await asyncio.sleep(0.002)
        assert follower.pods.counts["lists"] == follower.nodes.counts["lists"] == 1
        assert follower.pods.counts["failures"] >= 3


@pytest.mark.parametrize(
    "line",
    [
        b'{"type":"MODIFIED","object":{"metadata":{"na\n',
        b"\xff\xfe\x00\n",
        b'{"type":"MODIFIED","object":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
        b'{"type":"MODIFIED"}\n',
        b"null\n",
        b'{"type":"MODIFIED","object":{"metadata":{"resourceVersion":7}}}\n',
        b'{"type":"MODIFIED","object":{"metadata":{"name":"\xff","uid":"x"}}}\n',
    ],
    ids=["cut", "no text", "deep", "no object", "null", "version", "name"],
)
async def test_nonsense_on_the_watch_is_counted_and_the_next_line_counts(line: bytes) -> None:
    async with following() as follower:
        for kind in KINDS:
            follower.server.send(kind, line)
        change_much(follower)
        await follower.agree()
        assert follower.pods.counts["malformed"] == follower.nodes.counts["malformed"] == 1
        assert follower.pods.counts["lists"] == 1


async def test_an_object_that_cannot_be_read_stays_as_it_was_known() -> None:
    async with following() as follower:
        uid = pod_uid(1)
        before = follower.state.pods[uid]
        follower.server.say("pods", "MODIFIED", b'{"metadata":{"name":"x","uid":"%s"},'
                            b'"spec":{"nodeName":7}}' % uid.encode())  # fmt: skip
        await until(lambda: follower.pods.counts["malformed"] == 1)
        assert follower.state.pods[uid] is before
        follower.server.delete_pod(1)
        await follower.agree()


async def test_an_object_that_cannot_be_read_in_a_list_is_not_taken_for_gone() -> None:
    async with following() as follower:
        state, uid = follower.state, pod_uid(1)
        before = state.pods[uid]
        follower.server.spoilt.add(1)
        follower.server.delete_pod(2)
        follower.server.forget("pods")
        await until(lambda: follower.pods.counts["lists"] == 2)
        assert state.pods[uid] is before
        assert pod_uid(2) not in state.pods
        assert follower.pods.counts["malformed"] == 1
        follower.check()


async def test_an_error_event_leads_to_a_new_list() -> None:
    async with following() as follower:
        error = b'{"kind":"Status","code":500,"message":"etcdserver: no leader"}'
        follower.server.say("pods", "ERROR", error)
        await until(lambda: follower.pods.counts["lists"] == 2)
        change_much(follower)
        await follower.agree()
        assert follower.pods.counts["failures"] == 1


async def test_a_watch_that_falls_silent_is_opened_anew() -> None:
    async with following(read_timeout=0.2) as follower:
        follower.server.fall_silent("pods")
        watches = follower.pods.counts["watches"]
        heard = follower.pods.last_contact
        change_much(follower)
        await until(lambda: follower.pods.counts["watches"] >= watches + 2)
        assert follower.difference()
        follower.server.fall_silent("pods", False)
        await follower.agree()
        assert follower.pods.counts["lists"] == 1
        assert follower.pods.last_contact > heard


async def test_bookmarks_move_the_version_of_a_watch_on_which_nothing_happens() -> None:
    async with following(bookmark_seconds=0.02) as follower:
        for _ in range(5):
            follower.server.change_node(1)  # the version goes on without any pod
        marks = follower.pods.counts["bookmarks"]
        await until(lambda: follower.pods.counts["bookmarks"] > marks + 1)
        follower.server.compact("pods")  # the version of the last pod's event is gone
        follower.server.break_off("pods")
        change_much(follower)
        await follower.agree()
        assert (follower.pods.counts["lists"], follower.pods.counts["gone"]) == (1, 0)


async def test_the_same_word_twice_changes_and_tells_nothing() -> None:
    async with following() as follower:
        told, version = follower.told.copy(), follower.state.version
        for number in range(0, 300, 7):
            pod = follower.server.fleet.pods[number]
            data = follower.server.fleet.pod(number, pod)
            for what in ("ADDED", "MODIFIED", "MODIFIED"):
                follower.server.say("pods", what, data)
        events = follower.pods.counts["events"]
        await until(lambda: follower.pods.counts["events"] == events + 129)
        follower.check()
        assert (follower.told, follower.state.version) == (told, version)


async def test_a_pod_bound_to_a_node_that_comes_later_takes_its_place_then() -> None:
    async with following() as follower:
        server, state = follower.server, follower.state
        for number in (1000, 1001):
            server.add_pod(number, PodState(created=time.time()))
            server.start_pod(number, node_name(500))
        uids = [pod_uid(number) for number in (1000, 1001)]
        await until(lambda: all(uid in state.pods and state.pods[uid].node for uid in uids))
        assert all(state.view.node[state.slots[uid]] == -1 for uid in uids)
        server.delete_pod(1001)
        await until(lambda: uids[1] not in state.pods)
        server.change_node(500)
        await follower.agree()
        assert state.view.node[state.slots[uids[0]]] == state.rows[node_name(500)]
        server.delete_node(500)  # before the pod, as when a machine is taken away
        await until(lambda: node_name(500) not in state.rows)
        follower.check()
        server.change_node(500)
        await follower.agree()


async def test_all_pods_going_at_once_leaves_nothing_behind() -> None:
    async with following(pods=2000, page=500) as follower:
        follower.server.fleet.pods.clear()
        follower.server.forget("pods")
        await follower.agree()
        state = follower.state
        assert (state.pods, dict(state.slots), state.life.known()) == ({}, {}, set())
        assert state.view.counts.tolist() == [0, 0]
        assert not state.view.requested.any()
        assert not (state.view.gpu_mask != 0).any()
        assert sum(kind == "deleted" for _, kind in follower.told) == 2000


async def test_the_rest_of_the_process_goes_on_after_each_slice_of_a_list() -> None:
    ticks = itertools.count()
    # A millisecond passes at each look at the clock: the third record of a slice ends it.
    async with following(pods=1000, page=200, monotonic=lambda: next(ticks) / 1000.0) as follower:
        state = follower.state
        follower.server.fleet.pods.clear()
        for number in range(5000, 6000):
            follower.server.fleet.pods[number] = PodState(created=time.time())
        follower.server.forget("pods")
        largest = total = turns = 0
        known = len(state.slots)
        while follower.pods.counts["lists"] == 1:
            changed = abs(len(state.slots) - known)
            largest, total, turns = max(largest, changed), total + changed, turns + 1
            known = len(state.slots)
            if changed and not turns % 50:
                follower.check()  # each slice leaves a sound picture
            await asyncio.sleep(0)
        assert total >= 1990  # every pod came or went before our eyes
        assert largest <= 4
        await follower.agree()
        assert state.view.counts.tolist() == [1000, 0]


@pytest.mark.parametrize("ahead", [3600.0, -3600.0])
async def test_ages_are_right_though_the_api_servers_clock_is_another(ahead: float) -> None:
    async with following(ahead=ahead) as follower:
        state, now = follower.state, time.time()
        for number, pod in follower.server.fleet.pods.items():
            age = now + ahead - pod.created
            slot = state.slots[pod_uid(number)]
            assert now - state.view.arrival[slot] == pytest.approx(age, abs=5.0)
