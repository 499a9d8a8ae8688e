"""``benchmarks learn``: what it takes from the records of a run, and what it leaves."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import types
from pathlib import Path

import pytest

from benchmarks.__main__ import command
from benchmarks.studies import learn
from benchmarks.studies.learn import (
    HEADER,
    Goal,
    figures_of,
    keys_of,
    seed_result,
    summary,
    table_row,
    thinned,
    verdict,
)
from benchmarks.studies.learning_goals import GOALS, GROUPS
from benchmarks.studies.report import BENCHMARKS
from sebulba.agents.configs.replay import ReplayConfig
from sebulba.commands import cli
from sebulba.configs.presets import NEUTRAL, PRESETS

TRAINED = Goal("cartpole", 475, 6000, evaluated=False, seconds=1.5)
EVALUATED = Goal("cartpole", 475, 4000)


def training(*means, exit_code=0):
    records = [
        {"episode_return_mean": mean, "env_steps": 1000 * i, "seconds": 0.5 * i}
        for i, mean in enumerate(means, 1)
    ]
    return seed_result(records, 7, exit_code, 9.0)


def evaluated(*means, **more):
    records = [
        {
            "episode_return_mean": None,
            "env_steps": 1000 * i + 10,
            "seconds": 0.5 * i,
            "eval_env_steps": 1000 * i,
            "eval_return_mean": mean,
            "eval_return_std": 1.0,
        }
        for i, mean in enumerate(means, 1)
    ]
    return seed_result(records, 7, more.get("exit_code", 0), 9.0)


def test_the_first_record_at_the_goal_counts_and_the_last_is_the_end():
    found = verdict(training(None, 470.0, 475.0, 500.0, 480.0), TRAINED)
    assert found == learn.Verdict(True, 480.0, 3000, 1.5)
    assert training(None, 470.0).seconds == 1.0


@pytest.mark.parametrize(
    "result",
    [
        training(None, 100.0, 200.0, 475.0),  # too late on the clock
        training(*[0.0] * 6, 475.0),  # beyond the budget
        training(475.0, exit_code=3),
        training(None, None),
        training(),
    ],
)
def test_a_goal_of_training_episodes_that_is_missed(result):
    assert not verdict(result, TRAINED).is_reached


def test_both_of_the_last_two_evaluations_of_the_budget_count():
    assert verdict(evaluated(500.0, 10.0, 480.0, 475.0), EVALUATED) == learn.Verdict(
        True, 475.0, 1000, None
    )
    beyond = evaluated(0.0, 480.0, 490.0, 500.0, 0.0)
    assert verdict(beyond, EVALUATED).episode_return_mean == 490.0


@pytest.mark.parametrize(
    "result",
    [
        evaluated(500.0, 500.0, 474.0, 500.0),
        evaluated(500.0),
        evaluated(500.0, 500.0, exit_code=1),
        training(500.0, 500.0),
    ],
)
def test_a_goal_of_evaluations_that_is_missed(result):
    assert not verdict(result, EVALUATED).is_reached


def test_a_limit_must_not_be_passed():
    limit = Goal("cartpole", 150, 4000, is_limit=True)
    assert verdict(evaluated(400.0, 150.0, 20.0), limit).is_reached
    assert not verdict(evaluated(20.0, 151.0), limit).is_reached


def test_tables_and_keys_say_how_many_reached_it():
    results = [training(None, 475.0, -3.0), training(None), training(exit_code=3)]
    assert {len(table_row(r, TRAINED)) for r in results} == {len(HEADER)}
    assert {len(table_row(r, None)) for r in results} == {len(HEADER)}
    assert summary(results, TRAINED).startswith("1 of 3 seeds: mean of 100 training episodes")
    assert keys_of(results, TRAINED)["share_of_seeds"] == pytest.approx(1 / 3)
    figures = figures_of(results, TRAINED)
    assert figures["env steps until first reached"] == [2000]
    assert len(figures["curves"]) == 3
    assert thinned(list(range(11)), 4) == [1, 4, 7, 10]


def test_a_mean_of_zero_is_a_mean():
    assert verdict(training(0.0), Goal("x", -5, 2000, evaluated=False)).env_steps == 1000


def test_goals_are_of_presets_and_the_report_knows_them():
    assert {goal.preset for goal in GOALS.values()} <= set(PRESETS)
    assert {f"learn-{name}" for name in GOALS} <= set(BENCHMARKS)


RESULTS = Path(learn.__file__).parents[1] / "results"
MEASURED = [
    name
    for name, preset in PRESETS.items()
    if preset.goal and name in GOALS and (RESULTS / f"learn-{name}.json").exists()
]


@pytest.mark.parametrize("name", MEASURED)
def test_what_a_preset_was_measured_with_is_what_it_is(name):
    measured = json.loads((RESULTS / f"learn-{name}.json").read_text())["config"]
    config = PRESETS[name].make()
    env_steps = measured["num_envs"] * measured["steps_per_cycle"]
    assert env_steps == config.num_envs * config.steps_per_cycle
    made = by_trajectories(json.loads(json.dumps(dataclasses.asdict(config.agent))), env_steps)
    known = by_trajectories(measured["agent"], env_steps)
    assert fields_of(made, known) == known


def by_trajectories(agent, env_steps):
    """Return it with a schedule by trajectories, in whichever way the record has it."""
    if "replay" not in agent:
        return agent
    fields = dict(agent["replay"])
    schedule = ReplayConfig(**fields).schedule(env_steps)
    for field in dataclasses.fields(ReplayConfig):
        if field.name.endswith(("_cycle", "_cycles", "_env_step", "_env_steps", "per_update")):
            fields.pop(field.name, None)
    return agent | {"replay": fields | {"schedule": schedule}}


def fields_of(made, measured):
    """Return what is made without the fields that did not exist when it was measured."""
    if not isinstance(measured, dict):
        return made
    return {field: fields_of(made[field], value) for field, value in measured.items()}


@pytest.mark.slow
def test_neutral_is_every_neutral_preset_on_tasks_typed_with_nothing_else(monkeypatch, capsys):
    given = {}
    monkeypatch.setattr(learn, "run", lambda **keywords: given.update(keywords))
    assert cli.main(["learn", "neutral", "cartpole", "--seeds", "1"], command) == 0
    assert list(given["goals"]) == [*GROUPS["neutral"], "cartpole"]
    assert {given["goals"][name].preset for name in GROUPS["neutral"]} == set(NEUTRAL)
    typed = ["--env.id", "--total-env-steps", "--eval-every-env-steps", "--eval-episodes"]
    for name in GROUPS["neutral"]:
        goal, config = given["goals"][name], given["configs"][name]
        assert [word for word in goal.options if word.startswith("--")] == typed
        assert config.agent == NEUTRAL[goal.preset].make().agent
        assert config.total_env_steps == goal.env_steps and goal.reference
    assert GOALS["neutral-dqn-acrobot"].episode_return_mean == pytest.approx(-76.6 * 1.1, abs=0.01)
    assert GOALS["neutral-ppo-hopper"].episode_return_mean == pytest.approx(2383 * 0.9, abs=1)


@pytest.mark.slow
def test_the_options_of_every_goal_are_of_its_preset(monkeypatch):
    given = {}
    monkeypatch.setattr(learn, "run", lambda **keywords: given.update(keywords))
    others = [name for name in GOALS if name not in GROUPS["neutral"]]
    assert cli.main(["learn", *others], command) == 0
    assert list(given["configs"]) == others
    assert given["configs"]["qbert-ppo-42"].env.options == {"img_height": 42, "img_width": 42}


def test_an_overview_has_a_line_for_each_result():
    results = [training(None, 475.0), training(None, 100.0)]
    with_goal = keys_of(results, TRAINED) | {"figures": figures_of(results, TRAINED)}
    without = keys_of(results, None) | {"figures": figures_of(results, None)}
    lines = learn.overview({"a-task": with_goal, "b": without}).splitlines()
    assert lines[1].split()[:6] == ["a-task", "1", "of", "2", "475", "100;"]
    assert lines[1].endswith("; none") and lines[2].split() == ["b"]


def test_every_seed_is_trained_once_and_written(tmp_path, monkeypatch, capsys):
    ran = []

    def train(command, **options):
        folder = command[command.index("--run-dir") + 1]
        ran.append(command[3:5] + command[-5:-2])
        path = tmp_path / "runs" / folder
        path.mkdir(parents=True)
        record = {"episode_return_mean": 480.0, "env_steps": 500, "seconds": 1.0}
        (path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
        return types.SimpleNamespace(returncode=0)

    monkeypatch.setattr(learn.subprocess, "run", train)
    monkeypatch.setattr("sebulba.tools.bench.harness.commit", lambda: ("abc", "today", False))
    words = ["learn", "cartpole", "--seeds", "2", "--results", str(tmp_path)]
    words += ["--runs", str(tmp_path / "runs"), "--num-envs", "64"]
    for _ in range(2):
        assert cli.main(words, command) == 0
    assert ran == [["train", "cartpole", "64", "--seed", str(seed)] for seed in range(2)]
    record = json.loads((tmp_path / "learn-cartpole.json").read_text())
    assert record["share_of_seeds"] == 1.0 and record["commit"] == "abc"
    assert record["config"]["num_envs"] == 64
    assert record["command"] == "python -m benchmarks learn cartpole --seeds 2 --num-envs 64"
    assert (tmp_path / "learn-cartpole.png").read_bytes().startswith(b"\x89PNG")
    assert "2 of 2 seeds" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cartpol"], "use cartpole"),
        (["cartpole", "--num-envs", "0"], "num_envs=0"),
        (["cartpole", "--seeds", "0"], "seeds=0 must be at least 1"),
        (["cartpole", "--results", "no/where/at-all"], "make it"),
        (
            ["tests.support.own:slow", "tests/support/own.py:slow"],
            "would both write learn-slow.json",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is(words, message, capsys, monkeypatch):
    monkeypatch.setattr(subprocess, "run", pytest.fail)
    assert cli.main(["learn", *words], command) == cli.EXIT_USAGE
    assert message in capsys.readouterr().err


def test_an_exam_of_the_last_policy_counts_in_place_of_a_return(tmp_path, monkeypatch):
    def run(command, **options):
        if "benchmarks.studies.games" in command:
            assert command[-2:] == [
                "NashConv of KuhnPoker-v1",
                str(tmp_path / "s" / "policy/player"),
            ]
            return types.SimpleNamespace(stdout="0.05\n")
        (tmp_path / "s").mkdir()
        return types.SimpleNamespace(returncode=0)

    monkeypatch.setattr(learn.subprocess, "run", run)
    goal = GOALS["kuhn"]
    trained = learn.train_seed(["kuhn"], 0, tmp_path / "s", None)
    result = learn.examined(trained, goal, tmp_path / "s")
    assert str(goal).startswith("NashConv of KuhnPoker-v1 ≤ 0.06 within 2,000,000 env steps")
    assert learn.verdict(result, goal) == learn.Verdict(True, 0.05)
    worse = dataclasses.replace(result, exam=0.3)
    late = dataclasses.replace(result, seconds=61.0)
    failed = dataclasses.replace(result, exit_code=1)
    assert not any(learn.verdict(one, goal).is_reached for one in (worse, late, failed))
    assert "0.050" in learn.table_row(result, goal)
    at_least = dataclasses.replace(goal, is_limit=False, episode_return_mean=0.2)
    assert not learn.verdict(result, at_least).is_reached


def test_goals_that_differ_in_their_exams_are_examined_on_the_same_runs(tmp_path, monkeypatch):
    trained = []

    def run(command, **options):
        if "benchmarks.studies.games" in command:
            exam, policy = command[-2:]
            assert policy == str(tmp_path / "runs" / "connect-four-seed0" / "policy" / "player")
            return types.SimpleNamespace(stdout="0.4\n" if "script" in exam else "0.99\n")
        trained.append(command)
        Path(command[command.index("--run-dir") + 1]).mkdir(parents=True)
        return types.SimpleNamespace(returncode=0)

    monkeypatch.setattr(learn.subprocess, "run", run)
    monkeypatch.setattr("sebulba.tools.bench.harness.commit", lambda: (None, None, False))
    both = {name: GOALS[name] for name in ("connect-four", "connect-four-script")}
    config = PRESETS["connect-four"].make()
    written = learn.run(
        goals=both,
        configs=dict.fromkeys(both, config),
        seeds=1,
        results=str(tmp_path),
        runs=str(tmp_path / "runs"),
    )
    assert len(trained) == 1
    figures = [record["figures"]["return that counts"] for record in written.values()]
    assert figures == [[0.99], [0.4]]
    assert [record["share_of_seeds"] for record in written.values()] == [1.0, 0.0]


@pytest.mark.parametrize("figures", [{0: 0.2, 1: None}, {0: 0.0, 1: 0.0}])
def test_the_picture_of_an_exam_has_its_figures_and_no_curves(tmp_path, figures):
    file = tmp_path / "kuhn.png"
    learn.draw_exam(figures, GOALS["kuhn"], "kuhn", file)
    assert file.read_bytes().startswith(b"\x89PNG")
