"""The guard: which nodes are out of the question, and which policy file may decide."""

from pathlib import Path

import numpy as np
import pytest

from agent.cluster.view import USAGE_CPU
from agent.scheduling.guard import HELD_BACK, busy, held_back, short_of_gpu_memory
from common.features import FEATURES_VERSION
from common.policy import ARCHITECTURE, initial_arrays
from common.weights import save
from tests.unit.members import Member, node, pod

GOOD = {
    "version": "v1",
    "features_version": str(FEATURES_VERSION),
    "architecture": ARCHITECTURE,
}


def test_only_measured_use_above_the_limit_holds_a_node_back(tmp_path: Path) -> None:
    state = Member(tmp_path).state
    state.replace_nodes([node("hot"), node("edge"), node("unmeasured")])
    state.set_use(USAGE_CPU, {"hot": 29.0 / 32, "edge": 28.8 / 32})
    assert busy(state.view, 0.9)[:3].tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("asks", "short"),
    [
        ({"gpu_memory": 16.0}, [False, True, True]),
        ({"gpu_memory": 16.5}, [True, True, True]),
        ({"gpus": 0, "gpu_share": 0.5, "gpu_memory": 8.0}, [False, True, False]),
        ({"gpus": 0, "gpu_share": 0.5, "gpu_memory": 6.0}, [False, False, False]),
        ({"gpus": 0, "gpu_memory": 99.0}, [False, False, False]),
        ({"gpu_memory": 0.0}, [False, False, False]),
    ],
    ids=["fits", "too large", "share beside a neighbour", "small share", "no GPU", "says nothing"],
)
def test_a_node_needs_the_gpu_memory_that_the_pod_asks_for(
    tmp_path: Path, asks: dict[str, float], short: list[bool]
) -> None:
    state = Member(tmp_path).state
    state.replace_nodes(
        [node("big"), node("shared", gpus=1, gpu_memory=12.0), node("small", gpu_memory=8.0)]
    )
    tenant = {"gpus": 0, "gpu_share": 0.5, "gpu_memory": 6.0}
    state.apply_pod(pod("tenant", node="shared", **tenant))
    rows = [state.rows[name] for name in ("big", "shared", "small")]
    if asks.get("gpu_memory") == 16.0:
        state.apply_node(node("shared", gpus=1, gpu_memory=12.0))
    got = short_of_gpu_memory(state, pod("x", **asks))[rows]
    assert got.tolist() == short
    reasons = held_back(state, pod("x", **asks), np.array(rows, np.int64), 0.9)
    assert [code > 0 and HELD_BACK[code - 1] == "gpu_memory" for code in reasons] == short


def test_a_shared_gpu_must_have_the_memory_free_by_measurement_too(tmp_path: Path) -> None:
    state = Member(tmp_path).state
    state.replace_nodes([node("leaky"), node("sound"), node("unmeasured")])
    state.set_gpu_memory_free({"leaky": 3.0, "sound": 15.0})
    rows = [state.rows[name] for name in ("leaky", "sound", "unmeasured")]
    share = pod("x", gpus=0, gpu_share=0.5, gpu_memory=6.0)
    assert short_of_gpu_memory(state, share)[rows].tolist() == [True, False, False]
    whole = pod("y", gpu_memory=6.0)  # its GPUs will be its own
    assert short_of_gpu_memory(state, whole)[rows].tolist() == [False, False, False]
    state.replace_nodes([node(f"n{number}") for number in range(20)])  # the view grows
    assert not short_of_gpu_memory(state, share)[state.rows["n19"]]


def test_a_policy_file_is_taken_up_replaced_and_dropped(tmp_path: Path) -> None:
    member = Member(tmp_path)
    path = tmp_path / "current.safetensors"
    assert not member.policy.poll()
    assert (member.policy.version, member.policy.current.learned) == ("", False)
    save(path, initial_arrays(1), GOOD)
    assert member.policy.poll()
    assert (member.policy.version, member.policy.current.learned) == ("v1", True)
    assert not member.policy.poll()
    save(path, initial_arrays(2), GOOD | {"version": "v2"})
    assert member.policy.poll()
    expected = initial_arrays(2)["encoder.0.weight"].T
    assert np.array_equal(member.policy.current.net.w1, expected)
    path.unlink()
    assert member.policy.poll()
    assert (member.policy.version, member.policy.current.learned) == ("", False)


@pytest.mark.parametrize("broken", ["torn", "nan", "shape"])
def test_a_broken_file_leaves_the_policy_in_use_and_is_counted_once(
    tmp_path: Path, broken: str
) -> None:
    member = Member(tmp_path)
    path = tmp_path / "current.safetensors"
    save(path, initial_arrays(1), GOOD)
    member.policy.poll()
    arrays = initial_arrays(2)
    if broken == "torn":
        path.write_bytes(path.read_bytes()[:100])
    elif broken == "nan":
        arrays["correction.bias"][0] = np.nan
        save(path, arrays, GOOD)
    else:
        arrays["correction.bias"] = np.zeros(2, np.float32)
        save(path, arrays, GOOD)
    before = member.policy.current
    assert not member.policy.poll()
    assert not member.policy.poll()
    assert member.policy.current is before
    assert member.policy.version == "v1"
    assert member.count("policy_failures_total", reason="broken") == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"features_version": str(FEATURES_VERSION + 1)}, "bad_features_version"),
        ({"features_version": "missing"}, "bad_features_version"),
        ({"architecture": "0123456789abcdef"}, "bad_architecture"),
    ],
)
def test_a_policy_of_another_world_hands_over_to_the_rule(
    tmp_path: Path, changes: dict[str, str], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    member = Member(tmp_path)
    save(tmp_path / "current.safetensors", initial_arrays(1), GOOD)
    member.policy.poll()
    save(tmp_path / "current.safetensors", initial_arrays(1), GOOD | changes)
    assert member.policy.poll()
    assert (member.policy.version, member.policy.current.learned) == ("", False)
    assert member.count("policy_failures_total", reason=reason) == 1
    assert "the rule decides" in caplog.text


def test_a_learned_policys_version_is_written_into_its_decisions(tmp_path: Path) -> None:
    member = Member(tmp_path)
    save(tmp_path / "current.safetensors", initial_arrays(1), GOOD)
    member.policy.poll()
    member.state.replace_nodes([node("a"), node("b", "k80")])
    assert member.best("x", ["a", "b"]) == "a"  # a fresh network changes nothing
    assert [d.policy for d in member.decisions()] == ["v1"]
