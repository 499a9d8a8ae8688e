"""Rules that values of configurations share."""

from __future__ import annotations

from sebulba.errors import UsageError


def at_least(least: int, name: str, value: int | None) -> None:
    """Raise UsageError if ``value`` is below ``least``; None is not."""
    if value is not None and value < least:
        raise UsageError(f"{name}={value} must be at least {least}; use {least} or more")


def at_most(most: int, name: str, value: int) -> None:
    """Raise UsageError if ``value`` is above ``most``."""
    if value > most:
        raise UsageError(f"{name}={value} must be at most {most}; use {most} or less")
