"""Makes the learner that the settings name; called by ``agent.learning.learner``."""

from dataclasses import Field
from typing import Any

from agent.learning.algorithm import Algorithm
from agent.learning.dqn import Dqn, DqnSettings
from agent.learning.ppo import Ppo, PpoSettings
from agent.settings import LearnSettings


def make_algorithm(settings: LearnSettings) -> tuple[Algorithm, float]:
    """The algorithm that the settings name, and its softmax temperature.

    Raises:
        ValueError: an option is unknown or out of range.
    """
    known: dict[str, Field[Any]] = (
        PpoSettings if settings.algorithm == "ppo" else DqnSettings
    ).__dataclass_fields__
    if unknown := sorted(settings.options.keys() - known.keys()):
        raise ValueError(
            f"learn.options: {settings.algorithm} has no option {unknown[0]!r}; "
            f"it has {', '.join(known)}"
        )
    typed: dict[str, Any] = {
        name: int(value) if isinstance(known[name].default, int) else value
        for name, value in settings.options.items()
    }
    if settings.algorithm == "ppo":
        ppo = PpoSettings(**typed)
        return Ppo(ppo, seed=settings.seed), ppo.temperature
    dqn = DqnSettings(**typed)
    return Dqn(dqn, seed=settings.seed), dqn.temperature
