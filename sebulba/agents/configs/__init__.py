"""Hyper-parameters of the agents: frozen dataclasses, checked on construction.

One file each. JAX is not imported here: a command line can parse and refuse options before any
device starts.
"""

from __future__ import annotations

from typing import TypeAlias

from sebulba.agents.configs.ddpg import DDPGConfig
from sebulba.agents.configs.dqn import DQNConfig
from sebulba.agents.configs.impala import ImpalaConfig
from sebulba.agents.configs.ppo import PPOConfig
from sebulba.agents.configs.r2d2 import R2D2Config
from sebulba.agents.configs.replay import ReplayConfig, TargetConfig
from sebulba.agents.configs.sac import SACConfig
from sebulba.agents.configs.shared import OptimizerConfig, TorsoConfig
from sebulba.agents.configs.simple_policy_gradient import SimplePolicyGradientConfig

AgentConfig: TypeAlias = (
    DDPGConfig
    | DQNConfig
    | ImpalaConfig
    | PPOConfig
    | R2D2Config
    | SACConfig
    | SimplePolicyGradientConfig
)
"""The hyper-parameters of any agent that comes with Sebulba."""

__all__ = [
    "AgentConfig",
    "DDPGConfig",
    "DQNConfig",
    "ImpalaConfig",
    "OptimizerConfig",
    "PPOConfig",
    "R2D2Config",
    "ReplayConfig",
    "SACConfig",
    "SimplePolicyGradientConfig",
    "TargetConfig",
    "TorsoConfig",
]
