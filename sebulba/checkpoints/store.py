"""The store: a folder with the checkpoints of a run."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sebulba.checkpoints.manifest import (
    DamageError,
    Manifest,
    UnreadableError,
    check_files,
    check_sizes,
    read_manifest,
)
from sebulba.checkpoints.part_files import RECORD_FILE, Snapshot, cause_of, read_parts, write_parts
from sebulba.errors import CheckpointError, UsageError
from sebulba.support.checks import at_least
from sebulba.support.files import PARTIAL, absolute, flush_to_disk, read_json_object, take_place
from sebulba.support.trust import Trust

NUMBER_DIGITS = 12
REPLACED = f"{PARTIAL}replaced-"
"""Prefix of the name of a checkpoint while another of its number takes its place."""


class CheckpointStore:
    """Saves snapshots under numbers, each whole or not at all, and reads back the newest.

    A checkpoint is a folder: ``record.json``, ``blobs/``, ``arrays/`` (by orbax) and
    ``manifest.json``, which has a checksum for everything. Only one process may save into the
    folder, from any thread. Others may read, but what they read may be deleted meanwhile.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep_last: int = 3,
        milestone_every: int | None = None,
        by_orbax: bool = True,
    ) -> None:
        """Make a store; nothing is written yet.

        Args:
          folder: Folder of the store; made by the first save.
          keep_last: How many of the newest checkpoints to keep, at least 1.
          milestone_every: Env steps; the first checkpoint at or after every multiple of this is
            kept. None keeps no milestones.
          by_orbax: Whether orbax writes the arrays, which it cannot on one of several hosts.

        Raises:
          UsageError: ``keep_last`` or ``milestone_every`` is below 1.
        """
        at_least(1, "keep_last", keep_last)
        at_least(1, "milestone_every", milestone_every)
        self.folder = absolute(folder)
        self._keep_last = keep_last
        self._milestone_every = milestone_every
        self._by_orbax = by_orbax
        self._damaged: set[int] = set()
        """Numbers known to be damaged, though sizes may be right, and abandoned ones."""
        self._saving = threading.Lock()

    def numbers(self) -> list[int]:
        """Return the numbers of all checkpoints, damaged ones too, in ascending order.

        Raises:
          CheckpointError: The folder cannot be read.
        """
        try:
            names = [e.name for e in os.scandir(self.folder) if e.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(
                f"{self.folder} cannot be read ({error.strerror}); name the checkpoint folder of "
                "a run"
            ) from error
        numbers = (int(name) for name in names if name.isdecimal())
        return sorted(number for number in numbers if self._folder_of(number).name in names)

    def usable(self) -> set[int]:
        """Return the numbers of the checkpoints that are neither abandoned nor known as damaged."""
        return {number for number in self.numbers() if number not in self._damaged}

    # Saving.

    def save(
        self,
        number: int,
        snapshot: Snapshot,
        *,
        score: float | None = None,
        protect: Collection[int] = (),
    ) -> Path:
        """Save a snapshot, then delete the checkpoints that need not be kept.

        A whole checkpoint of that number is left as it is; a damaged one is replaced.

        Args:
          score: The networks' score, the higher the better; ignored if it is not finite.
          protect: Numbers of checkpoints not to delete.

        Returns:
          The folder of the checkpoint.

        Raises:
          UsageError: ``number`` is negative.
          CheckpointError: The snapshot could not be saved; nothing of it is left, and all other
            checkpoints are as they were. Or it was saved, but an old one could not be deleted.
        """
        if number < 0:
            raise UsageError(f"number={number} must not be negative; give env steps")
        # NaN cannot be compared with others.
        score = float(score) if score is not None and math.isfinite(score) else None
        with self._saving:
            folder = self._folder_of(number)
            if not (folder.is_dir() and self._is_whole(number)):
                try:
                    self._write(folder, number, snapshot, score)
                except CheckpointError:
                    raise
                except Exception as error:  # orbax may raise any: on a full disk a ValueError
                    raise CheckpointError(
                        f"checkpoint {number} cannot be saved in {self.folder} "
                        f"({cause_of(error)}); check that the disk has space and that the folder "
                        "is writable. Older checkpoints are unchanged"
                    ) from error
                self._damaged.discard(number)
            try:
                self._delete_old({number, *protect})
            except OSError as error:
                raise CheckpointError(
                    f"checkpoint {folder} is saved, but older ones cannot be deleted "
                    f"({error.strerror}: {error.filename}); delete them by hand"
                ) from error
            return folder

    def _write(self, folder: Path, number: int, snapshot: Snapshot, score: float | None) -> None:
        partial = self.folder / f"{PARTIAL}{folder.name}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.put_right()
            for path in self.folder.glob(f"{PARTIAL}*"):  # of a process that was killed
                shutil.rmtree(path)
            partial.mkdir()
            write_parts(partial, number, snapshot, score, by_orbax=self._by_orbax)
            flush_to_disk(partial)
            # The old one, damaged or abandoned, is deleted only once the new one is in its place.
            take_place(partial, folder, self.folder / f"{REPLACED}{folder.name}")
        finally:
            # If this fails, the next save deletes it.
            shutil.rmtree(partial, ignore_errors=True)

    def put_right(self) -> None:
        """Put a checkpoint in its place if a process was killed between two renames.

        Only who saves into the folder may call it.

        Raises:
          CheckpointError: It cannot be renamed.
        """
        for old in self.folder.glob(f"{REPLACED}*"):
            folder = self.folder / old.name.removeprefix(REPLACED)
            new = self.folder / f"{PARTIAL}{folder.name}"
            if folder.exists():
                continue
            try:
                (new if new.exists() else old).rename(folder)  # a new one was whole by then
            except OSError as error:
                raise CheckpointError(
                    f"{old} cannot be renamed to {folder.name} ({error.strerror}); rename it by "
                    "hand"
                ) from error

    def abandon(self, numbers: Iterable[int]) -> None:
        """Let the next saves replace or delete these, since training does not go on from them."""
        self._damaged.update(numbers)

    def _is_whole(self, number: int) -> bool:
        try:
            check_files(self._folder_of(number), self._manifest(number).files)
        except DamageError:
            return False
        return number not in self._damaged

    # Deleting.

    def _delete_old(self, protect: Collection[int]) -> None:
        """Delete checkpoints that are damaged, abandoned or not to be kept, unless protected."""
        scores: dict[int, float | None] = {}
        kept = set(protect)
        for number in self.numbers():
            try:
                manifest = self._manifest(number)
                check_sizes(self._folder_of(number), manifest.files)
            except UnreadableError:
                kept.add(number)
            except DamageError:
                self._damaged.add(number)
            except CheckpointError:  # another version wrote it, and may still need it
                kept.add(number)
            else:
                if number not in self._damaged:
                    scores[number] = manifest.score
        kept |= numbers_to_keep(scores, self._keep_last, self._milestone_every)
        for number in self.numbers():
            if number not in kept:
                self._delete(self._folder_of(number))

    def _delete(self, folder: Path) -> None:
        # Rename it first, to a name that nobody reads and that the next save deletes: if deleting
        # were interrupted, it would be taken for a damaged checkpoint.
        doomed = self.folder / f"{PARTIAL}delete-{folder.name}"
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed)

    # Loading.

    def record(self, number: int) -> Mapping[str, Any]:
        """Return the record of a checkpoint without checking it; empty if it cannot be read."""
        try:
            return read_json_object(self._folder_of(number) / RECORD_FILE)
        except UsageError:
            return {}

    def load(self, number: int, *, trust: bool = False) -> Snapshot:
        """Read a checkpoint and compare all of it with its checksums.

        Args:
          trust: Read it even if the key of this user did not sign it; what it holds of environments
            may be a pickle, which can run anything.

        Raises:
          CheckpointError: It does not exist, is damaged, cannot be read, or has another format.
          UsageError: It is not signed and not trusted.
        """
        # Check the files before they are decoded: damaged bytes could crash native code.
        manifest = self.check(number, trust=trust)
        with self._noting_damage(number):
            return read_parts(self._folder_of(number), manifest)

    def check(self, number: int, *, trust: bool = False) -> Manifest:
        """Compare all of a checkpoint with its checksums, without decoding it; errors as ``load``.

        Returns:
          Its manifest.
        """
        folder = self._folder_of(number)
        if not folder.is_dir():
            raise CheckpointError(f"checkpoint not found: {folder}; there are {self.numbers()}")
        with self._noting_damage(number):
            manifest = self._manifest(number)
            Trust(manifest.doubt, trust).check(f"checkpoint {folder} is to be opened")
            check_files(folder, manifest.files)
        return manifest

    @contextlib.contextmanager
    def _noting_damage(self, number: int) -> Iterator[None]:
        try:
            yield
        except UnreadableError:
            raise
        except DamageError:
            self._damaged.add(number)
            raise

    def load_newest(
        self,
        *,
        strict: bool = False,
        say: Callable[[str], None] = print,
        read: Callable[[int], Any] | None = None,
    ) -> tuple[int, Any] | None:
        """Read the newest checkpoint that is whole.

        Args:
          strict: Raise at a damaged checkpoint rather than pass over it.
          read: Reads the checkpoint of a number; None takes ``load``. Where it raises DamageError,
            the checkpoint is passed over.

        Returns:
          The number and what was read; None if there is no checkpoint at all.

        Raises:
          CheckpointError: All are damaged, or with ``strict`` the newest; or the newest whole one
            was written in another format.
        """
        passed_over: list[DamageError] = []
        for number in reversed(self.numbers()):
            try:
                loaded = (read or self.load)(number)
            except DamageError as error:
                if strict:
                    raise
                passed_over.append(error)
                continue
            for passed in passed_over:
                say(f"{passed.problem}; checkpoint {number} is used instead")
            return number, loaded
        if passed_over:
            raise CheckpointError(
                f"all {len(passed_over)} checkpoints in {self.folder} cannot be restored, the "
                f"newest because {passed_over[0].problem}; restore one from a copy, or train again"
            ) from passed_over[0]
        return None

    def _manifest(self, number: int) -> Manifest:
        return read_manifest(self._folder_of(number), number)

    def _folder_of(self, number: int) -> Path:
        return self.folder / f"{number:0{NUMBER_DIGITS}d}"


def numbers_to_keep(
    scores: Mapping[int, float | None], keep_last: int, milestone_every: int | None
) -> set[int]:
    """Return the numbers of the newest checkpoints, the best and the milestones.

    Args:
      scores: The score of each whole checkpoint, by number; the higher the better.
      keep_last: How many of the highest numbers to keep.
      milestone_every: Keep the first number at or after every multiple of this; None keeps none.
    """
    numbers = sorted(scores)
    kept = set(numbers[-keep_last:])
    scored = [(score, number) for number, score in scores.items() if score is not None]
    if scored:
        kept.add(max(scored)[1])  # of equal scores the later checkpoint
    if milestone_every is not None:
        multiple = 0
        for number in numbers:
            if number // milestone_every > multiple:
                multiple = number // milestone_every
                kept.add(number)
    return kept
