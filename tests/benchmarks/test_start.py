"""``benchmarks start``: what it takes from processes that it starts, and its arithmetic."""

from __future__ import annotations

import sys

import pytest

from benchmarks.studies import start
from benchmarks.studies.tables import differences
from sebulba.errors import UsageError
from sebulba.runs.huge_pages import OPTION, VARIABLE

TRAINS = """
import pathlib, sys, time
run = pathlib.Path(sys.argv[1])
time.sleep(0.2)
run.mkdir()
with open(run / "metrics.jsonl", "w") as file:
    file.write("{}")
    file.flush()
    time.sleep(0.2)
    (run.parent / "line is whole").touch()
    file.write("\\n")
    file.flush()
    time.sleep(60)
"""


def test_keys_are_medians_and_what_is_beyond_imports_is_taken_within_a_round():
    figures = {"train": [3.0, 9.0, 4.0], "imports": [1.0, 5.0, 1.5]}
    figures["beyond imports"] = differences(figures, "train", "imports")
    assert start.keys_of(figures) == {
        "first_update_beyond_imports_s": 2.5,
        "first_update_s": 4.0,
        "imports_s": 1.5,
    }


def test_a_start_lasts_until_the_first_whole_line_and_is_ended_and_removed(tmp_path):
    command = [sys.executable, "-c", TRAINS, str(tmp_path / "run")]
    assert start.seconds_to_first_record(command, tmp_path) > 0
    assert (tmp_path / "line is whole").exists()
    assert not (tmp_path / "run").exists()


def test_a_training_that_ends_without_an_update_is_an_error_that_says_what_it_said(tmp_path):
    command = [sys.executable, "-c", "import sys; sys.exit('no such thing')"]
    with pytest.raises(UsageError, match=r"exit code 1 before its first update.*no such thing"):
        start.seconds_to_first_record(command, tmp_path)


def test_the_time_to_import_is_positive_and_byte_code_is_kept(monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert "PYTHONDONTWRITEBYTECODE" not in start.child_environment()
    monkeypatch.setenv(VARIABLE, f"{OPTION}=1")
    assert VARIABLE not in start.child_environment(), "starting over is a part of a start"
    monkeypatch.setattr(start, "IMPORTS", "import json")
    assert start.seconds_to_import() > 0


def test_marks_are_shown_in_the_order_in_which_they_were_reached():
    rows = start.mark_rows({"last": 3.5, "first": 0.5, "second": 2.0})
    assert rows == {
        "first": ["0.50", "0.50"],
        "second": ["2.00", "1.50"],
        "last": ["3.50", "1.50"],
    }


@pytest.mark.parametrize("target", [target for target, _ in start.MARKS])
def test_every_mark_is_a_function_that_exists(target):
    owner, attribute = start.find(target)
    assert callable(getattr(owner, attribute))


@pytest.mark.slow
def test_a_real_start_reaches_all_marks(tmp_path):
    marks = start.marks_of_a_start("cartpole", tmp_path)
    wanted = ["interpreter started", "sebulba imported", *(name for _, name in start.MARKS)]
    assert list(marks) == sorted(wanted, key=marks.get)
    assert set(marks) == set(wanted)
