"""Hyper-parameters of PPO."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from sebulba.agents.configs.on_policy import ActorCriticConfig
from sebulba.support.checks import require_number, require_positive, require_size


@dataclasses.dataclass(frozen=True)
class PPOConfig(ActorCriticConfig):
    """Hyper-parameters of PPO (Schulman et al. 2017, arXiv 1707.06347)."""

    agent_class: ClassVar[str] = "sebulba.agents.ppo:PPO"

    learning_rate: float = 3e-4
    """Step size of the optimizer."""
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
    normalize_advantages: bool = True
    """Mean 0 and standard deviation 1 in every minibatch."""
    initial_std: float = 1.0
    """Standard deviation of continuous actions before training, in units of half the range where
    the action is bounded."""

    def __post_init__(self) -> None:
        """Check every field."""
        super().__post_init__()
        require_size("epochs", self.epochs, 1, "use 10")
        require_size("minibatches", self.minibatches, 1, "use 4")
        require_positive("ratio_clip", self.ratio_clip, "use 0.2")
        require_number("value_clip", self.value_clip, 0, math.inf, "use 0 for no clipping")
