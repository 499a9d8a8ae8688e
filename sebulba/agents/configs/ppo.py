"""Hyper-parameters of PPO."""

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
class PPOConfig:
    """Hyper-parameters of PPO (Schulman et al. 2017, arXiv 1707.06347).

    Raises:
      UsageError: A field is out of its range.
    """

    learning_rate: float = 3e-4
    """Step size of the optimizer."""
    discount: float = 0.99
    """Discount per environment step."""
    trace_decay: float = 0.95
    """Lambda of the generalized advantage estimate."""
    epochs: int = 10
    """How often every transition of a trajectory is learned from."""
    minibatches: int = 4
    """Updates an epoch. Divides the transitions of a trajectory on each update device, or their
    environments where there is an LSTM."""
    ratio_clip: float = 0.2
    """Epsilon: how far the probability ratio of an action may pay, up and down from 1."""
    value_clip: float = 0.0
    """How far a value may pay to move away from what it was when the trajectory arrived, in units
    of the scaled return; 0 does not clip."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus."""
    value_coefficient: float = 0.5
    """Weight of the value loss, which is half the mean square."""
    normalize_advantages: bool = True
    """Mean 0 and standard deviation 1 in every minibatch."""
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
    initial_std: float = 1.0
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
        require_number("trace_decay", self.trace_decay, 0, 1, "use 0.95")
        require_size("epochs", self.epochs, 1, "use 10")
        require_size("minibatches", self.minibatches, 1, "use 4")
        require_positive("ratio_clip", self.ratio_clip, "use 0.2")
        require_number("value_clip", self.value_clip, 0, math.inf, "use 0 for no clipping")
        require_number("value_coefficient", self.value_coefficient, 0, math.inf, "use 0.5")
        require_size("lstm_size", self.lstm_size, 0, "use 256, or 0 for no LSTM")
        require_no_double_scaling(self.normalize_observations, self.torso)
        require(
            not (self.separate_value_torso and self.lstm_size),
            "separate_value_torso",
            self.separate_value_torso,
            f"cannot go with lstm_size={self.lstm_size}, which policy and value share",
            "set one of them to False or 0",
        )
