"""Engines that hold one simulator a process: a worker process for each environment."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sebulba.envs.networks import worker
from sebulba.envs.networks.native import INFO, Layout, Rows
from sebulba.envs.networks.options import PoolOptions
from sebulba.envs.saving.plain_data import pack, unpack
from sebulba.errors import EnvError

STEP_TIMEOUT_S = 60.0
"""Seconds after which a worker process that has not finished a step counts as hung."""
POLL_S = 1.0
"""Seconds of one piece of the wait for a worker. The wait is counted in pieces, so that a time
during which all processes stood still is not the worker's fault."""
CLOSE_S = 5.0
"""Seconds that a worker may take to end when its input does."""

MOST_EPISODES = 2**40
"""More than an environment can have begun."""
MOST_ANSWER_BYTES = 2**28
"""Bytes of the longest answer whose size is not known, which is a trace."""
MOST_REFUSAL_BYTES = 2**16
"""Bytes of the longest reason of an engine that refuses."""

Request = tuple[bytes, bytes]
"""Kind and content."""


class _DiedError(EnvError):
    """A worker process has ended; the text says how."""


class _Worker:
    """A process with a simulator, which ends when its input does.

    Signals to the group of this process, such as Ctrl-C, do not reach it.
    """

    def __init__(self, library: Path, num_bytes: int, num_info: int) -> None:
        """Begin it; the sizes are those of rows and of infos, in bytes."""
        self._said = tempfile.TemporaryFile()  # noqa: SIM115, closed by `end`
        sizes = (num_bytes, num_info)
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", worker.__file__, str(library), *map(str, sizes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            start_new_session=True,
        )

    def send(self, request: Request) -> None:
        kind, content = request
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer will say how it ended
            self.process.stdin.write(worker.HEADER.pack(kind, len(content)) + content)
            self.process.stdin.flush()

    def receive(self, timeout_s: float, size: int | None = None) -> bytes:
        """Return the answer, of ``size`` bytes if that is known.

        Raises:
          EnvError: The simulator refuses, or its answer is none of ours.
          TimeoutError: There is no whole answer in time.
          _DiedError: The process has ended, or closed its output.
        """
        header, left_s = self._read(worker.ANSWER.size, timeout_s)
        flag, announced = header[0], worker.ANSWER.unpack(header)[1]
        most = MOST_ANSWER_BYTES if size is None else size
        if flag == 0:
            most = MOST_REFUSAL_BYTES
        if flag > 1 or announced > most or (flag and size not in (None, announced)):
            self.end(at_once=True)
            wanted = f"at most {most:,}" if size is None else f"{size:,}"
            raise EnvError(
                f"the network engine: an answer of kind {flag} and {announced:,} bytes, and not of "
                f"{wanted}; its process was ended, because what it writes cannot be read"
            )
        answer, _ = self._read(announced, left_s)
        if not flag:
            raise EnvError(f"the network engine: {answer.decode(errors='replace')}")
        return answer

    def _read(self, size: int, left_s: float) -> tuple[bytes, float]:
        """Return ``size`` bytes that come within ``left_s``, and the seconds that are left then."""
        assert self.process.stdout is not None
        answers, read = self.process.stdout.fileno(), bytearray()
        while len(read) < size:
            began = time.monotonic()
            if select.select([answers], [], [], max(0.0, min(POLL_S, left_s)))[0]:
                if not (more := os.read(answers, min(size - len(read), 2**20))):
                    raise _DiedError(self._end())
                read += more
            # At most a piece: time during which all processes stood still does not count.
            left_s -= min(POLL_S, time.monotonic() - began)
            if left_s <= 0 and len(read) < size:
                raise TimeoutError
        return bytes(read), left_s

    def end(self, *, at_once: bool = False) -> None:
        """End the process; wait for it to close its simulator unless ``at_once``."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()  # type: ignore[union-attr]
        try:
            self.process.wait(0 if at_once else CLOSE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()  # type: ignore[union-attr]
        self._said.close()

    def _end(self) -> str:
        try:
            code = self.process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:  # it closed its output and goes on
            self.process.kill()
            self.process.wait()
            return "its output closed"
        self._said.seek(0)
        lines = self._said.read()[-2000:].decode(errors="replace").strip().splitlines()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"{how}: {lines[-1]}" if lines else how


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
        return one.receive(STEP_TIMEOUT_S)
    except TimeoutError:
        raise EnvError(f"no answer within {STEP_TIMEOUT_S:g} s") from None
    finally:
        one.end(at_once=True)


class ProcessPool:
    """A vector of simulated networks, each in a worker process. One thread at a time may use it.

    It has the methods of ``NativePool``. A worker that dies is replaced by a new one, which repeats
    the episode so far: only time is lost. One that dies again at the same place is an error.
    """

    def __init__(
        self,
        library: Path,
        options: PoolOptions,
        seeds: Sequence[int],
        timeout_s: float = STEP_TIMEOUT_S,
    ) -> None:
        """Make an environment for each seed.

        Raises:
          EnvError: A worker cannot make its simulator.
        """
        self.num_envs = len(seeds)
        self._library, self._name, self._timeout_s = library, options.engine, timeout_s
        self._config = options.as_json().encode()
        self._layout, self._one = Layout(options, self.num_envs), Layout(options, 1)
        self._envs = [_Env(int(seed)) for seed in seeds]
        try:
            for env in self._envs:
                env.worker = self._new_worker()
            self._repeat()
        except BaseException:
            self.close()
            raise

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
          EnvError: It is that of another.
        """
        try:
            saved = [self._checked_saved(*of_env) for of_env in unpack(state)]
        except (TypeError, ValueError) as error:
            raise EnvError(f"the saved state of engine {self._name!r} is damaged") from error
        if len(saved) != self.num_envs:
            raise EnvError(f"this is the state of {len(saved)} environments, not {self.num_envs}")
        for env, values in zip(self._envs, saved, strict=True):
            env.seed, env.episode, env.has_ended, env.actions = values
        self._repeat()

    def _checked_saved(
        self, seed: int, episode: int, has_ended: bool, actions: list[bytes]
    ) -> tuple[int, int, bool, list[bytes]]:
        """Return what ``state`` keeps of one environment.

        Raises:
          ValueError: It is nothing that ``state`` would return.
        """
        are_numbers = type(seed) is int and type(episode) is int and type(has_ended) is bool
        size = 4 * self._one.num_action_numbers
        are_actions = isinstance(actions, list) and all(
            isinstance(action, bytes) and len(action) == size for action in actions
        )
        in_range = are_numbers and abs(seed) < 2**63 and -1 <= episode < MOST_EPISODES
        if not (are_actions and in_range):
            raise ValueError("not what was saved")
        return seed, episode, has_ended, actions

    def trace(self, row: int = 0) -> np.ndarray:
        """Return ``[N, 4]`` int64, as ``NativePool.trace``."""
        requests: list[Request | None] = [None] * self.num_envs
        requests[row] = (worker.TRACE, b"")
        return np.frombuffer(self._ask(requests)[row], np.int64).reshape(-1, 4)

    def close(self) -> None:
        """End the worker processes; may be called twice."""
        workers = [env.worker for env in self._envs if env.worker is not None]
        for env in self._envs:
            env.worker = None
        for one in workers:
            one.end()

    def __del__(self) -> None:
        """End what was not closed."""
        for env in getattr(self, "_envs", ()):
            if env.worker is not None:
                env.worker.end(at_once=True)

    def _new_worker(self) -> _Worker:
        num_info = 8 * len(INFO) * self._one.num_slots
        return _Worker(self._library, self._one.num_bytes, num_info)

    def _rows(self, requests: list[Request], with_info: bool) -> Rows:
        rows = []
        size = self._one.num_bytes
        size_of_info = 8 * len(INFO) * self._one.num_slots if with_info else 0
        answers = self._ask(requests, size + size_of_info)
        for index, (env, request, answer) in enumerate(
            zip(self._envs, requests, answers, strict=True)
        ):
            self._check_rows(index, answer[:size])
            data = np.frombuffer(bytearray(answer), np.uint8)
            info = data[size:].view(np.float64) if with_info else None
            rows.append(self._one.rows(data[:size], info))
            env.note(request, rows[-1])
        columns = list(zip(*rows, strict=True))
        info = np.concatenate(columns.pop()) if with_info else None
        arrays = map(np.concatenate, columns[: len(Rows._fields) - 1])
        return Rows._make([*arrays, info])

    def _check_rows(self, index: int, data: bytes) -> None:
        """Raise EnvError for rows that no engine of ours writes."""
        one = self._one
        num_numbers = one.num_slots * (one.num_features + 1)
        flags = np.frombuffer(data, np.uint8, offset=4 * num_numbers)
        if flags.max(initial=0) > 1:
            raise EnvError(f"{self._who(index)}: a flag is {flags.max()}; flags are 0 or 1")
        rows = one.rows(np.frombuffer(data, np.uint8), None)
        shown = rows.obs[rows.acting | rows.terminated | rows.truncated]
        if not (np.isfinite(shown).all() and np.isfinite(rows.reward).all()):
            raise EnvError(
                f"{self._who(index)}: an observation or a reward is not finite; the engine has to "
                "give numbers"
            )

    def _who(self, index: int) -> str:
        return f"environment {index} of engine {self._name!r}"

    def _repeat(self) -> None:
        """Bring all simulators to where their environments are."""
        histories = [env.history(self._config) for env in self._envs]
        for turn in itertools.zip_longest(*histories):
            self._send(turn)
            for index, request in enumerate(turn):
                if request is not None:
                    self._received(index, self._size_of_answer(request))

    def _size_of_answer(self, request: Request) -> int | None:
        """Return the bytes of the answer to a request without infos; None for a trace."""
        kind, _ = request
        if kind == worker.TRACE:
            return None
        return self._one.num_bytes if kind in (worker.RESET, worker.STEP) else 0

    def _send(self, requests: Sequence[Request | None]) -> None:
        for env, request in zip(self._envs, requests, strict=True):
            if env.worker is None:
                raise EnvError("this network is closed; make a new one")
            if request is not None:
                env.worker.send(request)

    def _ask(self, requests: Sequence[Request | None], size: int | None = None) -> list[bytes]:
        """Return the answers to requests, one or none to each worker, of ``size`` bytes."""
        self._send(requests)
        return [
            b"" if request is None else self._answer(index, request, size)
            for index, request in enumerate(requests)
        ]

    def _answer(self, index: int, request: Request, size: int | None) -> bytes:
        """Return an answer, if need be from a new worker in the place of one that died."""
        try:
            return self._received(index, size)
        except _DiedError as death:
            warnings.warn(f"{death}; a new one repeats the episode", RuntimeWarning, stacklevel=5)
        env = self._envs[index]
        assert env.worker is not None
        env.worker.end(at_once=True)
        env.worker = self._new_worker()
        for one in env.history(self._config):
            env.worker.send(one)
            self._received(index, self._size_of_answer(one))
        env.worker.send(request)
        return self._received(index, size)

    def _received(self, index: int, size: int | None) -> bytes:
        one = self._envs[index].worker
        assert one is not None
        who = self._who(index)
        try:
            return one.receive(self._timeout_s, size)
        except _DiedError as death:
            raise _DiedError(f"{who}: its process ended with {death}") from None
        except TimeoutError:
            one.end(at_once=True)
            raise EnvError(
                f"{who} gave no answer within {self._timeout_s:g} s; pass a larger step_timeout_s"
            ) from None
