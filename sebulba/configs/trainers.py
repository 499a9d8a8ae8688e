"""``--trainer NAME ...``: trainers around the loop of an experiment, the outermost first."""

from __future__ import annotations

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
            config = plugins.load(plugins.TRAINERS, entry)(config)
        elif name != ROLLOUT:
            plugins.check_not_apart(plugins.TRAINERS, name, f"the trainer {name!r}")
            known = (ROLLOUT, *plugins.names(plugins.TRAINERS))
            hint = nearest(name, known) or f"; use {', '.join(known)}"
            raise UsageError(f"trainer={name!r} is unknown{hint}")
    return config
