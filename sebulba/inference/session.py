"""What of a loop goes on over several runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax

from sebulba.inference.inferencer import Inferencer
from sebulba.metrics.counters import Counters
from sebulba.metrics.window import RecentEpisodes
from sebulba.transport.item import Item
from sebulba.transport.staging import Staging


@dataclasses.dataclass
class Session:
    """What goes on over several runs of one loop."""

    inferencers: list[Inferencer]
    staging: Mapping[jax.Device, Staging]
    counters: Counters = dataclasses.field(default_factory=Counters)
    episodes: RecentEpisodes = dataclasses.field(default_factory=RecentEpisodes)
    kept_round: list[Item] = dataclasses.field(default_factory=list)
    """Lockstep: the round that was in flight when the last run stopped."""
    seconds_before: float = 0.0
    """Seconds of the runs of earlier processes, for a run that was resumed."""
