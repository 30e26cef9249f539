"""The charts on a real cluster: what was rendered runs, joins, places pods, and leaves no trace."""

import json
import re
import shlex
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import kubernetes
import pytest
import yaml

from agent.cluster.records import GATE
from examples.lab.control_plane import ANSWER_SECONDS, ControlPlane, answer, pod_manifest, until
from examples.processes import free_ports
from tests.kubernetes.kubelet import Kubelet
from tests.kubernetes.releases import CHARTS, EMULATED, HelmError, helm, kubelet, run_while

pytestmark = pytest.mark.timeout(900)  # only bounds a failing test

LEARN = {
    "min_batch": 4,
    "idle_seconds": 1.0,
    "poll_seconds": 0.2,
    "labels": 0,
    "gate_windows": 2,
    "gate_jobs": 4,
    "upload_rounds": 1,
    "upload_seconds": 2.0,
    "status_seconds": 1.0,
}
SERVE = {"queue_seconds": 0.2}


def install(node: Kubelet, release: str, chart: str, values: dict[str, Any], *more: str) -> None:
    """``helm install --wait``: it returns once the pods' own probes say that they are ready."""
    file = node.folder.parent / f"{release}.yaml"
    file.write_text(yaml.safe_dump(values | EMULATED))
    run_while(
        node, "install", release, str(CHARTS[chart]), "--wait", "--timeout", "220s",
        "--values", str(file), *more,
    )  # fmt: skip


def agent_values(**more: Any) -> dict[str, Any]:
    extender, health, scheduler = free_ports(3)
    ports = {"extender": extender, "health": health, "scheduler": scheduler}
    values = {"ports": ports, "settings": {"serve": SERVE, "learn": LEARN}}
    return values | {"state": {"persistent": False}} | more


def told(node: Kubelet, release: str) -> list[list[str]]:
    """The commands that the release's notes tell to run in its container."""
    notes = helm("get", "notes", release, "--namespace", node.namespace, cluster=node.lab)
    lines = notes.replace("\\\n", " ").splitlines()
    commands = [line.partition(" -- ")[2] for line in lines if " -c serve -- " in line]
    return [shlex.split(command.partition(">")[0]) for command in commands]


def counted(text: str, series: str) -> float:
    """A counter's value in Prometheus' format; 0 where it is missing."""
    found = re.search(rf"^{re.escape(series)} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def workload(kind: str, namespace: str, scheduler: str, count: int) -> str:
    """A Deployment of pods that stay, or a Job of gated pods that end."""
    pod = pod_manifest("main", scheduler=scheduler, gated=kind == "Job", cpu="100m", memory="64Mi")
    template = {"metadata": {"labels": {"app": "work"}}, "spec": pod["spec"]}
    spec: dict[str, Any] = {"template": template}
    if kind == "Job":
        spec |= {"completions": count, "parallelism": count}
    else:
        template["spec"] |= {"restartPolicy": "Always"}
        spec |= {"replicas": count, "selector": {"matchLabels": {"app": "work"}}}
    group = {"Job": "batch/v1", "Deployment": "apps/v1"}[kind]
    metadata = {"name": "work", "namespace": namespace}
    return json.dumps({"apiVersion": group, "kind": kind, "metadata": metadata, "spec": spec})


def events(lab: ControlPlane, namespace: str, reason: str) -> list[str]:
    """Of each Event of a kind: the name of what it is about, and who reported it."""
    found = kubernetes.client.CoreV1Api(lab.api()).list_namespaced_event(
        namespace, field_selector=f"reason={reason}"
    )
    return [f"{e.involved_object.name} {e.reporting_component}" for e in found.items]


def refusals(lab: ControlPlane) -> dict[str, float]:
    """How many requests the API server answered with 401 or 403, by what was asked."""
    lines = lab.kubectl("get", "--raw", "/metrics").splitlines()
    pattern = re.compile(r'(apiserver_request_total\{code="40[13]".*\}) (\S+)')
    return {found[1]: float(found[2]) for line in lines if (found := pattern.match(line))}


def whole_cluster(lab: ControlPlane) -> set[str]:
    """Names of all objects that belong to no namespace, and of what kube-system is granted."""
    kinds = lab.kubectl("api-resources", "--namespaced=false", "--verbs=list", "-o", "name").split()
    kinds.remove("namespaces")  # those of other tests may be on their way out
    names = lab.kubectl("get", ",".join(kinds), "-o", "name").split()
    here = "roles,rolebindings,serviceaccounts,configmaps,secrets"
    return {*names, *lab.kubectl("get", here, "-n", "kube-system", "-o", "name").split()}


def test_an_installed_member_joins_the_hub_and_places_pods(
    lab: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    link, dashboard = free_ports(2)
    hub = {
        "serverNames": ["localhost"],
        "publicAddress": f"localhost:{link}",
        "ports": {"link": link, "dashboard": dashboard},
        "state": {"persistent": False},
        "settings": {"idle_pause": 0.2},
    }
    refused = refusals(lab)
    with kubelet(lab, namespace, tmp_path) as node:
        install(node, "hub", "coordinator", hub)
        enroll, fetch, members = told(node, "hub")
        node.exec("hub-0", "serve", *enroll)
        bundle = tmp_path / "north.tar"
        bundle.write_bytes(node.exec("hub-0", "serve", *fetch))
        values = agent_values()
        install(node, "fedsched", "agent", values, "--set-file", f"bundle.tar={bundle}")

        # Pods that name the chart's scheduler are placed by it, and it asks the agent.
        health = f"http://127.0.0.1:{values['ports']['health']}"
        lab.kubectl("apply", "-f", "-", stdin=workload("Deployment", namespace, "fedsched", 6))
        apps = kubernetes.client.AppsV1Api(lab.api())
        node.until(
            lambda: apps.read_namespaced_deployment("work", namespace).status.ready_replicas == 6,
            "six pods run",
        )
        # Nothing waits for Events, nor for an answer that comes too late.
        asked = 'fedsched_extender_answers_total{verb="prioritize"}'
        node.until(
            lambda: counted(answer(f"{health}/metrics"), asked) >= 6,
            "the agent was asked six times",
        )

        def placed() -> list[str]:
            return [e for e in events(lab, namespace, "Scheduled") if e.startswith("work-")]

        node.until(lambda: len(placed()) >= 6, "kube-scheduler has told of each pod")
        assert len(placed()) == 6
        assert {line.split()[1] for line in placed()} == {"fedsched"}
        # What an operator should know stands beside the agent's pod.
        node.until(lambda: events(lab, namespace, "Leading"), "the agent says that it leads")
        # Decisions are asked for on loopback alone.
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{health}/prioritize", b"{}", timeout=ANSWER_SECONDS)

        lab.kubectl("delete", "deployment", "work", "-n", namespace)

        # Gated pods go in the agent's order; what became of all of them reaches the hub.
        lab.kubectl("apply", "-f", "-", stdin=workload("Job", namespace, "fedsched", 12))
        batch = kubernetes.client.BatchV1Api(lab.api())
        node.until(
            lambda: batch.read_namespaced_job("work", namespace).status.succeeded == 12,
            "twelve gated pods have run",
        )

        def taken_part() -> bool:
            found = json.loads(answer(f"http://127.0.0.1:{dashboard}/api/v1/members"))["members"]
            return [m["name"] for m in found if m["accepted_updates"]] == ["north"]

        node.until(taken_part, "an update of north was accepted")
        rounds = json.loads(answer(f"http://127.0.0.1:{dashboard}/api/v1/rounds"))["rounds"]
        assert "finished" in {found["state"] for found in rounds}
        assert b"north" in node.exec("hub-0", "serve", *members)

        # The chart's role is all that the agent and its kube-scheduler need.
        assert refusals(lab) == refused, node.logs()
        for release in ("fedsched", "hub"):
            run_while(node, "uninstall", release, "--wait", "--no-hooks")


def test_uninstallation_leaves_no_gate_and_nothing_in_the_cluster(
    lab: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    core = kubernetes.client.CoreV1Api(lab.api())
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": namespace},
        "spec": {
            "capacity": {"storage": "2Gi"},
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": namespace,
            "hostPath": {"path": str(tmp_path / "volume")},
        },
    }
    lab.kubectl("apply", "-f", "-", stdin=json.dumps(volume))
    before = whole_cluster(lab)

    def gated() -> int:
        pods = core.list_namespaced_pod(namespace).items
        return sum(gate.name == GATE for p in pods for gate in p.spec.scheduling_gates or ())

    values = agent_values(state={"storageClass": namespace})
    health = f"http://127.0.0.1:{values['ports']['health']}"

    def create_gated(name: str) -> None:
        """Pods that another controller holds back, and whose turn the agent therefore awaits."""
        for n in range(20):
            pod = pod_manifest(f"{name}-{n}", namespace=namespace, gated=True)
            pod["spec"]["schedulingGates"].append({"name": "a.example/x"})
            core.create_namespaced_pod(namespace, pod)
        node.until(
            lambda: counted(answer(f"{health}/metrics"), "fedsched_gated_pods") == 20,
            "the agent has seen all gated pods",
        )
        assert gated() == 20

    with kubelet(lab, namespace, tmp_path) as node:
        install(node, "fedsched", "agent", values)
        create_gated("early")
        first, experience = node.named("fedsched-agent-0"), tmp_path / "volume/experience.sqlite"
        node.until(experience.exists, "the learner is up")
        kept = experience.stat().st_ino

        # A changed setting comes with a new pod: the old one leaves nobody waiting for it, and the
        # new one finds what that one learned.
        change = ("--reuse-values", "--set", "settings.serve.rule=sjf-eft")
        run_while(node, "upgrade", "fedsched", str(CHARTS["agent"]), "--wait", *change)
        assert gated() == 0, node.logs()
        second = node.named("fedsched-agent-0")
        assert second.pod["metadata"]["uid"] != first.pod["metadata"]["uid"]
        assert "sjf-eft" in (second.folder / "volumes/settings/agent.yaml").read_text()
        assert experience.stat().st_ino == kept

        create_gated("late")
        run_while(node, "uninstall", "fedsched", "--wait", "--timeout", "220s")
        assert gated() == 0, node.logs()
        assert "20 were lifted" in node.logs()
        assert whole_cluster(lab) == before
        # Of the namespace's own, what it learned stays, and nothing else.
        kinds = "all,leases,configmaps,secrets,serviceaccounts,roles,rolebindings,pvc,pdb,netpol"
        left = lab.kubectl(
            "get", kinds, "-n", namespace, "-o", "name", "-l", "app.kubernetes.io/instance=fedsched"
        )
        assert left.split() == ["persistentvolumeclaim/state-fedsched-agent-0"]
    lab.kubectl("delete", "pvc", "--all", "-n", namespace, "--wait=false")
    lab.kubectl("delete", "pv", namespace, "--wait=false")
    until(lambda: namespace not in lab.kubectl("get", "pv", "-o", "name"), "the volume is gone")


def test_an_uninstallation_that_cannot_lift_gates_leaves_the_agent_in_place(
    lab: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    values = tmp_path / "values.yaml"
    nowhere = {"nodeSelector": {"there-is": "none"}, "liftGates": {"deadlineSeconds": 1}}
    values.write_text(yaml.safe_dump(nowhere | {"state": {"persistent": False}}))
    release = ("fedsched", "--namespace", namespace)
    helm("install", *release, str(CHARTS["agent"]), "--values", str(values), cluster=lab)
    installed = whole_cluster(lab)
    with pytest.raises(HelmError, match="lift-gates failed"):
        helm("uninstall", *release, "--timeout", "220s", cluster=lab)
    assert whole_cluster(lab) == installed
    jobs, agents = "job/fedsched-agent-lift-gates", "statefulset/fedsched-agent"
    left = lab.kubectl("get", jobs, agents, "-n", namespace, "-o", "name").split()
    assert left == ["job.batch/fedsched-agent-lift-gates", "statefulset.apps/fedsched-agent"]
    helm("uninstall", *release, "--no-hooks", cluster=lab)
    lab.kubectl("delete", jobs, "-n", namespace)
