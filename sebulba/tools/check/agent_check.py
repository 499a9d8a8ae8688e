"""``sebulba.check_agent``: what is wrong with an agent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sebulba.tools.check.checks import Event
from sebulba.tools.check.finding import Report
from sebulba.tools.check.isolation import isolated_findings
from sebulba.tools.check.printing import collect


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
    events = agent_findings(
        agent,
        config=config,
        env=env,
        steps_per_cycle=steps_per_cycle,
        seed=seed,
        timeout_s=timeout_s,
    )
    return collect(getattr(agent, "__qualname__", str(agent)), events)


def agent_findings(agent: Any, *, timeout_s: float, **arguments: Any) -> Iterator[Event]:
    """Yield the findings of ``check_agent`` as they come.

    Args:
      agent: Agent, as ``check_agent`` takes it.
      timeout_s: Longest time that one check may take.
      **arguments: Further arguments of ``AgentSubject``.
    """
    suite = "sebulba.tools.check.agent_checks:checks"
    return isolated_findings(suite, (agent, {**arguments, "timeout_s": timeout_s}), timeout_s)
