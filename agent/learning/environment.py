"""The embedded cluster as a Gymnasium environment, for people who bring their own algorithm.

Once this module is imported, ``gymnasium.make`` knows ``fedsched/Queue-v0`` (order, wait and place)
and ``fedsched/Place-v0`` (place only); ``docs/environment.md`` is their page. Candidates, features
and physics are the live agent's own kernels, the reward is the learner's.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from agent.cluster.view import RUNNING
from agent.learning.reward import DEFAULT_WEIGHTS, Interval, RewardWeights, rewards
from agent.scheduling.candidates import MAX_QUEUE_CANDIDATES, new_candidates
from agent.scheduling.decision import seed_kernels
from agent.scheduling.rules import RULES
from agent.simulator import splits
from agent.simulator.hardware import SpeedTable, load_speeds
from agent.simulator.nodes import NodeMix, node_mix
from agent.simulator.runs import result
from agent.simulator.simulation import Simulation, new_simulation
from agent.simulator.stepping import new_ledger, next_choice, semantics, take_row
from agent.simulator.workloads import Options, Workload, fastest_s, synthetic
from common.features import FEATURE_COUNT

Observation = dict[str, Any]

NINE_NODES = {"v100": 3, "p100": 3, "k80": 3}
FEATURE_LIMIT = 10.0
"""Observed features are clipped to ±this; all but freak values lie within ±3."""
_MOST_SEEDS = 1 << 31


class SchedulingEnvironment(gymnasium.Env[Observation, np.int64]):
    """One episode is one workload on one cluster, from its first job to the end of its last.

    Each step is one decision between at least two candidates; where there is but one, the
    environment takes it. An action is a row of the observation.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 - as Gymnasium declares it

    def __init__(
        self,
        *,
        place_only: bool = False,
        rule: str | None = None,
        nodes: Mapping[str, int] | None = None,
        clusters: Sequence[str] | None = None,
        part: splits.Part = "train",
        arrivals: str = "poisson",
        jobs: int = 100,
        load: tuple[float, float] = (0.6, 1.2),
        shared: float = 0.3,
        weights: RewardWeights = DEFAULT_WEIGHTS,
        strict: bool = False,
    ) -> None:
        """An environment; nothing is drawn before the first reset.

        Args:
            place_only: the next pod is given, and its candidates are the nodes with room.
                Otherwise candidates are pods on nodes, and waiting.
            rule: orders the pods and scores the candidates (``rule_scores``); by default
                ``priced-eft``, or ``priced-djct``, which never waits, where one only places.
            nodes: nodes of 8 GPUs by GPU type.
            clusters: virtual clusters whose job mixes episodes draw from; all whose traces are
                there by default.
            part: ``train``, or ``validation`` to choose between what was trained.
            arrivals: ``poisson`` or ``uniform``.
            jobs: jobs of an episode.
            load: an episode's offered load is drawn evenly between these.
            shared: chance that a one-GPU job asks for half a GPU, if two like it fit.
            weights: prices of the reward's terms.
            strict: an action outside the mask raises ValueError. Otherwise it is a bind that
                fails: it costs a kill, and the next decision is after the next event.

        Raises:
            ValueError: an argument is out of range, or the rule waits where one only places.
            SealedError: ``part`` is ``sealed``, which is there to judge by.
            KeyError: no such cluster. TraceError: its trace is missing or malformed.
        """
        name = rule or ("priced-djct" if place_only else "priced-eft")
        if name not in RULES:
            raise ValueError(f"no rule {name!r}; there are {', '.join(RULES)}")
        low, high = load
        if not 0.0 < low <= high < np.inf:
            raise ValueError(f"load is a range such as (0.6, 1.2), got {load}")
        names = splits.available() if clusters is None else tuple(clusters)
        if jobs < 2 or not names:
            raise ValueError(f"need at least 2 jobs and 1 cluster, got {jobs} and {names}")
        self.what = semantics(RULES[name], place_only=place_only)
        self.speeds: SpeedTable = load_speeds()
        self.nodes: NodeMix = node_mix(NINE_NODES if nodes is None else nodes)
        if place_only and len(self.nodes) > MAX_QUEUE_CANDIDATES:
            raise ValueError(
                f"{len(self.nodes)} nodes do not fit {MAX_QUEUE_CANDIDATES} rows; "
                "take fewer, or fedsched/Queue-v0, which offers the best node of each type"
            )
        # A shipped slice may end before a later part begins; a cluster without jobs draws none.
        parts = (splits.part_jobs(name, part) for name in names)
        self._traces = [found for found in parts if len(found)]
        if not self._traces:
            raise ValueError(
                f"no {part} jobs of {', '.join(names)}: set FEDSCHED_TRACES to whole traces"
            )
        self._arrivals, self._jobs, self._load = arrivals, jobs, (low, high)
        self._options, self._weights, self._strict = Options(shared=shared), weights, strict
        rows = MAX_QUEUE_CANDIDATES
        self.observation_space = spaces.Dict(
            {
                "features": spaces.Box(
                    -FEATURE_LIMIT, FEATURE_LIMIT, (rows, FEATURE_COUNT), np.float32
                ),
                "rule_scores": spaces.Box(-FEATURE_LIMIT, 0.0, (rows,), np.float32),
                "action_mask": spaces.Box(0, 1, (rows,), np.int8),
            }
        )
        self.action_space = spaces.Discrete(rows)
        self._out = new_candidates(rows)
        self._sim: Simulation | None = None
        self._count, self._rule_row = 0, -1

    def draw(self, rng: np.random.Generator) -> Workload:
        """A workload as an episode draws it."""
        return synthetic(
            self._traces[int(rng.integers(len(self._traces)))],
            self.speeds,
            self.nodes,
            arrivals=self._arrivals,
            count=self._jobs,
            load=float(rng.uniform(*self._load)),
            seed=int(rng.integers(_MOST_SEEDS)),
            options=self._options,
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode; ``options={"workload": w}`` plays that workload and draws none."""
        super().reset(seed=seed)
        given = (options or {}).get("workload")
        workload = self.draw(self.np_random) if given is None else given
        if not isinstance(workload, Workload) or not len(workload):
            raise ValueError(f"options['workload'] is a Workload with jobs, not {given!r}")
        self._seed = int(self.np_random.integers(_MOST_SEEDS))
        self._sim = new_simulation(workload, self.nodes, self.speeds, seed=self._seed)
        self._mean_run_seconds = float(fastest_s(workload, self.speeds).mean())
        self._eligible = np.ones(len(workload), np.bool_)
        self._ledger = new_ledger(len(workload), 1)
        self._steps = 0
        self._go_on()
        return self._observation(), self._info()

    def step(self, action: np.int64 | int) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Take the candidate in row ``action``; the reward is for what happens until the next.

        Raises:
            ValueError: the action is no candidate, and the environment is strict.
            gymnasium.error.ResetNeeded: the episode has ended, or none has begun.
        """
        sim = self._sim
        if sim is None or self._count == 0:
            raise gymnasium.error.ResetNeeded("the episode is over; call reset()")
        row = int(action)
        infeasible = not 0 <= row < self._count
        if infeasible and self._strict:
            raise ValueError(
                f"action {row} is no candidate: rows 0 to {self._count - 1} are; choose where "
                "action_masks() is true (sb3-contrib's MaskablePPO does)"
            )
        before = self._ledger.sums.copy()
        kills = int(self._ledger.killed[0])
        if not infeasible:
            take_row(sim, self._out, row, self._ledger, -1)
        elif sim.cluster.counts[RUNNING] > 0:
            self._ledger.moment[0] = 0
        else:  # nothing runs whose end could bring a further decision
            take_row(sim, self._out, self._rule_row, self._ledger, -1)
        self._go_on()
        pending, jobs, imbalance = (self._ledger.sums - before)[:, None]
        killed = np.array([float(self._ledger.killed[0] - kills) + float(infeasible)])
        earned = rewards(
            Interval(pending, jobs, imbalance, killed), self._mean_run_seconds, self._weights
        )
        self._steps += 1
        info = self._info() | {"infeasible": infeasible}
        return self._observation(), float(earned.total[0]), self._count == 0, False, info

    def action_masks(self) -> npt.NDArray[np.bool_]:
        """[64] true for candidates: what sb3-contrib's MaskablePPO asks for."""
        return np.arange(MAX_QUEUE_CANDIDATES) < self._count

    def _go_on(self) -> None:
        """Run to the next decision."""
        assert self._sim is not None
        # Kernels draw ties from one stream a process: seeded anew at each step, environments that
        # take turns in a process do not disturb each other.
        seed_kernels((self._seed + 1_000_003 * self._steps) % _MOST_SEEDS)
        self._count, self._rule_row = next_choice(
            self._sim, self.what, self._eligible, self._out, self._ledger
        )

    def _observation(self) -> Observation:
        rows, count = MAX_QUEUE_CANDIDATES, self._count
        features = np.zeros((rows, FEATURE_COUNT), np.float32)
        scores = np.zeros(rows, np.float32)
        features[:count] = np.clip(self._out.features[:count], -FEATURE_LIMIT, FEATURE_LIMIT)
        scores[:count] = self._out.rule_scores[:count]
        mask = self.action_masks().astype(np.int8)
        return {"features": features, "rule_scores": scores, "action_mask": mask}

    def _info(self) -> dict[str, Any]:
        assert self._sim is not None
        told: dict[str, Any] = {
            "action_mask": self.action_masks().astype(np.int8),
            "rule_action": self._rule_row,
            "time": float(self._sim.cluster.clock[0]),
        }
        if self._count == 0:
            ended = result(self._sim)
            told |= {
                "mean_completion": ended.mean,
                "p99": ended.p99,
                "makespan": ended.makespan,
                "unfinished": ended.unfinished,
                "oom_kills": ended.oom_kills,
            }
        return told


_ENTRY_POINT = f"{__name__}:{SchedulingEnvironment.__name__}"
gymnasium.register("fedsched/Queue-v0", entry_point=_ENTRY_POINT)
gymnasium.register("fedsched/Place-v0", entry_point=_ENTRY_POINT, kwargs={"place_only": True})
