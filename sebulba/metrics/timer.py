"""One timer with fixed phase names, for metrics, the progress panel and the benchmark alike."""

from __future__ import annotations

import time


class _Phase:
    """Adds up the seconds between entering and leaving; reusable, not reentrant."""

    __slots__ = ("_reading",)

    def __init__(self) -> None:
        # (seconds of finished visits, when the present visit began). The tuple is replaced as a
        # whole, so that another thread never reads values that do not belong together.
        self._reading: tuple[float, float | None] = (0.0, None)

    def __enter__(self) -> None:
        self._reading = (self._reading[0], time.perf_counter())

    def __exit__(self, *exception: object) -> None:
        finished, began = self._reading
        self._reading = (finished + time.perf_counter() - (began or 0.0), None)

    def begin_again(self) -> None:
        """End this visit and begin the next: a sign of life between parts of long work."""
        finished, began = self._reading
        now = time.perf_counter()
        self._reading = (finished + now - (began or now), now)

    def present_s(self) -> float | None:
        """Return for how many seconds the phase has been on; None if it is not on."""
        began = self._reading[1]
        return None if began is None else time.perf_counter() - began

    def seconds(self) -> float:
        """Return the seconds so far, including those of a visit that has not ended."""
        finished, began = self._reading
        return finished if began is None else finished + time.perf_counter() - began


class PhaseTimer:
    """Measures where one thread's time goes: ``with timer.phase("act"): ...``.

    Only that thread enters phases; others may read the timer at any time.
    """

    def __init__(self, *phases: str) -> None:
        """Make a timer with exactly these phases; any other name raises KeyError."""
        self._phases = {name: _Phase() for name in phases}

    def phase(self, name: str) -> _Phase:
        """Return the context manager that adds to the phase ``name``."""
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
