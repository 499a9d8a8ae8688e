"""Hyper-parameters of IMPALA."""

from __future__ import annotations

import dataclasses
import math

from sebulba.agents.configs.checks import require, require_number, require_positive, require_size
from sebulba.agents.configs.policy_gradient import (
    require_no_double_scaling,
    require_policy_gradient,
)
from sebulba.agents.configs.shared import OptimizerConfig, TorsoConfig
from sebulba.checks import check_types


@dataclasses.dataclass(frozen=True)
class ImpalaConfig:
    """Hyper-parameters of IMPALA (Espeholt et al. 2018, arXiv 1802.01561).

    Raises:
      UsageError: A field is out of its range.
    """

    learning_rate: float = 1e-3
    """Step size of the optimizer."""
    discount: float = 0.99
    """Discount per environment step."""
    entropy_coefficient: float = 0.01
    """Weight of the entropy bonus."""
    value_coefficient: float = 0.5
    """Weight of the value loss."""
    trace_decay: float = 1.0
    """Lambda: multiplies the trace coefficients c; 1 is the paper's V-trace."""
    max_rho: float = 1.0
    """Clip of the importance weight of a temporal difference (rho-bar)."""
    max_c: float = 1.0
    """Clip of the trace coefficient (c-bar)."""
    max_policy_rho: float = 1.0
    """Clip of the importance weight of the policy gradient."""
    normalize_observations: bool = False
    """Subtract the running mean of vector observations and divide by their standard deviation."""
    normalize_rewards: bool = False
    """Divide rewards by the running standard deviation of their discounted sum."""
    reward_scale: float = 1.0
    """Rewards are multiplied by this, after any normalisation."""
    lstm_size: int = 0
    """Units of an LSTM between torso and heads; 0 has none."""
    separate_value_torso: bool = False
    """Give the value its own torso instead of sharing the policy's."""
    initial_std: float = 0.5
    """Standard deviation of continuous actions before training, in units of half the range where
    the action is bounded."""
    torso: TorsoConfig = TorsoConfig()
    """Network from observation to features."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """From gradient to update."""

    def __post_init__(self) -> None:
        """Check every field."""
        check_types(self)
        require_policy_gradient(self)
        require_number("value_coefficient", self.value_coefficient, 0, math.inf, "use 0.5")
        require_number("trace_decay", self.trace_decay, 0, 1, "use 1")
        for name in ("max_rho", "max_c", "max_policy_rho"):
            require_positive(name, getattr(self, name), "use 1")
        require_no_double_scaling(self.normalize_observations, self.torso)
        require_size("lstm_size", self.lstm_size, 0, "use 256, or 0 for no LSTM")
        require(
            not (self.separate_value_torso and self.lstm_size),
            "separate_value_torso",
            self.separate_value_torso,
            f"cannot go with lstm_size={self.lstm_size}, which policy and value share",
            "set one of them to False or 0",
        )
