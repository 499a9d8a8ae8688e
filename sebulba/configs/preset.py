"""What a ready experiment is. Each names only what differs from what it begins with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from sebulba.agents.configs import ReplayConfig
from sebulba.configs.experiment import EnvConfig, ExperimentConfig

Make: TypeAlias = Callable[[], ExperimentConfig]


@dataclasses.dataclass(frozen=True)
class Preset:
    """A ready experiment."""

    summary: str
    """What it is, in a line."""
    make: Make
    """Makes its configuration."""
    goal: float | None = None
    """Mean return by which it is said to have learned; None where no such is known."""


class Presets(dict[str, Preset]):
    """Ready experiments by the name that the command line knows."""

    def add(self, name: str, summary: str, goal: float | None = None) -> Callable[[Make], Make]:
        """Return a decorator that makes a preset of a function, with the fields of ``Preset``."""

        def decorated(make: Make) -> Make:
            self[name] = Preset(summary, make, goal)
            return make

        return decorated


REPLAY = ReplayConfig(1_000_000, 256, updates_per_env_step=1.0, warm_up_env_steps=4992)
"""For continuous actions: an update an env step, but for the first 5,000."""
PENDULUM_REPLAY = dataclasses.replace(REPLAY, capacity=20_000, warm_up_env_steps=992)
"""For 20,000 env steps."""

ATARI = EnvConfig(
    "Pong-v5", episodic_life=True, reward_clip=True, noop_max=30, frame_skip=4, stack_num=4
)
"""Mnih et al. 2015 (doi 10.1038/nature14236), methods."""


def for_task(
    config: ExperimentConfig, env: str | EnvConfig, agent: Mapping[str, Any], **fields: Any
) -> ExperimentConfig:
    """Return ``config`` in another environment, with what its task changes.

    Args:
      config: A neutral configuration.
      env: The environment, or its id.
      agent: Values of the agent's hyper-parameters, by name.
      **fields: Values of the configuration's own fields.
    """
    changed = dataclasses.replace(config.agent, **agent)  # type: ignore[call-arg]
    env = EnvConfig(env) if isinstance(env, str) else env
    return dataclasses.replace(config, env=env, agent=changed, **fields)
