"""Environments written in JAX behind the EnvAdapter protocol; they are always fused."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from sebulba.envs.jax_env import JaxEnv
from sebulba.envs.observation_parts import LegalActions, spec_of
from sebulba.envs.returned import by_name, parts_of
from sebulba.envs.saving.saved_arrays import fitted
from sebulba.envs.saving.sealed import seal, unseal
from sebulba.envs.seeds import check_seeds
from sebulba.envs.spaces import make_action_check
from sebulba.envs.valid_actions import clamp
from sebulba.errors import EnvError
from sebulba.support.platforms import cond_on_cpu
from sebulba.support.trees import KeyData, host_copy, named_leaves
from sebulba.types import EnvOutput, FusedEnv, PyTree, empty_env_step


class JaxEnvState(NamedTuple):
    """Where B environments stand; every leaf is ``[B, ...]``, and none is a typed key."""

    key: jax.Array
    """Data of the key that each environment has had since the last ``reset``."""
    num_steps: jax.Array
    """Vector steps since the last ``reset``, uint32; folded into the key at each."""
    ended: jax.Array
    """The last row ended an episode, bool: the next step resets."""
    inside: PyTree
    """What the environment calls its state, as ``KeyData.unwrap`` returns it."""
    agents: PyTree = ()
    """With many agents, where each of them stands."""


class JaxAdapter:
    """B copies of a ``JaxEnv`` with next-step autoreset.

    Each environment has a key of its own, so what it shows does not depend on the others.
    """

    def __init__(self, env: JaxEnv, seeds: Sequence[int], *, name: str = "") -> None:
        """Make one environment for each of ``seeds``.

        Raises:
          UsageError: A space is not supported, or a seed breaks a rule.
          EnvError: ``reset`` or ``step`` does not return what ``JaxEnv`` says.
        """
        self.spec = self._make_spec(env, name)
        self.num_envs = len(seeds)
        self._env: Any = env
        self._seeds = np.array(check_seeds(seeds, len(seeds)), np.int64).astype(np.uint32)
        self._num_resets = 0
        self._keys, self._shapes = self._describe_state()
        self._reset_all, self._step_all = jax.jit(self._reset), jax.jit(self._step)
        _, shapes = jax.eval_shape(self._reset_all, self._seeds, np.uint32(0))
        jax.eval_shape(self._step_all, shapes, empty_env_step(self.spec, len(seeds)).prev_action)
        self._first = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
        """The state after the last reset, in arrays that a fused cycle reads again after each."""
        self._state: JaxEnvState | None = None
        self._legal = LegalActions()

    def reset(self) -> EnvOutput:
        """Begin episodes that were not played before."""
        obs, self._state = self._reset_all(self._seeds, np.uint32(self._num_resets))
        self._num_resets += 1
        jax.tree.map(np.copyto, self._first, jax.device_get(self._state))
        return self._first_output(jax.device_get(obs), self._first)

    def step(self, action: PyTree) -> EnvOutput:
        if self._state is None:
            raise EnvError(f"environment {self.spec.name!r} is closed, or was not reset; reset it")
        self._check_action(action)
        self._state, output, _ = self._step_all(self._state, action)
        return self._looked_at(jax.device_get(output))

    def fused(self) -> FusedEnv:
        return FusedEnv(self._first, self._step, is_pure=True)

    def state(self) -> bytes | str:
        if self._state is None:
            return "no episode has begun"
        leaves = jax.tree.leaves(host_copy(self._state))
        return seal((leaves, self._num_resets), of=self._who(), num_envs=self.num_envs)

    def put_back(self, state: bytes) -> None:
        """Go on from ``state``, which includes the keys."""
        leaves, self._num_resets = unseal(state, of=self._who(), num_envs=self.num_envs)
        self._state = jax.device_put(fitted(leaves, self._first, self._who()))
        self._legal.forget()

    def close(self) -> None:
        """Let go of the state; there is nothing else to free."""
        self._state = None

    def _who(self) -> str:
        return f"JAX environment {self.spec.name!r}"

    # What is different where there are many agents.

    def _make_spec(self, env: Any, name: str) -> Any:
        return spec_of(env, name)

    @functools.cached_property
    def _check_action(self) -> Callable[[Any], None]:
        check_inside = make_action_check(self.spec.action_space, self.num_envs)

        def check(action: Any) -> None:
            check_inside(action)
            self._legal.check(self.spec, action)

        return check

    def _first_output(self, obs: PyTree, state: JaxEnvState) -> EnvOutput:
        del state
        self._legal.look(self.spec, obs)
        return EnvOutput.first(obs, self.num_envs)

    def _looked_at(self, output: EnvOutput) -> EnvOutput:
        """Return the row, once its legal actions are noted."""
        self._legal.look(self.spec, output.obs, output.episode_end)
        return output

    def _first_agents(self, inside: PyTree, obs: PyTree) -> PyTree:
        """Return ``JaxEnvState.agents`` at the beginning of episodes."""
        del inside, obs
        return ()

    def _reset_keys(self, state: JaxEnvState, keys: jax.Array) -> jax.Array:
        """Return the key with which each environment would begin an episode, given new ones."""
        del state
        return keys

    def _inside_space(self, state: JaxEnvState, action: PyTree) -> tuple[PyTree, jax.Array]:
        """Return actions that the environments can take, and how many were not so."""
        del state
        action, num_invalid = clamp(action, self.spec.action_space)
        return action.astype(self.spec.action_space.dtype), num_invalid

    def _output(
        self, state: JaxEnvState, inside: PyTree, obs: PyTree, reward: Any, ends: tuple
    ) -> tuple[PyTree, EnvOutput]:
        """Return ``JaxEnvState.agents`` after a step, and the row that it led to.

        Args:
          state: Before the step.
          inside: ``JaxEnvState.inside`` after it.
          obs: What is observed then.
          reward: Of environments that were not reset, as are ``ends``.
          ends: Terminated and truncated.
        """
        del inside
        ended = state.ended
        reward = jnp.where(ended, 0.0, reward)
        terminated, truncated = (end & ~ended for end in ends)
        over = terminated | truncated
        return (), EnvOutput(obs, reward, terminated, truncated, ended, reward, over)

    # Traced: all environments.

    def _reset(self, seeds: jax.Array, num_resets: jax.Array) -> tuple[PyTree, JaxEnvState]:
        def begin(seed: jax.Array) -> jax.Array:
            return jax.random.fold_in(jax.random.key(seed), num_resets)

        key = jax.random.key_data(jax.vmap(begin)(seeds))
        num_steps = jnp.zeros(self.num_envs, jnp.uint32)
        obs, inside = jax.vmap(self._reset_one)(jax.vmap(_fold_in)(key, num_steps))
        ended = jnp.zeros(self.num_envs, jnp.bool_)
        return obs, JaxEnvState(key, num_steps, ended, inside, self._first_agents(inside, obs))

    def _step(self, state: JaxEnvState, action: PyTree) -> tuple[JaxEnvState, EnvOutput, jax.Array]:
        """See ``FusedEnv.step``."""
        action, num_invalid = self._inside_space(state, action)
        ended, num_steps = state.ended, state.num_steps + 1
        keys = jax.vmap(_fold_in)(state.key, num_steps)
        obs, inside, reward, *ends = jax.vmap(self._step_one)(keys, state.inside, action)
        # A reset costs nothing while no episode ends, which a map over a condition would not give.
        obs, inside = cond_on_cpu(
            ended.any(),
            lambda: _where(
                ended, jax.vmap(self._reset_one)(self._reset_keys(state, keys)), (obs, inside)
            ),
            lambda: (obs, inside),
        )
        agents, output = self._output(state, inside, obs, reward, tuple(ends))
        after = JaxEnvState(state.key, num_steps, output.episode_end, inside, agents)
        return after, output, num_invalid

    # Traced: one environment, whose results are checked and given the dtypes that were declared.

    def _describe_state(self) -> tuple[KeyData, PyTree]:
        """Return where the state of an environment has keys, and its shapes without them."""
        found: list[KeyData] = []

        def reset(key: jax.Array) -> PyTree:
            _, inside = self._after_reset(key)
            inside = jax.tree.map(jnp.asarray, inside)  # of Python numbers, too
            found.append(KeyData(inside))
            return found[0].unwrap(inside)

        shapes = jax.eval_shape(reset, jax.eval_shape(jax.random.key, 0))
        return found[0], shapes

    def _reset_one(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        obs, inside = self._after_reset(key)
        return self._obs("reset", obs), self._kept("reset", inside)

    def _step_one(self, key: jax.Array, inside: PyTree, action: PyTree) -> tuple:
        result = self._env.step(key, self._keys.wrap(inside), action)
        names = "obs, state, reward, terminated, truncated"
        obs, inside, *told = parts_of(result, names, f"env={self.spec.name!r}: step")
        reward, terminated, truncated = told
        return (
            self._obs("step", obs),
            self._kept("step", inside),
            self._told("step: reward", reward, np.float32),
            self._told("step: terminated", terminated, np.bool_),
            self._told("step: truncated", truncated, np.bool_),
        )

    def _told(self, what: str, value: Any, dtype: Any) -> PyTree:
        """Return a reward or a flag."""
        return self._leaf(what, value, (), dtype)

    def _after_reset(self, key: jax.Array) -> tuple:
        return parts_of(self._env.reset(key), "obs, state", f"env={self.spec.name!r}: reset")

    def _obs(self, where: str, obs: PyTree) -> PyTree:
        return self._part(f"{where}: obs", obs, self.spec.observation_space)

    def _part(self, what: str, obs: PyTree, space: gymnasium.Space) -> PyTree:
        if not isinstance(space, gymnasium.spaces.Dict):
            return self._leaf(what, obs, space.shape or (), space.dtype)
        obs = by_name(obs, space.keys(), f"env={self.spec.name!r}: {what}")
        return {
            name: self._part(f"{what}[{name!r}]", obs[name], part) for name, part in space.items()
        }

    def _kept(self, where: str, inside: PyTree) -> PyTree:
        """Return the state without typed keys, of the shapes and dtypes that it had at first."""
        inside = self._keys.unwrap(jax.tree.map(jnp.asarray, inside))
        if jax.tree.structure(inside) != jax.tree.structure(self._shapes):  # type: ignore[operator]
            raise self._breach(
                f"{where}: state",
                f"must have the structure {jax.tree.structure(self._shapes)} that it has after a "
                f"reset; got {jax.tree.structure(inside)}",
            )
        names, shapes = named_leaves(self._shapes)
        leaves = [
            self._leaf(f"{where}: state {name}", leaf, shape.shape, shape.dtype)
            for name, leaf, shape in zip(names, jax.tree.leaves(inside), shapes, strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(self._shapes), leaves)

    def _leaf(self, what: str, value: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        array = jnp.asarray(value)
        fits = array.dtype == dtype or np.can_cast(array.dtype, dtype, "same_kind")
        if array.shape != shape or not (fits or dtype == np.bool_):
            raise self._breach(
                what,
                f"must have shape {shape} and dtype {np.dtype(dtype)}; got shape {array.shape} and "
                f"dtype {array.dtype}",
            )
        return jax.lax.convert_element_type(array, dtype)

    def _breach(self, what: str, rule: str) -> EnvError:
        return EnvError(f"env={self.spec.name!r}: {what} {rule}")


def _fold_in(key: jax.Array, number: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.wrap_key_data(key), number)


def _where(rows: jax.Array, yes: PyTree, no: PyTree) -> PyTree:
    """Return trees ``[B, ...]`` with the rows of ``yes`` where ``rows`` ``[B]`` says so."""

    def one(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.where(rows.reshape(-1, *[1] * (a.ndim - 1)), a, b)

    return jax.tree.map(one, yes, no)
