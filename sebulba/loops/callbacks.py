"""Callbacks of a loop: what is done at times, at a new best return, and when a run ends early.

``GymnasiumLoop(..., callbacks=[...])`` takes functions of a record of metrics (``Callback`` in
``sebulba/types.py``). These here are made for the usual cases; ``observe_cycle`` sees every
trajectory instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

from sebulba.metrics.counters import EPISODES_AVERAGED
from sebulba.support.checks import require, require_number, require_size
from sebulba.types import Callback

Of = Literal["training", "evaluation"]
"""Which return counts: the mean of the last 100 training episodes, once there are so many, or that
of an evaluation."""

Call = Callable[[Mapping[str, Any]], object]
"""Is given the record of metrics."""


def every_env_steps(number: int, call: Call) -> Callback:
    """Call ``call`` with the first record after every multiple of ``number`` env steps.

    Raises:
      UsageError: ``number`` is not positive.
    """
    return _every("env_steps", number, call)


def every_updates(number: int, call: Call) -> Callback:
    """Call ``call`` with the first record after every multiple of ``number`` updates.

    Records come once a window of metrics, so several multiples in one window are one call;
    ``observe_cycle`` sees every trajectory.

    Raises:
      UsageError: ``number`` is not positive.
    """
    return _every("updates", number, call)


def on_new_best(call: Call, of: Of = "evaluation") -> Callback:
    """Call ``call`` with the record of every return that is above all before it."""
    _check_of(of)
    best = -math.inf

    def callback(record: Mapping[str, Any]) -> None:
        nonlocal best
        if (value := _return(record, of)) is not None and value > best:
            best = value
            call(record)

    return callback


def stop_at_return(goal: float, of: Of = "training") -> Callback:
    """End the run when its return reaches ``goal``.

    Raises:
      UsageError: ``goal`` is no finite number.
    """
    require_number("goal", goal, -math.inf, math.inf, "use 475.0")
    _check_of(of)

    def callback(record: Mapping[str, Any]) -> str | None:
        value = _return(record, of)
        if value is None or value < goal:
            return None
        return f"the return of {of} is {value:g}, and {goal:g} was the goal"

    return callback


def stop_without_improvement(evaluations: int) -> Callback:
    """End the run when so many evaluations in a row were not above the best before them.

    Raises:
      UsageError: ``evaluations`` is not positive.
    """
    require_size("evaluations", evaluations, 1, "use 10")
    best, since = -math.inf, 0

    def callback(record: Mapping[str, Any]) -> str | None:
        nonlocal best, since
        if (value := _return(record, "evaluation")) is None:
            return None
        since = 0 if value > best else since + 1
        best = max(best, value)
        if since < evaluations:
            return None
        return f"{since} evaluations in a row were not above {best:g}"

    return callback


def stop_after(seconds: float) -> Callback:
    """End the run when it has trained for so long, in all its processes.

    Raises:
      UsageError: ``seconds`` is not positive.
    """
    require_number("seconds", seconds, 0, math.inf, "use 3600")

    def callback(record: Mapping[str, Any]) -> str | None:
        return f"{seconds:g} s are over" if record["seconds"] >= seconds else None

    return callback


def _every(counter: str, number: int, call: Call) -> Callback:
    require_size("number", number, 1, "use 100_000")
    passed = 0

    def callback(record: Mapping[str, Any]) -> None:
        nonlocal passed
        if (now := record[counter] // number) > passed:
            passed = now
            call(record)

    return callback


def _return(record: Mapping[str, Any], of: Of) -> float | None:
    """Return the return that a record has, or None."""
    if of == "evaluation":
        return record.get("eval_return_mean")
    if record.get("episodes_averaged", 0) < EPISODES_AVERAGED:
        return None
    return record["episode_return_mean"]


def _check_of(of: str) -> None:
    rule = "must be 'training' or 'evaluation'"
    require(of in ("training", "evaluation"), "of", of, rule, "use 'evaluation'")
