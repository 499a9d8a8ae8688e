"""What travels from the Inferencers to the update loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sebulba.types import PyTree, StepInfos, Trajectory

HandedOver = tuple[Trajectory, PyTree, PyTree]
"""Trajectory, initial step state and final step state, on the update devices."""
HandOff = Callable[[Trajectory, PyTree, PyTree], HandedOver]
"""Places a trajectory, an initial and a final step state on the update devices."""


class Item(NamedTuple):
    """One cycle's result on its way to the update loop; JAX arrays are on the update devices."""

    inferencer: int
    """Index of the Inferencer that made it."""
    cycle: int
    """Number of the cycle, counted by that Inferencer."""
    policy_version: int
    """Version of the networks that acted."""
    trajectory: Trajectory
    """T transitions of B environments."""
    initial_step_state: PyTree
    """Step state before row 0."""
    final_step_state: PyTree
    """Step state before row T."""
    step_infos: StepInfos
    """Statistics of episodes, on the host."""
