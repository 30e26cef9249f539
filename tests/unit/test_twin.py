"""The twin's windows keep what pods accept and when they are due, and a job's attempts are one."""

from pathlib import Path

import msgspec
import numpy as np

from agent.journal import Journal, PodEvent, Record
from agent.learning.speeds import SpeedModel, sample
from agent.learning.store import Store
from agent.learning.twin import Twin, build
from tests.unit.journals import NODES, life_of_pods

MODELS = ["k80", "p100", "v100"]
"""GPU models of the nodes, as the twin numbers them."""


def twin_of(folder: Path, records: list[Record]) -> Twin:
    journal = Journal(folder / "journal")
    for record in records:
        journal.append(record)
    journal.close()
    store = Store(folder / "experience.sqlite")
    store.ingest(folder / "journal", sample)
    model = SpeedModel()
    model.update(store.speed_sums())
    made = build(store, model, NODES)
    store.close()
    assert made is not None
    return made


def changed(records: list[Record], uid: str, **changes: object) -> list[Record]:
    return [
        msgspec.structs.replace(record, **changes)
        if isinstance(record, PodEvent) and (record.uid, record.kind) == (uid, "created")
        else record
        for record in records
    ]


def test_a_job_keeps_its_models_and_its_time_to_the_deadline(tmp_path: Path) -> None:
    records = life_of_pods(60, gap=200.0)
    records = changed(records, "pod-3", gpu_models=["v100", "unheard-of"], deadline=600.0 + 5000.0)
    records = changed(records, "pod-7", gpu_models=["unheard-of"])
    twin = twin_of(tmp_path, records)
    assert len(twin.allowed) == 59  # no node of this cluster could hold pod-7
    assert twin.allowed[3] == 1 << MODELS.index("v100")
    assert np.flatnonzero(twin.allowed != -1).tolist() == [3]
    assert twin.slack[3] == 5000.0
    assert np.isinf(np.delete(twin.slack, 3)).all()
    window = twin.workload(seed=0, window=0, jobs=200)
    due = np.isfinite(window.deadline)
    assert due.any()
    assert (window.deadline[due] - window.arrival[due] == 5000.0).all()
    assert (window.allowed[due] == 1 << MODELS.index("v100")).all()
    view = twin.simulation(seed=0, window=0, jobs=200).cluster
    assert (view.allowed == window.allowed).all()
    assert (view.deadline == window.deadline).all()


def test_a_job_whose_memory_was_measured_peaks_there(tmp_path: Path) -> None:
    records = [
        msgspec.structs.replace(record, memory_used=3.25)
        if isinstance(record, PodEvent) and (record.uid, record.kind) == ("pod-4", "finished")
        else record
        for record in life_of_pods(60, gap=200.0)
    ]
    twin = twin_of(tmp_path, records)
    assert np.flatnonzero(~np.isnan(twin.memory_used)).tolist() == [4]
    window = twin.workload(seed=0, window=0, jobs=200)
    assert (window.memory_peak == 3.25).any()
    assert np.isfinite(window.memory_peak).all()
    assert len(np.unique(window.memory_peak)) > 100


def test_a_pod_that_replaced_another_is_no_arrival_and_its_end_is_the_jobs(tmp_path: Path) -> None:
    """pod-5 is killed after a while, and pod-6 is what its controller made of it."""
    records: list[Record] = []
    for record in life_of_pods(60, gap=200.0):
        if isinstance(record, PodEvent) and record.uid == "pod-5" and record.kind == "finished":
            record = msgspec.structs.replace(record, kind="oom", run_seconds=60.0)
        if isinstance(record, PodEvent) and record.uid == "pod-6":
            record = msgspec.structs.replace(record, job="pod-5", attempt=1, job_type="again")
            if record.kind == "finished":
                record = msgspec.structs.replace(record, run_seconds=777.0, gpu_model="")
        records.append(record)
    twin = twin_of(tmp_path, records)
    assert len(twin.gap) == 59
    assert twin.gap[5:8].tolist() == [200.0, 400.0, 200.0]
    assert round(float(twin.seconds[5]), 6) == 777.0
