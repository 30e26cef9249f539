"""What the charts grant: exactly what the agent does, asked of the real API server."""

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import kubernetes
import pytest
import yaml

from agent.cluster.records import GATE
from examples.lab.control_plane import ControlPlane, pod_manifest, until
from tests.kubernetes.releases import CHARTS, helm, one, render

VERBS = ("get", "list", "watch", "create", "update", "patch", "delete")
RESOURCES = (
    ("", "nodes"),
    ("", "pods"),
    ("", "pods/binding"),
    ("", "pods/eviction"),
    ("", "pods/exec"),
    ("", "pods/status"),
    ("", "secrets"),
    ("", "configmaps"),
    ("", "namespaces"),
    ("", "serviceaccounts"),
    ("", "serviceaccounts/token"),
    ("", "persistentvolumeclaims"),
    ("", "events"),
    ("events.k8s.io", "events"),
    ("apps", "statefulsets"),
    ("batch", "jobs"),
    ("coordination.k8s.io", "leases"),
    ("metrics.k8s.io", "nodes"),
    ("metrics.k8s.io", "pods"),
    ("rbac.authorization.k8s.io", "clusterroles"),
    ("rbac.authorization.k8s.io", "clusterrolebindings"),
    ("resource.k8s.io", "resourceslices"),
    ("resource.k8s.io", "deviceclasses"),
    ("resource.k8s.io", "resourceclaims"),
)
EVERYWHERE = {
    ("list", "", "nodes"),
    ("watch", "", "nodes"),
    ("list", "", "pods"),
    ("watch", "", "pods"),
    ("patch", "", "pods"),
    ("list", "resource.k8s.io", "resourceslices"),
    ("watch", "resource.k8s.io", "resourceslices"),
    ("list", "resource.k8s.io", "deviceclasses"),
    ("watch", "resource.k8s.io", "deviceclasses"),
    ("list", "metrics.k8s.io", "nodes"),
}
AT_HOME = {("create", "events.k8s.io", "events"), ("create", "coordination.k8s.io", "leases")}
LEASE = {("get", "coordination.k8s.io", "leases"), ("update", "coordination.k8s.io", "leases")}
Right = tuple[str, str, str]


def allowed(
    lab: ControlPlane, user: str, namespace: str, name: str, rights: Iterable[Right]
) -> set[Right]:
    """Which of these the API server would let ``user`` do."""
    reviews = kubernetes.client.AuthorizationV1Api(lab.api())
    found = set()
    for verb, group, whole in rights:
        resource, _, sub = whole.partition("/")
        about = {"verb": verb, "group": group, "resource": resource, "subresource": sub}
        spec = {"user": user, "resourceAttributes": about | {"namespace": namespace, "name": name}}
        answer: Any = reviews.create_subject_access_review({"spec": spec})
        if answer.status.allowed:
            found.add((verb, group, whole))
    return found


@pytest.fixture
def account(lab: ControlPlane, namespace: str, tmp_path: Path) -> Iterator[str]:
    """An agent's service account without a kube-scheduler beside it: the agent's own rights."""
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump({"scheduler": {"enabled": False}}))
    release = ("rights", "--namespace", namespace)
    helm("install", *release, str(CHARTS["agent"]), "--values", str(values), cluster=lab)
    user = f"system:serviceaccount:{namespace}:rights-agent"

    def known() -> bool:
        """The authorizer hears of roles and bindings by watches, not at once."""
        granted = EVERYWHERE | AT_HOME | LEASE
        return allowed(lab, user, namespace, "rights-agent", granted) == granted

    until(known, "what the chart grants is in force")
    yield user
    helm("uninstall", *release, "--no-hooks", cluster=lab)


def test_the_agent_may_do_what_it_does_and_nothing_more(
    lab: ControlPlane, namespace: str, account: str
) -> None:
    grid = [(verb, *resource) for verb, resource in itertools.product(VERBS, RESOURCES)]
    lease = "rights-agent"
    assert allowed(lab, account, namespace, "", grid) == EVERYWHERE | AT_HOME
    assert allowed(lab, account, namespace, "of-another", LEASE) == set()
    assert allowed(lab, account, namespace, lease, LEASE) == LEASE
    # Elsewhere it has no events to write and no lease to hold.
    assert allowed(lab, account, "kube-system", lease, grid) == EVERYWHERE


def test_what_is_not_granted_is_refused(lab: ControlPlane, namespace: str, account: str) -> None:
    path = lab.token_kubeconfig(namespace, account.rpartition(":")[2])
    load: Any = kubernetes.config.new_client_from_config
    core = kubernetes.client.CoreV1Api(load(str(path)))
    assert {node.metadata.name for node in core.list_node().items} >= lab.ready_nodes()
    for refused in (
        lambda: core.list_secret_for_all_namespaces(),
        lambda: core.delete_namespaced_pod("any", namespace),
        lambda: core.create_namespaced_pod(namespace, {"metadata": {"name": "any"}}),
        lambda: core.patch_node("cpu-0", {"spec": {"unschedulable": True}}),
    ):
        with pytest.raises(kubernetes.client.ApiException) as caught:
            refused()
        assert caught.value.status == 403


def test_patching_pods_is_for_lifting_the_own_gate_and_for_nothing_else(
    lab: ControlPlane, namespace: str, account: str
) -> None:
    path = lab.token_kubeconfig(namespace, account.rpartition(":")[2])
    load: Any = kubernetes.config.new_client_from_config
    core = kubernetes.client.CoreV1Api(load(str(path)))
    admin = kubernetes.client.CoreV1Api(lab.api())
    pod = pod_manifest("waits", namespace=namespace, labels={"a": "b"})
    pod["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}, {"name": GATE}]
    admin.create_namespaced_pod(namespace, pod)
    place = "/spec/schedulingGates"
    lift = {"op": "remove", "path": f"{place}/1"}
    image = {"op": "replace", "path": "/spec/containers/0/image", "value": "evil"}
    label = {"op": "replace", "path": "/metadata/labels/a", "value": "c"}
    note = {"op": "add", "path": "/metadata/annotations", "value": {"a": "b"}}
    others = {"op": "remove", "path": f"{place}/0"}

    def refused(*operations: dict[str, str | dict[str, str]]) -> bool:
        try:
            core.patch_namespaced_pod("waits", namespace, list(operations), dry_run="All")
        except kubernetes.client.ApiException as error:
            return "change nothing else" in str(error.body)
        return False

    until(lambda: refused(image), "the policy is in force")
    for wrong in ([label], [note], [others], [lift, image], [lift, others]):
        assert refused(*wrong), wrong
    core.patch_namespaced_pod("waits", namespace, [lift])
    left = admin.read_namespaced_pod("waits", namespace).spec.scheduling_gates
    assert [gate.name for gate in left] == ["kueue.x-k8s.io/admission"]
    # Others are not concerned.
    admin.patch_namespaced_pod("waits", namespace, [label])


def test_the_hook_that_lifts_gates_may_do_that_alone(tmp_path: Path) -> None:
    objects = render("agent", {}, tmp_path)
    role = one(objects, "ClusterRole", "ml-fedsched-agent-lift-gates")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "patch"]}]
    account = one(objects, "Job")["spec"]["template"]["spec"]["serviceAccountName"]
    (condition,) = one(objects, "ValidatingAdmissionPolicy")["spec"]["matchConditions"]
    assert f"'system:serviceaccount:ml:{account}'" in condition["expression"]
