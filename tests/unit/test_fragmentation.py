"""Fragmentation as FGD defines it, rules that fill a fleet, and the suite on a small trace."""

from pathlib import Path

import numpy as np
import pytest
import yaml

from agent.benchmark.fragmentation import BOUND, Fragmentation, most_allocated
from agent.cluster.fragments import COUNT, CPU, EACH, GPU, MEMORY, SLOTS, Mix, fragment
from agent.data_files import DataFileError
from agent.simulator.filling import (
    ALLOCATED,
    FRAGMENTED,
    REFUSED,
    REFUSED_GPU,
    RULES,
    Course,
    fill,
)
from agent.simulator.fragmentation import (
    Fleet,
    Requests,
    arrivals,
    gpu_models,
    open_fleet,
    requests_of,
    typical_mix,
)
from agent.simulator.tables import ENVIRONMENT, SHIPPED
from agent.simulator.traces import OpenbNodes, read_openb_nodes, read_openb_pods
from agent.statistics import paired_difference


def mix_of(*rows: tuple[float, int, int, int]) -> Mix:
    """Rows: share, CPU, GPUs, of each; every model will do."""
    table = np.array([[cpu, 0, count, each] for _, cpu, count, each in rows], np.int64)
    share = np.array([row[0] for row in rows])
    return Mix(table, share, np.full(len(rows), -1), share.sum(), 10.0)


def free_of(*gpus: int) -> np.ndarray:
    return np.array([*gpus, *[0] * (SLOTS - len(gpus))], np.int64)


def nodes_of(*nodes: tuple[float, int]) -> Fleet:
    """Nodes of (cores, GPUs) with 100 GiB."""
    count = len(nodes)
    return open_fleet(
        OpenbNodes(
            tuple(f"n{i}" for i in range(count)),
            np.array([cpu for cpu, _ in nodes], np.float64),
            np.full(count, 100.0),
            np.array([gpus for _, gpus in nodes], np.int64),
            ("T4",) * count,
        )
    )


def asks(*rows: tuple[int, int, int]) -> Requests:
    """Requests of (CPU, GPUs, of each) that any model will do for."""
    table = np.array([[cpu, 0, count, each] for cpu, count, each in rows], np.int64)
    return Requests(table, np.full(len(rows), -1))


def run(rule: str, fleet: Fleet, requests: Requests, pods: list[int], mix: Mix) -> Course:
    order = np.arange(len(fleet.cpu), dtype=np.int64)
    return fill(rule, fleet, requests, mix, np.array(pods, np.int64), order, 0)


def test_what_a_gpu_pod_can_use_is_whole_only_where_each_gpu_has_enough() -> None:
    free = free_of(1000, 500, 300)
    # One GPU of 400: it could go onto 1000 or 500, and 300 is lost to it.
    assert fragment(9000, free, 0, mix_of((1.0, 1000, 1, 400))) == 300.0
    # Two whole GPUs: there is but one, so that all 1800 are lost.
    assert fragment(9000, free, 0, mix_of((1.0, 1000, 2, 1000))) == 1800.0
    # Too little CPU: all is lost, however many GPUs are free.
    assert fragment(900, free, 0, mix_of((1.0, 1000, 1, 400))) == 1800.0
    # A pod without GPUs uses none of them.
    assert fragment(9000, free, 0, mix_of((1.0, 1000, 0, 0))) == 1800.0
    # In the mix they weigh by how frequent they are.
    mixed = mix_of((0.5, 1000, 1, 400), (0.3, 1000, 2, 1000), (0.2, 1000, 0, 0))
    assert fragment(9000, free, 0, mixed) == pytest.approx(0.5 * 300 + 0.5 * 1800)


def test_gpus_of_a_model_that_a_pod_may_not_have_are_lost_to_it() -> None:
    mix = mix_of((1.0, 1000, 1, 400))._replace(allowed=np.array([0b01]))
    assert fragment(9000, free_of(1000), 0, mix) == 0.0
    assert fragment(9000, free_of(1000), 1, mix) == 1000.0


def test_typical_requests_are_the_most_frequent_ones_up_to_95_percent(tmp_path: Path) -> None:
    rows = ["a,4000,1024,1,1000,"] * 60 + ["b,2000,2048,1,500,T4"] * 36 + ["c,1000,1,0,0,"] * 4
    path = tmp_path / "pods.csv"
    path.write_text("name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec\n" + "\n".join(rows))
    mix = typical_mix(read_openb_pods(path), ("P100", "T4"))
    assert mix.table.tolist() == [[4000, 0, 1, 1000], [2000, 0, 1, 500]]
    assert mix.share.tolist() == pytest.approx([60 / 96, 36 / 96])
    assert mix.allowed.tolist() == [-1, 0b10]
    assert mix.cores_per_gpu == pytest.approx((60 * 4 + 36 * 2 + 4 * 1) / (60 + 18))


def test_fgd_puts_a_pod_where_it_leaves_less_that_others_cannot_use() -> None:
    fleet, requests = nodes_of((16, 2), (16, 2)), asks((1000, 1, 500), (1000, 1, 1000))
    mix = mix_of((0.5, 1000, 1, 500), (0.5, 1000, 1, 1000))
    filled = run("fgd", fleet, requests, [0, 0, 1, 1, 1], mix).fleet
    # Two halves share a GPU, so that three whole ones are left for the others.
    assert filled.free.sum() == 0


def test_level_keeps_cpu_for_the_gpus_that_are_left() -> None:
    # 4 cores for each GPU in the mix. A pod of 4 cores and one GPU leaves node 0 (8 cores, 2 GPUs)
    # in proportion; on node 1 (5 cores, 2 GPUs) it would leave a GPU without CPU.
    fleet, requests = nodes_of((5, 2), (8, 2)), asks((4000, 1, 1000))
    mix = mix_of((1.0, 4000, 1, 1000))._replace(cores_per_gpu=4.0)
    assert run("level", fleet, requests, [0], mix).fleet.free.sum(axis=1).tolist() == [2000, 1000]


def test_packing_takes_a_used_gpu_and_least_allocated_an_empty_node() -> None:
    fleet, requests = nodes_of((16, 2), (16, 2)), asks((1000, 1, 300))
    mix = mix_of((1.0, 1000, 1, 300))
    packed = run("gpu-packing", fleet, requests, [0, 0, 0], mix).fleet
    assert sorted(packed.free.sum(axis=1).tolist()) == [1100, 2000]
    assert packed.free.min(axis=1).tolist() == [0, 0]
    assert sorted(packed.free[packed.free > 0].tolist()) == [100, 1000, 1000, 1000]
    spread = run("least-allocated", fleet, requests, [0, 0], mix).fleet
    assert spread.free.sum(axis=1).tolist() == [1700, 1700]


def test_clustering_keeps_pods_of_the_same_number_of_gpus_together() -> None:
    fleet, requests = nodes_of((64, 4), (64, 4)), asks((1000, 1, 1000), (1000, 2, 1000))
    mix = mix_of((1.0, 1000, 1, 1000))
    filled = run("gpu-clustering", fleet, requests, [0, 1, 0, 1], mix).fleet
    assert filled.free.sum(axis=1).tolist() == [2000, 0]


@pytest.mark.parametrize("rule", RULES)
def test_nothing_is_given_twice_and_the_course_counts_what_is_left(rule: str) -> None:
    nodes = read_openb_nodes(SHIPPED / "openb" / "openb_node_list_all_node.csv")
    jobs = read_openb_pods(SHIPPED / "openb" / "openb_pod_list_gpuspec10.csv")
    models = gpu_models(nodes)
    fleet, (requests, kind) = open_fleet(nodes), requests_of(jobs, models)
    mix = typical_mix(jobs, models)
    pods, rank = arrivals(requests, kind, fleet, 1.3, 1)
    track, filled = fill(rule, fleet, requests, mix, pods, rank, 1)
    total = GPU * int(fleet.gpus.sum())
    assert filled.free.min() >= 0
    assert filled.cpu.min() >= 0
    assert filled.memory.min() >= 0
    assert track[130, ALLOCATED] == pytest.approx(100 * (total - filled.free.sum()) / total)
    asked = requests.table[pods]
    demand = 100 * float((asked[:, COUNT] * asked[:, EACH]).sum()) / total
    assert track[130, ALLOCATED] + track[130, REFUSED_GPU] == pytest.approx(demand)
    lost = sum(
        fragment(int(c), f, int(m), mix)
        for c, f, m in zip(filled.cpu, filled.free, filled.model, strict=True)
        if m >= 0
    )
    assert track[130, FRAGMENTED] == pytest.approx(100 * lost / total)
    assert (np.diff(track[1:, REFUSED]) >= 0).all()
    if rule != "random":
        used = filled.cpu_total.sum() - filled.cpu.sum()
        assert 0 < used <= asked[:, CPU].sum()
        assert filled.memory_total.sum() - filled.memory.sum() <= asked[:, MEMORY].sum()


def test_ours_leaves_less_fragmented_than_fgd_once_all_gpus_are_asked_for() -> None:
    nodes = read_openb_nodes(SHIPPED / "openb" / "openb_node_list_all_node.csv")
    jobs = read_openb_pods(SHIPPED / "openb" / "openb_pod_list_gpuspec10.csv")
    models = gpu_models(nodes)
    fleet, (requests, kind) = open_fleet(nodes), requests_of(jobs, models)
    mix = typical_mix(jobs, models)
    shares: dict[str, list[float]] = {"fgd": [], "level": []}
    for seed in range(10):
        pods, rank = arrivals(requests, kind, fleet, 1.0, seed)
        for rule, found in shares.items():
            track = fill(rule, fleet, requests, mix, pods, rank, seed).track
            found.append(float(track[100, FRAGMENTED]))
    difference = paired_difference(shares["level"], shares["fgd"])
    assert difference.high < 0.0


def test_a_run_is_the_same_each_time_and_leaves_the_fleet_as_it_was() -> None:
    fleet, requests = nodes_of(*[(16, 2)] * 8), asks((1000, 1, 300), (1000, 1, 1000))
    mix = mix_of((0.5, 1000, 1, 300), (0.5, 1000, 1, 1000))
    before = fleet.free.copy()
    runs = [run("random", fleet, requests, [0, 1] * 6, mix).fleet.free for _ in range(2)]
    assert (runs[0] == runs[1]).all()
    assert (fleet.free == before).all()


def test_order_ends_with_the_pod_that_reaches_the_ratio() -> None:
    fleet, requests = nodes_of((16, 4)), asks((1000, 1, 600), (1000, 0, 0))
    pods, rank = arrivals(requests, np.array([0, 0, 1], np.int64), fleet, 1.3, 3)
    asked = np.cumsum(np.where(pods == 0, 600, 0))
    assert asked[-2] < 5200 <= asked[-1]
    assert rank.tolist() == [0]


def test_no_more_can_be_allocated_than_the_best_cuts_of_gpus_allow() -> None:
    # Three pods of 0.6 GPUs and two of 0.4 on two GPUs: 0.6 + 0.4 twice fills both. Without the
    # small ones, 0.6 on each is all that there is room for.
    fleet, requests = nodes_of((16, 2)), asks((1000, 1, 600), (1000, 1, 400))
    assert most_allocated(fleet, requests, np.array([0, 0, 0, 1, 1])) == pytest.approx(100.0)
    assert most_allocated(fleet, requests, np.array([0, 0, 0])) == pytest.approx(60.0)


def small_suite(tmp_path: Path, **changes: object) -> Fragmentation:
    """The suite as shipped, on nodes and pods of this test's own."""
    folder = tmp_path / "openb"
    folder.mkdir(exist_ok=True)
    nodes = "".join(f"n{i},64000,262144,4,T4\n" for i in range(6))
    (folder / "nodes.csv").write_text("sn,cpu_milli,memory_mib,gpu,model\n" + nodes)
    kinds = ["4000,1024,1,1000", "6000,1024,1,500", "2000,1024,1,300", "9000,1024,0,0"]
    pods = "".join(f"p{i},{kinds[i % 4]},\n" for i in range(40))
    header = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec\n"
    (folder / "pods.csv").write_text(header + pods)
    shipped = Path("agent/benchmark/suites/fragmentation.yaml").resolve()
    data = yaml.safe_load(shipped.read_text()) | {
        "nodes": "openb/nodes.csv", "pods": {"small": "openb/pods.csv"},
        "traces": {"reduced": ["small"], "full": ["small"]}, "orders": [0, 3],
    }  # fmt: skip
    path = tmp_path / "fragmentation.yaml"
    path.write_text(yaml.safe_dump(data | changes))
    return Fragmentation(path)


def test_cells_of_one_order_are_paired_and_give_the_same_figures_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path))
    suite = small_suite(tmp_path)
    cells = suite.cells("reduced")
    assert len(cells) == 3 * (len(RULES) + 1)
    figures = {cell.arm: suite.run(cell, tmp_path) for cell in cells if cell.seed == 1}
    again = {cell.arm: suite.run(cell, tmp_path) for cell in cells if cell.seed == 1}
    assert figures == again
    bound = figures.pop(BOUND)["allocated_100"]
    for arm, found in figures.items():
        assert found["allocated_100"] <= bound + 1e-9, arm
        assert found["fragmented_100"] <= 100.0 - found["allocated_100"] + 1e-9, arm


def test_without_its_traces_the_suite_has_no_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path))
    suite = small_suite(tmp_path, pods={"small": "openb/missing.csv"})
    assert suite.cells("full") == []
    assert suite.inputs("full") == []


@pytest.mark.parametrize(
    ("changes", "cure"),
    [
        ({"arms": ["fgd", "level", "tetris"]}, "random, least-allocated"),
        ({"traces": {"reduced": ["other"], "full": []}}, "pods have small"),
        ({"percents": [80, 130]}, "100 and one below"),
        ({"orders": [4, 5]}, "at least 2"),
        ({"ours": "none"}, "not among the arms"),
        ({"arm": ["fgd"]}, "unknown field"),
    ],
)
def test_wrong_data_is_refused_with_the_cure(
    tmp_path: Path, changes: dict[str, object], cure: str
) -> None:
    with pytest.raises(DataFileError, match=cure):
        small_suite(tmp_path, **changes)
