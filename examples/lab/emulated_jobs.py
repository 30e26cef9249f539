"""The emulated jobs at the API server: a Job each, a pod for each attempt, and what becomes of it.

emulated_cluster.py tells what happened, this writes it down. The emulator is the controller of
these Jobs (``spec.managedBy``) and the kubelet of their pods.
"""

import asyncio
import math
from collections.abc import Callable
from typing import Any

from agent.cluster.records import (
    ANNOTATION_GPU_MEMORY,
    ANNOTATION_GPU_MODELS,
    LABEL_GPU_MEMORY,
    LABEL_GPU_PRODUCT,
)
from agent.simulator import manifest
from agent.simulator.job_objects import JobObjects
from agent.simulator.store import Json
from examples.lab.kubelet import EMULATED, MANAGER, Container, refused
from examples.lab.writes import MERGE, STRATEGIC, Writes

_AT_ONCE = {"gracePeriodSeconds": 0}


class EmulatedJobs:
    """Jobs and pods of one workload in one namespace, by slot."""

    def __init__(
        self,
        objects: JobObjects,
        writes: Writes,
        stamp: Callable[[], str],
        *,
        namespace: str,
        keep_seconds: float,
    ) -> None:
        """``stamp`` gives the API server's time now; ended pods stay ``keep_seconds``, wall."""
        self._objects, self._writes, self._stamp = objects, writes, stamp
        self._namespace, self._keep = namespace, keep_seconds
        self._pods_path = f"/api/v1/namespaces/{namespace}/pods"
        self._jobs_path = f"/apis/batch/v1/namespaces/{namespace}/jobs"
        self.names = [""] * len(objects.jobs)
        """Name of each job's last pod; empty before its first."""
        self._attempts = [0] * len(objects.jobs)
        self._owners: list[Json | None] = [None] * len(objects.jobs)
        self._containers = [Container() for _ in objects.jobs]
        self._later: set[asyncio.TimerHandle] = set()

    def create(self, slot: int, created: float) -> str:
        """Make the pod of the job's next attempt; its name."""
        attempt, job = self._attempts[slot], self._objects.jobs[slot]
        self._attempts[slot] += 1
        pod = self._objects.pod(slot, attempt, created)
        name = self.names[slot] = str(pod["metadata"]["name"])
        self._containers[slot] = Container()
        metadata, spec = pod["metadata"], pod["spec"]
        metadata = {
            "name": name,
            "namespace": self._namespace,
            "labels": {**metadata["labels"], EMULATED: "true"},
            "annotations": metadata["annotations"],
        }
        spec = {**spec, "terminationGracePeriodSeconds": 0, **_affinity(metadata["annotations"])}

        async def step() -> None:
            owner = self._owners[slot]
            if owner is None:
                owner = self._owners[slot] = await self._make_job(job, spec)
            body = {"apiVersion": "v1", "kind": "Pod", "spec": spec}
            body["metadata"] = {**metadata, "ownerReferences": [owner]}
            await self._writes.request("POST", self._pods_path, body)

        self._writes.submit(job, step)
        return name

    async def _make_job(self, name: str, spec: Json) -> Json:
        body = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": name, "namespace": self._namespace, "labels": {EMULATED: "true"}},
            "spec": {
                "managedBy": MANAGER,
                "template": {"metadata": {"labels": {EMULATED: "true"}}, "spec": spec},
            },
        }
        made = await self._writes.request("POST", self._jobs_path, body)
        if made is None:  # an answer that was lost, or a run before this one
            made = await self._writes.request("GET", f"{self._jobs_path}/{name}") or {}
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "name": name,
            "uid": made["metadata"]["uid"],
            "controller": True,
        }

    def runs(self, slot: int) -> None:
        """The last pod's container started."""
        self._patch_status(slot, self._containers[slot].runs(self._stamp()))

    def ended(self, slot: int, *, oom: bool, last: bool) -> None:
        """The last pod's container ended; ``last`` says that the job has no further attempt."""
        self._patch_status(slot, self._containers[slot].ended(oom=oom, when=self._stamp()))
        self._clear_away(slot, last=last)

    def refused(self, slot: int, reason: str) -> None:
        """The kubelet did not run the last pod."""
        self._patch_status(slot, refused(reason, self._stamp()))
        self._clear_away(slot, last=False)

    def deleted(self, slot: int, *, waits: bool) -> None:
        """Somebody deleted the last pod, and perhaps its job too; ``waits`` where the API server
        keeps it until its kubelet says that the container is gone."""
        self._owners[slot] = None
        if waits:
            self._delete(slot, self.names[slot])

    def progress(self, slot: int, steps_per_second: float) -> None:
        """The last pod reports its progress."""
        item: Json = {"metadata": {"annotations": {}}}
        manifest.progress(item, steps_per_second)
        path = f"{self._pods_path}/{self.names[slot]}"
        self._writes.write(self._objects.jobs[slot], "PATCH", path, item, MERGE)

    def _patch_status(self, slot: int, patch: Json) -> None:
        path = f"{self._pods_path}/{self.names[slot]}/status"
        self._writes.write(self._objects.jobs[slot], "PATCH", path, patch, STRATEGIC)

    def _clear_away(self, slot: int, *, last: bool) -> None:
        """Delete the last pod, and the job with its last, after a while: etcd stays small."""
        name, job = self.names[slot], self._objects.jobs[slot]

        def delete() -> None:
            self._later.discard(handle)
            self._delete(slot, name)
            if last:
                body = {"propagationPolicy": "Background"}
                self._writes.write(job, "DELETE", f"{self._jobs_path}/{job}", body)

        handle = asyncio.get_running_loop().call_later(self._keep, delete)
        self._later.add(handle)

    def _delete(self, slot: int, name: str) -> None:
        path, body = f"{self._pods_path}/{name}", dict[str, Any](_AT_ONCE)
        self._writes.write(self._objects.jobs[slot], "DELETE", path, body)

    def close(self) -> None:
        """Delete nothing any more."""
        for handle in self._later:
            handle.cancel()


def _affinity(annotations: dict[str, str]) -> Json:
    """What tells any scheduler which GPUs will do: kube-scheduler does not read our annotations."""
    wanted = []
    if models := annotations.get(ANNOTATION_GPU_MODELS):
        wanted.append({"key": LABEL_GPU_PRODUCT, "operator": "In", "values": models.split(",")})
    if memory := annotations.get(ANNOTATION_GPU_MEMORY):
        below = math.ceil(float(memory) * 1024.0) - 1  # labels are whole MiB
        wanted.append({"key": LABEL_GPU_MEMORY, "operator": "Gt", "values": [str(below)]})
    if not wanted:
        return {}
    terms = {"nodeSelectorTerms": [{"matchExpressions": wanted}]}
    return {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}}
