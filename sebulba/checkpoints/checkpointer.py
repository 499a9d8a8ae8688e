"""Decides when a loop saves, hands snapshots to the store, and reads the newest one back."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from sebulba.checkpoints.manifest import DamageError, UnreadableError
from sebulba.checkpoints.part_files import Snapshot
from sebulba.checkpoints.saver import Saver
from sebulba.checkpoints.store import CheckpointStore
from sebulba.errors import CheckpointError, UsageError
from sebulba.support.checks import at_least
from sebulba.support.files import absolute

EXPERIENCE_FOLDER = "experience"
HOST_FOLDER = "host-{}"
"""Where the parts of a host other than host 0 are, by the numbers of their checkpoints."""
LEARNER_PARTS = ("networks", "opt")
"""What all hosts have alike, and host 0 saves."""
LARGE_EXPERIENCE_BYTES = 64 * 2**20
"""An experience (a replay) of at least this size is saved apart, at its own interval."""
FINAL_SAVE_S = 3600.0
"""Longest time that a run waits for a save to be written."""


class Checkpoint(NamedTuple):
    """A checkpoint that was read and found whole."""

    env_steps: int
    """Environment steps at which it was begun, which are its number."""
    snapshot: Snapshot
    """Its content, with the experience."""
    experience_env_steps: int
    """Environment steps at which its experience was saved; fewer if an older one is used."""


class Checkpointer:
    """Saves snapshots in the background, at intervals, in a folder that one process owns.

    It is a context manager; ``close()`` waits for what is being written.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        every_s: float = 600.0,
        every_updates: int | None = None,
        experience_every_s: float = 1800.0,
        keep_last: int = 3,
        milestone_every: int | None = None,
        about: Callable[[], Mapping[str, Any]] = dict,
        say: Callable[[str], None] = print,
        host: int = 0,
        num_hosts: int = 1,
    ) -> None:
        """Save into ``folder``; nothing is written yet.

        Args:
          folder: Folder of the checkpoints; made at the first save.
          every_s: Seconds between saves; 0 begins a save as soon as the last one is written.
          every_updates: Updates between saves, instead of ``every_s``.
          experience_every_s: Seconds between saves of an experience of at least
            ``LARGE_EXPERIENCE_BYTES``; the end of a run always saves it.
          keep_last: How many to keep, beside the best (by mean training return) and milestones.
          milestone_every: Environment steps between checkpoints that are kept for ever.
          about: Returns more entries, as JSON, for the record of a checkpoint.
          say: Gets lines for the user, such as that a damaged checkpoint is passed over.
          host: Which of the hosts this is that learn together; all save into the same folder.
          num_hosts: How many there are. A checkpoint is whole if it has the parts of all.

        Raises:
          UsageError: A number is out of range.
        """
        for name, value, least in (
            ("every_s", every_s, 0),
            ("every_updates", every_updates, 1),
            ("experience_every_s", experience_every_s, 0),
            ("keep_last", keep_last, 1),
            ("milestone_every", milestone_every, 1),
        ):
            at_least(least, name, value)
        self.folder = absolute(folder)
        self._keep_last = keep_last
        self._every_s = every_s
        self._every_updates = every_updates
        self._experience_every_s = experience_every_s
        self.about = about
        self.say = say
        self._store = CheckpointStore(
            self.folder,
            keep_last=keep_last,
            milestone_every=milestone_every,
            by_orbax=num_hosts == 1,
        )
        self._host, self._num_hosts = host, num_hosts
        self._parts = {
            other: CheckpointStore(
                self.folder / HOST_FOLDER.format(other), keep_last=keep_last + 1, by_orbax=False
            )
            for other in range(1, num_hosts)
        }
        """Of the hosts other than host 0, whose part is the checkpoint itself."""
        self._experiences = [
            CheckpointStore(store.folder / EXPERIENCE_FOLDER, keep_last=1, by_orbax=num_hosts == 1)
            for store in (self._store, *self._parts.values())
        ]
        """Of each host."""
        for own in (self._parts.get(host, self._store), self._experiences[host]):
            own.put_right()
        self._saver = Saver()
        self._saved_at = self._experience_saved_at = time.monotonic()
        self._saved_updates = 0
        self._experience_number: int | None = None

    # Saving.

    def resume_at(self, updates: int) -> None:
        """Count the intervals between saves from now and from this number of updates."""
        self._saved_updates = updates
        self._saved_at = time.monotonic()

    def check_new(self) -> None:
        """Raise UsageError if the folder has checkpoints, since a new run cannot share it."""
        if numbers := self._store.numbers():
            raise UsageError(
                f"folder={self.folder} has checkpoints of another run, up to {numbers[-1]:,} env "
                "steps, and a new run needs an empty folder; resume with "
                "loop.restore(checkpointer.load_newest()), or give a new folder"
            )
        self._go_on_from(-1, None)  # parts of hosts whose checkpoint was never whole are of no use

    def is_due(self, updates: int) -> bool:
        """Tell whether to save now, never while a save is written; if so, begin a new interval.

        Of several hosts host 0 says it.
        """
        if self._host:
            return False
        if self._every_updates is None:
            due = time.monotonic() - self._saved_at >= self._every_s
        else:
            due = updates // self._every_updates > self._saved_updates // self._every_updates
        if not due or self._saver.is_busy:
            return False
        self.resume_at(updates)
        return True

    @property
    def is_busy(self) -> bool:
        """Whether a save is being written."""
        return self._saver.is_busy

    @property
    def has_learner(self) -> bool:
        """Whether checkpoints of this host have networks and optimizer state: those of host 0."""
        return self._host == 0

    def replace(self, env_steps: int) -> None:
        """Let the next checkpoint of this number replace the one that is there."""
        self._store.abandon([env_steps])

    def begin_experience_anew(self) -> None:
        """Save the experience with the next checkpoint, since the saved one has been dropped."""
        self._experience_number = None

    @property
    def experience_is_due(self) -> bool:
        """Whether to save an experience that is kept apart."""
        waited_s = time.monotonic() - self._experience_saved_at
        return self._experience_number is None or waited_s >= self._experience_every_s

    def save(
        self, env_steps: int, snapshot: Snapshot, experience: Snapshot | None, score: float | None
    ) -> None:
        """Write a checkpoint in the background.

        Args:
          env_steps: Number of the checkpoint.
          snapshot: What to save; nobody may write to its arrays any more.
          experience: The experience, if it is kept apart and due.
          score: Mean training return; the checkpoint with the highest is kept.
        """
        if experience is not None:
            self._experience_saved_at = time.monotonic()
        if not self._saver.submit(partial(self._write, env_steps, snapshot, experience, score)):
            raise CheckpointError("another checkpoint is still being written; call is_due first")

    def wait(self) -> None:
        """Wait for what is being written.

        Raises:
          CheckpointError: Writing takes longer than ``FINAL_SAVE_S`` seconds.
        """
        if not self._saver.wait(FINAL_SAVE_S):
            raise CheckpointError(
                f"the checkpoint in {self.folder} was not written within {FINAL_SAVE_S:.0f} s; "
                "check the disk, and resume from the previous checkpoint"
            )

    def save_now(
        self, env_steps: int, snapshot: Snapshot, experience: Snapshot | None, score: float | None
    ) -> None:
        """Write the last checkpoint and wait until it is written; call ``wait`` before.

        With several hosts it replaces one of this number, which another host may have given up.
        """
        if self._parts:
            self._parts.get(self._host, self._store).abandon([env_steps])
        self.save(env_steps, snapshot, experience, score)
        self.wait()
        if error := self.pop_error():
            raise error

    def _write(
        self, env_steps: int, snapshot: Snapshot, experience: Snapshot | None, score: float | None
    ) -> None:
        if self._num_hosts > 1:
            record = {**snapshot.record, "hosts": self._num_hosts}
            snapshot = snapshot._replace(record=record)
        if experience is not None:
            in_use = self._experiences_in_use()
            self._experience_number = None  # if it cannot be written, it stays due
            self._experiences[self._host].save(env_steps, experience, protect=in_use)
            self._experience_number = env_steps
        if "experience" not in snapshot.record:
            record = {**snapshot.record, "experience": self._experience_number}
            snapshot = snapshot._replace(record=record)
        if self._host:
            # A part goes once its checkpoint has gone, which host 0 decides.
            kept = self._store.numbers()
            self._parts[self._host].save(env_steps, snapshot, protect=kept)
        else:
            self._store.save(env_steps, snapshot, score=score, protect=self._last_whole())

    def _last_whole(self) -> set[int]:
        """Return the newest checkpoint of which all hosts have saved their parts, if there are any.

        It stays until they have those of a newer one. A part has its name once it was written.
        """
        if not self._parts:
            return set()
        stores = [self._store, *self._parts.values()]
        for number in sorted(set.intersection(*(store.usable() for store in stores)), reverse=True):
            if len({store.record(number).get("experience") for store in stores}) == 1:
                return {number}
        return set()

    def _experiences_in_use(self) -> set[int]:
        """Return the numbers of this host's experiences that the newest checkpoints need.

        The best and the milestones are kept without theirs, which may be gigabytes each.
        """
        newest = {*self._store.numbers()[-self._keep_last :], *self._last_whole()}
        mine = self._parts.get(self._host, self._store)
        named = {mine.record(number).get("experience") for number in newest}
        return {number for number in (*named, self._experience_number) if number is not None}

    def pop_error(self) -> CheckpointError | None:
        """Return the error of a save in the background, once; None if there is no new one."""
        error = self._saver.pop_error()
        if error is None or isinstance(error, CheckpointError):
            return error
        wrapped = CheckpointError(
            f"no checkpoint was saved in {self.folder}: {type(error).__name__}: {error}; resume "
            "from the previous checkpoint"
        )
        wrapped.__cause__ = error
        return wrapped

    # Reading.

    def load(self, env_steps: int, *, trust: bool = False) -> Checkpoint:
        """Return the checkpoint of this number, as ``load_newest`` would.

        Raises:
          CheckpointError: It is not there, or not whole.
          UsageError: It is not signed and not trusted.
        """
        checkpoint = self._load(env_steps, trust=trust)
        self._go_on_from(env_steps, checkpoint.snapshot.record["experience"])
        return checkpoint

    def load_newest(self, *, strict: bool = False, trust: bool = False) -> Checkpoint | None:
        """Return the newest checkpoint that is whole; None if there are no checkpoints.

        Args:
          strict: Raise at a damaged checkpoint rather than pass over it.
          trust: Read it even if the key of this user did not sign it. What it holds of environments
            may be a pickle, which can run anything.

        Raises:
          CheckpointError: All are damaged; or the newest is, and ``strict``; or none can be read.
          UsageError: It is not signed and not trusted.
        """
        read = partial(self._load, trust=trust)
        found = self._store.load_newest(strict=strict, say=self.say, read=read)
        if found is None:
            self._go_on_from(-1, None)
            return None
        number, checkpoint = found
        self._go_on_from(number, checkpoint.snapshot.record["experience"])
        return checkpoint

    def _go_on_from(self, number: int, experience: int | None) -> None:
        """Let later saves replace newer checkpoints, in which something is damaged or missing."""
        self._experience_number = experience
        newest = -1 if experience is None else experience
        self._store.abandon(n for n in self._store.numbers() if n > number)
        for part in self._parts.values():
            part.abandon(n for n in part.numbers() if n > number)
        experiences = self._experiences[self._host]
        experiences.abandon(n for n in experiences.numbers() if n > newest)

    def _load(self, number: int, *, trust: bool) -> Checkpoint:
        snapshot = self._store.load(number, trust=trust)
        if (saved := snapshot.record.get("hosts", 1)) != self._num_hosts:
            raise UsageError(
                f"distributed.num_hosts={self._num_hosts}, but the checkpoint in {self.folder} has "
                f"the parts of {saved}; resume with the same number of hosts"
            )
        if self._host:
            snapshot = self._of_this_host(number, snapshot, trust)
        self._check_others(number, snapshot.record["experience"], trust)
        experience = snapshot.record["experience"]
        if experience is None:
            return Checkpoint(number, snapshot, number)
        with _damaging(self.folder / str(number), "its replay"):
            apart = self._experiences[self._host].load(experience, trust=trust)
        arrays = {**snapshot.arrays, **apart.arrays}
        keys = {**snapshot.record["keys"], **apart.record["keys"]}
        record = {**snapshot.record, "keys": keys, "rows": apart.record.get("rows", {})}
        return Checkpoint(number, snapshot._replace(record=record, arrays=arrays), experience)

    def _check_others(self, number: int, experience: int | None, trust: bool) -> None:
        """Raise DamageError unless the parts of the other hosts are whole, and their replays.

        Args:
          number: Of the checkpoint.
          experience: Number of the experience kept apart, which all hosts saved together.
          trust: As for ``load``.
        """
        for host, experiences in enumerate(self._experiences):
            if host == self._host:
                continue
            store = self._parts.get(host, self._store)
            with _damaging(self.folder / str(number), f"its part of host {host}"):
                if host:  # that of host 0 has been read
                    store.check(number, trust=trust)
                theirs = store.record(number).get("experience")
                if theirs != experience:
                    raise CheckpointError(f"it goes with replay {theirs}, not {experience}")
                if experience is not None:
                    experiences.check(experience, trust=trust)

    def _of_this_host(self, number: int, whole: Snapshot, trust: bool) -> Snapshot:
        """Return this host's part with what all hosts have alike, which host 0 saves."""
        with _damaging(self.folder / str(number), f"its part of host {self._host}"):
            mine = self._parts[self._host].load(number, trust=trust)
        learner = {
            name: array
            for name, array in whole.arrays.items()
            if name.partition("/")[0] in LEARNER_PARTS
        }
        keys = {name: kind for name, kind in whole.record["keys"].items() if name in learner}
        record = {**mine.record, "keys": {**keys, **mine.record["keys"]}}
        return mine._replace(record=record, arrays={**learner, **mine.arrays})

    # Ending.

    def close(self) -> None:
        """Wait for what is being written and end the saving thread; may be called twice."""
        self._saver.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@contextlib.contextmanager
def _damaging(checkpoint: Path, part: str) -> Iterator[None]:
    """Make the checkpoint damaged if a part of it is damaged, or not there any more."""
    try:
        yield
    except UnreadableError:
        raise
    except CheckpointError as error:
        what = error.problem if isinstance(error, DamageError) else str(error)
        raise DamageError(checkpoint, f"{part}: {what}") from error
