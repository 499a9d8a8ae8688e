"""Environments of many agents that are written in JAX, behind the EnvAdapter protocol."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sebulba.envs.jax_adapter import JaxAdapter, JaxEnvState
from sebulba.envs.returned import by_name
from sebulba.envs.spaces import SlotActions, masks_of
from sebulba.envs.tree import OBSERVATION, compile_tree
from sebulba.envs.valid_actions import clamp, make_legal
from sebulba.errors import UsageError
from sebulba.types import COMMON, EnvOutput, EnvSpec, MultiAgentSpec, PyTree


class JaxAgents(NamedTuple):
    """Where the agents of B environments stand, by group."""

    live: dict[str, jax.Array]
    """``[B, A]`` bool: has not ended in this episode."""
    acting: dict[str, jax.Array]
    """``[B, A]`` bool: chooses an action now; only of groups in which agents may wait."""
    legal: dict[str, jax.Array]
    """``[B, A, entries]``: which actions are legal now; only of groups that are told."""


def jax_population_spec(env: Any, name: str) -> MultiAgentSpec:
    """Return the spec of one environment.

    Raises:
      UsageError: The tree breaks a rule, is of one agent, or has agents that may wait where the
        environment does not say who acts.
    """
    spec = compile_tree(env.tree, name=name, waits=_says_who_acts(env))
    if isinstance(spec, EnvSpec):
        raise UsageError(
            f"the tree of env={name!r} is one AgentNode, a single agent; give the environment an "
            "observation_space and an action_space instead, or put the node into a Population"
        )
    waiting = [group for group in spec.groups if spec.groups[group].waits]
    if waiting and not _says_who_acts(env):
        raise UsageError(
            f"env={name!r}: agents of {', '.join(waiting)} may have to wait (Repeat or non_atomic "
            "says so); give it a method acting(state) that returns {group: [A]} bools"
        )
    return spec


class JaxPopulationAdapter(JaxAdapter):
    """B copies of a ``MultiAgentJaxEnv`` with next-step autoreset; all leaves by group."""

    def _make_spec(self, env: Any, name: str) -> MultiAgentSpec:
        return jax_population_spec(env, name)

    @functools.cached_property
    def _check_action(self) -> Callable[[Any], None]:
        actions = SlotActions(self.spec.groups, self.num_envs)

        def check(action: PyTree) -> None:
            assert self._state is not None
            actions.look(self._state.agents.legal, self._state.agents.acting)
            actions.check(action)

        return check

    def _first_output(self, obs: PyTree, state: JaxEnvState) -> EnvOutput:
        live = state.agents.live
        no_reward, no_flag, is_first = (
            {name: np.full(flags.shape, value) for name, flags in live.items()}
            for value in (np.float32(0), np.False_, np.True_)
        )
        no_end = np.zeros(self.num_envs, np.bool_)
        acting = jax.tree.map(np.copy, state.agents.acting) or ()
        ends = no_flag, no_flag, is_first
        return EnvOutput(obs, no_reward, *ends, no_reward, no_end, acting=acting)

    def _looked_at(self, output: EnvOutput) -> EnvOutput:
        return output  # legal actions are in the state

    # Traced.

    def _first_agents(self, inside: PyTree, obs: PyTree) -> JaxAgents:
        every = {
            name: jnp.ones((self.num_envs, len(group.slots)), jnp.bool_)
            for name, group in self.spec.groups.items()
        }
        return JaxAgents(every, self._acting(inside), masks_of(self.spec.groups, obs))

    def _inside_space(self, state: JaxEnvState, action: PyTree) -> tuple[PyTree, jax.Array]:
        inside, num_invalid = {}, jnp.int32(0)
        for name, group in self.spec.groups.items():
            space, own = group.spec.action_space, action[name]
            flat, count = clamp(own.reshape(-1, *own.shape[2:]), space)
            if name in state.agents.legal:
                mask = state.agents.legal[name].reshape(len(flat), -1)
                legal, is_illegal = make_legal(flat, mask, space)
                if name in state.agents.acting:
                    is_illegal &= state.agents.acting[name].ravel()
                flat, count = legal, count + is_illegal.sum(dtype=jnp.int32)
            inside[name] = flat.reshape(own.shape).astype(space.dtype)
            num_invalid += count
        return inside, num_invalid

    def _obs(self, where: str, obs: PyTree) -> PyTree:
        if self.spec.common is not None and isinstance(obs, Mapping):
            # A lone part stands beside what is common.
            obs = {
                name: part if name == COMMON or isinstance(part, Mapping) else {OBSERVATION: part}
                for name, part in obs.items()
            }
        return super()._obs(where, obs)

    def _told(self, what: str, value: Any, dtype: Any) -> PyTree:
        groups = self.spec.groups
        if not isinstance(value, Mapping):
            scalar = super()._told(what, value, dtype)
            return {n: jnp.full(len(group.slots), scalar) for n, group in groups.items()}
        if dtype == np.bool_ and not _says_who_acts(self._env):
            raise self._breach(
                what,
                "must be one scalar for all agents, since the environment has no method acting() "
                "and all act until the end; got a dict by group",
            )
        return self._by_group(what, value, dtype)

    def _by_group(self, what: str, value: Any, dtype: Any) -> dict[str, jax.Array]:
        groups = self.spec.groups
        value = by_name(value, groups, f"env={self.spec.name!r}: {what}")
        return {
            name: self._leaf(f"{what}[{name!r}]", value[name], (len(group.slots),), dtype)
            for name, group in groups.items()
        }

    def _acting(self, inside: PyTree) -> dict[str, jax.Array]:
        """Return who acts next, ``{group: [B, A]}``; empty where all always do."""
        if not _says_who_acts(self._env):
            return {}

        def one(inside: PyTree) -> dict[str, jax.Array]:
            return self._by_group("acting", self._env.acting(self._keys.wrap(inside)), np.bool_)

        return jax.vmap(one)(inside)

    def _output(
        self, state: JaxEnvState, inside: PyTree, obs: PyTree, reward: Any, ends: tuple
    ) -> tuple[JaxAgents, EnvOutput]:
        groups, began = state.agents.live, state.ended[:, None]
        says = self._acting(inside)
        # All groups side by side, [B, slots].
        live, acting, terminated, truncated = (
            jnp.concatenate([tree[name] for name in groups], axis=1)
            for tree in (groups, says or jax.tree.map(jnp.ones_like, groups), *ends)
        )
        terminated &= live & ~began
        truncated &= live & ~terminated & ~began
        is_first = (acting & ~live) | began
        acting &= ~terminated & ~truncated
        over = ~acting.any(axis=1) & ~state.ended
        # Those who wait are told of the end, too.
        is_cut = (truncated.any(axis=1) & ~terminated.any(axis=1))[:, None]
        rest = live & ~terminated & ~truncated & over[:, None]
        terminated |= rest & ~is_cut
        truncated |= rest & is_cut
        live = (live | is_first) & ~terminated & ~truncated

        def by_group(flags: jax.Array) -> dict[str, jax.Array]:
            edges = np.cumsum([own.shape[1] for own in groups.values()])[:-1]
            return dict(zip(groups, jnp.split(flags, edges, axis=1), strict=True))

        reward = {name: jnp.where(began, 0.0, reward[name]) for name in groups}
        waiting = by_group(acting) if says else {}
        agents = JaxAgents(by_group(live), waiting, masks_of(self.spec.groups, obs))
        ended, cut, first = map(by_group, (terminated, truncated, is_first))
        output = EnvOutput(obs, reward, ended, cut, first, reward, over, acting=waiting or ())
        return agents, output


def _says_who_acts(env: Any) -> bool:
    return callable(getattr(env, "acting", None))
