"""Data sets of small environments, written without a policy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box
from sebulba_offline.dataset import DatasetWriter, Rows

import sebulba


class Aim(gymnasium.Env):
    """Five steps; each observation names the best action, and a reward is minus the distance."""

    observation_space = Box(-1, 1, (2,), np.float32)
    action_space = Box(-2, 2, (2,), np.float32)

    def __init__(self) -> None:
        self._place, self._steps = np.zeros(2, np.float32), 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._steps = 0
        return self._next(), {}

    def _next(self) -> np.ndarray:
        self._place = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return self._place

    def step(self, action: Any) -> Any:
        self._steps += 1
        reward = -float(np.mean(np.square(action - self._place)))
        return self._next(), reward, self._steps == 5, False, {}


def write(
    folder: Path,
    env: gymnasium.Env,
    act: Callable[[np.ndarray, np.random.Generator], Any],
    num_episodes: int,
    seed: int = 0,
    **options: Any,
) -> Path:
    """Play ``num_episodes`` by a function of an observation, and write them."""
    rng = np.random.default_rng(seed)
    spec = sebulba.env_spec(lambda: env)
    spaces = spec.observation_space, spec.action_space
    zeros = np.zeros(spec.action_space.shape, spec.action_space.dtype)
    with DatasetWriter(folder, *spaces, env="a test", **options) as writer:
        for episode in range(num_episodes):
            obs, _ = env.reset(seed=seed * 1000 + episode)
            rows: list[tuple] = [(obs, zeros, 0.0, False, False, True)]
            while not (rows[-1][3] or rows[-1][4]):
                action = np.asarray(act(rows[-1][0], rng), zeros.dtype)
                rows[-1] = (rows[-1][0], action, *rows[-1][2:])
                obs, reward, terminated, truncated, _ = env.step(action)
                rows.append((obs, zeros, reward, terminated, truncated, False))
            dtypes = np.float32, zeros.dtype, np.float32, np.bool_, np.bool_, np.bool_
            columns = zip(zip(*rows, strict=True), dtypes, strict=True)
            writer.add(Rows(*(np.array(column, dtype) for column, dtype in columns)))
    return folder


def cart_pole(folder: Path, num_episodes: int = 10) -> Path:
    """Write episodes of CartPole, 200 steps long, in which the pole never falls."""
    env = gymnasium.make("CartPole-v1", max_episode_steps=200)

    def act(obs: np.ndarray, rng: np.random.Generator) -> int:
        return int(obs[2] + 0.3 * obs[3] + 0.05 * obs[0] + 0.1 * obs[1] > 0)

    return write(folder, env, act, num_episodes)


def aim(folder: Path, num_episodes: int = 400, noise: float = 1.0) -> Path:
    """Write episodes of ``Aim`` with actions beside the best."""

    def act(obs: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return np.clip(obs + rng.normal(0.5, noise, 2), -2, 2)

    return write(folder, Aim(), act, num_episodes)
