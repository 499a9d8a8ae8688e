"""Environments of many agents for tests."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

import sebulba
from sebulba import Act, AgentNode, Obs, Population, Repeat

NUMBER = spaces.Box(-1e6, 1e6, (3,), np.float32)


class Turns(sebulba.MultiAgentEnv):
    """Two seats take turns; each is paid for repeating the number that it is shown.

    The episode has ``length`` decisions. The other seat is paid the opposite in the next step.
    """

    tree = Population(
        {
            seat: AgentNode(
                {
                    "number": Obs(spaces.Discrete(3)),
                    "legal": Obs(spaces.MultiBinary(3), legal_actions=True),
                },
                Act(spaces.Discrete(3)),
            )
            for seat in ("seat_0", "seat_1")
        },
        payoff="zero_sum",
        symmetric=True,
    )

    def __init__(self, length: int = 6) -> None:
        self.length = length

    def reset(self, *, seed: int | None = None) -> Any:
        self.t = 0
        return self.observe()

    def observe(self) -> dict:
        self.number = int(self.np_random.integers(3))
        legal = np.ones(3, np.int8)
        legal[(self.number + 1) % 3] = 0
        return {f"seat_{self.t % 2}": {"number": self.number, "legal": legal}}

    def step(self, actions: dict) -> Any:
        ((mover, action),) = actions.items()
        assert mover == f"seat_{self.t % 2}" and action != (self.number + 1) % 3
        gain = 1.0 if action == self.number else -1.0
        self.t += 1
        other = f"seat_{self.t % 2}"
        over = self.t == self.length
        return ({} if over else self.observe()), {mover: gain, other: -gain}, over, False


class Visitors(sebulba.MultiAgentEnv):
    """A guide, who is always there, and visitors who come and go, with other spaces.

    A visitor is paid for going where the guide said in the step before, the guide for each who did.
    """

    visitor = AgentNode(
        {"said": Obs(spaces.Discrete(4)), "secret": Obs(spaces.Discrete(4), eval_only=True)},
        Act(spaces.Discrete(4)),
    )
    tree = Population(
        {
            "guide": AgentNode(Obs(spaces.Discrete(4)), Act(spaces.MultiDiscrete([4, 2]))),
            "visitors": Population(Repeat(visitor, most=3)),
        },
        common=Obs(spaces.Box(0, 1, (1,), np.float32)),
        payoff="cooperative",
    )

    def reset(self, *, seed: int | None = None) -> Any:
        self.t, self.said = 0, 0
        return self.observe()

    def observe(self) -> dict:
        self.target = int(self.np_random.integers(4))
        # Who acted in the last step is shown what it led to.
        here = [i for i in range(3) if (self.t + i) % 3 or self.t == 10]
        seen = {"said": self.said, "secret": self.target}
        common = np.array([self.t / 10], np.float32)
        return {
            "common": common,
            "guide": self.target,
            **{f"visitors.{i}": seen for i in here},
        }

    def step(self, actions: dict) -> Any:
        right = {name: float(a == self.said) for name, a in actions.items() if name != "guide"}
        self.said = int(actions["guide"][0])
        self.t += 1
        rewards = {**right, "guide": sum(right.values())}
        return self.observe(), rewards, False, self.t == 10


class Pairs(sebulba.MultiAgentEnv):
    """Two reds and a blue act at once, and are paid for repeating the number that they are shown.

    The episode has ``length`` steps. All observe a screen of the time.
    """

    all_act = True
    tree = Population(
        {
            "red_0": AgentNode(Obs(spaces.Discrete(3)), Act(spaces.Discrete(3))),
            "red_1": AgentNode(Obs(spaces.Discrete(3)), Act(spaces.Discrete(3))),
            "blue": AgentNode(Obs(spaces.Discrete(4)), Act(spaces.Discrete(4))),
        },
        common=Obs(spaces.Box(0, 1, (16,), np.float32)),
    )

    def __init__(self, length: int = 10) -> None:
        self.length = length

    def reset(self, *, seed: int | None = None) -> Any:
        self.t = 0
        return self.observe()

    def observe(self) -> dict:
        self.shown = {name: int(self.np_random.integers(n)) for name, n in SIZES.items()}
        return {"common": np.full(16, self.t / self.length, np.float32), **self.shown}

    def step(self, actions: dict) -> Any:
        rewards = {name: float(action == self.shown[name]) for name, action in actions.items()}
        self.t += 1
        return self.observe(), rewards, False, self.t == self.length


SIZES = {"red_0": 3, "red_1": 3, "blue": 4}
