"""Kuhn poker by PettingZoo's AEC API, which has none of its own."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv


class Kuhn(AECEnv):
    """Kuhn's poker (1950): three cards, one chip to begin with and one to bet."""

    metadata = {"name": "kuhn", "is_parallelizable": False}  # noqa: RUF012
    possible_agents: Sequence[str] = ("player_0", "player_1")  # type: ignore[assignment]
    ENDS = ("pp", "bb", "bp", "pbp", "pbb")

    def observation_space(self, agent: str) -> spaces.Space:
        """Return its card and the moves, and that both actions are legal."""
        mask = spaces.Box(0, 1, (2,), np.int8)
        return spaces.Dict({"observation": spaces.Box(0, 1, (9,), np.float32), "action_mask": mask})

    def action_space(self, agent: str) -> spaces.Space:
        """Return the actions: pass and bet."""
        return spaces.Discrete(2)

    def reset(self, seed: int | None = None, options: dict | None = None) -> None:
        """Deal."""
        if seed is not None:
            random.seed(seed)
        self.agents = list(self.possible_agents)
        self.cards, self.moves = random.sample(range(3), 2), ""
        self.agent_selection = self.agents[0]
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos: dict[str, dict] = {agent: {} for agent in self.agents}

    def observe(self, agent: str) -> dict[str, np.ndarray]:
        """Return the observation of an agent."""
        row = np.zeros(9, np.float32)
        row[self.cards[self.possible_agents.index(agent)]] = 1
        for at, move in enumerate(self.moves):
            row[3 + 2 * at + (move == "b")] = 1
        return {"observation": row, "action_mask": np.ones(2, np.int8)}

    def step(self, action: int | None) -> None:
        """Move."""
        agent = self.agent_selection
        if self.terminations[agent]:
            self._was_dead_step(action)
            return
        self._cumulative_rewards[agent] = 0.0
        self._clear_rewards()
        self.moves += "pb"[int(action or 0)]
        self.agent_selection = self.possible_agents[len(self.moves) % 2]
        if self.moves in self.ENDS:
            won = self._won_by_first()
            self.rewards = {"player_0": won, "player_1": -won}
            self.terminations = dict.fromkeys(self.agents, True)
        self._accumulate_rewards()

    def _won_by_first(self) -> float:
        if self.moves.endswith("bp"):  # the other folds
            return 1.0 if len(self.moves) == 2 else -1.0
        stake = 2.0 if "b" in self.moves else 1.0
        return stake if self.cards[0] > self.cards[1] else -stake
