"""Hyper-parameters of REINFORCE."""

from __future__ import annotations

import dataclasses

from sebulba.agents.configs.policy_gradient import require_policy_gradient
from sebulba.agents.configs.shared import OptimizerConfig, TorsoConfig
from sebulba.checks import check_types


@dataclasses.dataclass(frozen=True)
class SimplePolicyGradientConfig:
    """Hyper-parameters of REINFORCE.

    Raises:
      UsageError: A field is out of its range.
    """

    learning_rate: float = 1e-3
    """Step size of the optimizer."""
    discount: float = 0.99
    """Discount per environment step."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus."""
    reward_scale: float = 1.0
    """Rewards are multiplied by this before anything else."""
    normalize_returns: bool = True
    """Subtract the mean return of the same row over all environments and divide by the standard
    deviation over the batch."""
    initial_std: float = 0.5
    """Standard deviation of continuous actions before training, in units of half the range where
    the action is bounded."""
    torso: TorsoConfig = TorsoConfig(hidden_sizes=(200,) * 5)
    """Network from observation to features."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """From gradient to update."""

    def __post_init__(self) -> None:
        """Check every field."""
        check_types(self)
        require_policy_gradient(self)
