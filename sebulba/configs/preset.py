"""What a ready experiment is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from sebulba.configs.experiment import EnvConfig, ExperimentConfig


@dataclasses.dataclass(frozen=True)
class Preset:
    """A ready experiment."""

    summary: str
    """What it is, in a line."""
    make: Callable[[], ExperimentConfig]
    """Makes its configuration."""
    goal: float | None = None
    """Mean return by which it is said to have learned; None where no such is known."""


def for_task(
    config: ExperimentConfig, env_id: str, agent: Mapping[str, Any], **fields: Any
) -> ExperimentConfig:
    """Return ``config`` in another environment, with what its task changes.

    Args:
      config: A neutral configuration.
      env_id: The environment.
      agent: Values of the agent's hyper-parameters, by name.
      **fields: Values of the configuration's own fields.
    """
    changed = dataclasses.replace(config.agent, **agent)  # type: ignore[call-arg]
    return dataclasses.replace(config, env=EnvConfig(env_id), agent=changed, **fields)
