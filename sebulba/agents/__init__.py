"""The algorithms, one file each, and their networks.

The agents are imported when they are first used: :mod:`sebulba.agents.configs` must stay importable
without JAX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sebulba.support.lazy import lazy_names

if TYPE_CHECKING:
    from sebulba.agents.ddpg import DDPG as DDPG
    from sebulba.agents.dqn import DQN as DQN
    from sebulba.agents.impala import Impala as Impala
    from sebulba.agents.multi.multi_agent import MultiAgent as MultiAgent
    from sebulba.agents.ppo import PPO as PPO
    from sebulba.agents.r2d2 import R2D2 as R2D2
    from sebulba.agents.sac import SAC as SAC
    from sebulba.agents.simple_policy_gradient import SimplePolicyGradient as SimplePolicyGradient

_MODULES = {
    "sebulba.agents.ddpg": "DDPG",
    "sebulba.agents.dqn": "DQN",
    "sebulba.agents.impala": "Impala",
    "sebulba.agents.multi.multi_agent": "MultiAgent",
    "sebulba.agents.ppo": "PPO",
    "sebulba.agents.r2d2": "R2D2",
    "sebulba.agents.sac": "SAC",
    "sebulba.agents.simple_policy_gradient": "SimplePolicyGradient",
}
__all__, __getattr__ = lazy_names(__name__, _MODULES)


def __dir__() -> list[str]:
    return list(__all__)
