"""The algorithms, one file each, and their networks.

The agents are imported when they are first used: :mod:`sebulba.agents.configs` must stay importable
without JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sebulba.agents.ddpg import DDPG
    from sebulba.agents.dqn import DQN
    from sebulba.agents.impala import Impala
    from sebulba.agents.multi.multi_agent import MultiAgent
    from sebulba.agents.ppo import PPO
    from sebulba.agents.r2d2 import R2D2
    from sebulba.agents.sac import SAC
    from sebulba.agents.simple_policy_gradient import SimplePolicyGradient

_MODULES = {
    "DDPG": "ddpg",
    "DQN": "dqn",
    "Impala": "impala",
    "MultiAgent": "multi.multi_agent",
    "PPO": "ppo",
    "R2D2": "r2d2",
    "SAC": "sac",
    "SimplePolicyGradient": "simple_policy_gradient",
}

__all__ = [
    "DDPG",
    "DQN",
    "PPO",
    "R2D2",
    "SAC",
    "Impala",
    "MultiAgent",
    "SimplePolicyGradient",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(
            f"module 'sebulba.agents' has no attribute {name!r}; use {', '.join(__all__)}"
        )
    return getattr(importlib.import_module(f"sebulba.agents.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
