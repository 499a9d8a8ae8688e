"""Vector environments made of single ones, in this thread or in worker processes."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import multiprocessing
import os
import resource
import signal
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.util import Finalize
from typing import Any, Literal

import gymnasium
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.async_vector_env import AsyncState

from sebulba.envs.checked_env import CheckedEnv
from sebulba.errors import MORE_OPEN_FILES, EnvError, UsageError
from sebulba.support.streams import make_streams_safe

SIGTERM_GRACE_S = 120
"""Seconds that a worker process works on after SIGTERM if the main process does, and seconds that
it may take to close its environment."""
FILES_OF_A_WORKER = 4
"""Files, pipes and sockets that a worker process needs in the main process, rounded up."""
SPARE_FILES = 16
"""Files that are open for a moment."""
POLL_S = 1.0
"""Seconds of one piece of the wait for a worker."""


class SafeAsyncVectorEnv(AsyncVectorEnv):
    """AsyncVectorEnv that raises a worker's exception unchanged, with its notes.

    Worker processes outlive it only to close their environments.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Make the worker processes, and their environments in them."""
        # multiprocessing ends its processes by SIGTERM, after which these go on for a while.
        try:
            super().__init__(*arguments, **options)
        except BaseException:
            _kill(getattr(self, "processes", ()))
            raise
        Finalize(self, _kill, args=(self.processes,), exitpriority=1)

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Close the environments and end the processes; kill those that do not answer."""
        if not terminate and timeout is None and self._state == AsyncState.DEFAULT:
            try:
                super().close_extras()
                return
            except (EOFError, OSError):  # a process has died
                pass
        end_workers(self)

    def _poll_pipe_envs(self, timeout: float | None = None) -> bool:
        """Wait until every worker has answered.

        The wait is counted in pieces, not read from the clock: a time during which all processes
        stood still (SIGSTOP, a suspended machine) is not the workers' fault.
        """
        self._assert_is_running()
        if timeout is None:
            return True
        left_s = timeout
        for pipe in self.parent_pipes:
            if pipe is None or pipe.closed:
                return False
            while not pipe.poll(min(POLL_S, left_s)):
                left_s -= POLL_S
                if left_s <= 0:
                    return False
        return True

    def _raise_if_errors(self, successes: Any) -> None:
        failed = [index for index, success in enumerate(successes) if not success]
        if not failed:
            return
        errors = {}
        for _ in failed:
            index, _, error, _ = self.error_queue.get(timeout=5)
            errors[index] = error
        raise errors[min(errors)]


def make_vector_env(
    make_env: Callable[[], gymnasium.Env],
    num_envs: int,
    vectorization: Literal["sync", "async"],
) -> VectorEnv:
    """Make a vector environment, with next-step autoreset, of checked single environments.

    Args:
      make_env: Makes a single environment; called once for each.
      num_envs: B, the number of environments.
      vectorization: "sync" steps in this thread, "async" in worker processes, which pays above
        about 0.3 ms per environment step. Workers import the main module again, so a script needs
        ``if __name__ == "__main__":``.
    """
    if vectorization == "async":
        _check_open_files(num_envs)
        try:
            return SafeAsyncVectorEnv(
                [
                    functools.partial(_make_in_worker, make_env, i, os.getpid())
                    for i in range(num_envs)
                ],
                copy=False,  # the adapter copies
                context="forkserver",
                autoreset_mode=AutoresetMode.NEXT_STEP,
            )
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            raise EnvError(
                "a worker process died while it made its environment (its traceback is above); a "
                "script must begin its work under `if __name__ == '__main__':`"
            ) from error
    envs = [CheckedEnv(make_env, i) for i in range(num_envs)]
    if len({getattr(env.env, "identity", id(env.env)) for env in envs}) < num_envs:
        raise UsageError(
            "the environment factory returned the same environment twice; it must make a new one "
            "at each call"
        )
    return SyncVectorEnv(
        [lambda env=env: env for env in envs],  # type: ignore[misc]
        copy=False,  # the adapter copies
        autoreset_mode=AutoresetMode.NEXT_STEP,
    )


def _check_open_files(num_envs: int) -> None:
    """Raise UsageError if this process may not open what so many workers need."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        needed = len(os.listdir("/proc/self/fd")) + FILES_OF_A_WORKER * num_envs + SPARE_FILES
    except OSError:  # it can't be known here
        return
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise UsageError(
            f"num_envs={num_envs} with vectorization='async' opens {needed} files in all, and this "
            f"process may open {limit}; use fewer environments, or {MORE_OPEN_FILES}"
        )


def holds_checked_envs(vector_env: VectorEnv) -> bool:
    """Tell whether ``make_vector_env`` made ``vector_env``."""
    return isinstance(vector_env, SafeAsyncVectorEnv) or (
        isinstance(vector_env, SyncVectorEnv)
        and all(isinstance(env, CheckedEnv) for env in vector_env.envs)
    )


def guilty_workers(env: Any, is_guilty: Callable[[Any, Any], bool]) -> str:
    """Return the indices of the worker processes that are to blame, with exit codes."""
    guilty = [
        f"{i}" + (f" (exit code {process.exitcode})" if process.exitcode is not None else "")
        for i, (pipe, process) in enumerate(zip(env.parent_pipes, env.processes, strict=True))
        if pipe is not None and is_guilty(pipe, process)
    ]
    return ", ".join(guilty) or "unknown"


def has_died(pipe: Any, process: Any) -> bool:
    """Tell whether a worker process has died."""
    # The pipe breaks a moment before the process can be waited for.
    process.join(0.2)
    return not process.is_alive()


def end_workers(env: AsyncVectorEnv) -> None:
    """Kill the worker processes, whatever they are doing, and close their pipes."""
    _kill(env.processes)
    for pipe in env.parent_pipes:
        if pipe is not None:
            pipe.close()
    for process in env.processes:
        process.join()
    env.closed = True


def _kill(processes: Sequence[Any]) -> None:
    for process in processes:
        if process.pid is not None:
            process.kill()  # no effect on one that is known to have ended


class _Look:
    """What Gymnasium looks at in the main process before the environments are made in workers."""

    def __init__(self, env: gymnasium.Env) -> None:
        self.metadata, self.render_mode = env.metadata, env.render_mode
        self.observation_space, self.action_space = env.observation_space, env.action_space

    def close(self) -> None:
        """Do nothing: the environment was closed."""


_SEEN: weakref.WeakKeyDictionary[Callable, _Look] = weakref.WeakKeyDictionary()
"""By the function that makes an environment: it is made in the main process once, by whoever asks
first, and not again in the thread of each Inferencer."""


def remember(make_env: Callable[[], gymnasium.Env], env: gymnasium.Env) -> None:
    """Keep what is to be seen of ``env``, which ``make_env`` made in this process."""
    _SEEN[make_env] = _Look(env)


def _looked_at(make_env: Callable[[], gymnasium.Env], index: int) -> _Look:
    if make_env not in _SEEN:
        with contextlib.closing(CheckedEnv(make_env, index, in_worker=True)) as env:
            remember(make_env, env)
    return _SEEN[make_env]


def _make_in_worker(
    make_env: Callable[[], gymnasium.Env], index: int, main_process: int
) -> CheckedEnv | _Look:
    """Make an environment in its worker process.

    The process survives signals that go to the whole group, such as Ctrl-C on a terminal, SIGHUP
    when that is closed, or a scheduler's SIGTERM, because the main process first finishes its
    update and saves, and then ends its workers. If the main process does not end them, ``SIGALRM``
    does. In the main process return what Gymnasium wants to know of the environment.
    """
    if os.getpid() == main_process:
        return _looked_at(make_env, index)
    make_streams_safe(says_so=False)  # an environment may print when nobody reads any more
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for which in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(which, lambda which, frame: signal.alarm(SIGTERM_GRACE_S))
    _end_with_main_process()
    return CheckedEnv(make_env, index, in_worker=True, before_close=_close_in_worker)


def _end_with_main_process() -> None:
    """Have the system kill this process when the main process ends, whatever this one is doing.

    The system sends ``SIGIO`` when a pipe closes whose other end only the main process holds open,
    and the default of that signal is to end the process.
    """
    main = multiprocessing.parent_process()
    assert main is not None
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(main.sentinel, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(main.sentinel, fcntl.F_GETFL)
    fcntl.fcntl(main.sentinel, fcntl.F_SETFL, flags | os.O_ASYNC)
    if not main.is_alive():  # it ended before the signal was asked for
        os._exit(1)


def _close_in_worker() -> None:
    """Let this process close its environment even if the main process does not wait for it.

    The main process does not wait if the whole group got SIGTERM, which also ended the server that
    started this process.
    """
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    signal.alarm(SIGTERM_GRACE_S)
