"""The base of all configurations of agents, and the agent that a configuration names."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from sebulba.errors import UsageError

if TYPE_CHECKING:
    from sebulba.agent import Agent
    from sebulba.agents.configs.frozen import FrozenConfig
    from sebulba.types import EnvSpec, MultiAgentSpec


@dataclasses.dataclass(frozen=True)
class AgentConfig:
    """The hyper-parameters of an agent; a subclass adds them and names the agent."""

    agent_class: ClassVar[str] = ""
    """The agent, as ``module:class``; the module is imported when the agent is made."""


def make_agent(spec: EnvSpec | MultiAgentSpec, config: AgentConfig | FrozenConfig) -> Agent:
    """Return the agent that ``config`` names.

    Where ``spec`` has many agents and ``config`` is for one, every group has such an agent, which
    its slots share. Parts of observations that are ``eval_only`` are left out for an agent that
    does not use them.

    Raises:
      UsageError: It names none, or the agent cannot take the spaces of ``spec``.
    """
    agent_class = agent_class_of(config)
    if hasattr(spec, "groups") and not hasattr(config, "agents"):
        configs = importlib.import_module("sebulba.agents.configs.multi_agent")
        return make_agent(spec, configs.MultiAgentConfig({configs.EVERY: config}))
    if getattr(spec, "eval_only", ()) and not agent_class.uses_eval_only(config):
        spec = spec.policy_spec  # type: ignore[union-attr]
    return agent_class(spec, config)


def agent_class_of(config: AgentConfig | FrozenConfig) -> Any:
    """Return the class that ``config`` names; raise UsageError if it names none."""
    module, _, name = getattr(config, "agent_class", "").partition(":")
    if not name:
        raise UsageError(
            f"config={config!r} belongs to no agent; use a subclass of AgentConfig whose "
            "agent_class is 'module:class', such as ImpalaConfig()"
        )
    return getattr(importlib.import_module(module), name)


def agent_configs() -> dict[str, type[AgentConfig]]:
    """Return all configurations that name an agent, by class name.

    These are those of this package, and those from elsewhere that have been imported.
    """
    package = importlib.import_module("sebulba.agents.configs")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    found = [cls for cls in _subclasses(AgentConfig) if cls.agent_class]
    # Those of this package last, so that no class from elsewhere takes the name of one of them.
    found.sort(key=lambda cls: cls.__module__.startswith(f"{package.__name__}."))
    return {cls.__name__: cls for cls in found}


def _subclasses(cls: type[AgentConfig]) -> Iterator[type[AgentConfig]]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
