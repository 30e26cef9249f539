"""Whatever becomes of the agent, a real kube-scheduler goes on by its own scores and says why."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from kubernetes import client

from agent.journal import Decision, read
from common.features import FEATURES_VERSION
from common.policy import initial_arrays
from common.weights import save
from examples.lab.control_plane import ControlPlane, node_manifest, pod_manifest
from tests.kubernetes.cut_wire import Wire, through
from tests.kubernetes.member import Agent, until
from tests.kubernetes.usage import NodeExporter

pytestmark = pytest.mark.timeout(600)  # only bounds a hanging run

NODES = ("a", "b", "c")
SERVE: dict[str, Any] = {
    # Silence is noticed within seconds; a quiet cluster's watches are renewed before.
    "stale_seconds": 4.0,
    "watch_timeout_seconds": 1,
    "read_timeout_seconds": 2.0,
}


@dataclass
class Scene:
    """A cluster whose kube-scheduler asks an agent, which sees the cluster through a wire."""

    plane: ControlPlane
    agent: Agent
    api: Wire
    """Between the agent and the API server."""
    extender: Wire
    """Between kube-scheduler and the agent."""
    exporter: NodeExporter

    def __post_init__(self) -> None:
        self.core: Any = client.CoreV1Api(self.plane.api())

    def place(self, name: str, count: int = 2, *, cpu: str = "10m") -> list[str]:
        """Create pods and wait until kube-scheduler has bound every one; their UIDs."""
        names = [f"{name}-{number}" for number in range(count)]
        for pod in names:
            self.core.create_namespaced_pod("default", pod_manifest(pod, cpu=cpu, memory="10Mi"))
        for pod in names:
            until(lambda pod=pod: self.read(pod).spec.node_name in NODES, f"{pod} is bound")
        return [self.read(pod).metadata.uid for pod in names]

    def read(self, pod: str) -> Any:
        """A pod as the API server has it."""
        return self.core.read_namespaced_pod(pod, "default")

    def events(self) -> set[str]:
        """Reasons of the Events about the agent's pod."""
        found = self.core.list_namespaced_event("default").items
        return {e.reason for e in found if e.involved_object.name == "agent-0"}

    def skipped(self) -> int:
        """How often kube-scheduler went on without the filter."""
        log = self.plane.log("kube-scheduler").read_text(errors="replace")
        return log.count("Skipping extender as it returned error")

    def passed_over(self) -> float:
        """How often it did so, or the filter let all through as the agent did not see enough."""
        return self.skipped() + self.agent.silent("stale_state")

    def decided(self) -> set[str]:
        """UIDs of the pods that the agent's journal holds decisions about."""
        records = read(self.agent.state / "journal")
        return {uid for r, _, _ in records if isinstance(r, Decision) for uid in r.pods}

    def start_agent(self, **serve: Any) -> None:
        """Start the agent anew, with these settings for this once."""
        self.agent.serve.kill()
        command = self.agent.serve.command
        environment = [f"FEDSCHED_AGENT_SERVE__{k.upper()}={v}" for k, v in serve.items()]
        self.agent.serve.command = ["env", *environment, *command]
        self.agent.serve.start()
        self.agent.serve.command = command
        until(self.agent.ready, "the agent is ready")


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """What the tests share; its agent does not run yet."""
    folder = tmp_path_factory.mktemp("safety")
    with contextlib.ExitStack() as stack:
        plane = stack.enter_context(ControlPlane(folder, name="safety"))
        plane.create_nodes(node_manifest(name) for name in NODES)
        exporter = stack.enter_context(NodeExporter(dict.fromkeys(NODES, 0.1)))
        api = stack.enter_context(Wire(int(plane.url.rpartition(":")[2])))
        settings = {
            "kubernetes": {"pod": "agent-0"},
            "serve": SERVE,
            "telemetry": exporter.run_prometheus(plane, folder),
        }
        agent = Agent(folder, through(plane.kubeconfig, api, folder / "wired"), settings)
        stack.callback(agent.stop)
        asked = stack.enter_context(Wire(agent.port))
        entry = {
            "urlPrefix": f"http://127.0.0.1:{asked.port}",
            "filterVerb": "filter",
            "prioritizeVerb": "prioritize",
            "weight": 13,
            "httpTimeout": "400ms",  # a busy machine is later than a real one
            "nodeCacheCapable": True,
            "ignorable": True,
        }
        plane.start_scheduler({"extenders": [entry]})
        yield Scene(plane, agent, api, asked, exporter)


@pytest.fixture
def scene(stage: Scene) -> Scene:
    """Everything is well, and the agent ready."""
    stage.api.mend()
    stage.extender.delay = 0.0
    stage.exporter.use.update(dict.fromkeys(NODES, 0.1))
    if not stage.agent.serve.alive:
        stage.agent.serve.start()
    until(stage.agent.ready, "the agent is ready")
    return stage


def place_until(scene: Scene, name: str, met: Callable[[], bool], what: str) -> None:
    """Place pods until this is so: on a busy machine one of them may be placed otherwise."""
    numbers = iter(range(1000))

    def placed() -> bool:
        scene.place(f"{name}-{next(numbers)}", 1)
        return met()

    until(placed, what)


def opinions_again(scene: Scene, name: str) -> None:
    """Place pods until one of them is placed with the agent's scores."""
    before = scene.agent.opinions()
    heard = "the agent's scores count again"
    place_until(scene, f"{name}-again", lambda: scene.agent.opinions() > before, heard)


def test_an_agent_beyond_its_budget_has_no_opinion_and_counts_it(stage: Scene) -> None:
    stage.start_agent(budget_seconds=1e-9)
    late = "the agent counts that it is late"
    place_until(stage, "slow", lambda: stage.agent.silent("deadline_exceeded") >= 2, late)
    assert stage.agent.opinions() == 0
    stage.agent.serve.kill()


def test_an_agent_that_is_gone_is_passed_over_and_heard_again_when_it_is_back(
    stage: Scene,
) -> None:
    stage.agent.serve.kill()
    stage.place("gone", 5)
    stage.start_agent()
    opinions_again(stage, "gone")


def test_what_a_hung_agent_is_asked_costs_a_time_out_and_is_no_decision_of_its(
    scene: Scene,
) -> None:
    before = scene.agent.silent("unheard")
    assert scene.agent.serve.popen is not None
    scene.agent.serve.popen.send_signal(signal.SIGSTOP)
    try:
        uids = scene.place("hung", 4)
        until(lambda: not scene.extender.unanswered, "kube-scheduler has hung up")
    finally:
        scene.agent.serve.popen.send_signal(signal.SIGCONT)
    until(lambda: scene.agent.silent("unheard") > before, "the agent sees nobody listens")
    opinions_again(scene, "hung")
    assert not scene.decided() & set(uids)


def test_answers_that_come_too_late_leave_kube_schedulers_scores(scene: Scene) -> None:
    scene.extender.delay = 0.5
    asked = scene.agent.metric("fedsched_extender_answers_total", verb="prioritize")
    scene.place("late")
    until(
        lambda: scene.agent.metric("fedsched_extender_answers_total", verb="prioritize") > asked,
        "the agent was asked",
    )
    scene.extender.delay = 0.0
    opinions_again(scene, "late")


@pytest.mark.parametrize(
    ("reason", "version"), [("broken", ""), ("bad_features_version", str(FEATURES_VERSION + 1))]
)
def test_a_policy_that_cannot_be_used_is_counted_and_the_rule_decides(
    scene: Scene, reason: str, version: str
) -> None:
    path = scene.agent.state / "policy" / "current.safetensors"
    path.parent.mkdir(exist_ok=True)
    name = "fedsched_policy_failures_total"
    before = scene.agent.metric(name, reason=reason)
    if version:
        save(path, initial_arrays(), {"features_version": version})
    else:
        path.write_bytes(b"no weights")
    until(lambda: scene.agent.metric(name, reason=reason) > before, "the failure is counted")
    assert scene.agent.metric("fedsched_policy_learned") == 0
    opinions_again(scene, f"policy-{reason}".replace("_", "-"))
    assert str(path) in scene.agent.serve.log.read_text()


def test_an_agent_cut_off_from_the_api_server_has_no_opinion_and_is_not_ready(
    scene: Scene,
) -> None:
    before = scene.agent.silent("stale_state")
    scene.api.cut()
    until(lambda: not scene.agent.ready(), "the agent is not ready")
    scene.place("stale")
    until(lambda: scene.agent.silent("stale_state") >= before + 2, "the agent counts why")
    assert scene.agent.metric("fedsched_synced") == 0
    until(lambda: "WatchStale" in scene.agent.serve.log.read_text(), "the log says why")
    assert scene.agent.get("/healthz").status_code == 200, "nothing to restart it for"
    scene.api.mend()
    until(scene.agent.ready, "the agent is ready again")
    opinions_again(scene, "stale")
    until(lambda: {"WatchStale", "WatchFresh"} <= scene.events(), "Events say why")


def test_everybody_goes_on_after_the_api_server_was_away(scene: Scene) -> None:
    scene.plane.kill("kube-apiserver")
    until(lambda: not scene.agent.ready(), "the agent is not ready")
    scene.plane.start("kube-apiserver")
    scene.place("back")
    until(scene.agent.ready, "the agent is ready again")
    opinions_again(scene, "back")


def test_the_filter_keeps_pods_off_busy_nodes_and_is_passed_over_where_it_fails(
    scene: Scene,
) -> None:
    guarded = scene.agent.metric("fedsched_guard_nodes_total", reason="cpu")
    scene.exporter.use.update(a=0.97, b=0.97)
    mean = 0.66  # of 0.97, 0.97 and 0.1: the first two are above 0.9 for certain
    until(
        lambda: scene.agent.metric("fedsched_node_use", source="cpu") > mean,
        "the agent sees what is busy",
    )
    cool = 0
    for number in range(90):  # a node takes 110 pods
        over, pod = scene.passed_over(), f"cool-{number}"
        scene.place(pod, 1)
        # A filter that is late is passed over, on a busy machine too.
        if scene.passed_over() == over:
            assert scene.read(f"{pod}-0").spec.node_name == "c"
            cool += 1
        if cool == 4:
            break
    assert cool == 4
    assert scene.agent.metric("fedsched_guard_nodes_total", reason="cpu") > guarded
    skipped = scene.skipped()
    scene.agent.serve.kill()
    scene.place("hot", 6, cpu="2")  # large enough for kube-scheduler to spread them by itself
    assert {scene.read(f"hot-{number}").spec.node_name for number in range(6)} & {"a", "b"}
    assert scene.skipped() >= skipped + 6
