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
from sebulba.inference.cores import Cores, run_on
from sebulba.inference.cycle import Cycle, CycleOutput
from sebulba.metrics.timer import PhaseTimer
from sebulba.options import Schedule
from sebulba.transport.item import HandOff, Item
from sebulba.transport.permits import CyclePermits, Stop
from sebulba.transport.staging import Staged, Staging
from sebulba.transport.trajectory_queue import TrajectoryQueue
from sebulba.trees import owned_copy
from sebulba.types import EnvAdapter, PyTree, Trajectory

INFERENCER_PHASES = ("take", "act", "env_step", "cycle", "finish", "shard", "put")
WAITING_PHASES = ("take", "put")
"""In which an Inferencer waits for others; any other that lasts is a hang."""
ENV_PHASES = ("env_step", "cycle")
"""In which its environment works."""


class InferencerPosition(NamedTuple):
    """Where an Inferencer stands between two cycles."""

    cycle: int
    """Number of the next."""
    step_state: PyTree
    """A copy, on the inference device; None if it was lost."""
    env: bytes | str
    """What ``Cycle.position`` returned: the environment's position, or why there is none."""


@dataclasses.dataclass
class Inferencer:
    """One vector environment on one inference device, and where they stand.

    The fields below ``cores`` are written by the running cycles only, and by the loop between
    runs.
    """

    index: int
    """Its number, over all inference devices."""
    device: jax.Device
    env: EnvAdapter
    run_cycle: Cycle
    staging: Staging
    """Its device's slot."""
    timer: PhaseTimer
    cores: Cores | None = None
    """Those that its thread runs on; None: any."""
    needs_reset: bool = True
    """Begin new episodes before the next cycle."""
    step_state: PyTree = None
    """Goes with the environment's present position."""
    cycle: int = 0
    """Number of the next cycle."""
    dropped_cycles: int = 0
    """Cycles that a stop cut short."""
    position_wanted: threading.Event = dataclasses.field(default_factory=threading.Event)
    """Leave ``left_position`` at the end of the next cycle."""
    left_position: InferencerPosition | None = None
    failure: BaseException | None = None
    """What ended its run, or why it was given up: the first of both."""
    _failing: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    @property
    def thread_name(self) -> str:
        """What its thread is called."""
        return f"inferencer-{self.index}"

    def fail(self, error: BaseException) -> bool:
        """Take note of ``error``; False if it has failed before, which ``error`` may follow from.

        A thread that was given up because it hangs may still raise when it comes back.
        """
        with self._failing:
            if self.failure is not None:
                return False
            self.failure = error
            return True

    def position(self) -> InferencerPosition:
        """Return where it stands; not while a cycle runs."""
        step_state = owned_copy(self.step_state, self.device)
        return InferencerPosition(self.cycle, step_state, self._env_position())

    def _env_position(self) -> bytes | str:
        if self.needs_reset:
            return "no episode has begun"
        if not hasattr(self.run_cycle, "position"):
            return f"{type(self.run_cycle).__name__} has no method position()"
        return self.run_cycle.position()

    def leave_position_if_wanted(self) -> None:
        """Leave it for a checkpoint."""
        if self.position_wanted.is_set():
            position = self.position()
            # Not before: if that raised, who comes next is asked. Not after the next line, at which
            # the checkpoint may be finished and another begun, which asks again.
            self.position_wanted.clear()
            self.left_position = position


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

    In lockstep, round r acts with the networks published after round r-2, and those for the next
    round are taken before this round is handed over: until then the update loop cannot publish
    any newer, so no Inferencer ever sees others. There a stop ends the wait for networks that
    will not come, never a round for which they are there.

    Args:
      inferencer: Whose environment steps.
      staged: What the first cycle acts with: the newest networks when the run began.
      hand_off: Places a cycle's output on the update devices.
      schedule: async takes the newest networks after every cycle.
      next_version: Lockstep: the policy version that the second of these cycles acts with.
      permits: Async: how many cycles may begin.
      stop: How it is told to end.
    """
    timer = inferencer.timer
    lockstep = schedule == "lockstep"

    def take() -> Staged | None:
        with timer.phase("take"):
            return inferencer.staging.take(stop.soon, at_least=next_version if lockstep else 0)

    def permit() -> bool:
        with timer.phase("take"):
            return permits.take(stop.soon)

    if inferencer.needs_reset:
        with timer.phase("env_step"):
            inferencer.run_cycle.reset()
        inferencer.needs_reset = False
    newest: Staged | None = staged if lockstep or permit() else None
    while newest is not None and (lockstep or not stop.soon.is_set()):
        with timer.phase("take"):
            # Otherwise the first step's dispatch waits for the transfer, and with it those of
            # every other thread.
            jax.block_until_ready(newest)
        output, inferencer.step_state = inferencer.run_cycle.run(
            newest.networks, inferencer.step_state, stop.now
        )
        cycle = inferencer.cycle
        inferencer.cycle += 1
        if output is None:
            inferencer.dropped_cycles += 1
            return
        version = newest.policy_version
        if lockstep:
            newest = take()
            next_version += 1
        with timer.phase("finish"):
            inferencer.leave_position_if_wanted()
        with timer.phase("shard"):
            item = _hand_over(inferencer.index, cycle, version, output, hand_off)
        del output  # a trajectory that is kept here is kept while the next one is made
        yield item
        del item
        if not lockstep:
            newest = take() if permit() else None


def _hand_over(
    index: int, cycle: int, version: int, output: CycleOutput, hand_off: HandOff
) -> Item:
    trajectory = Trajectory(
        output.env_step,
        output.action,
        output.extras,
        policy_version=np.array(version, np.int32),
        inferencer=np.array(index, np.int32),
        cycle=np.array(cycle, np.int32),
    )
    placed = hand_off(trajectory, output.initial_step_state, output.final_step_state)
    return Item(index, cycle, version, *placed, output.step_infos)


def inferencer_thread(
    inferencer: Inferencer, cycles: Iterator[Item], queue: TrajectoryQueue[Item], stop: Stop
) -> None:
    """Run the ``cycles`` of an Inferencer: the target of its thread.

    Every way out leaves the queue usable: a failure goes to the update loop, a stop loses at most
    the cycle in flight, which is counted.
    """
    try:
        run_on(inferencer.cores)
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
            # It was given up, but came back: nobody else could close these.
            with contextlib.suppress(Exception):
                inferencer.env.close()


def explained(raised: BaseException, where: str, inferencer: Inferencer) -> BaseException:
    """Return what to raise for what ended an Inferencer, with a note that says where it was."""
    error = without_exit(raised)
    error.add_note(f"in {where} (Inferencer {inferencer.index}), cycle {inferencer.cycle}")
    return error


def without_exit(raised: BaseException) -> BaseException:
    """Return ``raised``, or, for a SystemExit, an error that says who called for it.

    SystemExit would end the interpreter, silently and often with a success for an exit code.
    """
    if not isinstance(raised, SystemExit):
        return raised
    who, kind = (
        ("an environment", EnvError) if is_env_failure(raised) else ("an agent", RuntimeError)
    )
    error = kind(f"{who} called sys.exit({raised.code!r})")
    error.__cause__ = raised
    return error
