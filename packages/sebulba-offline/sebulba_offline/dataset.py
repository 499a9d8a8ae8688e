"""Data sets on disk: episodes in files of NumPy arrays, each with a checksum.

A folder holds ``dataset.json`` and files ``rows-00000.npz``, ``rows-00001.npz``, ... A row is what
an environment shows at one time, as in ``sebulba.types.EnvStep``: an episode of L steps has L + 1
rows. Reward and flags of a row are consequences of the action of the row before. The action of the
last row of an episode is zeros. An episode is in one file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import math
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces

from sebulba.errors import CheckpointError, UsageError, refusing, shown, text_of
from sebulba.policies.policy import space_from_json, space_to_json
from sebulba.support.files import check_regular, read_json_object, write_whole
from sebulba.types import PyTree

RECORD_FILE = "dataset.json"
FORMAT = 1
ROWS_A_FILE = 2**17
"""A file is closed after the episode with which it has as many rows."""
MOST_OPEN_BYTES = 2**26
"""And after the episode with which it has as many bytes."""
MOST_HEADER_BYTES = 4096
"""Most bytes of an array in a file before its elements."""
FLAGS = ("terminated", "truncated", "is_first")


class Rows(NamedTuple):
    """Rows in the order of time, ``[R, ...]``, episode after episode."""

    obs: PyTree
    """Observations, ``[R, ...]``; a dict of these for a Dict space."""
    action: np.ndarray
    """The action taken in the row, ``[R, ...]``; zeros in the last row of an episode."""
    reward: np.ndarray
    """Reward of the action of the row before, unclipped, ``[R]`` float32; 0 in a first row."""
    terminated: np.ndarray
    """The episode ended in this row in a terminal state, ``[R]`` bool."""
    truncated: np.ndarray
    """The episode was cut short in this row, ``[R]`` bool."""
    is_first: np.ndarray
    """The row begins an episode, ``[R]`` bool."""

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.is_first)

    @property
    def num_bytes(self) -> int:
        """Of all arrays."""
        return sum(array.nbytes for array in self.named().values())

    def named(self) -> dict[str, np.ndarray]:
        """Return the arrays by the names that they have in a file."""
        others = self._asdict()
        return dict(flat_arrays(others.pop("obs"), "obs")) | others

    def map(self, function: Callable[[np.ndarray], np.ndarray]) -> Rows:
        """Return ``function`` of each array."""
        return Rows(_map(function, self.obs), *map(function, self[1:]))

    def part(self, begin: int, end: int) -> Rows:
        """Return rows ``begin`` to ``end - 1``, without a copy."""
        return self.map(lambda x: x[begin:end])


def _map(function: Callable, tree: PyTree) -> PyTree:
    if isinstance(tree, Mapping):
        return {name: _map(function, part) for name, part in tree.items()}
    return function(tree)


def joined(pieces: list[Rows]) -> Rows:
    """Return rows one after the other."""

    def together(trees: list[PyTree]) -> PyTree:
        if isinstance(trees[0], Mapping):
            return {name: together([tree[name] for tree in trees]) for name in trees[0]}
        return np.concatenate(trees)

    return Rows(*(together(list(parts)) for parts in zip(*pieces, strict=True)))


class Episodes(NamedTuple):
    """Statistics of E episodes."""

    first: np.ndarray
    """Row with which each begins, ``[E]`` int64."""
    lengths: np.ndarray
    """Steps of each, ``[E]`` int64."""
    returns: np.ndarray
    """Sum of the rewards of each, ``[E]`` float64."""
    terminated: np.ndarray
    """Whether each ended in a terminal state, ``[E]`` bool."""


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Episodes in memory, with the spaces of the environment that they are of."""

    folder: Path
    """Where it was read."""
    record: Mapping[str, Any]
    """``dataset.json``."""
    observation_space: gymnasium.Space
    """Of one observation."""
    action_space: gymnasium.Space
    """Of one action."""
    rows: Rows
    """All of them."""

    @property
    def checksum(self) -> str:
        """Tells this data set from others."""
        sums = [one["sha256"] for one in self.record["files"]]
        return hashlib.sha256("".join(sums).encode()).hexdigest()

    def episodes(self) -> Episodes:
        """Return statistics of the episodes."""
        first = np.flatnonzero(self.rows.is_first)
        return Episodes(
            first,
            np.diff(np.append(first, self.rows.num_rows)) - 1,
            np.add.reduceat(self.rows.reward.astype(np.float64), first),
            self.rows.terminated[np.append(first[1:], self.rows.num_rows) - 1],
        )


def read_record(folder: str | Path) -> dict[str, Any]:
    """Return ``dataset.json`` of a data set.

    Raises:
      UsageError: The folder holds no data set, or one of another format.
    """
    file = Path(folder) / RECORD_FILE
    if not file.exists():
        raise UsageError(
            f"{shown(str(folder))} holds no data set: it has no {RECORD_FILE}; record one with "
            f"sebulba dataset record RUN --out {folder}"
        )
    record = read_json_object(file)
    if record.get("format") != FORMAT:
        raise UsageError(
            f"{file} has format {shown(record.get('format'))}, and this Sebulba reads {FORMAT}; "
            "read it with the Sebulba that wrote it"
        )
    counts = [record.get("rows"), record.get("episodes")]
    files = record.get("files")
    if any(type(count) is not int or count < 1 for count in counts) or not files:
        raise UsageError(f"{file} is damaged: it counts no rows; restore it, or record again")
    return record


def load(folder: str | Path) -> Dataset:
    """Read a data set.

    Raises:
      UsageError: It is missing or damaged; file and row are named.
    """
    folder = Path(folder)
    record = read_record(folder)
    try:
        observation, action = (
            space_from_json(record[name]) for name in ("observation_space", "action_space")
        )
        files = [
            (str(one["file"]), str(one["sha256"]), int(one["rows"])) for one in record["files"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"{folder / RECORD_FILE} is damaged ({text_of(error)}); restore it, or record again"
        ) from error
    pieces = [_read(folder, *one, observation, action) for one in files]
    return Dataset(folder, record, observation, action, joined(pieces))


def _read(
    folder: Path,
    name: str,
    checksum: str,
    num_rows: int,
    observation: gymnasium.Space,
    action: gymnasium.Space,
) -> Rows:
    """Return the rows of one file, checked."""
    file = folder / name
    if file.parent != folder:
        raise UsageError(f"{folder / RECORD_FILE} names {shown(name)}, outside its folder")
    check_regular(file, links=False)
    try:
        data = file.read_bytes()
    except OSError as error:
        raise UsageError(
            f"{file} cannot be read ({error.strerror}); restore it, or record again"
        ) from error
    if hashlib.sha256(data).hexdigest() != checksum:
        raise UsageError(
            f"{file} is damaged: its checksum is not that of {RECORD_FILE}; restore it, or record "
            "again"
        )
    wanted = dict(_leaves(observation, "obs")) | {"action": action}
    arrays: dict[str, np.ndarray] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for name_, space in wanted.items():
                arrays[name_] = _array(archive, name_, (num_rows, *space.shape), space.dtype)
            arrays["reward"] = _array(archive, "reward", (num_rows,), np.float32)
            for flag in FLAGS:
                arrays[flag] = _array(archive, flag, (num_rows,), np.bool_)
    except UsageError as error:
        raise UsageError(f"{file} {error}; record again") from error
    except Exception as error:  # damaged bytes may make zipfile and NumPy raise any
        raise UsageError(f"{file} is damaged ({text_of(error)}); record again") from error
    if wrong := wrong_row(arrays, action):
        raise UsageError(f"{file}, {wrong}; leave the episode out, or record again")
    return Rows(_tree(observation, "obs", arrays), *(arrays[name] for name in Rows._fields[1:]))


def _array(archive: zipfile.ZipFile, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return one array; its size is compared first, so that no file can ask for more memory."""
    if f"{name}.npy" not in archive.namelist():
        raise UsageError(f"lacks {name}")
    info = archive.getinfo(f"{name}.npy")
    if info.file_size > math.prod(shape) * np.dtype(dtype).itemsize + MOST_HEADER_BYTES:
        raise UsageError(
            f"has {info.file_size} bytes of {name}, more than {np.dtype(dtype)}{shape}"
        )
    with archive.open(info) as member:
        array = np.lib.format.read_array(io.BytesIO(member.read()), allow_pickle=False)
    if array.shape != shape or array.dtype != dtype:
        raise UsageError(f"has {name} of {array.dtype}{array.shape}, not {np.dtype(dtype)}{shape}")
    return array


def wrong_row(arrays: Mapping[str, np.ndarray], action_space: gymnasium.Space) -> str | None:
    """Return in words what the first wrong row is; None where all are right.

    Values are finite, actions are in the space, and a first row follows exactly a last one.
    """
    found: list[tuple[int, str]] = []

    def note(bad: np.ndarray, what: str) -> None:
        if bad.any():
            row = int(np.argmax(bad))
            found.append((row, f"row {row:,}: {what}"))

    for name, array in arrays.items():
        if array.dtype.kind == "f":
            finite = np.isfinite(array.reshape(len(array), -1)).all(axis=1)
            note(~finite, f"{name} is not finite")
    ends = arrays["terminated"] | arrays["truncated"]
    is_first = arrays["is_first"]
    note(is_first != np.append(True, ends[:-1]), "episodes begin after the last row of another")
    note(is_first & ends, "an episode begins and ends in the same row")
    if len(ends) and not ends[-1]:
        found.append((len(ends) - 1, f"row {len(ends) - 1:,}: the last episode has no end"))
    is_out = np.array(~ends & ~_contained(action_space, arrays["action"]))
    note(is_out, f"the action is not in {action_space}")
    return min(found)[1] if found else None


def _contained(space: gymnasium.Space, values: np.ndarray) -> np.ndarray:
    """Return which of ``values [R, ...]`` are in a space, ``[R]``."""
    match space:
        case spaces.Box():
            low, high = space.low, space.high
        case spaces.Discrete():
            low, high = space.start, space.start + space.n - 1
        case spaces.MultiDiscrete():
            low, high = space.start, space.start + space.nvec - 1
        case _:
            return np.ones(len(values), np.bool_)
    inside = (values >= np.asarray(low)[None]) & (values <= np.asarray(high)[None])
    return np.asarray(inside.reshape(len(values), -1).all(axis=1))


def _leaves(space: gymnasium.Space, name: str) -> Iterator[tuple[str, Any]]:
    """Yield names and spaces of the arrays of an observation."""
    if not isinstance(space, spaces.Dict):
        yield name, space
        return
    for part in sorted(space.spaces):
        yield from _leaves(space[part], f"{name}/{part}")


def _tree(space: gymnasium.Space, name: str, arrays: Mapping[str, np.ndarray]) -> PyTree:
    if not isinstance(space, spaces.Dict):
        return arrays[name]
    return {part: _tree(space[part], f"{name}/{part}", arrays) for part in sorted(space.spaces)}


def flat_arrays(tree: PyTree, name: str) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the arrays of an observation, with names such as ``obs/speed``."""
    if not isinstance(tree, Mapping):
        yield name, tree
        return
    for part in sorted(tree):
        yield from flat_arrays(tree[part], f"{name}/{part}")


class DatasetWriter:
    """Writes a data set, episode by episode; a context manager.

    The data set is complete after every file, so what was written before a crash can be used.
    """

    def __init__(
        self,
        folder: str | Path,
        observation_space: gymnasium.Space,
        action_space: gymnasium.Space,
        *,
        env: str = "",
        about: Mapping[str, Any] | None = None,
        rows_a_file: int = ROWS_A_FILE,
        append: bool = False,
    ) -> None:
        """Begin in a folder.

        Args:
          folder: Made if it is not there.
          observation_space: Of one observation.
          action_space: Of one action.
          env: Id of the environment, for people.
          about: More facts for people, such as who acted.
          rows_a_file: A file is closed after the episode with which it has as many rows, or
            ``MOST_OPEN_BYTES``.
          append: Add to the data set that the folder holds, if it holds one.

        Raises:
          UsageError: The folder cannot be made, or it holds a data set that is not to be added to,
            or of other spaces.
        """
        self._folder = Path(folder)
        self._space, self._action_space = observation_space, action_space
        self._rows_a_file = rows_a_file
        self._open: list[Rows] = []
        self._open_rows = self._open_bytes = 0
        self._files: list[dict[str, Any]] = []
        self._about = {
            "format": FORMAT,
            "env": env,
            "observation_space": space_to_json(observation_space),
            "action_space": space_to_json(action_space),
            "about": dict(about or {}),
        }
        if (self._folder / RECORD_FILE).exists():
            self._go_on(append)
        with refusing(f"{shown(str(folder))} cannot be made", "use another folder"):
            self._folder.mkdir(parents=True, exist_ok=True)

    def _go_on(self, append: bool) -> None:
        """Add to what the folder holds."""
        if not append:
            raise UsageError(
                f"{shown(str(self._folder))} holds a data set already; use another folder, or "
                "delete it"
            )
        record = read_record(self._folder)
        for name in ("observation_space", "action_space"):
            if record.get(name) != self._about[name]:
                raise UsageError(
                    f"{shown(str(self._folder))} holds a data set with another {name}; use another "
                    "folder"
                )
        self._files = record["files"]
        self._about["about"] = record.get("about", {}) | self._about["about"]

    @property
    def episodes(self) -> int:
        """Episodes so far."""
        return sum(one["episodes"] for one in self._files) + len(self._open)

    def add(self, episode: Rows) -> None:
        """Add one whole episode.

        Raises:
          UsageError: It is none, or has a value that is not finite; the row is named.
        """
        if wrong := wrong_row(episode.named(), self._action_space):
            raise UsageError(f"episode {self.episodes} cannot be recorded: {wrong}; leave it out")
        self._open.append(episode)
        self._open_rows += episode.num_rows
        self._open_bytes += episode.num_bytes
        if self._open_rows >= self._rows_a_file or self._open_bytes >= MOST_OPEN_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what is open as one file, and the record of all.

        Raises:
          CheckpointError: The disk is full, or the folder cannot be written. Files before are
            whole; episodes of this one are lost.
        """
        if not self._open:
            return
        episodes, self._open = self._open, []
        self._open_rows = self._open_bytes = 0
        try:
            self._write(episodes)
        except OSError as error:
            raise CheckpointError(
                f"the data set {shown(str(self._folder))} cannot be written "
                f"({error.strerror or error}); check that the disk has space and the folder is "
                "writable. Episodes that were written before can be used"
            ) from error

    def _write(self, episodes: list[Rows]) -> None:
        rows = joined(episodes)
        name = f"rows-{len(self._files):05}.npz"
        data = io.BytesIO()
        np.savez(data, **rows.named())  # type: ignore[arg-type]
        with open(self._folder / name, "wb") as file:
            file.write(data.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        checksum = hashlib.sha256(data.getbuffer()).hexdigest()
        one = {"file": name, "rows": rows.num_rows, "episodes": len(episodes), "sha256": checksum}
        files = [*self._files, one]
        counts = {name: sum(one[name] for one in files) for name in ("rows", "episodes")}
        counts["steps"] = counts["rows"] - counts["episodes"]
        record = self._about | counts | {"files": files}
        write_whole(self._folder / RECORD_FILE, json.dumps(record, indent=2) + "\n")
        self._files = files

    def close(self) -> None:
        """Write what is left; may be called twice."""
        self.flush()

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
