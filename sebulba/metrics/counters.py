"""Counters of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

EPISODES_AVERAGED = 100
"""``episode_return_mean`` is the mean of at most so many finished training episodes."""


@dataclasses.dataclass
class Counters:
    """Python integers, which do not wrap; they count on over several ``run()`` of one loop."""

    updates: int = 0
    """Optimizer steps."""
    env_steps: int = 0
    """Environment steps of the trajectories that were consumed."""
    frames: int = 0
    """``env_steps`` times the frames that the environment skips per step."""
    cycles: int = 0
    """Trajectories consumed."""
    policy_version: int = 0
    """Version of the newest networks: rises by one whenever trained networks are published."""
    dropped_lag_cycles: int = 0
    """Trajectories dropped because their policy lag was above ``max_policy_lag``."""
    dropped_stop_cycles: int = 0
    """Trajectories lost because a stop cut them short."""
    dropped_env_cycles: int = 0
    """Trajectories lost because their environment failed and was replaced."""
    env_restarts: int = 0
    """Inferencers that got new environments because theirs had failed."""
    skipped_updates: int = 0
    """Optimizer steps not taken because the loss or the gradient was not finite."""
    warm_up_from: int = 0
    """``cycles`` when the experience, and with it the warm-up, last began from nothing."""
    evaluated_at: int = 0
    """``env_steps`` of the networks that the newest evaluation played. If a stop cut an evaluation
    short, the resumed run plays it at once with the networks it has."""
    episodes: int = 0
    """Episodes that ended in consumed trajectories."""
    masked_truncations: int = 0
    """Truncated transitions that the loss cannot use: a reset in the same step replaced their last
    observation, and nothing else gives it, or the agent does not use it."""

    @property
    def dropped_cycles(self) -> int:
        """All trajectories that were made and not consumed."""
        return self.dropped_lag_cycles + self.dropped_stop_cycles + self.dropped_env_cycles


def of_prefix(record: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """Return the values whose names begin with a prefix, by the rest of their names."""
    return {
        name.removeprefix(prefix): value
        for name, value in record.items()
        if name.startswith(prefix) and value is not None
    }


def of_groups(record: Mapping[str, Any], metric: str = "episode_return_mean") -> dict[str, float]:
    """Return the mean returns of the groups in a record, if there are several groups.

    Of one group they are those of its slots, unless all of them cooperate: the mean over the sides
    of a zero-sum game is 0.
    """
    means = of_prefix(record, f"{metric}/")
    groups = {name: mean for name, mean in means.items() if "/" not in name}
    if len(groups) > 1:
        return groups
    slots = {name: mean for name, mean in means.items() if "/" in name}
    return slots if len(slots) > 1 and "team_return_mean" not in record else {}
