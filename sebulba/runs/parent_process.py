"""A parent process that waits for a training and sees how it ends, which no process sees itself.

Native code, of an environment for example, that calls ``_exit(0)`` would end a run as if it were
done; so what does not end as the command decided is an error here. The parent is this process as it
was before anything large was imported (20 MB). It does nothing but pass signals on: a terminal and
a scheduler send them to the whole process group, and ``kill`` to the parent only. Free of JAX.
"""

from __future__ import annotations

import ctypes
import os
import resource
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from sebulba.errors import UsageError
from sebulba.runs.exit_codes import EXIT_HOST, EXIT_OTHER, EXIT_SIGNAL, end_at_once
from sebulba.runs.huge_pages import in_debugger

PR_SET_PDEATHSIG = 1
"""Of prctl(2): the signal that a process gets when its parent ends."""
TASKS = Path("/proc/self/task")
RUN, CODE, HOST = "run", "code", "host"
"""What the child notes for its parent."""
MOMENT_S = 0.1
"""In which a Ctrl-C that went to the whole group has also come to the child."""
NOT_PASSED_ON = (signal.SIGCHLD, signal.SIGWINCH, signal.SIGURG)
SUSPENDING = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
WANTED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Who ends a run by one of these needs no explanation."""

_notes: tuple[int, int] | None = None
"""In a child: its process and the descriptor to which it writes for its parent."""


def go_on_in_child() -> None:
    """Go on as a child of this process, which waits for it and ends as it ended.

    It goes on in this process instead where a debugger follows it, where a fork would not be safe,
    because there are threads or JAX, and on systems without ``/proc``.
    """
    global _notes
    if in_debugger() or "jax" in sys.modules or not TASKS.is_dir() or len(os.listdir(TASKS)) > 1:
        return
    (notes, notes_of_child), (heard, heard_by_child) = os.pipe(), os.pipe()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, nobody can wait
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    parent, child = os.getpid(), os.fork()
    if child:
        os.close(notes_of_child)
        os.close(heard_by_child)
        _end_like(_wait_for(child, heard), notes)
    os.close(notes)
    os.close(heard)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before that was asked for
        end_at_once(EXIT_OTHER)
    _notes = (os.getpid(), notes_of_child)
    # For signals with a handler the interpreter writes their number there as soon as they come.
    os.set_blocking(heard_by_child, False)
    signal.set_wakeup_fd(heard_by_child, warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def note_run(folder: Path) -> None:
    """Tell the parent, if there is one, where the run is."""
    _note(RUN, str(folder))


def note_hosts(index: int, number: int) -> None:
    """Tell the parent, if there is one, which of how many hosts this is that learn together."""
    _note(HOST, f"{index} of {number}")


def note_end(code: int) -> None:
    """Tell the parent, if there is one, that this process now ends with this exit code."""
    _note(CODE, str(code))


def leave(code: int) -> NoReturn:
    """End the process at once, as the command decided."""
    note_end(code)
    end_at_once(code)


def _note(name: str, value: str) -> None:
    if _notes is not None and _notes[0] == os.getpid():
        os.write(_notes[1], os.fsencode(f"{name} {value}\0"))


def _read_notes(notes: int) -> dict[str, str]:
    os.set_blocking(notes, False)  # a process that the child left behind may hold the other end
    text = os.fsdecode(_read(notes))
    return dict(note.split(" ", 1) for note in text.split("\0") if note)


def _wait_for(child: int, heard: int) -> int:
    """Pass signals on and return the status with which the child ended.

    Args:
      child: Its process.
      heard: Descriptor from which the numbers of signals come that it has got.
    """
    interrupts = _Interrupts(child, heard)
    while True:
        which = signal.sigwait(signal.valid_signals())
        ended, status = os.waitpid(child, os.WNOHANG | os.WUNTRACED)
        if ended and not os.WIFSTOPPED(status):
            return status
        if ended and os.WSTOPSIG(status) in SUSPENDING:  # Ctrl-Z: so that the shell sees it
            _undergo(os.WSTOPSIG(status))
            if which in SUSPENDING:
                continue  # the child has had it, and would stop again now that it goes on
        if which == signal.SIGINT:
            interrupts.pass_on()
        elif which not in NOT_PASSED_ON:
            os.kill(child, which)  # the second of a signal that went to the group changes nothing


class _Interrupts:
    """Ctrl-C that comes to this process, and that the child is not to get twice: it would end."""

    def __init__(self, child: int, heard: int) -> None:
        """Read the numbers of the signals that the child has got from ``heard``."""
        self._child = child
        self._heard = heard
        self._unanswered = 0
        os.set_blocking(heard, False)

    def pass_on(self) -> None:
        """Send it to the child, unless that has got it from where it came from."""
        time.sleep(MOMENT_S)
        signal.sigtimedwait([signal.SIGINT], 0)  # two at once are one: `timeout -s INT` sends them
        got = _read(self._heard).count(signal.SIGINT)
        answers = min(got, self._unanswered)
        self._unanswered -= answers
        if got == answers:
            os.kill(self._child, signal.SIGINT)
            self._unanswered += 1


def _read(descriptor: int) -> bytes:
    """Return what there is to read from a pipe that does not block."""
    try:
        return os.read(descriptor, 2**16)
    except BlockingIOError:
        return b""


def _end_like(status: int, notes: int) -> NoReturn:
    """End as the child did; if that was not as the command decided, say so."""
    told = _read_notes(notes)
    if os.WIFSIGNALED(status):
        which = os.WTERMSIG(status)
        if which == signal.SIGABRT and CODE not in told and HOST in told:
            _say_hosts(told)
            end_at_once(EXIT_HOST)
        if CODE not in told and which not in WANTED:
            memory = ", as the system does where memory is short" if which == signal.SIGKILL else ""
            _say(f"was ended by signal {which} ({signal.strsignal(which)}){memory}", told)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # of the child there is one, if of any
        _undergo(which)
        end_at_once(EXIT_SIGNAL + which)  # as process 1 of a container, which no signal ends
    if CODE in told:
        end_at_once(int(told[CODE]))
    _say(
        f"was ended, with code {os.WEXITSTATUS(status)}, by something in it that called exit or "
        "_exit, such as native code of the environment, or Ray if its head is gone",
        told,
    )
    end_at_once(EXIT_OTHER)


def _undergo(which: int) -> None:
    """Have a signal do to this process what it does by default."""
    if which != signal.SIGKILL:
        signal.signal(which, signal.SIG_DFL)
    os.kill(os.getpid(), which)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [which])
    signal.pthread_sigmask(signal.SIG_BLOCK, [which])


def _say(what: str, told: dict[str, str]) -> None:
    print(f"sebulba: error: the training process {what}. {_way_on(told)}", file=sys.stderr)
    sys.stderr.flush()


def _say_hosts(told: dict[str, str]) -> None:
    """Say why jax.distributed has aborted the child: it does so where host 0 is gone."""
    gone = "host 0, where all hosts meet," if told[HOST].partition(" ")[0] != "0" else "another"
    print(
        f"sebulba: hosts: the training process of host {told[HOST]} was aborted, as "
        f"jax.distributed does where {gone} is gone; what it printed says whether it was that. "
        "Start all hosts again by sebulba resume RUN and the same --distributed options; they go "
        "on from the newest checkpoint that all of them have saved",
        file=sys.stderr,
    )
    sys.stderr.flush()


def _way_on(told: dict[str, str]) -> str:
    from sebulba.runs.folder import RunFolder

    if RUN not in told:
        return "It had not begun"
    folder = RunFolder(Path(told[RUN]))
    try:
        folder.check_has_checkpoints()
    except (UsageError, OSError) as error:
        return str(error)
    return f"To go on from the last checkpoint: sebulba resume {shlex.quote(str(folder.path))}"
