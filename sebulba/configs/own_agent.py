"""An experiment with an agent of one's own."""

from __future__ import annotations

import dataclasses
from typing import Any

from sebulba.agents.configs import AgentConfig, OptimizerConfig
from sebulba.agents.configs.agent_config import config_of, own_agent_class
from sebulba.configs.experiment import ExperimentConfig
from sebulba.errors import UsageError, shown
from sebulba.support.user_code import class_name


def with_agent(config: ExperimentConfig, name: str) -> ExperimentConfig:
    """Return ``config`` with an agent of one's own.

    Its hyper-parameters are those of ``config`` where they are of its kind, and else its defaults.

    Args:
      config: Any experiment.
      name: ``module:class``.

    Raises:
      UsageError: It names no class of agents, or one that nothing could import again.
    """
    agent_class = own_agent_class(name)
    own: Any = config_of(agent_class) or AgentConfig()
    if not dataclasses.is_dataclass(own):
        raise UsageError(
            f"agent={name!r} has the hyper-parameters {shown(own)}, which must be a dataclass; "
            "make them one"
        )
    class_name(type(own))
    if type(config.agent) is type(own):
        own = config.agent
    anneals = isinstance(getattr(own, "optimizer", None), OptimizerConfig)
    return dataclasses.replace(
        config,
        agent=own,
        agent_class=class_name(agent_class),
        anneal_learning_rate=config.anneal_learning_rate and anneals,
    )
