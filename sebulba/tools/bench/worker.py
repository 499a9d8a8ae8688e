"""A process that measures when it is asked, and ends with the process that started it.

It stays alive between measurements, so that several processes can be measured in turn without
compiling again.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from sebulba.errors import signal_name
from sebulba.runs.jax_setup import share_accelerator
from sebulba.tools.bench.memory_use import peak_rss_mb

START_TIMEOUT_S = 300.0
"""Longest time for imports, compiling and the first cycles."""
POLL_S = 0.1
CLOSE_S = 5.0


class Meter(Protocol):
    """What a worker measures with; made in its process."""

    def warm_up(self) -> object:
        """Compile and get ready."""
        ...

    def measure(self) -> Any:
        """Return a measurement."""
        ...


class WorkerError(Exception):
    """A worker cannot measure what it was asked to; the message says why."""


class Worker(contextlib.AbstractContextManager):
    """A process with a ``Meter``; a context manager, which ends the process."""

    def __init__(
        self,
        make_meter: Callable[..., Meter],
        *arguments: Any,
        timeout_s: float,
        memory_limit_mb: float | None = None,
    ) -> None:
        """Start the process, which warms up in the background, and is ended above the memory limit.
        ``make_meter`` must be importable by name; ``timeout_s`` is that of a measurement.
        """
        self._timeout_s = timeout_s
        self._limit_mb = memory_limit_mb
        context = multiprocessing.get_context("spawn")
        self._pipe, child = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(make_meter, arguments, child), name="worker", daemon=True
        )
        self._process.start()
        child.close()

    def ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until it can be measured, at most so many seconds.

        Raises:
          WorkerError: The process cannot run, takes too much memory or takes too long.
        """
        self._answer(timeout_s)

    def measure(self) -> Any:
        """Return a measurement; errors are those of ``ready``."""
        self.ask()
        return self.answer()

    def ask(self) -> None:
        """Ask for a measurement, which ``answer`` returns.

        Raises:
          WorkerError: The process has ended.
        """
        try:
            self._pipe.send(True)
        except OSError as error:
            raise WorkerError(f"its process ended ({self._process.exitcode})") from error

    def answer(self) -> Any:
        """Return the measurement that was asked for; errors are those of ``ready``."""
        return self._answer(self._timeout_s)

    def _answer(self, timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        while not self._pipe.poll(POLL_S):
            self._check_memory(peak_rss_mb(self._process.pid))
            if time.monotonic() > deadline:
                self.close()
                raise WorkerError(f"it took longer than {timeout_s:.0f} s")
        try:
            answer = self._pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            self._process.join(CLOSE_S)
            raise WorkerError(_ending(self._process.exitcode)) from error
        if isinstance(answer, WorkerError):
            raise answer
        self._check_memory(peak_rss_mb(self._process.pid))
        return answer

    def _check_memory(self, used_mb: float) -> None:
        if self._limit_mb is not None and used_mb > self._limit_mb:
            self.close()
            raise WorkerError(f"{used_mb:,.0f} MB are above the limit of {self._limit_mb:,.0f} MB")

    def close(self) -> None:
        """End the process, whatever it is doing; may be called twice."""
        self._pipe.close()
        self._process.kill()
        self._process.join(CLOSE_S)

    def __exit__(self, *exception: object) -> None:
        self.close()


def _ending(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        name = signal_name(-exit_code)
        why = ", which is how the system ends what takes too much memory" if exit_code == -9 else ""
        return f"its process was ended by {name}{why}"
    return f"its process ended with code {exit_code}"


def _serve(make_meter: Callable[..., Meter], arguments: tuple, pipe: Connection) -> None:
    """Warm up, and measure at each message until the pipe closes; the target of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the parent closes the pipe
    threading.Thread(target=_end_with_parent, daemon=True).start()
    share_accelerator()
    try:
        meter = make_meter(*arguments)
        meter.warm_up()
        pipe.send(None)
        while pipe.recv():
            pipe.send(meter.measure())
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the parent closed the pipe
    except Exception as error:
        pipe.send(WorkerError(_in_words(error)))
    finally:
        # Threads inside XLA or an environment must not delay the end.
        os._exit(0)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _in_words(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    if "RESOURCE_EXHAUSTED" in lines[0] or isinstance(error, MemoryError):
        return f"out of memory ({lines[0][:200]})"
    return f"{type(error).__name__}: {lines[0][:300]}"
