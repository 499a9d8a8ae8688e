"""Where an update gets its batches from, if the replay is not on the update devices."""

from __future__ import annotations

from typing import Protocol

from sebulba.types import PyTree, Trajectory


class TrajectoryStore(Protocol):
    """All trajectory managers of a run, as the learner sees them. One thread may use it."""

    def begin(self, key_data: PyTree, impl: str) -> None:
        """Take the key of the updates, from which those of draws are folded."""
        ...

    def insert(self, trajectory: Trajectory, initial_step_state: PyTree) -> None:
        """Hand a trajectory over, with the step state before its row 0; do not wait."""
        ...

    def sample(self, updates: int) -> PyTree:
        """Return the experience for the update number ``updates``, from 0, on the host."""
        ...

    def update_priority(self, experience: PyTree) -> None:
        """Hand over what the update wrote into the experience that it was given; do not wait."""
        ...

    def num_bytes(self) -> int:
        """Return the size of everything that is held."""
        ...

    def lasting(self) -> PyTree:
        """Return what ``Agent.lasting_experience`` returns of ``state()``."""
        ...

    def state(self) -> PyTree:
        """Return everything that is held, on the host, laid out as on update devices."""
        ...
