"""The errors that Sebulba raises on purpose; each names the value, the rule and the remedy."""

from __future__ import annotations

import traceback
from typing import Any


class UsageError(ValueError):
    """An argument, an option or a configuration breaks a rule (exit code 2)."""


class EnvError(RuntimeError):
    """An environment broke its contract: shape, dtype, NaN, a dead worker (exit code 3)."""


class ActionError(EnvError):
    """An agent's action is not in the environment's action space (exit code 3)."""


class NotFiniteError(FloatingPointError):
    """A loss, a gradient or another metric of an update is not finite (exit code 4)."""


class HangError(RuntimeError):
    """A thread did not end when it was asked to, or was silent for too long (exit code 5)."""


class EnvHangError(EnvError, HangError):
    """An environment did not return in time (exit code 5)."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or cannot be read back whole (exit code 6)."""


def text_of(error: BaseException) -> str:
    """Return ``Type: message``, even if the ``__str__`` of a user's exception raises."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__}: (its __str__ raises)"


def shown(value: Any) -> str:
    """Return ``repr(value)`` in one line of at most 80 characters, even if ``__repr__`` raises."""
    try:
        text = " ".join(repr(value).split())
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 80 else f"{text[:77]}..."


def is_env_failure(error: BaseException) -> bool:
    """Tell whether ``error`` was raised in an environment or in its adapter.

    An action outside the action space is no failure of the environment: the agent chose it.
    """
    if isinstance(error, EnvError):
        return not isinstance(error, ActionError)
    if isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration):
        error = error.__cause__  # Python turns one that leaves a generator into a RuntimeError
    return any(
        frame.f_globals.get("__name__", "").startswith("sebulba.envs.")
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )
