"""Trains MaskablePPO of sb3-contrib on the environment and compares it with the rule; run by hand.

``python -m examples.bring_your_own --steps 20000``; ``docs/environment.md`` explains the parts.
"""

from collections.abc import Callable
from typing import Annotated, Any, cast

import gymnasium
import numpy as np
import torch
import typer
from rich.console import Console
from sb3_contrib import MaskablePPO
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch import Tensor, nn

from agent.learning.environment import SchedulingEnvironment
from agent.simulator.workloads import Workload
from agent.statistics import paired_ratio
from common.features import FEATURE_COUNT

console = Console()
Choose = Callable[[dict[str, Any], dict[str, Any]], int]
"""The action for an observation and its info."""


class CandidateScores(BaseFeaturesExtractor):
    """Scores every candidate by the same small network, and pools them for the value.

    A plain network over all rows would have to learn each row anew, and a cluster with more
    candidates would be a new problem.
    """

    def __init__(self, space: gymnasium.spaces.Dict, width: int = 48) -> None:
        shape = space["features"].shape
        assert shape is not None
        super().__init__(space, features_dim=shape[0] + width)
        self.encoder = nn.Sequential(
            nn.Linear(FEATURE_COUNT + 1, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        )
        self.score = nn.Linear(width, 1)

    def forward(self, observation: dict[str, Tensor]) -> Tensor:
        """[B, 64 + width]: a score for each row, then the mean code of the candidates."""
        rule = observation["rule_scores"].unsqueeze(-1)
        codes = self.encoder(torch.cat([observation["features"], rule], -1))
        mask = observation["action_mask"].unsqueeze(-1)
        pooled = (codes * mask).sum(1) / mask.sum(1).clamp(min=1.0)
        return torch.cat([self.score(codes).squeeze(-1), pooled], -1)


def make(jobs: int, part: str) -> SchedulingEnvironment:
    """Decides order, waiting and places."""
    environment = gymnasium.make("fedsched/Queue-v0", jobs=jobs, part=part)
    return cast(SchedulingEnvironment, environment.unwrapped)


def train(environment: SchedulingEnvironment, *, steps: int, seed: int) -> MaskablePPO:
    """A policy after about ``steps`` decisions; on one thread, so that a seed repeats it."""
    torch.set_num_threads(1)
    policy = {
        "features_extractor_class": CandidateScores,
        "net_arch": {"pi": [], "vf": [48]},  # the extractor's scores are the logits' source
    }
    model = MaskablePPO(
        "MultiInputPolicy", Monitor(environment), n_steps=1024, batch_size=256, gamma=0.999,
        learning_rate=1e-3, policy_kwargs=policy, seed=seed, device="cpu",
    )  # fmt: skip
    # Row i's logit starts as the score of row i, and as nothing of the other rows.
    with torch.no_grad():
        head = cast(nn.Linear, model.policy.action_net)
        head.weight.zero_()
        head.weight[:, : head.out_features] = torch.eye(head.out_features)
    return model.learn(steps)


def play(
    environment: SchedulingEnvironment, workload: Workload, choose: Choose, *, seed: int
) -> float:
    """Mean completion time of one episode, s."""
    observation, info = environment.reset(seed=seed, options={"workload": workload})
    ended = not info["action_mask"].any()
    while not ended:
        observation, _, ended, _, info = environment.step(choose(observation, info))
    return float(info["mean_completion"])


def main(
    steps: Annotated[int, typer.Option(min=1, help="Decisions to train on.")] = 20_000,
    jobs: Annotated[int, typer.Option(min=2, help="Jobs of an episode.")] = 60,
    windows: Annotated[int, typer.Option(min=2, help="Workloads to compare on.")] = 20,
    seed: Annotated[int, typer.Option(help="Seed of training; those of workloads differ.")] = 0,
) -> None:
    """Train MaskablePPO, then compare it with the rule on workloads that it has not seen."""
    model = train(make(jobs, "train"), steps=steps, seed=seed)

    def learned(observation: dict[str, Any], info: dict[str, Any]) -> int:
        action, _ = model.predict(
            observation, action_masks=info["action_mask"].astype(bool), deterministic=True
        )
        return int(action)

    def at_random(observation: dict[str, Any], info: dict[str, Any]) -> int:
        del observation
        return int(rng.choice(np.flatnonzero(info["action_mask"])))

    rng = np.random.default_rng(seed)
    unseen = make(jobs, "validation")
    workloads = [unseen.draw(np.random.default_rng([seed, n])) for n in range(windows)]
    arms: dict[str, Choose] = {
        "rule": lambda _, info: int(info["rule_action"]),
        "at random": at_random,
        "MaskablePPO": learned,
    }
    found = {
        name: [play(unseen, workload, choose, seed=n) for n, workload in enumerate(workloads)]
        for name, choose in arms.items()
    }
    console.print(f"mean completion time on {windows} workloads of {jobs} jobs, {steps} steps")
    for name, means in found.items():
        against = "" if name == "rule" else f", {paired_ratio(means, found['rule'])} to the rule"
        console.print(f"  {name:12} {np.mean(means) / 3600:6.2f} h{against}")


if __name__ == "__main__":
    typer.run(main)
