"""A disk that is full or cannot be written to: training goes on, and what was saved stays whole."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

import sebulba
from sebulba.checkpoints import store
from sebulba.commands import cli
from sebulba.errors import CheckpointError
from sebulba.metrics.plots import read_records
from sebulba.metrics.writers import JsonLinesWriter
from sebulba.support.files import whole
from tests.faults.children import Child, newest_whole
from tests.faults.test_resume_exactness import Waiting, numbers
from tests.runs.test_cli import ONE_DEVICE, SMALL
from tests.support.loop_helpers import make_tiny_loop

STEPS = 5
A_CYCLE = 4 * STEPS


class FullDisk:
    """Writes what the store does, but for the last of it while it is full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Take the place of ``write_parts``."""
        self.is_full_at: Any = lambda number: False
        self._write_parts = store.write_parts
        monkeypatch.setattr(store, "write_parts", self)

    def __call__(self, folder: Path, number: int, *what: Any, **how: Any) -> None:
        self._write_parts(folder, number, *what, **how)
        if self.is_full_at(number):
            raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def disk(monkeypatch):
    return FullDisk(monkeypatch)


def run_tiny(folder: Path, num_cycles: int, *, resume: bool = False) -> Any:
    """Run 2 Inferencers with a checkpoint every fourth update, which is every fourth cycle."""
    with (
        Waiting(folder, every_updates=4, keep_last=99) as checkpointer,
        make_tiny_loop(schedule="lockstep", checkpointer=checkpointer)[0] as loop,
    ):
        saved = checkpointer.load_newest() if resume else None
        state = loop.restore(saved) if saved else loop.new_state(0, STEPS)
        return loop.run(state, num_cycles, STEPS)


@pytest.mark.slow
def test_a_disk_that_is_full_for_a_while_costs_only_the_checkpoints_of_that_while(disk, tmp_path):
    disk.is_full_at = lambda number: number in (8 * A_CYCLE, 12 * A_CYCLE)
    with pytest.warns(RuntimeWarning) as warned:
        result = run_tiny(tmp_path, 20)
    assert result.counters.cycles == 20
    assert len(warned) == 2 and all("No space left on device" in str(w.message) for w in warned)
    assert numbers(tmp_path) == [number * A_CYCLE for number in (4, 16, 20)]
    assert newest_whole(tmp_path).env_steps == 20 * A_CYCLE
    assert not list(tmp_path.rglob(".partial-*"))


@pytest.mark.slow
def test_a_disk_that_is_full_at_the_end_is_an_error_and_older_checkpoints_stay_whole(
    disk, tmp_path
):
    disk.is_full_at = lambda number: number == 18 * A_CYCLE
    with pytest.raises(CheckpointError, match=r"No space left on device.*Older checkpoints are"):
        run_tiny(tmp_path, 18)
    assert newest_whole(tmp_path).env_steps == 16 * A_CYCLE
    disk.is_full_at = lambda number: False
    assert run_tiny(tmp_path, 2, resume=True).counters.cycles == 18


def train(folder: Path, *options: str) -> int:
    env = ["--env.id", "tests.runs.test_cli:Guess"]
    more = ["--run-dir", str(folder), "--checkpoint.every-updates", "10", "--resume", *options]
    fixed = ["--no-anneal-learning-rate", *SMALL, *ONE_DEVICE]
    return cli.main(["train", "cartpole", *env, *fixed, *more])


@pytest.mark.slow
def test_the_command_says_so_with_6_and_goes_on_once_there_is_room(disk, tmp_path, capsys):
    run = tmp_path / "run"
    disk.is_full_at = lambda number: number >= 600
    assert train(run) == cli.EXIT_CHECKPOINT
    captured = capsys.readouterr()
    assert "sebulba: checkpoint: checkpoint 600 cannot be saved" in captured.err
    assert "No space left on device" in captured.err and "Traceback" not in captured.err
    assert "exit code 6" in (run / "ended.txt").read_text()
    sebulba.load_policy(run)
    before = newest_whole(run / "checkpoints").env_steps
    assert 0 < before < 600
    disk.is_full_at = lambda number: False
    assert train(run) == 0
    assert f"resumed at {before} env steps" in capsys.readouterr().out
    assert newest_whole(run / "checkpoints").env_steps == 600
    assert "exit code 0" in (run / "ended.txt").read_text()


@pytest.mark.parametrize("in_the_way", ["run", "run/checkpoints"])
def test_a_folder_that_cannot_be_made_is_said_by_name(in_the_way, tmp_path, capsys):
    file = tmp_path / in_the_way
    file.parent.mkdir(exist_ok=True)
    file.write_text("a file")
    assert train(tmp_path / "run") == cli.EXIT_CHECKPOINT
    assert str(file) in capsys.readouterr().err


def test_of_a_file_that_does_not_fit_no_part_is_left(tmp_path):
    with pytest.raises(OSError, match="No space"), whole(tmp_path / "file") as part:
        part.write_text("half of it")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert not list(tmp_path.iterdir())


class SmallDisk:
    """A file in which, for a while, there is room for half a line only."""

    def __init__(self, file: Any) -> None:
        """Write into ``file``."""
        self._file = file

    def write(self, line: str) -> None:
        if not 300 <= json.loads(line)["env_steps"] < 400:
            self._file.write(line)
            return
        self._file.write(line[: len(line) // 2])
        self._file.flush()
        raise OSError(errno.ENOSPC, "No space left on device")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@pytest.mark.slow
def test_a_metric_writer_that_raises_costs_its_records_and_nothing_else(
    tmp_path, monkeypatch, capsys
):
    write = JsonLinesWriter.write

    def write_to_small_disk(self: JsonLinesWriter, metrics: Any) -> None:
        if self._file is None:
            self._file = SmallDisk(open(self._path, "a", encoding="utf-8"))  # noqa: SIM115
        write(self, metrics)

    monkeypatch.setattr(JsonLinesWriter, "write", write_to_small_disk)
    run = tmp_path / "run"
    with pytest.warns(RuntimeWarning, match="JsonLinesWriter failed.*No space left on device"):
        assert train(run) == 0
    assert "done:" in capsys.readouterr().out
    records = read_records(run / "metrics.jsonl")
    env_steps = [record["env_steps"] for record in records]
    assert env_steps == sorted(set(env_steps)) and env_steps[-1] == 600
    assert not any(300 <= number < 400 for number in env_steps)
    assert newest_whole(run / "checkpoints").env_steps == 600
    assert (run / "learning_curve.png").exists()


@pytest.mark.slow
def test_files_that_the_system_cuts_short_end_the_command_with_6(tmp_path):
    words = ["train", "cartpole", *SMALL, "--run-dir", "run", "--resume"]
    # Their last batch of observations is too large for a file, and so are 30 cycles of metrics.
    words += ["--num-envs", "256", "--total-env-steps", "38400"]
    with Child(words, tmp_path / "small.log", "tests.faults.small_files") as child:
        assert child.wait() == cli.EXIT_CHECKPOINT, child.printed
    assert "File too large" in child.printed and "Traceback" not in child.printed
    assert "TensorBoardWriter failed" in child.printed
    run = tmp_path / "run"
    assert "exit code 6" in (run / "ended.txt").read_text()
    sebulba.load_policy(run)
    assert not list(run.rglob(".partial-*"))
    with Child(words, tmp_path / "large.log") as child:
        assert child.wait() == 0, child.printed
    sebulba.load_policy(run)
