"""What one seat does, as columns of trajectories."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from sebulba.inference.episodes import EpisodeStatistics
from sebulba.types import EnvStep, PyTree, StepInfos, Trajectory

NEWEST = 2**62
"""Above all versions."""


class Column(NamedTuple):
    """T transitions of one seat: a column of a trajectory."""

    trajectory: Trajectory
    """Leaves ``[T+1, ...]`` and ``[T, ...]``, without an axis of environments."""
    initial: PyTree
    """Parts of the step state before row 0: the seat's rows, and what all seats share."""
    final: PyTree
    """Those before row T."""
    step_infos: StepInfos
    """Statistics of its episodes, ``[T, 1]``."""
    number: int
    """How many columns the seat had completed before."""
    version: int
    """Of the oldest networks that acted in it."""

    @property
    def num_steps(self) -> int:
        """T."""
        return len(self.step_infos.episode_end)


class SeatColumns:
    """Writes the rows of one seat, and cuts them into columns.

    An episode that ends takes a row for its last observation. Its action is zeros: the transition
    to the next episode's first row is no transition (``EnvStep.inserted``).
    """

    def __init__(self, like: Trajectory, num_steps: int) -> None:
        """Write columns of ``num_steps`` for one environment of ``like [T, B, ...]``."""
        self.num_steps = num_steps
        """T."""
        self.run = 0
        """Number of the run that they are for."""
        self._like = like
        self._statistics = EpisodeStatistics(1)
        self.number = -1
        """That of the latest column."""
        self._at = 0
        """Index of the row that has no action yet, or is the next to be written."""
        self._initial: PyTree = ()
        self._version = NEWEST
        self._new_arrays()

    def _new_arrays(self) -> None:
        sizes = (self.num_steps + 1, self.num_steps, self.num_steps)
        trees = (self._like.env_step, self._like.action, self._like.extras)
        self._rows, self._actions, self._extras = (
            jax.tree.map(lambda x, size=size: np.zeros((size, *x.shape[2:]), x.dtype), tree)
            for size, tree in zip(sizes, trees, strict=True)
        )

    def add(self, row: EnvStep, state: Callable[[], PyTree]) -> Column | None:
        """Write the next row, leaves ``[...]``; return the column that it completes.

        Args:
          row: What the client reported.
          state: Returns the step state for the seat, before this row is acted in.
        """
        _write(self._rows, self._at, row)
        if self._at < self.num_steps:
            if self._at == 0:
                self._initial = state()
            return None
        final = state()
        column = self._complete(final)
        self._new_arrays()
        _write(self._rows, 0, row)
        self._at, self._initial = 0, final
        return column

    def act(self, action: PyTree | None, extras: PyTree = (), version: int = NEWEST) -> None:
        """Write what networks of a version chose in the latest row; zeros for None, at its end."""
        if action is not None:
            _write(self._actions, self._at, action)
            _write(self._extras, self._at, extras)
            self._version = min(self._version, version)
        self._at += 1

    def cut(self) -> None:
        """End the episode in progress at its last observation: the client is gone."""
        last = self._at - 1
        if last <= 0:  # its end is in no column: begin new sums
            self._statistics = EpisodeStatistics(1)
        rows = self._rows
        if last >= 0 and not (rows.is_first[last] or rows.terminated[last]):
            rows.truncated[last] = True

    def _complete(self, final: PyTree) -> Column:
        rows = self._rows
        after = jax.tree.map(lambda x: x[1:, None], rows)
        ended = after.terminated | after.truncated
        infos = self._statistics.add(after.reward, ended, after.inserted, after.masked_truncation)
        trajectory = Trajectory(rows, self._actions, self._extras)
        self.number += 1
        version, self._version = self._version, NEWEST
        return Column(trajectory, self._initial, final, infos, self.number, version)


def _write(arrays: PyTree, at: int, values: PyTree) -> None:
    for array, value in zip(jax.tree.leaves(arrays), jax.tree.leaves(values), strict=True):
        array[at] = value


class ColumnJoiner:
    """Puts B columns beside each other, and knows which of them continue the trajectory before."""

    def __init__(self, num_seats: int, *, marks_seams: bool) -> None:
        """Remember the latest column in each place.

        Args:
          num_seats: B.
          marks_seams: For a replay, which takes row 0 of a trajectory for row T of the one before:
            where it is not, it becomes a reset, so that no transition ends in it.
        """
        self._latest: list[tuple[int, int] | None] = [None] * num_seats
        self._marks_seams = marks_seams

    def joined(
        self, columns: list[tuple[int, Column]]
    ) -> tuple[Trajectory, PyTree, PyTree, StepInfos, int]:
        """Return B columns, with their seats, as one trajectory ``[T, B, ...]``.

        A seat's column stands in the seat's own place, if it is the first of this seat.

        Returns:
          The trajectory, parts ``[B, ...]`` of the step state before rows 0 and T, statistics,
          and the place of the column that was complete last.
        """
        placed: dict[int, tuple[int, Column]] = {}
        others = []
        for seat, column in columns:
            if placed.setdefault(seat, (seat, column))[1] is not column:
                others.append((seat, column))
        empty = [place for place in range(len(columns)) if place not in placed]
        placed |= zip(empty, others, strict=True)
        in_order = [placed[place] for place in range(len(columns))]
        trajectory, initial, final, infos = _beside([column for _, column in in_order])
        for place, (seat, column) in enumerate(in_order):
            if self._marks_seams and self._latest[place] not in (None, (seat, column.number - 1)):
                rows = trajectory.env_step
                rows.is_first[0, place] = True
                rows.terminated[0, place] = rows.truncated[0, place] = False
            self._latest[place] = seat, column.number
        streams = [
            (seat, column.number, column.trajectory.env_step.is_first[0])
            for seat, column in in_order
        ]
        infos = infos._replace(streams=np.array(streams, np.int64).T)
        newest = next(i for i, (_, column) in enumerate(in_order) if column is columns[-1][1])
        return trajectory, initial, final, infos, newest


def _beside(columns: list[Column]) -> tuple[Trajectory, PyTree, PyTree, StepInfos]:
    def stacked(trees: list[Any], axis: int) -> Any:
        return jax.tree.map(lambda *x: np.stack(x, axis=axis), *trees)

    first_three = [tuple(column.trajectory[:3]) for column in columns]
    infos = [column.step_infos for column in columns]
    by_step = [np.concatenate(x, axis=1) for x in zip(*(info[:4] for info in infos), strict=True)]
    by_episode = [np.concatenate(x) for x in zip(*(info[4:6] for info in infos), strict=True)]
    return (
        Trajectory(*stacked(first_three, 1)),
        stacked([column.initial for column in columns], 0),
        stacked([column.final for column in columns], 0),
        StepInfos(*by_step, *by_episode),
    )
