"""Episode statistics, computed once a cycle."""

from __future__ import annotations

import numpy as np

from sebulba.types import EnvSpec, MultiAgentSpec, PyTree, StepInfos


def new_statistics(
    spec: EnvSpec | MultiAgentSpec, num_envs: int, running: tuple = ()
) -> EpisodeStatistics | SlotStatistics:
    """Return statistics for environments of ``spec``.

    Args:
      running: What ``running()`` of such statistics returned; empty to begin new episodes.
    """
    if isinstance(spec, EnvSpec):
        return EpisodeStatistics(num_envs, *running)
    slots = {name: len(group.slots) for name, group in spec.groups.items()}
    return SlotStatistics(slots, num_envs, running)


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
        unclipped_reward: np.ndarray,
        episode_end: np.ndarray,
        inserted: np.ndarray,
        masked_truncation: np.ndarray,
    ) -> StepInfos:
        """Add the rows of one cycle, or of the part of it that ran before a stop.

        Args:
          unclipped_reward: ``[T, B]``, unclipped.
          episode_end: ``[T, B]`` bool.
          inserted: ``[T, B]`` bool: the row is a reset, not a transition.
          masked_truncation: ``[T, B]`` bool, returned unchanged.

        Returns:
          The rows with the returns and lengths of the episodes that ended in them, ordered by
          time and then by environment.
        """
        is_step = ~inserted
        reward = np.where(is_step, unclipped_reward, np.float32(0))
        returns, lengths = self.add_apart(reward, episode_end, is_step)
        return StepInfos(
            unclipped_reward,
            episode_end,
            inserted,
            masked_truncation,
            returns,
            lengths.astype(np.int64),
        )

    def add_apart(
        self, reward: np.ndarray, episode_end: np.ndarray, counts: np.ndarray
    ) -> np.ndarray:
        """Add rows ``[T, B]`` whose rewards all count, but only some as steps.

        Args:
          reward: ``[T, B]``.
          episode_end: ``[T, B]`` bool.
          counts: ``[T, B]`` bool: the row is counted in the length.

        Returns:
          Returns and lengths of the E episodes that ended, ``[2, E]``, ordered as by ``add``.
        """
        totals = np.stack([reward, counts]).astype(np.float64)
        np.cumsum(totals, axis=1, out=totals)
        totals += self._running[:, None]
        self._running = totals[:, -1].copy()
        return self._ended(totals, episode_end)

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


class SlotStatistics:
    """Sums up the returns of every agent, and the lengths of the episodes of B environments."""

    def __init__(self, slots: dict[str, int], num_envs: int, running: tuple = ()) -> None:
        """Begin new episodes, or go on with what ``running()`` returned."""
        self._slots = slots
        self._num_envs = num_envs
        of_slots, of_envs = running[:2], running[2:]
        # A slot of an environment is summed up as if it were an environment.
        self._of_slots = EpisodeStatistics(num_envs * sum(slots.values()), *of_slots)
        self._of_envs = EpisodeStatistics(num_envs, *of_envs)

    def running(self) -> tuple[np.ndarray, ...]:
        """Return the sums so far of the unfinished episodes: of slots, then of environments."""
        return (*self._of_slots.running(), *self._of_envs.running())

    def add(
        self,
        unclipped_reward: PyTree,
        episode_end: np.ndarray,
        inserted: np.ndarray,
        masked_truncation: np.ndarray,
        acting: PyTree,
    ) -> StepInfos:
        """Add the rows of one cycle; see ``EpisodeStatistics.add``.

        Args:
          unclipped_reward: ``{group: [T, B, A]}``.
          episode_end: ``[T, B]`` bool.
          inserted: ``[T, B]`` bool.
          masked_truncation: ``[T, B]`` bool.
          acting: ``{group: [T, B, A]}`` bool, who chose the action of each step; ``()`` or without
            a group where all always do.
        """
        shape = episode_end.shape
        acting = acting or {}
        rewards = [unclipped_reward[name] for name in self._slots]
        acted = [
            acting.get(name, np.ones((*shape, size), np.bool_))
            for name, size in self._slots.items()
        ]
        size = sum(self._slots.values())

        def flat(arrays: list[np.ndarray]) -> np.ndarray:
            return np.concatenate(arrays, axis=-1).reshape(shape[0], -1)

        ends = np.repeat(episode_end, size, axis=1)
        counts = flat(acted) & ~np.repeat(inserted, size, axis=1)
        summed = self._of_slots.add_apart(flat(rewards), ends, counts)
        returns, lengths = summed.reshape(2, -1, size)
        none = np.zeros(shape, np.float32)
        of_envs = self._of_envs.add(none, episode_end, inserted, masked_truncation)
        return of_envs._replace(
            unclipped_reward=unclipped_reward,
            episode_returns=returns.mean(axis=1),
            slot_returns=self._by_group(np.where(lengths > 0, returns, np.nan)),
            slot_lengths=self._by_group(lengths.astype(np.int64)),
        )

    def _by_group(self, of_slots: np.ndarray) -> dict[str, np.ndarray]:
        ends = np.cumsum(list(self._slots.values()))[:-1]
        return dict(zip(self._slots, np.split(of_slots, ends, axis=1), strict=True))
