"""Hyper-parameters of the agents: frozen dataclasses, checked on construction.

Each raises UsageError for a field that is not of its type, or out of its range.
One file an agent, on top of what families of agents share. JAX is not imported here: a command
line can parse and refuse options before any device starts.
"""

from __future__ import annotations

from sebulba.agents.configs.agent_config import AgentConfig, make_agent
from sebulba.agents.configs.auxiliary import AuxiliaryConfig, RandomNetworkDistillationConfig
from sebulba.agents.configs.ddpg import DDPGConfig
from sebulba.agents.configs.dqn import DQNConfig
from sebulba.agents.configs.impala import ImpalaConfig
from sebulba.agents.configs.multi_agent import MultiAgentConfig
from sebulba.agents.configs.network_and_optimizer import OptimizerConfig, TorsoConfig
from sebulba.agents.configs.ppo import PPOConfig
from sebulba.agents.configs.r2d2 import R2D2Config
from sebulba.agents.configs.replay import ReplayConfig, TargetConfig
from sebulba.agents.configs.sac import SACConfig
from sebulba.agents.configs.simple_policy_gradient import SimplePolicyGradientConfig

__all__ = [
    "AgentConfig",
    "AuxiliaryConfig",
    "DDPGConfig",
    "DQNConfig",
    "ImpalaConfig",
    "MultiAgentConfig",
    "OptimizerConfig",
    "PPOConfig",
    "R2D2Config",
    "RandomNetworkDistillationConfig",
    "ReplayConfig",
    "SACConfig",
    "SimplePolicyGradientConfig",
    "TargetConfig",
    "TorsoConfig",
    "make_agent",
]
