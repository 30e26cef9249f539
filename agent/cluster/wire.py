"""The parts of Kubernetes objects that are decoded, under the API's own names.

``agent.cluster.objects`` decodes list/watch answers into these and makes slim records of them. What
is not named here is skipped by the decoder, which is what makes a list of 100,000 pods bearable.
"""

import msgspec
from msgspec import field

from agent.cluster.constraints import Taint, Term, Toleration
from agent.cluster.outcomes import Terminated


class Owner(msgspec.Struct, frozen=True):
    kind: str = ""
    name: str = ""
    uid: str = ""
    controller: bool | None = None


class Meta(msgspec.Struct, frozen=True, rename="camel"):
    name: str
    generate_name: str = ""
    uid: str = ""
    namespace: str = "default"
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    deletion_grace_period_seconds: float | None = None
    owner_references: list[Owner] | None = None


Quantities = dict[str, str | int | float]


class Resources(msgspec.Struct, frozen=True):
    requests: Quantities | None = None
    limits: Quantities | None = None


class Container(msgspec.Struct, frozen=True, rename="camel"):
    image: str = ""
    resources: Resources | None = None
    restart_policy: str | None = None


class Gate(msgspec.Struct, frozen=True):
    name: str


class PodSpec(msgspec.Struct, frozen=True, rename="camel"):
    containers: list[Container] | None = None
    init_containers: list[Container] | None = None
    overhead: Quantities | None = None
    node_name: str | None = None
    scheduler_name: str = "default-scheduler"
    scheduling_gates: list[Gate] | None = None
    resource_claims: list[Gate] | None = None


class ContainerState(msgspec.Struct, frozen=True):
    terminated: Terminated | None = None


class ContainerStatus(msgspec.Struct, frozen=True, rename="camel"):
    state: ContainerState | None = None
    last_state: ContainerState | None = None


class Condition(msgspec.Struct, frozen=True):
    type: str
    status: str
    reason: str | None = None


class PodStatus(msgspec.Struct, frozen=True, rename="camel"):
    phase: str = "Pending"
    reason: str | None = None
    start_time: str | None = None
    container_statuses: list[ContainerStatus] | None = None
    init_container_statuses: list[ContainerStatus] | None = None
    conditions: list[Condition] | None = None


class Pod(msgspec.Struct, frozen=True):
    metadata: Meta
    spec: PodSpec = field(default_factory=PodSpec)
    status: PodStatus = field(default_factory=PodStatus)


class NodeSelector(msgspec.Struct, frozen=True, rename="camel"):
    node_selector_terms: tuple[Term, ...] | None = None


class NodeAffinity(msgspec.Struct, frozen=True, rename="camel"):
    required: NodeSelector | None = field(
        default=None, name="requiredDuringSchedulingIgnoredDuringExecution"
    )


class Affinity(msgspec.Struct, frozen=True, rename="camel"):
    node_affinity: NodeAffinity | None = None


class Whereabouts(msgspec.Struct, frozen=True, rename="camel"):
    node_selector: dict[str, str] | None = None
    affinity: Affinity | None = None
    tolerations: tuple[Toleration, ...] | None = None


class PodPlaces(msgspec.Struct, frozen=True):
    """A pod once more, for where it may go: only gated pods are asked."""

    spec: Whereabouts = field(default_factory=Whereabouts)


class NodeSpec(msgspec.Struct, frozen=True):
    unschedulable: bool | None = None
    taints: tuple[Taint, ...] | None = None


class Address(msgspec.Struct, frozen=True):
    address: str


class NodeStatus(msgspec.Struct, frozen=True):
    allocatable: Quantities | None = None
    conditions: list[Condition] | None = None
    addresses: list[Address] | None = None


class Node(msgspec.Struct, frozen=True):
    metadata: Meta
    spec: NodeSpec = field(default_factory=NodeSpec)
    status: NodeStatus = field(default_factory=NodeStatus)


class NodeMetrics(msgspec.Struct, frozen=True):
    metadata: Meta
    usage: Quantities


class Pool(msgspec.Struct, frozen=True):
    name: str = ""
    generation: int = 0


class Attribute(msgspec.Struct, frozen=True):
    string: str | None = None


class Capacity(msgspec.Struct, frozen=True):
    value: str | int | float = 0


class Device(msgspec.Struct, frozen=True):
    attributes: dict[str, Attribute] | None = None
    capacity: dict[str, Capacity] | None = None


class SliceSpec(msgspec.Struct, frozen=True, rename="camel"):
    driver: str = ""
    node_name: str | None = None
    pool: Pool = field(default_factory=Pool)
    devices: list[Device] | None = None


class ResourceSlice(msgspec.Struct, frozen=True):
    metadata: Meta
    spec: SliceSpec = field(default_factory=SliceSpec)


class DeviceClassSpec(msgspec.Struct, frozen=True, rename="camel"):
    extended_resource_name: str | None = None


class DeviceClass(msgspec.Struct, frozen=True):
    metadata: Meta
    spec: DeviceClassSpec = field(default_factory=DeviceClassSpec)
