"""``sebulba.check_env`` and ``sebulba.check_agent``: what is wrong with an environment or agent."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from sebulba.tools.check.checks import Event, Finding, Report
from sebulba.tools.check.isolation import isolated_findings


def check_env(
    env: Any,
    *,
    num_envs: int = 4,
    num_steps: int = 500,
    seed: int = 0,
    timeout_s: float = 60.0,
    **options: Any,
) -> Report:
    """Play an environment as a run does and report what is wrong with it.

    The environment is played in a process of its own, which may hang or be aborted by native code.

    Args:
      env: Environment, as ``make_env_factory`` takes it.
      num_envs: Number of environments in a vector.
      num_steps: Steps of a walk; fewer are made if they are slow.
      seed: An int32.
      timeout_s: Longest time that one check may take.
      **options: Options of ``make_env_factory``.

    Returns:
      The report, which ``print`` shows; ``problems`` must be mended.

    Raises:
      UsageError: There is no such environment, or an argument breaks a rule.
    """
    given = {"num_envs": num_envs, "num_steps": num_steps, "seed": seed, "options": options}
    return _collected(env, env_findings(env, timeout_s=timeout_s, **given))


def check_agent(
    agent: Any,
    *,
    config: Any = None,
    env: Any = None,
    steps_per_cycle: int | None = None,
    seed: int = 0,
    timeout_s: float = 120.0,
) -> Report:
    """Look at what an agent's methods return, train it a little, and report what is wrong with it.

    Everything happens in a process of its own, on CPU devices.

    Args:
      agent: A subclass of ``sebulba.Agent``; a configuration whose ``agent_class`` names one, or
        its class; a function of an EnvSpec that returns an agent; an agent; or
        ``"module:attribute"`` of one of these.
      config: For a subclass of ``Agent``: its configuration, a class or function that makes one,
        or ``"module:attribute"``. None takes the one that it belongs to, such as ``MyConfig()`` for
        a subclass of ``sebulba.Agent[MyConfig]``.
      env: Environment whose spaces it is checked with, as ``make_env_factory`` takes it; None takes
        small probe environments of vector observations.
      steps_per_cycle: T; None finds one that the agent's ``check_run`` takes.
      seed: An int32.
      timeout_s: Longest time that one check may take.

    Returns:
      The report, which ``print`` shows; ``problems`` must be mended.

    Raises:
      UsageError: There is no such agent, or an argument breaks a rule.
    """
    given = {"config": config, "env": env, "steps_per_cycle": steps_per_cycle, "seed": seed}
    return _collected(agent, agent_findings(agent, timeout_s=timeout_s, **given))


def _findings(suite: str, subject: Any, *, timeout_s: float, **arguments: Any) -> Iterator[Event]:
    """Yield the findings of a suite as they come."""
    function = f"sebulba.tools.check.{suite}:checks"
    return isolated_findings(function, (subject, {**arguments, "timeout_s": timeout_s}), timeout_s)


env_findings = functools.partial(_findings, "env_checks")
agent_findings = functools.partial(_findings, "agent_checks")


def _collected(subject: Any, events: Iterator[Event]) -> Report:
    title = getattr(subject, "__qualname__", str(subject))
    return Report(title, tuple(event for event in events if isinstance(event, Finding)))
