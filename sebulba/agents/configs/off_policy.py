"""Hyper-parameters of agents that learn from a replay."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, cast

from sebulba.agents.configs.network_and_optimizer import (
    CommonConfig,
    OptimizerConfig,
    TorsoConfig,
    check_normalization,
)
from sebulba.agents.configs.replay import ReplayConfig, TargetConfig
from sebulba.support.checks import check_positive, check_ranges, require_size


@dataclasses.dataclass(frozen=True)
class OffPolicyConfig(CommonConfig):
    """Hyper-parameters of an agent that learns from what it draws out of a replay."""

    torso: TorsoConfig = TorsoConfig(activation="relu")
    replay: ReplayConfig = ReplayConfig()
    """Size, draws and update ratio of the replay."""
    target: TargetConfig = TargetConfig()
    """How the target network follows."""
    normalize_observations: bool = False
    """Subtract the running mean of observations and divide by their standard deviation, in
    acting and in batches; large images and discrete parts stay as they are."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_normalization(self.normalize_observations, self.torso)


@dataclasses.dataclass(frozen=True)
class ValueBasedConfig(OffPolicyConfig):
    """Hyper-parameters of an agent that learns the values of discrete actions."""

    num_steps: int = 1
    """Rewards in a target before it bootstraps (n)."""
    epsilon_exponent: float = 0.0
    """Environment i of N explores at epsilon ** (1 + epsilon_exponent * i / (N - 1))."""
    most_held_steps: int = 1
    """Hold a random action for n steps with probability proportional to 1 / n**2, n up to this
    (Dabney et al. 2020, arXiv 2006.01782); 1: for one step. More than 1 raises the share of random
    steps above epsilon."""
    dueling: bool = False
    """Sum a value and advantages to the values of actions (Wang et al. 2016)."""
    head_hidden_sizes: tuple[int, ...] = ()
    """Units of each hidden layer between features and values; with dueling, of both streams."""

    # Without annotations these are constants and not options; R2D2 and DQN make them options.
    lstm_size, memory = 0, cast(Any, None)
    seen_reward = "raw"
    noisy, quantiles = False, cast(Any, None)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, num_steps=1, epsilon_exponent=(0, math.inf), most_held_steps=1)
        for size in self.head_hidden_sizes:
            require_size("head_hidden_sizes", size, 1, "use sizes such as 512, or none")

    @property
    def support(self) -> tuple[float, ...]:
        """Evenly spaced numbers over which value distributions are learned; none: values alone."""
        return ()


@dataclasses.dataclass(frozen=True)
class ContinuousControlConfig(OffPolicyConfig):
    """Hyper-parameters of an agent whose critics teach its actor continuous actions."""

    learning_rate: float = 3e-4
    """Step size of the actor's optimizer."""
    critic_learning_rate: float = 1e-3
    """Step size of the critics' optimizer."""
    actor_period: int = 1
    """Updates of the critics for each of the actor (Fujimoto et al. 2018, arXiv 1802.09477: 2);
    target.period is that of the targets."""
    random_env_steps: int = 0
    """First environment steps of all Inferencers together, with uniformly random actions."""
    noise_correlation: float = 0.0
    """Correlation of the action noise with that of the step before: 0 draws it anew, 0.85 is the
    Ornstein-Uhlenbeck noise of Lillicrap et al. 2015 (theta 0.15). Its size stays the same, also
    over ends of episodes."""
    single_bounds: Literal["soft", "clipped"] = "soft"
    """How a component of the action keeps to its only bound: soft, at a softplus from it, so that
    critics see what the environment gets; or clipped, so that they do not, as runs from before
    2026-11-27 have it."""
    torso: TorsoConfig = TorsoConfig(hidden_sizes=(256, 256), activation="relu")
    """Network from observation to features; its MLP is the end of each critic."""
    optimizer: OptimizerConfig = OptimizerConfig(max_grad_norm=0.0, epsilon=1e-8)
    """From gradient to update; each part of the networks has its own."""
    replay: ReplayConfig = ReplayConfig(capacity=1_000_000, batch_size=256)
    target: TargetConfig = TargetConfig(rate=0.005)

    crossq = False  # without an annotation a constant; SAC makes it an option

    @staticmethod
    def of_record(fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the fields of a record; one from before ``single_bounds`` clips."""
        is_whole = {"critic_learning_rate", "random_env_steps", "target"} <= fields.keys()
        return {"single_bounds": "clipped", **fields} if is_whole else fields

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "critic_learning_rate")
        check_ranges(self, actor_period=1, random_env_steps=0, noise_correlation=(0, 0.999))
