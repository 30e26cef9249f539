"""Settings of the hub: a YAML file, then environment variables; read by its commands and server.

A field ``round_timeout`` is set in the file by its name and in the environment by
``FEDSCHED_COORDINATOR_ROUND_TIMEOUT``, which wins.
"""

import difflib
import os
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict
from pydantic_settings import SettingsError as UnparsedError

StrategyName = Literal["fedavg", "fedprox", "fedmedian", "fedtrimmedavg", "krum", "multikrum"]

PREFIX = "FEDSCHED_COORDINATOR_"


class SettingsError(ValueError):
    """The settings cannot be read or a value is out of range; the message names it."""


class CoordinatorSettings(BaseSettings):
    """All settings of ``fedsched coordinator``."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, extra="forbid", use_attribute_docstrings=True
    )

    state_dir: Path = Path("fedsched-coordinator")
    """Directory of the CA, the registry and the policies; made if it is not there."""
    registry_url: str = ""
    """SQLAlchemy URL of the registry; empty: SQLite in ``state_dir``."""
    listen: str = "0.0.0.0:8443"
    """Address of the members' link; port 0 takes a free one."""
    public_address: str = ""
    """``host:port`` that members dial, written into their bundles; empty: the first of
    ``server_names`` with the port of ``listen``."""
    server_names: list[str] = Field(default=["localhost", "127.0.0.1"], min_length=1)
    """Host names and IP addresses in the hub's certificate; the first is the name that members
    check."""
    dashboard_listen: str = "127.0.0.1:8080"
    """Address of dashboard, metrics and health checks; port 0 takes a free one. It has no sign-in:
    open it to others only behind a proxy that has."""

    strategy: StrategyName = "fedmedian"
    """How updates are aggregated: ``fedavg`` and ``fedprox`` weigh by scheduled pods, so that who
    claims the most decides; ``fedmedian``, ``fedtrimmedavg``, ``krum`` and ``multikrum`` withstand
    lying members, the median from three members on."""
    proximal_mu: float = Field(default=0.01, ge=0.0)
    """FedProx: weight of the pull towards the shared policy."""
    eta: float = Field(default=0.25, ge=0.0, le=1.0)
    """Share of a member's own policy in what it gets back; the rest is the shared policy."""
    trim: float = Field(default=0.2, ge=0.0, lt=0.5)
    """``fedtrimmedavg``: share cut off at either end."""
    malicious_members: int = Field(default=0, ge=0)
    """``krum``, ``multikrum``: how many members may lie; needs 2 f + 3 members."""
    selected_members: int = Field(default=2, ge=1)
    """``multikrum``: how many updates are averaged."""

    min_members: int = Field(default=1, ge=1)
    """A round begins when this many members are connected."""
    round_timeout: float = Field(default=7200.0, gt=0.0)
    """Seconds until a round closes without the members that have not answered; longer than the
    members' own upload interval (an hour)."""
    round_pause: float = Field(default=0.0, ge=0.0)
    """Least seconds between the end of a round and the next."""
    idle_pause: float = Field(default=1.0, ge=0.0)
    """Seconds before the next round when a round had no valid update; doubles up to a minute while
    that goes on, so that members with nothing to say do not keep the hub spinning."""
    max_rounds: int = Field(default=0, ge=0)
    """Stop after this round; 0: go on for ever."""

    free_delta_norm: float = Field(default=5.0, ge=0.0)
    """A member's change up to this norm is never set aside for its size, so that a newcomer is
    heard although the others hardly change any more."""
    norm_factor: float = Field(default=10.0, ge=1.0)
    """Beyond that, the largest norm as a multiple of the median of the round and earlier rounds."""
    max_delta_norm: float = Field(default=100.0, gt=0.0)
    """Largest norm of a change, whatever the others send."""
    max_examples: int = Field(default=1_000_000, ge=1)
    """Most scheduled pods that one update may claim."""
    speed_clip: float = Field(default=0.5, gt=0.0)
    """How far one member's mean log speed may lie from the median of the members' means (0.5: a
    factor 1.6); beyond it, it is moved to that bound, or of two members neither is believed."""

    max_message_bytes: int = Field(default=16 << 20, ge=1 << 16)
    """Largest message that the hub takes from a member."""
    kept_policies: int = Field(default=10, ge=1)
    """How many rounds' policies are kept on disk."""
    metric_points: int = Field(default=2000, ge=1)
    """Points kept of each learning curve."""
    event_limit: int = Field(default=10_000, ge=1)
    """Events kept."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least severe messages that are written to standard error."""

    @field_validator("listen", "dashboard_listen", "public_address")
    @classmethod
    def _has_port(cls, value: str) -> str:
        host, _, port = value.rpartition(":")
        if value and not (host and port.isdecimal() and int(port) < 65536):
            raise ValueError("must be host:port")
        return value

    @property
    def database(self) -> str:
        """URL of the registry."""
        return self.registry_url or f"sqlite:///{(self.state_dir / 'registry.db').absolute()}"

    @property
    def ca_dir(self) -> Path:
        """Directory of the CA and of the hub's certificate."""
        return self.state_dir / "identity"

    @property
    def policy_dir(self) -> Path:
        """Directory of the global policies."""
        return self.state_dir / "policies"

    @property
    def dialled(self) -> str:
        """``host:port`` that a bundle tells its member."""
        return self.public_address or f"{self.server_names[0]}:{self.listen.rpartition(':')[2]}"


def load_settings(path: Path | None = None, **overrides: Any) -> CoordinatorSettings:
    """Read the file ``path`` (if any), the environment that wins over it, and ``overrides``.

    Raises:
        SettingsError: the file cannot be read, a name is unknown, or a value has the wrong type or
            range.
    """
    known = CoordinatorSettings.model_fields
    for variable in os.environ:
        name = variable.upper().removeprefix(PREFIX).lower()
        if variable.upper().startswith(PREFIX) and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}"
            raise SettingsError(f"environment variable {variable}: no such setting; {hint}")
    values: dict[str, Any] = {}
    if path is not None:
        try:
            read = yaml.safe_load(path.read_text()) or {}
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise SettingsError(f"cannot read the settings file {path}: {error}") from error
        if not isinstance(read, dict) or not all(isinstance(name, str) for name in read):
            raise SettingsError(f"{path} must hold names and values, one 'name: value' a line")
        # A value given here would win over the environment; the file must not.
        set_outside = {name.upper() for name in os.environ}
        values = {k: v for k, v in read.items() if f"{PREFIX}{k}".upper() not in set_outside}
    try:
        return CoordinatorSettings(**{**values, **overrides})
    except ValidationError as error:
        wrong = "; ".join(
            f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()
        )
        raise SettingsError(f"settings{f' in {path}' if path else ''}: {wrong}") from error
    except UnparsedError as error:
        raise SettingsError(
            f"settings from the environment ({PREFIX}…): {error}; a list is written there as JSON"
        ) from error
