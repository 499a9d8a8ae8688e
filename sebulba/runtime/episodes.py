"""Episode statistics, reduced once a cycle."""

from __future__ import annotations

import numpy as np

from sebulba.types import StepInfos


class EpisodeStatistics:
    """Returns and lengths of the episodes of B environments, over cycles."""

    def __init__(
        self,
        num_envs: int,
        running_return: np.ndarray | None = None,
        running_length: np.ndarray | None = None,
    ) -> None:
        """Begin at the start of an episode in all environments, or with what ``running`` said."""
        zeros = np.zeros(num_envs, np.float64)
        self._return = zeros if running_return is None else running_return
        self._length = zeros.astype(np.int64) if running_length is None else running_length

    def running(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the returns and lengths so far of the episodes that have not ended, ``[B]``."""
        return self._return, self._length

    def add(
        self,
        true_reward: np.ndarray,
        episode_end: np.ndarray,
        inserted: np.ndarray,
        masked_truncation: np.ndarray,
    ) -> StepInfos:
        """Add the rows of one cycle (or of the part of it that was run).

        Args:
          true_reward: ``[T, B]``, unclipped.
          episode_end: ``[T, B]`` bool.
          inserted: ``[T, B]`` bool: the row is a reset, not a transition.
          masked_truncation: ``[T, B]`` bool, passed through.

        Returns:
          The rows with the returns and lengths of the episodes that ended in them, ordered by
          time and then by environment.
        """
        reward = np.where(inserted, 0.0, true_reward).astype(np.float64)
        returns = self._return + np.cumsum(reward, axis=0)
        lengths = self._length + np.cumsum(~inserted, axis=0)
        rows, envs = np.nonzero(episode_end)
        # Per environment, an episode's total is the running total at its end minus that at the
        # end of the episode before it.
        order = np.lexsort((rows, envs))
        same_env = np.diff(envs[order], prepend=-1) == 0
        episode_returns = np.empty(len(rows), np.float64)
        episode_lengths = np.empty(len(rows), np.int64)
        for totals, episodes in ((returns, episode_returns), (lengths, episode_lengths)):
            at_end = totals[rows[order], envs[order]]
            before = np.where(same_env, np.roll(at_end, 1), 0)
            episodes[order] = at_end - before
        self._return, self._length = (
            self._carry(returns, rows, envs),
            self._carry(lengths, rows, envs),
        )
        return StepInfos(
            true_reward, episode_end, inserted, masked_truncation, episode_returns, episode_lengths
        )

    @staticmethod
    def _carry(totals: np.ndarray, rows: np.ndarray, envs: np.ndarray) -> np.ndarray:
        """Return the running totals of the episodes that have not ended, ``[B]``."""
        at_last_end = np.zeros_like(totals[-1])
        at_last_end[envs] = totals[rows, envs]  # rows ascend, so the last end of each stays
        return totals[-1] - at_last_end
