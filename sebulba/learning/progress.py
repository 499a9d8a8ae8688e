"""What the update loop counts and keeps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax

from sebulba.metrics.counters import Counters
from sebulba.metrics.window import RecentEpisodes
from sebulba.transport.item import Item
from sebulba.transport.staging import Staging


@dataclasses.dataclass
class Progress:
    """What the update loop counts and keeps, also from one run to the next."""

    staging: Mapping[jax.Device, Staging]
    """The slot of each inference device."""
    counters: Counters = dataclasses.field(default_factory=Counters)
    """Totals over all runs."""
    episodes: RecentEpisodes = dataclasses.field(default_factory=RecentEpisodes)
    """The last training episodes that ended."""
    kept_round: list[Item] = dataclasses.field(default_factory=list)
    """Lockstep: the round that was in flight when the last run stopped."""
