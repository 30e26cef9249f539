"""Nodes and pods as the agent keeps them: slim records, decoded from what the API server sends.

``agent.cluster.objects`` makes them from list/watch answers and extender requests;
``agent.cluster.state`` turns them into the arrays of a view. Labels and annotations that fedsched
reads or writes are named here.
"""

import math

import msgspec

from agent.cluster.constraints import Scope, Taint

LABEL_JOB_TYPE = "fedsched.io/job-type"
"""Label: the kind of work, such as ``resnet50-bs64``; pods of one job type run alike."""
ANNOTATION_GPU_SHARE = "fedsched.io/gpu-share"
"""Annotation: the part of one GPU that the pod uses, above 0 and below 1."""
ANNOTATION_GPU_MEMORY = "fedsched.io/gpu-memory-gib"
"""Annotation: memory that the pod needs on each of its GPUs, GiB."""
ANNOTATION_GPU_MODELS = "fedsched.io/gpu-models"
"""Annotation: GPU models that the pod accepts, separated by commas; any when absent."""
ANNOTATION_DEADLINE = "fedsched.io/deadline"
"""Annotation: when the pod should be done, RFC 3339."""
ANNOTATION_PROGRESS = "fedsched.io/steps-per-second"
"""Annotation, written by the workload: its progress, steps per second."""
GATE = "fedsched.io/queue"
"""Scheduling gate of pods that let fedsched choose their order and time."""
LABEL_GPU_PRODUCT = "nvidia.com/gpu.product"
LABEL_GPU_MEMORY = "nvidia.com/gpu.memory"
LABEL_GPU_COUNT = "nvidia.com/gpu.count"
LABEL_GPU_REPLICAS = "nvidia.com/gpu.replicas"
LABEL_GPU_SHARING = "nvidia.com/gpu.sharing-strategy"
RESOURCE_GPU = "nvidia.com/gpu"
RESOURCE_GPU_SHARED = "nvidia.com/gpu.shared"


Hardware = tuple[float, float, int, str, float]


class Node(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One node. Memory is GiB, CPU is cores, ``gpu_memory`` is GiB of each GPU."""

    name: str
    cpu: float
    memory: float
    gpus: int = 0
    gpu_model: str = ""
    gpu_memory: float = 0.0
    sharing: str = ""
    """How its GPUs are cut up or handed out, where they are: ``time-slicing``, ``mps``, ``mig`` or
    ``dra`` (known from ResourceSlices alone)."""
    devices: int = 0
    """GPUs in its ResourceSlices where the device plugin advertises none."""
    ready: bool = True
    """Whether it takes new pods: Ready, not cordoned, under no pressure."""
    pressure: tuple[str, ...] = ()
    """Of MemoryPressure, DiskPressure and PIDPressure those that its kubelet reports."""
    labels: dict[str, str] = {}
    taints: tuple[Taint, ...] = ()
    """Those that keep pods away."""
    addresses: tuple[str, ...] = ()

    @property
    def hardware(self) -> Hardware:
        """What its row of the view is made of, but for readiness."""
        return self.cpu, self.memory, self.gpus, self.gpu_model, self.gpu_memory


class Pod(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One pod. Times are Unix seconds of the API server's clock, 0 where not yet."""

    uid: str
    name: str
    namespace: str = "default"
    job_type: str = ""
    cpu: float = 0.0
    memory: float = 0.0
    gpus: int = 0
    """Whole GPUs; 0 where a share of one is asked for."""
    gpu_share: float = 0.0
    gpu_memory: float = 0.0
    gpu_models: tuple[str, ...] = ()
    scheduler: str = "default-scheduler"
    gated: bool = False
    """Whether fedsched's scheduling gate is still on it."""
    gates: tuple[str, ...] = ()
    """All its scheduling gates, in the order in which the API server keeps them."""
    scope: Scope | None = None
    """Where it may go, of a pod behind fedsched's gate; None for anywhere."""
    claims: int = 0
    """Resource claims (DRA): devices that its other requests do not tell."""
    owner: str = ""
    """UID of its controller; empty for a bare pod."""
    index: str = ""
    """What a replacement of it has too: completion index of a Job, name in a StatefulSet."""
    work: str = ""
    """What earlier runs of it have too: namespace, name without what is drawn anew, image."""
    created: float = 0.0
    deadline: float = math.inf
    node: str = ""
    phase: str = "Pending"
    reason: str = ""
    """``OOMKilled`` (with exit code 137), ``Evicted``, ``OutOfcpu``, … of its status, or why it was
    disrupted; empty for none (``agent.cluster.outcomes``)."""
    deleting: bool = False
    """Whether its deletion was asked for before it had ended."""
    started: float = 0.0
    finished: float = 0.0
    steps_per_second: float = 0.0
    """Reported progress; 0 where none was reported."""
    problem: str = ""
    """What is wrong with an annotation that was passed over; empty where all is well."""

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self.phase in ("Succeeded", "Failed")

    @property
    def gang(self) -> int:
        """How many GPUs it runs on: 1 where it shares one, 0 where it uses none."""
        return self.gpus or int(self.gpu_share > 0.0)

    @property
    def standing(self) -> tuple[str, bool, tuple[str, ...]]:
        """What scheduling depends on; progress and conditions are not among it."""
        return self.node, self.done, self.gates

    @property
    def asks(self) -> tuple[float, float, float, tuple[str, ...], Scope | None]:
        """That part of its request which may change while it lives."""
        return self.cpu, self.memory, self.gpu_memory, self.gpu_models, self.scope
