"""Journal records of a made-up cluster, for the tests of what learns from them."""

from collections.abc import Sequence

import numpy as np

from agent.cluster.records import Node
from agent.journal import Decision, PodEvent, Progress, Record
from agent.simulator.hardware import SpeedTable, load_speeds
from common.features import FEATURE_COUNT


def decision(
    number: int,
    pod: str = "",
    nodes: tuple[str, ...] = ("n0", "n1"),
    *,
    action: int = 0,
    session: str = "s1",
    temperature: float = 0.5,
    policy: str = "",
    log_prob: float = -0.25,
) -> Decision:
    """Decision ``number`` at 10 s each: one pod on ``nodes`` (rule scores 0, −1, −2 …), or wait."""
    count = len(nodes) + 1
    pods = [pod or "other"] * len(nodes) + [""]
    return Decision(
        id=f"d{number}",
        session=session,
        time=10.0 * number,
        verb="queue",
        policy=policy,
        pods=pods,
        nodes=[*nodes, ""],
        features=np.full((count, FEATURE_COUNT), number, np.float32).tobytes(),
        rule_scores=(-np.arange(count, dtype=np.float32)).tobytes(),
        action=action if pod else count - 1,
        log_prob=log_prob,
        temperature=temperature,
        pending=3,
        running=2,
        job_seconds=50.0 * number,
        imbalance_seconds=1.0 * number,
    )


def event(uid: str, kind: str, time: float, node: str = "", run: float = 0.0) -> PodEvent:
    return PodEvent(uid=uid, kind=kind, time=time, node=node, run_seconds=run)


def no_samples(_: Progress) -> None:
    return None


def placed(uid: str, node: str, time: float, end: str = "finished") -> tuple[PodEvent, PodEvent]:
    return event(uid, "bound", time, node), event(uid, end, time + 1, node, run=1.0)


NODES = [
    Node(name=f"{model}-{i}", cpu=64, memory=384, gpus=8, gpu_model=model, gpu_memory=16)
    for model in ("k80", "p100", "v100")
    for i in range(2)
]


def life_of_pods(
    count: int, seed: int = 0, *, gap: float = 300.0, nodes: Sequence[Node] = NODES
) -> list[Record]:
    """``count`` pods of measured kinds that came, ran 20 minutes on the fastest type and ended."""
    table: SpeedTable = load_speeds()
    rng = np.random.default_rng(seed)
    records: list[Record] = []
    for number in range(count):
        k, node = int(rng.integers(len(table))), nodes[int(rng.integers(len(nodes)))]
        t = table.gpu_types.index(node.gpu_model)
        job_type, gpus = table.job_types[table.kind_type[k]], int(table.kind_gpus[k])
        came = gap * number
        run = 1200.0 * rng.lognormal(0.0, 1.0) / float(table.relative[k, t])

        pod = {"uid": f"pod-{number}", "job_type": job_type, "gpus": gpus}
        asked = {"cpu": 2.0 * gpus, "memory": 8.0 * gpus, "gpu_memory": 4.0}
        where = {"node": node.name, "gpu_model": node.gpu_model}
        ended = {"kind": "finished", "time": came + 10.0 + run, "run_seconds": run}
        records += [
            PodEvent(**pod, **asked, kind="created", time=came),
            PodEvent(**pod, **asked, **where, kind="bound", time=came + 10.0),
            Progress(
                **pod,
                time=came + 20.0,
                gpu_model=node.gpu_model,
                steps_per_second=float(table.speed[k, t]),
                neighbours=[],
            ),
            PodEvent(**pod, **asked, **where, **ended),
        ]
    return records
