"""envpool's cooperative families, whose agents are an axis within each row of the pool."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from sebulba.envs.observation_parts import MASK
from sebulba.envs.policy_view import View
from sebulba.envs.tree import Act, AgentNode, Obs, Population, compile_tree
from sebulba.types import COMMON, EnvAdapter, EnvOutput, EnvSpec, MultiAgentSpec, PyTree

OF_AGENTS = {
    "LevelBasedForaging-v0": ("agents_view", "action_mask"),
    "RobotWarehouse-v0": ("agents_view", "action_mask"),
    "Cleaner-v0": ("agents_locations", "action_mask"),
    "Connector-v2": ("action_mask",),
}
"""Parts of the observation that have a row for each agent, by id: sizes do not tell, since the 10 x
10 grid of Connector has 10 agents and no such row. All other parts are common."""
AGENT = "agent"
"""Name of the group."""


def is_cooperative(env_id: str) -> bool:
    """Tell whether an id of envpool is one of these."""
    return env_id.removeprefix("Jumanji/") in OF_AGENTS


def cooperative_spec(env_id: str, spec: EnvSpec) -> MultiAgentSpec:
    """Return the spec of the agents, given that of the pool, in which they are one."""
    of_agents = OF_AGENTS[env_id.removeprefix("Jumanji/")]
    parts, action = spec.observation_space.spaces, spec.action_space  # type: ignore[attr-defined]
    assert isinstance(action, spaces.MultiDiscrete)
    own = {name: Obs(_of_one(parts[name]), legal_actions=name == MASK) for name in of_agents}
    shared = {name: part for name, part in parts.items() if name not in of_agents}
    node = AgentNode(own, Act(spaces.Discrete(int(action.nvec[0]), dtype=np.int32)))
    names = {f"{AGENT}_{index}": node for index in range(len(action.nvec))}
    tree = Population(names, common=Obs(spaces.Dict(shared)), payoff="cooperative", symmetric=True)
    compiled = compile_tree(tree, name=spec.name)
    assert isinstance(compiled, MultiAgentSpec)
    return dataclasses.replace(compiled, frame_skip=spec.frame_skip)


def _of_one(space: Any) -> Any:
    """Return the space of one agent of those in a row."""
    if isinstance(space, spaces.MultiBinary):
        return spaces.MultiBinary(space.shape[1:] if len(space.shape) > 2 else space.shape[1])
    return spaces.Box(space.low[0], space.high[0], dtype=space.dtype.type)


class CooperativeAdapter(View):
    """Gives each agent of a pool its own row, and all of them the reward of the team."""

    def __init__(self, env: EnvAdapter, env_id: str) -> None:
        """Take over ``env``, an adapter of the pool."""
        super().__init__(env)
        self.spec = cooperative_spec(env_id, env.spec)
        (group,) = self.spec.groups.values()
        self._size = len(group.slots)
        self._of_agents = OF_AGENTS[env_id.removeprefix("Jumanji/")]

    def given(self, action: PyTree) -> PyTree:
        """Return the actions of all agents, which are one action of the pool."""
        return action[AGENT]

    def seen(self, output: EnvOutput) -> EnvOutput:
        def all_alike(x: Any) -> dict[str, Any]:
            xp = jnp if isinstance(x, jax.Array) else np
            return {AGENT: xp.repeat(x[:, None], self._size, axis=1)}

        own = {name: output.obs[name] for name in self._of_agents}
        shared = {name: part for name, part in output.obs.items() if name not in own}
        return EnvOutput(
            obs={AGENT: own, COMMON: shared},
            reward=all_alike(output.reward),
            terminated=all_alike(output.terminated),
            truncated=all_alike(output.truncated),
            is_first=all_alike(output.is_first),
            unclipped_reward=all_alike(output.unclipped_reward),
            episode_end=output.episode_end,
        )
