"""What travels from the Inferencers to the update loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sebulba.types import PyTree, StepInfos, Trajectory

HandedOver = tuple[Trajectory, PyTree, PyTree]
"""Trajectory, initial step state and final step state, on the update devices."""
HandOff = Callable[[Trajectory, PyTree, PyTree], HandedOver]
"""Places these three there."""


class Item(NamedTuple):
    """One cycle's result on its way to the update loop; arrays are on the update devices."""

    inferencer: int
    cycle: int
    policy_version: int
    trajectory: Trajectory
    initial_step_state: PyTree
    final_step_state: PyTree
    step_infos: StepInfos
