"""Speed tables in a federation: who tells what to whom, and what it is worth; for ``federation``.

Called by the suite's ``prepare``. Members live through jobs of their own, tell the hub what they
measured, and get from it the sum of what the others told, as agents do.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from agent.benchmark.federation_data import Cluster, Speeds
from agent.benchmark.federation_policies import open_hub
from agent.benchmark.knowledge import Knowledge, live_through
from agent.learning.speeds import SpeedModel, speed_text
from agent.learning.speeds import Speeds as Predicted
from agent.simulator.hardware import SpeedTable as TrueSpeeds
from common import link_pb2 as pb
from common.codec import decode_peers, encode_delta, encode_speeds
from common.policy import initial_arrays
from common.speeds import NOBODY, Peers, SpeedRow, SpeedTable, speed_key
from common.weights import like, quantise

JOBS = 80
"""Of a window that a member lives through."""


def experience(cluster: Cluster, settings: Speeds, rule: str) -> Knowledge:
    """What a member knows after some windows of its own jobs under the rule."""
    known, speeds = Knowledge({}, [], 0), cluster.site_speeds(settings.spread)
    for seed in range(settings.windows):
        jobs = cluster.drawn(speeds, jobs=JOBS, load=settings.load, seed=seed)
        live_through(known, jobs, cluster.nodes, speeds, seed=seed, noise=settings.noise, rule=rule)
    return known


def table(known: Knowledge) -> SpeedTable:
    """What a member tells the hub."""
    model = SpeedModel()
    model.update(known.sums)
    return model.rows()


def lie(known: Knowledge, speeds: TrueSpeeds, factor: float) -> SpeedTable:
    """The table of a member that calls its slowest GPU model faster than it is, often and loudly.

    Every kind on that model gets ``factor`` times its speed, as if read a thousand times.
    """
    told = table(known)
    relative = speeds.relative.mean(axis=0)
    slowest = speeds.gpu_types[int(relative.argmin())]
    for number, gpus in zip(speeds.kind_type, speeds.kind_gpus, strict=True):
        k = speeds.kind(speeds.job_types[number], int(gpus))
        true = math.log(float(speeds.speed[k, speeds.gpu_types.index(slowest)]))
        claimed, count = true + math.log(factor), 1000.0
        key = speed_key(speed_text(speeds.job_types[number], int(gpus), slowest))
        told[key] = SpeedRow(count, count * claimed, count * claimed**2)
    return told


class _Teller:
    """A member that has a speed table and no policy of its own."""

    def __init__(self, told: SpeedTable) -> None:
        self._told, self._pods = told, 0
        self.peers = NOBODY

    def __call__(self, message: pb.HubMessage) -> pb.MemberMessage:
        if message.WhichOneof("kind") == "personalize":
            return pb.MemberMessage(
                adopted=pb.Adopted(reply_to=message.personalize.id, adopted=True)
            )
        train = message.train
        self.peers = decode_peers(train.speeds)
        self._pods += 1
        unchanged, _ = quantise(like(initial_arrays()))
        return pb.MemberMessage(
            update=pb.Update(
                reply_to=train.id,
                base_round=train.round,
                base_version=train.version,
                tensors=encode_delta(unchanged),
                scheduled_pods=self._pods,
                counter=1,
                speeds=encode_speeds(self._told),
            )
        )


def exchange(
    tables: Mapping[str, SpeedTable], settings: Mapping[str, Any] | None = None
) -> dict[str, Peers]:
    """What the hub tells each member of the others; a newcomer's own table is empty."""
    members = {name: _Teller(told) for name, told in tables.items()}
    with TemporaryDirectory() as folder:
        hub = open_hub()(Path(folder), initial_arrays(), members, settings or {})
        try:
            for _ in range(2):  # in the first all tell, with the second they hear
                if refused := hub.round():
                    raise RuntimeError(f"a speed table was refused: {refused}")
        finally:
            hub.close()
    return {name: member.peers for name, member in members.items()}


def predict(speeds: TrueSpeeds, own: Knowledge | None, peers: Peers | None) -> Predicted:
    """Speeds of all kinds as a member's model has them; without anything, by data sheets."""
    model = SpeedModel()
    if own is not None:
        model.update(own.sums)
    if peers is not None:
        model.absorb(peers)
    names: Sequence[str] = [speeds.job_types[number] for number in speeds.kind_type]
    kinds = [(name, int(gpus)) for name, gpus in zip(names, speeds.kind_gpus, strict=True)]
    return model.predict(kinds, speeds.gpu_types)
