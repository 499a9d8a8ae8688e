"""Hyper-parameters of PPO."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from sebulba.agents.configs.on_policy import ActorCriticConfig
from sebulba.support.checks import check_positive, check_ranges


@dataclasses.dataclass(frozen=True)
class PPOConfig(ActorCriticConfig):
    """Hyper-parameters of PPO (Schulman et al. 2017, arXiv 1707.06347)."""

    agent_class: ClassVar[str] = "sebulba.agents.ppo:PPO"

    learning_rate: float = 3e-4
    trace_decay: float = 0.95
    """Lambda of the generalized advantage estimate."""
    epochs: int = 10
    """Passes over the transitions of a trajectory."""
    minibatches: int = 4
    """Updates per epoch. It divides the transitions of a trajectory on each update device; with an
    LSTM, the environments."""
    ratio_clip: float = 0.2
    """Epsilon: largest change of an action's probability ratio from 1 that the loss rewards."""
    value_clip: float = 0.0
    """Largest change of a value since its trajectory arrived that the loss rewards, in units of the
    scaled return; 0: no clipping."""
    normalize_advantages: bool = True
    """Scale advantages to mean 0 and standard deviation 1 in every minibatch."""
    kl_coefficient: float = 0.0
    """Weight of the divergence KL(policy, policy when its trajectory arrived): 1 / eta of magnetic
    mirror descent (Sokota et al. 2023, arXiv 2206.05825), whose temperature alpha is
    entropy_coefficient."""
    magnet_rate: float = 0.0
    """Share by which the magnet, a copy of the networks, moves towards them in each update. The
    bonus is then -KL(policy, magnet). 0: the magnet is uniform, and the bonus the entropy."""
    target_kl: float = 0.0
    """No update is made with a trajectory any more once the ``approx_kl`` of one is above 1.5 times
    this (as in Spinning Up and Stable-Baselines3; 0.01 to 0.05 are usual). 0: no limit."""
    initial_std: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, epochs=1, minibatches=1, magnet_rate=(0, 1), value_clip=(0, math.inf))
        check_ranges(self, kl_coefficient=(0, math.inf), target_kl=(0, math.inf))
        check_positive(self, "ratio_clip")
