"""Hyper-parameters of agents that learn from the newest trajectory."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, cast

from sebulba.agents.configs.network_and_optimizer import (
    CommonConfig,
    MemoryConfig,
    check_normalization,
)
from sebulba.support.checks import check_ranges, require

LOG_STD_RANGE = (-5.0, 2.0)
"""Bounds of the logarithm of the standard deviation of continuous actions."""


@dataclasses.dataclass(frozen=True)
class OnPolicyConfig(CommonConfig):
    """Hyper-parameters of a policy that learns by its gradient."""

    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus."""
    initial_std: float = 0.5
    """Initial standard deviation of continuous actions, in units of half the range of a bounded
    action; from 0.0068 to 7.3, its bounds in training."""

    # Without annotations these are constants and not options; an actor-critic makes them options.
    value_head = separate_value_torso = central_critic = False
    lstm_size, memory = 0, cast(Any, None)
    normalize_observations = normalize_rewards = False
    final_entropy_coefficient, popart = None, False

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = map(math.exp, LOG_STD_RANGE)
        check_ranges(self, entropy_coefficient=(0, math.inf), initial_std=(low, high))


@dataclasses.dataclass(frozen=True)
class ActorCriticConfig(MemoryConfig, OnPolicyConfig):
    """Hyper-parameters of an on-policy actor with one critic, an estimate of the value."""

    final_entropy_coefficient: float | None = None  # type: ignore[assignment]
    """Weight of the entropy bonus when the learning rate has fallen to 0, at whose pace it changes;
    None: it stays as it is."""
    value_coefficient: float = 0.5
    """Weight of the value loss, which is half the mean square."""
    trace_decay: float = 1.0
    """Lambda: weight of the errors of later steps in a target or an advantage."""
    normalize_observations: bool = False
    """Subtract the running mean of observations and divide by their standard deviation;
    large images and discrete parts stay as they are."""
    normalize_rewards: bool = False
    """Divide rewards by the running standard deviation of their discounted sum."""
    reward_scale: float = 1.0
    """Rewards are multiplied by this, after any normalisation."""
    popart: bool = False
    """Learn values in units of the running mean and standard deviation of their targets (PopArt;
    van Hasselt et al. 2016, arXiv 1602.07714), whatever the size of rewards is; in place of
    reward_scale and normalize_rewards."""
    separate_value_torso: bool = False
    """Give the value its own torso instead of sharing the policy's; never with a memory."""
    central_critic: bool = False
    """Give the value its own torso, which also sees privileged parts of the observation and, with
    many agents, the observations of all others. It is not saved with the policy."""

    value_head = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, value_coefficient=(0, math.inf), trace_decay=(0, 1))
        if self.final_entropy_coefficient is not None:
            check_ranges(self, final_entropy_coefficient=(0, math.inf))
        for name in ("reward_scale", "normalize_rewards") if self.popart else ():
            value, rule = getattr(self, name), "cannot be combined with popart, which scales values"
            remedy = f"use {name}={getattr(ActorCriticConfig, name)}, or popart=False"
            require(value == getattr(ActorCriticConfig, name), name, value, rule, remedy)
        if self.lstm_size:
            object.__setattr__(self, "separate_value_torso", False)
        require(
            not (self.central_critic and self.lstm_size),
            "central_critic",
            True,
            f"cannot be combined with lstm_size={self.lstm_size}, which policy and value share",
            "use central_critic=False (--agent.no-central-critic), or lstm_size=0",
        )
        check_normalization(self.normalize_observations, self.torso)
