"""Trace readers: what they read, what they drop and count, and where they put the blame."""

import contextlib
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.simulator import tables, traces
from agent.simulator.traces import TraceError

GAVEL = "job_type,needs_data_dir,total_steps,arrival_time_s,scale_factor,raw_field_count\n"
PHILLY = "timestamp,duration,num_gpus,gpu_time,cluster\n"
NODES = "sn,cpu_milli,memory_mib,gpu,model\n"
PODS = (
    "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,"
    "creation_time,deletion_time,scheduled_time\n"
)
ISOLATED = "worker_type,job_type,scale_factor,steps_per_second\n"
COLOCATED = (
    "worker_type,job_type_a,scale_factor_a,job_type_b,scale_factor_b,"
    "steps_per_second_a,steps_per_second_b\n"
)

# Every folder of traces on this machine; full ones where the variable points to them.
FOLDERS = [tables.SHIPPED, *map(Path, filter(None, [os.environ.get(tables.ENVIRONMENT)]))]


def write(tmp_path: Path, text: str | bytes, name: str = "trace.csv") -> Path:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_gavel_jobs_come_sorted_with_times_from_the_first_arrival(tmp_path: Path) -> None:
    path = write(tmp_path, GAVEL + "LM,1,300,50.5,4,7\nA3C,0,100,10.0,1,7\nLM,1,200,20.0,2,7\n")
    jobs = traces.read_gavel(path)
    assert jobs.arrival_s.tolist() == [0.0, 10.0, 40.5]
    assert jobs.gpus.tolist() == [1, 2, 4]
    assert jobs.steps.tolist() == [100.0, 200.0, 300.0]
    assert [jobs.job_types[t] for t in jobs.job_type] == ["A3C", "LM", "LM"]
    assert np.isnan(jobs.duration_s).all()
    assert np.isnan(jobs.deadline_s).all()
    assert jobs.gpus.dtype == np.int64
    assert jobs.arrival_s.dtype == np.float64


def test_jobs_that_arrive_together_keep_the_order_of_the_file(tmp_path: Path) -> None:
    rows = "".join(f"LM,1,{number + 1},{9 - number % 2},1,7\n" for number in range(200))
    jobs = traces.read_gavel(write(tmp_path, GAVEL + rows))
    assert jobs.steps.tolist() == [*range(2, 201, 2), *range(1, 200, 2)]


def test_columns_may_stand_in_any_order_with_a_byte_order_mark_and_blank_lines(
    tmp_path: Path,
) -> None:
    text = "\ufeffscale_factor, total_steps ,job_type,arrival_time_s\r\n\r\n2,9,LM,0\r\n\r\n"
    jobs = traces.read_gavel(write(tmp_path, text))
    assert (jobs.gpus.tolist(), jobs.steps.tolist()) == ([2], [9.0])


def test_rows_without_gpus_are_dropped_and_counted(tmp_path: Path) -> None:
    jobs = traces.read_gavel(write(tmp_path, GAVEL + "LM,1,1,0,0,7\nLM,1,1,5,1,7\nLM,1,1,6,0,7\n"))
    assert len(jobs) == 1
    assert jobs.dropped == {"asks for 0 GPUs": 2}
    assert jobs.arrival_s.tolist() == [0.0]


@pytest.mark.parametrize(
    ("body", "line", "column", "expected"),
    [
        pytest.param("LM,1,ten,0,1,7\n", 2, "3 (total_steps)", "'ten'", id="not a number"),
        pytest.param("LM,1,nan,0,1,7\n", 2, "3 (total_steps)", "'nan'", id="NaN"),
        pytest.param("LM,1,inf,0,1,7\n", 2, "3 (total_steps)", "'inf'", id="infinite"),
        pytest.param("LM,1,,0,1,7\n", 2, "3 (total_steps)", "''", id="empty cell"),
        pytest.param("LM,1,0,0,1,7\n", 2, "3 (total_steps)", "above 0", id="no steps"),
        pytest.param("LM,1,5,0,1,7\nLM,1,5,-1,1,7\n", 3, "4 (arrival_time_s)", "at least 0",
                     id="negative arrival"),
        pytest.param("LM,1,5,0,1.5,7\n", 2, "5 (scale_factor)", "whole number", id="half a GPU"),
        pytest.param("LM,1,5,0,1e300,7\n", 2, "5 (scale_factor)", "whole number", id="too many"),
        pytest.param("LM,1,5,0,-1,7\n", 2, "5 (scale_factor)", "at least 0", id="negative GPUs"),
        pytest.param(" ,1,5,0,1,7\n", 2, "1 (job_type)", "a job type", id="no job type"),
        pytest.param("\nLM,1,5,0\n", 3, "5 (scale_factor)", "6 cells, found 4", id="short row"),
        pytest.param("LM,1,5,0,1,7,8\n", 2, "7", "6 cells, found 7", id="long row"),
        pytest.param('LM,1,"5"x,0,1,7\n', 2, None, "not a CSV row", id="broken quotes"),
    ],
)  # fmt: skip
def test_a_malformed_row_is_blamed_by_file_line_and_column(
    tmp_path: Path, body: str, line: int, column: str | None, expected: str
) -> None:
    path = write(tmp_path, GAVEL + body)
    with pytest.raises(TraceError) as caught:
        traces.read_gavel(path)
    assert (caught.value.path, caught.value.line, caught.value.column) == (path, line, column)
    assert expected in str(caught.value)
    assert f"{path}, line {line}" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "line", "column", "expected"),
    [
        pytest.param(b"", 1, None, "empty", id="empty file"),
        pytest.param(b" \n\n", 1, None, "empty", id="blank file"),
        pytest.param(GAVEL.encode(), 1, None, "no rows", id="header alone"),
        pytest.param(b"job_type,total_steps,arrival_time_s\nLM,1,1\n", 1, "scale_factor",
                     "lacks this column", id="missing column"),
        pytest.param(b"a,b,a\n1,2,3\n", 1, "3 (a)", "twice", id="doubled column"),
        pytest.param(GAVEL.encode() + b"LM,1,5,0,1,7\nL\xff,1,5,0,1,7\n", 3, "at byte 2",
                     "UTF-8", id="not UTF-8"),
        pytest.param("job_type,x\n".encode("utf-16"), 1, "at byte 1", "UTF-8", id="UTF-16"),
        pytest.param(b"\x1f\x8b\x08\x00", 1, "at byte 2", "uncompressed", id="gzip"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_such_table_is_named_with_the_cure(
    tmp_path: Path, content: bytes, line: int, column: str | None, expected: str
) -> None:
    with pytest.raises(TraceError) as caught:
        traces.read_gavel(write(tmp_path, content))
    assert (caught.value.line, caught.value.column) == (line, column)
    assert expected in str(caught.value)


def test_a_trace_of_which_nothing_is_left_says_why(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"no usable job \(1 asks for 0 GPUs\)"):
        traces.read_gavel(write(tmp_path, GAVEL + "LM,1,1,0,0,7\n"))


@settings(max_examples=150, deadline=None)
@given(
    at=st.integers(0, 400),
    byte=st.sampled_from([0, 10, 13, 32, 34, 44, 45, 46, 48, 59, 78, 101, 124, 255]),
    read=st.sampled_from(["gavel/msr_seed0_ed69ec.csv", "philly/philly.csv", "swf/lublin_256.swf",
                          "openb/openb_pod_list_gpuspec10.csv"]),
)  # fmt: skip
def test_one_broken_byte_gives_jobs_or_a_trace_error(
    tmp_path_factory: pytest.TempPathFactory, at: int, byte: int, read: str
) -> None:
    data = bytearray((tables.SHIPPED / read).read_bytes()[:400])
    data[at % len(data)] = byte
    path = write(tmp_path_factory.mktemp("broken"), bytes(data), Path(read).name)
    with contextlib.suppress(TraceError):
        jobs = traces.read_jobs(path)
        assert (jobs.gpus >= 0).all()
        assert not np.isinf(jobs.arrival_s).any()


def test_a_missing_file_is_a_trace_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"none\.csv: cannot be read: No such file"):
        traces.read_gavel(tmp_path / "none.csv")


def test_philly_keeps_one_virtual_cluster_and_counts_what_it_drops(tmp_path: Path) -> None:
    body = (
        "2017-10-09 07:01:55,66.0,1,66.0,aa\n"
        "2017-10-08 07:01:50,30.5,8,244,bb\n"
        "2017-10-09 07:01:45,10,2,20,aa\n"
        "2017-10-09 07:01:45,0,2,0,aa\n"
        "2017-10-09 07:01:45,9,0,0,aa\n"
        "2017-10-09 07:01:45,9,0,0,bb\n"
    )
    path = write(tmp_path, PHILLY + body)
    one = traces.read_philly(path, "aa")
    assert one.arrival_s.tolist() == [0.0, 10.0]
    assert one.duration_s.tolist() == [10.0, 66.0]
    assert one.gpus.tolist() == [2, 1]
    assert one.dropped == {"ran 0 s": 1, "asks for 0 GPUs": 1}
    assert one.clusters == ("aa",)
    both = traces.read_philly(path)
    assert both.arrival_s.tolist() == [0.0, 86_395.0, 86_405.0]
    assert [both.clusters[c] for c in both.cluster] == ["bb", "aa", "aa"]
    with pytest.raises(TraceError, match="no virtual cluster 'cc'; it has aa, bb"):
        traces.read_philly(path, "cc")


@pytest.mark.parametrize(
    ("row", "column"),
    [
        pytest.param("yesterday,66.0,1,66.0,aa", "1 (timestamp)", id="no time"),
        pytest.param("2017-10-09 07:01:55,-3,1,66.0,aa", "2 (duration)", id="negative duration"),
    ],
)
def test_philly_refuses(tmp_path: Path, row: str, column: str) -> None:
    with pytest.raises(TraceError) as caught:
        traces.read_philly(write(tmp_path, PHILLY + row + "\n"))
    assert (caught.value.line, caught.value.column) == (2, column)


def test_openb_pods_tell_whole_shared_and_no_gpus_apart(tmp_path: Path) -> None:
    body = (
        "c,4000,2048,0,0,,LS,Running,30,90,40\n"
        "a,12000,16384,8,1000,V100M16|V100M32,LS,Running,10,110,10\n"
        "b,6000,12288,1,460,,LS,Pending,20,120,\n"
    )
    jobs = traces.read_openb_pods(write(tmp_path, PODS + body))
    assert jobs.arrival_s.tolist() == [0.0, 10.0, 20.0]
    assert jobs.gpus.tolist() == [8, 0, 0]
    assert jobs.share.tolist() == [0.0, 0.46, 0.0]
    assert jobs.cpu.tolist() == [12.0, 6.0, 4.0]
    assert jobs.memory.tolist() == [16.0, 12.0, 2.0]
    np.testing.assert_array_equal(jobs.duration_s, [100.0, np.nan, 50.0])
    assert jobs.gpu_spec.tolist() == [0, -1, -1]
    assert jobs.gpu_specs == (("V100M16", "V100M32"),)


def test_openb_pods_without_times_keep_the_order_of_the_file(tmp_path: Path) -> None:
    text = "name,cpu_milli,memory_mib,num_gpu,gpu_milli\nb,2000,1024,1,1000\na,1000,1024,2,1000\n"
    jobs = traces.read_openb_pods(write(tmp_path, text))
    assert np.isnan(jobs.arrival_s).all()
    assert jobs.cpu.tolist() == [2.0, 1.0]


@pytest.mark.parametrize("gpus", ["1,1001", "2,500", "0,500", "1,0"])
def test_openb_refuses_gpu_parts_that_mean_nothing(tmp_path: Path, gpus: str) -> None:
    text = f"name,cpu_milli,memory_mib,num_gpu,gpu_milli\na,1000,1024,{gpus}\n"
    with pytest.raises(TraceError, match=r"line 2, column 5 \(gpu_milli\)"):
        traces.read_openb_pods(write(tmp_path, text))


def test_openb_refuses_a_pod_deleted_before_it_was_scheduled(tmp_path: Path) -> None:
    body = "a,12000,16384,8,1000,,LS,Running,10,30,40\n"
    with pytest.raises(TraceError, match=r"column 10 \(deletion_time\).*scheduled_time .40."):
        traces.read_openb_pods(write(tmp_path, PODS + body))


def test_openb_nodes(tmp_path: Path) -> None:
    nodes = traces.read_openb_nodes(
        write(tmp_path, NODES + "n0,64000,262144,2,P100\nn1,32000,131072,0,\n")
    )
    assert nodes.names == ("n0", "n1")
    assert nodes.cpu.tolist() == [64.0, 32.0]
    assert nodes.memory.tolist() == [256.0, 128.0]
    assert nodes.gpus.tolist() == [2, 0]
    assert nodes.models == ("P100", "")
    with pytest.raises(TraceError, match=r"line 2, column 5 \(model\)"):
        traces.read_openb_nodes(write(tmp_path, NODES + "n0,64000,262144,2,\n"))


def test_swf_takes_requested_processors_and_drops_what_never_ran(tmp_path: Path) -> None:
    text = (
        "; Version: 2\n;\n\n"
        "1 100 -1 60 16 -1 " + "-1 -1 -1 -1 1 -1 -1 -1 0 3 -1 -1\n"
        "2 50 -1 30 4 -1 " + "1024 8 -1 2048 1 -1 -1 -1 0 3 -1 -1 ; a remark\n"
        "3 60 -1 -1 4 -1 " + "-1 -1 -1 -1 1 -1 -1 -1 0 -1 -1 -1\n"
        "4 60 -1 0 4 -1 " + "-1 -1 -1 -1 5 -1 -1 -1 0 -1 -1 -1\n"
        "5 60 -1 10 -1 -1 " + "-1 -1 -1 -1 1 -1 -1 -1 0 -1 -1 -1\n"
    )
    jobs = traces.read_swf(write(tmp_path, text, "x.swf"))
    assert jobs.arrival_s.tolist() == [0.0, 50.0]
    assert jobs.gpus.tolist() == [8, 16]
    assert jobs.duration_s.tolist() == [30.0, 60.0]
    # 2048 KB for each of 8 processors.
    np.testing.assert_array_equal(jobs.memory, [2048 * 8 / 1024**2, np.nan])
    assert jobs.clusters == ("3",)
    assert jobs.dropped == {"run time unknown": 1, "ran 0 s": 1, "no processors": 1}


@pytest.mark.parametrize(
    ("text", "line", "column"),
    [
        pytest.param("; c\n1 2 3\n", 2, "4 (run time)", id="short"),
        pytest.param("1 " * 19 + "\n", 1, "19", id="long"),
        pytest.param("1 0 -1 x 1 " + "-1 " * 13 + "\n", 1, "4 (run time)", id="not a number"),
        pytest.param("1 0 -1 -2 1 " + "-1 " * 13 + "\n", 1, "4 (run time)", id="negative"),
        pytest.param("1 0 -1 -0.5 1 " + "-1 " * 13 + "\n", 1, "4 (run time)", id="part of -1"),
        pytest.param("1 nan -1 5 1 " + "-1 " * 13 + "\n", 1, "2 (submit time)", id="NaN"),
    ],
)
def test_swf_blames_the_field(tmp_path: Path, text: str, line: int, column: str) -> None:
    with pytest.raises(TraceError) as caught:
        traces.read_swf(write(tmp_path, text, "x.swf"))
    assert (caught.value.line, caught.value.column) == (line, column)


def test_speed_tables_are_keyed_by_what_was_measured(tmp_path: Path) -> None:
    alone = traces.read_gavel_isolated(write(tmp_path, ISOLATED + "k80,LM,1,2.5\nk80,LM,2,0.0\n"))
    assert alone == {("k80", "LM", 1): 2.5, ("k80", "LM", 2): 0.0}
    pairs = traces.read_gavel_colocated(write(tmp_path, COLOCATED + "k80,LM,1,A3C,1,2.0,0.5\n"))
    assert pairs == {("k80", "LM", "A3C"): (2.0, 0.5)}


@pytest.mark.parametrize(
    ("text", "column"),
    [
        (ISOLATED + "k80,LM,1,2.5\nk80,LM,1,2.5\n", "2 (job_type)"),
        (ISOLATED + "k80,LM,1,2.5\nk80,LM,2,-0.1\n", "4 (steps_per_second)"),
        (COLOCATED + "k80,LM,1,A3C,1,2.0,0.5\nk80,LM,1,A3C,1,2.0,0.5\n", "4 (job_type_b)"),
        (COLOCATED + "k80,LM,1,A3C,1,2.0,0.5\nk80,LM,1,LM,2,2.0,0.5\n", "5 (scale_factor_b)"),
    ],
    ids=["doubled speed", "negative speed", "doubled pair", "gang in a pair"],
)
def test_speed_tables_refuse(tmp_path: Path, text: str, column: str) -> None:
    read = traces.read_gavel_colocated if text.startswith(COLOCATED) else traces.read_gavel_isolated
    with pytest.raises(TraceError) as caught:
        read(write(tmp_path, text))
    assert (caught.value.line, caught.value.column) == (3, column)


def test_read_jobs_knows_each_format_by_its_header(tmp_path: Path) -> None:
    assert traces.read_jobs(write(tmp_path, GAVEL + "LM,1,1,0,1,7\n")).source == "gavel"
    assert traces.read_jobs(write(tmp_path, PHILLY + "2017-01-01,9,1,9,aa\n")).source == "philly"
    assert traces.read_jobs(write(tmp_path, PODS + "a,1,1,1,1000,,L,R,0,5,0\n")).source == "openb"
    middle = "-1 -1 -1 -1 -1 1 7 -1 -1 -1"
    two = f"1 0 -1 9 2 -1 {middle[3:]} q0 -1 -1\n2 5 -1 8 1 -1 {middle[3:]} q1 -1 -1\n"
    path = write(tmp_path, two, "x.swf")
    assert traces.read_jobs(path).source == "swf"
    part = traces.read_jobs(path, "q1")
    assert (part.arrival_s.tolist(), part.duration_s.tolist()) == ([0.0], [8.0])
    with pytest.raises(TraceError, match="no cluster 'q2' in this trace; it has q0, q1"):
        traces.read_jobs(path, "q2")
    with pytest.raises(TraceError, match="expected a header of Gavel"):
        traces.read_jobs(write(tmp_path, "a,b\n1,2\n"))


def test_traces_are_found_where_the_variable_points_then_among_the_shipped(tmp_path: Path) -> None:
    environ = {tables.ENVIRONMENT: str(tmp_path)}
    assert traces.find_traces({}) == tables.SHIPPED
    assert traces.find_traces(environ) == tmp_path
    shipped = tables.SHIPPED / "swf" / "lublin_256.swf"
    assert traces.trace_file("swf/lublin_256.swf", environ) == shipped
    (tmp_path / "swf").mkdir()
    own = write(tmp_path / "swf", "; mine\n", "lublin_256.swf")
    assert traces.trace_file("swf/lublin_256.swf", environ) == own


def test_traces_that_are_nowhere_are_reported_with_both_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TraceError, match="FEDSCHED_TRACES names this folder") as caught:
        traces.find_traces({tables.ENVIRONMENT: str(tmp_path / "typo")})
    assert str(tmp_path / "typo") in str(caught.value)
    assert str(tables.SHIPPED) in str(caught.value)
    with pytest.raises(TraceError) as caught:
        traces.trace_file("gavel/x.csv", {tables.ENVIRONMENT: str(tmp_path)})
    assert str(tmp_path / "gavel/x.csv") in str(caught.value)
    assert str(tables.SHIPPED / "gavel/x.csv") in str(caught.value)
    monkeypatch.setattr(tables, "SHIPPED", tmp_path / "gone")
    with pytest.raises(TraceError, match="FEDSCHED_TRACES is not set"):
        traces.find_traces({})


def every(folder: str, pattern: str) -> list[Path]:
    return [path for root in FOLDERS for path in sorted(root.glob(f"{folder}/{pattern}"))]


@pytest.mark.parametrize(
    "path",
    [
        *every("gavel", "msr_*.csv"),
        *every("philly", "*.csv"),
        *every("openb", "openb_pod_*.csv"),
        *every("swf", "*.swf"),
    ],
    ids=lambda path: "-".join(path.parts[-3:]),
)
def test_every_trace_at_hand_parses_whole(path: Path) -> None:
    jobs = traces.read_jobs(path)
    comment = ";" if path.suffix == ".swf" else "\0"
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    rows = sum(not line.startswith(comment) for line in lines) - (path.suffix == ".csv")
    assert len(jobs) + sum(jobs.dropped.values()) == rows
    assert len(jobs) >= 250
    if not np.isnan(jobs.arrival_s).any():
        assert jobs.arrival_s[0] == 0
        assert (np.diff(jobs.arrival_s) >= 0).all()


@pytest.mark.parametrize("path", every("openb", "openb_node_*.csv"))
def test_every_node_list_at_hand_parses_whole(path: Path) -> None:
    nodes = traces.read_openb_nodes(path)
    assert len(nodes) == len(path.read_text().splitlines()) - 1
    assert nodes.gpus.sum() > 0


def test_the_shipped_slices_stay_within_a_megabyte() -> None:
    size = sum(path.stat().st_size for path in tables.SHIPPED.rglob("*") if path.is_file())
    assert size <= 1_000_000
