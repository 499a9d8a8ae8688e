"""Checkpoints on disk: what is saved comes back exactly, is whole or not there, and is kept."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sebulba.checkpoints import store as store_module
from sebulba.checkpoints.checkpointer import Checkpointer
from sebulba.checkpoints.manifest import FORMAT, MANIFEST_FILE, read_manifest
from sebulba.checkpoints.part_files import Snapshot
from sebulba.checkpoints.saver import SAVER_THREAD, Saver
from sebulba.checkpoints.store import CheckpointStore, numbers_to_keep
from sebulba.errors import CheckpointError, HangError, UsageError
from sebulba.support import files as files_module
from tests.faults.counts import rounds

DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
    *("bfloat16", "float8_e4m3fn", "float8_e5m2", "int4"),
]
DEADLINE_S = 300.0


def snapshot_of(seed: int = 0) -> Snapshot:
    rng = np.random.default_rng(seed)
    return Snapshot(
        record={"env_steps": seed, "lr": 1e-4, "names": ["a", "ü"]},
        arrays={
            "networks/params/Dense_0/kernel": rng.normal(size=(3, 4)).astype(np.float32),
            "networks/params/Dense_0/bias": rng.normal(size=4).astype(ml_dtypes.bfloat16),
            "opt/count": np.asarray(seed, np.int32),
            "replay/empty": np.zeros((0, 5), np.uint8),
        },
        blobs={"envs/0": rng.bytes(50), "envs/1": b""},
    )


def assert_equal(got: Snapshot, wanted: Snapshot) -> None:
    assert got.record == wanted.record
    assert dict(got.blobs) == dict(wanted.blobs)
    assert list(got.arrays) == list(wanted.arrays)
    for name, array in wanted.arrays.items():
        found = got.arrays[name]
        assert type(found) is np.ndarray
        assert (found.shape, found.dtype) == (array.shape, array.dtype), name
        assert found.tobytes() == array.tobytes(), name


def partials(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.fixture
def store(tmp_path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


# What is saved comes back.


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    size = int(np.prod(shape)) * dtype.itemsize
    data = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8)
    if dtype.name in ("bool", "int4"):
        data = data & 1  # other bits mean nothing
    array = data.copy().view(dtype).reshape(shape)
    return array.T if draw(st.booleans()) else array


@pytest.mark.timeout(1200)
@settings(
    max_examples=rounds(10, 300),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    arrays=st.dictionaries(st.text(max_size=20), arrays(), max_size=4),
    blobs=st.dictionaries(st.text(max_size=20), st.binary(max_size=20), max_size=2),
    record=st.dictionaries(
        st.text(), st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False)
    ),
)
def test_every_dtype_shape_and_name_comes_back(store, arrays, blobs, record):
    shutil.rmtree(store.folder, ignore_errors=True)
    snapshot = Snapshot(record, arrays, blobs)
    store.save(7, snapshot)
    assert_equal(store.load(7), snapshot)


def test_loaded_arrays_may_be_written_to(store):
    store.save(1, snapshot_of())
    for array in store.load(1).arrays.values():
        array[...] = 0
    assert_equal(store.load(1), snapshot_of())


@pytest.mark.parametrize(
    "array",
    [
        np.asarray(["a"]),
        np.asarray([object()]),
        np.zeros(2, ">f4"),
        np.zeros(2, np.longdouble),
        np.zeros(2, [("a", "f4")]),
    ],
    ids=["strings", "objects", "another byte order", "long doubles", "records"],
)
def test_arrays_that_cannot_be_saved_are_refused_by_name(store, array):
    with pytest.raises(CheckpointError, match="array odd/one has dtype"):
        store.save(1, Snapshot({}, {"odd/one": array}))
    assert store.numbers() == [] and partials(store.folder) == []


def test_a_record_that_is_not_json_is_refused(store):
    with pytest.raises(CheckpointError, match="record is not JSON"):
        store.save(1, Snapshot({"a": object()}, {}))
    assert store.numbers() == [] and partials(store.folder) == []


def test_bad_arguments_are_refused(tmp_path, store):
    with pytest.raises(UsageError, match="keep_last=0 must be at least 1"):
        CheckpointStore(tmp_path, keep_last=0)
    with pytest.raises(UsageError, match="milestone_every=0 must be at least 1"):
        CheckpointStore(tmp_path, milestone_every=0)
    with pytest.raises(UsageError, match="number=-1 must not be negative"):
        store.save(-1, snapshot_of())


def test_orbax_is_imported_by_the_first_save_only():
    code = (
        "import sys, sebulba.checkpoints.store, sebulba.checkpoints.saver\n"
        "print(sorted({'jax', 'orbax', 'tensorstore'} & sys.modules.keys()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout == "[]\n", done.stderr


# What there is.


def test_there_is_nothing_at_first(store):
    assert store.numbers() == []
    assert store.load_newest() is None
    with pytest.raises(CheckpointError, match="checkpoint not found"):
        store.load(3)


def test_only_folders_with_padded_numbers_count(store):
    store.save(5, snapshot_of())
    for name in (".partial-000000000006", "7", "000000000008x", "0000000000009", "tmp"):
        (store.folder / name).mkdir()
    (store.folder / "000000000010").write_text("")
    assert store.numbers() == [5]


def test_a_whole_checkpoint_is_left_alone(store):
    store.save(1, snapshot_of(1))
    store.save(1, snapshot_of(2))
    assert_equal(store.load(1), snapshot_of(1))


def test_a_damaged_checkpoint_is_replaced(store):
    folder = store.save(1, snapshot_of(1))
    flip(folder / "blobs" / "000000")
    store.save(1, snapshot_of(2))
    assert_equal(store.load(1), snapshot_of(2))


@pytest.mark.parametrize("exchanges", [True, False])
def test_the_old_one_is_there_until_the_new_one_is_and_deleting_may_fail(
    store, monkeypatch, exchanges
):
    folder, rmtree, seen = store.save(1, snapshot_of(1)), shutil.rmtree, []

    def rmtree_fails(path, ignore_errors=False):
        if path.exists():  # the old one, by its new name
            seen.append(store.load(1))
            if not ignore_errors:
                raise OSError("planted")
        else:
            rmtree(path, ignore_errors=ignore_errors)

    store.abandon([1])
    with monkeypatch.context() as patch:
        patch.setattr(store_module.shutil, "rmtree", rmtree_fails)
        if not exchanges:
            patch.setattr(files_module, "exchange", lambda one, other: False)
        store.save(1, snapshot_of(2))
    assert seen
    for one in seen:
        assert_equal(one, snapshot_of(2))
    store.save(2, snapshot_of(3))
    assert not partials(folder.parent)


def test_where_the_new_one_gets_no_name_the_old_one_has_its_own_again(store, monkeypatch):
    store.save(1, snapshot_of(1))
    rename, renamed = Path.rename, []

    def rename_fails(path, target):
        renamed.append(path.name)
        if len(renamed) == 2:
            raise OSError("planted")
        return rename(path, target)

    store.abandon([1])
    with monkeypatch.context() as patch:
        patch.setattr(files_module, "exchange", lambda one, other: False)
        patch.setattr(Path, "rename", rename_fails)
        with pytest.raises(CheckpointError, match="planted"):
            store.save(1, snapshot_of(2))
    assert len(renamed) == 3
    assert_equal(store.load(1), snapshot_of(1))


class KilledError(BaseException):
    """In the place of kill -9, after which a process does nothing more."""


@pytest.fixture
def kill_at(monkeypatch):
    """Return what lets nothing be renamed or deleted from the n-th rename on."""
    calls = [0]

    def set_limit(limit: int, *, exchanges: bool) -> None:
        calls[0] = 0

        def limited(function, counts):
            def call(*arguments, **options):
                calls[0] += counts and calls[0] < limit
                if calls[0] >= limit:
                    raise KilledError
                return function(*arguments, **options)

            return call

        exchange = files_module.exchange if exchanges else lambda one, other: False
        monkeypatch.setattr(files_module, "exchange", limited(exchange, exchanges))
        monkeypatch.setattr(Path, "rename", limited(Path.rename, True))
        monkeypatch.setattr(shutil, "rmtree", limited(shutil.rmtree, False))

    return set_limit


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("limit", [1, 2, 3])
def test_no_kill_between_renames_loses_a_number(tmp_path, kill_at, monkeypatch, limit, exchanges):
    store = CheckpointStore(tmp_path)
    store.save(1, snapshot_of(1))
    store.abandon([1])
    kill_at(limit, exchanges=exchanges)
    with contextlib.suppress(KilledError):
        store.save(1, snapshot_of(2))
    monkeypatch.undo()
    Checkpointer(tmp_path).close()
    after = CheckpointStore(tmp_path)
    assert after.numbers() == [1]
    assert_equal(after.load(1), snapshot_of(1 if limit == 1 else 2))
    after.save(2, snapshot_of(3))
    assert not partials(tmp_path)


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_no_kill_leaves_a_policy_without_a_folder(tmp_path, kill_at, monkeypatch, limit):
    def write(number):
        def into(folder):
            folder.mkdir()
            (folder / "file").write_text(str(number))

        return into

    folder = tmp_path / "policy"
    files_module.replace_folder(folder, write(1))
    kill_at(limit, exchanges=True)
    with contextlib.suppress(KilledError):
        files_module.replace_folder(folder, write(2))
    monkeypatch.undo()
    assert (folder / "file").read_text() == ("1" if limit == 1 else "2")


# Retention.


def test_the_last_the_best_and_the_protected_are_kept(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2)
    scores = {1: 0.5, 2: 3.0, 3: None, 4: float("nan"), 5: 1.0, 6: None}
    for number, score in scores.items():
        store.save(number, Snapshot({}, {}), score=score, protect={1})
    assert store.numbers() == [1, 2, 5, 6]
    store.save(7, Snapshot({}, {}), score=float("inf"))
    assert store.numbers() == [2, 6, 7]


def test_milestones_are_kept_also_after_a_restart(tmp_path):
    for number in (3, 12, 15, 21, 39, 41, 44, 46):
        store = CheckpointStore(tmp_path, keep_last=1, milestone_every=10)
        store.save(number, Snapshot({}, {}))
    assert store.numbers() == [12, 21, 39, 41, 46]


@given(
    scores=st.dictionaries(st.integers(0, 60), st.none() | st.floats(-1, 1), min_size=1),
    keep_last=st.integers(1, 5),
    every=st.none() | st.integers(1, 20),
)
def test_what_is_kept_is_still_kept_once_the_rest_is_gone(scores, keep_last, every):
    kept = numbers_to_keep(scores, keep_last, every)
    assert max(scores) in kept and kept <= scores.keys()
    remaining = {number: scores[number] for number in kept}
    assert numbers_to_keep(remaining, keep_last, every) == kept


def test_damaged_checkpoints_do_not_count_as_kept(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2)
    for number in (1, 2):
        store.save(number, snapshot_of(number))
    flip(tmp_path / "000000000002" / "record.json")  # of the right size, so that only load sees it
    assert store.load_newest(say=lambda line: None)[0] == 1
    store.save(3, snapshot_of(3))
    assert store.numbers() == [1, 3]
    (tmp_path / "000000000003" / "record.json").unlink()
    store.save(4, snapshot_of(4))
    assert store.numbers() == [1, 4]


def test_what_cannot_be_read_now_is_not_deleted(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path, keep_last=1)
    store.save(1, snapshot_of(1))
    read_bytes = Path.read_bytes

    def no_more_files(path: Path) -> bytes:
        if "000000000001" in str(path):
            raise OSError(errno.EMFILE, "Too many open files")
        return read_bytes(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", no_more_files)
        with pytest.raises(CheckpointError, match=r"manifest.json \(Too many open files\)"):
            store.load(1)
        store.save(2, snapshot_of(2))
    assert store.numbers() == [1, 2]
    assert_equal(store.load(1), snapshot_of(1))


# Damage that a person should understand; tests/faults has the random kind.


def test_the_newest_whole_one_is_used_and_a_line_says_so(store):
    for number in (1, 2, 3):
        store.save(number, snapshot_of(number))
    (store.folder / "000000000003" / MANIFEST_FILE).unlink()
    flip(store.folder / "000000000002" / "blobs" / "000000")
    lines: list[str] = []
    number, snapshot = store.load_newest(say=lines.append)
    assert number == 1
    assert_equal(snapshot, snapshot_of(1))
    assert [line.partition("000000000")[2] for line in lines] == [
        "003 is damaged: manifest.json is missing; checkpoint 1 is used instead",
        "002 is damaged: the content of blobs/000000 has another checksum; "
        "checkpoint 1 is used instead",
    ]
    with pytest.raises(CheckpointError, match=r"manifest.json is missing; delete that folder"):
        store.load_newest(strict=True)


def test_all_damaged_is_an_error(store):
    folder = store.save(1, snapshot_of())
    shutil.rmtree(folder)
    folder.mkdir()  # an empty folder
    with pytest.raises(CheckpointError, match=r"all 1 checkpoints in .* cannot be restored"):
        store.load_newest()


def test_a_checkpoint_of_another_format_is_neither_passed_over_nor_deleted(store, monkeypatch):
    store.save(1, snapshot_of())
    with monkeypatch.context() as patch:
        patch.setattr("sebulba.checkpoints.manifest.FORMAT", FORMAT + 1)
        store.save(2, snapshot_of())
    with pytest.raises(CheckpointError, match=r"has format 2.*version of Sebulba that wrote it"):
        store.load_newest()
    for number in range(3, 8):
        store.save(number, snapshot_of())
    assert store.numbers() == [2, 5, 6, 7]


def test_a_checkpoint_under_the_number_of_another_is_damaged(store):
    store.save(1, snapshot_of()).rename(store.folder / "000000000002")
    with pytest.raises(CheckpointError, match="is of checkpoint 1"):
        store.load(2)


def test_a_pipe_in_place_of_a_file_does_not_hang(store):
    folder = store.save(1, snapshot_of())
    for name in ("record.json", MANIFEST_FILE):
        (folder / name).unlink()
        os.mkfifo(folder / name)
        with pytest.raises(CheckpointError, match=f"{name} is missing"):
            store.load(1)


def test_an_array_that_orbax_restores_wrongly_is_found(store, monkeypatch):
    import orbax.checkpoint as ocp

    store.save(1, snapshot_of())
    restore = ocp.Checkpointer.restore

    def restore_wrongly(self, *args, **kwargs):
        tree = restore(self, *args, **kwargs)
        tree["000000"][0, 0] += 1
        return tree

    monkeypatch.setattr(ocp.Checkpointer, "restore", restore_wrongly)
    with pytest.raises(CheckpointError, match="array networks/params/Dense_0/kernel has another"):
        store.load(1)


# A save that fails.


@pytest.mark.parametrize("where", ["os.fsync", "pathlib.Path.write_bytes", "pathlib.Path.rename"])
def test_a_full_disk_leaves_nothing_behind(store, monkeypatch, where):
    store.save(1, snapshot_of(1))

    def fail(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(where, fail)
        with pytest.raises(CheckpointError, match=r"No space left on device\).*has space"):
            store.save(2, snapshot_of(2))
    assert store.numbers() == [1] and partials(store.folder) == []
    assert_equal(store.load(1), snapshot_of(1))
    store.save(2, snapshot_of(2))
    assert_equal(store.load(2), snapshot_of(2))


FULL_DISK = """
import sys
import numpy as np
import resource
from sebulba.checkpoints.store import CheckpointStore
from sebulba.checkpoints.part_files import Snapshot
from sebulba.errors import CheckpointError

store = CheckpointStore(sys.argv[1])
big = Snapshot({}, {"x": np.random.default_rng(0).normal(size=100_000), "y": np.ones(3)})
store.save(1, Snapshot({}, {"x": np.ones(3)}))
for i in range(int(sys.argv[2])):
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    try:
        store.save(2, big)
    except CheckpointError as error:
        assert "(File too large); check that the disk has space" in str(error), error
    else:
        raise SystemExit("it was saved")
    assert [path.name for path in store.folder.iterdir()] == ["000000000001"]
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
store.load(1)
store.save(2, big)
store.load(2)
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_FSIZE)[1] != resource.RLIM_INFINITY,
    reason="the size of files is limited already",
)
def test_files_that_the_kernel_cuts_short_leave_nothing_behind(tmp_path):
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path), str(rounds(3, 100))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=rounds(300, 600))
    assert (done.returncode, done.stderr) == (0, "")


def test_what_was_deleted_only_in_part_is_an_error_that_says_the_save_succeeded(store, monkeypatch):
    for number in (1, 2, 3):
        store.save(number, snapshot_of(number))

    def fail(*args: object, **kwargs: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "there")

    with monkeypatch.context() as patch:
        patch.setattr("sebulba.checkpoints.store.CheckpointStore._delete", fail)
        with pytest.raises(CheckpointError, match="is saved, but older ones cannot be deleted"):
            store.save(4, snapshot_of(4))
    assert store.numbers() == [1, 2, 3, 4]


# Killed while it saves.

SAVE_FOR_EVER = """
import itertools, sys
import numpy as np
from sebulba.checkpoints.store import CheckpointStore
from sebulba.checkpoints.part_files import Snapshot

store = CheckpointStore(sys.argv[1], keep_last=2)
for number in itertools.count(max(store.numbers(), default=0) + 1):
    store.save(number, Snapshot({"n": number}, {"x": np.full(1000, number)}, {"b": b"1" * number}))
    print(number, flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_kill_at_any_moment_leaves_only_whole_checkpoints(tmp_path):
    rng = np.random.default_rng(0)
    newest = 0
    for _ in range(rounds(2, 30)):
        with subprocess.Popen(
            [sys.executable, "-c", SAVE_FOR_EVER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        ) as child:
            newest = int(child.stdout.readline())
            time.sleep(rng.uniform(0, 0.3))
            child.kill()
            newest = max([newest, *map(int, child.stdout.read().split("\n")[:-1])])
        store = CheckpointStore(tmp_path, keep_last=2)
        for number in store.numbers():
            snapshot = store.load(number)
            assert snapshot.record == {"n": number}
            assert (snapshot.arrays["x"] == number).all()
            assert snapshot.blobs == {"b": b"1" * number}
        assert max(store.numbers()) >= newest
    store.save(newest + 10, snapshot_of())
    assert partials(tmp_path) == []


# Manifest.


def test_the_manifest_names_every_file_and_every_array(store):
    folder = store.save(3, snapshot_of(), score=2)
    manifest = read_manifest(folder, 3)
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert {entry.path for entry in manifest.files} == files - {MANIFEST_FILE}
    assert [entry.name for entry in manifest.arrays] == list(snapshot_of().arrays)
    assert manifest.arrays[1][1:4] == ((4,), "bfloat16", 8)
    assert manifest.score == 2.0
    assert json.loads((folder / MANIFEST_FILE).read_text())["manifest"]["format"] == FORMAT


# The saver.


@pytest.fixture
def saver():
    saver = Saver()
    yield saver
    saver.close(DEADLINE_S)
    assert SAVER_THREAD not in {thread.name for thread in threading.enumerate()}


def test_a_job_is_refused_while_another_is_done(saver):
    go_on, done = threading.Event(), []
    assert saver.submit(lambda: go_on.wait(DEADLINE_S))
    assert saver.is_busy
    assert not saver.submit(lambda: done.append(1))
    assert not saver.wait(0.05)
    go_on.set()
    assert saver.wait(DEADLINE_S)
    assert not saver.is_busy
    assert saver.submit(lambda: done.append(2))
    assert saver.wait(DEADLINE_S)
    assert done == [2]


def test_where_no_thread_can_be_started_it_saves_in_the_calling_one(saver, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    done = []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert saver.submit(lambda: done.append(threading.current_thread()))
    assert done == [threading.main_thread()] and not saver.is_busy
    assert saver.submit(lambda: done.append(2)) and saver.wait(DEADLINE_S) and done[1] == 2


@pytest.mark.parametrize("kind", [CheckpointError, SystemExit, KeyboardInterrupt])
def test_an_error_is_handed_over_once_and_the_thread_lives_on(saver, kind):
    def fail() -> None:
        raise kind("disk full")

    saver.submit(fail)
    assert saver.wait(DEADLINE_S)
    assert isinstance(saver.pop_error(), kind)
    assert saver.pop_error() is None
    done = []
    saver.submit(lambda: done.append(1))
    assert saver.wait(DEADLINE_S)
    assert done == [1] and saver.pop_error() is None


def test_close_finishes_the_job_and_refuses_others(saver):
    done = []
    saver.submit(lambda: (time.sleep(0.1), done.append(1)))
    saver.close(DEADLINE_S)
    saver.close(DEADLINE_S)
    assert done == [1]
    assert not saver.submit(lambda: done.append(2))


def test_a_job_that_does_not_end_is_named(saver):
    go_on = threading.Event()
    saver.submit(lambda: go_on.wait(DEADLINE_S))
    with pytest.raises(HangError, match=SAVER_THREAD):
        saver.close(0.05)
    go_on.set()


def test_the_saver_does_not_hold_what_was_saved(saver):
    class Big:
        pass

    big = Big()
    gone = weakref.ref(big)
    saver.submit(lambda big=big: None)
    del big
    assert saver.wait(DEADLINE_S)
    deadline = time.monotonic() + DEADLINE_S
    while gone() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert gone() is None


def test_the_store_saves_from_the_saver(store, saver):
    for number in (1, 2):
        assert saver.submit(lambda number=number: store.save(number, snapshot_of(number)))
        assert saver.wait(DEADLINE_S)
        assert saver.pop_error() is None
    assert store.numbers() == [1, 2]


def test_what_is_exchanged_after_the_check_is_not_read(store, monkeypatch):
    """So that a process beside it cannot put its own pickle where a signed one was checked."""
    folder = store.save(1, snapshot_of())
    check_files = store_module.check_files

    def check_and_exchange(*args):
        check_files(*args)
        blob = next((folder / "blobs").iterdir())
        blob.write_bytes(bytes(blob.stat().st_size))

    monkeypatch.setattr(store_module, "check_files", check_and_exchange)
    with pytest.raises(CheckpointError, match="another checksum"):
        store.load(1)
