"""Settings of the embedded cluster: a YAML file, read and checked for cluster.py.

They name the jobs, the nodes, the pace of the clock and the scheduler's extender.
"""

import math
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from agent.settings import SettingsError
from agent.simulator.extender_client import ExtenderSettings
from agent.simulator.hardware import SpeedTable
from agent.simulator.nodes import NodeMix, node_mix
from agent.simulator.tables import trace_file
from agent.simulator.traces import read_jobs
from agent.simulator.workloads import Options, Workload, synthetic, window


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class NodeSettings(_Section):
    """The nodes, all of one size."""

    counts: dict[str, int] = {"k80": 3, "p100": 3, "v100": 3}
    """Nodes by GPU type."""
    gpus: int = Field(default=8, ge=1, le=8)
    """GPUs of each node."""
    cpu_per_gpu: float = Field(default=8.0, gt=0.0)
    """CPU cores for each GPU."""
    memory_per_gpu: float = Field(default=48.0, gt=0.0)
    """Host memory for each GPU, GiB."""
    cpu_only: int = Field(default=0, ge=0)
    """Further nodes without GPUs."""

    def build(self) -> NodeMix:
        """The nodes; Errors: ValueError for a GPU type that has no measured speeds."""
        return node_mix(
            self.counts,
            gpus=self.gpus,
            cpu_per_gpu=self.cpu_per_gpu,
            memory_per_gpu=self.memory_per_gpu,
            cpu_only=self.cpu_only,
        )


class WorkloadSettings(_Section):
    """The jobs."""

    trace: str = "gavel/msr_seed0_103959.csv"
    """A trace file: its place in the traces' folder, or its path."""
    virtual_cluster: str | None = None
    """Take only this virtual cluster of the trace."""
    arrivals: Literal["trace", "poisson", "uniform"] = "trace"
    """``trace``: a window of the trace as it came. Otherwise jobs drawn from its mix."""
    first: int = Field(default=0, ge=0)
    """First usable job of the window (arrivals: trace)."""
    jobs: int = Field(default=200, ge=2)
    """How many jobs."""
    load: float = Field(default=0.8, gt=0.0, le=10.0)
    """Offered GPU work relative to what the nodes can do; arrivals are stretched to it."""
    seed: int = Field(default=0, ge=0)
    """Seed of all that is drawn about the jobs."""
    shared: float = Field(default=0.0, ge=0.0, le=1.0)
    """Chance that a small one-GPU job asks for half a GPU instead."""
    longest: float = Field(default=math.inf, gt=0.0)
    """Seconds on the fastest GPU to which longer jobs are cut."""
    exceed: float = Field(default=0.01, gt=0.0, lt=1.0)
    """Share of the jobs whose memory use passes their request, for host and GPU memory each."""

    def build(self, speeds: SpeedTable, nodes: NodeMix) -> Workload:
        """The jobs; Errors: TraceError for the file, ValueError for what cannot be made of it."""
        path = Path(self.trace)
        jobs = read_jobs(
            path if path.is_absolute() else trace_file(self.trace), self.virtual_cluster
        )
        options = Options(shared=self.shared, exceed=self.exceed, longest=self.longest)
        if self.arrivals == "trace":
            return window(
                jobs,
                speeds,
                nodes,
                load=self.load,
                start=self.first,
                stop=self.first + self.jobs,
                seed=self.seed,
                options=options,
            )
        return synthetic(
            jobs,
            speeds,
            nodes,
            arrivals=self.arrivals,
            count=self.jobs,
            load=self.load,
            seed=self.seed,
            options=options,
        )


class LiveSettings(_Section):
    """One cluster with jobs that live at a pace, whoever its API server is."""

    name: str = "embedded"
    """Shown in progress and result."""
    host: str = "127.0.0.1"
    """Address that it serves HTTP at; it has no authentication, so leave it on loopback."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of that; 0 takes a free one, which the ready file names."""
    seed: int = Field(default=0, ge=0)
    """Seed of UIDs, reported progress, telemetry noise and the scheduler's ties."""
    clock_scale: float = Field(default=600.0, gt=0.0)
    """Cluster seconds per wall second; ``.inf`` runs as fast as possible, the clock standing while
    the scheduler is at work."""
    wait_for_start: bool = False
    """Whether the clock stands until somebody sends ``POST /fedsched/start``."""
    until: float = Field(default=math.inf, gt=0.0)
    """Cluster seconds after which it ends although jobs are left."""
    gated: bool = False
    """Whether pods come with fedsched's scheduling gate, for an agent to lift."""
    scheduler_name: str = Field(default="default-scheduler", min_length=1)
    """``schedulerName`` of the pods."""
    progress_seconds: float = Field(default=900.0, gt=0.0)
    """Cluster seconds between two reports of a running pod's steps/s; a changed rate is reported at
    once."""
    progress_noise: float = Field(default=0.03, ge=0.0, lt=1.0)
    """Standard deviation of the reported rate relative to the true one."""
    linger_seconds: float = Field(default=0.0, ge=0.0)
    """Wall seconds that it goes on serving after the last job, for watchers to see its end."""
    nodes: NodeSettings = NodeSettings()
    workload: WorkloadSettings = WorkloadSettings()


class ClusterSettings(LiveSettings):
    """One embedded cluster."""

    extender: ExtenderSettings | None = None
    """The scheduler's extender; none: its own scores decide."""
    history: int = Field(default=8192, ge=16)
    """Changes that a watch may lag behind before it must list again."""
    bookmark_seconds: float = Field(default=10.0, gt=0.0)
    """Wall seconds between two bookmarks of a watch that asked for them."""

    @model_validator(mode="after")
    def _consistent(self) -> "ClusterSettings":
        if self.gated and math.isinf(self.clock_scale):
            raise ValueError(
                "gated pods need a finite clock_scale: whoever lifts the gates lives in real time"
            )
        return self


Live = TypeVar("Live", bound=LiveSettings)


def load_settings(path: Path | None = None, **changes: Any) -> ClusterSettings:
    """An embedded cluster's settings, see :func:`read_settings`."""
    return read_settings(ClusterSettings, path, **changes)


def read_settings(kind: type[Live], path: Path | None = None, **changes: Any) -> Live:
    """The settings in a YAML file (none: the defaults) with ``changes`` over them.

    Errors: SettingsError that names the file, the setting and what is allowed.
    """
    content: Any = {}
    if path is not None:
        try:
            content = yaml.safe_load(path.read_text("utf-8"))
        except FileNotFoundError:
            raise SettingsError(f"{path}: no such settings file; check --config") from None
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise SettingsError(f"{path} is not a readable YAML file: {error}") from error
        if content is None:
            content = {}
        if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
            raise SettingsError(f"{path} must hold settings as 'name: value' lines")
    try:
        return kind(**{**content, **changes})
    except ValidationError as error:
        where = str(path) if path is not None else "cluster settings"
        problems = "; ".join(
            f"{'.'.join(map(str, part['loc'])) or 'settings'}: {part['msg']}"
            + (f" (it is {part['input']!r})" if part["loc"] else "")
            for part in error.errors()
        )
        raise SettingsError(f"{where}: {problems}") from error
