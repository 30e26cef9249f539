"""The charts by themselves: what they render, what they refuse, what the images promise them."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent import settings as agent_settings
from coordinator import settings as hub_settings
from tests.kubernetes.image import ROOT, instructions
from tests.kubernetes.releases import CHARTS, IMAGES, KUBE_VERSION, HelmError, helm, one, render

FULL: dict[str, dict[str, Any]] = {
    "agent": {
        "replicas": 3,
        "settings": {"serve": {"rule": "sjf-eft"}, "learn": {"algorithm": "dqn"}},
        "bundle": {"secret": "north-bundle"},
        "scheduler": {"filter": True, "percentageOfNodesToScore": 100, "weight": 1},
        "state": {"storageClass": "fast", "whenDeleted": "Delete"},
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "networkPolicy": {"enabled": True},
        "env": [{"name": "FEDSCHED_AGENT_LEARN__SEED", "value": "7"}],
        "imagePullSecrets": [{"name": "registry"}],
        "extraVolumes": [{"name": "token", "secret": {"secretName": "prometheus"}}],
        "extraVolumeMounts": [{"name": "token", "mountPath": "/etc/prometheus", "readOnly": True}],
        "priorityClassName": "system-cluster-critical",
        "nodeSelector": {"pool": "control"},
        "tolerations": [{"key": "control", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "podAnnotations": {"a": "b"},
        "serviceAccount": {"annotations": {"a": "b"}},
        "service": {"annotations": {"a": "b"}},
    },
    "coordinator": {
        "serverNames": ["hub.example.com", "192.0.2.7"],
        "publicAddress": "hub.example.com:443",
        "settings": {"strategy": "fedmedian", "min_members": 3},
        "registry": {"secret": "postgres"},
        "link": {"type": "NodePort", "nodePort": 30443, "annotations": {"a": "b"}},
        "state": {"storageClass": "fast"},
        "serviceMonitor": {"enabled": True},
        "networkPolicy": {"linkFrom": [{"ipBlock": {"cidr": "192.0.2.0/24"}}]},
        "env": [{"name": "FEDSCHED_COORDINATOR_ETA", "value": "0.5"}],
        "priorityClassName": "high",
        "nodeSelector": {"pool": "control"},
        "tolerations": [{"key": "control", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "podAnnotations": {"a": "b"},
    },
}
both = pytest.mark.parametrize("chart", sorted(CHARTS))


def pod_spec(objects: list[dict[str, Any]]) -> dict[str, Any]:
    spec: dict[str, Any] = one(objects, "StatefulSet")["spec"]["template"]["spec"]
    return spec


def containers(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {container["name"]: container for container in pod_spec(objects)["containers"]}


def settings_file(objects: list[dict[str, Any]], name: str, folder: Path) -> Path:
    path = folder / name
    path.write_text(one(objects, "ConfigMap")["data"][name])
    return path


@both
def test_a_chart_is_free_of_helms_complaints(chart: str, tmp_path: Path) -> None:
    for values in ({}, FULL[chart]):
        file = tmp_path / "values.yaml"
        file.write_text(yaml.safe_dump(values))
        helm(
            "lint", "--strict", "--kube-version", KUBE_VERSION, "--values", str(file),
            str(CHARTS[chart]),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("chart", "values", "says"),
    [
        ("agent", {"replica": 2}, "replica"),
        ("agent", {"replicas": 0}, "replicas"),
        ("agent", {"scheduler": {"name": "default-scheduler"}}, "scheduler"),
        ("agent", {"scheduler": {"httpTimeout": "100"}}, "httpTimeout"),
        ("agent", {"scheduler": {"percentageOfNodesToScore": 101}}, "percentageOfNodesToScore"),
        ("agent", {"scheduler": {"managedResources": ["gpu"]}}, "managedResources"),
        ("agent", {"ports": {"extender": 70000}}, "extender"),
        ("agent", {"state": {"size": "many"}}, "size"),
        ("agent", {"resources": {"serve": {"limit": {"memory": "1Gi"}}}}, "limit"),
        ("agent", {"bundle": {"secret": "a", "tar": "b"}}, "bundle.secret or bundle.tar, not both"),
        ("agent", {"settings": {"state": "elsewhere"}}, "settings.state is made by the chart"),
        ("agent", {"settings": {"serve": {"port": 1}}}, "settings.serve.port is made by the chart"),
        ("coordinator", {"replicas": 2}, "replicas"),
        ("coordinator", {"serverNames": "hub.example.com"}, "serverNames"),
        ("coordinator", {"publicAddress": "hub.example.com"}, "publicAddress"),
        ("coordinator", {"link": {"type": "ExternalName"}}, "type"),
        ("coordinator", {"settings": {"listen": "a:1"}}, "settings.listen is made by the chart"),
    ],
)
def test_wrong_values_are_refused_by_name(
    chart: str, values: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(HelmError, match=says):
        render(chart, values, tmp_path)


@both
def test_the_schema_knows_every_value_and_no_other(chart: str) -> None:
    schema = yaml.safe_load((CHARTS[chart] / "values.schema.json").read_text())
    values = yaml.safe_load((CHARTS[chart] / "values.yaml").read_text())

    def compare(known: dict[str, Any], given: dict[str, Any], place: str) -> None:
        assert known["additionalProperties"] is False, place
        assert set(known["properties"]) - {"global"} == set(given), place
        for name, about in known["properties"].items():
            if "properties" in about:
                compare(about, given[name], f"{place}.{name}")

    compare(schema, values, chart)


def test_an_old_cluster_is_refused_and_a_vendors_version_is_not(tmp_path: Path) -> None:
    with pytest.raises(HelmError, match=r"1\.29"):
        render("agent", {}, tmp_path, version="v1.29.9")
    for version in ("v1.30.1-gke.1156000", "v1.36.3+k3s1", "v1.33.0-eks-1-33-4", "v1.36.3"):
        image = containers(render("agent", {}, tmp_path, version=version))["kube-scheduler"]
        plain = re.match(r"v1\.\d+\.\d+", version)
        assert plain is not None
        assert image["image"] == f"registry.k8s.io/kube-scheduler:{plain.group()}"


def test_the_agents_settings_are_valid_and_fit_the_pod(tmp_path: Path) -> None:
    for values in ({}, FULL["agent"]):
        objects = render("agent", values, tmp_path)
        found = agent_settings.load(settings_file(objects, "agent.yaml", tmp_path), environ={})
        assert found.serve.host == "127.0.0.1"
        (health,) = containers(objects)["serve"]["ports"]
        assert (found.serve.health_host, found.serve.health_port) == ("0.0.0.0", 8090)
        assert health["containerPort"] == 8090
        scheduler = yaml.safe_load(one(objects, "ConfigMap")["data"]["scheduler.yaml"])
        lease = scheduler["leaderElection"]
        assert (found.election.mode, found.election.name) == ("follow", lease["resourceName"])
        assert found.election.namespace == lease["resourceNamespace"] == "ml"
        (extender,) = scheduler["extenders"]
        assert extender["urlPrefix"] == f"http://127.0.0.1:{found.serve.port}"
        mounts = {m["mountPath"] for m in containers(objects)["learn"]["volumeMounts"]}
        assert str(found.state) in mounts
        assert found.learn.bundle is None or str(found.learn.bundle) in mounts
    assert found.serve.rule == "sjf-eft"
    assert found.learn.algorithm == "dqn"
    assert found.learn.bundle == Path("/etc/fedsched/bundle")


def test_the_schedulers_configuration_says_what_the_values_say(tmp_path: Path) -> None:
    def extender_and_rest(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        data = one(render("agent", values, tmp_path), "ConfigMap")["data"]
        config: dict[str, Any] = yaml.safe_load(data["scheduler.yaml"])
        (extender,) = config["extenders"]
        return extender, config

    extender, config = extender_and_rest({})
    assert (extender["weight"], extender["httpTimeout"]) == (13, "100ms")
    assert extender["nodeCacheCapable"] is extender["ignorable"] is True
    assert "filterVerb" not in extender
    assert "managedResources" not in extender
    assert "percentageOfNodesToScore" not in config
    assert config["profiles"] == [{"schedulerName": "fedsched"}]
    profile = {"plugins": {"score": {"disabled": [{"name": "ImageLocality"}]}}}
    extender, config = extender_and_rest(
        {
            "scheduler": FULL["agent"]["scheduler"]
            | {"name": "ml", "profile": profile, "managedResources": ["nvidia.com/gpu"]}
        }
    )
    assert (extender["weight"], extender["filterVerb"]) == (1, "filter")
    assert extender["managedResources"] == [{"name": "nvidia.com/gpu"}]
    assert config["percentageOfNodesToScore"] == 100
    assert config["profiles"] == [profile | {"schedulerName": "ml"}]


def test_without_its_own_scheduler_the_agent_is_reached_from_elsewhere(tmp_path: Path) -> None:
    values = {
        "scheduler": {"enabled": False},
        "networkPolicy": {"enabled": True, "extenderFrom": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]},
    }
    objects = render("agent", values, tmp_path)
    assert set(containers(objects)) == {"serve", "learn"}
    found = agent_settings.load(settings_file(objects, "agent.yaml", tmp_path), environ={})
    assert (found.serve.host, found.election.mode) == ("0.0.0.0", "lease")
    ports = {port["name"]: port["port"] for port in one(objects, "Service")["spec"]["ports"]}
    assert ports == {"health": found.serve.health_port, "extender": found.serve.port}
    assert {o["roleRef"]["name"] for o in objects if o["kind"] == "ClusterRoleBinding"} == {
        "ml-fedsched-agent",
        "ml-fedsched-agent-lift-gates",
    }
    _, extender = one(objects, "NetworkPolicy")["spec"]["ingress"]
    assert extender["ports"] == [{"port": "extender"}]


def test_the_hubs_settings_are_valid_and_fit_the_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = render("coordinator", {}, tmp_path)
    found = hub_settings.load_settings(settings_file(objects, "hub.yaml", tmp_path))
    service = one(objects, "Service", "fedsched-coordinator")
    assert found.server_names[0] == f"{service['metadata']['name']}.ml.svc"
    assert found.dialled == f"{found.server_names[0]}:{service['spec']['ports'][0]['port']}"
    objects = render("coordinator", FULL["coordinator"], tmp_path)
    for variable in containers(objects)["serve"]["env"]:
        monkeypatch.setenv(variable["name"], variable.get("value", "sqlite://"))
    found = hub_settings.load_settings(settings_file(objects, "hub.yaml", tmp_path))
    assert found.dialled == "hub.example.com:443"
    assert (found.strategy, found.eta, found.database) == ("fedmedian", 0.5, "sqlite://")
    assert str(found.state_dir) in {
        mount["mountPath"] for mount in containers(objects)["serve"]["volumeMounts"]
    }


def test_the_hubs_dashboard_is_closed_to_other_namespaces(tmp_path: Path) -> None:
    link, dashboard = one(render("coordinator", {}, tmp_path), "NetworkPolicy")["spec"]["ingress"]
    assert link == {"ports": [{"port": "link"}]}
    assert dashboard == {"ports": [{"port": "dashboard"}], "from": [{"podSelector": {}}]}


def test_only_who_speaks_to_the_api_server_has_a_token(tmp_path: Path) -> None:
    objects = render("agent", FULL["agent"], tmp_path)
    assert pod_spec(objects)["automountServiceAccountToken"] is False
    mounts = {
        name: {mount["name"] for mount in container["volumeMounts"]}
        for name, container in containers(objects).items()
    }
    assert {name for name, mounted in mounts.items() if "api" in mounted} == {
        "serve",
        "kube-scheduler",
    }
    assert {name for name, mounted in mounts.items() if "bundle" in mounted} == {"learn"}
    hub = pod_spec(render("coordinator", {}, tmp_path))
    assert hub["automountServiceAccountToken"] is False
    assert not any("projected" in volume for volume in hub["volumes"])


@both
def test_every_container_is_confined(chart: str, tmp_path: Path) -> None:
    objects = render(chart, FULL[chart], tmp_path)
    specs = [o["spec"]["template"]["spec"] for o in objects if o["kind"] in ("StatefulSet", "Job")]
    assert len(specs) == {"agent": 2, "coordinator": 1}[chart]
    for spec in specs:
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in (*spec.get("initContainers", []), *spec["containers"]):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["limits"]["memory"], container["name"]


def test_several_agents_are_spread_and_not_drained_together(tmp_path: Path) -> None:
    assert not [o for o in render("agent", {}, tmp_path) if o["kind"] == "PodDisruptionBudget"]
    objects = render("agent", {"replicas": 2}, tmp_path)
    labels = one(objects, "StatefulSet")["spec"]["template"]["metadata"]["labels"]
    chosen = one(objects, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"]
    assert chosen.items() <= labels.items()
    (spread,) = pod_spec(objects)["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"].items() <= labels.items()


def test_what_a_container_mounts_is_a_volume_of_its_pod(tmp_path: Path) -> None:
    for chart, values in FULL.items():
        for objects in (render(chart, {}, tmp_path), render(chart, values, tmp_path)):
            spec = pod_spec(objects)
            claims = one(objects, "StatefulSet")["spec"].get("volumeClaimTemplates", [])
            there = {volume["name"] for volume in spec["volumes"]}
            there |= {claim["metadata"]["name"] for claim in claims}
            used = {
                mount["name"]
                for container in (*spec.get("initContainers", []), *spec["containers"])
                for mount in container["volumeMounts"]
            }
            assert used == there, chart


def test_the_installation_page_gives_values_as_they_are(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "installation.md").read_text()
    rows = re.findall(r"^\| (agent|coordinator) \| `([\w.]+)` \| `(.*?)` \|", text, re.MULTILINE)
    assert len(rows) > 10
    for chart, name, default in rows:
        value = yaml.safe_load((CHARTS[chart] / "values.yaml").read_text())
        for step in name.split("."):
            value = value[step]
        assert value == yaml.safe_load(default), name
    files = dict(re.findall(r"^```yaml\n# (\w+)-values.yaml\n(.*?)^```", text, re.DOTALL | re.M))
    hub = render("coordinator", yaml.safe_load(files["hub"]), tmp_path)
    hub_settings.load_settings(settings_file(hub, "hub.yaml", tmp_path))
    agent = render("agent", yaml.safe_load(files["agent"]), tmp_path)
    found = agent_settings.load(settings_file(agent, "agent.yaml", tmp_path), environ={})
    assert found.telemetry.prometheus_url
    assert len(re.findall(r"^helm .* charts/(?:agent|coordinator) ", text, re.MULTILINE)) == 3
    for chart in re.findall(r"^helm .* charts/(\w+) ", text, re.MULTILINE):
        assert chart in CHARTS


@both
def test_the_image_is_what_the_chart_takes_it_for(chart: str, tmp_path: Path) -> None:
    image = IMAGES[f"fedsched/{chart}"]
    objects = render(chart, {}, tmp_path)
    user = pod_spec(objects)["securityContext"]
    assert image.user == f"{user['runAsUser']}:{user['runAsGroup']}"
    assert image.entrypoint == ["fedsched"]
    for taken in image.copied:
        assert (ROOT / taken).exists(), taken
        # What the builder is not sent cannot be copied.
        assert f"!{taken}" in (ROOT / ".dockerignore").read_text().splitlines(), taken
    # Whatever is written to must be a mount: the root is read-only.
    written = {image.environment["HOME"], image.folder}
    if chart == "agent":
        written.add(image.environment["FEDSCHED_CACHE"])
    for name, container in containers(objects).items():
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert name == "kube-scheduler" or written <= mounts, name


def test_lifting_gates_needs_no_kernels_for_its_pod_has_no_place_to_keep_them() -> None:
    look = "import sys, agent.cli, agent.scheduling.lift_gates; sys.exit('numba' in sys.modules)"
    subprocess.run([sys.executable, "-c", look], check=True)


@both
def test_the_image_installs_an_extra_that_exists_with_pinned_versions(chart: str) -> None:
    project = (ROOT / "pyproject.toml").read_text()
    steps = [
        rest
        for name, rest in instructions(ROOT / "docker" / f"{chart}.Dockerfile")
        if name == "RUN" and "pip install" in rest
    ]
    extras = re.findall(r"'\.\[(\w+)\]'", " ".join(steps))
    assert extras == [{"agent": "learn", "coordinator": "coordinator"}[chart]]
    assert re.search(rf"^{extras[0]} = \[", project, re.MULTILINE)
    assert all("-c constraints.txt" in step for step in steps)
