"""The update loop: takes and counts trajectories, learns from them, and publishes networks."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from sebulba.agent import Agent
from sebulba.cluster.hosts.agreement import Agreed, Word
from sebulba.cluster.hosts.rounds import Rounds
from sebulba.learning.progress import Progress
from sebulba.learning.update import Updater
from sebulba.metrics.timer import PhaseTimer
from sebulba.metrics.window import MetricWindow
from sebulba.options import LoopOptions
from sebulba.support.trees import on_device
from sebulba.transport.item import HandedOver, Item
from sebulba.transport.source import TrajectorySource
from sebulba.transport.staging import Staged
from sebulba.types import PyTree, StepInfos, Trajectory

LEARNER_PHASES = ("get", "restart", "observe", "update", "publish", "metrics", "checkpoint")

ObserveCycle = Callable[[Trajectory, StepInfos], Mapping[str, Any] | None]


class Beside(Protocol):
    """What a run does beside learning; the update loop calls it at the right moments."""

    window: MetricWindow
    """The window of metrics that is open."""

    def consumed(self, item: Item) -> None:
        """Note a trajectory that was taken; those of one Inferencer come in their order."""
        ...

    def checkpoint_when_due(self) -> None:
        """Begin a checkpoint if one is due; networks, counters and trajectories agree now."""
        ...

    def checkpoint_is_due(self) -> bool:
        """Tell whether one is due; several hosts then begin it together."""
        ...

    def checkpoint_is_busy(self) -> bool:
        """Tell whether a checkpoint is being made, so that no other can begin."""
        ...

    def experience_is_due(self) -> bool:
        """Tell whether a checkpoint that begins now has the experience, if that is kept apart."""
        ...

    def begin_checkpoint(self, *, with_experience: bool) -> None:
        """Begin one now, as all hosts do."""
        ...

    def finish_checkpoint(self, round_in_flight: list[Item]) -> None:
        """Finish a checkpoint that was begun, once every Inferencer has left its position."""
        ...

    def evaluate_and_write_when_due(self) -> None:
        """Begin an evaluation and write metrics, each if it is due."""
        ...

    def end_takes_long(self) -> None:
        """Save what was learned, since Inferencers that were told to end still run."""
        ...


class UpdateLoop:
    """Consumes what the Inferencers of a run make until a number of trajectories is reached."""

    def __init__(
        self,
        options: LoopOptions,
        observe_cycle: ObserveCycle | None,
        agent: Agent,
        progress: Progress,
        updater: Updater,
        timer: PhaseTimer,
        stop_requested: threading.Event,
        *,
        inference_only: bool,
        rounds: Rounds | None = None,
    ) -> None:
        """Prepare a run.

        Args:
          options: How the loop runs.
          observe_cycle: Called with every trajectory before it is donated; returns more metrics.
          agent: Says how many updates are due.
          progress: Counters, episodes and staging, which last over several runs.
          updater: Holds the state to train.
          timer: Times the calling thread in ``LEARNER_PHASES``.
          stop_requested: Set when the user asks for a stop.
          inference_only: Never update.
          rounds: Agrees with other hosts; None if this one learns alone.
        """
        self._options = options
        self._observe_cycle = observe_cycle
        self._agent = agent
        self._progress = progress
        self._updater = updater
        self._timer = timer
        self._stop_requested = stop_requested
        self._inference_only = inference_only
        self._rounds = rounds
        self._num_hosts = 1 if rounds is None else rounds.hosts.number
        self._agreed: Agreed | None = None
        """What the hosts agreed on for this round; None if this one learns alone."""
        self._acting: PyTree | None = None
        """The acting networks of now; None if the updater has to be asked for them."""
        self._expected: HandedOver | None = None
        self._frame_skip = 1
        self._target = 0
        self._warned = False

    def begin(self, num_cycles: int, frame_skip: int, expected: HandedOver | None) -> None:
        """Publish the first networks.

        Args:
          num_cycles: Number of trajectories that this run consumes.
          frame_skip: Frames of the game in an environment step.
          expected: Shapes of what the Inferencers will hand over; None if they are not known.
        """
        self._target = self._progress.counters.cycles + num_cycles
        self._frame_skip = frame_skip
        self._expected = None if self._inference_only else expected
        self._publish()

    def consume(self, source: TrajectorySource, beside: Beside) -> None:
        """Consume trajectories until the target is reached or a stop is requested."""
        self._source, self._beside = source, beside
        if self._options.schedule == "lockstep":
            self._consume_rounds()
        else:
            self._consume_stream()

    @property
    def stopped(self) -> bool:
        """Whether a stop ended the run before its last cycle."""
        return self._progress.counters.cycles < self._target

    def prepare_while_idle(self) -> None:
        """Prepare the update, once, while the Inferencers compile and run their first cycles."""
        expected, self._expected = self._expected, None
        if expected is not None:
            due = self._due_after(self._progress.counters.cycles + 1)
            with self._timer.phase("update"):
                self._updater.prepare(*expected, due=due)

    # The two schedules.

    def _consume_stream(self) -> None:
        """Async: take trajectories as they come; publish after each that had updates due.

        With other hosts a trajectory of each makes a round. At a stop what they have of one is
        dropped, as is what still lies in the queue.
        """
        counters, beside = self._progress.counters, self._beside
        while counters.cycles < self._target and not self._ends():
            item = self._next_with_others()
            if item is not None and self._consume(item):
                counters.policy_version += 1
                self._publish()
            del item  # which would be kept while the next one is made
            beside.evaluate_and_write_when_due()
            self._checkpoint_when_due()
            beside.finish_checkpoint([])

    def _next_with_others(self) -> Item | None:
        """Return the next trajectory of the stream; with other hosts once each of them has one."""
        if self._rounds is None:
            return self._next_of_stream()
        # To drop what is too late is a matter of each host; a round is what all learn from.
        items, agreed = self._agree(lambda: [item] if (item := self._next_in_time()) else [])
        if agreed.stop:
            self._progress.counters.dropped_stop_cycles += len(items)
            return None
        self._count_those_of_all(agreed)
        return items[0]

    def _next_of_stream(self) -> Item | None:
        with self._timer.phase("get"):
            return self._source.next_item(wait_s=0.0)

    def _next_in_time(self) -> Item | None:
        """Return the next trajectory that is not too late; None at a stop."""
        while (item := self._next_of_stream()) is not None and self._drops(item):
            pass
        return item

    def _consume_rounds(self) -> None:
        """Lockstep: one trajectory of each Inferencer, in their order, then one publish.

        Nothing is published after the last round. So every Inferencer finishes exactly the round
        that is in flight and finds no networks for another; that round is kept for the next run.
        """
        counters, progress, beside = self._progress.counters, self._progress, self._beside
        while True:
            items = self._round(progress.kept_round)
            progress.kept_round = []
            if self._agreed is not None:
                self._count_those_of_all(self._agreed)
            beside.finish_checkpoint(items)
            while items:  # none is kept longer than it is needed
                self._consume(items.pop(0))
            counters.policy_version += 1
            if counters.cycles >= self._target or self._ends():
                break
            # Begin a checkpoint before the publish that lets the Inferencers go on: it then gets
            # their positions after the round that they are in, which fit the learner's state.
            self._checkpoint_when_due()
            self._publish()
            beside.evaluate_and_write_when_due()
        self._source.begin_no_more()
        progress.kept_round = self._round([])

    def _round(self, kept: list[Item]) -> list[Item]:
        """Return the kept round, or the next; with other hosts once all of them have theirs."""
        if self._rounds is None:
            return kept or self._next_round()
        return self._agree(lambda: kept or self._next_round())[0]

    def _agree(self, take: Callable[[], list[Item]]) -> tuple[list[Item], Agreed]:
        """Return what ``take`` does, once the other hosts have taken theirs, and what all do next.

        Raises:
          HostError: Another host could not take its own.
          Exception: ``take`` raised it, and the others know.
        """
        assert self._rounds is not None
        began = time.perf_counter()
        error: Exception | None = None
        items: list[Item] = []
        try:
            items = take()
        except Exception as raised:
            error = raised
        infos = [item.step_infos for item in items]
        word = Word(
            failed=error is not None,
            stop=self._stop_requested.is_set(),
            due=self._beside.checkpoint_is_due(),
            busy=self._beside.checkpoint_is_busy(),
            with_experience=self._beside.experience_is_due(),
            waited_s=time.perf_counter() - began,
            episodes=sum(len(info.episode_returns) for info in infos),
            masked=sum(int(info.masked_truncation.sum()) for info in infos),
        )
        with self._timer.phase("get"):
            self._updater.wait()  # its collectives and this one would share threads on a CPU
            self._agreed = self._rounds.agree(word, error)
        return items, self._agreed

    def _checkpoint_when_due(self) -> None:
        """Begin a checkpoint if one is due; with other hosts if all of them begin it now."""
        if self._agreed is None:
            self._beside.checkpoint_when_due()
        elif self._agreed.checkpoint and not self._agreed.stop:
            self._beside.begin_checkpoint(with_experience=self._agreed.with_experience)

    def _ends(self) -> bool:
        """Tell whether the run ends with this round: a stop was requested, here or elsewhere."""
        if self._rounds is None:
            return self._stop_requested.is_set()
        if self._agreed is None or not self._agreed.stop:
            return False
        self._stop_requested.set()
        return True

    def _count_those_of_all(self, agreed: Agreed) -> None:
        counters = self._progress.counters
        counters.episodes += agreed.total("episodes")
        counters.masked_truncations += agreed.total("masked")

    def _next_round(self) -> list[Item]:
        with self._timer.phase("get"):
            return self._source.next_round(self._beside.end_takes_long)

    # One trajectory.

    def _consume(self, item: Item) -> bool:
        """Count, observe and learn from one trajectory; True if updates were due."""
        counters, timer, window = self._progress.counters, self._timer, self._beside.window
        if self._drops(item):
            return False
        self._beside.consumed(item)
        self._count(item)
        window.add_cycle(counters.policy_version - item.policy_version, self._source.fullness)
        if self._observe_cycle is not None:
            with timer.phase("observe"):
                window.add_observed(self._observe_cycle(item.trajectory, item.step_infos))
        if self._inference_only:
            return False
        due = self._due_after(counters.cycles)
        with timer.phase("update"):
            self._acting = self._updater.consume(
                item.trajectory,
                item.initial_step_state,
                item.final_step_state,
                updates=counters.updates,
                due=due,
            )
        counters.updates += due
        return due > 0

    def _drops(self, item: Item) -> bool:
        """Tell whether networks that are too old made ``item``; if so, count it and drop it."""
        counters, most = self._progress.counters, self._options.max_policy_lag
        if most is None or counters.policy_version - item.policy_version <= most:
            return False
        self._beside.consumed(item)
        counters.dropped_lag_cycles += 1
        self._source.give_permit()
        return True

    def _due_after(self, cycles: int) -> int:
        """Return how many updates are due after trajectory number ``cycles``, counted from 1."""
        warm_up_from = self._progress.counters.warm_up_from
        return self._agent.num_off_policy_optims_per_cycle(cycles - warm_up_from)

    def _count(self, item: Item) -> None:
        counters = self._progress.counters
        env_steps = item.step_infos.episode_end.size * self._num_hosts
        counters.cycles += 1
        counters.env_steps += env_steps
        counters.frames += env_steps * self._frame_skip
        masked = int(item.step_infos.masked_truncation.sum())
        if masked:
            self._warn_of_masked()
        if self._agreed is None:  # else those of all hosts have been counted
            counters.episodes += len(item.step_infos.episode_returns)
            counters.masked_truncations += masked
        self._progress.episodes.add(item.step_infos)

    def _warn_of_masked(self) -> None:
        """Say once that the environment gives no last observations, though the agent uses them."""
        if self._warned or self._inference_only:
            return
        self._warned = True
        if self._agent.uses_final_obs:
            warnings.warn(
                "the last step before a truncation is not learned from: the environment resets in "
                "the same step and does not say what was observed before that; give it in "
                "info['final_obs'], or use AutoresetMode.NEXT_STEP (masked_truncations counts "
                "such steps)",
                stacklevel=2,
            )

    def _publish(self) -> None:
        with self._timer.phase("publish"):
            if self._acting is None:
                self._acting = self._updater.acting_networks()
            for device, staging in self._progress.staging.items():
                version = self._progress.counters.policy_version
                staging.publish(Staged(version, on_device(self._acting, device)))
