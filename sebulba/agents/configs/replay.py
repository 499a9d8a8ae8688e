"""Hyper-parameters of agents that learn from a replay: storage, ratio, target networks."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Any, NamedTuple

from sebulba.errors import UsageError
from sebulba.support.checks import at_least, check_ranges, check_types, require, require_number


class Schedule(NamedTuple):
    """Which trajectories are followed by updates, counted from 1."""

    first: int
    """The first of them."""
    every: int
    """From each to the next."""
    updates: int
    """Updates that follow each."""
    at_first: int
    """Updates that follow the first, which make up for what trajectories before it lack."""

    def due(self, cycle: Any) -> Any:
        """Return the number of updates that follow trajectory ``cycle``, traced or not."""
        since = cycle - self.first
        due = self.updates * ((since >= 0) & (since % self.every == 0))
        return due + (self.at_first - self.updates) * (since == 0)


@dataclasses.dataclass(frozen=True)
class ReplayConfig:
    """What is kept, what is drawn of it, and how often."""

    capacity: int = 100_000
    """Environment steps that the replay holds, over all Inferencers, environments and hosts,
    rounded down to whole trajectories."""
    batch_size: int = 64
    """Transitions, or sequences, of one update, over all update devices."""
    updates_per_cycle: int | None = None
    """Updates after each trajectory; with several hosts, after one of each host. None: as
    updates_per_env_step says."""
    cycles_per_update: int | None = None
    """Trajectories after which these are due, for less than one a trajectory. None: likewise."""
    warm_up_cycles: int | None = None
    """Trajectories, over all Inferencers, before the first update. None: warm_up_env_steps."""
    prioritized: bool = False
    """Draw in proportion to priority ** priority_exponent instead of uniformly."""
    priority_exponent: float = 0.6
    """Weight of priorities: 0 is uniform, 1 proportional (alpha)."""
    importance_exponent: float = 0.4
    """How far weights in the loss correct the bias of prioritized draws: 1 corrects all of it
    (beta)."""
    updates_per_env_step: float | None = None
    """Replay ratio: updates an env step, whatever the numbers of environments, Inferencers and
    hosts are. None: one update after each trajectory."""
    warm_up_env_steps: int = 0
    """Environment steps that no update is due for; those after them have their updates."""

    def __post_init__(self) -> None:
        check_types(self, "replay.")
        check_ranges(self, "replay.", capacity=1, batch_size=1, warm_up_env_steps=0)
        check_ranges(self, "replay.", priority_exponent=(0, 1), importance_exponent=(0, 1))
        for name in ("updates_per_cycle", "cycles_per_update", "warm_up_cycles"):
            at_least(1, f"replay.{name}", getattr(self, name))
        if (ratio := self.updates_per_env_step) is not None:
            require_number("replay.updates_per_env_step", ratio, 1e-6, 1e6, "use 1")

    def schedule(self, env_steps: int | None = None, least: int = 1) -> Schedule:
        """Return when how many updates are due.

        Args:
          env_steps: Of a trajectory, over all hosts; None if that is not known.
          least: Trajectory before which nothing may be drawn; one that was chosen by
            ``warm_up_cycles`` may be before it.

        Raises:
          UsageError: ``env_steps`` is not known, and updates are counted by env steps.
        """
        by_cycle = self.updates_per_cycle or self.cycles_per_update
        ratio = None if by_cycle else self.updates_per_env_step
        warms_up = not self.warm_up_cycles and (self.warm_up_env_steps or ratio is not None)
        steps = env_steps or 0
        if not steps and (warms_up or ratio is not None):
            raise UsageError(
                "replay.updates_per_env_step and replay.warm_up_env_steps need the sizes of the "
                "run; use agent.for_run(run), as GymnasiumLoop does"
            )
        rate = Fraction(self.updates_per_cycle or 1, self.cycles_per_update or 1)
        if ratio is not None:
            rate = Fraction(ratio).limit_denominator(10**6) * steps
            most = 64  # updates, or trajectories, that are gathered
            rate = (
                rate.limit_denominator(most) if rate > 1 else 1 / (1 / rate).limit_denominator(most)
            )
        updates, every = rate.as_integer_ratio()
        if not warms_up:
            return Schedule(self.warm_up_cycles or 1, every, updates, updates)
        before = Fraction(self.warm_up_env_steps, steps)
        first = max(least, math.ceil(before + 1 / rate))
        return Schedule(first, every, updates, math.floor(rate * (first - before)))


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
