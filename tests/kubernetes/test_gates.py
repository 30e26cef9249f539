"""Lifting gates at a real API server: what races, whose gates stay, and what is left at the end."""

import asyncio
import subprocess
import sys
from pathlib import Path

import kubernetes
import msgspec
import pytest
import yaml

from agent.cluster.access import Access
from agent.cluster.kubernetes import ApiError
from agent.cluster.records import GATE, Pod
from agent.cluster.writes import lift_gate
from agent.scheduling import lift_gates
from examples.lab.control_plane import ControlPlane, until
from tests.kubernetes.agents import Agent, ending, gated_pods, gates, grant, reaching

pytestmark = pytest.mark.timeout(400)  # processes start slowly on a busy machine

KUEUE = "kueue.x-k8s.io/admission"
RIGHTS = (
    {"apiGroups": [""], "resources": ["nodes", "pods"], "verbs": ["list", "watch"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]},
)


async def pods_of(access: Access, namespace: str) -> dict[str, Pod]:
    return {pod.name: pod for pod in await lift_gates.gated(access) if pod.namespace == namespace}


async def test_what_races_harms_nobody(lab: ControlPlane, namespace: str) -> None:
    core = kubernetes.client.CoreV1Api(lab.api())
    never = {"scheduler": "nobody"}
    gated_pods(lab, namespace, ["once", "moved", "gone", "again"], gates=["a.example/x"], **never)
    with reaching(lab.kubeconfig) as access:
        known = await pods_of(access, namespace)
        # Twice at the same moment: one patch wins, the other finds that the gate has gone.
        results = await asyncio.gather(
            *(lift_gate(access, known["once"]) for _ in range(8)), return_exceptions=True
        )
        assert results.count(None) == 1
        assert {e.status for e in results if isinstance(e, ApiError)} <= {409, 422}
        assert len([e for e in results if isinstance(e, ApiError)]) == 7
        # The other controller's gate went first: ours is at another place now.
        core.patch_namespaced_pod(
            "moved", namespace, [{"op": "remove", "path": "/spec/schedulingGates/0"}]
        )
        with pytest.raises(ApiError, match="422"):
            await lift_gate(access, known["moved"])
        await lift_gate(access, (await pods_of(access, namespace))["moved"])
        # Deleted meanwhile, and deleted and made again under the same name.
        for name in ("gone", "again"):
            core.delete_namespaced_pod(name, namespace, grace_period_seconds=0)
        await lift_gate(access, known["gone"])
        gated_pods(lab, namespace, ["again"], gates=["a.example/x"], **never)
        with pytest.raises(ApiError, match="422"):
            await lift_gate(access, known["again"])
    assert gates(lab, namespace) == {
        "once": ["a.example/x"],
        "moved": [],
        "again": ["a.example/x", GATE],
    }


async def test_every_gate_is_found_page_by_page_while_others_move(
    lab: ControlPlane, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lift_gates, "PAGE", 7)
    gated_pods(lab, namespace, [f"p{n}" for n in range(30)], scheduler="page")
    told: list[tuple[int, int]] = []
    with reaching(lab.kubeconfig) as one, reaching(lab.kubeconfig) as other:
        # Two at once: what one has lifted already is no failure of the other.
        done = await asyncio.gather(
            lift_gates.lift_all(one, ["page"], progress=lambda *far: told.append(far)),
            lift_gates.lift_all(other, ["page"]),
        )
    assert set(map(tuple, gates(lab, namespace).values())) == {()}
    assert sum(done) == 30  # each gate was lifted once
    assert [far[0] for far in told] == list(range(1, done[0] + 1))


def test_the_command_lifts_all_with_no_more_than_its_rights(
    lab: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    def run(kubeconfig: Path) -> subprocess.CompletedProcess[str]:
        config = tmp_path / "member.yaml"
        config.write_text(
            yaml.safe_dump(
                {
                    "kubernetes": {"kubeconfig": str(kubeconfig)},
                    "serve": {"scheduler_names": ["nobody"]},
                }
            )
        )
        return subprocess.run(
            [sys.executable, "-m", "common", "agent", "lift-gates", "--config", str(config)],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip

    gated_pods(lab, namespace, ["a", "b"], scheduler="nobody")
    gated_pods(lab, namespace, ["kueue"], scheduler="nobody", gates=[KUEUE])
    gated_pods(lab, namespace, ["other"], scheduler="another")
    refused = run(lab.user_kubeconfig("no-rights"))
    assert refused.returncode == 2
    assert "pods is forbidden" in refused.stderr
    assert gates(lab, namespace)["a"] == [GATE]
    grant(lab, "lifter", *RIGHTS)
    done = run(lab.user_kubeconfig("lifter"))
    assert done.returncode == 0, done.stderr
    assert "3 of 3 gates lifted" in done.stdout
    assert gates(lab, namespace) == {"a": [], "b": [], "kueue": [KUEUE], "other": [GATE]}


def test_an_agent_with_just_its_role_serves_what_came_while_it_was_away(
    lab: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    grant(lab, "agent", *RIGHTS)
    member = Agent(tmp_path, lab.user_kubeconfig("agent"))
    kueue = {"kueue.x-k8s.io/queue-name": "q", "kueue.x-k8s.io/managed": "true"}
    gated_pods(lab, namespace, ["early"])  # before there is an agent
    gated_pods(lab, namespace, ["huge"], cpu="31", gates=["a.example/x"])
    core = kubernetes.client.CoreV1Api(lab.api())
    with ending(member):
        member.start()
        until(lambda: gates(lab, namespace)["early"] == [], "the early pod has gone")
        member.kill()
        # Theirs: Kueue's own gate and no opinion of ours asked for.
        gated_pods(lab, namespace, ["late"])
        gated_pods(lab, namespace, ["both"], gates=[KUEUE], labels=kueue)
        pod = {"metadata": {"name": "theirs", "namespace": namespace, "labels": kueue}}
        lab.kubectl("create", "-f", "-", stdin=_theirs(pod))
        member.start()
        until(lambda: gates(lab, namespace)["late"] == [], "the late pod has gone")
        assert gates(lab, namespace)["both"] == [KUEUE, GATE]
        core.patch_namespaced_pod(
            "both", namespace, [{"op": "remove", "path": "/spec/schedulingGates/0"}]
        )
        until(lambda: gates(lab, namespace)["both"] == [], "the admitted pod has gone")
        assert member.metric('queue_released_total{cause="decision"}') == 2.0
        assert gates(lab, namespace)["huge"] == ["a.example/x", GATE]
        assert member.stop() == 0
    # Whoever goes leaves no gate of its own behind, and everybody else's where they are.
    assert gates(lab, namespace) == {
        "early": [], "late": [], "both": [], "huge": ["a.example/x"], "theirs": [KUEUE],
    }  # fmt: skip
    until(lambda: core.read_namespaced_pod("late", namespace).spec.node_name, "late is bound")


def _theirs(pod: dict[str, dict[str, object]]) -> str:
    spec = {
        "schedulingGates": [{"name": KUEUE}],
        "containers": [{"name": "main", "image": "busybox"}],
    }
    return msgspec.json.encode({"apiVersion": "v1", "kind": "Pod", **pod, "spec": spec}).decode()
