"""Two real replicas at a real API server: one leads, it dies, the other takes over, once each."""

import time
from pathlib import Path
from typing import Any

import kubernetes
import pytest

from agent.cluster import leader_file
from examples.lab.control_plane import ControlPlane, until
from tests.kubernetes.agents import Agent, ending, gated_pods, gates, grant

SECONDS = 15.0
"""A lease's length, the default one: a machine that halts for seconds changes no leader."""
RIGHTS = (
    {"apiGroups": [""], "resources": ["nodes", "pods"], "verbs": ["list", "watch"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]},
    {
        "apiGroups": ["coordination.k8s.io"],
        "resources": ["leases"],
        "verbs": ["get", "create", "update"],
    },
    {"apiGroups": ["events.k8s.io"], "resources": ["events"], "verbs": ["create"]},
)


def leads(agent: Agent) -> bool:
    return leader_file.read(agent.state / "leader.json").holds(time.time())


@pytest.fixture
def replicas(lab: ControlPlane, namespace: str, tmp_path: Path) -> list[Agent]:
    grant(lab, "replica", *RIGHTS)
    election = {"mode": "lease", "namespace": namespace, "seconds": SECONDS}
    return [
        Agent(
            tmp_path / name,
            lab.user_kubeconfig("replica"),
            election=election,
            kubernetes={"pod": f"agent-{name}", "namespace": namespace},
            serve={"scheduler_names": ["default-scheduler"]},
        )
        for name in "ab"
    ]


def test_a_replica_takes_over_from_a_leader_that_was_killed_and_no_gate_is_lifted_twice(
    lab: ControlPlane, namespace: str, replicas: list[Agent]
) -> None:
    a, b = replicas
    gated_pods(lab, namespace, [f"p{n}" for n in range(6)], scheduler="default-scheduler")
    with ending(a, b):
        a.start(wait=False)
        b.start(wait=False)
        a.wait()
        b.wait()
        until(lambda: not any(gates(lab, namespace).values()), "all gates are lifted")
        until(lambda: leads(a) or leads(b), "one of them leads")
        first, second = (a, b) if leads(a) else (b, a)
        assert not leads(second)
        until(lambda: first.metric("leader") == 1.0, "it says so")
        assert second.metric("leader") == 0.0
        released = 'queue_released_total{cause="decision"}'
        assert (first.metric(released), second.metric(released)) == (6.0, 0.0)
        assert first.metric("queue_lift_failures_total") == 0.0
        first.kill()
        gated_pods(lab, namespace, ["after"])
        until(lambda: gates(lab, namespace)["after"] == [], "the other has taken over")
        until(lambda: leads(second), "it says so")
        assert second.metric(released) == 1.0
        first.start()  # back, and second in line
        gated_pods(lab, namespace, ["later"])
        until(lambda: gates(lab, namespace)["later"] == [], "the leader lifts it")
        assert first.metric(released) == 0.0
        assert not leads(first)
        # A clean stop lets go of the lease: the other need not wait for it to lapse.
        assert second.stop() == 0
        assert not leads(second)
        lease = kubernetes.client.CoordinationV1Api(lab.api()).read_namespaced_lease(
            "fedsched-agent", namespace
        )
        own_name = (second.state / "replica-id").read_text()
        kept = own_name in (lease.spec.holder_identity or "")
        # A farewell may take three seconds; where the API server is slower than that it says so.
        assert not kept or "did not answer on the way out" in second.log(), second.log()
        until(lambda: leads(first), "the first leads again")
        assert first.stop() == 0
    said = events(lab, namespace)
    assert ("agent-a", "Leading") in said
    assert ("agent-b", "Leading") in said


def events(lab: ControlPlane, namespace: str) -> set[tuple[str, str]]:
    found: Any = kubernetes.client.EventsV1Api(lab.api()).list_namespaced_event(namespace)
    return {
        (event.regarding.name, event.reason)
        for event in found.items
        if event.reporting_controller == "fedsched.io/agent"
    }


def test_the_agent_beside_the_kube_scheduler_that_holds_its_lease_leads(
    lab: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    """kube-scheduler's own election, real: its name is the host's with a number after it."""
    name = f"scheduler-{namespace}"
    lab.start_scheduler(
        {
            "leaderElection": {
                "leaderElect": True, "resourceName": "fedsched-scheduler",
                "resourceNamespace": namespace, "resourceLock": "leases",
            },
            "profiles": [{"schedulerName": name}],
        },
        name=name,
    )  # fmt: skip
    grant(lab, "replica", *RIGHTS)
    follow = {"mode": "follow", "name": "fedsched-scheduler", "namespace": namespace,
              "seconds": SECONDS}  # fmt: skip
    access = lab.user_kubeconfig("replica")
    here = Agent(tmp_path / "here", access, election=follow, serve={"scheduler_names": [name]})
    elsewhere = Agent(tmp_path / "elsewhere", access, election=follow | {"identity": "node-7"})
    try:
        with ending(here, elsewhere):
            here.start(wait=False)
            elsewhere.start(wait=False)
            here.wait()
            elsewhere.wait()
            until(lambda: leads(here), "the agent on the holder's host leads")
            gated_pods(lab, namespace, ["p"], scheduler=name)
            core = kubernetes.client.CoreV1Api(lab.api())
            until(
                lambda: core.read_namespaced_pod("p", namespace).spec.node_name, "its pod is bound"
            )
            assert elsewhere.metric("leader") == 0.0
            lab.kill(name)
            until(lambda: not leads(here), "nobody is beside an active kube-scheduler")
            gated_pods(lab, namespace, ["q"], scheduler=name)
            lab.start(name)
            until(lambda: gates(lab, namespace)["q"] == [], "it leads again")
            # A kube-scheduler that is told to end lets go of its lease; who ends then lifts all.
            lab.stop(name)
            until(lambda: not leads(here), "nobody holds the lease")
            gated_pods(lab, namespace, ["r"], scheduler=name)
            assert here.stop() == 0
            assert gates(lab, namespace)["r"] == [], here.log()
    finally:
        lab.stop(name)
