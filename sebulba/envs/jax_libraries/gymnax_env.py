"""gymnax: classic control, bsuite, MinAtar; versions 0.0.9 and 1.0."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Collection
from typing import Any

import jax

from sebulba.envs.jax_env import JaxEnv, Stepped
from sebulba.envs.jax_libraries import NO_LIMIT, space_of
from sebulba.envs.option_checks import check_like, check_option_names
from sebulba.types import PyTree


def ids() -> Collection[str]:
    """Return all ids."""
    import gymnax

    return gymnax.registered_envs


def make(env_id: str, options: dict[str, Any]) -> JaxEnv:
    """Make an environment; options are parameters of its class and fields of its ``EnvParams``."""
    import gymnax

    # Of gymnax 0.0.9 with newer versions of JAX, whenever its functions are traced.
    warnings.filterwarnings("ignore", "scatter inputs have incompatible types", FutureWarning)
    env, params = gymnax.make(env_id)
    options = dict(options)
    if (limit := options.pop("max_episode_steps", None)) is not None:
        options["max_steps_in_episode"] = limit
    fields = {field.name for field in dataclasses.fields(params)}
    parameters = set(inspect.signature(type(env)).parameters)
    check_option_names(options, parameters | fields, env_id)
    of_class = {name: value for name, value in options.items() if name not in fields}
    for name in options.keys() - of_class.keys():
        least = 1 if name == "max_steps_in_episode" else None
        check_like(name, options[name], getattr(params, name), env_id, smallest=least)
    if of_class:
        env, params = gymnax.make(env_id, **of_class)
    return GymnaxEnv(env, params.replace(**{n: options[n] for n in options.keys() - of_class}))


class GymnaxEnv:
    """An environment of gymnax's and its parameters.

    ``truncated`` is the time limit, ``max_steps_in_episode``. gymnax 1.0 reports it apart. Before,
    ``done`` was both; what terminates is then what would be done without a limit, so the step is
    written twice, with and without the limit. XLA computes once what both have in common.
    """

    def __init__(self, env: Any, params: Any) -> None:
        """Take an environment and its parameters, as ``gymnax.make`` returns them."""
        self._env, self._params = env, params
        shown = jax.eval_shape(lambda key: env.reset_env(key, params)[0], jax.random.key(0))
        self.observation_space = space_of("gymnax", env.observation_space(params), shown)
        self.action_space = space_of("gymnax", env.action_space(params))

    def reset(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        return self._env.reset_env(key, self._params)

    def step(self, key: jax.Array, state: PyTree, action: jax.Array) -> Stepped:
        """Act, without gymnax's reset."""
        env, params = self._env, self._params
        obs, state_after, reward, done, _ = env.step_env(key, state, action, params)
        if hasattr(env, "is_truncated"):
            return obs, state_after, reward, done, env.is_truncated(state_after, params)
        unlimited = params.replace(max_steps_in_episode=NO_LIMIT)
        terminated = env.step_env(key, state, action, unlimited)[3]
        return obs, state_after, reward, terminated, done & ~terminated
