"""Tells operators when decisions fall back to kube-scheduler's own, and when that is over.

Run by ``agent.scheduling.member``. It only compares what the metrics already count, a few times a
minute, so that no decision waits for it, and leaves wording and rate to one place.
"""

import asyncio
from collections.abc import Callable

from agent.cluster.events import EventRecorder
from agent.scheduling.metrics import CAUSES, REASONS, Metrics

LOOK_SECONDS = 5.0
_LIFTED = {
    "overdue": ("GatesOverdue", "waited longer than max_extra_wait_seconds allows"),
    "hopeless": ("PodsTooLarge", "no node could hold, however empty"),
    "state_lost": ("GatesLifted", "could not be decided on, for the watches are silent"),
}
_ANSWERS = {
    "deadline_exceeded": "took longer than budget_seconds",
    "internal_error": "failed by an error of the agent's own; its log has it",
    "unheard": "came after it had given up: the agent hung, or is short of CPU",
    "bad_request": "were asked for in a way that cannot be read: does this kube-scheduler fit?",
}


class Alarms:
    """What was told already, and what it was told from."""

    def __init__(
        self,
        events: EventRecorder,
        metrics: Metrics,
        *,
        fresh: Callable[[], bool],
        silent: Callable[[], float],
    ) -> None:
        """``silent`` gives for how long the watches have said nothing, seconds."""
        self._events, self._metrics, self._fresh, self._silent = events, metrics, fresh, silent
        self._was_fresh: bool | None = None
        self._counts: dict[tuple[str, str], float] = {}
        self._refused = False

    async def run(self) -> None:
        """Never returns; end it by cancelling its task."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self.look()

    def look(self) -> None:
        """Compare with the last look, and tell what has changed."""
        self._look_at_state()
        self._look_at_policy()
        for cause in CAUSES:
            count = self._more("queue_released", cause=cause)
            if count and cause in _LIFTED:
                reason, text = _LIFTED[cause]
                self._events.tell(reason, f"{count:.0f} gates were lifted from pods that {text}")
        for why in REASONS:
            count = self._more("extender_no_opinion", reason=why)
            if count and why in _ANSWERS:
                self._events.tell(
                    "NoOpinion",
                    f"kube-scheduler decided alone {count:.0f} times: answers {_ANSWERS[why]}",
                )

    def _look_at_state(self) -> None:
        fresh = self._fresh()
        if fresh and self._was_fresh is False:
            self._events.tell(
                "WatchFresh",
                "the cluster's state is known again; fedsched decides",
                "Normal",
                ends="WatchStale",
            )
        elif self._was_fresh and not fresh:
            self._events.tell(
                "WatchStale",
                f"the API server has not been heard for {self._silent():.0f} s; kube-scheduler "
                "decides alone",
                ends="WatchFresh",
            )
        if fresh or self._was_fresh is not None:  # the first list may take its time
            self._was_fresh = fresh

    def _look_at_policy(self) -> None:
        reasons = ("broken", "bad_features_version", "bad_architecture")
        for reason in reasons:
            if self._more("policy_failures", reason=reason):
                self._refused = True
                self._events.tell(
                    "PolicyRefused",
                    f"the learned policy is not taken into use ({reason}); the one before it or "
                    "the rule decides",
                    ends="PolicyInUse",
                )
        if self._more("policy_loads") and self._refused:
            self._refused = False
            self._events.tell(
                "PolicyInUse", "a learned policy decides again", "Normal", ends="PolicyRefused"
            )

    def _more(self, name: str, **labels: str) -> float:
        """By how much a counter went up since the last look."""
        key = (name, "".join(labels.values()))
        count = self._metrics.registry.get_sample_value(f"fedsched_{name}_total", labels) or 0.0
        before, self._counts[key] = self._counts.get(key, 0.0), count
        return count - before
