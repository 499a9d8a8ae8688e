"""Evaluation while training: copies of the acting networks play, in a thread of their own.

Networks are taken where training passes a multiple of ``every_env_steps``, and at the end of the
run. Training does not wait: while one copy plays, at most ``MAX_PENDING`` wait, and a newer one
takes the place of the oldest, which is counted as skipped. So the last two of a run are always
played, the rest of them after training. In lockstep training waits instead and none is skipped,
which makes the evaluations, too, a function of the seed; but not where several hosts learn, of
which host 0 plays and the others are not kept waiting until the end (but for inline runs).
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from sebulba.errors import EnvError
from sebulba.inference.env_thread import EnvThread, Task, note_main_thread
from sebulba.support.checks import require
from sebulba.transport.permits import WAKE_S
from sebulba.types import PyTree

MAX_PENDING = 2
"""Copies of the networks that may wait. With two, the last two evaluations of a run are never
skipped."""

EVALUATOR_THREAD = "evaluator"
"""Name of the thread."""

Play = Callable[[PyTree, threading.Event], Mapping[str, float] | None]
"""Plays whole episodes with these acting networks, which it may keep. Returns what goes into the
record, in names that begin with ``eval_``; None as soon as the event is set. It looks at the
event after every step: a loop takes one that does not for its ``hang_timeout_s`` for hung."""

After = Callable[[PyTree, int, threading.Event], object]
"""Is given the acting networks, the environment steps of training at which they were taken, and the
event, which it looks at as ``Play`` does."""

TakeNetworks = Callable[[], PyTree]
"""Returns a copy of the acting networks that nobody else writes, donates or deletes."""


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """What a loop plays while it trains, and how often.

    Raises:
      UsageError: ``every_env_steps`` is not positive.
    """

    play: Play
    """Called in one thread at a time, with networks on the first inference device; such as
    ``sebulba.EvaluationPlayer``."""
    every_env_steps: int
    """Training steps between evaluations; the end of a run has one, unless it was stopped."""
    played_at: int = 0
    """``env_steps`` of the newest evaluation that is on record, for a run that is resumed: its
    checkpoint may be older."""
    after: After | None = None
    """What is done with the networks after each evaluation, in its thread, such as filming them."""

    def __post_init__(self) -> None:
        """Check the interval."""
        every, remedy = self.every_env_steps, "use a tenth of the run, or no evaluator"
        require(every >= 1, "every_env_steps", every, "must be at least 1", remedy)


class Heartbeat(threading.Event):
    """The stop event of the thread that plays; whoever looks at it shows that it is alive."""

    def __init__(self) -> None:
        """Begin unset, with a first sign of life."""
        super().__init__()
        self.beat()

    def beat(self) -> None:
        """Note a sign of life."""
        self.at = time.perf_counter()

    def is_set(self) -> bool:
        """Tell whether it is set, and note a sign of life."""
        self.beat()
        return super().is_set()


class Pending(NamedTuple):
    """An evaluation to be played."""

    env_steps: int
    """Environment steps of training at which the networks were taken."""
    networks: PyTree
    """An owned copy of the acting networks."""


def evaluation_record(
    played: Mapping[str, float], env_steps: int, began: float, num_skipped: int
) -> dict[str, Any]:
    """Return what the records say of an evaluation.

    Args:
      num_skipped: Evaluations of the run that were not played, so far.
    """
    return {
        **played,
        "eval_env_steps": env_steps,
        "eval_seconds": time.perf_counter() - began,
        "eval_skipped": num_skipped,
    }


class Evaluations:
    """The evaluations of one run: what is due, what waits, what is done."""

    def __init__(
        self,
        evaluator: Evaluator | None,
        evaluated_at: int,
        stop_requested: threading.Event,
        fail: Callable[[BaseException], None],
        *,
        skips: bool,
        inline: bool,
    ) -> None:
        """Go on after the evaluation at ``evaluated_at``; nothing is played yet.

        Args:
          evaluator: None never has anything due.
          evaluated_at: Of the counters, at the beginning of this run.
          stop_requested: Ends every wait of the update loop.
          skips: When too many wait, skip the oldest instead of waiting.
        """
        self._evaluator = evaluator
        self._taken_at = max(evaluated_at, evaluator.played_at if evaluator else 0)
        self._stop_requested = stop_requested
        self._skips = skips
        self._inline = inline
        self._stop = threading.Event()
        self._player_stop = Heartbeat()
        self._pending: collections.deque[Pending] = collections.deque()
        self._done: collections.deque[dict[str, Any]] = collections.deque()
        self._playing = False
        self._num_skipped = 0
        self._changed = threading.Condition()
        self._own_thread: EnvThread | None = None
        """Ends with these evaluations; one of the player's own lasts as long as the player."""
        self.threads: list[Task] = []
        """The thread that plays, if there is one."""
        if evaluator is not None and not inline:
            thread = getattr(evaluator.play, "env_thread", None)
            if not isinstance(thread, EnvThread):
                thread = self._own_thread = EnvThread(EVALUATOR_THREAD)
            self.threads.append(thread.task(evaluator_thread, self, fail))

    # For the update loop.

    def start(self) -> None:
        """Start the thread."""
        for thread in self.threads:
            thread.start()

    def when_due(self, env_steps: int, take_networks: TakeNetworks) -> None:
        """Have the networks played if training has passed a multiple of the interval."""
        if self._evaluator is None:
            return
        every = self._evaluator.every_env_steps
        if env_steps // every > self._taken_at // every:
            self._ask(env_steps, take_networks)

    def at_the_end(self, env_steps: int, take_networks: TakeNetworks) -> None:
        """Have the trained networks played, unless they are, or a stop was requested."""
        is_wanted = self._evaluator is not None and env_steps > self._taken_at
        if is_wanted and not self._stop_requested.is_set():
            self._ask(env_steps, take_networks)

    def _ask(self, env_steps: int, take_networks: TakeNetworks) -> None:
        self._taken_at = env_steps
        pending = Pending(env_steps, take_networks())
        with self._changed:
            while not self._skips and self._is_full() and not self._stop_requested.is_set():
                self._changed.wait(WAKE_S)
            while self._is_full():
                self._pending.popleft()
                self._num_skipped += 1
            self._pending.append(pending)
            self._changed.notify_all()
        if self._inline:
            self.play_next()

    def _is_full(self) -> bool:
        return len(self._pending) >= MAX_PENDING and not self._stop.is_set()

    def pop(self) -> dict[str, Any]:
        """Return the record of the oldest that is done and was not returned yet, or nothing."""
        with self._changed:
            return self._done.popleft() if self._done else {}

    def wait(self) -> dict[str, Any]:
        """Return what ``pop`` does, but wait for it while any is still to be played."""
        with self._changed:
            while (self._pending or self._playing) and not self._done:
                if self._stop_requested.is_set() or self._stop.is_set():
                    break
                self._changed.wait(WAKE_S)
        return self.pop()

    def silent_s(self) -> float:
        """Return for how many seconds the thread that plays has shown no sign of life.

        0 while nothing is played.
        """
        is_playing = self._playing and not self._inline and not self._stop.is_set()
        return time.perf_counter() - self._player_stop.at if is_playing else 0.0

    def end(self) -> None:
        """Stop what is being played and play no other."""
        self._stop.set()
        self._player_stop.set()
        with self._changed:
            self._pending.clear()
            self._changed.notify_all()
        if self._own_thread is not None:
            self._own_thread.end()

    # For the thread that plays.

    def play_next(self) -> bool:
        """Play the oldest that waits, or wait for one; False once stopped."""
        pending = self._begin()
        if pending is None:
            return False
        assert self._evaluator is not None
        metrics, began = None, time.perf_counter()
        try:
            stop = self._stop_requested if self._inline else self._player_stop
            metrics = self._evaluator.play(pending.networks, stop)
            if metrics is None and not stop.is_set():
                raise TypeError(
                    f"evaluator.play={self._evaluator.play!r} returned None, which means stopped, "
                    "although it was not stopped; return a dict of metrics"
                )
            if metrics is not None and self._evaluator.after is not None:
                self._evaluator.after(pending.networks, pending.env_steps, stop)
        except BaseException as error:
            error.add_note(f"in the evaluation of the networks of {pending.env_steps} env steps")
            raise
        finally:
            with self._changed:
                self._playing = False
                if metrics is not None:
                    self._done.append(
                        evaluation_record(metrics, pending.env_steps, began, self._num_skipped)
                    )
                self._changed.notify_all()
        return metrics is not None

    def _begin(self) -> Pending | None:
        with self._changed:
            while not self._pending and not self._stop.is_set():
                self._changed.wait(WAKE_S)
            if self._stop.is_set():
                return None
            self._player_stop.beat()
            self._playing = True
            pending = self._pending.popleft()
            self._changed.notify_all()
            return pending


def evaluator_thread(evaluations: Evaluations, fail: Callable[[BaseException], None]) -> None:
    """Play what is asked for until stopped, as a thread; a failure goes to ``fail``."""
    try:
        while evaluations.play_next():
            pass
    except BaseException as raised:
        error = raised
        if isinstance(raised, SystemExit):
            # It would end the interpreter, silently and with a success for an exit code.
            error = EnvError(f"an environment or an agent called sys.exit({raised.code!r})")
            error.__cause__ = raised
        note_main_thread(error)
        error.add_note(f"in thread {EVALUATOR_THREAD!r}")
        fail(error)
        evaluations.end()
