"""The edges of the process: streams, signals, names, folders and files that are not as they should.

A command then says so in a sentence, without a traceback, and its exit code is right; a run that
can go on goes on.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import jax.numpy as jnp
import numpy as np
import pytest

import sebulba
from sebulba import UsageError
from sebulba.checkpoints.store import CheckpointStore
from sebulba.commands import cli
from sebulba.envs.checked_env import CheckedEnv
from sebulba.errors import EnvError
from sebulba.inference.env_thread import CallingThread
from sebulba.inference.inferencer import Inferencer
from sebulba.metrics.plots import learning_curve, read_records
from sebulba.metrics.timer import PhaseTimer
from sebulba.metrics.writers import LinesWriter
from sebulba.policies.policy import space_from_json, space_to_json
from sebulba.runs import jax_setup
from sebulba.runs import train as train_command
from sebulba.runs.folder import RunFolder
from sebulba.runs.signals import StopOnSignal
from sebulba.support.files import MOST_NESTED, read_json_object
from sebulba.support.streams import Output, make_streams_safe
from tests.faults.children import ROOT, training_began
from tests.faults.test_supervisor import LIMIT_S, World
from tests.runs.test_cli import ONE_DEVICE, SMALL, Guess
from tests.support.loop_helpers import make_tiny_loop
from tests.support.tiny import CountingEnv

STEPS = 5
DEADLINE_S = 300.0
"""Against hangs only."""
LONG = "n" * 300
DEEP = "[" * 100_000


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "sebulba", *words]


def train_words(run: Path | str, *options: str) -> list[str]:
    return ["train", "cartpole", *SMALL, *ONE_DEVICE, "--run-dir", str(run), *options]


def environment(folder: Path, **variables: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": f"{ROOT}:{folder}"} | variables


def check_saved(run: Path, code: int) -> None:
    """Check that a run left everything, and says how it ended."""
    assert f"exit code {code}:" in (run / "ended.txt").read_text()
    assert (run / "policy").is_dir() and CheckpointStore(run / "checkpoints").numbers()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return the folder of a run with a full standard output; who changes it takes a copy."""
    run = tmp_path_factory.mktemp("runs") / "finished"
    stdout = Output("/dev/full", "w")
    with (
        io.TextIOWrapper(io.BufferedWriter(stdout)) as text,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr("sys.stdout", text)
        assert cli.main(train_words(run, "--no-anneal-learning-rate")) == 0
    assert stdout.is_lost
    return run


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


# Standard streams.


def broken_pipe() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def full_disk() -> int:
    return os.open("/dev/full", os.O_WRONLY)


@pytest.mark.parametrize(("make", "is_lost"), [(broken_pipe, False), (full_disk, True)])
def test_an_output_that_cannot_be_written_drops_the_rest(make, is_lost):
    descriptor = make()
    output = Output(descriptor, "w")
    with io.TextIOWrapper(io.BufferedWriter(output)) as text:
        for _ in range(3):
            print("x" * 10_000, file=text, flush=True)
        os.write(descriptor, b"native code can write, too")
    assert output.failure is not None and output.is_lost == is_lost


def test_a_stream_that_an_environment_closes_stays_open(monkeypatch, capfd):
    for name in ("sys.stdout", "sys.stderr"):
        monkeypatch.setattr(name, io.StringIO())  # and is put back
    make_streams_safe()
    print("before")
    sys.stdout.close()
    print("after", flush=True)
    assert capfd.readouterr().out == "before\nafter\n"


def test_a_full_pipe_that_does_not_block_is_waited_for(tmp_path):
    read, write = os.pipe()
    os.set_blocking(write, False)
    size = fcntl.fcntl(write, fcntl.F_GETPIPE_SZ)
    with open(read, "rb") as reader:
        receiver = subprocess.Popen(["wc", "-c"], stdin=reader, stdout=subprocess.PIPE)
    with io.BufferedWriter(Output(write, "w")) as output:
        output.write(b"x" * 8 * size)
    assert int(receiver.communicate(timeout=DEADLINE_S)[0]) == 8 * size


@pytest.mark.parametrize(
    ("redirection", "code", "said"),
    [
        (">&-", 0, ""),
        ("<&- >&- 2>&-", 0, ""),
        ("> /dev/full", 1, "standard output is lost from here on: No space left on device\n"),
        ("| true; exit ${PIPESTATUS[0]}", 0, ""),
    ],
)
def test_help_ends_well_or_with_a_sentence(redirection, code, said, tmp_path):
    words = f"{sys.executable} -m sebulba --help {redirection}"
    done = subprocess.run(
        ["bash", "-c", words],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == code and done.stderr.removeprefix("sebulba: ") == said


@pytest.mark.slow
def test_training_goes_on_without_a_reader_in_ascii_and_with_closed_input(tmp_path):
    run = tmp_path / "nämé"
    words = " ".join(command(*train_words(run)))
    done = subprocess.run(
        ["bash", "-c", f"{words} <&- | head -3; exit ${{PIPESTATUS[0]}}"],
        env=environment(tmp_path, PYTHONIOENCODING="ascii"),
        capture_output=True,
        timeout=DEADLINE_S,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    first, _, third = done.stdout.splitlines()
    assert first == b"sebulba: cartpole"
    assert third.endswith(f" in {tmp_path}/n\\xe4m\\xe9".encode())
    check_saved(run, 0)
    assert b"sebulba:" not in (run / "metrics.jsonl").read_bytes()


class PrintsToNobody(CountingEnv):
    def step(self, action):
        os.dup2(broken_pipe(), 1)  # of a worker process
        print("x", flush=True)
        return super().step(action)


@pytest.mark.slow
def test_an_environment_may_print_in_a_worker_process_when_nobody_reads():
    adapter = sebulba.make_env_factory(PrintsToNobody, vectorization="async")(1, [0])
    adapter.reset()
    adapter.step(np.zeros(1, np.int32))
    adapter.close()


@pytest.mark.parametrize(
    ("terminal", "encoding", "term"),
    [(True, "ascii", "xterm"), (True, "utf-8", "dumb"), (True, "utf-8", ""), (False, "utf-8", "")],
)
def test_what_can_show_no_panel_gets_plain_lines(terminal, encoding, term, monkeypatch, tmp_path):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    monkeypatch.setattr("sys.stdout", stream)
    monkeypatch.setenv("TERM", term)
    loop = SimpleNamespace(describe=str, describe_nodes=list)
    writer = train_command._progress_writer("run", RunFolder(tmp_path), loop)
    assert isinstance(writer, LinesWriter)


# Signals.


ON_TERMINAL = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it in all that it runs
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


SHELL = """
set -m
"$@"
echo "left with $?"
fg > /dev/null
echo "ended with $?"
"""


@pytest.mark.slow
def test_ctrl_z_and_ctrl_c_on_a_terminal(tmp_path):
    run, (main, terminal) = tmp_path / "run", os.openpty()
    words = command(*train_words(run, "--total-env-steps", "1000000000"))
    shell = subprocess.Popen(
        [sys.executable, "-c", ON_TERMINAL, "/bin/bash", "-c", SHELL, "bash", *words],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=environment(tmp_path, TERM="dumb", PYTHONIOENCODING="utf-8"),
        start_new_session=True,
    )
    os.close(terminal)
    seen = ""

    def read_until(condition) -> None:
        nonlocal seen
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, seen
            if select.select([main], [], [], 0.01)[0]:
                try:
                    seen += os.read(main, 2**16).decode(errors="replace")
                except OSError as error:  # nobody has the terminal any more
                    raise AssertionError(seen) from error

    try:
        read_until(training_began(run))
        os.write(main, b"\x1a")
        read_until(lambda: f"left with {128 + signal.SIGTSTP}" in seen)
        read_until(training_began(run))  # fg
        os.write(main, b"\x03")
        read_until(lambda: "ended with" in seen)
        assert "ended with 130" in seen and "stopping;" in seen, seen
        assert shell.wait(DEADLINE_S) == 0
    finally:
        os.close(main)
        shell.kill()  # what it started is hung up, and ends
        shell.wait()
    check_saved(run, 130)
    assert f"To go on: sebulba resume {run}\n" in (run / "ended.txt").read_text()


@pytest.mark.slow
def test_a_run_whose_terminal_is_closed_is_saved_and_ends_with_129(tmp_path):
    run, (main, terminal) = tmp_path / "run", os.openpty()
    words = command(*train_words(run, "--total-env-steps", "100000000"))
    child = subprocess.Popen(
        [sys.executable, "-c", ON_TERMINAL, *words],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=environment(tmp_path, TERM="xterm", PYTHONIOENCODING="utf-8"),
        start_new_session=True,
    )
    os.close(terminal)
    os.set_blocking(main, False)
    began, deadline, seen = training_began(run), time.monotonic() + DEADLINE_S, b""
    while not began() and child.poll() is None and time.monotonic() < deadline:
        try:
            seen += os.read(main, 2**16)
        except BlockingIOError:
            time.sleep(0.01)
    os.close(main)
    try:
        assert child.wait(DEADLINE_S) == 129, seen.decode(errors="replace")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    assert b"sebulba" in seen
    check_saved(run, 129)
    assert "SIGHUP" in (run / "ended.txt").read_text()


def test_sighup_is_left_alone_where_it_is_ignored_as_by_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopOnSignal() as stop:
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.exit_code == 0
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with StopOnSignal():
            assert signal.getsignal(signal.SIGHUP) != signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


# Names.


def one_sentence(capsys: pytest.CaptureFixture, code: int, *words: str) -> str:
    """Return what a command that ends with ``code`` says, which is one line."""
    sys.stderr.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    assert cli.main(list(words)) == code
    said = capsys.readouterr().err
    assert said.startswith("sebulba: ") and said.count("\n") == 1, said
    return said


@pytest.mark.parametrize("name", [LONG, "b\udcff", "a\0b"], ids=["long", "bytes", "null"])
def test_a_name_that_no_folder_can_have_is_refused(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    why = {
        LONG: "has a name of more than 255 bytes",
        "b\udcff": "must be UTF-8",
        "a\0b": "must be UTF-8",
    }[name]
    for option in ("--name", "--run-dir"):
        assert why in one_sentence(capsys, 2, "train", "cartpole", option, name)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_folder_that_the_locale_cannot_name_is_refused_with_the_locale(tmp_path):
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for remedy, said in (
        ({}, "names of files for ascii here (LC_ALL=C,"),
        ({"PYTHONUTF8": "1"}, ""),
    ):
        done = subprocess.run(
            command("train", "cartpole", *SMALL, *ONE_DEVICE, "--name", "läuft"),
            env=environment(tmp_path, **locale | remedy),
            cwd=tmp_path,
            capture_output=True,
            encoding="utf-8",
            timeout=DEADLINE_S,
        )
        assert (done.returncode == 2) == bool(said), done.stderr
        assert said in done.stderr and "Traceback" not in done.stderr
        assert ("set LC_ALL=C.UTF-8 or PYTHONUTF8=1" in done.stderr) == bool(said)


@pytest.mark.parametrize("name", [LONG, "b\udcff", f"{LONG}.json", f"{LONG}:{LONG}"], ids=range(4))
def test_other_names_that_mean_nothing_are_refused_in_a_sentence(name, capsys, tmp_path):
    run = str(tmp_path / "run")
    one_sentence(capsys, 2, "train", name)
    one_sentence(capsys, 2, "train", "cartpole", "--env.id", name, "--run-dir", run)
    one_sentence(capsys, 2, "eval", name)
    one_sentence(capsys, 2, "resume", name)
    one_sentence(capsys, 2, name)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_report_that_cannot_be_written_is_said_after_the_work(run, capsys):
    words = ["eval", str(run), "--episodes", "1", "--num-envs", "1"]
    said = one_sentence(capsys, 2, *words, "--json", str(run / LONG))
    assert "File name too long" in said


# Folders.


def test_a_current_folder_that_is_gone_is_named(tmp_path, capsys, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert "folder was deleted" in one_sentence(capsys, 2, "train", "cartpole", *SMALL)
    monkeypatch.chdir(tmp_path)


class LosesItsRun(Guess):
    """Has the folder of its run deleted, or moved, at its 50th step."""

    run: Path
    how: Any
    num = 0

    def step(self, action):
        LosesItsRun.num += 1
        if LosesItsRun.num == 50:
            LosesItsRun.how(self.run)
        return super().step(action)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["run", "moved run", "current folder"])
def test_a_run_whose_folder_is_taken_away_ends_saved_and_can_go_on(
    what, tmp_path, capsys, monkeypatch
):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    LosesItsRun.run, LosesItsRun.how, LosesItsRun.num = Path("run"), shutil.rmtree, 0
    if what == "moved run":
        LosesItsRun.how = lambda run: run.rename("moved")
    elif what == "current folder":
        LosesItsRun.run = here
    env = ["--env.id", f"{__name__}:LosesItsRun", "--no-anneal-learning-rate"]
    words = train_words("run", *env, "--total-env-steps", "100000000")
    said = one_sentence(capsys, cli.EXIT_CHECKPOINT, *words)
    assert "was deleted or moved" in said and "sebulba resume run" in said
    run = here / "run"
    check_saved(run, cli.EXIT_CHECKPOINT)
    config = read_json_object(run / "config.json")
    (number,) = CheckpointStore(run / "checkpoints").numbers()
    assert CheckpointStore(run / "checkpoints").record(number)["run_id"] == config["run_id"]
    if what == "run":
        assert cli.main(["resume", str(run), "--total-env-steps", str(number + 100)]) == 0
        assert read_records(run / "metrics.jsonl")[-1]["env_steps"] == number + 100


@pytest.mark.slow
def test_a_run_folder_that_cannot_be_written_is_refused(tmp_path, capsys, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    assert "cannot be" in one_sentence(capsys, 2, *train_words(file / "run"))
    (tmp_path / "locked/.lock").mkdir(parents=True)
    assert "cannot be written" in one_sentence(capsys, 2, *train_words(tmp_path / "locked"))
    monkeypatch.setattr("sebulba.runs.folder.write_whole", refuse)
    assert "cannot be written" in one_sentence(capsys, 2, *train_words(tmp_path / "full"))


def refuse(*arguments: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.slow
def test_a_policy_that_cannot_be_written_at_the_end_is_exit_6(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train_command, "replace_folder", refuse)
    evaluate = ["--eval-every-env-steps", "300", "--eval-episodes", "1", "--eval-num-envs", "1"]
    with (
        pytest.warns(UserWarning, match="no policy"),
        pytest.warns(UserWarning, match="the best policy is not saved"),
    ):
        words = train_words(tmp_path / "run", *evaluate)
        said = one_sentence(capsys, cli.EXIT_CHECKPOINT, *words)
    assert "policy cannot be saved" in said and "No space left on device" in said
    monkeypatch.undo()
    assert cli.main(["resume", str(tmp_path / "run")]) == 0
    check_saved(tmp_path / "run", 0)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EROFS, "Read-only file system", "/x"),
        FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"),
    ],
)
def test_what_the_system_refuses_is_said_without_a_traceback(error, capsys, monkeypatch):
    def fail(argv):
        raise error

    monkeypatch.setattr("sebulba.commands.check.doctor", fail)
    assert error.strerror in one_sentence(capsys, cli.EXIT_OTHER, "doctor")


@pytest.mark.parametrize("home", ["/dev/null", None])
def test_a_home_that_cannot_be_written_or_is_not_there_is_a_warning(home, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("SEBULBA_KEY_FILE")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path.replace("~", home or "~"))
    with pytest.warns(UserWarning, match="compiled programs are not kept in"):
        jax_setup._use_compile_cache("auto")
    assert sebulba.support.trust.signed("kind", {"x": 1})["signature"] is None
    assert not list(tmp_path.iterdir()), "no folder named ~"


# Files.


def test_json_that_is_nested_too_deeply_or_not_utf_8_is_damaged(tmp_path, run, capsys):
    file = tmp_path / "file.json"
    for level in (DEEP, '{"a": ' * 990 + "1" + "}" * 990, '{"a":' * (MOST_NESTED + 1) + "[]"):
        file.write_text(level if level == DEEP else level + "}" * level.count("{"))
        with pytest.raises(UsageError, match="is damaged"):
            read_json_object(file)
    file.write_bytes(b'{"config": "cartpole\xff"}')
    with pytest.raises(UsageError, match="0xff"):
        read_json_object(file)
    for damage in (DEEP.encode(), b"\xff\xfe"):
        file.write_bytes(damage)
        (run / "config.json").write_bytes(damage)
        for words in (["train", str(file)], ["resume", str(run)], ["eval", str(run)]):
            what = "is not usable" if words[0] == "train" else "is damaged"
            assert what in one_sentence(capsys, 2, *words)
        (run / "policy/config.json").write_bytes(damage)
        with pytest.raises(UsageError, match="is damaged"):
            sebulba.load_policy(run)
        record = next((run / "checkpoints").glob("0*")) / "record.json"
        record.write_bytes(damage)
        assert CheckpointStore(run / "checkpoints").record(int(record.parent.name)) == {}


def test_damaged_metrics_are_dropped_on_resume_and_left_out_of_the_curve(run, tmp_path):
    metrics, (number,) = run / "metrics.jsonl", CheckpointStore(run / "checkpoints").numbers()
    whole = metrics.read_bytes()
    damage = [b"\xff\xff", DEEP.encode(), b"[1]", b"null", b'{"env_steps": "many"}', b'{"x": 1}']
    metrics.write_bytes(whole + b"\n".join([*damage, b'{"env_steps": 1, "eval_env_st']))
    folder = RunFolder(run)
    assert folder.evaluated_at(number) == 0
    with pytest.warns(UserWarning, match=f"{len(damage)} of .* lines are damaged"):
        assert learning_curve(metrics, tmp_path / "curve.png")
    assert folder.drop_metrics_after(number) == len(damage) + 1
    assert metrics.read_bytes() == whole


BOX = {"type": "Box", "dtype": "float32", "shape": [2], "low": 0.0, "high": 1.0}
DISCRETE = {"type": "Discrete", "dtype": "int32", "n": 3, "start": 0}
MULTI = {"type": "MultiDiscrete", "dtype": "int32", "nvec": [2, 3], "start": [0, 0]}
BINARY = {"type": "MultiBinary", "dtype": "int8", "n": 3}
SPACES = (BOX, DISCRETE, MULTI, BINARY)
DAMAGED_SPACES: list[Any] = [
    *(BOX | {"shape": shape} for shape in ([-2], [0], "ab", 2, [2.5], [10**12], [2**30], [True])),
    *(BOX | {"low": low} for low in ("nan", float("nan"), 2, [0, 1, 2], None, "x", {})),
    *(BOX | {"dtype": dtype} for dtype in ("float99", "object", "complex64", "U5", None, 7, "f4")),
    *(DISCRETE | {"n": n} for n in (-1, 0, 2.5, "3", None, True, 10**30)),
    *(DISCRETE | {"start": start} for start in (None, 0.5, "0")),
    *(MULTI | {"nvec": nvec} for nvec in ([], [-1, 2], [0, 2], "ab", [2.5, 1.5], [[2], [3, 4]])),
    *(BINARY | {"n": n} for n in (-3, 0, "x", [2, -1], 2.5, None)),
    *({k: v for k, v in s.items() if k != key} for s in SPACES for key in s),
    *({"type": "Dict", "spaces": spaces} for spaces in ([], {"a": None}, None)),
    *({}, [], None, "Box", 3, {"type": None}, {"type": ["Box"]}, {"type": "Tuple"}),
]


@pytest.mark.parametrize("record", DAMAGED_SPACES, ids=range(len(DAMAGED_SPACES)))
def test_a_damaged_description_of_a_space_is_refused(record):
    with pytest.raises(UsageError, match="does not describe a space"):
        space_from_json(record)


def test_a_whole_description_of_a_space_is_read():
    for record in (*SPACES, {"type": "Dict", "spaces": {"a": BOX}}):
        through = json.loads(json.dumps(record))
        assert space_to_json(space_from_json(through)) == record


def test_a_damaged_score_of_the_best_policy_is_named(tmp_path):
    folder = RunFolder(tmp_path)
    folder.best_policy.mkdir()
    for text in ("{}", '{"episode_return_mean": "many"}'):
        (folder.best_policy / "evaluation.json").write_text(text)
        with pytest.raises(UsageError, match=r"is damaged .*or delete"):
            folder.best_return()


# What a user's code returns.


@pytest.mark.parametrize(
    "returned",
    [
        *(3, "abc", [("x", 1.0)], {"x": "1.5"}, {"x": None}, {"x": [1.0, 2.0]}, {"x": {}}),
        *({"x": object()}, {1: 2.0}, {"x": 1j}, {"x": np.zeros((2, 2))}),
    ],
    ids=range(11),
)
def test_an_observe_cycle_that_returns_nonsense_is_named(returned):
    loop, _ = make_tiny_loop(observe_cycle=lambda *_: returned)
    with loop, pytest.raises(UsageError, match=r"observe_cycle returned .* must return None, or"):
        loop.run(loop.new_state(0, STEPS), 2, STEPS)


def test_an_observe_cycle_may_return_numbers_and_images():
    image = np.zeros((2, 3, 4), np.uint8)
    values = {"a": 1, "b": jnp.bfloat16(2), "c": np.float32(3), "d": True, "image": image}
    loop, _ = make_tiny_loop(observe_cycle=lambda *_: values)
    with loop:
        metrics = loop.run(loop.new_state(0, STEPS), 2, STEPS).metrics
    assert [metrics[name] for name in "abcd"] == [1.0, 2.0, 3.0, 1.0]
    assert metrics["image"] is image


class Pays(CountingEnv):
    reward: Any = 1.0

    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, self.reward, *rest


@pytest.mark.parametrize(
    ("reward", "word"),
    [
        ("1.5", "the text '1.5'"),
        (b"1", "the text b'1'"),
        (np.str_("2"), "the text"),
        (np.ones(1), r"an array of shape \(1,\)"),
        (np.ones((1, 1), np.float32), r"an array of shape \(1, 1\)"),
        ([1.0], r"\[1.0\]"),
        (None, "None"),
        (1j, "1j"),
    ],
    ids=range(8),
)
def test_a_reward_that_is_no_number_is_refused_with_that_word(reward, word, monkeypatch):
    monkeypatch.setattr(Pays, "reward", reward)
    with pytest.raises(EnvError, match=f"reward must be a finite number as float32; got .*{word}"):
        one = CheckedEnv(Pays, 0)
        one.reset(seed=0)
        one.step(np.int32(0))
    adapter = sebulba.make_env_factory(Pays)(2, [0, 1])
    adapter.reset()
    with pytest.raises(EnvError, match="reward must be a finite number"):
        adapter.step(np.zeros(2, np.int32))
    adapter.close()


class TextVector(gymnasium.vector.SyncVectorEnv):
    reward: Any = None

    def step(self, actions):
        obs, _, *rest = super().step(actions)
        return obs, self.reward, *rest


@pytest.mark.parametrize(
    ("reward", "word"),
    [(["1", "2"], "dtype <U1"), (np.ones((2, 1)), r"shape \(2, 1\)")],
    ids=["text", "shape"],
)
def test_rewards_of_a_vector_environment_that_are_no_numbers_are_refused(reward, word):
    def make(num_envs, seeds):
        envs = TextVector([CountingEnv] * num_envs)
        envs.reward = reward
        return envs

    adapter = sebulba.make_env_factory(make)(2, [0, 1])
    adapter.reset()
    with pytest.raises(EnvError, match=rf"reward must be an array of shape \(2,\) .*{word}"):
        adapter.step(np.zeros(2, np.int32))
    adapter.close()


# Hangs.


class ManyWorlds(World):
    """A supervisor over many Inferencers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num: int) -> None:
        super().__init__(monkeypatch)
        self.timers = [PhaseTimer("env_step") for _ in range(num)]
        inferencers = [
            Inferencer(i, *[None] * 4, timer, CallingThread())
            for i, timer in enumerate(self.timers)
        ]
        self.supervisor._session.inferencers[:] = inferencers


def test_the_stacks_of_many_that_hang_are_printed_once(monkeypatch, capsys):
    world = ManyWorlds(monkeypatch, 50)
    for timer in world.timers:
        timer.phase("env_step").__enter__()
    world.wait(2 * LIMIT_S)
    printed = capsys.readouterr().err
    assert len(world.told) == 50
    assert printed.count("All threads:") == 1 and printed.count("MainThread:") == 1
    assert printed.count("is silent:") == 50


def test_a_hang_whose_failure_is_forgotten_is_not_told_again(monkeypatch, capsys):
    world = ManyWorlds(monkeypatch, 1)
    world.timers[0].phase("env_step").__enter__()
    (inferencer,) = world.supervisor._session.inferencers
    for _ in range(20):
        world.wait(LIMIT_S)
        inferencer.failure = None
    assert capsys.readouterr().err.count("is silent:") == 1


def test_an_evaluator_that_stays_silent_is_told_once(monkeypatch, capsys):
    world = ManyWorlds(monkeypatch, 0)
    world.evaluator_silent_s = 10 * LIMIT_S
    monkeypatch.setattr(world, "end_evaluations", lambda: None)
    world.supervisor._evaluations.end = lambda: None
    world.wait(3 * LIMIT_S)
    assert len(world.told) == 1 and capsys.readouterr().err.count("is silent:") == 1
