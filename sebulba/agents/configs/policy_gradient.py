"""What every policy-gradient agent's hyper-parameters have in common."""

from __future__ import annotations

import math
from typing import Protocol

from sebulba.agents.configs.checks import require_number, require_positive


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
