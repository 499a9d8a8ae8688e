"""Engines that hold one simulator a process: a worker process for each environment."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sebulba.envs.saving.plain_data import pack, unpack
from sebulba.errors import EnvError, shown, signal_name
from sebulba_networks import worker
from sebulba_networks.native import INFO, Layout, Rows
from sebulba_networks.options import PoolOptions

STEP_TIMEOUT_S = 60.0
"""Seconds after which a worker process that has not finished a step counts as hung."""
POLL_S = 1.0
"""Seconds of one piece of the wait for a worker. The wait is counted in pieces, so that a time
during which all processes stood still is not the worker's fault."""
CLOSE_S = 5.0
"""Seconds that worker processes may take to end when their input does."""
PIECE_BYTES = 1 << 20
"""Bytes of an answer for which memory is taken before they are there."""
MOST_BYTES = 1 << 28
"""Longest answer whose length the request does not decide: a trace."""
MOST_TEXT_BYTES = 1 << 16
"""Longest refusal."""
TRACE_BYTES = 32
"""Bytes of an event in a trace."""
SHOWN_STDERR_BYTES = 2000
BOUND_SLACK = np.float32(1e-3)
"""By so much rounding may bring an observation over its bounds."""
REMEDY = "correct the engine, or install the version of it that fits this Sebulba"

Request = tuple[bytes, bytes]
"""Kind and content."""


class _DiedError(EnvError):
    """A worker process has ended; the text says how."""


class _BrokenError(EnvError):
    """A worker process broke the protocol; the text says how."""


class _Worker:
    """A process with a simulator, which ends when its input does. Nothing that it sends is trusted.

    Signals to the group of this process, such as Ctrl-C, do not reach it.
    """

    def __init__(self, library: Path, num_bytes: int, num_info: int) -> None:
        """Begin it; the sizes are those of rows and of infos, in bytes."""
        self._num_bytes, self._num_info = num_bytes, num_info
        self._said = tempfile.TemporaryFile()  # noqa: SIM115, closed by `end`
        sizes = (num_bytes, num_info)
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", worker.__file__, str(library), *map(str, sizes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            start_new_session=True,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._requests, self._answers = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self._requests, False)  # a worker that does not read holds nobody up
        self._unsent = memoryview(b"")
        self._request: Request = (b"", b"")
        self._left_s = 0.0

    def send(self, request: Request) -> None:
        """Begin to send it; what the pipe does not take at once is sent while ``receive`` waits.

        Raises:
          _BrokenError: There is an answer already.
        """
        if self._ready(0.0) and os.read(self._answers, 1):
            raise _BrokenError("sent bytes that no request asked for")
        self._request = kind, content = request
        self._unsent = memoryview(worker.HEADER.pack(kind, len(content)) + content)
        self._write()

    def receive(self, timeout_s: float) -> bytearray:
        """Return the answer.

        Raises:
          EnvError: The simulator refuses.
          TimeoutError: It is not there as a whole in time.
          _BrokenError: It is none, or not of the length of an answer to the request.
          _DiedError: The process has ended.
        """
        self._left_s = timeout_s
        flag, size = worker.ANSWER.unpack(self._read(worker.ANSWER.size))
        if flag not in (worker.DONE, worker.REFUSED):
            raise _BrokenError(f"sent {flag!r} for whether it could be done, which is 0 or 1")
        least, most = self._sizes() if flag == worker.DONE else (0, MOST_TEXT_BYTES)
        if not least <= size <= most:
            due = f"{least}" if least == most else f"at most {most}"
            raise _BrokenError(f"sent the length {size} of an answer of {due} bytes")
        answer = self._read(size)
        if self._unsent:
            raise _BrokenError("sent an answer before it had read the request")
        if flag == worker.REFUSED:
            raise EnvError(f"the network engine: {answer.decode(errors='replace')}")
        return answer

    def _sizes(self) -> tuple[int, int]:
        """Return the least and the most bytes of an answer to the request."""
        kind, content = self._request
        if kind in (worker.TRACE, worker.SPEC, worker.REPORT):
            return 0, MOST_BYTES
        size = 0
        if kind in (worker.RESET, worker.STEP):
            size = self._num_bytes + self._num_info * (content[:1] == b"\1")
        return size, size

    def _read(self, size: int) -> bytearray:
        data = bytearray()
        while len(data) < size:
            self._wait()
            piece = os.read(self._answers, min(size - len(data), PIECE_BYTES))
            if not piece:
                raise _DiedError(self._end())
            data += piece
        return data

    def _wait(self) -> None:
        """Wait until there is something to read, and send what is unsent."""
        while True:
            began = time.monotonic()
            is_ready = self._ready(max(0.0, min(POLL_S, self._left_s)))
            self._left_s -= min(POLL_S, time.monotonic() - began)
            if is_ready:
                return
            if self._left_s <= 0:
                raise TimeoutError

    def _ready(self, wait_s: float) -> bool:
        """Tell whether there is something to read, or the end of it."""
        poll = select.poll()
        poll.register(self._answers, select.POLLIN)
        if self._unsent:
            poll.register(self._requests, select.POLLOUT)
        ready = dict(poll.poll(1000 * wait_s))
        if self._requests in ready:
            self._write()
        return self._answers in ready

    def _write(self) -> None:
        try:
            self._unsent = self._unsent[os.write(self._requests, self._unsent) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:  # the answer will say how it ended
            self._unsent = memoryview(b"")

    def end_input(self) -> None:
        """Have it close its simulator and end."""
        self.process.stdin.close()  # type: ignore[union-attr]

    def end(self, wait_s: float = 0.0) -> None:
        """End the process; kill it after ``wait_s``."""
        self.end_input()
        self._wait_or_kill(wait_s)
        self.process.stdout.close()  # type: ignore[union-attr]
        self._said.close()

    def _wait_or_kill(self, wait_s: float) -> bool:
        """Tell whether it ended by itself."""
        try:
            self.process.wait(wait_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return False
        return True

    def _end(self) -> str:
        """Return how it ended, which has closed its output."""
        is_own = self._wait_or_kill(max(0.0, min(CLOSE_S, self._left_s)))
        self._said.seek(max(0, self._said.seek(0, os.SEEK_END) - SHOWN_STDERR_BYTES))
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        code = self.process.returncode
        how = signal_name(-code) if code < 0 else f"exit code {code}"
        how += "" if is_own else ", because it had closed its output and went on"
        # ns-3 tells of a failed NS_ASSERT or NS_FATAL_ERROR in a line with its place, and goes on.
        placed = [line for line in lines if "file=" in line and "line=" in line]
        return f"{how}: {(placed or lines)[-1]}" if lines else how


class _Env:
    """What an environment has done since its episode began, and the worker that has done it."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.episode = -1
        self.has_ended = True
        self.actions: list[bytes] = []
        self.worker: _Worker | None = None

    def note(self, request: Request, rows: Rows) -> None:
        """Take note of a reset or step that was done."""
        kind, content = request
        if kind == worker.RESET or self.has_ended:
            self.episode, self.actions = self.episode + 1, []
        else:
            self.actions.append(content[1:])
        self.has_ended = bool(rows.episode_end[0])

    def history(self, config: bytes) -> list[Request]:
        """Return what brings a new simulator to where this one is."""
        create = (worker.CREATE, worker.NUMBER.pack(self.seed) + config)
        if self.has_ended:  # what comes next begins an episode
            return [create, (worker.SEEK, worker.NUMBER.pack(self.episode + 1))]
        seek = (worker.SEEK, worker.NUMBER.pack(self.episode))
        steps = [(worker.STEP, b"\0" + action) for action in self.actions]
        return [create, seek, (worker.RESET, b"\0"), *steps]


def ask_once(library: Path, request: Request) -> bytes:
    """Return what a worker process of its own answers.

    Raises:
      EnvError: The simulator refuses, dies or hangs.
    """
    one = _Worker(library, num_bytes=0, num_info=0)
    try:
        one.send(request)
        return bytes(one.receive(STEP_TIMEOUT_S))
    except TimeoutError:
        raise EnvError(f"no answer within {STEP_TIMEOUT_S:g} s") from None
    except _BrokenError as fault:
        raise EnvError(f"a worker process {fault}; {REMEDY}") from None
    finally:
        one.end()


class ProcessPool:
    """A vector of simulated networks, each in a worker process. One thread at a time may use it.

    It has the methods of ``NativePool``. A worker that dies is replaced by a new one, which repeats
    the episode so far: only time is lost. One that dies again at the same place is an error. What
    workers answer is checked, and every error ends all of them: some might be a request behind.
    """

    def __init__(
        self,
        library: Path,
        options: PoolOptions,
        seeds: Sequence[int],
        timeout_s: float = STEP_TIMEOUT_S,
        obs_bounds: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> None:
        """Make an environment for each seed.

        Args:
          library: The engine.
          options: What it simulates.
          seeds: ``[B]`` integers.
          timeout_s: Longest time that a worker may take for an answer.
          obs_bounds: Least and largest observation, ``[F]``; None checks only that it is finite.

        Raises:
          EnvError: A worker cannot make its simulator.
        """
        self.num_envs = len(seeds)
        self._library, self._name, self._timeout_s = library, options.engine, timeout_s
        self._config = options.as_json().encode()
        low, high = obs_bounds or (np.float32(-np.inf), np.float32(np.inf))
        self._low, self._high = low - BOUND_SLACK, high + BOUND_SLACK
        self._layout, self._one = Layout(options, self.num_envs), Layout(options, 1)
        self._envs = [_Env(int(seed)) for seed in seeds]
        with self._ends_on_error():
            for env in self._envs:
                env.worker = self._new_worker()
            self._repeat()

    def reset(self, *, with_info: bool = False) -> Rows:
        """Begin the next episode of every environment."""
        return self._rows([(worker.RESET, b"%c" % with_info)] * self.num_envs, with_info)

    def step(self, actions: np.ndarray, *, with_info: bool = False) -> Rows:
        """Act; an environment whose episode has ended begins the next one instead.

        Args:
          actions: ``[B]`` or ``[B, A]`` float32; those of agents that do not act are ignored.
          with_info: Return ``info``, too.

        Raises:
          EnvError: A worker hangs, or died twice at one place.
        """
        assert actions.dtype == np.float32 and actions.size == self._layout.num_action_numbers
        own = np.ascontiguousarray(actions).reshape(self.num_envs, -1)
        requests = [(worker.STEP, b"%c" % with_info + row.tobytes()) for row in own]
        return self._rows(requests, with_info)

    def state(self) -> bytes:
        """Return seeds, episodes and actions, from which the environments go on."""
        return pack([(env.seed, env.episode, env.has_ended, env.actions) for env in self._envs])

    def put_back(self, state: bytes) -> None:
        """Go on from ``state`` of a pool with the same options and number of environments.

        What the environments did in their episodes is repeated.

        Raises:
          EnvError: It is that of another, or damaged.
        """
        try:
            saved = unpack(state)
        except ValueError as error:
            raise EnvError(f"the saved state is damaged ({error}); use another") from None
        if not isinstance(saved, list):
            raise EnvError(f"the saved state is damaged: it is {shown(saved)}; use another")
        if len(saved) != self.num_envs:
            raise EnvError(f"this is the state of {len(saved)} environments, not {self.num_envs}")
        for index, values in enumerate(saved):
            if fault := _fault_of_saved(values, 4 * self._one.num_action_numbers):
                raise EnvError(
                    f"the saved state is damaged: environment {index} {fault}; use another"
                )
        for env, values in zip(self._envs, saved, strict=True):
            env.seed, env.episode, env.has_ended, env.actions = values
        with self._ends_on_error():
            self._repeat()

    def trace(self, row: int = 0) -> np.ndarray:
        """Return ``[N, 4]`` int64, as ``NativePool.trace``."""
        requests: list[Request | None] = [None] * self.num_envs
        requests[row] = (worker.TRACE, b"")
        with self._ends_on_error():
            events = self._ask(requests)[row]
            if len(events) % TRACE_BYTES:
                rule = f"a multiple of {TRACE_BYTES}"
                raise EnvError(f"{self._who(row)} sent a trace of {len(events)} bytes, not {rule}")
        return np.frombuffer(events, np.int64).reshape(-1, 4)

    def report(self, row: int = 0) -> bytes:
        """Return what a scenario says of its episode, as JSON."""
        requests: list[Request | None] = [None] * self.num_envs
        requests[row] = (worker.REPORT, b"")
        with self._ends_on_error():
            return bytes(self._ask(requests)[row])

    def close(self) -> None:
        """End the worker processes; may be called twice."""
        self._end_workers(CLOSE_S)

    def __del__(self) -> None:
        """End what was not closed."""
        if hasattr(self, "_envs"):
            self._end_workers(0.0)

    def _end_workers(self, wait_s: float) -> None:
        workers = [env.worker for env in self._envs if env.worker is not None]
        for env in self._envs:
            env.worker = None
        for one in workers:
            one.end_input()
        until = time.monotonic() + wait_s
        for one in workers:
            one.end(max(0.0, until - time.monotonic()))

    @contextlib.contextmanager
    def _ends_on_error(self) -> Iterator[None]:
        """End all workers if the body raises: answers may be left that nobody asks for again."""
        try:
            yield
        except BaseException:
            self._end_workers(0.0)
            raise

    def _who(self, index: int) -> str:
        return f"environment {index} of engine {self._name!r}"

    def _new_worker(self) -> _Worker:
        num_info = 8 * len(INFO) * self._one.num_slots
        return _Worker(self._library, self._one.num_bytes, num_info)

    def _rows(self, requests: list[Request], with_info: bool) -> Rows:
        rows = []
        with self._ends_on_error():
            answers = self._ask(requests)
            for index, (request, answer) in enumerate(zip(requests, answers, strict=True)):
                env = self._envs[index]
                begins = request[0] == worker.RESET or env.has_ended
                rows.append(self._row(index, answer, begins=begins))
                env.note(request, rows[-1])
        columns = list(zip(*rows, strict=True))
        info = np.concatenate(columns.pop()) if with_info else None
        arrays = map(np.concatenate, columns[: len(Rows._fields) - 1])
        return Rows._make([*arrays, info])

    def _row(self, index: int, answer: bytearray, *, begins: bool) -> Rows:
        """Return the rows of one environment, which have to begin an episode or not.

        Raises:
          EnvError: There are values in them that cannot be.
        """
        data, size = np.frombuffer(answer, np.uint8), self._one.num_bytes
        info = data[size:].view(np.float64) if len(data) > size else None
        rows = self._one.rows(data[:size], info)
        if fault := self._fault_of(rows, begins):
            raise EnvError(f"{self._who(index)} sent {fault}; {REMEDY}")
        return rows

    def _fault_of(self, rows: Rows, begins: bool) -> str | None:
        """Return which value of rows breaks a rule, and which."""
        for name, values in rows._asdict().items():
            if values is None:
                continue
            if values.dtype == np.bool_ and (bytes_ := values.view(np.uint8)).max() > 1:
                return f"{name}={bytes_.max()}, which must be 0 or 1"
            if values.dtype != np.bool_ and not np.isfinite(values).all():
                return f"{name}={values[~np.isfinite(values)][0]}, which must be finite"
        is_outside = (rows.obs < self._low) | (rows.obs > self._high)
        if is_outside.any():
            return f"obs={shown(rows.obs)}, which must be inside its bounds"
        if (rows.terminated & rows.truncated).any():
            return "terminated=True and truncated=True, of which one must be False"
        if (rows.is_first != begins).any():
            return f"is_first={not begins}, which must be {begins} here"
        has_left = rows.terminated | rows.truncated
        if self._one.num_slots == 1 and rows.episode_end[0] != has_left.all():
            return f"episode_end={rows.episode_end[0]}, which must be terminated or truncated"
        return None

    def _repeat(self) -> None:
        """Bring all simulators to where their environments are."""
        histories = [env.history(self._config) for env in self._envs]
        for turn in itertools.zip_longest(*histories):
            self._send(turn)
            for index, request in enumerate(turn):
                if request is not None:
                    self._check_repeated(index, request, self._received(index))

    def _check_repeated(self, index: int, request: Request, answer: bytearray) -> None:
        """Raise EnvError unless an episode goes on, as it did when it was not repeated."""
        if request[0] not in (worker.RESET, worker.STEP):
            return
        rows = self._row(index, answer, begins=request[0] == worker.RESET)
        if rows.episode_end[0]:
            raise EnvError(
                f"{self._who(index)} ended an episode that had gone on when it was saved; "
                "use another state, or an engine that repeats an episode exactly"
            )

    def _send(self, requests: Sequence[Request | None]) -> None:
        for env in self._envs:
            if env.worker is None:
                raise EnvError("this network is closed; make a new one")
        for index, request in enumerate(requests):
            if request is not None:
                self._send_one(index, request)

    def _send_one(self, index: int, request: Request) -> None:
        with self._named(index) as one:
            one.send(request)

    def _ask(self, requests: Sequence[Request | None]) -> list[bytearray]:
        """Return the answers to requests, one or none to each worker."""
        self._send(requests)
        return [
            bytearray() if request is None else self._answer(index, request)
            for index, request in enumerate(requests)
        ]

    def _answer(self, index: int, request: Request) -> bytearray:
        """Return an answer, if need be from a new worker in the place of one that died."""
        try:
            return self._received(index)
        except _DiedError as death:
            warnings.warn(f"{death}; a new one repeats the episode", RuntimeWarning, stacklevel=5)
        env = self._envs[index]
        assert env.worker is not None
        env.worker.end()
        env.worker = self._new_worker()
        for one in env.history(self._config):
            self._send_one(index, one)
            self._check_repeated(index, one, self._received(index))
        self._send_one(index, request)
        return self._received(index)

    def _received(self, index: int) -> bytearray:
        with self._named(index) as one:
            return one.receive(self._timeout_s)

    @contextlib.contextmanager
    def _named(self, index: int) -> Iterator[_Worker]:
        """Name the environment in errors of its worker."""
        one, who = self._envs[index].worker, self._who(index)
        assert one is not None
        try:
            yield one
        except _DiedError as death:
            raise _DiedError(f"{who}: its process ended with {death}") from None
        except _BrokenError as fault:
            raise EnvError(f"{who} {fault}; {REMEDY}") from None
        except TimeoutError:
            raise EnvError(
                f"{who} gave no answer within {self._timeout_s:g} s; pass a larger step_timeout_s"
            ) from None


def _fault_of_saved(values: Any, action_bytes: int) -> str | None:
    """Return why values cannot be the saved state of an environment."""
    if not isinstance(values, tuple) or len(values) != 4:
        return f"is {shown(values)}, and not seed, episode, whether it has ended, and actions"
    seed, episode, has_ended, actions = values
    for name, number, least in (("seed", seed, -(2**63)), ("episode", episode, -1)):
        if type(number) is not int or not least <= number < 2**63 - 1:
            return f"has {name}={shown(number)}, which must be from {least} to {2**63 - 2}"
    if type(has_ended) is not bool or (episode < 0 and not has_ended):
        return f"has has_ended={shown(has_ended)}, which must be a bool, and True before an episode"
    if not isinstance(actions, list):
        return f"has actions={shown(actions)}, which must be a list"
    for action in actions:
        is_long = isinstance(action, bytes) and len(action) == action_bytes
        if not is_long or not np.isfinite(np.frombuffer(action, np.float32)).all():
            return (
                f"has the action {shown(action)}, which must be {action_bytes // 4} finite float32"
            )
    return None
