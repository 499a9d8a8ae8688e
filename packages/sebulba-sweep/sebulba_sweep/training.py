"""One training of a trial: a process, and what its metrics say while it runs."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from sebulba.metrics.plots import record_of
from sebulba.support.files import check_regular

TRAIN = (sys.executable, "-m", "sebulba_sweep.trial_process", "train")
"""What a training is started by."""
STOP_S = 300.0
"""Seconds that a training may take to be saved and end, after which it is killed."""


class Measure(NamedTuple):
    """Which returns of a run count, and how often."""

    value: str
    """Key of the mean return in the records of a run."""
    env_steps: str
    """Key of the environment steps at which it was measured."""
    every: float
    """Environment steps of an interval; the first return in each counts."""


class Training:
    """A process that trains."""

    def __init__(
        self, words: Sequence[str], folder: Path, measure: Measure, gpu: str | None = None
    ) -> None:
        """Start it, or let it go on where it was; what it prints goes into a file beside
        ``folder``. ``gpu`` is the only one that it sees; None lets it see all."""
        shares = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # others train beside it
        sees = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
        self.folder = folder
        self.last: float | None = None
        """The newest mean return."""
        self._measure = measure
        self._read = 0
        self._stop_at = math.inf
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                [*TRAIN, *words, f"--run-dir={folder}", "--resume"],
                env={**shares, **os.environ, **sees},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C comes by the sweep, which waits for it
            )

    @property
    def log(self) -> Path:
        """What it prints."""
        return self.folder.with_name(f"{self.folder.name}.log")

    def ended(self) -> int | None:
        """Return its exit code, or None while it runs."""
        if time.monotonic() > self._stop_at and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.poll()

    def stop(self) -> None:
        """Ask it to be saved and to end."""
        if self._stop_at == math.inf:
            self._stop_at = time.monotonic() + STOP_S
            self._process.terminate()

    def new_returns(self) -> dict[int, float]:
        """Return the mean returns since the last call, by the number of their interval."""
        found: dict[int, float] = {}
        for line in self._new_lines():
            record = record_of(line) or {}
            value, at = record.get(self._measure.value), record.get(self._measure.env_steps)
            if isinstance(value, int | float) and math.isfinite(value) and at is not None:
                self.last = float(value)
                found.setdefault(int(at // self._measure.every), self.last)
        return found

    def _new_lines(self) -> list[bytes]:
        file = self.folder / "metrics.jsonl"
        check_regular(file, links=False)
        with contextlib.suppress(FileNotFoundError), open(file, "rb") as f:
            if os.fstat(f.fileno()).st_size < self._read:
                self._read = 0  # a run that goes on has dropped what came after its checkpoint
            f.seek(self._read)
            whole = f.read().rpartition(b"\n")[0]
            self._read += len(whole) + bool(whole)
            return whole.split(b"\n")
        return []

    def last_words(self) -> str:
        """Return the last line that it printed."""
        lines = self.log.read_text(errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "")
