"""The Inferencer: takes networks, runs cycles, hands trajectories to the update devices."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np

from sebulba.errors import EnvError, EnvHangError, is_env_failure
from sebulba.inference.cycle import Cycle
from sebulba.inference.env_thread import CallingThread, EnvThread, note_main_thread
from sebulba.metrics.timer import PhaseTimer
from sebulba.options import Schedule
from sebulba.support.trees import owned_copy
from sebulba.transport.item import HandOff, Item
from sebulba.transport.permits import CyclePermits, Stop
from sebulba.transport.staging import Staged, Staging
from sebulba.transport.trajectory_queue import TrajectoryQueue
from sebulba.types import EnvAdapter, PyTree, Trajectory

INFERENCER_PHASES = ("take", "compile", "act", "env_step", "cycle", "finish", "shard", "put")
WAITING_PHASES = ("take", "put")
"""Phases in which an Inferencer waits for others; any other phase that lasts is a hang."""
ENV_PHASES = ("env_step", "cycle")
"""Phases in which its environment works."""


class InferencerPosition(NamedTuple):
    """Where an Inferencer stands between two cycles."""

    cycle: int
    """Number of the next cycle."""
    step_state: PyTree
    """The step state, on the inference device; None if it was lost."""
    env: bytes | str
    """What ``Cycle.position`` returned: the environment's position, or why there is none."""


@dataclasses.dataclass
class Inferencer:
    """One vector environment on one inference device, and where they stand."""

    index: int
    """Its number, over all inference devices."""
    device: jax.Device
    """Where ``Agent.step`` runs."""
    env: EnvAdapter
    """Its vector environment."""
    run_cycle: Cycle
    """Runs its cycles."""
    staging: Staging
    """The slot of its device, from which it takes networks."""
    timer: PhaseTimer
    """The time of its thread, by ``INFERENCER_PHASES``."""
    env_thread: EnvThread | CallingThread
    """Where its environment was made, and everything is done with it."""
    needs_reset: bool = True
    """Begin new episodes before the next cycle."""
    step_state: PyTree = None
    """The step state for the next step."""
    cycle: int = 0
    """Number of the next cycle."""
    dropped_cycles: int = 0
    """Cycles that a stop cut short."""
    position_wanted: threading.Event = dataclasses.field(default_factory=threading.Event)
    """Set to ask for a ``left_position`` at the end of the next cycle."""
    left_position: InferencerPosition | None = None
    """Where it stood at the end of a cycle, for a checkpoint that has been begun."""
    failure: BaseException | None = None
    """What ended its run, or why it was given up, whichever came first."""
    _failing: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    @property
    def thread_name(self) -> str:
        """The name of its thread."""
        return name_of_thread(self.index)

    def fail(self, error: BaseException) -> bool:
        """Keep ``error`` as the failure; False if there is an earlier one, which may be its cause.

        A thread that was given up because it hangs may still raise when it comes back.
        """
        with self._failing:
            if self.failure is not None:
                return False
            self.failure = error
            return True

    def begin_if_new(self) -> None:
        """Begin new episodes, if none have begun."""
        if self.needs_reset:
            with self.timer.phase("env_step"):
                self.run_cycle.reset()
            self.needs_reset = False

    def play(self, staged: Staged, stop: threading.Event) -> Item | None:
        """Run one cycle with ``staged`` networks; None if ``stop`` cut it short."""
        with self.timer.phase("take"):
            # Wait for the transfer here: if the first step's dispatch waited for it, the dispatch
            # of every other thread would wait too.
            jax.block_until_ready(staged)
        if hasattr(self.run_cycle, "staged_version"):
            self.run_cycle.staged_version = staged.policy_version
        item, self.step_state = self.run_cycle.run(staged.networks, self.step_state, stop)
        own = getattr(self.run_cycle, "policy_version", None)  # if it takes newer networks itself
        version = staged.policy_version if own is None else own
        numbers = [np.array(x, np.int32) for x in (version, self.index, self.cycle)]
        self.cycle += 1
        self.dropped_cycles += item is None
        if item is None:
            return None
        return item._replace(trajectory=Trajectory(*item.trajectory[:3], *numbers))

    def position(self) -> InferencerPosition:
        """Return where it stands; call this only between cycles."""
        return self.env_thread.call(self._position)

    def _position(self) -> InferencerPosition:
        env: bytes | str = "no episode has begun"
        if not self.needs_reset:
            env = f"{type(self.run_cycle).__name__} has no method position()"
            if hasattr(self.run_cycle, "position"):
                env = self.run_cycle.position()
        return InferencerPosition(self.cycle, owned_copy(self.step_state, self.device), env)

    def leave_position_if_wanted(self) -> None:
        """Set ``left_position`` if a checkpoint has asked for it."""
        if self.position_wanted.is_set():
            position = self.position()
            # Clear the request only after position() has succeeded: if it raises, the Inferencer
            # that takes this one's place is asked instead. Clear it before left_position is set:
            # from then on the checkpoint may be finished, and another may ask.
            self.position_wanted.clear()
            self.left_position = position


def pass_on_wishes(old: Inferencer, new: Inferencer) -> None:
    """Let ``new`` leave the position that a checkpoint wants, or has got, of ``old``."""
    new.left_position = old.left_position
    new.position_wanted.clear()
    if old.position_wanted.is_set():
        new.position_wanted.set()


def name_of_thread(index: int) -> str:
    """Return the name of the thread of an Inferencer."""
    return f"inferencer-{index}"


def run_cycles(
    inferencer: Inferencer,
    staged: Staged,
    hand_off: HandOff,
    schedule: Schedule,
    next_version: int,
    permits: CyclePermits,
    stop: Stop,
) -> Iterator[Item]:
    """Yield one item a cycle until stopped.

    In lockstep, round r acts with the networks published after round r-2. Those for the next round
    are taken before this round is handed over: until then the update loop cannot publish newer
    ones, so all Inferencers act with the same networks. ``stop.soon`` ends a wait for networks that
    will not come, but a round whose networks are there is still played.

    Args:
      staged: The networks that the first cycle acts with: the newest when the run began.
      schedule: async takes the newest networks after every cycle.
      next_version: Lockstep: the policy version that the second of these cycles acts with.
      permits: Async: how many cycles may begin.
    """
    timer = inferencer.timer
    lockstep = schedule == "lockstep"

    def take() -> Staged | None:
        with timer.phase("take"):
            return inferencer.staging.take(stop.soon, at_least=next_version if lockstep else 0)

    def permit() -> bool:
        with timer.phase("take"):
            return permits.take(stop.soon)

    inferencer.begin_if_new()
    newest: Staged | None = staged if lockstep or permit() else None
    if newest is not None and not lockstep and hasattr(inferencer.run_cycle, "compile"):
        inferencer.run_cycle.compile(newest.networks, inferencer.step_state, stop.now)
        newest = take()  # others may have been learned from meanwhile
    while newest is not None and (lockstep or not stop.soon.is_set()):
        item = inferencer.play(newest, stop.now)
        if item is None:
            return
        if lockstep:
            newest = take()
            next_version += 1
        with timer.phase("finish"):
            inferencer.leave_position_if_wanted()
        with timer.phase("shard"):
            item = hand_off(item)
        yield item
        del item  # else this trajectory would stay in memory while the next one is made
        if not lockstep:
            newest = take() if permit() else None


def inferencer_thread(
    inferencer: Inferencer, cycles: Iterator[Item], queue: TrajectoryQueue[Item], stop: Stop
) -> None:
    """Put the items of ``cycles`` into ``queue``; the target of an Inferencer's thread.

    However it ends, the queue stays usable: a failure goes to the update loop; a stop loses at most
    the cycle in flight, which is counted.
    """
    try:
        for item in cycles:
            with inferencer.timer.phase("put"):
                if not queue.put(item, stop.now):
                    inferencer.dropped_cycles += 1
                    return
            del item
    except BaseException as raised:
        error = explained(raised, f"thread {inferencer.thread_name!r}", inferencer)
        if inferencer.fail(error):
            queue.fail(error)
    finally:
        if isinstance(inferencer.failure, EnvHangError):
            # This thread was given up and came back: no other thread could close its environments.
            with contextlib.suppress(Exception):
                inferencer.env.close()


def explained(raised: BaseException, where: str, inferencer: Inferencer) -> BaseException:
    """Return the error that ended an Inferencer, with a note that says where it was raised."""
    error = without_exit(raised)
    note_main_thread(error)
    error.add_note(f"in {where} (Inferencer {inferencer.index}), cycle {inferencer.cycle}")
    return error


def without_exit(raised: BaseException) -> BaseException:
    """Return ``raised``, but for a SystemExit an error that says who called ``sys.exit``.

    SystemExit would end the interpreter silently, and often with an exit code that means success.
    """
    if not isinstance(raised, SystemExit):
        return raised
    who, kind = (
        ("an environment", EnvError) if is_env_failure(raised) else ("an agent", RuntimeError)
    )
    error = kind(f"{who} called sys.exit({raised.code!r})")
    error.__cause__ = raised
    return error
