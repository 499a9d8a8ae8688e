"""Environments of many agents that are written in JAX, behind the EnvAdapter protocol."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sebulba.envs.jax_adapter import JaxAdapter, JaxEnvState
from sebulba.envs.spaces import check_legal_of_slots, make_action_check
from sebulba.envs.tree import OBSERVATION, compile_tree
from sebulba.envs.valid_actions import clamp, make_legal
from sebulba.errors import ActionError, UsageError
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
        groups: Mapping = self.spec.groups
        checks = {
            name: make_action_check(group.spec.action_space, self.num_envs * len(group.slots))
            for name, group in groups.items()
        }

        def check(action: PyTree) -> None:
            if not isinstance(action, Mapping) or action.keys() != groups.keys():
                raise ActionError(f"actions must be a dict of {', '.join(groups)}; got {action}")
            for name, of_group in checks.items():
                flat = action[name].reshape(-1, *action[name].shape[2:])
                of_group(flat)
                self._check_legal(name, flat)

        return check

    def _check_legal(self, name: str, action: np.ndarray) -> None:
        assert self._state is not None
        agents, group = self._state.agents, self.spec.groups[name]
        if name not in agents.legal:
            return
        acting = agents.acting.get(name, np.ones(len(action), np.bool_))
        check_legal_of_slots(agents.legal[name], action, group, acting)

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
        return JaxAgents(every, self._acting(inside), self._masks(obs))

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
        if not isinstance(value, Mapping) or value.keys() != groups.keys():
            got = f"keys {sorted(value)}" if isinstance(value, Mapping) else f"a {type(value)}"
            raise self._breach(what, f"must be a dict of {sorted(groups)}; got {got}")
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

    def _masks(self, obs: PyTree) -> dict[str, jax.Array]:
        masks = {name: group.spec.legal_actions for name, group in self.spec.groups.items()}
        return {name: obs[name][mask] for name, mask in masks.items() if mask is not None}

    def _output(
        self, state: JaxEnvState, inside: PyTree, obs: PyTree, reward: Any, ends: tuple
    ) -> tuple[JaxAgents, EnvOutput]:
        began, live = state.ended[:, None], state.agents.live
        acting = self._acting(inside) or jax.tree.map(jnp.ones_like, live)

        def each(function: Callable, *trees: dict) -> dict[str, jax.Array]:
            return {name: function(*(tree[name] for tree in trees)) for name in live}

        reward = each(lambda r: jnp.where(began, 0.0, r), reward)
        terminated = each(lambda end, live: end & live & ~began, ends[0], live)
        truncated = each(
            lambda end, dead, live: end & live & ~dead & ~began, ends[1], terminated, live
        )
        rejoined = each(lambda acts, live: acts & ~live & ~began, acting, live)
        acting = each(
            lambda acts, *ended: acts & ~ended[0] & ~ended[1], acting, terminated, truncated
        )
        over = ~_any(acting) & ~state.ended
        # Those who wait are told of the end, too.
        is_cut = (_any(truncated) & ~_any(terminated))[:, None]
        rest = each(
            lambda live, *ended: live & ~ended[0] & ~ended[1] & over[:, None],
            live,
            terminated,
            truncated,
        )
        terminated = each(lambda end, rest: end | (rest & ~is_cut), terminated, rest)
        truncated = each(lambda end, rest: end | (rest & is_cut), truncated, rest)
        is_first = each(lambda rejoins: rejoins | began, rejoined)
        live = each(
            lambda live, first, *ended: (live | first) & ~ended[0] & ~ended[1],
            live,
            is_first,
            terminated,
            truncated,
        )
        waiting = acting if _says_who_acts(self._env) else {}
        agents = JaxAgents(live, waiting, self._masks(obs))
        flags = terminated, truncated, is_first
        return agents, EnvOutput(obs, reward, *flags, reward, over, acting=waiting or ())


def _says_who_acts(env: Any) -> bool:
    return callable(getattr(env, "acting", None))


def _any(flags: dict[str, jax.Array]) -> jax.Array:
    """Return whether one of ``{group: [B, A]}`` is true, ``[B]``."""
    return functools.reduce(operator.or_, (own.any(axis=1) for own in flags.values()))
