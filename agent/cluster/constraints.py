"""Where a pod may go by its own words: node selector, required node affinity and tolerations.

``agent.cluster.objects`` reads a :class:`Scope` from a pod, ``agent.cluster.scopes`` asks it about
nodes. The rules are kube-scheduler's plugins NodeAffinity and TaintToleration; what depends on
other pods (pod affinity, topology spread, host ports) or on volumes is kube-scheduler's alone.
"""

from collections.abc import Mapping

import msgspec

BARRING = ("NoSchedule", "NoExecute")
"""Effects of taints that keep pods away; ``PreferNoSchedule`` is a matter of scores."""


class Taint(msgspec.Struct, frozen=True):
    """One taint of a node."""

    key: str
    value: str = ""
    effect: str = ""


class Toleration(msgspec.Struct, frozen=True):
    """One toleration of a pod; None where it says nothing."""

    key: str | None = None
    operator: str | None = None
    value: str | None = None
    effect: str | None = None

    def of(self, taint: Taint) -> bool:
        """Whether it lets the pod onto a node with this taint."""
        if self.effect and self.effect != taint.effect:
            return False
        if self.operator == "Exists":
            return not self.key or self.key == taint.key
        if self.operator not in (None, "", "Equal"):
            return False  # of a newer Kubernetes: kube-scheduler may find otherwise
        return self.key == taint.key and (self.value or "") == taint.value


class Requirement(msgspec.Struct, frozen=True):
    """One line of a node selector term."""

    key: str
    operator: str
    values: tuple[str, ...] | None = None

    def met(self, labels: Mapping[str, str]) -> bool:
        """Whether labels meet it; an operator that is not known is not met."""
        value, values = labels.get(self.key), self.values or ()
        match self.operator:
            case "In":
                return value in values
            case "NotIn":
                return value not in values
            case "Exists":
                return value is not None
            case "DoesNotExist":
                return value is None
            case "Gt" | "Lt":
                try:
                    distance = int(value or "") - int(values[0])
                except (ValueError, IndexError):
                    return False
                return distance > 0 if self.operator == "Gt" else distance < 0
        return False


class Term(msgspec.Struct, frozen=True, rename="camel"):
    """Requirements that must all be met; one with none matches no node."""

    match_expressions: tuple[Requirement, ...] | None = None
    match_fields: tuple[Requirement, ...] | None = None

    def matches(self, name: str, labels: Mapping[str, str]) -> bool:
        """Whether the node of that name and those labels meets all of it."""
        expressions, fields = self.match_expressions or (), self.match_fields or ()
        if not expressions and not fields:
            return False
        return all(line.met(labels) for line in expressions) and all(
            line.met({"metadata.name": name}) for line in fields
        )


class Scope(msgspec.Struct, frozen=True):
    """The set of nodes that a pod may go to, in its own words; equal ones are one and the same."""

    selector: tuple[tuple[str, str], ...] = ()
    """Labels that the node must have, sorted."""
    terms: tuple[Term, ...] | None = None
    """One of these must match; None where no affinity is required."""
    tolerations: tuple[Toleration, ...] = ()

    def admits(self, name: str, labels: Mapping[str, str], taints: tuple[Taint, ...]) -> bool:
        """Whether the pod may go to the node of that name, labels and barring taints."""
        return (
            all(labels.get(key) == value for key, value in self.selector)
            and (self.terms is None or any(term.matches(name, labels) for term in self.terms))
            and all(any(one.of(taint) for one in self.tolerations) for taint in taints)
        )
