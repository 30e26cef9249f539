"""What the demo says at its end of each agent against the best rule."""

import math

import pytest

from agent.statistics import Ratio
from examples.laptop.evaluation import FEDERATED, RULE, Arm
from examples.laptop.report import Outcome, verdict


def arm(name: str, against_rule: Ratio | None) -> Arm:
    ratio = Ratio(0.6, 0.5, 0.7, 200)
    return Arm(name, 3600.0, 7200.0, 9000.0, 0, 0, ratio, against_rule, "policy-1")


@pytest.mark.parametrize(
    ("mean", "half", "said"),
    [
        (0.98, 0.01, "better than the best rule, -2.0 ± 1.0 %"),
        (1.02, 0.01, "WORSE than the best rule, +2.0 ± 1.0 %"),
        (1.02, 0.03, "no different from the best rule, +2.0 ± 3.0 %"),
        (1.0003, 0.0002, "no different from the best rule, +0.0 ± 0.0 %"),
    ],
)
def test_a_difference_is_told_where_it_is_beyond_noise_and_can_be_seen(
    mean: float, half: float, said: str
) -> None:
    ratio = Ratio(mean, mean - half, mean + half, 200, p=math.nan)
    outcome = Outcome(
        arms={"north": [arm(RULE, None), arm(FEDERATED, ratio)]},
        live={},
        rounds=[],
        curves={},
        windows=200,
    )
    (line,) = verdict(outcome)
    assert line == f"north, {FEDERATED}: {said} (policy policy-1)"
