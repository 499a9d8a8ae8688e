"""An environment of your own: any ``gymnasium.Env``, trained by an agent that is there.

    python examples/custom_environment.py
    sebulba check-env examples.custom_environment:Catch
    sebulba train cartpole --env.id examples.custom_environment:Catch --agent.optimizer.epsilon 1e-5

Run the last two from the folder that contains ``examples/``: they import the class by its name.
The loop makes as many environments as it is told to, seeds each once, and checks what they return.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

import sebulba
from sebulba.agents.configs import ImpalaConfig
from sebulba.agents.impala import Impala

SIZE = 5
"""Rows and columns of the board."""


class Catch(gymnasium.Env):
    """A ball falls straight down; move a paddle below it (after Mnih et al. 2014).

    Reward 1 for catching the ball and -1 for missing it, in the last of ``SIZE - 1`` steps.
    """

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (2 * SIZE + 1,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        """Begin an episode; all randomness comes from ``self.np_random``, which ``seed`` seeds."""
        super().reset(seed=seed)
        self._row = 0
        self._ball = int(self.np_random.integers(SIZE))
        self._paddle = SIZE // 2
        return self._obs(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Move the paddle left, not at all or right, and let the ball fall by a row."""
        self._paddle = min(max(self._paddle + int(action) - 1, 0), SIZE - 1)
        self._row += 1
        terminated = self._row == SIZE - 1
        reward = 0.0
        if terminated:
            reward = 1.0 if self._paddle == self._ball else -1.0
        # A time limit would be `truncated`, after which the agent still counts on later rewards.
        return self._obs(), reward, terminated, False, {}

    def _obs(self) -> np.ndarray:
        """Return columns of ball and paddle as one-hot vectors, and how far the ball has fallen."""
        obs = np.zeros(2 * SIZE + 1, np.float32)
        obs[self._ball] = obs[SIZE + self._paddle] = 1.0
        obs[-1] = self._row / (SIZE - 1)
        return obs


def train(num_cycles: int = 300, **options: Any) -> sebulba.Result:
    """Train and return what ``GymnasiumLoop.run`` returned."""
    env = sebulba.make_env_factory(Catch)
    agent = Impala(sebulba.env_spec(env), ImpalaConfig(learning_rate=5e-3))
    with sebulba.GymnasiumLoop(env, agent, num_envs=16, **options) as loop:
        state = loop.new_state(0, steps_per_cycle=16)
        return loop.run(state, num_cycles, steps_per_cycle=16)


if __name__ == "__main__":
    result = train()
    mean = result.metrics["episode_return_mean"]
    print(f"mean return after {result.counters.env_steps:,} env steps: {mean:.2f} (random: -0.6)")
