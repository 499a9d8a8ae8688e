"""Checks in a process of their own: an abort or a hang becomes a finding, not the end."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import math
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, Pipe
from typing import IO, Any

import cloudpickle  # a dependency of Gymnasium

from sebulba.errors import UsageError, signal_name
from sebulba.tools.check.checks import (
    Begun,
    Done,
    Event,
    Finding,
    failure,
    note,
    problem,
    run_checks,
)

POLL_S = 0.25
STACK_SHARE = 0.9
"""Share of the deadline after which the process writes down the stacks of its threads."""
START_S = 120.0
"""Seconds that a process may take to import what it needs; the machine may be busy."""


def isolated_findings(suite: str, arguments: tuple, timeout_s: float) -> Iterator[Event]:
    """Run a suite of checks in child processes, a new one after each that died or hung. The suite
    is the ``"module:function"`` that returns them, from arguments that cloudpickle sends.

    Raises:
      UsageError: The function raised it, the arguments cannot be sent, or the time is no time.
    """
    if not (timeout_s > 0 and math.isfinite(timeout_s)):
        raise UsageError(f"timeout={timeout_s} must be a positive number of seconds, such as 60")
    try:
        payload = cloudpickle.dumps((suite, arguments, timeout_s))
    except Exception as error:
        raise UsageError(
            f"the object to check cannot be sent to another process ({error}); name it as "
            "'module:attribute'"
        ) from error
    passed: dict[str, bool] = {}
    skipped: list[Done] = []
    is_done = False
    while not is_done:
        with _Child(payload, passed, timeout_s) as child:
            for event in child.events():
                if isinstance(event, Done):
                    passed[event.name] = event.passed
                    skipped += [event] if event.because else []
                yield event
            is_done = child.is_done
    if skipped:
        names = ", ".join(event.name for event in skipped)
        failed = {name for event in skipped for name in event.because} - {s.name for s in skipped}
        because = ", ".join(name for name in passed if name in failed)
        yield note(f"{names}: these need {because} without a problem", name="not run")


class _Child(contextlib.AbstractContextManager):
    """A process that runs checks and sends what happens."""

    def __init__(self, payload: bytes, passed: dict[str, bool], timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._folder = tempfile.TemporaryDirectory(prefix="sebulba-")
        self._events, writer = Pipe(duplex=False)
        self.is_done = False
        environ = dict(os.environ)
        environ["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        environ["TMPDIR"] = self._folder.name  # a killed process's files are removed with it
        with writer:
            code = f"from sebulba.tools.check.isolation import serve; serve({writer.fileno()})"
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=self._output,
                stderr=self._output,
                pass_fds=[writer.fileno()],
                env=environ,
                start_new_session=True,  # so that it ends together with its workers
            )
        assert self._process.stdin is not None
        # events() finds out if the process has died already.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(cloudpickle.dumps((payload, passed)))
            self._process.stdin.flush()

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._events.close()
        self._output.close()
        self._folder.cleanup()

    def events(self) -> Iterator[Event]:
        """Yield events; if a check hangs or dies, the last is that it is ``Done``."""
        name, timeout_s = "", max(START_S, self._timeout_s)
        while True:
            received = _receive(self._events, self._process, timeout_s)
            if isinstance(received, str):
                yield self._finding_of_end(name or "importing", received, timeout_s)
                if name:
                    yield Done(name, False)
                else:
                    self.is_done = True  # the next process would end in the same way
                return
            match received:
                case Begun():
                    name, timeout_s = received.name, self._timeout_s
                case UsageError():
                    raise received
                case None:
                    self.is_done = True
                    return
            yield received

    def _finding_of_end(self, name: str, how: str, timeout_s: float) -> Finding:
        self._output.seek(max(0, self._output.seek(0, os.SEEK_END) - 65536))
        said = _last_words(self._output.read().decode(errors="replace"))
        said = f" ({said})" if said else ""
        if how == "hung":
            return problem(
                f"no answer within {timeout_s:g} s{said}",
                "repair the code that waits, or pass a larger --timeout",
                name,
            )
        code = self._process.wait()
        signal_ = f"died with signal {-code} ({signal_name(-code)})"
        ended = f"ended with exit code {code}" if code >= 0 else signal_
        return problem(
            f"the process {ended} in this check{said}",
            "repair the native code or its input; it would end a run in the same way",
            name,
        )


def _receive(events: Connection, process: subprocess.Popen, timeout_s: float) -> Any:
    """Return the next event, ``"died"`` or ``"hung"``."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if events.poll(POLL_S):
                return events.recv()
        except (EOFError, ConnectionResetError):
            process.wait()
            return "died"
        # A worker process may hold the pipe open.
        if process.poll() is not None and not events.poll():
            return "died"
        if time.monotonic() > deadline:
            return "hung"


_FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')
_DUMP = re.compile(r"^(Fatal Python error|Timeout \()", re.MULTILINE)


def _last_words(text: str) -> str:
    """Return the last line that a process wrote, and where its main thread was."""
    dump = _DUMP.search(text)
    said = [line.strip() for line in text[: dump.start() if dump else None].splitlines()]
    words = [line for line in said if line][-1:]
    if dump:
        threads = re.split(r"^(?:Current thread|Thread) .*$", text[dump.start() :], flags=re.M)
        # faulthandler puts the main thread last, and the innermost frame first.
        if frame := _FRAME.search(threads[-1]):
            file, line, function = frame.groups()
            words.append(f"{os.path.basename(file)}:{line} in {function}")
    return "; ".join(words)[:300]


# In the child process.


def serve(events_fd: int) -> None:
    """Run the checks that come on the standard input; send what happens, and None at the end."""
    os.set_inheritable(events_fd, False)
    events = Connection(events_fd, readable=False)
    faulthandler.enable()
    payload, passed = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    try:
        suite, arguments, timeout_s = pickle.loads(payload)
        module, _, function = suite.partition(":")
        checks = getattr(importlib.import_module(module), function)(*arguments)
    except UsageError as error:
        events.send(error)
        return
    except Exception as error:
        checks = []
        events.send(failure("importing", error))
    for event in run_checks(checks, passed):
        if isinstance(event, Begun):
            faulthandler.dump_traceback_later(STACK_SHARE * timeout_s)
        events.send(event)
    faulthandler.cancel_dump_traceback_later()
    events.send(None)
    os._exit(0)  # threads that an environment left behind must not keep the process alive


def _end_with_parent() -> None:
    """End this process when the standard input ends, which the parent's end closes."""
    while sys.stdin.buffer.read(1):
        pass
    os.killpg(0, signal.SIGKILL)
