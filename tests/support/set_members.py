"""Environments for sets: each writes its name into a log when it is made and when it is reset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete


class Member(gymnasium.Env):
    """Pays ``pays`` at the end of an episode, or with ``by_action`` only for action 1 there."""

    observation_space: gymnasium.Space = Box(0, 100, (1,), np.float32)
    action_space = Discrete(2)

    def __init__(
        self, name: str, log: str, pays: float = 1.0, length: int = 1, by_action: bool = False
    ) -> None:
        self.name, self.log, self.pays = name, log, pays
        self.length, self.by_action = length, by_action
        self.note("made")

    def note(self, what: str) -> None:
        with Path(self.log).open("a") as file:
            file.write(f"{what} {self.name}\n")

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.note("reset")
        self.t = 0
        return self.seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        self.t += 1
        ends = self.t == self.length
        paid = self.pays if ends and (action == 1 or not self.by_action) else 0.0
        return self.seen(), paid, ends, False, {}

    def seen(self) -> Any:
        return np.array([self.t + self.np_random.random()], np.float32)


class Parts(Member):
    """The same, with an observation that has parts."""

    observation_space = Dict(time=Box(0, 100, (1,), np.float32), sign=Discrete(2))

    def seen(self) -> Any:
        return {"time": super().seen(), "sign": self.t % 2}


class Wider(Member):
    """Has another observation space."""

    observation_space = Box(0, 100, (2,), np.float32)


def noted(log: Path, what: str) -> list[str]:
    """Return the names in a log that were ``"made"`` or ``"reset"``, in order."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [line.split()[1] for line in lines if line.startswith(what)]
