"""Safety around a decision: which nodes are out of the question, and which policy may decide.

Called by extender and queue at each decision, and by ``agent.scheduling.serve``, which looks for a
new policy file once a second. Whatever is wrong with a policy file, the rule decides or the policy
in use goes on; a pod is never left without an answer for it.
"""

import logging
from pathlib import Path

import numpy as np

from agent.arrays import Bools, Ints
from agent.cluster.records import Pod
from agent.cluster.speeds_file import Stamp, stamp
from agent.cluster.state import ClusterState
from agent.cluster.view import GPUS, USAGE_CPU, View
from agent.scheduling.decision import Policy, make_policy
from agent.scheduling.metrics import Metrics
from agent.settings import ServeSettings
from common.features import FEATURES_VERSION
from common.policy import ARCHITECTURE
from common.weights import WeightsFileError, load

log = logging.getLogger(__name__)
HELD_BACK = ("cpu", "gpu_memory")
"""Reasons to hold a node back."""
_EPSILON = 1e-6


def busy(view: View, cpu_limit: float) -> Bools:
    """[N] nodes whose measured CPU use, 0 to 1, is above the limit; unmeasured ones are not."""
    with np.errstate(invalid="ignore"):
        return np.asarray(view.usage[:, USAGE_CPU] > cpu_limit)


def short_of_gpu_memory(state: ClusterState, pod: Pod) -> Bools:
    """[N] nodes whose GPUs have not the memory that the pod asks for on each of its GPUs.

    A pod that shares a GPU needs it to be free by measurement too, where there is one.
    """
    view = state.view
    rows = len(view.ready)
    if not pod.gang or pod.gpu_memory <= 0.0:
        return np.zeros(rows, np.bool_)
    free = np.broadcast_to(view.gpu_memory[:, None], view.gpu_memory_requested.shape)
    if pod.gpu_share:  # neighbours stay on the GPU, a gang's GPUs are its own
        free = free - view.gpu_memory_requested
    there = np.arange(free.shape[1])[None, :] < view.capacity[:, GPUS, None]
    best = np.where(there, free, -1.0).max(axis=1)
    if pod.gpu_share:
        known = len(state.gpu_memory_free)
        best[:known] = np.fmin(best[:known], state.gpu_memory_free)
    return np.asarray(best + _EPSILON < pod.gpu_memory)


def held_back(state: ClusterState, pod: Pod, rows: Ints, cpu_limit: float) -> Ints:
    """[C] why each of ``rows`` may not get the pod: 1 + its place in ``HELD_BACK``, or 0."""
    hot = busy(state.view, cpu_limit)[rows]
    short = short_of_gpu_memory(state, pod)[rows]
    return np.where(hot, 1, np.where(short, 2, 0))


class LivePolicy:
    """The policy in use: the rule, with the learner's correction while a sound file is there."""

    def __init__(self, path: Path, settings: ServeSettings, metrics: Metrics) -> None:
        """Raises KeyError where no rule has the settings' name."""
        self._path, self._settings, self._metrics = path, settings, metrics
        self._rule = make_policy(
            settings.rule, margin=settings.margin, temperature=settings.temperature
        )
        self._stamp: Stamp | None = None
        self.current: Policy = self._rule
        self.version = ""
        """The learned policy's version; empty for the rule alone."""

    def poll(self) -> bool:
        """Look whether the file is another one; True where the policy in use changed."""
        found = stamp(self._path)
        if found == self._stamp:
            return False
        self._stamp = found
        if found is None:
            log.info("%s is gone; the rule %s decides", self._path, self._settings.rule)
            return self._use(self._rule, "")
        try:
            arrays, about = load(self._path)
        except (WeightsFileError, OSError) as error:
            return self._refuse("broken", f"cannot be read: {error}", keep=True)
        features = about.get("features_version", "missing")
        if features != str(FEATURES_VERSION):
            text = f"was made for features version {features}, this agent has {FEATURES_VERSION}"
            return self._refuse("bad_features_version", text, keep=False)
        if about.get("architecture", ARCHITECTURE) != ARCHITECTURE:
            return self._refuse("bad_architecture", "has another network's layers", keep=False)
        try:
            policy = make_policy(
                self._settings.rule,
                arrays,
                margin=self._settings.margin,
                temperature=self._settings.temperature,
            )
        except ValueError as error:
            return self._refuse("broken", str(error), keep=True)
        self._metrics.policy_loads.inc()
        version = about.get("version") or "unnamed"
        log.info("policy %s is in use", version)
        return self._use(policy, version)

    def _refuse(self, reason: str, text: str, *, keep: bool) -> bool:
        self._metrics.policy_failures.labels(reason).inc()
        then = f"{self.version or 'the rule'} goes on" if keep else "the rule decides"
        log.warning("%s %s; %s until the learner writes another", self._path, text, then)
        return False if keep else self._use(self._rule, "")

    def _use(self, policy: Policy, version: str) -> bool:
        changed = self.version != version or self.current is not policy
        self.current, self.version = policy, version
        self._metrics.policy_learned.set(float(policy.learned))
        return changed
