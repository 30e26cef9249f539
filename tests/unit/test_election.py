"""Who leads, on clocks that the tests turn: the lease's rules, and what the learner reads of it."""

import copy
import random
from pathlib import Path
from typing import Any

import pytest

from agent.cluster import leader_file
from agent.cluster.election import RENEW, Election
from agent.cluster.kubernetes import ApiError
from agent.cluster.leader_file import Leadership
from agent.learning.learn import leadership
from agent.settings import ElectionSettings, Settings

SECONDS = 15.0


class Server:
    """One lease as an API server keeps it: a version, and a write only over the latest."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.away = False
        self.version = 0

    def _answer(self) -> None:
        if self.away:
            raise ConnectionError("away")

    async def read(self) -> dict[str, Any] | None:
        self._answer()
        return copy.deepcopy(self.lease)

    async def create(self, spec: dict[str, Any]) -> dict[str, Any]:
        self._answer()
        if self.lease is not None:
            raise ApiError(409, "there is one")
        return self._keep({"metadata": {"labels": {"kept": "yes"}}, "spec": spec})

    async def replace(self, lease: dict[str, Any]) -> dict[str, Any]:
        self._answer()
        assert self.lease is not None
        if lease["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
            raise ApiError(409, "changed meanwhile")
        return self._keep(lease)

    def _keep(self, lease: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        self.lease = copy.deepcopy(lease)
        self.lease["metadata"]["resourceVersion"] = str(self.version)
        return self.lease

    def renew(self, holder: str) -> None:
        """As kube-scheduler writes it."""
        spec = {"holderIdentity": holder, "leaseDurationSeconds": 15, "renewTime": self.version}
        self._keep({"metadata": {}, "spec": spec})

    @property
    def spec(self) -> dict[str, Any]:
        assert self.lease is not None
        return dict(self.lease["spec"])


class Replica:
    """One election with clocks of its own: ``time`` is monotonic, ``wall`` may be anything."""

    def __init__(self, server: Server, folder: Path, name: str, **settings: Any) -> None:
        self.time, self.wall = 0.0, 1e9
        self.folder = folder / name
        self.told: list[tuple[bool, str]] = []
        self.election = Election(
            ElectionSettings(**{"mode": "lease", "identity": name, "seconds": SECONDS, **settings}),
            server, self.folder, self.folder / "leader.json",
            monotonic=lambda: self.time, clock=lambda: self.wall, rng=random.Random(0),
            changed=lambda leading, holder: self.told.append((leading, holder)), sleep=self._sleep,
        )  # fmt: skip

    async def _sleep(self, seconds: float) -> None:
        self.time += seconds

    async def at(self, time: float) -> bool:
        """Look at that moment; whether it leads then."""
        self.time, self.wall = time, 1e9 + time
        await self.election.step()
        return self.election.leading

    @property
    def learns(self) -> bool:
        settings = Settings(state=self.folder, election=ElectionSettings(mode="lease"))
        return leadership(settings, lambda: self.wall)()


@pytest.fixture
def server() -> Server:
    return Server()


async def test_the_first_leads_and_the_second_waits_for_the_lease_to_lapse(
    server: Server, tmp_path: Path
) -> None:
    a, b = Replica(server, tmp_path, "a"), Replica(server, tmp_path, "b")
    assert await a.at(0.0)
    assert not await b.at(1.0)
    assert (a.learns, b.learns) == (True, False)
    assert await a.at(2.0)  # the last renewal: a is hung or gone
    assert not await b.at(3.0)
    assert not await b.at(3.0 + SECONDS - 0.1)
    assert await b.at(3.0 + SECONDS)
    assert server.spec["leaseTransitions"] == 1
    assert server.lease is not None
    assert server.lease["metadata"]["labels"] == {"kept": "yes"}
    assert not await a.at(3.0 + SECONDS + 1)
    assert (a.learns, b.learns) == (False, True)
    assert a.told == [(True, "a"), (False, "b")]
    assert b.told == [(False, "a"), (True, "b")]


async def test_a_leader_that_cannot_renew_stops_before_another_may_begin(
    server: Server, tmp_path: Path
) -> None:
    a, b = Replica(server, tmp_path, "a"), Replica(server, tmp_path, "b")
    await a.at(0.0)
    await b.at(0.5)
    server.away = True
    assert await a.at(SECONDS * RENEW - 0.1)
    assert not await a.at(SECONDS * RENEW)
    assert not a.learns
    a.election.holder = ""  # nothing depends on what it believes
    server.away = False
    assert await b.at(0.5 + SECONDS)
    assert not a.election.leading


async def test_times_that_are_written_in_the_lease_decide_nothing(
    server: Server, tmp_path: Path
) -> None:
    ahead, b = Replica(server, tmp_path, "a"), Replica(server, tmp_path, "b")
    ahead.time, ahead.wall = 0.0, 1e9 + 1e7  # its clock is months ahead
    await ahead.election.step()
    assert not await b.at(0.0)
    assert not await b.at(SECONDS - 0.1)
    assert await b.at(SECONDS)  # it only matters that the lease did not change


async def test_a_lease_that_was_let_go_is_taken_at_once(server: Server, tmp_path: Path) -> None:
    a, b = Replica(server, tmp_path, "a"), Replica(server, tmp_path, "b")
    await a.at(0.0)
    await b.at(0.0)
    await a.election.release()
    assert (a.election.leading, a.learns) == (False, False)
    assert server.spec["holderIdentity"] == ""
    assert await b.at(0.1)
    await a.election.release()  # not its own any more: left alone
    assert server.spec["holderIdentity"] == "b"


async def test_of_two_that_take_a_free_lease_at_once_one_leads(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = Replica(server, tmp_path, "a"), Replica(server, tmp_path, "b")
    await a.at(0.0)
    await a.election.release()
    seen = copy.deepcopy(server.lease)
    await a.at(1.0)

    async def late() -> dict[str, Any] | None:
        return seen  # what b read before a wrote

    monkeypatch.setattr(server, "read", late)
    assert not await b.at(1.0)
    assert server.spec["holderIdentity"] == "a"


async def test_a_restarted_replica_goes_on_with_its_own_lease(
    server: Server, tmp_path: Path
) -> None:
    first = Replica(server, tmp_path, "a", identity="")
    assert await first.at(0.0)
    again = Replica(server, tmp_path, "a", identity="")
    assert await again.at(1.0)
    assert server.spec["leaseTransitions"] == 0
    elsewhere = Replica(server, tmp_path, "b", identity="")
    assert not await elsewhere.at(1.0)  # the same host name, another state directory


async def test_the_agent_beside_the_active_kube_scheduler_leads(
    server: Server, tmp_path: Path
) -> None:
    beside = Replica(server, tmp_path, "x", mode="follow", identity="node-1")
    other = Replica(server, tmp_path, "y", mode="follow", identity="node-2")
    assert not await beside.at(0.0)  # no lease yet
    server.renew("node-1_6ba7b810")
    assert await beside.at(1.0)
    assert not await other.at(1.0)
    assert not await other.at(2.0)
    for time in (3.0, 5.0):
        server.renew("node-1_6ba7b810")
        assert await beside.at(time)
    assert await beside.at(3.0 + SECONDS * RENEW - 0.1)  # renewed at 3 s or later
    assert not await beside.at(3.0 + SECONDS * RENEW)  # and not since
    assert not await other.at(19.0)
    server.renew("node-2_11d1b4c8")
    assert not await beside.at(20.0)
    assert await other.at(20.0)
    assert server.spec["holderIdentity"] == "node-2_11d1b4c8"  # only looked at


async def test_a_lease_that_was_left_lying_is_followed_by_nobody(
    server: Server, tmp_path: Path
) -> None:
    server.renew("node-1_6ba7b810")
    beside = Replica(server, tmp_path, "x", mode="follow", identity="node-1")
    assert not await beside.at(0.0)
    assert not await beside.at(5.0)
    server.renew("node-1_6ba7b810")
    assert await beside.at(6.0)


async def test_the_last_one_out_is_who_sees_no_other_lead(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    beside = Replica(server, tmp_path, "x", mode="follow", identity="node-1")
    await beside.at(0.0)
    assert await beside.election.last_out()  # no lease: nobody leads
    server.renew("node-1_6ba7b810")
    assert await beside.at(1.0)
    server.renew("")  # its kube-scheduler was told to end in the same moment, and lets go
    assert not await beside.at(2.0)
    assert await beside.election.last_out()
    server.renew("node-2_11d1b4c8")  # nobody looked since
    assert not await beside.election.last_out()
    beside.time += SECONDS  # that one is dead
    assert await beside.election.last_out()
    server.renew("node-2_11d1b4c8")
    a, b = Replica(server, tmp_path, "node-2"), Replica(server, tmp_path, "b")
    assert not await a.at(0.0)
    assert not await a.election.last_out()  # without one to follow a name is the whole of it
    assert await a.at(SECONDS)
    assert await a.election.last_out()
    await b.at(SECONDS + 1.0)
    assert not await b.election.last_out()
    server.away = True
    assert not await b.election.last_out()
    assert "lift-gates" in caplog.text

    class Back(Server):
        """Answers at the second look."""

        async def read(self) -> dict[str, Any] | None:
            away, self.away = self.away, False
            if away:
                raise ConnectionError("away")
            return await super().read()

    back = Back()
    back.renew("")
    back.away = True
    assert await Replica(back, tmp_path, "c", mode="follow").election.last_out()


def test_the_learner_needs_a_leadership_that_holds(tmp_path: Path) -> None:
    settings = Settings(state=tmp_path, election=ElectionSettings(mode="lease"))
    now = [1e9]
    leads = leadership(settings, lambda: now[0])
    assert not leads()  # serving has not said so yet
    leader_file.write(settings.leader_file, Leadership(True, "a", 1e9 + 10.0, SECONDS))
    assert leads()
    now[0] += 10.0
    assert not leads()  # the serving process was killed
    now[0] -= 3600.0
    assert not leads()  # a clock that is set back brings nothing back
    settings.leader_file.write_bytes(b'{"leading": tr')
    assert not leads()
    assert leadership(Settings(state=tmp_path))()  # without an election there is no other
