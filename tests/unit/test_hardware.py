"""The true world: GPU data sheets, measured speeds, interference, memory and node telemetry."""

from pathlib import Path

import numpy as np
import pytest

from agent.cluster.gpus import GPU_SPECS, gpu_spec
from agent.simulator import hardware
from agent.simulator.hardware import GPU_TYPES, SpeedTable
from agent.simulator.nodes import measured_type, node_mix, openb_mix
from agent.simulator.tables import SHIPPED, TraceError
from agent.simulator.traces import read_openb_nodes, trace_file
from agent.simulator.utilisation import IDLE, hash_unit, smooth_noise, utilisation


@pytest.fixture(scope="module")
def speeds() -> SpeedTable:
    return hardware.load_speeds(SHIPPED / "gavel")


def table(tmp_path: Path, alone: list[str], pairs: list[str]) -> SpeedTable:
    """A speed table from rows such as ``k80,A,1,2.0`` and ``k80,A,1,B,1,1.0,0.5``."""
    header = "worker_type,job_type,scale_factor,steps_per_second"
    (tmp_path / "simulation_throughputs_isolated.csv").write_text("\n".join([header, *alone]))
    header = (
        "worker_type,job_type_a,scale_factor_a,job_type_b,scale_factor_b,"
        "steps_per_second_a,steps_per_second_b"
    )
    (tmp_path / "simulation_throughputs_colocated.csv").write_text("\n".join([header, *pairs]))
    return hardware.load_speeds(tmp_path)


def alone(job_type: str, gpus: int, speed: float) -> list[str]:
    return [f"{gpu},{job_type},{gpus},{speed}" for gpu in GPU_TYPES]


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("Tesla-K80", "k80"),
        ("Tesla-P100-PCIE-16GB", "p100"),
        ("Tesla-P100-SXM2-16GB", "p100"),
        ("Tesla-V100-SXM2-16GB", "v100"),
        ("Tesla-V100-SXM2-32GB", "v100-32g"),
        ("Tesla-V100-PCIE-32GB", "v100-32g"),
        ("V100M16", "v100"),
        ("V100M32", "v100-32g"),
        ("Tesla-T4", "t4"),
        ("Tesla-T4-SHARED", "t4"),
        ("NVIDIA-L4", "l4"),
        ("NVIDIA-L40S", "l40s"),
        ("NVIDIA-A10", "a10"),
        ("NVIDIA-A10G", "a10"),
        ("NVIDIA A100-SXM4-40GB", "a100-40g"),
        ("NVIDIA-A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA-A100-80GB-PCIe", "a100-80g"),
        ("NVIDIA-H100-80GB-HBM3", "h100"),
        ("NVIDIA-H100-PCIe", "h100-pcie"),
        ("NVIDIA-H200", "h200"),
    ],
)
def test_a_product_name_finds_its_data_sheet(product: str, name: str) -> None:
    assert gpu_spec(product) is GPU_SPECS[name]


@pytest.mark.parametrize("product", ["", "G2", "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb", "A1000", "GTX"])
def test_an_unknown_product_or_a_slice_has_no_data_sheet(product: str) -> None:
    assert gpu_spec(product) is None


def test_gavels_tables_give_every_kind_that_ran_on_all_three_types(speeds: SpeedTable) -> None:
    assert speeds.speed.shape == (80, 3)
    assert len(speeds) == len(speeds.names) == 80
    assert len(speeds.job_types) == 26
    assert (speeds.speed > 0).all()
    # Rows of the file, in the order k80, p100, v100.
    kind = speeds.kind("ResNet-18 (batch size 16)", 1)
    np.testing.assert_allclose(speeds.speed[kind], [4.79529, 35.87, 32.35338], rtol=1e-3)
    assert speeds.names[kind] == "ResNet-18 (batch size 16) x1"
    # Consolidated, where spread over nodes it would be 47.9.
    four = speeds.kind("LM (batch size 80)", 8)
    assert speeds.speed[four, 2] == pytest.approx(231.176, rel=1e-4)
    # One k80 holds it and two did not; the speed of a gang is not measured for Recommendation.
    assert speeds.kind("ResNet-50 (batch size 128)", 1) >= 0
    assert speeds.kind("ResNet-50 (batch size 128)", 2) == -1
    assert speeds.kind("Recommendation (batch size 512)", 4) == -1
    assert speeds.kind("no such type", 1) == -1


def test_every_name_leads_back_to_its_kind(speeds: SpeedTable) -> None:
    for k in range(len(speeds)):
        assert speeds.kind(speeds.job_types[speeds.kind_type[k]], speeds.kind_gpus[k]) == k


def test_relative_speed_is_one_on_the_fastest_type(tmp_path: Path) -> None:
    world = table(tmp_path, ["k80,A,1,1.0", "p100,A,1,4.0", "v100,A,1,2.0"], ["k80,A,1,A,1,1,1"])
    np.testing.assert_array_equal(world.relative, [[0.25, 1.0, 0.5]])


def test_speed_beside_a_neighbour_is_relative_to_alone(tmp_path: Path) -> None:
    pairs = ["k80,A,1,A,1,1.0,1.0", "k80,A,1,B,1,1.5,0.8", "k80,B,1,B,1,0,0"]
    world = table(tmp_path, alone("A", 1, 2.0) + alone("B", 1, 0.5) + alone("C", 2, 1.0), pairs)
    a, b = world.job_types.index("A"), world.job_types.index("B")
    k80 = world.beside[0]
    assert k80[a, a] == 0.5
    assert k80[a, b] == 0.75
    # Given once, as A beside B; 0.8 of 0.5 is more than alone, which noise may measure: 1.
    assert k80[b, a] == 1.0
    # Two B do not fit: hardly any progress, and marked.
    assert k80[b, b] == hardware.DOES_NOT_FIT
    assert not world.fits[0, b, b]
    assert world.fits.sum() == world.fits.size - 1


def test_a_pair_that_was_not_measured_is_estimated_from_both_sides(tmp_path: Path) -> None:
    rows = alone("A", 1, 1.0) + alone("B", 1, 1.0)
    world = table(tmp_path, rows, ["k80,A,1,A,1,0.8,0.8", "k80,A,1,B,1,0.4,0.5"])
    # Known on k80: AA 0.8, AB 0.4, BA 0.5. BB: row of B (0.5) times column of B (0.4) over the
    # geometric mean of all three.
    assert world.beside[0, 1, 1] == pytest.approx(0.5 * 0.4 / (0.8 * 0.4 * 0.5) ** (1 / 3))
    # Nothing known on p100: two equal time slices.
    np.testing.assert_allclose(world.beside[1], 0.5)
    assert world.fits.all()


def test_interference_stays_between_nothing_and_alone(speeds: SpeedTable) -> None:
    assert speeds.beside.shape == (3, 26, 26)
    assert (speeds.beside > 0).all()
    assert (speeds.beside <= 1).all()
    np.testing.assert_array_equal((~speeds.fits).sum(axis=(1, 2)), [87, 20, 40])
    np.testing.assert_array_equal(speeds.fits, speeds.fits.transpose(0, 2, 1))
    assert (speeds.beside[~speeds.fits] == hardware.DOES_NOT_FIT).all()


def test_a_table_without_a_common_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no job type was measured on all of k80, p100, v100"):
        table(tmp_path, ["k80,A,1,1.0"], ["k80,A,1,A,1,1,1"])


def test_gpu_memory_needs_agree_with_the_pairs_that_did_not_fit(speeds: SpeedTable) -> None:
    need = hardware.needs(speeds.job_types).gpu_memory
    pair = need[:, None] + need[None, :]
    size = np.array([GPU_SPECS[gpu].memory for gpu in GPU_TYPES])[:, None, None]
    agree = (pair[None] <= size) == speeds.fits
    assert agree.mean() > 0.95
    assert (need <= size.min()).all()  # alone, everything ran on every type


def test_memory_needs_grow_with_the_batch() -> None:
    need = hardware.needs(("LM (batch size 5)", "LM (batch size 80)", "Novel", "A3C"))
    assert need.gpu_memory[0] == pytest.approx(1.2 + 0.03 * 5)
    assert need.gpu_memory[1] == pytest.approx(1.2 + 0.03 * 80)
    assert need.memory[1] - need.memory[0] == pytest.approx(0.03 * 75 / 32)
    assert need.gpu_memory.tolist()[2:] == [4.0, 1.5]


@pytest.mark.parametrize("exceed", [0.01, 0.2])
def test_the_named_share_of_jobs_passes_its_request(exceed: float) -> None:
    ratio = hardware.peak_ratio(np.random.default_rng(1), 200_000, exceed=exceed)
    assert (ratio > 1).mean() == pytest.approx(exceed, rel=0.08)
    assert np.log(ratio).std() == pytest.approx(0.2, rel=0.02)
    assert (ratio > 0).all()
    with pytest.raises(ValueError, match="exceed"):
        hardware.peak_ratio(np.random.default_rng(1), 1, exceed=0.0)


def test_a_node_mix_lists_its_nodes_in_the_order_given() -> None:
    mix = node_mix({"v100": 1, "k80": 2}, gpus=4, cpu_only=1)
    assert mix.names == ("v100-0", "k80-0", "k80-1", "cpu-0")
    assert mix.gpu_type.tolist() == [2, 0, 0, -1]
    assert mix.capacity.tolist() == [[32, 192, 4]] * 3 + [[32, 192, 0]]
    assert mix.gpu_memory.tolist() == [16, 12, 12, 0]
    assert mix.gpu_type.dtype == np.int64


@pytest.mark.parametrize("counts", [{"h100": 1}, {}, {"k80": 0}, {"k80": 2, "v100": -1}])
def test_a_node_mix_without_nodes_or_speeds_is_refused(counts: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"at least one node|measured are"):
        node_mix(counts)


def test_openb_nodes_keep_their_size_and_run_like_the_nearest_type() -> None:
    nodes = read_openb_nodes(trace_file("openb/openb_node_list_all_node.csv", {}))
    mix = openb_mix(nodes)
    for model, gpu, memory in (
        ("T4", "k80", 16.0),
        ("V100M32", "v100", 32.0),
        ("G3", "v100", 16.0),
    ):
        n = nodes.models.index(model)
        assert mix.gpu_type[n] == GPU_TYPES.index(gpu)
        assert mix.gpu_memory[n] == memory
    np.testing.assert_array_equal(mix.capacity[:, 2], nodes.gpus)
    np.testing.assert_array_equal(mix.capacity[:, 0], nodes.cpu)
    np.testing.assert_array_equal(mix.gpu_type == -1, nodes.gpus == 0)
    assert measured_type("no such model") == -1


RUNNING = (
    np.array([0, 0, 1]),  # nodes
    np.array([0, 1, -1]),  # job types
    np.array([0.0, 900.0, 900.0]),  # started
    np.array([4.0, 2.0, 3.0]),  # cores
    np.array([2.0, 0.5, 0.0]),  # GPUs
    np.array([20.0, 10.0, 8.0]),  # GiB at the peak
    np.array([[10.0, 100.0, 4.0], [10.0, 100.0, 0.0], [10.0, 100.0, 4.0]]),
    np.array([0.5, 1.0]),  # busy part of the cores
    np.array([100.0, 40.0]),  # MB/s from disk
    np.array([30.0, 60.0]),  # MB/s over the network
)


def test_utilisation_without_noise_adds_up_what_runs() -> None:
    used = utilisation(900.0, *RUNNING, 0.0, 7)
    # Node 0: 4*0.5 + 2*1 of 10 cores; 20 GiB at the peak and 10 GiB half way; 200 + 20 of 2000
    # MB/s; 60 + 30 of 3000 MB/s. Node 1: 3 * 0.5 of 10 cores, half of 8 GiB. Node 2 idles.
    expected = np.array([[0.4, 0.25, 0.11, 0.03], [0.15, 0.04, 0, 0], [0, 0, 0, 0]]) + IDLE
    np.testing.assert_allclose(used, expected)


def test_utilisation_is_the_same_for_the_same_seed_and_moment_and_stays_a_fraction() -> None:
    used = utilisation(900.0, *RUNNING, 0.1, 7)
    np.testing.assert_array_equal(used, utilisation(900.0, *RUNNING, 0.1, 7))
    assert (used != utilisation(900.0, *RUNNING, 0.1, 8)).all()
    exact = utilisation(900.0, *RUNNING, 0.0, 7)
    assert (np.abs(used / exact - 1) <= 0.1).all()
    full = list(RUNNING)
    full[3] = np.array([400.0, 2.0, 3.0])
    assert utilisation(900.0, *full, 0.5, 7)[0, 0] == 1.0


def test_noise_is_continuous_centred_and_different_for_every_node_and_resource() -> None:
    series = np.array([smooth_noise(3, 0, 1, t) for t in np.arange(0.0, 60_000.0, 10.0)])
    assert np.abs(np.diff(series)).max() <= 2.0 * 10 / 60
    assert abs(series.mean()) < 0.06
    assert 0.3 < series.std() < 0.6
    values = {hash_unit(*key) for key in np.ndindex(4, 5, 6, 7)}
    assert len(values) == 4 * 5 * 6 * 7
    assert min(values) >= -1
    assert max(values) < 1
