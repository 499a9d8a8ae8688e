"""Runs of the command that end badly: what their folder says, and the exit code."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from sebulba.checkpoints.checkpointer import Checkpointer
from sebulba.commands import cli
from sebulba.loops import records
from sebulba.loops.supervisor import Supervisor
from tests.runs.test_cli import ONE_DEVICE, SMALL, Guess

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore:.*gets replaced by a new one:RuntimeWarning"),
]


class CannotBeRead(Exception):
    def __str__(self):
        raise RuntimeError("not even this")


class Fails(Guess):
    """From its 50th step on."""

    num = 0

    def step(self, action):
        self.num += 1
        if self.num >= 50:
            self.fail()
        return super().step(action)

    def fail(self):
        raise RuntimeError("planted")


class FailsOddly(Fails):
    def fail(self):
        raise CannotBeRead


class Hangs(Fails):
    supervisors: tuple[Supervisor, ...] = ()
    released = False

    def fail(self):
        for supervisor in self.supervisors:
            supervisor._limit_s = 1.0
        while not Hangs.released:
            time.sleep(0.05)


class PaysTooMuch(Guess):
    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, 3e38, *rest


def train(folder: Path, env: str, *options: str) -> int:
    env = f"{__name__}:{env}"
    where = ["--run-dir", str(folder), *options]
    return cli.main(["train", "cartpole", "--env.id", env, *SMALL, *ONE_DEVICE, *where])


def said(folder: Path) -> str:
    return (folder / "ended.txt").read_text()


@pytest.mark.slow
def test_a_run_that_is_done_says_so(tmp_path):
    assert train(tmp_path / "r", "Guess") == 0
    assert "exit code 0: done" in said(tmp_path / "r")


@pytest.mark.slow
def test_an_environment_that_fails_is_shown_with_what_it_was_given_last(tmp_path, capsys):
    assert train(tmp_path / "r", "Fails") == 3
    text = said(tmp_path / "r")
    assert "exit code 3: environment" in text and "RuntimeError: planted" in text
    assert "in fail" in text and "thread 'inferencer-0'" in text, "the traceback and its notes"
    assert "Last metrics:" in text and "env_steps" in text
    last = np.load(tmp_path / "r" / "last_transition.npz")
    assert set(last) == {"obs/x", "obs/k", "action"} and last["obs/x"].shape == (4, 3)
    with Checkpointer(tmp_path / "r" / "checkpoints") as checkpointer:
        assert checkpointer.load_newest() is not None
    assert "planted" in capsys.readouterr().err


@pytest.mark.slow
def test_an_exception_that_cannot_even_be_printed_is_still_the_environments(tmp_path, capsys):
    assert train(tmp_path / "r", "FailsOddly") == 3
    assert "CannotBeRead" in said(tmp_path / "r")
    assert "CannotBeRead" in capsys.readouterr().err


@pytest.mark.slow
def test_a_loss_that_is_not_finite_says_so(tmp_path, capsys):
    assert train(tmp_path / "r", "PaysTooMuch") == 4
    assert "exit code 4: not finite" in said(tmp_path / "r")
    assert "sebulba: not finite" in capsys.readouterr().err


@pytest.mark.slow
def test_restarts_and_skips_that_are_asked_for_are_done_and_counted(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(records, "MOST_SKIPPED_UPDATES", 3)
    options = ("--faults.on-env-failure", "restart", "--faults.max-env-restarts", "1")
    assert train(tmp_path / "r", "Fails", *options) == 3
    assert "max_env_restarts=1" in said(tmp_path / "r")
    options = ("--faults.on-not-finite", "skip")
    assert train(tmp_path / "s", "PaysTooMuch", *options) == 4
    assert "a run may skip 3" in said(tmp_path / "s")
    capsys.readouterr()


@pytest.mark.slow
def test_an_environment_that_hangs_ends_with_5_and_its_stacks(tmp_path, capsys, monkeypatch):
    enter = Supervisor.__enter__

    def entered(supervisor):
        monkeypatch.setattr(Hangs, "supervisors", (*Hangs.supervisors, supervisor))
        return enter(supervisor)

    monkeypatch.setattr(Supervisor, "__enter__", entered)
    try:
        assert train(tmp_path / "r", "Hangs") == 5
        text = said(tmp_path / "r")
        assert "exit code 5: hang" in text and "thread 'inferencer-0' is silent" in text
        assert (tmp_path / "r" / "last_transition.npz").exists()
        assert "in fail" in capsys.readouterr().err, "where it hangs"
        with Checkpointer(tmp_path / "r" / "checkpoints") as checkpointer:
            assert checkpointer.load_newest() is not None
    finally:
        Hangs.released = True


@pytest.mark.slow
def test_an_update_that_hangs_ends_the_process_with_5(tmp_path):
    program = textwrap.dedent(
        """
        import sys, time
        from sebulba.commands import cli
        from sebulba.loops.supervisor import Supervisor
        from sebulba.learning.update import Updater
        from tests.runs.test_cli import ONE_DEVICE, SMALL

        supervisors, enter, consume = [], Supervisor.__enter__, Updater.consume

        def entered(supervisor):
            supervisors.append(supervisor)
            return enter(supervisor)

        def hang(updater, *args, updates, due):
            if updates == 6:
                supervisors[0]._limit_s = 1.0
                time.sleep(600)
            return consume(updater, *args, updates=updates, due=due)

        Supervisor.__enter__, Updater.consume = entered, hang
        where = ["--env.id", "tests.runs.test_cli:Guess", "--run-dir", sys.argv[1]]
        sys.argv = ["sebulba", "train", "cartpole", *SMALL, *ONE_DEVICE, *where]
        cli.entry_point()
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "r")],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": os.getcwd(), "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 5, done.stderr
    assert "the update loop is silent: it did not leave 'update'" in done.stderr
    assert "in hang" in done.stderr, "the stacks of all threads"
    text = said(tmp_path / "r")
    assert "exit code 5: hang" in text and "Last metrics:" in text
