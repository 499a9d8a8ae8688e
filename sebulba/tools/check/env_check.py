"""``sebulba.check_env``: what is wrong with an environment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sebulba.tools.check.checks import Event
from sebulba.tools.check.finding import Report
from sebulba.tools.check.isolation import isolated_findings
from sebulba.tools.check.printing import collect


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
    events = env_findings(
        env, num_envs=num_envs, num_steps=num_steps, seed=seed, timeout_s=timeout_s, options=options
    )
    return collect(getattr(env, "__qualname__", str(env)), events)


def env_findings(env: Any, *, timeout_s: float, **arguments: Any) -> Iterator[Event]:
    """Yield the findings of ``check_env`` as they come.

    Args:
      env: Environment, as ``make_env_factory`` takes it.
      timeout_s: Longest time that one check may take.
      **arguments: Further arguments of ``Subject``.
    """
    suite = "sebulba.tools.check.env_checks:checks"
    return isolated_findings(suite, (env, {**arguments, "timeout_s": timeout_s}), timeout_s)
