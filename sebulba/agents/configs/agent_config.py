"""The base of all configurations of agents, and the agent that a configuration names."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import pkgutil
import typing
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from sebulba.errors import UsageError, shown
from sebulba.support.user_code import class_name, load_attribute

if TYPE_CHECKING:
    from sebulba.agent import Agent
    from sebulba.agents.configs.frozen import FrozenConfig
    from sebulba.types import EnvSpec, MultiAgentSpec


@dataclasses.dataclass(frozen=True)
class AgentConfig:
    """The hyper-parameters of an agent; a subclass adds them and names the agent."""

    agent_class: ClassVar[str] = ""
    """The agent, as ``module:class``; the module is imported when the agent is made."""

    def fitted(self, num_envs: int) -> AgentConfig:
        """Return the hyper-parameters with which a memory has minibatches of whole environments."""
        minibatches: int = getattr(self, "minibatches", 1)
        if not getattr(self, "lstm_size", 0) or not num_envs % minibatches:
            return self
        fits = max(n for n in range(1, minibatches) if num_envs % n == 0)
        return dataclasses.replace(self, minibatches=fits)  # type: ignore[call-arg]


def make_agent(
    spec: EnvSpec | MultiAgentSpec,
    config: AgentConfig | FrozenConfig,
    agent_class: str | None = None,
) -> Agent:
    """Return the agent that ``config`` names.

    Where ``spec`` has many agents and ``config`` is for one, every group has such an agent, which
    its slots share. Parts of observations that are ``eval_only`` are left out for an agent that
    does not use them.

    Args:
      spec: What it observes and does.
      config: Its hyper-parameters.
      agent_class: ``module:class`` of another agent with such hyper-parameters; None takes the one
        that ``config`` names.

    Raises:
      UsageError: There is no such agent, or it cannot take the spaces of ``spec``.
    """
    own_class = agent_class_of(config) if agent_class is None else own_agent_class(agent_class)
    if hasattr(spec, "groups") and not hasattr(config, "agents"):
        _check_named_by(config, own_class)
        configs = importlib.import_module("sebulba.agents.configs.multi_agent")
        return make_agent(spec, configs.MultiAgentConfig({configs.EVERY: config}))
    if getattr(spec, "eval_only", ()) and not own_class.uses_eval_only(config):
        spec = spec.policy_spec  # type: ignore[union-attr]
    return own_class(spec, config)


def _check_named_by(config: AgentConfig | FrozenConfig, agent_class: type[Agent]) -> None:
    """Raise UsageError unless the hyper-parameters name the class, by which members are made."""
    if getattr(config, "agent_class", "") != class_name(agent_class):
        raise UsageError(
            f"agent={class_name(agent_class)!r} cannot play in an environment of many agents: its "
            f"hyper-parameters, {type(config).__name__}, do not name it; make them a subclass "
            f"of AgentConfig with agent_class = {class_name(agent_class)!r}"
        )


def agent_class_of(config: Any, what: str = "agent", such_as: str = "ImpalaConfig()") -> Any:
    """Return the class that ``config`` names; raise UsageError if it names none."""
    module, _, name = getattr(config, f"{what}_class", "").partition(":")
    if not name:
        raise UsageError(
            f"config={shown(config)} belongs to no {what}; use a subclass of "
            f"{what.capitalize()}Config whose {what}_class is 'module:class', such as {such_as}"
        )
    return getattr(importlib.import_module(module), name)


def own_agent_class(name: str) -> Any:
    """Import an agent of a user's own.

    Raises:
      UsageError: ``module:attribute`` names no class of agents.
    """
    found = load_attribute("agent", name)
    if not is_agent_class(found):
        raise UsageError(
            f"agent={name!r} names {shown(found)}, not a subclass of sebulba.Agent; name one"
        )
    return found


def is_agent_class(found: Any) -> bool:
    """Tell whether this is a subclass of ``sebulba.Agent``."""
    from sebulba.agent import Agent

    return isinstance(found, type) and issubclass(found, Agent)


def config_of(agent_class: type[Agent]) -> Any:
    """Return the default hyper-parameters of a class of agents, or None if it names none.

    Raises:
      UsageError: They need arguments.
    """
    for make in _makers_of_config(agent_class):
        try:
            return make()
        except TypeError as error:
            raise UsageError(
                f"{make.__name__} needs arguments ({error}); give every field a default, "
                "or give a configuration: config=..., or --config module:attribute"
            ) from error
    return None


def _makers_of_config(agent_class: type[Agent]) -> Iterator[Any]:
    """Yield classes and functions that make hyper-parameters, the most certain first."""
    name = f"{agent_class.__module__}:{agent_class.__qualname__}"
    yield from (cls for cls in agent_configs().values() if cls.agent_class == name)
    for base in agent_class.__mro__:
        if inspect.isfunction(made_by := base.__dict__.get("__init__")):
            given = inspect.signature(made_by).parameters.get("config")
            if given is not None and dataclasses.is_dataclass(type(given.default)):
                yield lambda default=given.default: default
        for generic in base.__dict__.get("__orig_bases__", ()):
            arguments = typing.get_args(generic)
            yield from (one for one in arguments if isinstance(one, type) and one is not Any)
        with contextlib.suppress(NameError):  # an annotation for type checkers alone
            hints = typing.get_type_hints(base.__dict__.get("__init__", object.__init__))
            if dataclasses.is_dataclass(hint := hints.get("config")):
                yield hint


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
