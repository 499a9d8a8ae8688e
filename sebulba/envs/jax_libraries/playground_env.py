"""MuJoCo Playground: robots, and the tasks of dm_control, in MJX."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp

from sebulba.envs.jax_env import JaxEnv, Stepped, TimeLimit
from sebulba.envs.jax_libraries.brax_env import BraxEnv
from sebulba.envs.option_checks import check_option_names
from sebulba.types import PyTree

PRIVILEGED = "privileged_state"
"""Part of an observation that Playground's own training shows to the value alone."""


def ids() -> Collection[str]:
    """Return all ids."""
    from mujoco_playground import registry

    return registry.ALL_ENVS


def make(env_id: str, options: dict[str, Any]) -> JaxEnv:
    """Make an environment; options are fields of its configuration.

    Its length and the steps that repeat an action are among them; Playground's training, which is
    not used, wraps environments to have these.
    """
    from mujoco_playground import registry

    options = dict(options)
    config = registry.get_default_config(env_id)
    limit = options.pop("max_episode_steps", None)
    # Warp, which most have as their engine, needs a GPU.
    if "impl" in config and jax.default_backend() != "gpu":
        options.setdefault("impl", "jax")
    check_option_names(options, {*config, "max_episode_steps"}, env_id)
    env = registry.load(env_id, config_overrides=options)
    repeat = options.get("action_repeat", config.get("action_repeat", 1))
    length = options.get("episode_length", config.get("episode_length", 1000))
    limit = -(-length // repeat) if limit is None else limit
    return TimeLimit(PlaygroundEnv(env, repeat), limit)


class PlaygroundEnv(BraxEnv):
    """An environment of MuJoCo Playground's.

    ``done`` terminates, unless ``info["time_out"]`` says that it is a limit. Other truncations come
    from ``TimeLimit``. Where an episode ends because its physics are not finite, its last
    observation and reward have zeros in their place.
    """

    def __init__(self, env: Any, action_repeat: int = 1) -> None:
        """Take an environment without wrappers."""
        super().__init__(env)
        self._repeat = action_repeat
        obs: Any = self.observation_space
        has_more = isinstance(obs, gymnasium.spaces.Dict) and len(obs) > 1
        self.privileged = (PRIVILEGED,) if has_more and PRIVILEGED in obs.spaces else ()

    def step(self, key: jax.Array, state: PyTree, action: jax.Array) -> Stepped:
        """Act, as often as an action is repeated."""

        def once(state: PyTree, _: None) -> tuple[PyTree, jax.Array]:
            state = self._env.step(state, action)
            return state, state.reward

        state, rewards = jax.lax.scan(once, state, None, self._repeat)
        done = state.done > 0
        timed_out = done & (jnp.asarray(state.info.get("time_out", 0.0)) > 0)

        def finite(x: jax.Array) -> jax.Array:
            return jnp.where(done & ~jnp.isfinite(x), 0, x)

        obs, reward = jax.tree.map(finite, (state.obs, rewards.sum()))
        return obs, state, reward, done & ~timed_out, timed_out
