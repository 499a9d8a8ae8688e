"""The command line in processes of its own, which can be killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sebulba.checkpoints.store import CheckpointStore
from sebulba.errors import CheckpointError

ROOT = Path(__file__).parents[2]
DEADLINE_S = 300.0
"""Against hangs only."""
POLL_S = 0.01


class Whole(NamedTuple):
    """A checkpoint that is whole."""

    env_steps: int
    """Its number."""
    counters: Mapping[str, Any]
    """As they were saved."""
    experience: int | None
    """Number of the experience that goes with it, where that is kept apart."""


class Child:
    """A ``sebulba`` command in a process of its own; a context manager leaves none behind."""

    def __init__(
        self,
        words: Sequence[str],
        log: Path,
        module: str = "sebulba",
        *,
        in_group_of_its_own: bool = False,
    ) -> None:
        """Start it; what it prints goes into ``log``."""
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
            # As in the background of a script; children would ignore it, too.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self._log = log
        self._started = time.monotonic()
        with open(log, "wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", module, *words],
                cwd=log.parent,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0 if in_group_of_its_own else None,
            )

    @property
    def printed(self) -> str:
        """All that it printed so far."""
        return self._log.read_text(errors="replace")

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    @property
    def age_s(self) -> float:
        """Seconds since it was started."""
        return time.monotonic() - self._started

    @property
    def has_ended(self) -> bool:
        """It ended by itself, or was killed."""
        return self._process.poll() is not None

    def send(self, which: int) -> None:
        """Send a signal."""
        self._process.send_signal(which)

    def send_to_group(self, which: int) -> None:
        """Send a signal to all processes of its own group, as a scheduler and a terminal do."""
        os.killpg(self.pid, which)

    def wait_until(self, condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> bool:
        """Wait until ``condition`` holds; False if the process ended before.

        Raises:
          TimeoutError: Neither happened.
        """
        deadline = time.monotonic() + deadline_s
        while not condition():
            if self.has_ended:
                return condition()
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing within {deadline_s:.0f} s:\n{self.printed}")
            time.sleep(POLL_S)
        return True

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        """Wait for its end and return its exit code; negative is a signal.

        Raises:
          TimeoutError: It does not end.
        """
        try:
            return self._process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            # faulthandler is not on: the log has to do.
            raise TimeoutError(f"no end within {deadline_s:.0f} s:\n{self.printed}") from None

    def kill(self) -> None:
        """Kill it with -9 and wait for its end."""
        self.send(signal.SIGKILL)
        self._process.wait(DEADLINE_S)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exception: object) -> None:
        if not self.has_ended:
            self.kill()


def newest_whole(checkpoints: Path) -> Whole | None:
    """Return the checkpoint that a resumed run has to use, None where none is whole."""
    store, experiences = (CheckpointStore(f) for f in (checkpoints, checkpoints / "experience"))
    for number in reversed(store.numbers()):
        try:
            record = store.load(number).record
            if record["experience"] is not None:
                experiences.load(record["experience"])
        except CheckpointError:
            continue
        return Whole(number, record["counters"], record["experience"])
    return None


def training_began(run: Path) -> Callable[[], bool]:
    """Return a condition: more metrics are written than there are now."""
    metrics = run / "metrics.jsonl"

    def size() -> int:
        return metrics.stat().st_size if metrics.exists() else 0

    before = size()
    return lambda: size() > before
