"""GPUs that nodes advertise by ResourceSlices (dynamic resource allocation) and not as resources.

Run by ``agent.scheduling.member`` beside the watch of nodes. A cluster without the API, or an agent
without the right to read it, is as one without such devices. A node's slices fill in what its own
object does not say: how many GPUs, which model, how much memory. They count as room for pods that
ask for ``nvidia.com/gpu`` where a DeviceClass stands for that resource; otherwise they are only
known, for pods then claim devices in a way that kube-scheduler alone can judge.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from contextlib import aclosing

import msgspec

from agent.cluster import wire
from agent.cluster.kubernetes import FAILURES, ApiError, Client, GoneError
from agent.cluster.listing import Listing
from agent.cluster.objects import GIB, MANY_GPUS, ObjectError, quantity
from agent.cluster.records import RESOURCE_GPU, Node
from agent.cluster.reflector import Reflector

SLICES = "/apis/resource.k8s.io/v1/resourceslices"
CLASSES = "/apis/resource.k8s.io/v1/deviceclasses"
RETRY_SECONDS = 300.0
"""How soon an API that is not there, or not allowed, is tried again."""
DRA = "dra"

log = logging.getLogger(__name__)
_decode_slice = msgspec.json.Decoder(wire.ResourceSlice).decode
_decode_class = msgspec.json.Decoder(wire.DeviceClass).decode


class Slice(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs of one ResourceSlice; ``gpus`` 0 where it is of other devices or of no one node."""

    name: str
    node: str = ""
    pool: str = ""
    generation: int = 0
    gpus: int = 0
    model: str = ""
    memory: float = 0.0
    """GiB of each."""


class DeviceClass(msgspec.Struct, frozen=True):
    """One DeviceClass, and the extended resource that it stands for; empty for none."""

    name: str
    resource: str


def resource_slice(data: bytes | msgspec.Raw) -> Slice:
    """A resource.k8s.io/v1 ResourceSlice. Raises ObjectError."""
    try:
        raw = _decode_slice(data)
        spec = raw.spec
        found = [device for device in spec.devices or () if _is_gpu(spec.driver, device)]
        first = found[0] if found else wire.Device()
        memory = (first.capacity or {}).get("memory")
        return Slice(
            name=raw.metadata.name,
            node=spec.node_name or "",
            pool=spec.pool.name,
            generation=spec.pool.generation,
            gpus=min(len(found), MANY_GPUS) if spec.node_name else 0,
            model=_text(first, "productName") or _text(first, "model"),
            memory=quantity(memory.value) / GIB if memory is not None else 0.0,
        )
    except (msgspec.DecodeError, ValueError) as error:
        raise ObjectError(f"a ResourceSlice that cannot be read: {error}") from error


def device_class(data: bytes | msgspec.Raw) -> DeviceClass:
    """A resource.k8s.io/v1 DeviceClass. Raises ObjectError."""
    try:
        raw = _decode_class(data)
        return DeviceClass(raw.metadata.name, raw.spec.extended_resource_name or "")
    except msgspec.DecodeError as error:
        raise ObjectError(f"a DeviceClass that cannot be read: {error}") from error


def _text(device: wire.Device, name: str) -> str:
    value = (device.attributes or {}).get(name)
    return value.string or "" if value is not None else ""


def _is_gpu(driver: str, device: wire.Device) -> bool:
    """Drivers are called ``gpu.<vendor>``; slices of a GPU have another ``type``."""
    return driver.startswith("gpu.") and _text(device, "type") in ("", "gpu")


class Devices:
    """The ResourceSlices of one cluster and what they add to its nodes."""

    def __init__(
        self,
        client: Client,
        nodes: Mapping[str, Node],
        apply: Callable[[Node], None],
        *,
        monotonic: Callable[[], float],
        rng: random.Random,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        """``nodes`` are those of the cluster state by name, ``apply`` gives it a changed one."""
        self._client, self._nodes, self._apply = client, nodes, apply
        self._retry = retry_seconds
        self._slices: dict[str, Slice] = {}
        self._classes: dict[str, str] = {}
        self.state = "unknown"
        """``ok``, ``absent``, ``refused``, or ``unknown`` while the API server has not answered."""
        self._watches = (
            Reflector(
                client,
                CLASSES,
                device_class,
                listing=lambda: Listing(
                    self._classes, lambda one: one.name, self.change_class, self._miss_class
                ),
                change=self.change_class,
                monotonic=monotonic,
                rng=rng,
            ),
            Reflector(
                client,
                SLICES,
                resource_slice,
                listing=lambda: Listing(
                    self._slices, lambda one: one.name, self.change_slice, self._miss_slice
                ),
                change=self.change_slice,
                monotonic=monotonic,
                rng=rng,
            ),
        )

    async def run(self) -> None:
        """Watch for ever where the API is there; end it by cancelling its task."""
        while not await self._available():
            await asyncio.sleep(self._retry)
        async with asyncio.TaskGroup() as tasks:
            for watch in self._watches:
                tasks.create_task(watch.run())

    async def _available(self) -> bool:
        before = self.state
        try:
            for path in (CLASSES, SLICES):
                async with aclosing(self._client.pages(path)) as pages:
                    async for _ in pages:
                        break
            self.state = "ok"
        except ApiError as error:
            known = {404: "absent", 401: "refused", 403: "refused"}
            self.state = known.get(error.status, "unknown")
            if self.state == "refused" != before:
                log.warning(
                    "ResourceSlices cannot be read (%s); grant list and watch of resourceslices "
                    "and deviceclasses in resource.k8s.io",
                    error,
                )
        except (GoneError, *FAILURES):
            self.state = "unknown"
        return self.state == "ok"

    def completed(self, node: Node) -> Node:
        """The node as its object has it, with what its slices say where it has no GPU itself."""
        if node.gpus and node.sharing != DRA:
            return node
        mine = [one for one in self._slices.values() if one.node == node.name and one.gpus]
        newest: dict[str, int] = {}
        for one in mine:
            newest[one.pool] = max(newest.get(one.pool, 0), one.generation)
        mine = [one for one in mine if one.generation == newest[one.pool]]
        count = sum(one.gpus for one in mine)
        if not count:
            return msgspec.structs.replace(
                node, gpus=0, devices=0, sharing="", gpu_model="", gpu_memory=0.0
            )
        counts = RESOURCE_GPU in self._classes.values()
        return msgspec.structs.replace(
            node,
            gpus=count if counts else 0,
            devices=count,
            sharing=DRA,
            gpu_model=mine[0].model,
            gpu_memory=mine[0].memory,
        )

    def change_slice(self, one: Slice, deleted: bool = False) -> None:
        """Take in a slice that came, changed or went."""
        old = self._slices.pop(one.name, None)
        if not deleted:
            self._slices[one.name] = one
        for name in {one.node, old.node if old is not None else ""}:
            self._again(name)

    def _miss_slice(self, name: str) -> None:
        if name in self._slices:
            self.change_slice(self._slices[name], deleted=True)

    def change_class(self, one: DeviceClass, deleted: bool = False) -> None:
        """Take in a class that came, changed or went."""
        before = RESOURCE_GPU in self._classes.values()
        self._classes.pop(one.name, None)
        if not deleted:
            self._classes[one.name] = one.resource
        if before != (RESOURCE_GPU in self._classes.values()):
            for name in {found.node for found in self._slices.values()}:
                self._again(name)

    def _miss_class(self, name: str) -> None:
        if name in self._classes:
            self.change_class(DeviceClass(name, ""), deleted=True)

    def _again(self, name: str) -> None:
        node = self._nodes.get(name)
        if node is not None:
            self._apply(self.completed(node))
