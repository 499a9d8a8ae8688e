"""envpool's games of several players who take turns: boards and cards, stepped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from sebulba.envs.observation_parts import MASK
from sebulba.envs.pool import PoolAdapter, scattered
from sebulba.envs.spaces import SlotActions, canonical_observation_space
from sebulba.envs.tree import OBSERVATION, Act, AgentNode, Obs, compile_tree, seats
from sebulba.types import EnvOutput, MultiAgentSpec

PLAYER = "player"
"""Name of the group."""
BEGAN = "began"
"""Part of an observation: whether this player began the game."""
SHOW_BEGINNER = "show_beginner"
"""Option of games: observations have the part ``BEGAN``."""
MOVES = "moves"
"""Part of an observation: the actions of both players so far, one-hot, in order."""
SHOW_MOVES = "show_moves"
"""Option of games: observations have the part ``MOVES``, for so many actions."""
SHOWN = {SHOW_BEGINNER: False, SHOW_MOVES: 0}
"""Options of games, with their defaults."""
_MOVER, _LEGAL = "info:current_player", "info:legal_action_mask"


def is_game(config: Mapping[str, Any], spec: Any) -> bool:
    """Tell whether configuration and spec of a pool are those of a game with turns."""
    several = config.get("max_num_players", 1) > 1
    return several and {_MOVER, _LEGAL} <= spec.state_array_spec.keys()


def game_spec(
    spec: Any, name: str, show_beginner: bool = False, show_moves: int = 0
) -> MultiAgentSpec:
    """Return the spec of the players, given that of envpool."""
    (num_actions,) = spec.state_array_spec[_LEGAL].shape
    observation = canonical_observation_space(spec.gymnasium_observation_space)
    mask = Obs(spaces.MultiBinary(num_actions), legal_actions=True)
    parts = {OBSERVATION: Obs(observation), MASK: mask}
    if show_beginner:
        parts[BEGAN] = Obs(spaces.MultiBinary(1))
    if show_moves:
        parts[MOVES] = Obs(spaces.MultiBinary(show_moves * num_actions))
    node = AgentNode(parts, Act(spaces.Discrete(num_actions)))
    tree = seats(PLAYER, spec.config.max_num_players, node)
    compiled = compile_tree(tree, name=name, waits=True)
    assert isinstance(compiled, MultiAgentSpec)
    return compiled


class GameAdapter(PoolAdapter):
    """Gives each player of each game a row; whose turn it is acts, and all are told of the end.

    Rows come in the order in which games are done with a step, and are put into place by
    ``env_id``.
    """

    def __init__(
        self, pool: Any, name: str = "", show_beginner: bool = False, show_moves: int = 0
    ) -> None:
        """Take over ``pool``, made in synchronous mode with ``env_type="gymnasium"``."""
        super().__init__(pool)
        self.spec = game_spec(pool.spec, name, show_beginner, show_moves)
        self._shows_beginner = show_beginner
        group = self.spec.groups[PLAYER]
        self._slots, self._one = group.slots, group.spec
        self._actions = SlotActions(self.spec.groups, self.num_envs)
        self._envs = np.arange(self.num_envs)
        self._mover = self._beginner = np.zeros(self.num_envs, np.int32)
        self._ends = np.zeros(self.num_envs, np.bool_)
        num_actions = int(self._one.action_space.n)  # type: ignore[union-attr]
        self._moves = np.zeros((self.num_envs, show_moves, num_actions), np.int8)
        self._info: dict[str, Any] = {}

    def reset(self) -> EnvOutput:
        obs, info = self._open_pool().reset()
        no_flag = np.zeros(self.num_envs, np.bool_)
        self._ends = no_flag
        no_reward = np.zeros(len(obs), np.float32)
        return self._output(obs, no_reward, no_flag, no_flag, info, ~no_flag)

    def step(self, action: dict[str, np.ndarray]) -> EnvOutput:
        """Let the player move whose turn it is, in all games.

        Raises:
          ActionError: An action is invalid, or the move is not legal; no game has received one.
        """
        pool = self._open_pool()
        self._actions.check(action)
        move = np.ascontiguousarray(action[PLAYER][self._envs, self._mover], np.int32)
        obs, reward, terminated, truncated, info = pool.step(move)
        is_first = self._ends
        self._note(move)
        order = info["env_id"]
        terminated, truncated = scattered(terminated, order), scattered(truncated, order)
        self._ends = terminated | truncated
        return self._output(obs, reward, terminated, truncated, info, is_first)

    def games(self) -> list[Mapping[str, Any]]:
        """Return what envpool says of each game, and ``over``, ``[B]``; only after a reset."""
        info = {name: part for name, part in self._info.items() if name != "players"}
        in_order = scattered(info, info["env_id"]) | {"over": self._ends}
        return [{name: part[i] for name, part in in_order.items()} for i in self._envs]

    def fused(self) -> str:
        return "envpool offers no XLA interface for games of several players"

    def _note(self, move: np.ndarray) -> None:
        """Keep a move ``[B]`` of each game; none of one that is over."""
        number = self._moves.sum(axis=(1, 2))
        rows = np.flatnonzero(~self._ends & (number < self._moves.shape[1]))
        self._moves[rows, number[rows], move[rows]] = 1

    def _output(
        self, obs: Any, reward: Any, terminated: Any, truncated: Any, info: Any, is_first: Any
    ) -> EnvOutput:
        """Return the rows of all players, ``[B, A, ...]``, given those of the pool.

        Args:
          obs: ``[B * A, ...]`` as the pool has them, and so ``reward``.
          reward: ``[B * A]``.
          terminated: ``[B]`` in the order of environments, and so all other flags.
          truncated: ``[B]``.
          info: That of the pool.
          is_first: ``[B]``.
        """
        self._info = info
        size = len(self._slots)
        rows = info["players"]["env_id"] * size + info["players"]["id"]
        by_player = (self.num_envs, size)
        space: Any = self._one.observation_space
        seen = scattered(obs, rows).astype(space[OBSERVATION].dtype)
        paid = scattered(np.asarray(reward, np.float32), rows).reshape(by_player)
        self._mover = scattered(info["current_player"], info["env_id"])
        self._beginner = np.where(is_first, self._mover, self._beginner)
        acting = np.zeros(by_player, np.bool_)
        acting[self._envs, self._mover] = ~(terminated | truncated)
        legal = scattered(info["legal_action_mask"], info["env_id"])
        mask = (acting[..., None] & legal[:, None].astype(np.bool_)).astype(np.int8)

        def of_all(flag: np.ndarray) -> dict[str, np.ndarray]:
            return {PLAYER: np.repeat(flag[:, None], size, axis=1)}

        self._actions.look({PLAYER: mask}, {PLAYER: acting})
        parts = {MASK: mask, OBSERVATION: seen.reshape(*by_player, *seen.shape[1:])}
        if self._shows_beginner:
            began = self._beginner[:, None] == np.arange(size)
            parts[BEGAN] = began[..., None].astype(np.int8)
        if self._moves.size:
            self._moves[is_first] = 0
            parts[MOVES] = np.repeat(self._moves.reshape(self.num_envs, 1, -1), size, axis=1)
        return EnvOutput(
            obs={PLAYER: parts},
            reward={PLAYER: paid},
            terminated=of_all(terminated),
            truncated=of_all(truncated),
            is_first=of_all(is_first),
            unclipped_reward={PLAYER: paid},
            episode_end=terminated | truncated,
            acting={PLAYER: acting},
        )
