"""What became of pods, told from the watch of a real API server with its controllers."""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import kubernetes
import pytest

from agent.cluster import objects
from agent.cluster.access import Access
from agent.cluster.clock import SteadyClock
from agent.cluster.kubernetes import NODES, PODS, Client
from agent.cluster.reflector import Reflector
from agent.cluster.state import ClusterState
from agent.journal import Journal, PodEvent, Progress
from agent.learning.speeds import sample
from agent.learning.store import Store
from examples.lab.control_plane import ControlPlane, node_manifest, pod_manifest
from tests.kubernetes.agents import reaching

EMULATED = {"fedsched.io/emulated": "true"}
"""No kubelet and no kwok looks after these pods: the test plays their kubelet."""
TAINT = {"key": "outcomes", "value": "only", "effect": "NoSchedule"}
NODE = "outcomes-0"
Json = dict[str, Any]


class Watcher:
    """The watching part of an agent, and what it told."""

    def __init__(self, client: Client) -> None:
        self.events: list[PodEvent | Progress] = []
        steady = SteadyClock(time.time, time.monotonic)
        self.state = ClusterState(
            clock=steady.now, ahead=steady.ahead, emit=self.events.append, spec=lambda _: None
        )
        common: Json = {"monotonic": time.monotonic, "rng": random.Random(0)}
        self.nodes = Reflector(
            client, NODES, objects.node, listing=self.state.list_nodes,
            change=self.state.apply_node, **common,
        )  # fmt: skip
        self.pods = Reflector(
            client, PODS, objects.pod, listing=self.state.list_pods,
            change=self.state.apply_pod, **common,
        )  # fmt: skip

    def of(self, name: str) -> list[PodEvent]:
        """What was told of a pod, by UID."""
        return [e for e in self.events if isinstance(e, PodEvent) and e.uid == name]

    def kinds(self, uid: str) -> list[str]:
        return [event.kind for event in self.of(uid)]


@contextlib.asynccontextmanager
async def watching(access: Access) -> AsyncIterator[Watcher]:
    async with access.session() as session:
        watcher = Watcher(Client(session, access.url))
        tasks = [asyncio.create_task(r.run()) for r in (watcher.nodes, watcher.pods)]
        try:
            await watcher.pods.synced.wait()
            await watcher.nodes.synced.wait()
            yield watcher
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def until(ok: Callable[[], bool], what: str) -> None:
    try:
        async with asyncio.timeout(240.0):  # it only bounds a failing test
            while not ok():
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"it never came about that {what}") from None


class Kubelet:
    """Plays the kubelet of the test's node through the API."""

    def __init__(self, lab: ControlPlane, namespace: str) -> None:
        self.core: Any = kubernetes.client.CoreV1Api(lab.api())
        self.batch: Any = kubernetes.client.BatchV1Api(lab.api())
        self.namespace, self.lab = namespace, lab
        self._began: dict[str, str] = {}  # by name: a pod starts once

    def spec(self, name: str, **changes: Any) -> Json:
        pod = pod_manifest(name, namespace=self.namespace, labels=EMULATED, **changes)
        pod["spec"] |= {
            "nodeSelector": {"kubernetes.io/hostname": NODE},
            "tolerations": [{"key": "outcomes", "operator": "Exists", "effect": "NoSchedule"}],
        }
        return pod

    def create(self, name: str, **changes: Any) -> str:
        made = self.core.create_namespaced_pod(self.namespace, self.spec(name, **changes))
        return str(made.metadata.uid)

    def job(self, name: str) -> None:
        template = self.spec(name, cpu="100m")
        spec = {
            "template": {"metadata": {"labels": EMULATED}, "spec": template["spec"]},
            "backoffLimit": 3,
        }
        self.batch.create_namespaced_job(self.namespace, {"metadata": {"name": name}, "spec": spec})

    def of_job(self, name: str) -> list[tuple[str, str]]:
        """(name, UID) of a job's pods, oldest first."""
        found = self.core.list_namespaced_pod(
            self.namespace, label_selector=f"batch.kubernetes.io/job-name={name}"
        ).items
        found.sort(key=lambda pod: pod.metadata.creation_timestamp)
        return [(pod.metadata.name, pod.metadata.uid) for pod in found]

    def status(self, name: str, phase: str, **more: Any) -> None:
        began = self._began.setdefault(name, datetime.now(UTC).isoformat())
        body = {"status": {"phase": phase, "startTime": began, **more}}
        self.core.patch_namespaced_pod_status(name, self.namespace, body)

    def ended(self, name: str, phase: str, reason: str, code: int) -> None:
        now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        terminated = {"reason": reason, "exitCode": code, "startedAt": now, "finishedAt": now}
        container = {
            "name": "main", "image": "i", "imageID": "", "ready": False, "restartCount": 0,
            "state": {"terminated": terminated},
        }  # fmt: skip
        self.status(name, phase, containerStatuses=[container])

    def delete(self, name: str) -> None:
        self.core.delete_namespaced_pod(name, self.namespace, grace_period_seconds=0)


@pytest.fixture
def kubelet(lab: ControlPlane, namespace: str) -> Any:
    """The test's own node, which other tests' pods do not tolerate, and its kubelet."""
    lab.create_nodes([node_manifest(NODE, cpu=8, taints=[TAINT])])
    made = Kubelet(lab, namespace)
    yield made
    made.core.delete_node(NODE)


async def call(function: Callable[..., Any], *arguments: Any) -> Any:
    return await asyncio.to_thread(function, *arguments)


async def test_every_outcome_is_told_once_from_the_watch(
    lab: ControlPlane, kubelet: Kubelet, tmp_path: Path
) -> None:
    with reaching(lab.kubeconfig) as access:
        async with watching(access) as agent:
            names = ("finished", "oom", "evicted", "disrupted", "misplaced", "deleted", "waited")
            uids = {}
            for name in names:
                cpu = "100" if name == "waited" else "100m"
                uids[name] = await call(lambda n=name, c=cpu: kubelet.create(n, cpu=c))
            bound = [uids[name] for name in names[:-1]]
            await until(lambda: all("bound" in agent.kinds(u) for u in bound), "pods are bound")
            for name in names[:-2]:
                if name != "misplaced":
                    await call(kubelet.status, name, "Running")
            await call(kubelet.status, "deleted", "Running")
            await until(
                lambda: all("started" in agent.kinds(uids[n]) for n in ("finished", "deleted")),
                "pods have started",
            )
            await call(kubelet.ended, "finished", "Succeeded", "Completed", 0)
            await call(kubelet.ended, "oom", "Failed", "OOMKilled", 137)
            await call(lambda: kubelet.status("evicted", "Failed", reason="Evicted"))
            await call(lambda: kubelet.status("misplaced", "Failed", reason="OutOfcpu"))
            eviction = {"metadata": {"name": "disrupted", "namespace": kubelet.namespace}}
            await call(
                lambda: kubelet.core.create_namespaced_pod_eviction(
                    "disrupted", kubelet.namespace, eviction
                )
            )
            await call(kubelet.delete, "deleted")
            await call(kubelet.delete, "waited")
            ends = {name: name for name in names} | {"waited": "deleted"}
            await until(
                lambda: all(ends[name] in agent.kinds(uids[name]) for name in names),
                "every end is told",
            )
            told = {name: agent.kinds(uid) for name, uid in uids.items()}
            assert told["waited"] == ["created", "deleted"]
            assert told["misplaced"] == ["created", "bound", "started", "misplaced"]
            for name in names[:-2]:
                assert told[name][:2] == ["created", "bound"]
                assert len(set(told[name])) == len(told[name])
            [bound_event] = [e for e in agent.of(uids["oom"]) if e.kind == "bound"]
            assert bound_event.node == NODE
            assert 0.0 < bound_event.pending_seconds < 240.0
            reasons = {name: agent.of(uid)[-1].reason for name, uid in uids.items()}
            assert reasons["disrupted"] == "EvictionByEvictionAPI"
            assert (reasons["oom"], reasons["misplaced"]) == ("OOMKilled", "OutOfcpu")
        # A new process lists the pods that are left, and the learner's store takes nothing twice.
        journal = Journal(tmp_path / "journal")
        for event in agent.events:
            journal.append(event)
        async with watching(access) as again:
            left = [uids[name] for name in ("finished", "oom", "evicted", "misplaced")]
            for uid in left:
                assert again.kinds(uid)[-1] == agent.kinds(uid)[-1]
                # By the API server's word, which is of whole seconds.
                bound, started = (one.time for one in agent.of(uid)[1:3])
                assert bound - 1.0 <= again.of(uid)[1].time <= started
        journal.close()
        store = Store(tmp_path / "experience.sqlite")
        store.ingest(tmp_path / "journal", sample)
        before = {uid: set(store.events(uid)) for uid in uids.values()}
        journal = Journal(tmp_path / "journal")
        for event in again.events:
            journal.append(event)
        journal.close()
        store.ingest(tmp_path / "journal", sample)
        assert {uid: set(store.events(uid)) for uid in uids.values()} == before
        assert store.counter("pods_oom") == 1.0
        assert store.counter("repeated_events") >= 4.0


async def test_a_pod_that_the_job_controller_made_anew_goes_on_with_the_job(
    lab: ControlPlane, kubelet: Kubelet, tmp_path: Path
) -> None:
    with reaching(lab.kubeconfig) as access:
        async with watching(access) as agent:
            await call(kubelet.job, "train")
            await until(lambda: bool(kubelet.of_job("train")), "the job has a pod")
            [(first, old)] = await call(kubelet.of_job, "train")
            await until(lambda: "bound" in agent.kinds(old), "it is bound")
            await call(kubelet.status, first, "Running")
            await call(
                lambda: kubelet.core.create_namespaced_pod_eviction(
                    first, kubelet.namespace,
                    {"metadata": {"name": first, "namespace": kubelet.namespace}},
                )
            )  # fmt: skip
            await until(
                lambda: any(uid != old for _, uid in kubelet.of_job("train")), "it is replaced"
            )
            [(second, new)] = [p for p in await call(kubelet.of_job, "train") if p[1] != old]
            await until(lambda: "bound" in agent.kinds(new), "the new one is bound")
            await call(kubelet.ended, second, "Succeeded", "Completed", 0)
            await until(lambda: "finished" in agent.kinds(new), "it is finished")
            assert "disrupted" in agent.kinds(old)
            created = {uid: agent.of(uid)[0] for uid in (old, new)}
            assert [created[uid].job for uid in (old, new)] == [old, old]
            assert [created[uid].attempt for uid in (old, new)] == [0, 1]
    journal = Journal(tmp_path / "journal")
    for event in (*agent.of(old), *agent.of(new)):
        journal.append(event)
    journal.close()
    store = Store(tmp_path / "experience.sqlite")
    store.ingest(tmp_path / "journal", sample)
    [seconds] = store.completion_seconds()
    assert seconds == pytest.approx(agent.of(new)[-1].time - created[old].time)


async def test_kube_schedulers_preemption_and_a_taint_are_told_from_a_deletion(
    lab: ControlPlane, kubelet: Kubelet
) -> None:
    urgent = {"metadata": {"name": "outcomes-urgent"}, "value": 1000}
    api: Any = kubernetes.client.SchedulingV1Api(lab.api())
    await call(api.create_priority_class, urgent)
    try:
        with reaching(lab.kubeconfig) as access:
            async with watching(access) as agent:
                modest = await call(lambda: kubelet.create("modest", cpu="6"))
                await until(lambda: "bound" in agent.kinds(modest), "the modest one is bound")
                important = kubelet.spec("important", cpu="6")
                important["spec"]["priorityClassName"] = "outcomes-urgent"
                await call(kubelet.core.create_namespaced_pod, kubelet.namespace, important)
                await until(lambda: "preempted" in agent.kinds(modest), "it is preempted")
                tainted = await call(lambda: kubelet.create("tainted", cpu="100m"))
                await until(lambda: "bound" in agent.kinds(tainted), "the next one is bound")
                taint = TAINT | {"key": "away", "effect": "NoExecute"}
                body = {"spec": {"taints": [TAINT, taint]}}
                await call(kubelet.core.patch_node, NODE, body)
                await until(lambda: "disrupted" in agent.kinds(tainted), "the taint drove it away")
                end = agent.of(tainted)[-1]
                assert end.reason == "DeletionByTaintManager"
                # Nodes and pods are watched apart, and the one may be behind the other.
                await until(
                    lambda: "away" in {taint.key for taint in agent.state.nodes[NODE].taints},
                    "the taint is seen",
                )
    finally:
        await call(api.delete_priority_class, "outcomes-urgent")
