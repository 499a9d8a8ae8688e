"""The thread that saves, so that training goes on meanwhile."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable

from sebulba.errors import HangError

SAVER_THREAD = "checkpoint-saver"
WAKE_S = 0.25
"""Every wait looks this often whether it should end."""

Job = Callable[[], object]


class Saver:
    """One background thread that does one job at a time; it holds no queue.

    A job that comes while another is done is refused, so that at most one snapshot is in memory.
    """

    def __init__(self) -> None:
        """Start the thread."""
        self._box = _Box()
        self._thread = threading.Thread(
            target=saver_thread, args=(self._box,), name=SAVER_THREAD, daemon=True
        )
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """A job was submitted and has not ended."""
        return self._box.job is not None

    def submit(self, job: Job) -> bool:
        """Have ``job`` done; False, and it is not done, while another is, or after ``close``.

        Args:
          job: Saves a snapshot, usually. It is dropped as soon as it ended.
        """
        box = self._box
        with box.changed:
            if box.job is not None or box.stop:
                return False
            box.job = job
            box.changed.notify_all()
        return True

    def wait(self, timeout_s: float) -> bool:
        """Wait until no job is being done; False after ``timeout_s`` seconds."""
        box, deadline = self._box, time.monotonic() + timeout_s
        with box.changed:
            while box.job is not None:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                box.changed.wait(min(WAKE_S, left))
        return True

    def pop_error(self) -> BaseException | None:
        """Return what the last job that failed raised, once; None if there is nothing new."""
        with self._box.changed:
            error, self._box.error = self._box.error, None
        return error

    def close(self, timeout_s: float = 600.0) -> None:
        """End the thread, after the job that it is doing; again does nothing.

        Raises:
          HangError: That job did not end within ``timeout_s`` seconds.
        """
        with self._box.changed:
            self._box.stop = True
            self._box.changed.notify_all()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise HangError(
                f"thread {SAVER_THREAD} is still writing a checkpoint after {timeout_s:.0f} s; "
                "see whether the disk of the run folder answers"
            )


class _Box:
    """What the thread and its owner share."""

    def __init__(self) -> None:
        self.job: Job | None = None
        self.error: BaseException | None = None
        self.stop = False
        self.changed = threading.Condition()


def saver_thread(box: _Box) -> None:
    """Do the jobs that are put into ``box`` until told to stop, and the last one before that."""
    while True:
        with box.changed:
            while box.job is None and not box.stop:
                box.changed.wait(WAKE_S)
            job = box.job
        if job is None:
            return
        error = _error_of(job)
        with box.changed:
            box.job, box.error = None, error or box.error
            box.changed.notify_all()
        del job, error  # and with them the snapshot, which may be large
        give_back_memory()


def give_back_memory() -> None:
    """Have glibc's allocator return what it keeps to the system; nothing on other systems.

    It keeps what was freed, and with threads that come and go, as those that write do, ever more
    of it in pieces. Tens of milliseconds, in which the other threads go on.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def _error_of(job: Job) -> BaseException | None:
    try:
        job()
    except BaseException as error:  # SystemExit would end the thread without a word
        return error
    return None
