"""The errors that Sebulba raises on purpose; each names the value, the rule and the remedy."""

from __future__ import annotations


class UsageError(ValueError):
    """An argument, an option or a configuration breaks a rule (exit code 2)."""


class EnvError(RuntimeError):
    """An environment broke its contract: shape, dtype, NaN, a dead worker (exit code 3)."""


class ActionError(EnvError):
    """An agent's action is not in the environment's action space (exit code 3)."""


class NotFiniteError(FloatingPointError):
    """A loss or a gradient is NaN or infinite (exit code 4)."""


class HangError(RuntimeError):
    """A thread did not end when it was asked to (exit code 5)."""
