"""jaxmarl: environments of many agents, who all act in every step."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp

from sebulba.envs.jax_env import MultiAgentJaxEnv, Stepped, TimeLimit
from sebulba.envs.jax_libraries import space_of, without_limit
from sebulba.envs.observation_parts import MASK
from sebulba.envs.option_checks import check_option_names
from sebulba.envs.tree import OBSERVATION, Act, AgentNode, Obs, Population, compile_tree
from sebulba.types import MultiAgentSpec, PyTree

LIMIT = "max_steps"
"""Attribute of jaxmarl's environments: their time limit."""
IDS = (
    "MPE_simple_adversary_v3",
    "MPE_simple_crypto_v3",
    "MPE_simple_push_v3",
    "MPE_simple_reference_v3",
    "MPE_simple_speaker_listener_v4",
    "MPE_simple_spread_v3",
    "MPE_simple_tag_v3",
    "MPE_simple_world_comm_v3",
    "SMAX",
    "switch_riddle",
)
"""Those of which it is known where their ``done`` comes from."""


def ids() -> Collection[str]:
    """Return the ids that can be made here."""
    import jaxmarl  # noqa: F401

    return IDS


def make(env_id: str, options: dict[str, Any]) -> MultiAgentJaxEnv:
    """Make an environment; options are parameters of its class."""
    import jaxmarl

    options = dict(options)
    limit = options.pop("max_episode_steps", None)
    env = jaxmarl.make(env_id)
    known = {
        name
        for cls in type(env).__mro__[:-1]
        for name in inspect.signature(cls).parameters
        if name not in ("args", "kwargs")
    }
    check_option_names(options, known | {"max_episode_steps"}, env_id)
    many = JaxmarlEnv(jaxmarl.make(env_id, **options) if options else env, limited=limit is None)
    return many if limit is None else TimeLimit(many, limit)


class JaxmarlEnv:
    """An environment of jaxmarl's.

    ``step_env`` does not reset, which ``step`` would. An episode is over when ``__all__`` is done;
    who is done before stays, with what actions jaxmarl then says are available. ``done`` is both
    the end and the time limit, ``max_steps``; what terminates is what would be done without a
    limit. So the step is written twice, with and without, and XLA computes once what both have in
    common.
    """

    def __init__(self, env: Any, *, limited: bool = True) -> None:
        """Take an environment, as ``jaxmarl.make`` returns it.

        Args:
          env: The environment.
          limited: Keep its time limit.

        Raises:
          UsageError: A space is not supported.
        """
        self._unlimited = without_limit(env, LIMIT)
        self._env = env if limited else self._unlimited
        self._masks = self._masked_agents()
        self.tree = Population({agent: self._node(agent) for agent in env.agents})
        spec = compile_tree(self.tree)
        assert isinstance(spec, MultiAgentSpec)
        self._slots = {name: group.slots for name, group in spec.groups.items()}

    def _masked_agents(self) -> Collection[str]:
        """Return the agents that are told which actions are available."""
        key = jax.eval_shape(jax.random.key, 0)
        try:
            return jax.eval_shape(
                lambda key: self._env.get_avail_actions(self._env.reset(key)[1]), key
            ).keys()
        except NotImplementedError:
            return ()

    def _node(self, agent: str) -> AgentNode:
        observed = space_of("jaxmarl", self._env.observation_space(agent))
        action = space_of("jaxmarl", self._env.action_space(agent))
        if agent not in self._masks:
            return AgentNode(Obs(observed), Act(action))
        mask = Obs(gymnasium.spaces.MultiBinary(int(action.n)), legal_actions=True)  # type: ignore[attr-defined]
        return AgentNode({OBSERVATION: Obs(observed), MASK: mask}, Act(action))

    def reset(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        obs, state = self._env.reset(key)
        return self._obs(obs, state), state

    def step(self, key: jax.Array, state: PyTree, actions: dict[str, jax.Array]) -> Stepped:
        """Act, without jaxmarl's reset."""
        by_agent = {
            agent: actions[group][index]
            for group, slots in self._slots.items()
            for index, agent in enumerate(slots)
        }
        obs, after, rewards, dones, _ = self._env.step_env(key, state, by_agent)
        terminated = self._unlimited.step_env(key, state, by_agent)[3]["__all__"]
        truncated = dones["__all__"] & ~terminated
        return self._obs(obs, after), after, self._stacked(rewards), terminated, truncated

    def _obs(self, obs: dict[str, Any], state: PyTree) -> PyTree:
        if not self._masks:
            return self._stacked(obs)
        masks = self._env.get_avail_actions(state)
        return self._stacked(
            {
                agent: {OBSERVATION: obs[agent], MASK: masks[agent]}
                if agent in self._masks
                else obs[agent]
                for agent in self._env.agents
            }
        )

    def _stacked(self, by_agent: dict[str, Any]) -> PyTree:
        """Return ``{group: [A, ...]}``."""
        return {
            group: jax.tree.map(lambda *x: jnp.stack(x), *(by_agent[agent] for agent in slots))
            for group, slots in self._slots.items()
        }
