"""What ``agent serve`` counts, for ``/metrics``; extender, guard, queue and recorder write it."""

from collections.abc import Callable
from typing import cast

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

# A second series for each counter, which nobody reads (the library's function has no types).
cast(Callable[[], None], disable_created_metrics)()

REASONS = (
    "stale_state",
    "deadline_exceeded",
    "bad_request",
    "unknown_pod",
    "unknown_nodes",
    "internal_error",
)
"""Why an answer held no opinion: the watch fell silent; the budget was spent; the request could not
be read; the pod is bound or gone; none of the nodes is known; an error of our own."""
_BUCKETS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class Metrics:
    """One process's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.before_scrape: list[Callable[[], None]] = []
        """Called before each scrape, to set gauges."""

        def counter(name: str, text: str, label: str = "", values: tuple[str, ...] = ()) -> Counter:
            made = Counter(
                f"fedsched_{name}", text, [label] if label else [], registry=self.registry
            )
            for value in values:  # so that a counter shows before its first event
                made.labels(value)
            return made

        def gauge(name: str, text: str, label: str = "") -> Gauge:
            return Gauge(f"fedsched_{name}", text, [label] if label else [], registry=self.registry)

        verbs = ("filter", "prioritize")
        self.answers = counter("extender_answers", "Answers by verb", "verb", verbs)
        self.no_opinion = counter(
            "extender_no_opinion", "Answers without an opinion by reason", "reason", REASONS
        )
        self.seconds = Histogram(
            "fedsched_extender_seconds",
            "Time to answer, from the read request to the answer",
            ["verb"],
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self.guarded = counter(
            "guard_nodes", "Nodes that the guard held back", "reason", ("cpu", "gpu_memory")
        )
        self.overridden = counter("decisions_off_rule", "Decisions that departed from the rule's")
        self.policy_loads = counter("policy_loads", "Policies taken into use")
        self.policy_failures = counter(
            "policy_failures",
            "Policy files not taken into use by reason",
            "reason",
            ("broken", "bad_features_version", "bad_architecture"),
        )
        self.speeds_failures = counter("speeds_failures", "Speeds files that could not be read")
        self.journal_records = counter("journal_records", "Records written")
        self.journal_failures = counter("journal_failures", "Records lost: disk full or gone")
        self.released = counter(
            "queue_released", "Gates lifted by cause", "cause", ("decision", "overdue", "shutdown")
        )
        self.deferred = counter("queue_deferred", "Decisions to wait although something fitted")
        self.lift_failures = counter("queue_lift_failures", "Tries to lift a gate that failed")
        self.telemetry_failures = counter("telemetry_failures", "Readings of node use that failed")
        self.pending = gauge("pending_pods", "Pods that wait for a node")
        self.running = gauge("running_pods", "Pods bound or assumed")
        self.gated = gauge("gated_pods", "Pods behind fedsched's gate")
        self.nodes = gauge("nodes", "Nodes known")
        self.synced = gauge("synced", "1 once nodes and pods are listed and the watches are alive")
        self.policy_learned = gauge("policy_learned", "1 where a learned policy is in use")
        self.watch = Gauge(
            "fedsched_watch", "What the watches saw", ["resource", "what"], registry=self.registry
        )

    def text(self) -> bytes:
        """All of it in the Prometheus text format."""
        for update in self.before_scrape:
            update()
        return generate_latest(self.registry)
