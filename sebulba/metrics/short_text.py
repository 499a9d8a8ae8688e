"""Numbers as short text. Free of JAX."""

from __future__ import annotations

import math


def number(value: float | None) -> str:
    """Return a number in about four digits; a dash if it is not known."""
    if value is None or not math.isfinite(value):
        return "-"
    magnitude = abs(value)
    if magnitude >= 10_000:
        return count(value)
    if magnitude >= 100:
        return f"{value:.1f}"
    return f"{value:.3g}" if magnitude < 0.01 and value else f"{value:.3f}".rstrip("0").rstrip(".")


def count(value: float | None) -> str:
    """Return a count in about three digits with k, M or G; a dash if it is not known."""
    if value is None or not math.isfinite(value):
        return "-"
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            scaled = value / (1e3 if unit == "k" else limit)
            return f"{scaled:.3g}{unit}" if scaled < 100 else f"{scaled:.0f}{unit}"
    return f"{value:.0f}"


def duration(seconds: float) -> str:
    """Return seconds as m:ss or h:mm:ss."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def short(value: float) -> str:
    """Return a number of an axis with k or M: 0, 500, 2.5k, 150k, 1.25M."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:g}{unit}"
    return f"{value:g}"
