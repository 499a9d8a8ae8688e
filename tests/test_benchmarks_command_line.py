"""``sebulba bench``: the words that the command line knows are those of the benchmarks."""

from __future__ import annotations

import importlib
import inspect

import jax
import pytest

from sebulba.benchmarks.project import rivals
from sebulba.commands import bench as command_line
from sebulba.configs.impala_presets import atari, cartpole
from sebulba.tools.bench import scale, train, tune
from tests.test_package import MODULES, imports

ARGUMENTS = {"tune": ["--output", "x.json"], "learn": ["cartpole", "--num-envs", "4"]}
"""That a benchmark cannot do without, beside a configuration."""
NAMES = (
    *("inference", "train", "overhead", "scale", "memory", "start", "tune", "learn", "rivals"),
    "report",
)


def test_choices_are_those_of_the_benchmarks():
    devices = jax.devices()[:1]
    assert command_line.KINDS == train.COMPARISONS
    assert tuple(rivals.TASKS) == command_line.RIVAL_AGENTS
    assert {*command_line.TUNED} == {k.name for k in tune.choose_knobs(cartpole(), devices, [])}
    axes = [*scale.all_axes(cartpole(), devices), *scale.all_axes(atari(), devices)]
    assert {*command_line.AXES} == {axis.name for axis in axes}


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_takes_what_its_options_give(monkeypatch, name):
    module = importlib.import_module(command_line.module_of(name))
    signature = inspect.signature(module.run)
    given = {}
    monkeypatch.setattr(module, "run", lambda **options: given.update(options))
    with_config = name in ("train", "tune")
    words = [name, *(["cartpole"] if with_config else []), *ARGUMENTS.get(name, [])]
    assert command_line.main(words, lambda words, _: (words[0], cartpole())) == 0
    config = (given.pop("config"),) if "config" in given else ()
    signature.bind(*config, **given)


@pytest.mark.slow
def test_what_serves_users_imports_nothing_that_measures_the_project():
    """But for the table of commands, and for the rival of ``bench train --compare prototype``."""
    ours = {module for module in MODULES if module.startswith("sebulba.benchmarks.project")}
    users = MODULES.keys() - ours
    importing = {module for module in users if imports(module, at_import=False) & ours}
    assert importing == {"sebulba.commands.bench", "sebulba.tools.bench.train"}
    case = "sebulba.benchmarks.project.prototype_case"
    assert imports("sebulba.tools.bench.train", at_import=False) & ours == {case}


def test_what_follows_a_configuration_that_was_left_out_is_not_taken_for_one(monkeypatch):
    seen = []
    monkeypatch.setattr(scale, "run", lambda **options: None)

    def read(words, command):
        seen.append((words, command))
        return words[0], cartpole()

    command_line.main(["scale", "--num-envs", "64", "--repeats", "6"], read)
    assert seen == [(["cartpole", "--num-envs", "64"], "sebulba bench scale")]
