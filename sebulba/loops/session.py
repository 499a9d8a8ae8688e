"""What a loop keeps from one run to the next, and a checkpoint from one process to the next."""

from __future__ import annotations

import dataclasses

from sebulba.inference.inferencer import Inferencer
from sebulba.learning.progress import Progress


@dataclasses.dataclass
class Session(Progress):
    """What a loop keeps from one run to the next."""

    inferencers: list[Inferencer] = dataclasses.field(default_factory=list)
    """All Inferencers, in the order of their index."""
    seconds_before: float = 0.0
    """After a resume: seconds that the run lasted in earlier processes."""
