"""One timer with fixed phase names, for metrics, the progress panel and the benchmark alike."""

from __future__ import annotations

import time
from types import TracebackType


class _Phase:
    """Adds the seconds between entering and leaving; reusable, not reentrant."""

    __slots__ = ("_reading",)

    def __init__(self) -> None:
        # (seconds of finished visits, when the present one began): replaced whole, so that
        # another thread never reads the one without the other.
        self._reading: tuple[float, float | None] = (0.0, None)

    def __enter__(self) -> None:
        self._reading = (self._reading[0], time.perf_counter())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        finished, began = self._reading
        self._reading = (finished + time.perf_counter() - (began or 0.0), None)

    def present_s(self) -> float | None:
        """Return for how long it has been on; None if it is not."""
        began = self._reading[1]
        return None if began is None else time.perf_counter() - began

    def seconds(self) -> float:
        """Return the seconds so far, those of a phase that is still on included."""
        finished, began = self._reading
        return finished if began is None else finished + time.perf_counter() - began


class PhaseTimer:
    """Where one thread's time goes: ``with timer.phase("act"): ...``.

    Written by its own thread; others may read it at any time.
    """

    def __init__(self, *phases: str) -> None:
        """Make a timer with exactly these phases; another name is a KeyError."""
        self._phases = {name: _Phase() for name in phases}

    def phase(self, name: str) -> _Phase:
        """Return the context manager that adds to ``name``."""
        return self._phases[name]

    def seconds(self) -> dict[str, float]:
        """Return the seconds spent in each phase since the timer was made."""
        return {name: phase.seconds() for name, phase in self._phases.items()}

    def present(self) -> tuple[str, float] | None:
        """Return the innermost phase that is on, and for how many seconds; None between phases."""
        on = [
            (seconds, name)
            for name, phase in self._phases.items()
            if (seconds := phase.present_s()) is not None
        ]
        if not on:
            return None
        seconds, name = min(on)
        return name, seconds
