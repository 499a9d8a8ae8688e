"""Simulators that a command starts: at most n at a time, begun again when they end."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO

import sebulba

SHIM = """
import contextlib, os, signal, subprocess, sys, threading
try:
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, process_group=0)
except OSError as error:
    print(f"{sys.argv[1]}: {error.strerror}", file=sys.stderr, flush=True)
    os._exit(127)
def kill():
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
def end():
    while os.read(0, 1024):
        pass
    kill()
threading.Thread(target=end, daemon=True).start()
os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
kill()
code = child.wait()
os._exit(code if code >= 0 else 128 - code)
"""
"""Runs a command in a process group of its own. It kills the group when the command ends, and when
its stdin ends: when whoever started it closes the pipe, or is gone."""
LOOK_EVERY_S = 0.05
PAUSE_S = 1.0
"""Between the ends of a simulator and its next start, at least."""
MOST_FRUITLESS = 5
"""Starts in a row after which a simulator that connected to no seat ends the run."""
TAIL = 2000
"""Characters of its output that an error shows."""


class Simulators:
    """Processes of one command."""

    def __init__(self, command: str, count: int, address: str, token: str, seeds: list[int]):
        """Start ``count`` processes.

        Args:
          command: As in a shell, without one; ``{address}``, ``{token}``, ``{seed}`` and
            ``{number}`` are filled in. ``SEBULBA_ADDRESS`` and ``SEBULBA_TOKEN`` are set as well.
          count: How many at a time.
          address: Where they connect.
          token: What they say.
          seeds: One each.

        Raises:
          UsageError: The command has unknown placeholders, or quotes that do not match.
        """
        self._env = os.environ | {"SEBULBA_ADDRESS": address, "SEBULBA_TOKEN": token}
        fields = {"address": address, "token": token}
        self._words = [
            _words(command, fields | {"seed": seeds[k % len(seeds)], "number": k})
            for k in range(count)
        ]
        self.folder = Path(tempfile.mkdtemp(prefix="sebulba-simulators-"))
        """Has the output of each, ``N.log``; kept if one of them ended the run."""
        self.restarts = 0
        self.seated = 0
        """Clients that took a seat so far; whoever welcomes them counts."""
        self.error: sebulba.EnvError | None = None
        """Why no more are started."""
        self._fruitless = [0] * count
        self._seated_before = [0] * count
        self._begun = [0.0] * count
        self._logs: list[IO[bytes]] = [
            open(self.folder / f"{number}.log", "ab")  # noqa: SIM115
            for number in range(count)
        ]
        self._processes = [self._start(number) for number in range(count)]
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="simulators", daemon=True)
        self._thread.start()

    def _start(self, number: int) -> subprocess.Popen:
        self._begun[number] = time.monotonic()
        self._seated_before[number] = self.seated
        return subprocess.Popen(
            [sys.executable, "-c", SHIM, *self._words[number]],
            stdin=subprocess.PIPE,
            stdout=self._logs[number],
            stderr=subprocess.STDOUT,
            env=self._env,
            start_new_session=True,
        )

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_EVERY_S):
            for number, process in enumerate(self._processes):
                is_due = time.monotonic() > self._begun[number] + PAUSE_S
                if process.poll() is None or not is_due:
                    continue
                took_a_seat = self.seated > self._seated_before[number]
                self._fruitless[number] = 0 if took_a_seat else self._fruitless[number] + 1
                if self._fruitless[number] >= MOST_FRUITLESS:
                    self.error = self._gave_up(number, process.returncode)
                    return
                self.restarts += 1
                assert process.stdin is not None
                process.stdin.close()
                self._processes[number] = self._start(number)

    def _gave_up(self, number: int, code: int) -> sebulba.EnvError:
        log = self.folder / f"{number}.log"
        tail = log.read_text(errors="replace")[-TAIL:].strip()
        return sebulba.EnvError(
            f"simulator {number} ended {MOST_FRUITLESS} times (exit code {code}) without "
            f"connecting; its command: {shlex.join(self._words[number])}; its output, in {log}, "
            f"ends with: {tail or 'nothing'}"
        )

    def check(self) -> None:
        """Raise why no more are started."""
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Kill all."""
        self._closed.set()
        self._thread.join()
        for process, log in zip(self._processes, self._logs, strict=True):
            assert process.stdin is not None
            process.stdin.close()
            process.wait()
            log.close()
        if self.error is None:
            shutil.rmtree(self.folder, ignore_errors=True)


def _words(command: str, fields: dict[str, str | int]) -> list[str]:
    try:
        words = [word.format_map(fields) for word in shlex.split(command)]
    except (KeyError, IndexError, ValueError) as error:
        raise sebulba.UsageError(
            f"command={command!r} cannot be read ({error}); placeholders are "
            f"{', '.join(f'{{{name}}}' for name in fields)}, and quotes must match"
        ) from None
    if not words:
        raise sebulba.UsageError("command is empty; name the program of a simulator")
    return words
