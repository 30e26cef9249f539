"""What the agent writes by the official client, as the API server gets it."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from agent.cluster import objects
from agent.cluster.access import Access
from agent.cluster.kubernetes import ApiError
from agent.cluster.records import GATE, Pod
from agent.cluster.writes import lift_gate
from agent.scheduling.lift_gates import lift_all
from agent.settings import KubernetesSettings
from tests.unit.api_server import ApiServer, pod_json


@asynccontextmanager
async def reaching(server: ApiServer) -> AsyncIterator[Access]:
    async with server.serving():
        access = Access(KubernetesSettings(api_url=server.url))
        try:
            yield access
        finally:
            access.close()


def pod(*gates: str) -> Pod:
    return objects.pod(json.dumps(pod_json("p", gates=gates)).encode())


async def test_the_patch_takes_our_gate_of_that_pod_and_no_other() -> None:
    server = ApiServer()
    async with reaching(server) as access:
        await lift_gate(access, pod("o", GATE))
        await lift_gate(access, pod())  # has no gate: nothing to do
    assert server.patches == [
        (
            "/api/v1/namespaces/default/pods/p",
            "application/json-patch+json",
            [
                {"op": "test", "path": "/metadata/uid", "value": "uid-p"},
                {"op": "test", "path": "/spec/schedulingGates/1/name", "value": GATE},
                {"op": "remove", "path": "/spec/schedulingGates/1"},
            ],
        )
    ]


async def test_a_pod_that_is_gone_needs_no_lifting_and_a_refusal_is_an_error() -> None:
    server = ApiServer()
    server.patch_status = [404, 422]
    async with reaching(server) as access:
        await lift_gate(access, pod(GATE))
        with pytest.raises(ApiError, match="HTTP 422"):
            await lift_gate(access, pod(GATE))


async def test_a_server_that_cannot_be_reached_is_an_error_worth_another_try() -> None:
    server = ApiServer()
    async with server.serving():
        access = Access(KubernetesSettings(api_url=server.url))
    try:
        with pytest.raises(ConnectionError, match="cannot be reached"):
            await lift_gate(access, pod(GATE))
        with pytest.raises(ConnectionError, match="cannot be reached"):
            await lift_all(access, insist=False)  # nothing is known to be there: no use in trying
    finally:
        access.close()
