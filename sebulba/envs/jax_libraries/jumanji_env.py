"""jumanji: puzzles, packing and routing."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from sebulba.envs.jax_env import JaxEnv, Stepped, TimeLimit
from sebulba.envs.jax_libraries import box, without_limit
from sebulba.envs.option_checks import check_option_names
from sebulba.errors import UsageError
from sebulba.types import PyTree

_LIMIT = "time_limit"
"""Attribute and option of jumanji's environments that have a time limit."""


def ids() -> Collection[str]:
    """Return all ids."""
    import jumanji

    return jumanji.registered_environments()


def make(env_id: str, options: dict[str, Any]) -> JaxEnv:
    """Make an environment; options are parameters of its class."""
    import jumanji
    from jumanji import registration

    env_class = registration.load(registration._REGISTRY[env_id].entry_point)
    options, known = dict(options), set(inspect.signature(env_class).parameters)
    check_option_names(options, known | {"max_episode_steps"}, env_id)
    limit = options.pop("max_episode_steps", None)
    if limit is not None and _LIMIT in known:
        options[_LIMIT], limit = limit, None
    env = JumanjiEnv(jumanji.make(env_id, **options))
    return env if limit is None else TimeLimit(env, limit)


class JumanjiEnv:
    """An environment of jumanji's with one agent. Nested observations become one Dict.

    The last step of an episode terminates it if its discount is 0. Many environments say so where
    their ``time_limit`` is reached, too. So the step is written twice, with and without the limit:
    what ends with it only, is truncated. XLA computes once what both have in common.
    """

    def __init__(self, env: Any) -> None:
        """Take an environment without wrappers.

        Raises:
          UsageError: It has several agents, or spaces that are not supported.
        """
        if env.reward_spec.shape != ():
            raise UsageError(
                f"{type(env).__name__} has several agents (its rewards are "
                f"{env.reward_spec.shape}), which is not supported yet; use another environment"
            )
        self._env = env
        self._unlimited = without_limit(env, _LIMIT) if hasattr(env, _LIMIT) else env
        spaces = {name: _space(spec) for name, spec, _ in _leaves(env.observation_spec)}
        self._is_flat = spaces.keys() == {""}
        self.observation_space = spaces[""] if self._is_flat else gymnasium.spaces.Dict(spaces)
        self.action_space = _space(env.action_spec)

    def reset(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        state, timestep = self._env.reset(key)
        return self._obs(timestep), state

    def step(self, key: jax.Array, state: PyTree, action: jax.Array) -> Stepped:
        state_after, timestep = self._env.step(state, action)
        _, unlimited = self._unlimited.step(state, action)
        terminated = unlimited.last() & (jnp.asarray(unlimited.discount) == 0)
        truncated = timestep.last() & ~terminated
        return self._obs(timestep), state_after, timestep.reward, terminated, truncated

    def _obs(self, timestep: Any) -> PyTree:
        leaves = _leaves(self._env.observation_spec, timestep.observation)
        obs = {name: value for name, _, value in leaves}
        return obs[""] if self._is_flat else obs


def _leaves(spec: Any, value: Any = None, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield path, spec and value of each array of a nested spec; the path of a bare one is empty.

    Args:
      spec: A spec of jumanji's.
      value: What it describes; None if only the specs are wanted.
      path: Where this one is.
    """
    from jumanji import specs

    if isinstance(spec, specs.Array):
        yield path, spec, value
        return
    for name, part in vars(spec).items():
        if isinstance(part, specs.Spec):
            inside = None if value is None else getattr(value, name)
            yield from _leaves(part, inside, f"{path}.{name}" if path else name)


def _space(spec: Any) -> gymnasium.Space:
    """Return the spec of an array as one of Gymnasium's spaces."""
    from jumanji import specs

    if isinstance(spec, specs.DiscreteArray):
        return gymnasium.spaces.Discrete(int(spec.num_values), dtype=np.int32)
    if isinstance(spec, specs.MultiDiscreteArray):
        return gymnasium.spaces.MultiDiscrete(np.asarray(spec.num_values), dtype=np.int32)
    if not isinstance(spec, specs.Array):
        raise UsageError(f"jumanji's spec {type(spec).__name__} is not supported; use an array's")
    dtype = np.dtype(spec.dtype)
    if dtype == np.bool_:
        return gymnasium.spaces.MultiBinary(spec.shape)
    if isinstance(spec, specs.BoundedArray):
        low, high = spec.minimum, spec.maximum
    elif dtype.kind == "f":
        low, high = -np.inf, np.inf
    else:
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    return box(low, high, spec.shape, dtype)
