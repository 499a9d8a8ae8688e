"""``sebulba.check_env``: what is wrong with an environment."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from sebulba.diagnosis.checks import Begun, Done
from sebulba.diagnosis.finding import Finding, Report
from sebulba.diagnosis.isolation import isolated_findings
from sebulba.diagnosis.printing import collect
from sebulba.errors import UsageError


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

    In a process of its own, which may hang or be aborted by native code.

    Args:
      env: What ``make_env_factory`` takes.
      num_envs: Environments of the vector.
      num_steps: Steps of a walk; fewer where they are slow.
      seed: An int32.
      timeout_s: Longest that one check may take.
      **options: Those of ``make_env_factory``.

    Returns:
      The report; ``print`` shows it, ``problems`` is what must be mended.

    Raises:
      UsageError: There is no such environment, or an argument breaks a rule.
    """
    events = env_findings(
        env, num_envs=num_envs, num_steps=num_steps, seed=seed, timeout_s=timeout_s, options=options
    )
    return collect(getattr(env, "__qualname__", str(env)), events)


def env_findings(
    env: Any, *, timeout_s: float, **arguments: Any
) -> Iterator[Begun | Done | Finding]:
    """Yield what ``check_env`` finds, as it finds it.

    Args:
      env: What ``make_env_factory`` takes.
      timeout_s: Longest that one check may take.
      **arguments: Of ``Subject``.
    """
    if not (timeout_s > 0 and math.isfinite(timeout_s)):
        raise UsageError(f"timeout={timeout_s} must be a positive number of seconds, such as 60")
    suite = "sebulba.diagnosis.env_checks:checks"
    return isolated_findings(suite, (env, {**arguments, "timeout_s": timeout_s}), timeout_s)
