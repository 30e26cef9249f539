"""What a pod's status says of its end: which kind of outcome it was.

``agent.cluster.objects`` reads :attr:`Pod.reason` with :func:`reason`, and
``agent.cluster.lifecycle`` tells the outcome by :func:`end_of`. Kubernetes has no one place for it:
OOM kills stand in container states, refusals and node-pressure evictions in ``status.reason``, the
rest in a condition.
"""

from collections.abc import Iterable

import msgspec

from agent.cluster.records import Pod

OUTCOMES = {
    "finished": "ended well",
    "oom": "a container was killed for want of memory: reason OOMKilled and exit code 137",
    "evicted": "its kubelet put it out because the node ran short (memory, disk, process IDs)",
    "misplaced": "its kubelet refused it: the node had no room or did not suit (OutOfcpu, …)",
    "preempted": "made room for a pod of higher priority",
    "disrupted": "sent away: eviction API (a drain), NoExecute taint, or shutdown of the node",
    "lost": "its node is gone",
    "failed": "ended badly of itself",
    "deleted": "deleted while it waited or ran",
    "gone": "was there no more when the agent came back: nobody saw how it ended",
}
"""Ends of a pod by kind of event, with what each means."""

_STATUS = {
    "Evicted": "evicted",
    "Preempting": "preempted",
    "NodeLost": "lost",
    "NodeShutdown": "disrupted",
    "Terminated": "disrupted",
}
_REFUSALS = (
    "UnexpectedAdmissionError",
    "NodeAffinity",
    "NodeName",
    "NodePorts",
    "TopologyAffinityError",
    "SMTAlignmentError",
)
_CONDITION = {
    "PreemptionByScheduler": "preempted",
    "DeletionByTaintManager": "disrupted",
    "EvictionByEvictionAPI": "disrupted",
    "DeletionByPodGC": "lost",
    "TerminationByKubelet": "evicted",
}


class Terminated(msgspec.Struct, frozen=True, rename="camel"):
    """How a container ended."""

    reason: str | None = None
    exit_code: int = 0
    finished_at: str | None = None

    @property
    def out_of_memory(self) -> bool:
        """Reason and exit code must agree: the reason alone gives false positives."""
        return self.reason == "OOMKilled" and self.exit_code == 137


def _refused(reason: str) -> bool:
    return reason.startswith("OutOf") or reason in _REFUSALS


def reason(status: str, ends: Iterable[Terminated], disruption: str, done: bool) -> str:
    """The one word that tells a pod's outcome.

    Args:
        status: ``status.reason``, empty for none.
        ends: of its containers, those before a restart too.
        disruption: reason of a DisruptionTarget condition that is true, empty for none.
        done: whether the pod has ended; until then an old OOM kill is news, and afterwards the
            status knows better.
    """
    if done and (status in _STATUS or _refused(status)):
        return status
    if any(end.out_of_memory for end in ends):
        return "OOMKilled"
    return disruption if disruption in _CONDITION else status


def end_of(pod: Pod) -> str:
    """How a pod ended that is done or gone, one of :data:`OUTCOMES`."""
    if pod.phase == "Succeeded" and not pod.deleting:
        return "finished"
    kind = _CONDITION.get(pod.reason) or _STATUS.get(pod.reason)
    if kind:
        return kind
    if pod.phase == "Failed" and pod.reason == "OOMKilled":
        return "oom"
    if pod.phase == "Failed" and _refused(pod.reason):
        return "misplaced"
    return "deleted" if pod.deleting or not pod.done else "failed"
