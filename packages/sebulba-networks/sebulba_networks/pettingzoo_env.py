"""Flows that share a bottleneck as a parallel environment of PettingZoo, which is optional."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from gymnasium.spaces import Box
from gymnasium.utils import seeding

from sebulba.envs.seeds import check_seed
from sebulba.errors import ActionError, UsageError, shown
from sebulba.support.plugins import NotInstalledError
from sebulba_networks import SHARED_BOTTLENECK
from sebulba_networks.adapter import FLOW, agent_spaces
from sebulba_networks.gymnasium_env import info_of
from sebulba_networks.native import Rows
from sebulba_networks.options import read_options
from sebulba_networks.pools import Pool, make_pool

try:
    from pettingzoo import ParallelEnv
except ImportError as error:
    raise NotInstalledError(
        "sebulba_networks.pettingzoo_env needs pettingzoo, which is not installed; pip install "
        "'sebulba-networks[pettingzoo]'"
    ) from error


class SharedBottleneckEnv(ParallelEnv):
    """Each agent chooses by how much the window of its flow changes, once in two round trips.

    An action ``a`` in -2 to 2 multiplies the window by ``2 ** a``. The steps of flows end at
    unequal times, and flows join and leave. A step of this environment lasts until the step of
    some agent ends. ``info["acting"]`` says whether the agent's next action counts. An agent that
    does not act waits: its action is ignored, its reward is 0, and its observation is its last one,
    or before it joins the one nearest to zero. An agent that acts also has the ``info`` of
    ``CongestionControlEnv``.
    """

    metadata: ClassVar[dict[str, Any]] = {
        "name": "shared_bottleneck_v0",
        "render_modes": [],
        "is_parallelizable": True,
    }

    def __init__(self, render_mode: str | None = None, **options: Any) -> None:
        """Make it with the fields of ``SharedBottleneckOptions``.

        Raises:
          UsageError: An option is unknown or its value breaks a rule, or there is a render mode.
        """
        if render_mode is not None:
            raise UsageError(f"render_mode={render_mode!r} is none of this environment; drop it")
        self.render_mode = None
        self._options = read_options(options, SHARED_BOTTLENECK)
        self._observation_space, self._action_space = agent_spaces(self._options)
        self.possible_agents = [f"{FLOW}_{index}" for index in range(self._options.num_agents)]
        self.agents: list[str] = []
        self._pool: Pool | None = None
        self._random = seeding.np_random()[0]
        self._acting = np.zeros(len(self.possible_agents), bool)
        self._obs: dict[str, np.ndarray] = {}

    def observation_space(self, agent: str) -> Box:
        """Return the space of an agent's observations, which is that of every agent."""
        return self._observation_space

    def action_space(self, agent: str) -> Any:
        """Return the space of an agent's actions, which is that of every agent."""
        return self._action_space

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, dict[str, Any]]]:
        """Begin the next episode; ``seed`` decides it and all that follow."""
        if seed is not None:
            self._random = seeding.np_random(check_seed(seed))[0]
        if seed is not None or self._pool is None:
            self.close()
            drawn = self._random.integers(2**31) if seed is None else seed
            self._pool = make_pool(self._options, [int(drawn)])
        rows = self._pool.reset(with_info=True)
        self.agents = [*self.possible_agents]
        space = self._observation_space
        nothing = np.clip(np.zeros(space.shape, np.float32), space.low, space.high)
        self._obs = dict.fromkeys(self.agents, nothing)
        infos = self._take(rows)
        return self._shown_obs(), infos

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        """Multiply the windows of the agents that act, until the step of some agent ends.

        Returns:
          Observations, rewards, terminations, truncations and infos, by agent.

        Raises:
          ActionError: An agent that acts has no action, or one that is not in its space.
        """
        assert self._pool is not None and self.agents, "call reset first"
        given = np.zeros((1, len(self.possible_agents)), np.float32)
        for index in np.flatnonzero(self._acting):
            given[0, index] = self._checked(actions, self.possible_agents[index])
        rows = self._pool.step(given, with_info=True)
        before, infos = self.agents, self._take(rows)
        reward = {agent: float(rows.reward[0, self._index(agent)]) for agent in before}
        ended = {agent: bool(rows.terminated[0, self._index(agent)]) for agent in before}
        cut = {agent: bool(rows.truncated[0, self._index(agent)]) for agent in before}
        obs = self._shown_obs()
        self.agents = [agent for agent in before if not (ended[agent] or cut[agent])]
        return obs, reward, ended, cut, infos

    def close(self) -> None:
        """Free the engine."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _checked(self, actions: dict[str, Any], agent: str) -> float:
        """Return the action of an agent that acts."""
        action = np.asarray(actions.get(agent, np.nan), np.float32).reshape(-1)
        if action not in self._action_space:
            raise ActionError(
                f"action={shown(actions.get(agent))} of {agent} must be one number from -2 to 2"
            )
        return float(action[0])

    def _take(self, rows: Rows) -> dict[str, dict[str, Any]]:
        """Keep what agents see whose step has ended, and return the infos."""
        self._acting = rows.acting[0].copy()
        infos: dict[str, dict[str, Any]] = {}
        for agent in self.agents:
            index = self._index(agent)
            is_acting = bool(self._acting[index])
            infos[agent] = {"acting": is_acting}
            has_ended = rows.terminated[0, index] or rows.truncated[0, index]
            if is_acting or has_ended:
                self._obs[agent] = rows.obs[0, index].copy()
                infos[agent] |= info_of(rows, index)
        return infos

    def _shown_obs(self) -> dict[str, np.ndarray]:
        return {agent: self._obs[agent].copy() for agent in self.agents}

    def _index(self, agent: str) -> int:
        return self.possible_agents.index(agent)


def parallel_env(**options: Any) -> SharedBottleneckEnv:
    """Return the environment, by the name that PettingZoo's own modules have for it."""
    return SharedBottleneckEnv(**options)
