"""Writes a sample of the episodes of a run into its folder, for its learning curve."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sebulba.metrics.episode_sample import Episodes, is_sampled, joined
from sebulba.metrics.writers import JsonLinesWriter
from sebulba.types import StepInfos, Trajectory

MOST_PENDING = 1000
"""Cycles whose episodes wait to be sampled."""


class EpisodeLog:
    """Writes the episodes that are in the sample as it is when they end, a line a record.

    A line is ``{"env_steps": of the record, "index": [...], "at": [...], "returns": [...]}``. The
    file grows with the logarithm of the number of episodes. Given to a loop as ``observe_cycle``
    and as one of its writers.
    """

    def __init__(self, path: str | Path, num_episodes: int = 0, env_steps: int = 0) -> None:
        """Begin, or go on after ``num_episodes`` and ``env_steps``, the counters of the run."""
        self._file = JsonLinesWriter(path)
        self._num_episodes = num_episodes
        self._env_steps = env_steps
        self._pending: list[tuple[int, int, np.ndarray]] = []
        """Of each cycle in which episodes ended: index of the first, env steps, returns."""
        self._sampled: list[Episodes] = []

    def observe(self, trajectory: Trajectory, step_infos: StepInfos) -> None:
        """Note the episodes that ended in a cycle, as ``observe_cycle`` of a loop."""
        self._env_steps += step_infos.episode_end.size
        returns = step_infos.episode_returns
        if len(returns):
            self._pending.append((self._num_episodes, self._env_steps, returns))
            self._num_episodes += len(returns)
            if len(self._pending) >= MOST_PENDING:
                self._sample()

    def write(self, metrics: Mapping[str, Any]) -> None:
        self._sample()
        if not self._sampled:
            return
        index, at, returns = joined(self._sampled)
        self._file.write_line(
            {
                "env_steps": metrics["env_steps"],
                "index": index.tolist(),
                "at": at.tolist(),
                "returns": [float(f"{value:.6g}") for value in returns],
            }
        )
        self._sampled.clear()

    def close(self) -> None:
        self._file.close()

    def _sample(self) -> None:
        """Take those of the pending that are in the sample."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        first, at, returns = zip(*pending, strict=True)
        lengths = [len(some) for some in returns]
        all_returns = np.concatenate(returns)
        index = first[0] + np.arange(len(all_returns))
        episodes = Episodes(index, np.repeat(at, lengths), all_returns)
        sampled = is_sampled(index, index + 1) & np.isfinite(all_returns)
        if sampled.any():
            self._sampled.append(episodes.taken(sampled))
