"""What the suite ``federation`` runs, as ``federation.yaml`` says it, and the members' clusters.

Read by ``agent.benchmark.federation`` and by what makes its policies and speed tables.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from agent.benchmark.suite import BySize, Count
from agent.scheduling.rules import RULES
from agent.simulator import splits
from agent.simulator.hardware import SpeedTable, load_speeds
from agent.simulator.nodes import NodeMix, node_mix
from agent.simulator.workloads import Options, Workload, synthetic


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One member's cluster."""

    trace: str
    nodes: dict[str, int]
    shared: float = 0.0

    def __post_init__(self) -> None:
        known = splits.splits()
        if self.trace not in known:
            raise ValueError(f"no split for trace {self.trace!r}; there are {', '.join(known)}")
        node_mix(self.nodes)
        Options(shared=self.shared)


class Training(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How each member learns."""

    seeds: BySize[Count]
    labels: BySize[Count]
    jobs: int
    share: float
    others: int
    horizon: float
    rounds: int
    steps: int
    minibatch: int
    learning_rate: float

    def __post_init__(self) -> None:
        for name in ("jobs", "share", "others", "horizon", "rounds", "steps", "minibatch"):
            if not getattr(self, name) > 0:
                raise ValueError(f"training.{name} must be above 0, got {getattr(self, name)}")
        if not self.learning_rate > 0:
            raise ValueError(f"training.learning_rate must be above 0, got {self.learning_rate}")


class Liar(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a lying member sends in place of its change."""

    scale: float = 1.0
    random: float = 0.0
    pods: int = 0
    broken: bool = False

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale) or self.random < 0 or self.pods < 0:
            raise ValueError("a liar has a finite scale, a norm and pods that are not below 0")


class Speeds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How members learn speeds and what becomes of them."""

    load: float
    windows: int
    noise: float
    spread: float
    peers: tuple[int, ...]
    liar_factor: float

    def __post_init__(self) -> None:
        if self.liar_factor <= 0 or min(self.peers, default=-1) < 0:
            raise ValueError("peers are counts of 0 or more, and liar_factor is above 0")


class Data(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of ``federation.yaml``."""

    load: float
    rule: str
    margin: float
    jobs: int
    windows: BySize[Count]
    sizes: tuple[int, ...]
    members: dict[str, Member]
    training: Training
    arms: dict[str, dict[str, Any]]
    liar_members: int
    robust: dict[str, dict[str, Any]]
    liars: dict[str, Liar]
    speeds: Speeds

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"no rule {self.rule!r}; there are {', '.join(RULES)}")
        if not self.load > 0 or not self.margin >= 0:
            raise ValueError("load is a number above 0, and margin one that is not below 0")
        if any(" " in name for name in self.members):
            raise ValueError("a member's name has no blank in it")
        if taken := {"rule", "alone", "average"} & self.arms.keys():
            raise ValueError(f"arms: the name {min(taken)!r} is taken; choose another")
        if "fedavg" not in self.arms or "fedavg" not in self.robust:
            raise ValueError("arms and robust need 'fedavg', which others are compared with")
        if min(self.sizes, default=0) < 1:
            raise ValueError("sizes are counts of members, at least 1")


@dataclass(frozen=True)
class Cluster:
    """A member's cluster, its jobs and its true speeds."""

    name: str
    member: Member

    @cached_property
    def nodes(self) -> NodeMix:
        """Its nodes."""
        return node_mix(self.member.nodes)

    @property
    def options(self) -> Options:
        """What the trace does not say of its jobs."""
        return Options(shared=self.member.shared)

    def drawn(self, speeds: SpeedTable, *, jobs: int, load: float, seed: int) -> Workload:
        """Jobs drawn from the train part of its trace, arriving at random, to learn from."""
        return synthetic(
            splits.part_jobs(self.member.trace, "train"), speeds, self.nodes,
            arrivals="poisson", count=jobs, load=load, seed=seed, options=self.options,
        )  # fmt: skip

    def sealed(self, speeds: SpeedTable, *, jobs: int, count: int) -> list[splits.Window]:
        """Windows to judge by; none where the sealed part is too short."""
        return splits.windows(
            self.member.trace, "sealed", speeds, self.nodes,
            length=jobs, count=count, evaluation=True,
        )  # fmt: skip

    def site_speeds(self, spread: float) -> SpeedTable:
        """The measured speeds as they are at this site: ``spread`` is the deviation of their log.

        No two clusters run the same work at quite the same speed.
        """
        measured = load_speeds()
        rng = np.random.default_rng([int.from_bytes(self.name.encode()[:6]), 11])
        error = rng.normal(0.0, spread, measured.speed.shape)
        return replace(measured, speed=measured.speed * np.exp(error))


def clusters(members: Mapping[str, Member]) -> list[Cluster]:
    """The clusters of the members that can take part: their trace is there, and whole.

    A slice of a trace that ends before the sealed part gives nothing to judge by. This is seen by
    the part before it, for who learns asks as well and must not open the sealed one.
    """
    found = []
    for name, member in members.items():
        if member.trace in splits.available():
            first, last = splits.splits()[member.trace].validation
            if len(splits.part_jobs(member.trace, "validation")) == last - first:
                found.append(Cluster(name, member))
    return found
