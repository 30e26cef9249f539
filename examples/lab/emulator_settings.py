"""Settings of the node emulator: a YAML file, read and checked for emulator.py."""

import math
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from agent.simulator.cluster_settings import LiveSettings, read_settings


class EmulatorSettings(LiveSettings):
    """The nodes and jobs that it adds to a real cluster."""

    name: str = "lab"
    """Shown in progress and result."""
    kubeconfig: Path
    """Credentials of an administrator of the cluster."""
    namespace: str = Field(default="default", min_length=1)
    """Namespace of the jobs; made where it is missing."""
    keep_seconds: float = Field(default=10.0, ge=0.0)
    """Wall seconds that an ended pod stays, for watchers to see how it ended."""
    retry_seconds: float = Field(default=1.0, gt=0.0)
    """Wall seconds until the next attempt of a job whose pod the kubelet refused."""
    hostname_label: str = Field(default="Hostname", pattern="^[Hh]ostname$")
    """How the GPU metrics name their node: newer exporters say ``hostname``."""

    @field_validator("clock_scale")
    @classmethod
    def _paced(cls, scale: float) -> float:
        if math.isinf(scale):
            raise ValueError("a real cluster lives in real time: give a finite clock_scale")
        return scale


def load_settings(path: Path | None = None, **changes: Any) -> EmulatorSettings:
    """The settings in a YAML file with ``changes`` over them. Errors: SettingsError."""
    return read_settings(EmulatorSettings, path, **changes)
