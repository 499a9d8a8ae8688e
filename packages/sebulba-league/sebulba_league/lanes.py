"""Which row of a trajectory is whose: static, so that nothing is packed or gathered by chance."""

from __future__ import annotations

import dataclasses

import numpy as np

from sebulba.errors import UsageError
from sebulba.types import RunSpec


@dataclasses.dataclass(frozen=True)
class Lanes:
    """Environment b is in lane ``b mod P``, and the learner has seat ``(b // P) mod A`` in it.

    Lanes with snapshots come first, then those of anchors, then mirrors. Row ``b * A + a`` is that
    of seat a in environment b.
    """

    opponents: int
    """Lanes with a snapshot in all seats but the learner's."""
    anchors: int
    """Lanes with a fixed opponent in these."""
    mirrors: int
    """Lanes in which the learner has all seats."""
    seats: int
    """A: seats of a game."""

    @property
    def number(self) -> int:
        """P: how many lanes there are."""
        return self.opponents + self.anchors + self.mirrors

    def check(self, run: RunSpec) -> None:
        """Raise UsageError unless every lane and seat gets as many environments on each device."""
        devices, period = run.num_update_devices, self.number * self.seats
        unit = period * devices
        if run.num_envs % unit:
            below = run.num_envs // unit * unit
            raise UsageError(
                f"num_envs={run.num_envs} must be divisible by {unit}: {self.number} lanes "
                f"(opponents={self.opponents}, {self.anchors} anchors, mirrors={self.mirrors}) x "
                f"{self.seats} seats x {devices} update devices; use "
                f"{f'{below} or ' if below else ''}{below + unit}, or other numbers of lanes"
            )

    def lane(self, num_envs: int) -> np.ndarray:
        """Return the lane of each environment, ``[B]``."""
        return np.arange(num_envs) % self.number

    def seat(self, num_envs: int) -> np.ndarray:
        """Return the learner's seat in each environment, ``[B]``; in mirrors one of its seats."""
        return np.arange(num_envs) // self.number % self.seats

    def learner(self, num_envs: int) -> np.ndarray:
        """Return the rows of the learner, ``[N]``, in order."""
        mirror = self.lane(num_envs) >= self.opponents + self.anchors
        own = np.arange(self.seats) == self.seat(num_envs)[:, None]
        return np.flatnonzero(own | mirror[:, None])

    def others(self, lane: int, num_envs: int) -> np.ndarray:
        """Return the rows of the opponent in a lane, ``[R]``, in order."""
        others = np.arange(self.seats) != self.seat(num_envs)[:, None]
        return np.flatnonzero(others & (self.lane(num_envs) == lane)[:, None])
