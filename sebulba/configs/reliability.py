"""What keeps a run from being lost: checkpoints, and what happens when something fails."""

from __future__ import annotations

import dataclasses
from typing import Literal

from sebulba.checks import check_types
from sebulba.configs.checks import at_least
from sebulba.errors import UsageError


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When the run is saved, for ``sebulba resume``; the end of a run is, too."""

    every_s: float = 600.0
    """Seconds between checkpoints."""
    every_updates: int | None = None
    """Updates between checkpoints, instead of every_s."""
    replay_every_s: float = 1800.0
    """Seconds between those of a replay of more than 64 MB, which is saved apart."""
    keep_last: int = 3
    """How many are kept, beside the best and the milestones."""
    milestone_env_steps: int | None = None
    """Environment steps between checkpoints that are kept for ever."""

    def __post_init__(self) -> None:
        """Check the intervals.

        Raises:
          UsageError: A value breaks a rule.
        """
        check_types(self, "checkpoint.")
        for name in ("every_s", "replay_every_s"):
            if not getattr(self, name) >= 0:
                raise UsageError(
                    f"checkpoint.{name}={getattr(self, name)} must not be negative; use 600"
                )
        for name in ("every_updates", "keep_last", "milestone_env_steps"):
            at_least(1, f"checkpoint.{name}", getattr(self, name))


@dataclasses.dataclass(frozen=True)
class FaultConfig:
    """What becomes of a run in which something fails."""

    on_env_failure: Literal["raise", "restart"] = "raise"
    """restart: an Inferencer whose environment raised, died or hangs gets new ones; what is lost
    is counted. An evaluation whose environment raised or died is played again in new ones."""
    max_env_restarts: int = 10
    """After so many, in training or in evaluation, the run ends all the same."""
    on_not_finite: Literal["raise", "skip"] = "raise"
    """skip: an update whose loss, gradient or metrics are not finite is not taken, and counted."""
    max_skipped_updates: int = 100
    """After so many the run ends all the same."""
    hang_timeout_s: float | None = 300.0
    """Seconds after which a thread that is silent is taken for hung; None waits for ever."""

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
          UsageError: A value breaks a rule.
        """
        check_types(self, "faults.")
        for name in ("max_env_restarts", "max_skipped_updates"):
            at_least(0, f"faults.{name}", getattr(self, name))
        if self.hang_timeout_s is not None and not self.hang_timeout_s > 0:
            raise UsageError(
                f"faults.hang_timeout_s={self.hang_timeout_s} must be positive; use 300, or None"
            )
