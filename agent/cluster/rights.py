"""Which rights the agent needs at the API server, and which of them it lacks.

Asked by ``agent.scheduling.member`` at the start, so that a role that grants too little is named at
once and in full, and not one refusal after another. Whoever is authenticated may ask for himself.
"""

from functools import partial
from typing import Any, NamedTuple

from kubernetes.client import ApiClient, AuthorizationV1Api

from agent.cluster.access import Access
from agent.settings import Settings


class Right(NamedTuple):
    """A verb on a resource; ``namespace`` is empty for the whole cluster."""

    verb: str
    group: str
    resource: str
    namespace: str = ""
    name: str = ""

    def __str__(self) -> str:
        resource = f"{self.resource}.{self.group}" if self.group else self.resource
        named = f" {self.name}" if self.name else ""
        return f"{self.verb} {resource}{named}" + (
            f" in namespace {self.namespace}" if self.namespace else ""
        )


def needed(settings: Settings, access: Access) -> list[Right]:
    """The rights without which ``agent serve`` cannot do what its settings ask for.

    Telemetry is not among them: it degrades by itself.
    """
    found = [Right(v, "", r) for r in ("nodes", "pods") for v in ("list", "watch")]
    if settings.serve.queue:
        found.append(Right("patch", "", "pods"))
    election = settings.election
    if election.mode != "none":
        place = election.namespace or access.namespace
        leases = "coordination.k8s.io", "leases", place
        found.append(Right("get", *leases, election.name))
        if election.mode == "lease":
            found += [Right("create", *leases), Right("update", *leases, election.name)]
    if settings.kubernetes.pod or access.in_pod:
        found.append(Right("create", "events.k8s.io", "events", access.namespace))
    return found


async def missing(access: Access, rights: list[Right]) -> list[Right]:
    """Those of ``rights`` that are not granted. Raises one of ``kubernetes.FAILURES``."""
    return [right for right in rights if not await access.call(partial(_may, access, right))]


def _may(access: Access, right: Right, client: ApiClient) -> bool:
    attributes = {
        "verb": right.verb,
        "group": right.group,
        "resource": right.resource,
        "namespace": right.namespace,
        "name": right.name,
    }
    review: Any = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    answer: Any = AuthorizationV1Api(client).create_self_subject_access_review(
        review, **access.limits
    )
    return bool(answer.status.allowed)
