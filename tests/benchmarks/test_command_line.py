"""``sebulba bench`` and ``python -m benchmarks``: their words are those of the benchmarks."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from sebulba_sweep import scale

from benchmarks import commands
from benchmarks.studies import rivals
from benchmarks.studies import train as with_prototype
from sebulba.commands import bench
from sebulba.configs.impala_presets import atari, cartpole
from sebulba.errors import UsageError
from sebulba.support.plugins import NotInstalledError
from sebulba.tools.bench import harness, train, tune

ARGUMENTS = {
    "train": ["cartpole"],
    "tune": ["cartpole", "--output", "x.json"],
    "learn": ["cartpole", "--num-envs", "4"],
}
"""That a benchmark cannot do without."""


def test_choices_are_those_of_the_benchmarks():
    devices = jax.devices()[:1]
    assert bench.KINDS == train.COMPARISONS
    assert (*bench.KINDS, with_prototype.PROTOTYPE) == commands.KINDS
    assert tuple(rivals.TASKS) == commands.RIVAL_AGENTS
    configs = [dataclasses.replace(c, num_inferencers_per_device=2) for c in (cartpole(), atari())]
    assert {*bench.TUNED} == {k.name for k in tune.choose_knobs(configs[0], devices, [])}
    axes = [axis for config in configs for axis in scale.all_axes(config, devices)]
    assert {*bench.AXES} == {axis.name for axis in axes}


@pytest.mark.parametrize("name", commands.BENCHMARKS)
def test_a_benchmark_takes_what_its_options_give(monkeypatch, name):
    module = importlib.import_module(commands.BENCHMARKS[name].module)
    signature = inspect.signature(module.run)
    given = {}
    monkeypatch.setattr(module, "run", lambda **options: given.update(options))
    assert commands.main([name, *ARGUMENTS.get(name, [])]) == 0
    config = (given.pop("config"),) if "config" in given else ()
    signature.bind(*config, **given)


def test_what_a_checkout_measures_is_said_where_the_package_has_not_got_it():
    assert tuple(commands.STUDIES) == bench.STUDIES
    for name in bench.STUDIES:
        with pytest.raises(UsageError, match=rf"use python -m benchmarks {name} in a checkout"):
            bench.main([name, "--anything"])


def test_a_study_runs_in_a_process_and_ends_as_the_command_does():
    words = [sys.executable, "-m", "benchmarks"]
    root = Path(commands.__file__).parents[1]
    done = subprocess.run([*words, "--help"], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0 and all(name in done.stdout for name in commands.BENCHMARKS)
    wrong = [*words, "inference", "--repeats", "1"]
    done = subprocess.run(wrong, cwd=root, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "sebulba: error: repeats=1 must be at least 5; use 5 or more\n"


def test_a_record_knows_the_commit_of_its_checkout():
    root = Path(commands.__file__).parents[1]
    if not (root / ".git").exists():
        pytest.skip("needs a checkout")
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True)
    assert harness.commit()[0] == head.stdout.strip()


def test_what_follows_a_configuration_that_was_left_out_is_not_taken_for_one(monkeypatch):
    seen = []
    monkeypatch.setattr(scale, "run", lambda **options: None)

    def read(words, command):
        seen.append((words, command))
        return words[0], cartpole()

    monkeypatch.setattr(bench, "read_config", read)
    bench.main(["scale", "--num-envs", "64", "--repeats", "6"])
    assert seen == [(["cartpole", "--num-envs", "64"], "sebulba bench scale")]


def test_a_benchmark_of_a_package_that_is_missing_says_which(monkeypatch):
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    wanted = r"sebulba bench scale is of the package sebulba-sweep, which is not installed"
    with pytest.raises(NotInstalledError, match=wanted):
        bench.main(["scale"])
