"""What travels from the Inferencers to the update loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sebulba.types import PyTree, StepInfos, Trajectory


class Item(NamedTuple):
    """What one cycle made. A cycle returns it, a hand-off places it, the update takes it."""

    trajectory: Trajectory
    """T transitions of B environments."""
    initial_step_state: PyTree
    """Step state before row 0; a copy."""
    final_step_state: PyTree
    """Step state before row T; a copy."""
    step_infos: StepInfos
    """Statistics of episodes, on the host."""

    @property
    def inferencer(self) -> int:
        """Index of the Inferencer that made it."""
        return int(self.trajectory.inferencer)


HandOff = Callable[[Item], Item]
"""Places trajectory and step states on the update devices; its argument is not used again."""
