"""What the agent writes to the API server: gates lifted, its lease, Events; by the official client.

Called by ``agent.scheduling.queue``, ``agent.cluster.election`` and ``agent.cluster.events``. Each
request runs in a thread of :class:`agent.cluster.access.Access`, is bounded in time, and raises one
of :data:`agent.cluster.kubernetes.FAILURES`.
"""

import json
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from kubernetes.client import ApiClient, CoordinationV1Api, CoreV1Api, EventsV1Api

from agent.cluster.access import Access
from agent.cluster.kubernetes import ApiError
from agent.cluster.records import GATE, Pod

Json = dict[str, Any]
"""An object as the API server has it. The client's typed models cost some fifty times as much, and
lose fields that are newer than the client."""


async def lift_gate(access: Access, pod: Pod) -> None:
    """Take fedsched's gate off ``pod``; a pod or gate that is gone already is fine.

    A JSON patch that first tests which gate it removes: other controllers' gates stay. An ApiError
    of status 409 or 422 means that the gates moved meanwhile, and that the pod as the watch shows
    it next should be tried.
    """
    if GATE not in pod.gates:
        return
    place = f"/spec/schedulingGates/{pod.gates.index(GATE)}"
    patch = [
        # A pod of the same name that came after this one has gates of its own.
        {"op": "test", "path": "/metadata/uid", "value": pod.uid},
        {"op": "test", "path": f"{place}/name", "value": GATE},
        {"op": "remove", "path": place},
    ]

    def request(client: ApiClient) -> Any:
        return CoreV1Api(client).patch_namespaced_pod(
            pod.name, pod.namespace, patch, _preload_content=False, **access.limits
        )

    try:
        await _read(access, request)
    except ApiError as error:
        if error.status != HTTPStatus.NOT_FOUND:
            raise


class Lease:
    """One Lease object (coordination.k8s.io/v1)."""

    def __init__(self, access: Access, namespace: str, name: str) -> None:
        self._access, self.namespace, self.name = access, namespace, name

    async def read(self) -> Json | None:
        """The lease as it stands; None where there is none."""

        def request(client: ApiClient) -> Any:
            return CoordinationV1Api(client).read_namespaced_lease(
                self.name, self.namespace, _preload_content=False, **self._access.limits
            )

        try:
            return await _read(self._access, request)
        except ApiError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
            return None

    async def create(self, spec: Json) -> Json:
        """Make the lease; an ApiError of status 409 where there is one by now."""
        body: Any = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self.name, "namespace": self.namespace},
            "spec": spec,
        }

        def request(client: ApiClient) -> Any:
            return CoordinationV1Api(client).create_namespaced_lease(
                self.namespace, body, _preload_content=False, **self._access.limits
            )

        return await _read(self._access, request)

    async def replace(self, lease: Json) -> Json:
        """Write what :meth:`read` gave, changed; an ApiError of status 409 where another did."""
        body: Any = lease

        def request(client: ApiClient) -> Any:
            return CoordinationV1Api(client).replace_namespaced_lease(
                self.name, self.namespace, body, _preload_content=False, **self._access.limits
            )

        return await _read(self._access, request)


async def create_event(access: Access, event: Json) -> None:
    """Make an Event (events.k8s.io/v1) in the namespace that it names."""
    body: Any = event

    def request(client: ApiClient) -> Any:
        return EventsV1Api(client).create_namespaced_event(
            event["metadata"]["namespace"], body, _preload_content=False, **access.limits
        )

    await _read(access, request)


async def _read(access: Access, request: Callable[[ApiClient], Any]) -> Json:
    """The answer's body, read whole, which gives its connection back."""
    content: Json = json.loads(await access.call(lambda client: request(client).data))
    return content
