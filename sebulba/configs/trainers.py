"""``--trainer NAME ...``: trainers around the loop of an experiment, the outermost first."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sebulba.configs.experiment import ExperimentConfig
from sebulba.errors import UsageError
from sebulba.support import plugins
from sebulba.support.checks import nearest

ROLLOUT = "rollout"
"""The loop by itself, which is what every experiment has without a trainer."""


def with_trainers(config: ExperimentConfig, names: Sequence[str]) -> ExperimentConfig:
    """Return ``config`` as these trainers change it, the innermost, which is named last, first.

    Raises:
      UsageError: There is no such trainer, or it cannot be around what it is around.
    """
    for name in reversed(names):
        entry = plugins.find(plugins.TRAINERS, name, (ROLLOUT,))
        if entry is not None:
            config = _with_own_agent(plugins.load(plugins.TRAINERS, entry)(config), config, name)
        elif name != ROLLOUT:
            plugins.check_not_apart(plugins.TRAINERS, name, f"the trainer {name!r}")
            known = (ROLLOUT, *plugins.names(plugins.TRAINERS))
            hint = nearest(name, known) or f"; use {', '.join(known)}"
            raise UsageError(f"trainer={name!r} is unknown{hint}")
    return config


def _with_own_agent(
    changed: ExperimentConfig, config: ExperimentConfig, trainer: str
) -> ExperimentConfig:
    """Return what a trainer changed, with its own agent if its hyper-parameters are others.

    Raises:
      UsageError: Nothing would say that the agent inside is one of a user's own.
    """
    own = config.agent_class
    if own is None or type(changed.agent) is type(config.agent):
        return changed
    if getattr(config.agent, "agent_class", None) != own:
        raise UsageError(
            f"agent={own!r} cannot be inside the trainer {trainer!r}: its hyper-parameters, "
            f"{type(config.agent).__name__}, do not name it; make them a subclass of AgentConfig "
            f"with agent_class = {own!r}"
        )
    return dataclasses.replace(changed, agent_class=None)
