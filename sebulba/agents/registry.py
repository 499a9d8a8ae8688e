"""From the hyper-parameters to the agent that they are for."""

from __future__ import annotations

import importlib

from sebulba.agent import Agent
from sebulba.agents.configs import (
    AgentConfig,
    DDPGConfig,
    DQNConfig,
    ImpalaConfig,
    PPOConfig,
    R2D2Config,
    SACConfig,
    SimplePolicyGradientConfig,
)
from sebulba.errors import UsageError
from sebulba.types import EnvSpec

_AGENTS: dict[type, tuple[str, str]] = {
    SimplePolicyGradientConfig: ("sebulba.agents.simple_policy_gradient", "SimplePolicyGradient"),
    DQNConfig: ("sebulba.agents.dqn", "DQN"),
    R2D2Config: ("sebulba.agents.r2d2", "R2D2"),
    ImpalaConfig: ("sebulba.agents.impala", "Impala"),
    PPOConfig: ("sebulba.agents.ppo", "PPO"),
    SACConfig: ("sebulba.agents.sac", "SAC"),
    DDPGConfig: ("sebulba.agents.ddpg", "DDPG"),
}


def make_agent(spec: EnvSpec, config: AgentConfig) -> Agent:
    """Return the agent whose hyper-parameters are ``config``.

    Raises:
      UsageError: No agent has such a config, or the agent cannot take the spaces of ``spec``.
    """
    if type(config) not in _AGENTS:
        known = ", ".join(cls.__name__ for cls in _AGENTS)
        raise UsageError(f"config={config!r} belongs to no agent; use one of {known}")
    module, name = _AGENTS[type(config)]
    return getattr(importlib.import_module(module), name)(spec, config)
