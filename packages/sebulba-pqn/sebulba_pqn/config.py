"""Hyper-parameters of PQN."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from sebulba.agents.configs.network_and_optimizer import (
    CommonConfig,
    MemoryConfig,
    OptimizerConfig,
    TorsoConfig,
    check_normalization,
)
from sebulba.support.checks import check_ranges


@dataclasses.dataclass(frozen=True)
class PQNConfig(MemoryConfig, CommonConfig):
    """Hyper-parameters of PQN (Gallici et al. 2025, arXiv 2407.04811)."""

    agent_class: ClassVar[str] = "sebulba_pqn.agent:PQN"

    learning_rate: float = 2.5e-4
    trace_decay: float = 0.65
    """Lambda: weight of the values of later steps in a target."""
    epochs: int = 2
    """Passes over the transitions of a trajectory."""
    minibatches: int = 4
    """Updates per epoch. It divides the transitions of a trajectory on each update device; with a
    memory, the environments."""
    initial_epsilon: float = 1.0
    """Initial probability of a random action."""
    final_epsilon: float = 0.05
    """Final probability of a random action; with a ladder, of the first environment."""
    exploration_env_steps: int = 50_000
    """Environment steps of all Inferencers over which epsilon falls linearly."""
    epsilon_exponent: float = 0.0
    """A ladder: environment i of N ends at final_epsilon ** (1 + epsilon_exponent * i / (N - 1))
    (Horgan et al. 2018); 0: all end at final_epsilon."""
    most_held_steps: int = 1
    """Hold a random action for n steps with probability proportional to 1 / n**2, n up to this
    (Dabney et al. 2020, arXiv 2006.01782); 1: for one step."""
    normalize_observations: bool = False
    """Subtract the running mean of observations and divide by their standard deviation;
    large images and discrete parts stay as they are."""
    normalize_rewards: bool = False
    """Divide rewards by the running standard deviation of their discounted sum."""
    torso: TorsoConfig = TorsoConfig(hidden_sizes=(128, 128), activation="relu", layer_norm=True)
    optimizer: OptimizerConfig = OptimizerConfig("radam", max_grad_norm=10.0)

    # Constants, which other agents have as options.
    value_head = True
    central_critic = dueling = noisy = popart = False
    head_hidden_sizes = ()
    final_entropy_coefficient, kl_coefficient, magnet_rate, target_kl = None, 0.0, 0.0, 0.0

    def __post_init__(self) -> None:
        """Check every field."""
        super().__post_init__()
        check_ranges(self, trace_decay=(0, 1), epochs=1, minibatches=1, most_held_steps=1)
        check_ranges(self, initial_epsilon=(0, 1), final_epsilon=(0, 1), exploration_env_steps=0)
        check_ranges(self, epsilon_exponent=(0, math.inf))
        check_normalization(self.normalize_observations, self.torso)
