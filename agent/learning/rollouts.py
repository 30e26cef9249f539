"""Experience from the cluster's own simulator, which costs no user anything, for the learner."""

import numpy as np

from agent.learning.batch import Batch
from agent.learning.reward import DEFAULT_WEIGHTS, Interval, RewardWeights, rewards
from agent.scheduling.decision import Policy
from agent.simulator.runs import record
from agent.simulator.simulation import Simulation


def rollout(
    sim: Simulation,
    policy: Policy,
    *,
    seed: int,
    decisions: int,
    mean_run_seconds: float,
    weights: RewardWeights = DEFAULT_WEIGHTS,
) -> Batch | None:
    """Up to ``decisions`` consecutive decisions of a policy with their rewards, as one trajectory.

    Use a policy with a temperature: a greedy one explores nothing. The simulation is used up.
    Returns None where no decision arose.
    """
    run = record(sim, policy, seed=seed, decisions=decisions)
    if run is None:
        return None
    pending, jobs, imbalance = run.integrals.T
    interval = Interval(pending, jobs, imbalance, run.oom_kills)
    ends = np.zeros(len(run.action), np.bool_)
    ends[-1] = True
    return Batch(
        features=run.features,
        mask=run.mask,
        rule_scores=run.rule_scores,
        action=run.action,
        log_prob=run.log_prob,
        reward=rewards(interval, mean_run_seconds, weights).total,
        elapsed=(run.elapsed / mean_run_seconds).astype(np.float32),
        ends=ends,
    )
