"""Processes that stand in for hosts, on loopback."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEADLINE_S = 500.0
"""Against hangs only: many tests share the machine."""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Hosts:
    """Started processes and the files that they print into."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen] = []

    def start(self, *words: Sequence[str]) -> list[subprocess.Popen]:
        """Start ``python -m`` with each list of words; one is one host."""
        started = []
        for of_host in words:
            out = self._folder / f"printed-{len(self._processes)}"
            with out.open("wb") as file:
                process = subprocess.Popen(
                    [sys.executable, "-m", *of_host],
                    cwd=ROOT,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            process.printed = out  # type: ignore[attr-defined]
            self._processes.append(process)
            started.append(process)
        return started

    def end(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()


@contextlib.contextmanager
def hosts(folder: Path) -> Iterator[Hosts]:
    """Yield what starts hosts; whatever happens, none of them outlives the block."""
    started = Hosts(folder)
    try:
        yield started
    finally:
        started.end()


def printed(process: subprocess.Popen) -> str:
    return process.printed.read_text()  # type: ignore[attr-defined]
