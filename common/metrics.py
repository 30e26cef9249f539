"""The metrics that may leave a member, by name; both ends of the link check against this list.

A name that is not declared here is dropped by the member before it is sent, and refused by the
hub: free names would be a way for pod or node names to leave a cluster.
"""

import math
from collections.abc import Mapping

DECLARED: dict[str, str] = {
    "reward": "mean reward of the latest experience",
    "loss": "total loss of the latest learning round",
    "distillation_loss": "mean loss against the labels tried on the own simulator",
    "labels": "labels that the teacher keeps",
    "policy_loss": "clipped surrogate loss (PPO)",
    "value_loss": "value or TD loss",
    "entropy": "mean entropy of the policy, nats",
    "approx_kl": "approximate KL divergence of the last update, nats",
    "clip_fraction": "share of PPO ratios that were clipped",
    "explained_variance": "explained variance of the value head",
    "proximal_term": "FedProx term of the loss",
    "distance_to_global": "norm of the difference from the shared policy",
    "learning_rounds": "learning rounds so far",
    "experiences": "experiences in the store",
    "scheduled_pods": "pods scheduled so far",
    "jobs_finished": "jobs that completed so far",
    "mean_completion_seconds": "mean completion time of the member's jobs, seconds",
    "p99_completion_seconds": "99th percentile of the completion time, seconds",
    "completion_vs_rule": "completion time relative to the rule's, ratio",
    "oom_kills": "pods that ran out of memory so far",
    "gate_gain": "gain of the latest candidate over the rule in the gate, ratio",
    "gate_accepted": "candidates that passed the gate so far",
    "gate_rejected": "candidates that the gate held back so far",
    "speed_observations": "speed samples so far",
    "run_time_error_by_kind": "error of run times predicted by kind, root mean square of log s",
    "run_time_error": "the same of the same runs, their works' own earlier runs counted",
    "run_time_coverage": "share of runs within the 80 % interval that was set before them",
}
"""Meaning of each name. Names match ``[a-z][a-z0-9_]{0,63}``."""


def allowed(metrics: Mapping[str, float]) -> dict[str, float]:
    """Those metrics that are declared and finite; the rest is left out."""
    return {
        name: float(value)
        for name, value in metrics.items()
        if name in DECLARED and math.isfinite(value)
    }


def undeclared(metrics: Mapping[str, float]) -> list[str]:
    """Names that may not be sent, sorted."""
    return sorted(name for name in metrics if name not in DECLARED)
