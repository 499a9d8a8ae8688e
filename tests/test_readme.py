"""The README's examples run, and its promises about the command line hold."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

import sebulba
from sebulba.commands import cli
from sebulba.configs.presets import PRESETS

README = (Path(__file__).parent.parent / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = [
    line.split("#")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
    if line.startswith("sebulba train ") and "--help" not in line
]


def run(block: str, names: dict, **replacements: str) -> None:
    for old, new in replacements.items():
        assert f"{old}=" in block, old
        block = re.sub(rf"{old}=\w+", f"{old}={new}", block)
    exec(compile(block, "README.md", "exec"), names)


@pytest.fixture(scope="module")
def first_example():
    names: dict = {}
    # The tests have more devices, and every Inferencer compiles a program of its own.
    few = "inference_devices=[0], update_devices=[0], num_inferencers_per_device=1"
    run(PYTHON[0], names, num_envs=f"7, {few}", num_cycles="6", steps_per_cycle="5")
    return names


def test_the_first_example_trains_in_about_ten_lines(first_example):
    assert len([line for line in PYTHON[0].splitlines() if line.strip()]) <= 11
    assert first_example["result"].counters.env_steps == 7 * 6 * 5


def test_the_environment_of_the_reader_trains(first_example):
    names = dict(first_example)
    run(PYTHON[1], names)
    devices = {"inference_devices": [0], "update_devices": [0]}
    with sebulba.GymnasiumLoop(names["env"], names["agent"], 4, **devices) as loop:
        result = loop.run(loop.new_state(0, 5), num_cycles=2, steps_per_cycle=5)
    assert result.counters.updates == 2


def test_the_policy_example_acts(first_example, tmp_path):
    result, agent = first_example["result"], first_example["agent"]
    sebulba.save_policy(tmp_path / "policy", agent, result.acting_networks)
    names = {"sebulba": sebulba, "obs": np.zeros(4, np.float32)}
    run(PYTHON[2].replace("runs/NAME", str(tmp_path)), names)
    assert agent.spec.action_space.contains(names["action"])


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_parse(command):
    preset, *options = shlex.split(command)[2:]
    assert preset in PRESETS
    cli._parse(preset, options)


def test_every_exit_code_is_documented():
    table = README[README.index("Exit codes:") :]
    for code in (cli.EXIT_OK, cli.EXIT_OTHER, cli.EXIT_USAGE, cli.EXIT_ENV, cli.EXIT_NOT_FINITE):
        assert f"| {code} |" in table
    assert f"| {cli.EXIT_HANG} |" in table and "| 129, 130, 143 |" in table
