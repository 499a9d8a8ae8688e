"""Tables and numbers of the pages that ``benchmarks report`` writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def show(value: Any) -> str:
    """Return a value as the page shows it: numbers with four digits, or whole from 1000 on."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def duration(seconds: float) -> str:
    """Return seconds as the pages show them: in minutes from 100 on."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def differences(figures: Mapping[str, list[float]], of: str, minus: str) -> list[float]:
    """Return the differences ``of - minus``, one a round."""
    return [a - b for a, b in zip(figures[of], figures[minus], strict=True)]
