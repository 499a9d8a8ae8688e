"""``sebulba sweep``: what is proposed, run, pruned, resumed, refused and shown."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
from PIL import Image
from sebulba_sweep import command as command_line
from sebulba_sweep import pictures, sweep, training
from sebulba_sweep.space import Choices, Range, space_of
from sebulba_sweep.study import Ended, Trial

from sebulba.commands import cli
from sebulba.errors import UsageError
from sebulba.runs import placement
from sebulba.runs.read_config import read_config

pytest.importorskip("optuna")

ROOT = Path(__file__).parents[2]
SPACE = {"learning-rate": {"low": 1e-5, "high": 1e-1, "log": True}, "num-envs": [16, 32]}
FAKE = (sys.executable, str(ROOT / "tests/support/fake_train.py"))


@pytest.fixture
def run_sweep(tmp_path, monkeypatch):
    """Return a function that sweeps with trainings that end at once; it returns code and trials."""
    monkeypatch.setattr(training, "TRAIN", FAKE)
    monkeypatch.setattr(sweep, "POLL_S", 0.02)

    def run(*words, config="cartpole", name="a", space=SPACE, deeds=""):
        monkeypatch.setenv("FAKE_TRAIN", deeds)
        (tmp_path / "space.json").write_text(json.dumps(space))
        found = tmp_path / f"{name}.json"
        code = cli.main(
            ["sweep", config, "--space", str(tmp_path / "space.json"), "--sweep-dir"]
            + [str(tmp_path / name), "--total-env-steps", "1000", "--json", str(found), *words]
        )
        trials = json.loads(found.read_text())["trials"] if found.exists() else []
        return code, sorted(trials, key=lambda trial: trial["trial"])

    return run


@pytest.mark.slow
def test_a_sweep_finds_the_best_values_and_shows_them(run_sweep, tmp_path, capsys):
    code, trials = run_sweep("--trials", "12", "--parallel", "2", "--prune-after", "0")
    assert code == 0
    assert [trial["ended"] for trial in trials] == ["done"] * 12
    best = max(trials, key=lambda trial: trial["return"])
    assert best["return"] > 90
    text = " ".join(capsys.readouterr().out.split())
    assert "what matters: learning-rate" in text
    assert str(tmp_path / "a" / "best.json") in text
    for name in (pictures.IMPORTANCE, pictures.PARALLEL, pictures.CURVES):
        with Image.open(tmp_path / "a" / name) as picture:
            assert min(picture.size) > 200
    preset, config = read_config([str(tmp_path / "a" / "best.json")], "sebulba train")
    assert preset == "cartpole"
    assert config.agent.learning_rate == best["values"]["learning-rate"]
    assert config.num_envs == best["values"]["num-envs"]
    log = (tmp_path / "a" / f"trial-{best['trial']:04d}-seed-0.log").read_text()
    assert "--total-env-steps 1000" in log and "--no-pin-inferencers" in log


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "others"),
    [
        ("--agent=tests.support.own:MyAgent", ["--trials", "2"]),
        ("--trials=2", ["--agent", "tests.support.own:MyAgent"]),
    ],
)
def test_an_agent_of_ones_own_is_swept_without_a_configuration(run_sweep, first, others):
    others = [*others, "--env.id", "tests.support.own:MyEnv"]
    code, trials = run_sweep(*others, config=first, space={"learning-rate": [0.1, 0.01]})
    assert code == 0 and len(trials) == 2


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("cartpole --space s --lr 1", "cartpole --lr 1"),
        ("--space s cartpole --agent a:B", "cartpole --agent a:B"),
        ("--space s --agent a:B --env.id c:D", "a:B --env.id c:D"),
        ("--agent a:B --space s", "a:B"),
    ],
)
def test_a_configuration_is_found_among_the_options_of_a_sweep(argv, words):
    assert command_line.parsed(argv.split())[1] == words.split()


def test_a_sweep_of_no_configuration_is_refused(capsys):
    assert cli.main(["sweep", "--space", "s.json"]) == cli.EXIT_USAGE
    assert "CONFIG is missing; name a configuration" in capsys.readouterr().err


@pytest.mark.parametrize(("scores", "scales"), [((-3.0, 5.0), [(-3.0, 5.0)]), ((2.0, 2.0), [])])
def test_the_colours_of_the_parallel_picture_have_a_scale(scores, scales):
    rates = (1e-3, 2e-3)
    done = [
        Trial(number, {"learning-rate": rates[number]}, {}, Ended.DONE, score, "")
        for number, score in enumerate(scores)
    ]
    figure = pictures._parallel({"learning-rate": Range(1e-4, 1e-2, log=True)}, done)
    drawn = [axes for axes in figure.axes if axes.get_ylabel() == "return"]
    assert [axes.get_ylim() for axes in drawn] == scales


def test_a_curve_of_one_evaluation_is_seen(tmp_path):
    def colours(returns):
        trial = Trial(0, {"learning-rate": 1e-3}, returns, Ended.DONE, 1.0, "")
        space = {"learning-rate": Range(1e-4, 1e-2, log=True)}
        pictures.draw(tmp_path, space, [trial], {}, 100.0)
        with Image.open(tmp_path / pictures.CURVES) as picture:
            plot = picture.convert("RGB").crop((150, 150, 1200, 600))  # without the legend
            return {colour for _, colour in plot.getcolors(2**20)}

    assert any(blue - red > 50 for red, _, blue in colours({0: 1.0}))
    assert any(blue - red > 50 for red, _, blue in colours({0: 1.0, 1: 2.0}))


def test_the_best_keeps_the_options_of_the_file_that_the_sweep_began_with(
    run_sweep, tmp_path, capsys
):
    own = tmp_path / "own_sweep.py"
    own.write_text("from sebulba.configs.presets import PRESETS\nmine = PRESETS['cartpole'].make\n")
    file = tmp_path / "begin.json"
    options = {"queue-size": 3, "steps-per-cycle": 16}
    file.write_text(json.dumps({"config": f"{own}:mine", "options": options}))
    run_sweep("--trials", "1", "--trust", config=str(file))
    best = [str(tmp_path / "a" / "best.json"), "--trust"]
    assert f"sebulba train {' '.join(best)}" in " ".join(capsys.readouterr().out.split())
    preset, config = read_config(best, "sebulba train")
    assert preset == f"{own}:mine"
    assert (config.queue_size, config.steps_per_cycle) == (3, 16)


@pytest.mark.slow
def test_a_trial_returns_the_mean_over_its_seeds(run_sweep, tmp_path):
    _, (trial,) = run_sweep("--trials", "1", "--seeds", "3", "--seed", "4")
    _, (alone,) = run_sweep("--trials", "1", "--seed", "4", name="b")
    assert alone["values"] == trial["values"]
    assert trial["return"] == pytest.approx(alone["return"] + 1)  # of seeds 4, 5, 6
    runs = sorted(path.name for path in (tmp_path / "a").iterdir() if path.is_dir())
    assert runs == [f"trial-0000-seed-{seed}" for seed in (4, 5, 6)]


@pytest.mark.slow
def test_trials_that_are_worse_are_ended_and_failures_are_told(run_sweep):
    code, trials = run_sweep("--trials", "5", "--prune-after", "1", deeds="1:wait 2:4 3:1")
    assert code == 0
    ended = [(trial["ended"], trial["note"].partition(" (")[0]) for trial in trials[:4]]
    assert ended == [
        ("done", ""),
        ("pruned", "worse than the median"),
        ("pruned", "not finite"),
        ("failed", "an error that is none of these"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpus", "words", "seen"),
    [
        (["3", "5"], (), {"3", "5"}),
        (["3"], (), {"None"}),
        (["3", "5"], ("--parallel", "1"), {"None"}),
        (["3", "5"], ("--platform", "cpu"), {"None"}),
        (["3", "5"], ("--inference-devices", "0", "--update-devices", "1"), {"None"}),
    ],
)
def test_each_of_several_trials_has_a_gpu_to_itself(
    run_sweep, tmp_path, monkeypatch, gpus, words, seen
):
    monkeypatch.setattr(sweep, "visible_gpus", lambda: gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    # The first waits, so that the second begins beside it.
    code, _ = run_sweep(
        *("--trials", "2", "--parallel", "2", "--prune-after", "0", *words), deeds="1:7"
    )
    assert code == 0
    logs = [file.read_text() for file in sorted((tmp_path / "a").glob("trial-*.log"))]
    found = [re.search(r"CUDA_VISIBLE_DEVICES=(.*)", log)[1] for log in logs]
    assert len(found) == 2 and set(found) == seen
    assert all("PREALLOCATE=false" in log for log in logs)


def test_a_trial_that_follows_takes_the_gpu_that_is_free(monkeypatch):
    begun = []

    class Runs:
        def __init__(self, words, folder, measure, gpu):
            begun.append(gpu)

    monkeypatch.setattr(sweep, "visible_gpus", lambda: ["0", "1"])
    monkeypatch.setattr(sweep, "Training", Runs)
    _, config = read_config(["cartpole"], "sebulba sweep")
    plan = sweep.Plan(config, ("cartpole",), (0,), training.Measure("a", "b", 1.0), Path("x"))
    trials = [types.SimpleNamespace(number=i, values={}) for i in range(5)]
    made = sweep.Sweep(plan, types.SimpleNamespace(), 5, 3, lambda line: None)
    made._begin(trials)
    assert begun == ["0", "1", "0"]
    del made._running[1]
    made._begin(trials)
    assert begun[3] == "1"


@pytest.mark.parametrize(
    ("named", "files", "gpus"),
    [(None, 2, ["0", "1"]), ("4, 6", 8, ["4", "6"]), ("", 2, []), (None, 0, [])],
)
def test_gpus_are_those_that_the_process_sees(monkeypatch, named, files, gpus):
    monkeypatch.setattr(placement, "has_accelerator", lambda: True)
    monkeypatch.setattr(placement.glob, "glob", lambda path: ["x"] * files)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert placement.visible_gpus() == gpus
    monkeypatch.setattr(placement, "has_accelerator", lambda: False)
    assert placement.visible_gpus() == []


@pytest.mark.slow
def test_a_resumed_sweep_proposes_what_one_in_a_piece_does(run_sweep, tmp_path):
    none_early = ("--prune-after", "0")
    _, whole = run_sweep("--trials", "12", *none_early, name="whole")
    run_sweep("--trials", "11", *none_early)
    code, parts = run_sweep("--trials", "12", *none_early, "--resume")
    assert code == 0
    assert parts == whole
    assert parts != run_sweep("--trials", "12", *none_early, "--seed", "1", name="other")[1]


@pytest.mark.slow
def test_a_signal_ends_the_trainings_and_resume_finishes_their_trial(
    run_sweep, monkeypatch, tmp_path
):
    def say(line):
        if line.startswith("trial 1: learning-rate"):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(command_line, "_say", say)
    code, trials = run_sweep("--trials", "3", "--prune-after", "0", deeds="1:wait")
    assert code == 143
    assert [trial["ended"] for trial in trials] == ["done", "open"]
    monkeypatch.undo()
    monkeypatch.setattr(training, "TRAIN", FAKE)
    before = trials[1]["values"]
    code, trials = run_sweep("--trials", "3", "--prune-after", "0", "--resume")
    assert code == 0
    assert [trial["ended"] for trial in trials] == ["done"] * 3
    assert trials[1]["values"] == before


@pytest.mark.slow
def test_a_sweep_whose_first_trials_fail_ends_and_says_why(run_sweep, capsys):
    code, _ = run_sweep("--trials", "9", deeds=" ".join(f"{number}:2" for number in range(9)))
    assert code == 2
    assert "the first 3 trials failed, the last one by: usage" in capsys.readouterr().err


@pytest.mark.slow
def test_a_folder_that_holds_a_sweep_goes_on_with_that_one_only(run_sweep, capsys):
    assert run_sweep("--trials", "1")[0] == 0
    assert run_sweep("--trials", "1")[0] == 2
    assert "continue it with --resume" in capsys.readouterr().err
    assert run_sweep("--trials", "1", "--resume", space={"num-envs": [16]})[0] == 2
    assert "repeat its command" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "space", "said"),
    [
        ((), {"learning-rat": [0.1]}, "learning-rat"),
        ((), {"learning-rate": {"low": -1.0, "high": 0.1}}, "learning_rate=-1.0"),
        (("--trials", "0"), SPACE, "trials=0 must be at least 1"),
        (("--name", "x"), SPACE, "--name is of one run"),
        (("--colour", "red"), SPACE, "--colour"),
    ],
    ids=["option", "value", "trials", "name", "word"],
)
def test_what_is_wrong_is_said_before_anything_is_written(
    run_sweep, tmp_path, capsys, words, space, said
):
    assert run_sweep(*words, space=space)[0] == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (3, "must be a list of values or a range"),
        ([], "at least one value"),
        ([1, None], "a list of numbers, words, true or false"),
        ([1, 1], "a value twice"),
        ({"low": 1}, "high=None must be a finite number"),
        ({"low": 1, "high": True}, "high=True must be a finite number"),
        ({"low": 2, "high": 1}, "low=2 must be less than high=1"),
        ({"low": 0, "high": 1, "log": True}, "must begin above 0"),
        ({"low": 1, "high": 3, "step": 0.5}, "step=0.5 must be above 0, and an integer"),
        ({"low": 1, "high": 3, "log": 1}, "log=1 must be true or false"),
        ({"low": 1, "high": 3, "least": 1}, "unknown key 'least'"),
    ],
)
def test_entries_of_a_space_that_say_nothing_are_refused(entry, said):
    with pytest.raises(UsageError, match=said):
        space_of({"num-envs": entry}, "space.json")


@pytest.mark.parametrize("name", ["seed", "total-env-steps", "run_dir", "--num-envs"])
def test_options_that_are_alike_in_all_trials_cannot_be_searched(name):
    with pytest.raises(UsageError, match="cannot be searched"):
        space_of({name: [1]}, "space.json")


def test_a_range_of_integers_holds_integers():
    space = space_of({"a": {"low": 1, "high": 8}, "b": {"low": 1, "high": 8.0}, "c": [1]}, "")
    assert space["a"] == Range(1, 8) and space["a"].is_integer
    assert not space["b"].is_integer
    assert space["c"] == Choices((1,))


def test_without_optuna_the_command_that_installs_it_is_named(run_sweep, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert run_sweep("--trials", "1")[0] == 2
    assert "pip install 'optuna>=5'" in capsys.readouterr().err


def test_one_file_imports_optuna():
    lines = re.compile(r"^ *(import|from) optuna\b", re.MULTILINE)
    files = [*(ROOT / "sebulba").rglob("*.py"), *(ROOT / "packages").rglob("*.py")]
    assert [path.name for path in files if lines.search(path.read_text())] == ["study.py"]


@pytest.mark.slow
def test_a_sweep_that_is_killed_leaves_no_training_and_goes_on(tmp_path):
    (tmp_path / "space.json").write_text(json.dumps({"num-envs": [8, 16]}))
    words = [sys.executable, "-m", "sebulba", "sweep", "cartpole", "--space", "space.json"]
    words += ["--trials", "1", "--sweep-dir", "a", "--total-env-steps"]
    words += ["100000000", "--resume", "--checkpoint.every-updates", "20"]
    folder = tmp_path / "a" / "trial-0000-seed-0"
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(words, cwd=tmp_path, stdout=log, stderr=log)
    try:
        wait_for(lambda: any((folder / "checkpoints").glob("0*")))
    finally:
        process.kill()
        process.wait()
    wait_for((folder / "ended.txt").exists)
    assert "exit code 143" in (folder / "ended.txt").read_text()
    wait_for(lambda: str(folder.relative_to(tmp_path)) not in commands())
    process = subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.DEVNULL)
    log_file = folder.with_name(f"{folder.name}.log")
    try:
        wait_for(lambda: "resumed at" in log_file.read_text())
    finally:
        process.terminate()
    assert process.wait(300) == 143
    assert str(folder.relative_to(tmp_path)) not in commands()


def wait_for(condition) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def commands() -> str:
    """Return the command lines of all processes."""
    return subprocess.run(["ps", "-eo", "args="], capture_output=True, text=True).stdout
