"""pgx: games, of which those for one player are here."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import gymnasium
import jax
import numpy as np

from sebulba.envs.jax_env import JaxEnv, TimeLimit
from sebulba.envs.option_checks import check_option_names
from sebulba.errors import UsageError
from sebulba.types import PyTree


def ids() -> Collection[str]:
    """Return all ids."""
    import pgx

    return pgx.available_envs()


def make(env_id: str, options: dict[str, Any]) -> JaxEnv:
    """Make an environment; it has no options but ``max_episode_steps``."""
    import pgx

    check_option_names(options, {"max_episode_steps"}, env_id)
    env = PgxEnv(pgx.make(env_id))
    return TimeLimit(env, options["max_episode_steps"]) if options else env


class PgxEnv:
    """A game of pgx's for one player, who sees which actions are legal.

    ``terminated`` and ``truncated`` are those of pgx's state; its own games never truncate. An
    illegal action ends the episode, with a reward of -1.
    """

    def __init__(self, env: Any) -> None:
        """Take an environment.

        Raises:
          UsageError: It has several players.
        """
        if env.num_players != 1:
            raise UsageError(
                f"{env.id} has {env.num_players} players, who cannot be trained here yet; use a "
                "game for one, such as 2048"
            )
        self._env = env
        state = jax.eval_shape(env.init, jax.eval_shape(jax.random.key, 0))
        obs = state.observation
        flags = gymnasium.spaces.MultiBinary
        self.observation_space: gymnasium.Space = gymnasium.spaces.Dict(
            {
                "action_mask": flags(state.legal_action_mask.shape),
                "observation": flags(obs.shape)
                if obs.dtype == np.bool_
                else gymnasium.spaces.Box(-np.inf, np.inf, obs.shape),
            }
        )
        self.action_space: gymnasium.Space = gymnasium.spaces.Discrete(
            env.num_actions, dtype=np.int32
        )

    def reset(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        """Begin an episode."""
        state = self._env.init(key)
        return self._obs(state), state

    def step(
        self, key: jax.Array, state: PyTree, action: jax.Array
    ) -> tuple[PyTree, PyTree, Any, Any, Any]:
        """Act."""
        state = self._env.step(state, action, key)
        return self._obs(state), state, state.rewards[0], state.terminated, state.truncated

    @staticmethod
    def _obs(state: Any) -> PyTree:
        return {"action_mask": state.legal_action_mask, "observation": state.observation}
