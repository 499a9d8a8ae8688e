"""Hyper-parameters of DQN."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from sebulba.agents.configs.network_and_optimizer import OptimizerConfig
from sebulba.agents.configs.off_policy import ValueBasedConfig
from sebulba.agents.configs.replay import TargetConfig
from sebulba.support.checks import check_ranges


@dataclasses.dataclass(frozen=True)
class DQNConfig(ValueBasedConfig):
    """Hyper-parameters of DQN (Mnih et al. 2015, doi 10.1038/nature14236) and its refinements."""

    agent_class: ClassVar[str] = "sebulba.agents.dqn:DQN"

    learning_rate: float = 5e-4
    double: bool = True
    """Choose the target's action with the trained network (van Hasselt et al. 2016)."""
    loss: Literal["huber", "squared"] = "huber"
    """Loss of a temporal difference; huber is linear beyond 1."""
    initial_epsilon: float = 1.0
    """Initial probability of a random action."""
    final_epsilon: float = 0.05
    """Final probability of a random action; with a ladder, of the first environment."""
    exploration_env_steps: int = 10_000
    """Environment steps of all Inferencers over which epsilon falls linearly."""
    epsilon_exponent: float = 0.0
    """A ladder: environment i of N ends at final_epsilon ** (1 + epsilon_exponent * i / (N - 1))
    (Horgan et al. 2018); 0: all end at final_epsilon."""
    optimizer: OptimizerConfig = OptimizerConfig(max_grad_norm=10.0)
    target: TargetConfig = TargetConfig(period=500)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, initial_epsilon=(0, 1), final_epsilon=(0, 1), exploration_env_steps=0)
