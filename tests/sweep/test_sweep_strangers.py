"""The folder of a sweep may be a stranger's: its journal names no code, and its files no others."""

from __future__ import annotations

import os

import optuna
import pytest
from sebulba_sweep.space import Choices, Range
from sebulba_sweep.study import JOURNAL, Ended, Study

from sebulba.errors import UsageError
from tests.sweep.test_sweeps import run_sweep  # noqa: F401

SPACE = {"learning-rate": Range(1e-4, 1e-2, log=True), "num-envs": Choices((8, 16))}


def begin(folder):
    study = Study(folder, SPACE, 0, 5)
    for _ in range(2):
        study.tell(study.ask().number, Ended.DONE, 1.0)
    study.ask()
    return study


def plant(study, **domains):
    study._study.sampler = optuna.samplers.RandomSampler(seed=0)
    study._study.ask(domains)


def test_a_sweep_of_ones_own_goes_on(tmp_path):
    begin(tmp_path)
    assert len(Study(tmp_path, SPACE, 0, 5).trials()) == 3


@pytest.mark.parametrize(
    "planted",
    [
        {"env.id": optuna.distributions.CategoricalDistribution(["planted.py:Env"])},
        {"trust": optuna.distributions.CategoricalDistribution([True])},
        {"num-envs": optuna.distributions.CategoricalDistribution([4096])},
        {"learning-rate": optuna.distributions.FloatDistribution(5.0, 6.0)},
        {"learning-rate": optuna.distributions.CategoricalDistribution(["--trust"])},
    ],
    ids=str,
)
def test_a_trial_with_what_is_not_searched_is_refused(tmp_path, planted):
    plant(Study(tmp_path, SPACE, 0, 5), **planted)
    with pytest.raises(UsageError, match=r"trial 0 has .* which this sweep does not"):
        Study(tmp_path, SPACE, 0, 5)


@pytest.mark.parametrize("damage", ["cut", "garbage", "other JSON", "not UTF-8", "first gone"])
def test_a_damaged_journal_is_refused_in_words_or_read(tmp_path, damage):
    begin(tmp_path)
    file = tmp_path / JOURNAL
    whole = file.read_bytes()
    first = whole.index(b"\n") + 1
    file.write_bytes(
        {
            "cut": whole[: len(whole) // 2],
            "garbage": b"garbage\n" * 5,
            "other JSON": b'{"op_code": 99, "worker_id": "x"}\n[]\n',
            "not UTF-8": b"\xff\xfe" + whole,
            "first gone": whole[first:],
        }[damage]
    )
    try:
        Study(tmp_path, SPACE, 0, 5)
    except UsageError as error:
        assert "is damaged" in str(error)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [JOURNAL, "best.json", "trial-0000-seed-0", "trial-0000-seed-0.log"]
)
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_link_or_a_pipe_in_the_folder_is_refused(run_sweep, tmp_path, name, kind, capsys):  # noqa: F811
    folder = tmp_path / "a"
    folder.mkdir()
    precious = tmp_path / "precious"
    precious.write_text("precious")
    if kind == "link":
        (folder / name).symlink_to(precious)
    else:
        os.mkfifo(folder / name)
    code, _ = run_sweep("--trials", "1", "--resume")
    assert code == 2
    said = capsys.readouterr().err
    assert ("is a link" if kind == "link" else "is not a regular file") in said
    assert precious.read_text() == "precious"
