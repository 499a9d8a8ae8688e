"""brax: rigid bodies."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any

import gymnasium
import jax
import numpy as np

from sebulba.envs.jax_env import JaxEnv, Stepped, TimeLimit
from sebulba.envs.option_checks import check_option_names
from sebulba.types import PyTree

EPISODE_STEPS = 1000
"""Brax's own default; its environments know no limit, its training wraps them."""


def ids() -> Collection[str]:
    """Return all ids."""
    from brax import envs

    return envs._envs.keys()


def make(env_id: str, options: dict[str, Any]) -> JaxEnv:
    """Make an environment; options are parameters of its class, and ``physics``.

    That is brax's ``backend``, a word which has another meaning for environments here.
    """
    from brax import envs

    options = dict(options)
    limit = options.pop("max_episode_steps", EPISODE_STEPS)
    known = set(inspect.signature(envs._envs[env_id]).parameters) - {"backend", "kwargs"}
    check_option_names(options, known | {"physics", "max_episode_steps"}, env_id)
    if "physics" in options:
        options["backend"] = options.pop("physics")
    return TimeLimit(BraxEnv(envs.get_environment(env_id, **options)), limit)


class BraxEnv:
    """An environment of brax's.

    ``done`` terminates. Truncations come from ``TimeLimit``: brax's ``EpisodeWrapper``, which makes
    them elsewhere, and its ``AutoResetWrapper`` are not used.
    """

    def __init__(self, env: Any) -> None:
        """Take an environment without wrappers."""
        self._env = env
        obs = jax.eval_shape(lambda key: env.reset(key).obs, jax.eval_shape(jax.random.key, 0))
        self.observation_space: gymnasium.Space = _space(obs)
        self.action_space: gymnasium.Space = gymnasium.spaces.Box(-1.0, 1.0, (env.action_size,))

    def reset(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        state = self._env.reset(key)
        return state.obs, state

    def step(self, key: jax.Array, state: PyTree, action: jax.Array) -> Stepped:
        state = self._env.step(state, action)
        return state.obs, state, state.reward, state.done > 0, False


def _space(obs: PyTree) -> gymnasium.Space:
    """Return the space of an observation, an array or a dict of arrays."""
    if isinstance(obs, dict):
        return gymnasium.spaces.Dict({name: _space(part) for name, part in obs.items()})
    return gymnasium.spaces.Box(-np.inf, np.inf, obs.shape, np.float32)
