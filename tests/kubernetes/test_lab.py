"""The lab is a real cluster: it schedules, runs, forbids, and survives the loss of its parts."""

import json
import socket
from pathlib import Path
from typing import Any

import kubernetes
import pytest

from examples.lab.control_plane import ControlPlane, node_manifest, pod_manifest, until
from examples.processes import ExampleError
from tests.kubernetes.conftest import OwnLab


def core(lab: ControlPlane) -> Any:
    return kubernetes.client.CoreV1Api(lab.api())


def phases(lab: ControlPlane, namespace: str) -> list[tuple[str, bool]]:
    """Phase of every pod, and whether it has a node."""
    pods = core(lab).list_namespaced_pod(namespace).items
    return [(pod.status.phase, bool(pod.spec.node_name)) for pod in pods]


def deployment(replicas: int) -> str:
    template = pod_manifest("web", labels={"app": "web"})
    template["spec"] |= {"restartPolicy": "Always"}
    return json.dumps(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "web"},
            "spec": {
                "replicas": replicas,
                "selector": {"matchLabels": {"app": "web"}},
                "template": {
                    "metadata": {"labels": {"app": "web"}},
                    "spec": template["spec"],
                },
            },
        }
    )


def test_deployment_becomes_pods_that_are_bound_and_run(lab: ControlPlane, namespace: str) -> None:
    lab.kubectl("apply", "-n", namespace, "-f", "-", stdin=deployment(3))
    lab.kubectl("rollout", "status", "-n", namespace, "deployment/web", "--timeout=60s")
    assert phases(lab, namespace) == [("Running", True)] * 3
    version = json.loads(lab.kubectl("version", "-o", "json"))
    assert version["serverVersion"]["gitVersion"] == version["clientVersion"]["gitVersion"]
    assert version["serverVersion"]["gitVersion"].startswith("v1.3")


def test_gpus_are_counted_by_the_scheduler(lab: ControlPlane, namespace: str) -> None:
    for n in range(3):
        pod = pod_manifest(f"gpu-{n}", namespace=namespace, gpus=3)
        core(lab).create_namespaced_pod(namespace, pod)
    until(lambda: phases(lab, namespace).count(("Running", True)) == 2, "two of three have room")
    until(
        lambda: "Insufficient nvidia.com/gpu" in lab.kubectl("get", "events", "-n", namespace),
        "the scheduler says why the third waits",
    )
    assert phases(lab, namespace).count(("Pending", False)) == 1


def test_gated_pod_waits_for_its_gate_to_be_lifted(lab: ControlPlane, namespace: str) -> None:
    pod = pod_manifest("gated", namespace=namespace, gated=True)
    core(lab).create_namespaced_pod(namespace, pod)
    core(lab).create_namespaced_pod(namespace, pod_manifest("free", namespace=namespace))
    until(lambda: ("Running", True) in phases(lab, namespace), "the pod without a gate runs")
    assert ("Pending", False) in phases(lab, namespace)
    lift = json.dumps([{"op": "remove", "path": "/spec/schedulingGates/0"}])
    lab.kubectl("patch", "pod", "gated", "-n", namespace, "--type=json", "-p", lift)
    until(lambda: phases(lab, namespace) == [("Running", True)] * 2, "the other one follows")


def client(kubeconfig: Path) -> Any:
    load: Any = kubernetes.config.new_client_from_config
    return kubernetes.client.CoreV1Api(load(str(kubeconfig)))


def test_user_may_do_what_it_was_granted_and_no_more(lab: ControlPlane, namespace: str) -> None:
    users = client(lab.user_kubeconfig("anna", ["readers"]))
    with pytest.raises(kubernetes.client.ApiException) as refused:
        users.list_namespaced_pod(namespace)
    assert refused.value.status == 403
    assert 'User \\"anna\\" cannot list' in str(refused.value.body)
    lab.kubectl(
        "create", "rolebinding", "readers", "-n", namespace, "--clusterrole=view", "--group=readers"
    )
    until(lambda: allowed(users, namespace), "the grant has reached the authorizer")
    with pytest.raises(kubernetes.client.ApiException) as refused:
        users.create_namespaced_pod(namespace, pod_manifest("mine", namespace=namespace))
    assert refused.value.status == 403


def allowed(users: Any, namespace: str) -> bool:
    try:
        users.list_namespaced_pod(namespace)
    except kubernetes.client.ApiException as error:
        if error.status != 403:
            raise
        return False
    return True


def test_token_speaks_for_its_service_account_alone(lab: ControlPlane, namespace: str) -> None:
    kubeconfig = lab.token_kubeconfig(namespace, "default")
    told = json.loads(
        lab.kubectl(f"--kubeconfig={kubeconfig}", "auth", "whoami", "-o", "json")
    )["status"]["userInfo"]["username"]  # fmt: skip
    assert told == f"system:serviceaccount:{namespace}:default"
    assert not allowed(client(kubeconfig), namespace)


def test_killed_api_server_comes_back_on_its_port_with_all_that_it_knew(own_lab: OwnLab) -> None:
    lab = own_lab(controllers=False, kwok=False)
    scheduler = lab.start_scheduler({})
    lab.create_nodes([node_manifest("only")])
    core(lab).create_namespaced_pod("default", pod_manifest("first"))
    until(lambda: phases(lab, "default")[0][1], "the first pod is bound")
    lab.kill("kube-apiserver")
    assert not lab.alive("kube-apiserver")
    port = int(lab.url.rpartition(":")[2])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 5.0).close()
    lab.start("kube-apiserver")
    core(lab).create_namespaced_pod("default", pod_manifest("second"))
    until(lambda: [node for _, node in phases(lab, "default")] == [True, True], "both are bound")
    assert scheduler.alive
    assert scheduler.restarts == 0
    assert 'scheduler_schedule_attempts_total{profile="default-scheduler",result="scheduled"}' in (
        lab.metrics()
    )


def test_cluster_beside_another_knows_nothing_of_it_and_leaves_nothing_behind(
    lab: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    with ControlPlane(tmp_path / "other", name="other", controllers=False, kwok=False) as other:
        assert other.url != lab.url
        assert not core(other).list_node().items
        assert namespace in lab.kubectl("get", "namespaces")
        assert namespace not in other.kubectl("get", "namespaces")
        stranger = other.user_kubeconfig("anna", ["system:masters"])
        with pytest.raises(ExampleError, match="x509"):
            lab.kubectl(f"--kubeconfig={stranger}", f"--server={lab.url}", "get", "nodes")
        other.run("sleeper", ["sleep", "1000"])
        started = [process.popen for process in other.processes.values()]
    assert [popen is not None and popen.returncode for popen in started] == [-9, -9, -9]
    assert lab.alive("kube-apiserver")


def test_process_that_does_not_come_up_is_told_with_the_end_of_its_log(lab: ControlPlane) -> None:
    with pytest.raises(ExampleError, match=r"(?s)broken of lab did not get ready.*nonsense"):
        lab.start_scheduler({"nonsense": True}, name="broken")
    assert not lab.alive("broken")
    with pytest.raises(ValueError, match="runs already"):
        lab.start("etcd")
