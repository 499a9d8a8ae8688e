"""Environments that each isolate one capability of an agent, learned in seconds.

Those of values and of one continuous action; what an agent is to do is asked in ``questions``.

Source: andyljones.com/posts/rl-debugging (probe environments).
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

spaces = gymnasium.spaces


class Probe(gymnasium.Env):
    """Observes +1 or -1; a subclass says what an action is worth and how long an episode is."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space: spaces.Space = spaces.Discrete(2)
    length = 1

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        """Begin an episode."""
        super().reset(seed=seed)
        self._t = 0
        self._sign = self.first_sign()
        return self._obs(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Reward the action and go on to the next time."""
        reward = self.reward(action)
        self._t += 1
        self._sign = -self._sign
        return self._obs(), float(reward), self._t >= self.length, False, {}

    def _obs(self) -> np.ndarray:
        return np.full(1, self._sign, np.float32)

    def first_sign(self) -> float:
        """Return what the first observation is."""
        return 1.0

    def reward(self, action: Any) -> float:
        """Return the reward of ``action`` at ``self._t`` with ``self._sign`` observed."""
        del action
        return 1.0


class ConstantValue(Probe):
    """One step, reward 1: the value of everything is 1."""


class ObservationValue(Probe):
    """One step, the reward is the observation, +1 or -1: the value depends on it."""

    def first_sign(self) -> float:
        """Draw +1 or -1."""
        return self.np_random.choice([-1.0, 1.0])

    def reward(self, action: Any) -> float:
        """Return the sign observed."""
        return self._sign


class Discounting(Probe):
    """Two steps, +1 observed and then -1, reward 1 at the end: values are discount and 1."""

    length = 2

    def reward(self, action: Any) -> float:
        """Return 1 at the end."""
        return float(self._t == 1)


class ContinuousTarget(Probe):
    """One step, the action should be half the observation."""

    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def first_sign(self) -> float:
        """Draw +1 or -1."""
        return self.np_random.choice([-1.0, 1.0])

    def reward(self, action: Any) -> float:
        """Return minus the distance from half the observation."""
        return -abs(float(action[0]) - 0.5 * self._sign)
