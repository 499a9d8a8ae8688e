"""The process that waits for a training: how it ends, and which signals it passes on."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sebulba.runs import parent_process as waiting_parent
from tests.faults.children import ROOT, Child, newest_whole, training_began
from tests.faults.test_process_edges import ON_TERMINAL, command, environment
from tests.faults.test_signals import SMALL, check_saved
from tests.support.tiny import CountingEnv

DEADLINE_S = 300.0
"""Against hangs only."""

# Without a training: what the child does is said here.

BEGIN = """
import ctypes, os, select, signal, sys, threading, time
from pathlib import Path
from sebulba.runs.parent_process import go_on_in_child, leave, note_end, note_run
libc, before = ctypes.CDLL(None), os.getpid()
signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # a shell ignores it in what it runs beside
"""
GO_ON = "go_on_in_child()\n"
WAITS = """
print(os.getpid(), flush=True)
while True:
    if select.select([0], [], [], 0.1)[0]:
        if not os.read(0, 1):
            break
        os.write(1, b"0 ")
note_end(0)
"""
"""It looks for a line again and again: a signal that comes as a wait begins does not interrupt it,
and the interpreter calls the signal's handler only after the wait."""
COUNTS = """
def say(which, frame):
    os.write(1, b"%d " % which)
for which in (signal.SIGINT, signal.SIGTERM, signal.SIGRTMAX):
    signal.signal(which, say)
"""


class Pair(subprocess.Popen):
    """A process that waits for its child; the child's number is the first line that it prints."""

    def __init__(self, code: str) -> None:
        """Start them in a group of their own."""
        super().__init__(
            [sys.executable, "-c", BEGIN + code],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
            text=True,
        )

    def ended(self) -> tuple[int, str, str]:
        """Return its exit code and what was printed, once its input is closed."""
        said = self.communicate(timeout=DEADLINE_S)
        return self.returncode, *said


@contextlib.contextmanager
def pair(code: str) -> Iterator[tuple[Pair, int]]:
    """Start them, and return the child's number too."""
    with Pair(code) as parent:
        assert parent.stdout is not None
        yield parent, int(parent.stdout.readline())


WITHIN = "was ended, with code {}, by something in it that called exit or _exit"


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("libc._exit(0)", 1, WITHIN.format(0)),
        ("libc._exit(3)", 1, WITHIN.format(3)),
        ("libc.exit(0)", 1, WITHIN.format(0)),
        ("os._exit(0)", 1, WITHIN.format(0)),
        ("libc.abort()", -6, "was ended by signal 6 (Aborted)"),
        ("os.kill(os.getpid(), 9)", -9, "signal 9 (Killed), as the system does where memory"),
        ("os.kill(os.getpid(), signal.SIGTERM)", -15, None),
        ("os.kill(os.getpid(), signal.SIGQUIT)", -3, None),
        ("note_end(0)", 0, None),
        ("leave(130)", 130, None),
        ("note_end(3); sys.exit(3)", 3, None),
        ("note_end(4); libc._exit(0)", 4, None),
        ("note_end(0); libc.abort()", -6, None),
        ("\nif os.fork() == 0: leave(0)\nos.wait(); libc._exit(0)", 1, WITHIN.format(0)),
    ],
)
def test_it_ends_as_the_child_did_unless_that_was_not_the_command_s_will(body, code, said):
    returned, _, error = Pair(GO_ON + body).ended()
    assert returned == code, error
    if said is None:
        assert not error
    else:
        assert error.count("\n") == 1 and error.startswith("sebulba: error: the training process")
        assert said in error


def test_a_child_whose_ends_are_ignored_by_who_started_it_is_waited_for():
    ignored = "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
    assert Pair(f"{ignored}{GO_ON}note_end(7); sys.exit(7)").ended()[0] == 7


@pytest.mark.parametrize(
    "before", ["threading.Thread(target=time.sleep, args=[1]).start()", "sys.modules['jax'] = 1"]
)
def test_where_a_fork_is_not_safe_there_is_none(before):
    assert Pair(f"{before}\n{GO_ON}assert os.getpid() == before").ended() == (0, "", "")


LAST = signal.SIGRTMAX
"""Signals are passed on by their number, so that this one comes last."""


@pytest.mark.parametrize(
    ("send", "signals"),
    [
        (os.killpg, [signal.SIGINT]),
        (os.kill, [signal.SIGINT]),
        (os.kill, [signal.SIGTERM]),
        (os.kill, [signal.SIGTERM, signal.SIGINT]),
    ],
)
def test_each_signal_comes_to_the_child_once(send, signals):
    with pair(GO_ON + COUNTS + WAITS) as (parent, _):
        for which in signals:
            send(parent.pid, which)
        seen = numbers_to_the_last(parent)
        assert parent.ended() == (0, "", "")
    assert sorted(seen) == sorted([*signals, LAST])


def numbers_to_the_last(parent: Pair) -> list[int]:
    """Return the numbers of the signals that the child counts until all sent so far have come.

    The last one's handler may run within the handler of one before it, and print first. So the
    child is asked for a line, too: it answers, with 0, when all handlers have returned.
    """
    os.kill(parent.pid, LAST)
    seen = read_until(parent, int(LAST), [])
    assert parent.stdin is not None
    parent.stdin.write("\n")
    parent.stdin.flush()
    return sorted(number for number in read_until(parent, 0, seen) if number)


def read_until(parent: Pair, number: int, seen: list[int]) -> list[int]:
    """Return the numbers seen so far and those that come until this one has come."""
    assert parent.stdout is not None
    text = " ".join(map(str, seen)).encode() + b" " if seen else b""
    while number not in map(int, text.split()) or not text.endswith(b" "):
        assert select.select([parent.stdout], [], [], DEADLINE_S)[0]
        text += os.read(parent.stdout.fileno(), 100)
    return [int(number) for number in text.split()]


def test_ctrl_c_that_is_sent_again_and_again_comes_each_time():
    with pair(GO_ON + COUNTS + WAITS) as (parent, child):
        for send in (os.kill, os.killpg, os.kill, os.kill):
            send(parent.pid, signal.SIGINT)
            assert numbers_to_the_last(parent) == [signal.SIGINT, LAST]
        os.kill(child, signal.SIGKILL)
        assert parent.ended()[:2] == (-9, "")


def test_ctrl_c_comes_again_although_the_child_was_late_with_the_first():
    with pair(GO_ON + COUNTS + WAITS) as (parent, child):
        os.kill(child, signal.SIGSTOP)
        os.kill(parent.pid, signal.SIGINT)
        while not is_pending(child, signal.SIGINT):
            assert parent.poll() is None
        os.kill(child, signal.SIGCONT)
        assert numbers_to_the_last(parent) == [signal.SIGINT, LAST]
        os.kill(parent.pid, signal.SIGINT)
        assert numbers_to_the_last(parent) == [signal.SIGINT, LAST]


def is_pending(pid: int, which: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.partition("ShdPnd:")[2].split()[0], 16) & 1 << (which - 1))


def test_a_child_ends_with_its_parent_whatever_it_is_doing():
    deaf = "signal.pthread_sigmask(0, range(1, 65))\n"
    with pair(GO_ON + deaf + WAITS) as (parent, child):
        descriptor = os.pidfd_open(child)
        parent.kill()
        assert select.select([descriptor], [], [], DEADLINE_S)[0]
        os.close(descriptor)


# With a training.

SHORT = ["--eval-every-env-steps", "0", "--compile-cache"]


class LeavesOnce(CountingEnv):
    """Calls ``_exit`` of the C library as soon as there is what a file names, but once."""

    def step(self, action):
        awaited = Path(os.environ["AWAITED"])
        if awaited.exists() and any(path.name.isdigit() for path in awaited.iterdir()):
            left = awaited.parent / "left"
            if not left.exists():
                left.touch()
                ctypes.CDLL(None)._exit(0)
        return super().step(action)


@pytest.mark.slow
def test_a_run_that_native_code_ends_is_no_success_and_goes_on(
    tmp_path, monkeypatch, compile_cache_folder
):
    run = tmp_path / "a run"
    monkeypatch.setenv("AWAITED", str(run / "checkpoints"))
    words = ["train", "cartpole", *SMALL, *SHORT, str(compile_cache_folder), "--run-dir", str(run)]
    words += ["--env.id", f"{__name__}:LeavesOnce"]
    with Child(words, tmp_path / "log") as child:
        assert child.wait() == 1, child.printed
    said = child.printed.splitlines()[-1]
    assert WITHIN.format(0) in said and said.endswith(f"sebulba resume '{run}'")
    assert not (run / "ended.txt").exists()
    saved = newest_whole(run / "checkpoints")
    words = ["resume", str(run), "--total-env-steps", str(saved.env_steps + 2000)]
    with Child(words, tmp_path / "resumed") as child:
        assert child.wait() == 0, child.printed
    assert "exit code 0" in (run / "ended.txt").read_text()


SHELL = """
set -m
"$@"
echo "left with $?"
fg > /dev/null
echo "ended with $?"
"""


@pytest.mark.parametrize("which", [signal.SIGTSTP, signal.SIGCHLD, signal.SIGTERM])
def test_a_child_that_stopped_is_not_stopped_again_when_it_goes_on(monkeypatch, which):
    stopped, done = (signal.SIGTSTP << 8) | 0x7F, 0
    assert os.WIFSTOPPED(stopped) and os.WSTOPSIG(stopped) == signal.SIGTSTP
    signals, states = iter([which, signal.SIGCHLD]), iter([(7, stopped), (7, done)])
    undergone, passed_on = [], []
    monkeypatch.setattr(signal, "sigwait", lambda _: next(signals))
    monkeypatch.setattr(os, "waitpid", lambda *_: next(states))
    monkeypatch.setattr(os, "kill", lambda _, number: passed_on.append(number))
    monkeypatch.setattr(waiting_parent, "_undergo", undergone.append)
    heard, written = os.pipe()
    try:
        assert waiting_parent._wait_for(7, heard) == done
    finally:
        os.close(heard)
        os.close(written)
    assert undergone == [signal.SIGTSTP]
    assert passed_on == ([signal.SIGTERM] if which == signal.SIGTERM else [])


@pytest.mark.slow
def test_ctrl_z_and_ctrl_c_on_a_terminal(tmp_path, compile_cache_folder):
    run, (main, terminal) = tmp_path / "run", os.openpty()
    words = ["train", "cartpole", *SMALL, *SHORT, str(compile_cache_folder), "--run-dir", str(run)]
    words = command(*words, "--total-env-steps", "1000000000")
    shell = subprocess.Popen(
        [sys.executable, "-c", ON_TERMINAL, "/bin/bash", "-c", SHELL, "bash", *words],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=environment(tmp_path, TERM="dumb", PYTHONIOENCODING="utf-8"),
        start_new_session=True,
    )
    os.close(terminal)
    seen = ""

    def read_until(condition) -> None:
        nonlocal seen
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, seen
            if select.select([main], [], [], 0.01)[0]:
                try:
                    seen += os.read(main, 2**16).decode(errors="replace")
                except OSError as error:  # nobody has the terminal any more
                    raise AssertionError(seen) from error

    try:
        read_until(training_began(run))
        os.write(main, b"\x1a")
        read_until(lambda: f"left with {128 + signal.SIGTSTP}" in seen)
        read_until(training_began(run))  # fg
        os.write(main, b"\x03")
        read_until(lambda: "ended with" in seen)
        assert "ended with 130" in seen and "stopping;" in seen, seen
        assert shell.wait(DEADLINE_S) == 0
    finally:
        os.close(main)
        shell.kill()  # what it started is hung up, and ends
        shell.wait()
    check_saved(run)
    assert f"To go on: sebulba resume {run}\n" in (run / "ended.txt").read_text()
