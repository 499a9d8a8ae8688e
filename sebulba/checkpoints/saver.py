"""A thread that saves while training goes on."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable

from sebulba.errors import HangError
from sebulba.transport.permits import WAKE_S

SAVER_THREAD = "checkpoint-saver"

Job = Callable[[], object]


class Saver:
    """One background thread that does one job at a time, without a queue.

    A job submitted while another is being done is refused, so that memory has only one snapshot.
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
        """Whether a job was submitted that has not ended."""
        return self._box.job is not None

    def submit(self, job: Job) -> bool:
        """Do ``job`` in the background; return False during another job or after ``close``.

        Args:
          job: Usually saves a snapshot. It is deleted as soon as it has ended.
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
        """Return the error of the last job that failed, once; None if there is no new one."""
        with self._box.changed:
            error, self._box.error = self._box.error, None
        return error

    def close(self, timeout_s: float = 600.0) -> None:
        """End the thread after the job that it is doing; a second call does nothing.

        Raises:
          HangError: The job did not end within ``timeout_s`` seconds.
        """
        with self._box.changed:
            self._box.stop = True
            self._box.changed.notify_all()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise HangError(
                f"thread {SAVER_THREAD} is still writing a checkpoint after {timeout_s:.0f} s; "
                "check whether the disk of the run folder responds"
            )


class _Box:
    """What the thread and its owner share."""

    def __init__(self) -> None:
        self.job: Job | None = None
        self.error: BaseException | None = None
        self.stop = False
        self.changed = threading.Condition()


def saver_thread(box: _Box) -> None:
    """Do the jobs put into ``box`` until told to stop; a job that is there then is still done."""
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
        del job, error  # they hold the snapshot, which may be large
        give_back_memory()


def give_back_memory() -> None:
    """Make glibc's allocator return freed memory to the system; without glibc do nothing.

    The allocator keeps what was freed, and ever more of it in fragments when threads come and go,
    as those that write do. The call takes tens of milliseconds, in which other threads go on.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def _error_of(job: Job) -> BaseException | None:
    try:
        job()
    except BaseException as error:  # SystemExit would end the thread silently
        return error
    return None
