"""Hyper-parameters of DQN."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Literal

from sebulba.agents.configs.network_and_optimizer import OptimizerConfig
from sebulba.agents.configs.off_policy import ValueBasedConfig
from sebulba.agents.configs.replay import TargetConfig
from sebulba.support.checks import check_ranges, require, require_size


@dataclasses.dataclass(frozen=True)
class DQNConfig(ValueBasedConfig):
    """Hyper-parameters of DQN (Mnih et al. 2015, doi 10.1038/nature14236) and its refinements."""

    agent_class: ClassVar[str] = "sebulba.agents.dqn:DQN"

    learning_rate: float = 5e-4
    double: bool = True
    """Choose the target's action with the trained network (van Hasselt et al. 2016)."""
    loss: Literal["huber", "squared"] = "huber"
    """Loss of a temporal difference; huber is linear beyond 1. Atoms and quantiles have others."""
    noisy: bool = False
    """Explore by noise of a learned size in the head's layers (Fortunato et al. 2018, arXiv
    1706.10295), in place of random actions: epsilon is 0."""
    atoms: int | None = None
    """Learn the distribution of each value over so many numbers (C51: 51; Bellemare et al. 2017,
    arXiv 1707.06887), by its cross-entropy; None: learn the values alone."""
    value_min: float = -10.0
    """Least value of the atoms, in units of scaled rewards; lower returns count as this."""
    value_max: float = 10.0
    """Greatest value of the atoms, in units of scaled rewards; higher returns count as this."""
    quantiles: int | None = None
    """Learn so many quantiles of each value (QR-DQN: 200; Dabney et al. 2018, arXiv 1710.10044)
    in place of atoms; None: learn the values alone."""
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
        if self.atoms is not None:
            require_size("atoms", self.atoms, 2, "use 51, or None for values alone")
            rule = f"must be below value_max={self.value_max}, and both finite"
            is_range = -math.inf < self.value_min < self.value_max < math.inf
            require(is_range, "value_min", self.value_min, rule, "use the range of returns")
        if self.quantiles is not None:
            require_size("quantiles", self.quantiles, 2, "use 200, or None for values alone")
            rule = "cannot be combined with atoms, the other way to learn a distribution"
            require(self.atoms is None, "quantiles", self.quantiles, rule, "leave one out")
        if self.atoms or self.quantiles:
            rule = "has no use with atoms or quantiles, which have a loss of their own"
            require(self.loss == "huber", "loss", self.loss, rule, "leave it out")
        for name in ("most_held_steps", "epsilon_exponent") if self.noisy else ():
            value, rule = getattr(self, name), "has no use with noisy, without random actions"
            is_left_out = value == getattr(DQNConfig, name)
            require(is_left_out, name, value, rule, "leave it out")
        for name in ("value_min", "value_max") if self.atoms is None else ():
            value = getattr(self, name)
            is_left_out = value == getattr(DQNConfig, name)
            require(is_left_out, name, value, "has no use without atoms", "set atoms, such as 51")

    @property
    def support(self) -> tuple[float, ...]:
        """The numbers of the atoms, from ``value_min`` to ``value_max``; none without atoms."""
        if self.atoms is None:
            return ()
        spacing = (self.value_max - self.value_min) / (self.atoms - 1)
        return tuple(self.value_min + i * spacing for i in range(self.atoms))
