"""The thread in which the environments of an Inferencer are made, stepped, saved and closed.

Environments may hold what works only in the thread that made it: a connection of sqlite3, an OpenGL
context, ``threading.local``, an event loop of asyncio.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

from sebulba.errors import text_of

IN_A_MAIN_THREAD = (
    "each Inferencer makes and steps its environments in a thread of its own; use "
    "--env.vectorization async (vectorization='async') or, without evaluations while training, "
    "--cluster.address processes: there they are in the main thread of another process"
)


def note_main_thread(error: BaseException) -> None:
    """Add a note to the error of what works only in a main thread: where there is one."""
    if "main thread" in text_of(error).lower():
        error.add_note(IN_A_MAIN_THREAD)


class Task(concurrent.futures.Future):
    """A call in an ``EnvThread``, which one may also wait for as for a ``threading.Thread``."""

    def __init__(self, thread: EnvThread, name: str, function: Callable, arguments: tuple) -> None:
        """Prepare it; ``start`` begins it."""
        super().__init__()
        self._thread = thread
        self._call: tuple[Callable, tuple] | None = (function, arguments)
        self.name = name
        self.ident: int | None = None
        """Of the thread, once this was started."""

    def start(self) -> None:
        """Begin it, after the tasks that were started before."""
        self.ident = self._thread.begin(self)

    def is_alive(self) -> bool:
        """Tell whether it was started and has not ended."""
        return self.ident is not None and not self.done()

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end."""
        concurrent.futures.wait([self], timeout)

    def run(self) -> None:
        """Call the function, in this thread."""
        assert self._call is not None
        (function, arguments), self._call = self._call, None
        current = threading.current_thread()
        idle_name, current.name = current.name, self.name
        try:
            returned, error = function(*arguments), None
        except BaseException as raised:
            note_main_thread(raised)
            returned, error = None, raised
        del function, arguments  # so that nothing here holds them
        current.name = idle_name
        if error is None:
            self.set_result(returned)
        else:
            self.set_exception(error)
            del error


class EnvThread:
    """A thread that runs one task after the other; it starts with the first."""

    def __init__(self, name: str) -> None:
        """Name it; while it runs a task it has the name of the task."""
        self._requests: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_run_tasks, args=(self._requests,), name=f"idle-{name}", daemon=True
        )
        self._name = name
        self._starting = threading.Lock()
        self.end = weakref.finalize(self, self._requests.put, None)
        """Ends it after the tasks that were started; happens by itself if nobody holds it."""
        self.end.atexit = False

    def task(self, function: Callable, *arguments: Any) -> Task:
        """Return a task for this thread."""
        return Task(self, self._name, function, arguments)

    def begin(self, task: Task) -> int | None:
        """Run ``task`` after those before it; return the number of this thread."""
        if not self.end.alive:
            raise RuntimeError(f"thread {self._name!r} has ended")
        with self._starting:
            if self._thread.ident is None:
                self._thread.start()
        self._requests.put(task)
        return self._thread.ident

    def call(self, function: Callable, *arguments: Any) -> Any:
        """Return what ``function`` returns in this thread; wait for tasks before it."""
        if threading.current_thread() is self._thread:
            return function(*arguments)
        task = self.task(function, *arguments)
        task.start()
        return task.result()


class CallingThread:
    """In the place of an ``EnvThread`` where all happens in the thread that calls."""

    def call(self, function: Callable, *arguments: Any) -> Any:
        """Return what ``function`` returns."""
        return function(*arguments)

    def end(self) -> None:
        """Do nothing."""


def _run_tasks(requests: queue.SimpleQueue[Task | None]) -> None:
    loop = asyncio.new_event_loop()  # as the main thread has one
    asyncio.set_event_loop(loop)
    with contextlib.closing(loop):
        while (task := requests.get()) is not None:
            task.run()
            del task
