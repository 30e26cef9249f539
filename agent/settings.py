"""Settings of one member, for ``agent serve`` and ``agent learn``: a YAML file, then environment.

Called by ``agent.cli``. ``FEDSCHED_AGENT_STATE`` sets :attr:`Settings.state` and
``FEDSCHED_AGENT_SERVE__PORT`` sets :attr:`ServeSettings.port`; the environment wins over the file.
Both processes of a member read the same file, so that they meet in one state directory.
"""

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings import SettingsError as UnparsedError

from agent.telemetry_settings import TelemetrySettings

PREFIX = "FEDSCHED_AGENT_"
_NESTED = "__"

RuleName = Literal[
    "least-allocated",
    "most-allocated",
    "balanced-allocation",
    "random",
    "fastest",
    "patient",
    "fifo-eft",
    "djct",
    "sjf",
    "sjf-eft",
    "hrrn-eft",
    "priced-djct",
    "priced-eft",
    "fgd",
    "level",
]
"""The rules of scheduling/rules.py but for the oracles, which know what no live cluster tells."""
DEFAULT_RULE: RuleName = "priced-eft"


class SettingsError(ValueError):
    """A setting is unknown or out of range; the message says where and what is allowed."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class KubernetesSettings(_Section):
    """How the API server is reached, and which pod this is."""

    api_url: str = Field(default="", pattern=r"^(http://\S+)?$")
    """Plain HTTP address of a proxy on this machine (``kubectl proxy``) or of the embedded
    cluster; nothing is sent to prove who asks. Empty: a service account or a kubeconfig."""
    kubeconfig: Path | None = None
    """Kubeconfig file. Without one: in a pod its service account, elsewhere what KUBECONFIG names
    or ``~/.kube/config``."""
    context: str = ""
    """Context of the kubeconfig; empty for its current one."""
    in_cluster: Literal["auto", "always", "never"] = "auto"
    """Whether the pod's service account is used: ``auto`` where there is one and no ``kubeconfig``
    is set."""
    service_account: Path = Path("/var/run/secrets/kubernetes.io/serviceaccount")
    """Folder of the service account's ``token``, ``ca.crt`` and ``namespace``."""
    request_seconds: float = Field(default=10.0, gt=0.0)
    """Longest time for one write."""
    namespace: str = ""
    """The agent's own namespace, of its lease and Events; empty for the service account's or the
    context's."""
    pod: str = ""
    """Name of the pod that this process runs in, which its Events are about; empty in a pod for
    the host name, elsewhere for no Events."""
    pod_uid: str = ""
    """UID of that pod, by which ``kubectl describe`` finds its Events."""


class ElectionSettings(_Section):
    """Which of several replicas lifts gates, learns and uploads; all of them answer."""

    mode: Literal["none", "lease", "follow"] = "none"
    """``none``: this one, always. ``lease``: the one that holds a lease of their own. ``follow``:
    the one beside the holder of somebody else's lease, such as kube-scheduler's."""
    name: str = Field(default="fedsched-agent", min_length=1)
    """Name of the lease."""
    namespace: str = ""
    """Namespace of the lease; empty for the agent's own."""
    identity: str = ""
    """Who this is: a name of its own for ``lease``, what the holder's name begins with (up to an
    underscore) for ``follow``. Empty for the host name."""
    seconds: float = Field(default=15.0, ge=3.0)
    """How long a lease lasts that is not renewed (whole seconds count); it is renewed, or looked
    at, every 2/15 of that."""


class ServeSettings(_Section):
    """The decision path: ``agent serve``."""

    host: str = "127.0.0.1"
    """Address that kube-scheduler's extender calls come to; loopback beside kube-scheduler."""
    port: int = Field(default=8089, ge=0, le=65535)
    """Port of the extender; 0 takes a free one (see ``--ready-file``)."""
    health_host: str = ""
    """Address at which health checks and metrics are answered as well, and nothing else: the pod's,
    while the extender stays on loopback. Empty: only at the extender's."""
    health_port: int = Field(default=8090, ge=0, le=65535)
    """Port at ``health_host``; 0 takes a free one."""
    rule: RuleName = DEFAULT_RULE
    """The rule that decides where no learned policy does, by its name in scheduling/rules.py."""
    margin: float = Field(default=0.3, ge=0.0)
    """How much better than the rule's own choice a learned choice must look, in log time."""
    temperature: float = Field(default=0.0, ge=0.0)
    """Softmax temperature of exploration among candidates; 0 always takes the best."""
    seed: int = 0
    """Seed of exploration and of backoff jitter."""
    budget_seconds: float = Field(default=0.05, gt=0.0)
    """Longest time for one answer; beyond it the answer is "no opinion"."""
    stale_seconds: float = Field(default=120.0, gt=0.0)
    """Silence of a watch after which its cluster state is not trusted (bookmarks come each
    minute)."""
    cpu_limit: float = Field(default=0.9, gt=0.0, le=1.0)
    """Measured CPU use, 0 to 1, above which a node gets no further pods."""
    assume_seconds: float = Field(default=30.0, gt=0.0)
    """How long a pod counts as placed where it was sent, until the watch shows where it is."""
    max_job_types: int = Field(default=256, ge=1)
    """Most job types that are told apart; pods with a further one count as job type ``other``."""
    queue: bool = True
    """Whether pods with the gate ``fedsched.io/queue`` are ordered and deferred here."""
    scheduler_names: tuple[str, ...] = ()
    """Only gated pods with one of these in ``schedulerName`` are dealt with, where more than one
    agent works in a cluster; empty for all."""
    queue_seconds: float = Field(default=1.0, gt=0.0)
    """Longest time between two looks at the gated pods; each change of the cluster causes one."""
    max_extra_wait_seconds: float = Field(default=3600.0, ge=0.0)
    """Longest extra wait, in cluster seconds: from when the pod could have started had it been
    first in line. Beyond it its gate is lifted whatever the policy says."""
    watch_timeout_seconds: int = Field(default=300, ge=1)
    """When the API server ends a watch (``timeoutSeconds``); it is then taken up again."""
    read_timeout_seconds: float = Field(default=75.0, gt=0.0)
    """Silence on a watch's socket after which it is opened anew."""


class LearnSettings(_Section):
    """The learner: ``agent learn``."""

    algorithm: Literal["ppo", "dqn"] = "ppo"
    """How the policy learns: ``ppo`` or ``dqn``."""
    options: dict[str, float] = {}
    """Settings of the algorithm that differ from its defaults, by the names in learning/ppo.py or
    learning/dqn.py."""
    seed: int = 0
    """Seed of the network, of minibatches, rollouts and gate windows."""
    batch: int = Field(default=256, ge=1)
    """Most decisions that one learning round takes from the experience."""
    min_batch: int = Field(default=32, ge=1)
    """Decisions that must be ready for a learning round to begin at once."""
    idle_seconds: float = Field(default=60.0, gt=0.0)
    """After this much wall time a round begins with what there is, however little, and with
    simulated rollouts where they are on."""
    poll_seconds: float = Field(default=1.0, gt=0.0)
    """Wall time between two looks at the journal."""
    outcome_wait: float = Field(default=6 * 3600.0, gt=0.0)
    """Cluster seconds after which a decision is learned from though its pod still runs."""
    run_time_prior: float = Field(default=3600.0, gt=0.0)
    """Expected mean run time of jobs, cluster seconds, until some have finished."""
    alpha: float = Field(default=0.1, ge=0.0)
    """Price of a pending pod over one mean run time (learning/reward.py)."""
    beta: float = Field(default=0.01, ge=0.0)
    """Price of unevenly used nodes; spreading works against completion time."""
    gamma: float = Field(default=1.0, ge=0.0)
    """Price of a pod killed or refused for want of room where it was put (an OOM kill, a
    node-pressure eviction, OutOfcpu and the like), in mean run times of a job."""
    delta: float = Field(default=1.0, ge=0.0)
    """Price of a job in the system over one mean run time."""
    rollouts: int = Field(default=0, ge=0)
    """Rollouts on the cluster's own simulator in each learning round; 0 for none."""
    rollout_decisions: int = Field(default=256, ge=2)
    """Decisions of one rollout."""
    labels: int = Field(default=240, ge=0)
    """Most candidates tried on the cluster's own simulator in each learning round, to learn from
    what they would have led to; 0 for none. A hundred cost about a second of one core."""
    gate_rounds: int = Field(default=10, ge=1)
    """Learning rounds between two comparisons of the candidate with the rule."""
    gate_windows: int = Field(default=32, ge=2)
    """Windows of one comparison, at most: what is clear sooner is not run on."""
    gate_jobs: int = Field(default=120, ge=2)
    """Jobs in each window."""
    gate_tolerance: float = Field(default=0.0, ge=0.0)
    """How much worse than the rule the upper end of the interval may be, as a share."""
    gate_tail_tolerance: float = Field(default=0.05, ge=0.0)
    """How much worse than the rule the 99th percentile of completion times may be, as a share."""
    gate_patience: int = Field(default=3, ge=1)
    """Failed comparisons in a row after which learning goes on from the best policy so far."""
    nice: int = Field(default=10, ge=0, le=19)
    """How far the learner gives way to others that want the processor: serving, above all."""
    keep_segments: int = Field(default=4, ge=0)
    """Journal segments kept after they were read, for other readers of the journal."""
    bundle: Path | None = None
    """Enrolment bundle of this member; without one the learner learns alone."""
    upload_rounds: int = Field(default=50, ge=1)
    """Learning rounds after which an upload is due."""
    upload_seconds: float = Field(default=3600.0, gt=0.0)
    """Wall time after which an upload is due."""
    upload_drift: float = Field(default=0.25, gt=0.0)
    """Distance from the shared policy, relative to its norm, past which an upload is due."""
    upload_keep: float = Field(default=1.0, gt=0.0, le=1.0)
    """Share of the entries of each tensor that an upload holds, the largest ones."""
    status_seconds: float = Field(default=15.0, gt=0.0)
    """Wall time between two points of the hub's learning curves."""


class Settings(BaseSettings):
    """One member."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        env_prefix=PREFIX,
        env_nested_delimiter=_NESTED,
        use_attribute_docstrings=True,
    )

    state: Path = Path("fedsched-state")
    """The member's state directory: journal, policies, speeds and experience."""
    clock_scale: float = Field(default=1.0, gt=0.0)
    """Cluster seconds per second of the wall clock; above 1 only for a cluster that replays a
    trace fast."""
    kubernetes: KubernetesSettings = KubernetesSettings()
    election: ElectionSettings = ElectionSettings()
    serve: ServeSettings = ServeSettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    learn: LearnSettings = LearnSettings()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The environment first; what the file said comes as arguments."""
        del settings_cls, dotenv_settings, file_secret_settings
        return env_settings, init_settings

    @property
    def journal_dir(self) -> Path:
        """Where serving appends what it decided."""
        return self.state / "journal"

    @property
    def policy_file(self) -> Path:
        """The policy that is live, a safetensors file."""
        return self.state / "policy" / "current.safetensors"

    @property
    def nodes_file(self) -> Path:
        """What nodes there are, for the learner's simulator (``agent.cluster.nodes_file``)."""
        return self.state / "nodes.json"

    @property
    def waits_file(self) -> Path:
        """Since when gated pods wait more than they have to (``agent.scheduling.extra_wait``)."""
        return self.state / "waits.json"

    @property
    def leader_file(self) -> Path:
        """Whether this replica leads (``agent.cluster.leader_file``)."""
        return self.state / "leader.json"

    @property
    def speeds_file(self) -> Path:
        """What the learner predicts about speeds (``agent.cluster.speeds_file``)."""
        return self.state / "speeds.json"


def load(path: Path | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """Read the file (none: defaults), then the environment.

    ``environ`` is what is looked through for unknown names; values come from the process's own
    environment. Raises SettingsError, naming the setting and its source.
    """
    names = os.environ if environ is None else environ
    for name in names:
        if name.startswith(PREFIX):
            first = name[len(PREFIX) :].split(_NESTED)[0].lower()
            if first not in Settings.model_fields:
                raise SettingsError(
                    f"environment variable {name}: no such setting{_hint(first, Settings)}"
                )
    try:
        return Settings(**_read(path))
    except ValidationError as error:
        where = f"{path} or the environment" if path else "the environment"
        problems = "; ".join(_problem(part) for part in error.errors())
        raise SettingsError(f"settings from {where}: {problems}") from error
    except UnparsedError as error:
        raise SettingsError(
            f"settings from the environment ({PREFIX}…): {error}; a mapping or a list is written "
            "there as JSON"
        ) from error


def _read(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        content = yaml.safe_load(path.read_text("utf-8"))
    except FileNotFoundError:
        raise SettingsError(f"{path}: no such settings file; check --config") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingsError(f"{path} is not a readable YAML file: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise SettingsError(f"{path} must hold settings as 'name: value' lines")
    return content


def _hint(name: str, model: type[BaseModel]) -> str:
    near = difflib.get_close_matches(name, model.model_fields, n=1)
    known = ", ".join(sorted(model.model_fields))
    return f"; did you mean {near[0]!r}?" if near else f"; known are {known}"


def _problem(part: Mapping[str, Any]) -> str:
    place = ".".join(str(step) for step in part["loc"])
    if part["type"] != "extra_forbidden":
        return f"{place}: {part['msg']} (it is {part['input']!r})"
    model: type[BaseModel] = Settings
    for step in part["loc"][:-1]:
        model = type(model.model_fields[str(step)].default)
    return f"{place}: no such setting{_hint(str(part['loc'][-1]), model)}"
