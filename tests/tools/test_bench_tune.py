"""``bench tune``: which way the search goes, what it discards, the file it writes. Never a time."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import types
from typing import ClassVar

import pytest

from sebulba.configs.files import read_config_file
from sebulba.configs.presets import PRESETS
from sebulba.errors import UsageError
from sebulba.runs.read_config import parse
from sebulba.tools.bench import tune
from sebulba.tools.bench.budget import Budget
from sebulba.tools.bench.trial import Measurement, Series, Trial
from sebulba.tools.bench.worker import WorkerError
from tests.sweep.test_bench_scale import tiny_config

CPU = [types.SimpleNamespace(platform="cpu")]
GPUS = [types.SimpleNamespace(platform="gpu")] * 4
ALL = ("devices", "num-inferencers-per-device", "num-envs", "steps-per-cycle")
START = dataclasses.replace(
    PRESETS["cartpole"].make(), num_envs=32, steps_per_cycle=16, num_inferencers_per_device=2
)


class FakeTrial:
    """Has a speed that ``speed(config)`` says, or cannot start."""

    alive = 0
    started: ClassVar[list] = []

    def __init__(self, config, seconds, *, memory_limit_mb):
        FakeTrial.alive += 1
        FakeTrial.started.append(repr(config))
        self.config = config
        self.limit_mb = memory_limit_mb
        self.is_open = True

    def ready(self, timeout_s):
        assert timeout_s > 0
        if self.config.num_envs > self.limit_mb:
            raise WorkerError("too much memory")

    def measure(self):
        speed = self.speed(self.config)
        return Measurement(speed, self.config.num_envs, 0.0, 2.0)

    def close(self):
        FakeTrial.alive -= self.is_open
        self.is_open = False


@pytest.fixture
def contest(monkeypatch):
    """Make contests whose trials have a given speed."""
    monkeypatch.setattr(tune, "Trial", FakeTrial)
    monkeypatch.setattr(FakeTrial, "alive", 0)
    monkeypatch.setattr(FakeTrial, "started", [])

    def make(speed, limit_mb=1e9, max_batch=10**9):
        monkeypatch.setattr(FakeTrial, "speed", staticmethod(speed), raising=False)
        return tune.Contest(START, 1.0, limit_mb, max_batch)

    return make


def search(contest, keep=("devices",), has_time=lambda: True):
    knobs = tune.choose_knobs(START, CPU, keep)
    tune.climb(knobs, contest, has_time)
    return contest.best


def peaked(num_envs, inferencers, steps):
    """Return a speed that is highest at these values."""

    def speed(config):
        off = abs(config.num_envs.bit_length() - num_envs.bit_length())
        off += abs(config.num_inferencers_per_device - inferencers)
        off += abs(config.steps_per_cycle.bit_length() - steps.bit_length())
        return 1000 * 0.7**off

    return speed


# The search.


@pytest.mark.parametrize("best", [(32, 2, 16), (128, 2, 16), (8, 4, 64), (256, 1, 4)])
def test_the_search_finds_a_single_peak(contest, best):
    with contest(peaked(*best)) as one:
        found = search(one)
    assert (found.num_envs, found.num_inferencers_per_device, found.steps_per_cycle) == best


def test_a_gain_below_the_least_does_not_change_the_batch(contest):
    with contest(lambda config: 1000 + config.num_envs) as one:
        assert search(one, keep=("devices", "steps-per-cycle")) == START
    assert "not worth it" in {attempt.verdict for attempt in one.attempts}


def test_nothing_is_tried_twice_and_no_process_is_left(contest):
    with contest(peaked(128, 3, 8)) as one:
        search(one)
        assert FakeTrial.alive == 1
    assert len(set(FakeTrial.started)) == len(FakeTrial.started) == 1 + len(one.attempts)
    assert FakeTrial.alive == 0


def test_what_takes_too_much_memory_is_discarded_and_named(contest, capsys):
    with contest(lambda config: float(config.num_envs), limit_mb=100) as one:
        assert search(one).num_envs == 64
    discarded = [a for a in one.attempts if a.gain is None]
    assert discarded[0].change == "num-envs 128"
    assert "num-envs 128: discarded: too much memory" in capsys.readouterr().out


def test_trajectories_do_not_grow_above_the_limit(contest):
    with contest(lambda config: float(tune.batch(config)), max_batch=2048) as one:
        assert tune.batch(search(one)) == 2048
    assert any("above the limit" in attempt.verdict for attempt in one.attempts)


def test_the_search_ends_with_its_time(contest):
    times = iter([True] * 3 + [False] * 100)
    with contest(lambda config: float(config.num_envs)) as one:
        search(one, keep=ALL[:2], has_time=lambda: next(times))
    assert len(one.attempts) == 3


def test_a_winner_that_does_not_win_again_is_not_taken(contest, monkeypatch):
    with contest(lambda config: float(config.num_envs)) as one:
        assert one.challenge("num-envs 64", dataclasses.replace(START, num_envs=64))
        monkeypatch.setattr(FakeTrial, "speed", staticmethod(lambda config: 1 / config.num_envs))
        start, tuned = one.confirm(START)
    assert tuned is start and FakeTrial.alive == 0


def test_a_start_that_cannot_run_is_refused(contest):
    with pytest.raises(UsageError, match=r"cannot run on this machine \(too much memory"):
        contest(lambda config: 1.0, limit_mb=31)


# What is tuned.


def test_what_is_kept_is_not_tuned():
    knobs = tune.choose_knobs(START, CPU, ["num-envs", "devices"])
    assert [knob.name for knob in knobs] == ["num-inferencers-per-device", "steps-per-cycle"]


def test_unknown_names_and_nothing_to_tune_are_refused():
    with pytest.raises(UsageError, match="keep='envs' is unknown; use devices, num-inf"):
        tune.choose_knobs(START, CPU, ["envs"])
    with pytest.raises(UsageError, match="leaves nothing to tune"):
        tune.choose_knobs(START, CPU, ALL)


def test_the_start_is_among_the_values_of_every_knob():
    odd = dataclasses.replace(
        START, num_envs=48, steps_per_cycle=20, num_cpu_devices=3, inference_devices=(1,)
    )
    for devices in (CPU, GPUS):
        for knob in tune.choose_knobs(odd, devices, []):
            assert knob.get(odd) in knob.values
            assert knob.get(knob.set(START, knob.get(odd))) == knob.get(odd)


def test_splits_of_accelerators_use_every_device():
    knob = tune.choose_knobs(START, GPUS, ALL[1:])[0]
    for _, infer, update in knob.values[1:]:
        assert set(infer) | set(update) == {0, 1, 2, 3}
    assert len({knob.label(knob.set(START, value)) for value in knob.values}) == len(knob.values)


# What it says.


def measured(*speeds):
    return Series([Measurement(speed, 100.0, 1.0, 2.0) for speed in speeds])


def test_another_batch_is_said_to_change_what_is_learned():
    knobs = tune.choose_knobs(START, CPU, [])
    best = dataclasses.replace(START, num_envs=128)
    text = "\n".join(tune.notes(knobs, START, best, measured(100, 100), measured(250, 250)))
    assert "gain: 2.50 times the start (num-envs 32 -> 128)" in text
    assert "2048 env steps instead of 512 (128 x 16)" in text
    assert "0.25 times the trajectories and updates" in text and "--max-batch-growth" in text
    best = dataclasses.replace(START, num_inferencers_per_device=3)
    assert "learned" not in "\n".join(tune.notes(knobs, START, best, measured(100), measured(250)))


# All of it.


def test_the_file_is_parsed_to_the_tuned_configuration(tmp_path, contest, capsys):
    file, json_file = tmp_path / "tuned.json", tmp_path / "record.json"
    contest(peaked(64, 3, 8)).close()
    start = dataclasses.replace(START, max_policy_lag=7, run_dir="elsewhere")
    tune.run(
        start,
        preset="cartpole",
        output=str(file),
        keep=["devices"],
        json_file=str(json_file),
        max_batch_growth=4.0,
    )
    preset, options = read_config_file(file)
    best = {"num_envs": 64, "num_inferencers_per_device": 3, "steps_per_cycle": 8}
    assert parse(preset, options) == dataclasses.replace(start, **best, run_dir=None)
    record = json.loads(json_file.read_text())
    assert record["gain"] == pytest.approx(0.7**-3)
    assert record["options"]["num-envs"] == 64 and record["rss_mb"] == 64
    assert record["tuned_env_steps_per_s"] == 1000
    assert [len(figures) for figures in record["figures"].values()] == [5, 5]
    assert {"attempts", "config", "machine", "versions"} <= record.keys()
    assert json.loads(file.read_text())["measured"]["gain"] == record["gain"]
    assert f"sebulba train {file}" in capsys.readouterr().out


def test_the_batch_stays_unless_it_may_grow(tmp_path, contest):
    contest(peaked(64, 3, 8)).close()
    record = tune.run(START, preset="cartpole", output=str(tmp_path / "t.json"), keep=["devices"])
    changes = ("num-inferencers-per-device", "num-envs", "steps-per-cycle")
    assert [record["options"].get(name) for name in changes] == [3, None, 16]


@pytest.mark.parametrize(("budget_s", "attempts"), [(60.0, 1), (100.0, 3), (20.0, 0)])
def test_everything_ends_within_the_budget(tmp_path, contest, monkeypatch, budget_s, attempts):
    now = [0.0]

    class Slow(FakeTrial):
        def ready(self, timeout_s):
            now[0] += 9.0

        def measure(self):
            now[0] += 0.9
            return super().measure()

    contest(peaked(64, 4, 8)).close()
    monkeypatch.setattr(tune, "Trial", Slow)
    monkeypatch.setattr(tune, "Budget", lambda seconds: Budget(seconds, lambda: now[0]))
    file = str(tmp_path / "t.json")
    options = {"preset": "cartpole", "output": file, "keep": ["devices"], "budget_s": budget_s}
    record = tune.run(START, **options, max_batch_growth=4.0)
    assert len(record["attempts"]) == attempts
    assert now[0] <= max(budget_s, 9.0 + 6 * 0.9)  # the start is always measured


def test_a_start_that_nothing_beats_is_written_as_it_is(tmp_path, contest, capsys):
    file = tmp_path / "tuned.json"
    contest(peaked(32, 2, 16)).close()
    assert tune.run(START, preset="cartpole", output=str(file), max_batch_growth=4.0)["gain"] == 1
    assert parse(*read_config_file(file)) == START
    assert "nothing paid" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"output": "tuned"}, "must end in .json"),
        ({"keep": ALL}, "leaves nothing to tune"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_measured(tmp_path, changes, words):
    arguments = {"preset": "cartpole", "output": str(tmp_path / "x.json"), **changes}
    with pytest.raises(UsageError) as refused:
        tune.run(START, **arguments)
    assert words in str(refused.value)


# A trial.


def test_a_process_above_its_memory_is_ended():
    with Trial(tiny_config(), 0.1, memory_limit_mb=20.0) as trial:
        with pytest.raises(WorkerError, match="above the limit of 20 MB"):
            trial.ready()
        assert not multiprocessing.active_children()


def test_a_process_that_dies_is_a_failed_trial_and_nothing_hangs():
    with Trial(tiny_config(), 0.1) as trial:
        trial._process.kill()
        with pytest.raises(WorkerError, match="ended by SIGKILL, which is how the system ends"):
            trial.ready()
        with pytest.raises(WorkerError):
            trial.measure()


@pytest.mark.slow
def test_what_a_configuration_breaks_is_said_in_its_own_words():
    with (
        Trial(tiny_config(inference_devices=(9,)), 0.1) as trial,
        pytest.raises(
            WorkerError, match="UsageError: inference_devices names device 9, but there are"
        ),
    ):
        trial.ready()
