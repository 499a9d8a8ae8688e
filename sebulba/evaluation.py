"""Play a policy for a number of episodes and say what it returns."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from sebulba.envs import make_env_factory, seed_block
from sebulba.errors import UsageError
from sebulba.policy import Policy
from sebulba.types import EnvAdapter, EnvFactory, EnvOutput

CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """True returns and lengths of whole episodes."""

    returns: np.ndarray
    """``[N]`` float64, unclipped."""
    lengths: np.ndarray
    """``[N]`` int64, in environment steps."""

    @property
    def mean_return(self) -> float:
        """Mean of the returns."""
        return float(np.mean(self.returns))

    @property
    def mean_length(self) -> float:
        """Mean of the lengths."""
        return float(np.mean(self.lengths))

    @property
    def interval(self) -> float | None:
        """Half the width of the 95 % confidence interval of the mean return (Student's t).

        None for a single episode.
        """
        from scipy.stats import t  # slow to import

        n = len(self.returns)
        if n < 2:
            return None
        error = float(np.std(self.returns, ddof=1)) / math.sqrt(n)
        return float(t.ppf((1 + CONFIDENCE) / 2, n - 1)) * error

    def record(self) -> dict[str, Any]:
        """Return everything as a JSON object."""
        return {
            "episodes": len(self.returns),
            "mean_return": self.mean_return,
            "interval_95": self.interval,
            "mean_length": self.mean_length,
            "returns": self.returns.tolist(),
            "lengths": self.lengths.tolist(),
        }

    def __str__(self) -> str:
        interval = self.interval
        margin = f" ± {interval:.2f} (95 % confidence interval)" if interval is not None else ""
        return (
            f"mean return {self.mean_return:.2f}{margin} over {len(self.returns)} episodes, "
            f"mean length {self.mean_length:.1f}"
        )


def evaluate(
    policy: Policy,
    env: str | Callable | EnvFactory,
    *,
    num_episodes: int = 100,
    num_envs: int = 16,
    seed: int = 1,
) -> Evaluation:
    """Play ``policy`` for exactly ``num_episodes`` episodes.

    How many each environment plays is fixed beforehand (equal but for one): taking the first
    episodes to end would favour short ones.

    Args:
      policy: From ``load_policy``.
      env: Whatever ``sebulba.make_env_factory`` takes.
      num_episodes: At least 1.
      num_envs: Environments side by side; no more than episodes are made.
      seed: Of the environments, an int32.

    Raises:
      UsageError: A number is out of range, or the environment is not the policy's.
    """
    for name, value in (("num_episodes", num_episodes), ("num_envs", num_envs)):
        if value < 1:
            raise UsageError(f"{name}={value} must be at least 1; use 1 or more")
    num_envs = min(num_envs, num_episodes)
    seeds = seed_block(seed, inferencer=0, num_inferencers=1, num_envs=num_envs)
    adapter = make_env_factory(env)(num_envs, seeds)
    try:
        _check_spaces(policy, adapter)
        quota = np.full(num_envs, num_episodes // num_envs)
        quota[: num_episodes % num_envs] += 1
        return _play(policy, adapter, quota)
    finally:
        adapter.close()


def _check_spaces(policy: Policy, adapter: EnvAdapter) -> None:
    for name in ("observation_space", "action_space"):
        of_env, of_policy = getattr(adapter.spec, name), getattr(policy.spec, name)
        if of_env != of_policy:
            raise UsageError(
                f"{name}={of_env} of the environment is not the policy's {of_policy}; "
                "evaluate in the environment that it was trained in"
            )


def _play(policy: Policy, adapter: EnvAdapter, quota: np.ndarray) -> Evaluation:
    num_envs = len(quota)
    returns: list[list[float]] = [[] for _ in range(num_envs)]
    lengths: list[list[int]] = [[] for _ in range(num_envs)]
    running_return, running_length = np.zeros(num_envs), np.zeros(num_envs, np.int64)
    state = policy.new_state(num_envs)
    output = adapter.reset()
    while any(len(done) < n for done, n in zip(returns, quota, strict=True)):
        action, state = policy(
            output.obs,
            state,
            reward=output.reward,
            terminated=output.terminated,
            truncated=output.truncated,
            is_first=output.is_first,
        )
        output = adapter.step(action)
        running_return += output.true_reward
        running_length += ~_inserted(output)
        for i in np.flatnonzero(output.episode_end):
            returns[i].append(float(running_return[i]))
            lengths[i].append(int(running_length[i]))
            running_return[i], running_length[i] = 0.0, 0
    return Evaluation(
        np.array([r for done, n in zip(returns, quota, strict=True) for r in done[:n]]),
        np.array([r for done, n in zip(lengths, quota, strict=True) for r in done[:n]]),
    )


def _inserted(output: EnvOutput) -> np.ndarray:
    """Tell which rows are not a step but the reset that follows an end, ``[B]`` bool."""
    return output.is_first & ~(output.terminated | output.truncated)
