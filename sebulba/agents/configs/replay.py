"""Hyper-parameters of agents that learn from a replay: storage, ratio, target networks."""

from __future__ import annotations

import dataclasses

from sebulba.support.checks import check_ranges, check_types, require


@dataclasses.dataclass(frozen=True)
class ReplayConfig:
    """What is kept, what is drawn of it, and how often."""

    capacity: int = 100_000
    """Environment steps that the replay holds, over all Inferencers, environments and hosts,
    rounded down to whole trajectories."""
    batch_size: int = 64
    """Transitions, or sequences, of one update, over all update devices."""
    updates_per_cycle: int = 1
    """Updates after each trajectory; with several hosts, after one of each host."""
    cycles_per_update: int = 1
    """Trajectories before each update, for less than one update per trajectory."""
    warm_up_cycles: int = 1
    """Trajectories, over all Inferencers, before the first update."""
    prioritized: bool = False
    """Draw in proportion to priority ** priority_exponent instead of uniformly."""
    priority_exponent: float = 0.6
    """Weight of priorities: 0 is uniform, 1 proportional (alpha)."""
    importance_exponent: float = 0.4
    """How far weights in the loss correct the bias of prioritized draws: 1 corrects all of it
    (beta)."""

    def __post_init__(self) -> None:
        check_types(self, "replay.")
        check_ranges(self, "replay.", capacity=1, batch_size=1, warm_up_cycles=1)
        check_ranges(self, "replay.", updates_per_cycle=1, cycles_per_update=1)
        check_ranges(self, "replay.", priority_exponent=(0, 1), importance_exponent=(0, 1))
        require(
            self.updates_per_cycle == 1 or self.cycles_per_update == 1,
            "replay.updates_per_cycle",
            self.updates_per_cycle,
            f"cannot be combined with cycles_per_update={self.cycles_per_update}",
            "set one of them to 1",
        )

    def updates_due(self, cycle: int) -> int:
        """Return the updates that follow the ``cycle``-th (from 1) consumed trajectory."""
        since_warm_up = cycle - self.warm_up_cycles
        due = since_warm_up >= 0 and since_warm_up % self.cycles_per_update == 0
        return self.updates_per_cycle if due else 0


@dataclasses.dataclass(frozen=True)
class TargetConfig:
    """How target networks follow the trained ones."""

    period: int = 1
    """Updates between two moves of the target."""
    rate: float = 1.0
    """Share of the distance to the trained networks that a move covers; 1 copies them (tau)."""

    def __post_init__(self) -> None:
        check_types(self, "target.")
        check_ranges(self, "target.", period=1, rate=(0, 1))
        require(self.rate > 0, "target.rate", self.rate, "would never move the target", "use 0.005")
