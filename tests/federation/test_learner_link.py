"""Two real learners and a real hub: they upload what they learned and take up what comes back."""

from pathlib import Path

import numpy as np
import pytest

from agent.cluster import nodes_file
from agent.federation import Member
from agent.journal import Progress
from agent.uploads import UploadPolicy
from common.policy import initial_arrays
from common.weights import delta, norm
from tests.federation.support import TERMS, Hub, until
from tests.unit.journals import NODES, decision, life_of_pods, placed
from tests.unit.learners import Member as Cluster
from tests.unit.learners import varied

pytestmark = pytest.mark.timeout(600)  # only bounds a hanging run: two learners learn


def link(cluster: Cluster, hub: Hub, name: str) -> Member:
    return Member(
        hub.bundle(name),
        cluster.learner.handover,
        cluster.settings.state,
        features_version=TERMS.features_version,
        architecture=TERMS.architecture,
        software_version="0.0",
        policy=UploadPolicy(learning_rounds=1, seconds=1e9, drift=float("inf")),
        tick_seconds=0.02,
        first_backoff=0.05,
    )


def work(cluster: Cluster, number: int) -> None:
    """Four more decisions that place pods which ran and ended, and a reading of each."""
    for n in range(number, number + 4):
        pod = f"worker-{n}"
        cluster.write(varied(decision(n, pod)), *placed(pod, "n0", 10.0 * n + 1))
        cluster.write(
            Progress(
                uid=pod,
                time=10.0 * n + 2,
                job_type="LM",
                gpus=1,
                gpu_model="v100",
                steps_per_second=2.0,
                neighbours=[],
            )
        )


def test_learners_share_weights_speeds_and_counts_over_the_link(tmp_path: Path) -> None:
    hub = Hub(tmp_path, initial=initial_arrays(), eta=0.5, min_members=2).start()
    # Small steps pass the gate: only a judged policy is shared.
    clusters = [
        Cluster(tmp_path / name, gate_rounds=1, options={"learning_rate": 1e-4})
        for name in ("east", "west")
    ]
    for cluster in clusters:
        nodes_file.write(cluster.settings.nodes_file, NODES)
        cluster.write(*(r for r in life_of_pods(40) if not isinstance(r, Progress)))
    members = [link(c, hub, n) for c, n in zip(clusters, ("east", "west"), strict=True)]
    try:
        for member in members:
            member.start()
        number = 1

        def three_rounds() -> bool:
            nonlocal number
            for cluster in clusters:
                work(cluster, number)
                cluster.learner.round()
            number += 4
            return hub.finished(3)

        until(three_rounds, "three rounds are finished")
        for name, cluster in zip(("east", "west"), clusters, strict=True):
            learner = cluster.learner
            _, counted = hub.registry.pod_counter(name)
            assert 0 < counted <= learner.handover.local().scheduled_pods
            assert learner.shared
            assert learner.speeds.peers.members == 1
            (row,) = learner.speeds.peers.rows.values()
            assert row.n > 0
            assert np.isclose(row.sum_x / row.n, np.log(2.0))
            assert norm(delta(learner.arrays(), initial_arrays())) > 0.0
            distance = norm(delta(learner.arrays(), hub.policy)) / norm(hub.policy)
            assert distance < 0.2
        assert norm(delta(hub.policy, initial_arrays())) > 0.0
    finally:
        for cluster in clusters:
            cluster.learner.handover.close()
        for member in members:
            member.stop()
        hub.stop()
        for cluster in clusters:
            cluster.store.close()
            cluster.journal.close()
