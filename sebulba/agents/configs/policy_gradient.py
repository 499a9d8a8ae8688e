"""What every policy-gradient agent's hyper-parameters have in common."""

from __future__ import annotations

import math
from typing import Protocol

from sebulba.agents.configs.checks import require, require_number, require_positive
from sebulba.agents.configs.shared import TorsoConfig


class PolicyGradientConfig(Protocol):
    """The fields that are checked here; each config describes its own."""

    @property
    def learning_rate(self) -> float: ...
    @property
    def discount(self) -> float: ...
    @property
    def entropy_coefficient(self) -> float: ...
    @property
    def reward_scale(self) -> float: ...
    @property
    def initial_std(self) -> float: ...


def require_policy_gradient(config: PolicyGradientConfig) -> None:
    """Raise UsageError unless all of them are in range."""
    require_positive("learning_rate", config.learning_rate, "use 1e-3")
    require_number("discount", config.discount, 0, 1, "use 0.99")
    require_number("entropy_coefficient", config.entropy_coefficient, 0, math.inf, "use 0.01")
    require_positive("reward_scale", config.reward_scale, "use 1")
    require_positive("initial_std", config.initial_std, "use 0.5")


def require_no_double_scaling(normalize_observations: bool, torso: TorsoConfig) -> None:
    """Raise UsageError if observations would be scaled by their bounds and by their statistics."""
    require(
        not (normalize_observations and torso.scale_bounded_observations),
        "normalize_observations",
        normalize_observations,
        "cannot go with torso.scale_bounded_observations=True, which scales by the bounds",
        "set one of them to False",
    )
