"""Hyper-parameters of DQN."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from sebulba.agents.configs.checks import (
    require_choice,
    require_number,
    require_positive,
    require_size,
)
from sebulba.agents.configs.replay import ReplayConfig, TargetConfig
from sebulba.agents.configs.shared import OptimizerConfig, TorsoConfig
from sebulba.checks import check_types


@dataclasses.dataclass(frozen=True)
class DQNConfig:
    """Hyper-parameters of DQN (Mnih et al. 2015, doi 10.1038/nature14236) and its refinements.

    Raises:
      UsageError: A field is out of its range.
    """

    learning_rate: float = 5e-4
    """Step size of the optimizer."""
    discount: float = 0.99
    """Discount per environment step."""
    reward_scale: float = 1.0
    """Rewards are multiplied by this before anything else."""
    num_steps: int = 1
    """Rewards in a target before it bootstraps (n)."""
    double: bool = True
    """Choose the action of the target by the trained network (van Hasselt et al. 2016)."""
    dueling: bool = False
    """Sum a value and advantages to the values of actions (Wang et al. 2016)."""
    loss: Literal["huber", "squared"] = "huber"
    """Loss of a temporal difference; huber is linear beyond 1."""
    initial_epsilon: float = 1.0
    """Probability of a random action at the beginning."""
    final_epsilon: float = 0.05
    """Probability of a random action in the end; in the first environment, with a ladder."""
    exploration_env_steps: int = 10_000
    """Environment steps of all Inferencers over which it falls linearly."""
    epsilon_exponent: float = 0.0
    """A ladder: environment i of N ends at final_epsilon ** (1 + epsilon_exponent * i / (N - 1))
    (Horgan et al. 2018); 0 has all end at final_epsilon."""
    head_hidden_sizes: tuple[int, ...] = ()
    """Units of each hidden layer between features and values; with dueling, of both streams."""
    torso: TorsoConfig = TorsoConfig(activation="relu")
    """Network from observation to features."""
    optimizer: OptimizerConfig = OptimizerConfig(max_grad_norm=10.0)
    """From gradient to update."""
    replay: ReplayConfig = ReplayConfig()
    """What is kept, what is drawn of it, and how often."""
    target: TargetConfig = TargetConfig(period=500)
    """How the target network follows."""

    def __post_init__(self) -> None:
        """Check every field."""
        check_types(self)
        require_positive("learning_rate", self.learning_rate, "use 5e-4")
        require_number("discount", self.discount, 0, 1, "use 0.99")
        require_positive("reward_scale", self.reward_scale, "use 1")
        require_size("num_steps", self.num_steps, 1, "use 1 or 3")
        require_choice("loss", self.loss, ("huber", "squared"))
        require_number("initial_epsilon", self.initial_epsilon, 0, 1, "use 1")
        require_number("final_epsilon", self.final_epsilon, 0, 1, "use 0.05")
        require_size("exploration_env_steps", self.exploration_env_steps, 0, "use 10000")
        require_number("epsilon_exponent", self.epsilon_exponent, 0, math.inf, "use 7, or 0")
        for size in self.head_hidden_sizes:
            require_size("head_hidden_sizes", size, 1, "use sizes such as 512, or none")
