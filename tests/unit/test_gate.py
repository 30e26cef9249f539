"""The gate lets through what is no worse than the rule on the cluster's own simulator."""

from pathlib import Path

import numpy as np
import pytest

from agent.cluster import nodes_file
from agent.cluster.records import Node
from agent.journal import Journal, Record
from agent.learning.gate import GateSettings, Verdict, compare, judge, looks
from agent.learning.promotion import Gatekeeper, Live, corrections_of, promoted, write_live
from agent.learning.speeds import SpeedModel, sample
from agent.learning.store import Store
from agent.learning.twin import Twin, build
from agent.scheduling.decision import make_policy
from agent.statistics import Ratio
from common.features import COLUMN, FEATURE_COUNT
from common.policy import initial_arrays
from common.weights import Arrays, load
from tests.unit.journals import NODES, life_of_pods

SETTINGS = GateSettings(windows=4, jobs=40)


def filled(folder: Path, records: list[Record]) -> Store:
    journal = Journal(folder / "journal")
    for record in records:
        journal.append(record)
    store = Store(folder / "experience.sqlite")
    store.ingest(journal.folder, sample)
    return store


def twin_of(store: Store, nodes: list[Node]) -> Twin | None:
    model = SpeedModel()
    model.update(store.speed_sums())
    return build(store, model, nodes)


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Twin:
    store = filled(tmp_path_factory.mktemp("gate"), life_of_pods(120, gap=200.0))
    made = twin_of(store, NODES)
    store.close()
    assert made is not None
    return made


def contrarian() -> Arrays:
    """Weights whose correction is tanh(5 · slow-down): they prefer slow nodes, against the rule."""
    arrays = {name: np.zeros_like(array) for name, array in initial_arrays().items()}
    arrays["encoder.0.weight"][0, COLUMN["effect_slowdown"]] = 1.0
    arrays["encoder.1.weight"][0, 0] = 1.0
    arrays["correction.weight"][0, 0] = 5.0
    return arrays


def ratio(mean: float, high: float) -> Ratio:
    return Ratio(mean, mean * mean / high, high, 16)


@pytest.mark.parametrize(
    ("mean", "high", "passes"),
    [
        (1.0, 1.0, True),
        (0.95, 0.99, True),
        (0.95, 1.009, True),
        (0.95, 1.011, False),
        (1.001, 1.002, False),
    ],
    ids=["equal", "clearly better", "better, loss within tolerance", "too uncertain", "worse"],
)
def test_a_pass_needs_a_good_mean_and_a_bounded_loss(
    mean: float, high: float, passes: bool
) -> None:
    verdict = judge(ratio(mean, high), ratio(1.0, 3.0), GateSettings(tolerance=0.01))
    assert verdict.passed is passes
    assert verdict.gain == pytest.approx(1.0 - mean)


@pytest.mark.parametrize(("tail", "passes"), [(1.04, True), (1.06, False)])
def test_a_better_mean_must_not_be_paid_for_by_the_slowest_jobs(tail: float, passes: bool) -> None:
    settings = GateSettings(tail_tolerance=0.05)
    assert judge(ratio(0.95, 0.97), ratio(tail, 2.0), settings).passed is passes


def test_a_policy_that_equals_the_rule_passes_exactly(twin: Twin) -> None:
    (verdict,) = compare(
        twin,
        make_policy("hrrn-eft"),
        [make_policy("hrrn-eft", initial_arrays(), margin=0.0)],
        seed=3,
        settings=SETTINGS,
    )
    assert verdict.passed
    assert (verdict.mean.low, verdict.mean.mean, verdict.mean.high) == (1.0, 1.0, 1.0)


def test_a_policy_that_prefers_slow_nodes_is_held_back(twin: Twin) -> None:
    (verdict,) = compare(
        twin,
        make_policy("hrrn-eft"),
        [make_policy("hrrn-eft", contrarian(), margin=0.0)],
        seed=3,
        settings=SETTINGS,
    )
    assert not verdict.passed
    assert verdict.mean.mean > 1.02


def test_a_better_rule_passes_and_the_same_seed_gives_the_same_verdict(twin: Twin) -> None:
    def verdict() -> Verdict:
        (found,) = compare(
            twin,
            make_policy("least-allocated"),
            [make_policy("hrrn-eft")],
            seed=5,
            settings=SETTINGS,
        )
        return found

    first = verdict()
    assert first.passed
    assert first.mean.high < 1.0
    assert verdict() == first


def test_looks_share_out_five_per_cent_and_end_with_all_windows() -> None:
    for windows in (2, 3, 4, 32, 100):
        made = looks(windows)
        assert [count for count, _ in made] == sorted({count for count, _ in made})
        assert made[-1][0] == windows
        assert sum(1.0 - level for _, level in made) <= 0.05 + 1e-12
    assert [count for count, _ in looks(32)] == [8, 16, 32]


def test_what_is_clear_is_not_run_on_and_what_is_not_meets_every_window(twin: Twin) -> None:
    settings = GateSettings(windows=16, jobs=40)
    better, same, worse = compare(
        twin,
        make_policy("least-allocated"),
        [make_policy("hrrn-eft"), make_policy("least-allocated"), make_policy("random")],
        seed=5,
        settings=settings,
    )
    assert better.passed
    assert better.mean.windows < settings.windows
    assert same.mean.windows == 4  # equal to the last bit: nothing more can be learned
    assert worse.mean.low > 1.0 or worse.mean.windows == settings.windows
    assert not worse.passed


def test_windows_are_the_clusters_own_jobs(twin: Twin) -> None:
    workload = twin.workload(seed=1, window=2, jobs=50)
    assert len(workload) == 50
    assert np.diff(workload.arrival) == pytest.approx(np.full(49, 200.0))
    own = {(int(k), float(c)) for k, c in zip(twin.kind, twin.request[:, 0], strict=True)}
    drawn = {(int(k), float(c)) for k, c in zip(workload.kind, workload.cpu, strict=True)}
    assert drawn <= own
    # Run times of 20 minutes on the fastest type, e**0.5 of them in the mean, come back.
    assert twin.mean_seconds == pytest.approx(1200.0 * np.exp(0.5), rel=0.4)
    other = twin.workload(seed=1, window=3, jobs=50)
    assert not np.array_equal(other.kind, workload.kind)


def test_the_twin_waits_until_enough_is_known(tmp_path: Path) -> None:
    store = filled(tmp_path, life_of_pods(19))
    assert twin_of(store, NODES) is None  # one finished pod too few
    store.close()


def test_the_twin_needs_nodes_that_hold_the_jobs(tmp_path: Path) -> None:
    store = filled(tmp_path, life_of_pods(30))
    assert twin_of(store, []) is None
    small = [Node(name="n", cpu=0.1, memory=0.1, gpus=1, gpu_model="k80", gpu_memory=12)]
    assert twin_of(store, small) is None
    store.close()


def test_an_unknown_gpu_model_takes_part(tmp_path: Path) -> None:
    store = filled(tmp_path, life_of_pods(30))
    strange = Node(name="x", cpu=64, memory=384, gpus=8, gpu_model="tpu-9", gpu_memory=16)
    made = twin_of(store, [*NODES, strange])
    assert made is not None
    simulation = made.simulation(seed=0, window=0, jobs=10)
    assert simulation.cluster.gpu_spec.shape == (4, 3)
    assert np.isfinite(simulation.cluster.slowdown).all()
    store.close()


def test_the_nodes_file_comes_back_and_a_torn_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "nodes.json"
    nodes_file.write(path, reversed(NODES))
    assert nodes_file.read(path) == NODES
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(nodes_file.NodesFileError, match=r"nodes\.json is not a nodes file"):
        nodes_file.read(path)
    with pytest.raises(nodes_file.NodesFileError, match="cannot be read"):
        nodes_file.read(tmp_path / "missing.json")


GATEKEEPER = Gatekeeper("hrrn-eft", 0.0, 2, SETTINGS)


def test_a_first_candidate_that_passes_goes_live(twin: Twin, tmp_path: Path) -> None:
    live, verdict = GATEKEEPER.consider(Live(), initial_arrays(), twin, learning_round=7, seed=1)
    assert verdict.passed
    assert (live.accepted, live.rejected, live.failures) == (1, 0, 0)
    path = tmp_path / "policy" / "current.safetensors"
    assert write_live(path, live)
    arrays, metadata = load(path)
    assert metadata["version"] == live.version
    assert metadata["learning_round"] == "7"
    assert {"features_version", "architecture"} <= metadata.keys()
    assert all(np.array_equal(arrays[name], a) for name, a in initial_arrays().items())
    assert not write_live(path, live)
    path.write_bytes(b"torn")
    assert write_live(path, live)  # mended


def test_the_best_policy_stays_live_not_the_last(twin: Twin) -> None:
    live = promoted(Live(), initial_arrays(), 1)
    after, verdict = GATEKEEPER.consider(live, contrarian(), twin, learning_round=2, seed=1)
    assert not verdict.passed
    assert after.version == live.version
    assert (after.rejected, after.failures) == (1, 1)
    assert not GATEKEEPER.has_lost_its_way(after)
    again, _ = GATEKEEPER.consider(after, contrarian(), twin, learning_round=3, seed=2)
    assert GATEKEEPER.has_lost_its_way(again)


def test_a_live_policy_that_turned_bad_is_withdrawn(twin: Twin) -> None:
    live = promoted(Live(), contrarian(), 1)
    after, _ = GATEKEEPER.consider(live, contrarian(), twin, learning_round=2, seed=1)
    arrays = after.arrays()
    assert arrays is not None
    assert (arrays["correction.weight"] == 0.0).all()  # the rule decides


def test_decisions_of_earlier_policies_can_still_be_scored() -> None:
    live = promoted(promoted(Live(), contrarian(), 1), initial_arrays(), 2)
    features = np.zeros((2, FEATURE_COUNT), np.float32)
    features[1, COLUMN["effect_slowdown"]] = 0.1
    first = next(iter(live.weights))
    assert first != live.version
    got = corrections_of(live, first, features)
    assert got is not None
    assert got.tolist() == pytest.approx([0.0, np.tanh(0.5)])
    assert corrections_of(live, "never seen", features) is None
    rule = corrections_of(live, "", features)
    assert rule is not None
    assert rule.tolist() == [0.0, 0.0]
    for number in range(10):
        live = promoted(live, {n: a + number for n, a in initial_arrays().items()}, number)
    assert first not in live.weights
    assert len(live.weights) == 8


def test_settings_that_cannot_judge_are_refused() -> None:
    with pytest.raises(ValueError, match="windows"):
        GateSettings(windows=1)
    with pytest.raises(ValueError, match="tolerance"):
        GateSettings(tolerance=-0.1)
    with pytest.raises(ValueError, match="tail_tolerance"):
        GateSettings(tail_tolerance=float("nan"))


def test_nodes_without_gpu_labels_make_a_twin_as_the_live_cluster_sees_them(
    tmp_path: Path,
) -> None:
    store = filled(tmp_path, life_of_pods(30))
    blank = [Node(name="a", cpu=64, memory=384, gpus=8), Node(name="b", cpu=64, memory=384)]
    named = [Node(name="c", cpu=64, memory=384, gpus=8, gpu_model="t4")]
    other = [Node(name="d", cpu=64, memory=384, gpus=8, gpu_model="odd", gpu_memory=10.0)]
    made = twin_of(store, [*blank, *named, *other])
    store.close()
    assert made is not None
    assert made.nodes.capacity[:, 2].tolist() == [8.0, 0.0, 8.0, 8.0]
    assert made.nodes.gpu_memory.tolist() == [16.0, 0.0, 16.0, 10.0]
    assert made.nodes.gpu_type.tolist() == [0, -1, 2, 1]  # models "", "odd" and "t4"
    assert made.gpu_spec.tolist() == [
        [15.7, 900.0, 16.0],
        [15.7, 900.0, 10.0],
        [8.1, 320.0, 16.0],
    ]
    assert (made.kind >= 0).all()
