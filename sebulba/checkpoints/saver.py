"""A thread that saves while training goes on."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable

from sebulba.errors import HangError

SAVER_THREAD = "checkpoint-saver"

Job = Callable[[], object]


class Saver:
    """Does one job at a time in a background thread, without a queue.

    A job submitted while another is being done is refused, so that memory has only one snapshot.
    """

    def __init__(self) -> None:
        """Begin without a job."""
        self._thread: threading.Thread | None = None
        self._done = threading.Event()
        self._done.set()
        self._error: BaseException | None = None
        self._is_closed = False

    @property
    def is_busy(self) -> bool:
        """Whether a job was submitted that has not ended."""
        return not self._done.is_set()

    def submit(self, job: Job) -> bool:
        """Do ``job`` in the background; return False during another job or after ``close``."""
        if self.is_busy or self._is_closed:
            return False
        if self._thread is not None:
            self._thread.join()  # it has done its job
        self._done.clear()
        box = [job]  # which the thread empties: its own arguments live as long as it does
        thread = threading.Thread(target=self._do, args=(box,), name=SAVER_THREAD, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system allows no more threads: save in this one
            self._do(box)
        else:
            self._thread = thread
        return True

    def _do(self, box: list[Job]) -> None:
        try:
            box[0]()
        except BaseException as error:  # SystemExit would end the thread silently
            self._error = error
        box.clear()
        give_back_memory()
        self._done.set()

    def wait(self, timeout_s: float) -> bool:
        """Wait until no job is being done; False after ``timeout_s`` seconds."""
        return self._done.wait(timeout_s)

    def pop_error(self) -> BaseException | None:
        """Return the error of the last job that failed, once; None if there is no new one."""
        error, self._error = self._error, None
        return error

    def close(self, timeout_s: float = 600.0) -> None:
        """End the thread after the job that it is doing; a second call does nothing.

        Raises:
          HangError: The job did not end within ``timeout_s`` seconds.
        """
        self._is_closed = True
        if self._thread is None:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise HangError(
                f"thread {SAVER_THREAD} is still writing a checkpoint after {timeout_s:.0f} s; "
                "check whether the disk of the run folder responds"
            )


def give_back_memory() -> None:
    """Make glibc's allocator return freed memory to the system; without glibc do nothing.

    The allocator keeps what was freed, and ever more of it in fragments when threads come and go,
    as those that write do. The call takes tens of milliseconds, in which other threads go on.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
