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

from agent.cluster.outcomes import OUTCOMES

# A second series for each counter, which nobody reads (the library's function has no types).
cast(Callable[[], None], disable_created_metrics)()

REASONS = (
    "stale_state",
    "deadline_exceeded",
    "bad_request",
    "unknown_pod",
    "unknown_nodes",
    "internal_error",
    "unheard",
)
"""Why an answer held no opinion: the watch fell silent; the budget was spent; the request could not
be read; the pod is bound or gone; none of the nodes is known; an error of our own; the
asker had hung up before it was looked at."""
CAUSES = ("decision", "overdue", "hopeless", "claims", "state_lost")
"""Why a gate was lifted: the policy chose the pod; it waited too long; no node could hold it; it
claims devices, which kube-scheduler alone can judge; the cluster's state could not be trusted any
more."""
_PENDING_BUCKETS = (0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)
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
        self.released = counter("queue_released", "Gates lifted by cause", "cause", CAUSES)
        self.deferred = counter("queue_deferred", "Decisions to wait although something fitted")
        self.lift_failures = counter("queue_lift_failures", "Tries to lift a gate that failed")
        self.ends = counter("pod_ends", "Pods by how they ended", "outcome", tuple(OUTCOMES))
        self.pending_seconds = Histogram(
            "fedsched_pod_pending_seconds",
            "Cluster seconds from a pod's creation to its binding",
            buckets=_PENDING_BUCKETS,
            registry=self.registry,
        )
        self.pending = gauge("pending_pods", "Pods that wait for a node")
        self.running = gauge("running_pods", "Pods bound or assumed")
        self.gated = gauge("gated_pods", "Pods behind fedsched's gate")
        self.nodes = gauge("nodes", "Nodes known")
        self.synced = gauge("synced", "1 once nodes and pods are listed and the watches are alive")
        self.extra_wait = gauge(
            "queue_longest_extra_wait_seconds", "Longest extra wait of a gated pod, cluster seconds"
        )
        self.leader = gauge("leader", "1 where this replica lifts gates and learns")
        self.leader_changes = counter("leader_changes", "Changes of who leads")
        self.missing_rights = gauge("missing_rights", "Rights that the API server does not grant")
        self.events_dropped = gauge("events_dropped", "Events for operators that were given up")
        self.policy_learned = gauge("policy_learned", "1 where a learned policy is in use")
        self.watch = Gauge(
            "fedsched_watch", "What the watches saw", ["resource", "what"], registry=self.registry
        )

    def text(self) -> bytes:
        """All of it in the Prometheus text format."""
        for update in self.before_scrape:
            update()
        return generate_latest(self.registry)
