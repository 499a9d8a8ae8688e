"""One timer with fixed phase names, for metrics, the progress panel and the benchmark alike."""

from __future__ import annotations

import time
from types import TracebackType


class _Phase:
    """Adds the seconds between entering and leaving; reusable, not reentrant."""

    __slots__ = ("_began", "_left")

    def __init__(self) -> None:
        self._left = 0.0
        self._began: float | None = None

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        began, self._began = self._began, None
        assert began is not None
        self._left += time.perf_counter() - began

    def seconds(self) -> float:
        """Return the seconds so far, those of a phase that is still on included."""
        began = self._began
        return self._left + (0.0 if began is None else time.perf_counter() - began)


class PhaseTimer:
    """Where one thread's time goes: ``with timer.phase("act"): ...``.

    Written by its own thread; others may read ``seconds()`` at any time.
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
