"""Saves the checkpoints of one run, also when it stops or fails."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence

import jax

from sebulba.checkpoints.checkpointer import LARGE_EXPERIENCE_BYTES, Checkpointer
from sebulba.checkpoints.part_files import Snapshot
from sebulba.errors import CheckpointError, NotFiniteError, is_env_failure, text_of
from sebulba.inference.inferencer import Inferencer, InferencerPosition
from sebulba.learning.update import Updater
from sebulba.loops.resuming import spaces_of
from sebulba.loops.session import Session
from sebulba.loops.snapshot_trees import SnapshotWriter
from sebulba.support.trees import num_bytes, owned_copy
from sebulba.transport.item import Item

LARGE_BYTES = 200_000_000
"""A save at the end of a run is announced if it has more bytes, which take over a second."""
STOPPED_AMID = "the run was stopped during a cycle"


@dataclasses.dataclass
class Begun:
    """A checkpoint that has the learner's part and still needs the Inferencers' parts."""

    env_steps: int
    """Number of the checkpoint."""
    writer: SnapshotWriter
    """Holds the copy of the learner's part."""
    experience: Snapshot | None
    """The experience, if it is kept apart and due."""
    score: float | None
    """Mean training return."""
    consumed_up_to: int
    """Sum over the Inferencers of the number of the next cycle to be consumed."""


class Saving:
    """Copies what the learner and the Inferencers hold, and hands it to the checkpointer.

    A checkpoint begins between two trajectories with the learner's part. Every Inferencer leaves
    its part at the end of the cycle that it is in, and training goes on meanwhile. In lockstep both
    parts and the round in flight make one exact position. In async the trajectories that an
    Inferencer made between the two parts are not in the checkpoint, and are lost as at a stop.
    """

    def __init__(self, session: Session, updater: Updater) -> None:
        """Prepare; without a checkpointer nothing is ever saved."""
        self._checkpointer = session.attached.checkpointer
        self._session = session
        self._updater = updater
        self._is_due = False
        self._begun: Begun | None = None
        self._learner_saved_at: int | None = None
        """Counter of cycles at which ``save_learner`` last saved."""
        self._next_cycles = {i.index: i.cycle for i in session.inferencers}

    def consumed(self, item: Item) -> None:
        """Note a trajectory that the update loop took; those of one Inferencer come in order."""
        self._next_cycles[item.inferencer] = int(item.trajectory.cycle) + 1

    @property
    def is_due(self) -> bool:
        """Whether it is time to begin a checkpoint; it stays so until one is begun."""
        if self._checkpointer is not None and self._begun is None and not self._is_due:
            self._is_due = self._checkpointer.is_due(self._session.counters.updates)
        return self._is_due

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint was begun, or is being written."""
        return self._begun is not None or (
            self._checkpointer is not None and self._checkpointer.is_busy
        )

    @property
    def experience_is_due(self) -> bool:
        """Whether a checkpoint that begins now has the experience, if that is kept apart."""
        return self._checkpointer is not None and self._checkpointer.experience_is_due

    def begin(self, *, with_experience: bool) -> None:
        """Copy the learner's part and ask the Inferencers for theirs."""
        self._is_due = False
        if self._checkpointer is None:
            return
        with self._session.timer.phase("checkpoint"):
            self._warn_of_failure(self._checkpointer)
            self._check_finite()
            self._begun = self._learner(self._checkpointer, with_experience=with_experience)
            for inferencer in self._session.inferencers:
                inferencer.left_position = None
                inferencer.position_wanted.set()

    def finish_when_ready(self, items: Sequence[Item]) -> None:
        """Save the begun checkpoint once every Inferencer has left its position.

        The checkpointer writes it while training goes on.

        Args:
          items: Lockstep: the round that was in flight when the checkpoint was begun.
        """
        begun, checkpointer = self._begun, self._checkpointer
        if begun is None or checkpointer is None:
            return
        inferencers = self._session.inferencers
        positions = [x for i in inferencers if (x := i.left_position) is not None]
        if len(positions) < len(inferencers):
            return
        with self._session.timer.phase("checkpoint"):
            self._begun = None
            for inferencer in inferencers:
                inferencer.left_position = None
            made = sum(position.cycle for position in positions)
            # Those that Inferencers made meanwhile, and that are not in the round.
            lost = made - begun.consumed_up_to - len(items)
            snapshot = self._whole(begun, positions, items, lost)
            checkpointer.save(begun.env_steps, snapshot, begun.experience, begun.score)

    def save_learner(self) -> None:
        """Save the learner's part alone, as an Inferencer is slow to end and may never end.

        The checkpoint at the end of the run replaces this one. Several hosts save together or not
        at all.
        """
        counters, checkpointer = self._session.counters, self._checkpointer
        saved = self._learner_saved_at == counters.cycles
        if checkpointer is None or saved or self._session.num_hosts > 1:
            return
        with self._session.timer.phase("checkpoint"):
            checkpointer.say("an Inferencer is slow to end; what was learned is saved meanwhile")
            inferencers = self._session.inferencers
            positions = [InferencerPosition(i.cycle, None, STOPPED_AMID) for i in inferencers]
            self._check_finite()
            lost = sum(i.cycle for i in inferencers) - sum(self._next_cycles.values())
            self._save_now(checkpointer, positions, lost=lost)
            checkpointer.replace(counters.env_steps)
            self._learner_saved_at = counters.cycles

    def save_at_the_end(self) -> None:
        """Save everything once the Inferencers have ended, and wait until it is written."""
        if self._checkpointer is None:
            return
        with self._session.timer.phase("checkpoint"):
            # Positions come first: what ended the run, such as a signal, may soon end workers.
            positions = [_position_at_the_end(i) for i in self._session.inferencers]
            self._check_finite()
            self._save_now(self._checkpointer, positions, self._session.kept_round)

    def save_after(self, error: BaseException) -> None:
        """Save what was learned in a run that ``error`` ended; warn if that fails."""
        if self._checkpointer is None or isinstance(error, NotFiniteError | CheckpointError):
            return
        try:
            if not self._updater.is_whole():
                return
            inferencers = self._session.inferencers
            positions = [_position_after_failure(i) for i in inferencers]
            lost = sum(inferencer.dropped_cycles for inferencer in inferencers)
            self._save_now(self._checkpointer, positions, lost=lost)
        except Exception as failure:
            warnings.warn(
                f"what was learned could not be saved: {type(failure).__name__}: {failure}",
                RuntimeWarning,
                stacklevel=2,
            )

    def _check_finite(self) -> None:
        """Raise NotFiniteError rather than save networks from which training cannot go on."""
        self._updater.wait()  # raises what has failed
        if not self._updater.is_whole():
            raise NotFiniteError(
                f"the networks are not finite after {self._session.counters.updates} updates, and "
                "are not saved. A lower learning rate, gradient clipping, or scaled rewards and "
                "observations are the usual remedies"
            )

    def _learner(self, checkpointer: Checkpointer, *, with_experience: bool = True) -> Begun:
        """Return the learner's part, copied."""
        session = self._session
        counters, episodes = session.counters, session.episodes
        assert session.programs is not None
        writer = SnapshotWriter()
        writer.record.update(
            counters=dataclasses.asdict(counters),
            episodes=episodes.state(),
            seconds=session.seconds,
            **checkpointer.about(),
            run=dataclasses.asdict(session.programs.run),
            schedule=session.options.schedule,
            generations=session.envs.num_generations,
            spaces=spaces_of(session.agent.spec),
        )
        networks, opt = self._updater.learned()
        if checkpointer.has_learner:
            writer.add("networks", networks)
            writer.add("opt", opt)
        # A replay that is saved apart may be older, and networks need the newest of these.
        writer.add("lasting", self._updater.lasting_experience())
        separate: Snapshot | None = None
        if self._updater.experience_bytes() < LARGE_EXPERIENCE_BYTES:
            writer.add_experience(self._updater.experience())
            writer.record["experience"] = None
        elif with_experience:
            apart = SnapshotWriter()
            apart.add_experience(self._updater.experience())
            apart.record["counters"] = dataclasses.asdict(counters)
            separate = apart.snapshot()
        return Begun(
            env_steps=counters.env_steps,
            writer=writer,
            experience=separate,
            score=episodes.score(),
            consumed_up_to=sum(self._next_cycles.values()),
        )

    def _whole(
        self,
        begun: Begun,
        positions: Sequence[InferencerPosition],
        items: Sequence[Item],
        lost: int,
    ) -> Snapshot:
        """Return the snapshot with the Inferencers' parts."""
        begun.writer.record["lost_cycles"] = lost
        begun.writer.add_inferencers(positions, self._updater.of_this_host(list(items)))
        return begun.writer.snapshot()

    def _save_now(
        self,
        checkpointer: Checkpointer,
        positions: Sequence[InferencerPosition],
        items: Sequence[Item] = (),
        *,
        lost: int = 0,
    ) -> None:
        self._give_up_begun(checkpointer)
        begun = self._learner(checkpointer)
        snapshot, experience = self._whole(begun, positions, items, lost), begun.experience
        size = num_bytes((snapshot.arrays, experience.arrays if experience else {}))
        if size > LARGE_BYTES:
            checkpointer.say(f"saving {size / 1e6:.0f} MB, which takes some seconds")
        checkpointer.save_now(begun.env_steps, snapshot, experience, begun.score)

    def _give_up_begun(self, checkpointer: Checkpointer) -> None:
        """Drop the begun checkpoint; wait for the one being written, to free the memory of both."""
        self._begun = None
        for inferencer in self._session.inferencers:
            inferencer.position_wanted.clear()
            inferencer.left_position = None
        checkpointer.wait()
        self._warn_of_failure(checkpointer)

    @staticmethod
    def _warn_of_failure(checkpointer: Checkpointer) -> None:
        if error := checkpointer.pop_error():
            warnings.warn(
                f"a checkpoint could not be saved, and the run continues without it: {error}",
                RuntimeWarning,
                stacklevel=3,
            )


def _position_at_the_end(inferencer: Inferencer) -> InferencerPosition:
    """Return where an Inferencer stands, without its environment if that fails now."""
    try:
        return inferencer.position()
    except Exception as error:
        if not is_env_failure(error):
            raise
        warnings.warn(
            f"the environment of Inferencer {inferencer.index} failed while it was saved, and "
            f"begins new episodes when the run is resumed: {text_of(error)}",
            RuntimeWarning,
            stacklevel=2,
        )
        step_state = owned_copy(inferencer.step_state, inferencer.device)
        return InferencerPosition(inferencer.cycle, step_state, f"it failed: {text_of(error)}")


def _position_after_failure(inferencer: Inferencer) -> InferencerPosition:
    """Return the position, without the environment, of an Inferencer of a run that failed."""
    leaves = jax.tree.leaves(inferencer.step_state)
    lost = any(leaf.is_deleted() for leaf in leaves)
    step_state = None if lost else inferencer.step_state
    return InferencerPosition(inferencer.cycle, step_state, "the run failed")
