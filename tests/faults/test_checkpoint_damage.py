"""Random damage to checkpoints: none crashes, hangs or loads silently wrong."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sebulba.checkpoints.part_files import Snapshot
from sebulba.checkpoints.store import CheckpointStore
from sebulba.errors import CheckpointError
from tests.checkpoints.test_store import assert_equal, snapshot_of
from tests.faults.counts import rounds

OLDER, NEWER = 1000, 2000


def flip_a_bit(folder: Path, files: list[Path], rng: np.random.Generator) -> None:
    file = files[rng.integers(len(files))]
    data = bytearray(file.read_bytes())
    place = rng.integers(8 * len(data)) if data else 0
    if data:
        data[place // 8] ^= 1 << (place % 8)
    file.write_bytes(data)


def truncate(folder: Path, files: list[Path], rng: np.random.Generator) -> None:
    file = files[rng.integers(len(files))]
    data = file.read_bytes()
    file.write_bytes(data[: rng.integers(len(data) + 1)])


def remove(folder: Path, files: list[Path], rng: np.random.Generator) -> None:
    files[rng.integers(len(files))].unlink()


def empty(folder: Path, files: list[Path], rng: np.random.Generator) -> None:
    files[rng.integers(len(files))].write_bytes(b"")


def swap(folder: Path, files: list[Path], rng: np.random.Generator) -> None:
    one, other = (files[place] for place in rng.choice(len(files), 2, replace=False))
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)


def overwrite(folder: Path, files: list[Path], rng: np.random.Generator) -> None:
    file = files[rng.integers(len(files))]
    file.write_bytes(rng.bytes(file.stat().st_size))


def take_a_file_of_the_older(folder: Path, files: list[Path], rng: np.random.Generator) -> None:
    file = files[rng.integers(len(files))]
    older = [path for path in (folder.parent / f"{OLDER:012d}").rglob("*") if path.is_file()]
    shutil.copyfile(sorted(older)[rng.integers(len(older))], file)


KINDS = [flip_a_bit, truncate, remove, empty, swap, overwrite, take_a_file_of_the_older]
Damage = Callable[[Path, list[Path], np.random.Generator], None]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> CheckpointStore:
    store = CheckpointStore(tmp_path_factory.mktemp("whole"))
    store.save(OLDER, snapshot_of(OLDER))
    store.save(NEWER, snapshot_of(NEWER), score=1.5)
    return store


def loaded_or_refused(store: CheckpointStore) -> Snapshot | None:
    try:
        return store.load(NEWER)
    except CheckpointError as error:
        assert str(store.folder) in str(error) and ";" in str(error)
        return None


@pytest.mark.parametrize("damage", KINDS, ids=lambda damage: damage.__name__)
def test_damage_is_found_and_the_older_checkpoint_is_used(whole, tmp_path, damage: Damage):
    num_found = 0
    num_rounds = rounds(4, 30)  # of each of seven kinds
    for seed in range(num_rounds):
        copy = tmp_path / str(seed)
        shutil.copytree(whole.folder, copy)
        store = CheckpointStore(copy)
        folder = copy / f"{NEWER:012d}"
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        damage(folder, files, np.random.default_rng(seed))
        snapshot = loaded_or_refused(store)
        lines: list[str] = []
        number, used = store.load_newest(say=lines.append)
        if snapshot is None:
            num_found += 1
            assert number == OLDER and len(lines) == 1
        else:
            assert number == NEWER and not lines
            assert_equal(snapshot, snapshot_of(NEWER))
        assert_equal(used, snapshot_of(number))
        shutil.rmtree(copy)
    # The rest did no harm: white space in the manifest, an empty file emptied, two alike swapped.
    assert num_found > 0
