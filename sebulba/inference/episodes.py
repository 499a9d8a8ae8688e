"""Episode statistics, computed once a cycle."""

from __future__ import annotations

import numpy as np

from sebulba.types import StepInfos


class EpisodeStatistics:
    """Sums up returns and lengths of the episodes of B environments from cycle to cycle."""

    def __init__(
        self,
        num_envs: int,
        running_return: np.ndarray | None = None,
        running_length: np.ndarray | None = None,
    ) -> None:
        """Begin new episodes, or go on with the two arrays ``[B]`` that ``running()`` returned."""
        self._running = np.zeros((2, num_envs), np.float64)
        """Returns and lengths in one array, which halves the number of NumPy calls."""
        if running_return is not None and running_length is not None:
            self._running[:] = running_return, running_length

    def running(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the returns and lengths so far of the unfinished episodes, each ``[B]``."""
        return self._running[0].copy(), self._running[1].astype(np.int64)

    def add(
        self,
        true_reward: np.ndarray,
        episode_end: np.ndarray,
        inserted: np.ndarray,
        masked_truncation: np.ndarray,
    ) -> StepInfos:
        """Add the rows of one cycle, or of the part of it that ran before a stop.

        Args:
          true_reward: ``[T, B]``, unclipped.
          episode_end: ``[T, B]`` bool.
          inserted: ``[T, B]`` bool: the row is a reset, not a transition.
          masked_truncation: ``[T, B]`` bool, returned unchanged.

        Returns:
          The rows with the returns and lengths of the episodes that ended in them, ordered by
          time and then by environment.
        """
        totals = np.empty((2, *true_reward.shape), np.float64)
        totals[0], totals[1] = true_reward, 1.0
        totals[:, inserted] = 0.0
        np.cumsum(totals, axis=1, out=totals)
        totals += self._running[:, None]
        self._running = totals[:, -1].copy()
        returns, lengths = self._ended(totals, episode_end)
        return StepInfos(
            true_reward, episode_end, inserted, masked_truncation, returns, lengths.astype(np.int64)
        )

    def _ended(self, totals: np.ndarray, episode_end: np.ndarray) -> np.ndarray:
        """Return totals ``[2, E]`` of the E episodes that ended; subtract them from the running.

        Args:
          totals: Returns and lengths summed over the rows, not reset where episodes end;
            ``[2, T, B]``.
          episode_end: ``[T, B]`` bool.
        """
        envs, rows = np.nonzero(episode_end.T)
        if not len(rows):
            return np.zeros((2, 0))
        # Per environment, an episode's total is the running total at its end minus that at the
        # end of the episode before it.
        at_end = totals[:, rows, envs]
        ended = at_end.copy()
        has_next = envs[1:] == envs[:-1]
        ended[:, 1:] -= np.where(has_next, at_end[:, :-1], 0.0)
        is_last = np.append(~has_next, True)
        self._running[:, envs[is_last]] -= at_end[:, is_last]
        return ended[:, np.argsort(rows, kind="stable")]
