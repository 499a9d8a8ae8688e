"""The echo worlds of ``tests/support/echo.py`` with PettingZoo's interfaces."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv, ParallelEnv

from tests.support.echo import (
    IN_TURN,
    NUM_ACTIONS,
    PLACE,
    TOGETHER,
    is_cut,
    legal_of,
    length_of,
    place_of,
)

NAMES = ("scout_0", "scout_1", "anchor")
MASKED = spaces.Dict(observation=PLACE, action_mask=spaces.Box(0, 1, (NUM_ACTIONS,), dtype=np.int8))


class _Echo:
    metadata: ClassVar = {"name": "echo"}
    possible_agents: ClassVar = list(NAMES)
    render_mode = None
    world: Any

    def observation_space(self, agent: str) -> spaces.Space:
        return PLACE if agent == "anchor" else MASKED

    def action_space(self, agent: str) -> spaces.Space:
        return spaces.Discrete(NUM_ACTIONS)

    def begin(self, seed: int | None) -> None:
        assert seed is not None
        self.s, self.t = np.int64(seed), np.int64(0)
        self.codes: dict[str, int] = {}

    @property
    def at(self) -> tuple[Any, Any, Any]:
        return self.s, np.int64(0), self.t

    def observe(self, agent: str) -> Any:
        place = place_of(*self.at, NAMES.index(agent), self.codes.get(agent, 0))
        if agent == "anchor":
            return place
        return {"observation": place, "action_mask": legal_of(self.s, self.t)}

    def flags(self, agent: str) -> tuple[bool, bool]:
        over = bool(self.t == length_of(self.s, 0))
        cut = over and bool(is_cut(self.s, 0))
        died = bool(self.world.dies(NAMES.index(agent), *self.at))
        return (over and not cut) or died, cut and not died

    def reward(self, agent: str) -> float:
        n = NAMES.index(agent)
        return float(self.world.reward(n, *self.at, self.codes.get(agent, 0)))


class EchoParallel(_Echo, ParallelEnv):
    """Two scouts, of whom one joins late and one dies, and an anchor."""

    world = TOGETHER

    def present(self) -> list[str]:
        return [name for n, name in enumerate(NAMES) if self.world.acts(n, *self.at)]

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict, dict]:
        self.begin(seed)
        self.agents = self.present()
        return {agent: self.observe(agent) for agent in self.agents}, {}

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        assert actions.keys() == set(self.agents)
        self.codes = {agent: 1 + action for agent, action in actions.items()}
        self.t += 1
        involved = [name for name in NAMES if name in {*actions, *self.present()}]
        flags = {agent: self.flags(agent) for agent in involved}
        self.agents = self.present()
        return (
            {agent: self.observe(agent) for agent in involved},
            {agent: self.reward(agent) for agent in actions},
            {agent: flag[0] for agent, flag in flags.items()},
            {agent: flag[1] for agent, flag in flags.items()},
            {agent: {} for agent in involved},
        )


class EchoAEC(_Echo, AECEnv):
    """The same, one after the other."""

    world = IN_TURN

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.begin(seed)
        self.agents = list(NAMES)
        self.rewards = dict.fromkeys(NAMES, 0.0)
        self._cumulative_rewards = dict.fromkeys(NAMES, 0.0)
        self.terminations, self.truncations = (dict.fromkeys(NAMES, False) for _ in range(2))
        self.infos = {name: {} for name in NAMES}
        self.agent_selection = NAMES[int(self.world.mover(*self.at))]

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        self._cumulative_rewards[agent] = 0.0
        self.codes = {agent: 1 + action}
        self.t += 1
        for name in self.agents:
            self.rewards[name] = self.reward(name)
            self.terminations[name], self.truncations[name] = self.flags(name)
        if self.t < length_of(self.s, 0):
            self.agent_selection = NAMES[int(self.world.mover(*self.at))]
        self._accumulate_rewards()
        self._deads_step_first()


class MaskInInfo(EchoAEC):
    """Has the mask in the info, and only a place in the observation."""

    def observation_space(self, agent: str) -> spaces.Space:
        return PLACE

    def observe(self, agent: str) -> Any:
        seen = super().observe(agent)
        return seen["observation"] if isinstance(seen, dict) else seen

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        super().reset(seed, options)
        self.tell()

    def step(self, action: Any) -> None:
        super().step(action)
        self.tell()

    def tell(self) -> None:
        for agent in self.agents:
            if agent != "anchor":
                self.infos[agent] = {"action_mask": legal_of(self.s, self.t)}
