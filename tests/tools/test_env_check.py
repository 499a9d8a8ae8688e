"""``check-env``: each broken environment has its finding and no other, and none ends the report."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import gymnasium
import pytest

import sebulba
from sebulba import Population
from sebulba.commands import cli
from sebulba.errors import UsageError
from sebulba.tools.check.checks import Done, Finding, Level, run_checks
from sebulba.tools.check.env_checks import suite
from sebulba.tools.check.env_under_test import Subject
from tests.support import broken_envs
from tests.support.broken_envs import PID_FILE, Good
from tests.support.populations import Turns

SLOW = ("workers", "speed")
"""Of which one test each is enough."""


def events(env, *, num_steps: int = 60, skip: tuple[str, ...] = SLOW, **options) -> list:
    if isinstance(env, str) and hasattr(broken_envs, env):
        env = f"tests.support.broken_envs:{env}"
    subject = Subject(env, num_envs=2, num_steps=num_steps, seed=1, timeout_s=60.0, options=options)
    return list(run_checks(suite(subject), dict.fromkeys(skip, True)))


def findings(env, **arguments) -> list[Finding]:
    return [event for event in events(env, **arguments) if isinstance(event, Finding)]


@pytest.mark.parametrize(
    ("env", "check", "level", "words"),
    [
        ("WrongShape", "observations", Level.PROBLEM, "shape (3,)"),
        ("WrongDtype", "observations", Level.PROBLEM, "dtype uint8"),
        ("CastDtype", "observations", Level.NOTE, "obs is float64, its space float32"),
        ("WideSpace", "spaces", Level.NOTE, "64 bits"),
        ("LargeImage", "spaces", Level.NOTE, "5 times the pixels"),
        ("NotANumber", "observations", Level.PROBLEM, "step 3: obs must be finite numbers"),
        ("FarOutside", "observations", Level.PROBLEM, "its space is -1 to 1"),
        ("JustOutside", "observations", Level.NOTE, "its space is -1 to 1"),
        ("OutsideDiscrete", "observations", Level.PROBLEM, "inside Discrete(3"),
        ("WrongKeys", "observations", Level.PROBLEM, "keys ['k', 'x']"),
        ("FourTuple", "steps", Level.PROBLEM, "got a tuple of 4"),
        ("NoInfoOfReset", "steps", Level.PROBLEM, "reset must return a tuple of 2 (obs, info)"),
        ("NoSeed", "steps", Level.PROBLEM, "unexpected keyword argument 'seed'"),
        ("NumberForFlag", "steps", Level.PROBLEM, "terminated must be a bool"),
        ("Raises", "steps", Level.PROBLEM, "planted in step (broken_envs.py:"),
        ("RaisesWhenMade", "making", Level.PROBLEM, "OSError: no such simulator"),
        (
            "InfiniteReward",
            "rewards",
            Level.PROBLEM,
            "reward must be a finite number as float32; got inf",
        ),
        ("HugeReward", "rewards", Level.NOTE, "0 to 1e+06"),
        ("NoReward", "rewards", Level.NOTE, "no reward but 0"),
        ("NeverEnds", "episodes", Level.NOTE, "none ended in 60 steps"),
        ("GlobalChance", "determinism", Level.PROBLEM, "other obs at the beginning"),
        ("SeedIgnored", "seeds", Level.NOTE, "another seed, same 60 steps"),
        ("SharedState", "shared state", Level.PROBLEM, "other obs at step"),
        ("same_twice", "making", Level.PROBLEM, "same environment twice"),
        ("VaryingInfos", "infos", Level.NOTE, "keys vary (t, won)"),
        ("MasksActions", "infos", Level.NOTE, "action_mask is dropped, as all infos are"),
        ("Rewrites", "buffers", Level.NOTE, "changed after they were returned"),
        ("ClosesOnce", "close", Level.NOTE, "RuntimeError: closed twice"),
        ("CannotClose", "close", Level.PROBLEM, "RuntimeError: planted in close"),
        ("HoldsLock", "resume", Level.NOTE, "lock"),
        ("GraphSpace", "making", Level.PROBLEM, "observation_space['map']=Graph(Discrete(2)"),
        ("OnlyText", "making", Level.PROBLEM, "observation_space=Text(1, 20"),
        ("TextSpace", "spaces", Level.NOTE, "mission: text, which is left out"),
        ("NoActionSpace", "making", Level.PROBLEM, "action_space"),
        ("Unbounded", "spaces", Level.NOTE, "no bounds"),
        ("Exits", "steps", Level.PROBLEM, "SystemExit: 7"),
        ("no_final_obs_vector", "episodes", Level.NOTE, "truncated ones is missing"),
        ("lying_vector", "episodes", Level.PROBLEM, "comes after an end and only resets"),
        ("ForgetsEpisode", "resume", Level.PROBLEM, "once put back, it shows other obs"),
        ("RewritingAdapter", "buffers", Level.PROBLEM, "JAX may still be reading"),
    ],
)
def test_each_broken_environment_has_its_finding_and_no_other(env, check, level, words):
    found = [f for f in findings(env) if f.level is not Level.OK]
    # That it cannot be put back is known of vector environments of somebody else.
    others = [f for f in found if f.name == check or f.name != "resume"]
    assert [(f.name, f.level) for f in others] == [(check, level)]
    assert words in others[0].seen and others[0].remedy


@pytest.mark.parametrize(
    ("env", "wrappers"),
    [
        ("GraphSpace", ["FilterObservation(env, keys)"]),
        ("OnlyText", ["TransformObservation(env, function, observation_space)", "ImgObsWrapper"]),
    ],
)
def test_the_remedy_of_a_space_names_a_wrapper(env, wrappers):
    found = next(finding for finding in findings(env) if finding.name == "making")
    assert all(wrapper in found.remedy for wrapper in wrappers)
    assert "my_module:make" in found.remedy and "my_module" not in found.seen


def test_the_wrapper_that_is_named_mends_it():
    kept = gymnasium.wrappers.FilterObservation(broken_envs.GraphSpace(), ["x"])
    assert sebulba.env_spec(kept).observation_space == gymnasium.spaces.Dict(
        x=Good.observation_space
    )


@pytest.mark.parametrize(
    ("env", "options"),
    [
        ("Good", {}),
        ("GoodDict", {}),
        ("vector", {}),
        ("CartPole-v1", {"backend": "gymnasium"}),
        ("Pendulum-v1", {"backend": "gymnasium"}),
        ("CartPole-v1", {"backend": "envpool"}),
        ("sebulba.envs.memory_tasks:RepeatObservation", {}),
    ],
)
def test_a_good_environment_has_no_problem(env, options):
    found = findings(env, num_steps=250, **options)
    assert [f for f in found if f.level is Level.PROBLEM] == []
    assert {f.name for f in found if f.level is Level.NOTE} <= {"resume"}


def test_an_environment_that_can_be_put_back_is_told_from_one_that_cannot():
    (found,) = [f for f in findings("Remembers") if f.name == "resume"]
    assert found.level is Level.OK and "exactly" in found.seen
    (found,) = [f for f in findings("SaysWhyNot") if f.name == "resume"]
    assert found.level is Level.NOTE and "cannot be put back: planted reason" in found.seen


@pytest.mark.slow
def test_workers_and_speed_are_tried():
    (workers, speed) = sorted(
        (f for f in findings("Good", skip=()) if f.name in SLOW), key=lambda f: SLOW.index(f.name)
    )
    assert workers.level is Level.OK and "2 processes" in workers.seen
    assert speed.level is not Level.PROBLEM and "env steps/s alone" in speed.seen


def test_what_cannot_be_seen_without_a_step_is_not_tried():
    def skipped(env):
        return {e.name for e in events(env) if isinstance(e, Done) and e.because}

    assert {"observations", "determinism", "vector", "cycle"} <= skipped("Raises")
    assert skipped("GraphSpace") >= skipped("Raises")


def test_what_fails_within_its_module_is_a_finding(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "needs_nothing_known.py").write_text("import a_simulator_that_is_not_there\n")
    (found,) = sebulba.check_env("needs_nothing_known:Env").findings
    assert found.name == "importing" and "No module named 'a_simulator" in found.seen
    assert "needs_nothing_known.py:1" in found.seen


# In a process of their own.


def test_a_module_that_aborts_is_a_finding(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "aborts_when_imported.py").write_text("import os\nos.abort()\n")
    (found,) = sebulba.check_env("aborts_when_imported:Env").findings
    assert found.name == "importing" and found.level is Level.PROBLEM
    assert "signal 6" in found.seen and "aborts_when_imported.py:2" in found.seen


@pytest.mark.slow
def test_a_hang_is_a_finding_and_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv(PID_FILE, str(tmp_path / "pid"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    report = sebulba.check_env(broken_envs.Hangs, num_steps=10, timeout_s=2.0)
    hung, not_run = [f for f in report.findings if f.level is not Level.OK]
    assert hung.name == "steps" and hung in report.problems
    assert "no answer within 2 s" in hung.seen and "broken_envs.py" in hung.seen
    assert not_run.name == "not run" and "need steps" in not_run.seen
    assert is_gone(int((tmp_path / "pid").read_text()))
    assert [path.name for path in tmp_path.iterdir()] == ["pid"]


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_an_abort_is_a_finding_and_the_checks_go_on():
    threshold = 0.5  # so that it is a closure, which plain pickle cannot send

    class AbortsInClose(broken_envs.Aborts):
        def step(self, action):
            obs, reward, *rest = super().step(action)
            return obs, float(reward > threshold), *rest

        def close(self):
            if getattr(self, "t", 0):
                super().close()

    report = sebulba.check_env(AbortsInClose, num_steps=10)
    (died,) = report.problems
    assert died.name == "steps"
    assert "died with signal 6 (SIGABRT) in this check" in died.seen
    assert "check failed: x > 0" in died.seen and "in close" in died.seen


@pytest.mark.slow
def test_the_command_prints_a_line_a_finding_and_writes_json(capsys, tmp_path):
    file = tmp_path / "report.json"
    env = "tests.support.broken_envs:lying_vector"
    assert cli.main(["check-env", env, "--steps", "50", "--json", str(file)]) == 1
    out = capsys.readouterr().out
    assert "PROBLEM  episodes: environment" in out and "\n         -> set metadata[" in out
    assert f"\n{env}: 1 problem, " in out
    record = json.loads(file.read_text())
    assert record["problems"] == 1
    (finding,) = [f for f in record["findings"] if f["level"] == "PROBLEM"]
    assert finding["name"] == "episodes" and finding["remedy"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["CartPole-v9"], "not an id of envpool or gymnasium"),
        (["CartPole-v1", "--timeout", "0"], "must be a positive number of seconds"),
        (["CartPole-v1", "--json", "/nowhere/x.json"], "in a folder that does not exist"),
        (["CartPole-v1", "--json", f"{'x' * 5000}/x.json"], "in a folder that does not exist"),
        ([], "required"),
    ],
)
def test_wrong_usage_is_refused(capsys, argv, words):
    assert cli.main(["check-env", *argv]) == cli.EXIT_USAGE
    assert words in capsys.readouterr().err


def test_numbers_that_make_no_sense_are_refused():
    with pytest.raises(UsageError, match="num_envs=0 must be at least 1"):
        suite(Subject(Good, num_envs=0, num_steps=1, seed=0, timeout_s=1.0, options={}))


def test_what_cannot_be_sent_is_refused_in_words():
    lock = broken_envs.HoldsLock()
    with pytest.raises(UsageError, match="cannot be sent to another process"):
        sebulba.check_env(lambda: lock)


# Many agents.


@pytest.mark.slow
@pytest.mark.parametrize(
    "env",
    [
        "tests.support.populations:Turns",
        "tests.support.populations:Visitors",
        "tests.support.echo:Echo",
        "KuhnPoker-v1",
        "LevelBasedForaging-v0",
        "tests.support.pettingzoo_echo:EchoParallel",
        "tests.support.pettingzoo_echo:EchoAEC",
        "tests.envs.test_jax_populations:Duel",
    ],
)
def test_many_agents_are_checked_and_their_tree_is_shown(env):
    if "pettingzoo" in env:
        pytest.importorskip("pettingzoo", reason="the package pettingzoo is not installed")
    found = {finding.name: finding for finding in findings(env, num_steps=120)}
    assert [f for f in found.values() if f.level is Level.PROBLEM] == []
    assert "agents in" in found["spaces"].seen and "slots" in found["spaces"].seen
    assert {"agents", "determinism", "seeds", "resume", "cycle"} <= found.keys()
    acting = found["agents"].seen
    assert "all act" in acting if env.startswith("Level") else "%" in acting
    if ":" in env:
        assert "exactly" in found["resume"].seen


@pytest.mark.slow
def test_many_agents_are_tried_in_workers_and_timed():
    found = {f.name: f for f in findings("tests.support.populations:Visitors", skip=())}
    assert "2 processes" in found["workers"].seen
    assert "env steps/s as a vector of 2" in found["speed"].seen


class Uneven(Turns):
    """The payoff is zero_sum, and rewards are not; one of three never acts."""

    tree = Population(
        {**Turns.tree.members, "seat_2": Turns.tree.members["seat_0"]}, payoff="zero_sum"
    )

    def step(self, actions):
        obs, rewards, *ends = super().step(actions)
        return obs, {name: abs(reward) for name, reward in rewards.items()}, *ends


class PoorSeat(Turns):
    def step(self, actions):
        obs, rewards, *ends = super().step(actions)
        return obs, dict.fromkeys(rewards, float("nan")), *ends


class Blind(Turns):
    def observe(self):
        return {name: {**seen, "number": 9} for name, seen in super().observe().items()}


class Talks(Turns):
    def step(self, actions):
        return super().step(actions)[:2]


class Twins(Turns):
    def __init__(self, length=6, payoff="nothing"):
        super().__init__(length)
        self.tree = Population(Turns.tree.members, payoff=payoff)


@pytest.mark.parametrize(
    ("env", "check", "level", "words"),
    [
        (Uneven, "agents", Level.NOTE, "seat_2 never acted in 60 steps"),
        (Uneven, "agents", Level.NOTE, "the payoff is zero_sum, and rewards add up to"),
        (PoorSeat, "rewards", Level.PROBLEM, "reward of agent 'seat_0' must be a finite number"),
        (Blind, "observations", Level.PROBLEM, "observation of agent 'seat_0' ['number'] must be"),
        (Talks, "steps", Level.PROBLEM, "step must return a tuple of 4"),
        (Twins, "making", Level.PROBLEM, "has payoff='nothing'"),
    ],
)
def test_what_is_wrong_with_many_agents_is_found(env, check, level, words):
    found = [f for f in findings(env) if f.name == check and f.level is level]
    assert any(words in finding.seen for finding in found), found
    assert all(finding.remedy for finding in found)


@pytest.mark.slow
def test_the_report_of_many_agents_is_readable():
    report = sebulba.check_env("tests.support.populations:Turns", num_envs=2, num_steps=30)
    lines = str(report).splitlines()
    at = lines.index("OK       spaces: tests.support.populations:Turns: 2 agents in 1 group")
    assert lines[at + 1] == "           group 'seat': 2 slots, which may have to wait"
