"""pgx: games for one player or several, who take turns."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from sebulba.envs.jax_env import JaxEnv, MultiAgentJaxEnv, Stepped, TimeLimit
from sebulba.envs.observation_parts import MASK
from sebulba.envs.option_checks import check_option_names
from sebulba.envs.tree import OBSERVATION, Act, AgentNode, Obs, seats
from sebulba.types import PyTree

SEAT = "seat"
"""Name of the group of players."""


def ids() -> Collection[str]:
    """Return all ids."""
    import pgx

    return pgx.available_envs()


def make(env_id: str, options: dict[str, Any]) -> JaxEnv | MultiAgentJaxEnv:
    """Make an environment; it has no options but ``max_episode_steps``."""
    import pgx

    check_option_names(options, {"max_episode_steps"}, env_id)
    game = pgx.make(env_id)
    env: Any = PgxEnv(game) if game.num_players == 1 else PgxGame(game)
    return TimeLimit(env, options["max_episode_steps"]) if options else env


def _spaces(env: Any) -> tuple[dict[str, gymnasium.Space], gymnasium.Space]:
    """Return the spaces of what a player observes, and of what it does."""
    state = jax.eval_shape(env.init, jax.eval_shape(jax.random.key, 0))
    obs = state.observation
    flags = gymnasium.spaces.MultiBinary
    observed: dict[str, gymnasium.Space] = {
        MASK: flags(state.legal_action_mask.shape),
        OBSERVATION: flags(obs.shape)
        if obs.dtype == np.bool_
        else gymnasium.spaces.Box(-np.inf, np.inf, obs.shape),
    }
    return observed, gymnasium.spaces.Discrete(env.num_actions, dtype=np.int32)


class PgxEnv:
    """A game of pgx's for one player, who sees which actions are legal.

    ``terminated`` and ``truncated`` are those of pgx's state; its own games never truncate. An
    illegal action ends the episode, with a reward of -1.
    """

    def __init__(self, env: Any) -> None:
        """Take a game for one player."""
        self._env = env
        observed, self.action_space = _spaces(env)
        self.observation_space: gymnasium.Space = gymnasium.spaces.Dict(observed)

    def reset(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        state = self._env.init(key)
        return self._obs(state), state

    def step(self, key: jax.Array, state: PyTree, action: jax.Array) -> Stepped:
        state = self._env.step(state, action, key)
        return self._obs(state), state, state.rewards[0], state.terminated, state.truncated

    @staticmethod
    def _obs(state: Any) -> PyTree:
        return {MASK: state.legal_action_mask, OBSERVATION: state.observation}


class PgxGame:
    """A game of pgx's for several players, who are the slots of one group.

    The slot is pgx's number of the player, not the order of moves: who begins is drawn where the
    game does so. All players are told of the end. Whoever waits observes the game as pgx shows it
    to that player, and has no legal action.
    """

    def __init__(self, env: Any) -> None:
        """Take a game for several players."""
        self._env = env
        observed, action_space = _spaces(env)
        parts = {name: Obs(part, legal_actions=name == MASK) for name, part in observed.items()}
        self.tree = seats(SEAT, env.num_players, AgentNode(parts, Act(action_space)))

    def reset(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        state = self._env.init(key)
        return self._obs(state), state

    def step(self, key: jax.Array, state: PyTree, actions: dict[str, jax.Array]) -> Stepped:
        """Let the current player act."""
        state = self._env.step(state, actions[SEAT][state.current_player], key)
        rewards = {SEAT: state.rewards}
        return self._obs(state), state, rewards, state.terminated, state.truncated

    def acting(self, state: Any) -> dict[str, jax.Array]:
        return {SEAT: jnp.arange(self._env.num_players) == state.current_player}

    def _obs(self, state: Any) -> PyTree:
        # It warns that only the current player should be asked for.
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            players = jnp.arange(self._env.num_players)
            observed = jax.vmap(lambda player: self._env.observe(state, player))(players)
        mask = self.acting(state)[SEAT][:, None] & state.legal_action_mask[None]
        return {SEAT: {MASK: mask, OBSERVATION: observed}}
