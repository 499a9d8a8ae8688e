"""Configuration files: what is written is what is parsed, and bad ones are refused in words."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from sebulba.agents.configs import MultiAgentConfig
from sebulba.configs.files import (
    config_options,
    option_words,
    read_config_file,
    write_config_file,
)
from sebulba.configs.presets import OWN_NUMBERS, PRESETS, from_packages
from sebulba.configs.tasks import TASKS
from sebulba.errors import UsageError
from sebulba.runs.folder import RunFolder
from sebulba.runs.read_config import parse, read_config


def written(tmp_path, record):
    file = tmp_path / "config.json"
    file.write_text(record if isinstance(record, str) else json.dumps(record))
    return file


def changed(preset):
    """Return a preset's configuration with options of every kind changed."""
    config = PRESETS[preset].make()
    agent = changed_agent(config.agent)
    return dataclasses.replace(
        config,
        num_envs=6,
        steps_per_cycle=11,
        num_cpu_devices=3,
        inference_devices=(0, 2),
        update_devices=(1,),
        anneal_learning_rate=not config.anneal_learning_rate and hasattr(agent, "optimizer"),
        max_policy_lag=4,
        compile_cache="-odd",
        env=dataclasses.replace(
            config.env,
            episodic_life=True,
            reward_clip=None,
            options={**config.env.options, "a": 3, "b": True},  # added to those of the preset
        ),
        agent=agent,
    )


def changed_agent(agent):
    """Return hyper-parameters, of an agent or of each of its members, with some changed."""
    if isinstance(agent, MultiAgentConfig):
        fields = {"agents": agent.agents, "auxiliary": agent.auxiliary}
        return dataclasses.replace(
            agent,
            **{
                field: {name: changed_agent(own) for name, own in members.items()}
                for field, members in fields.items()
            },
        )
    own = {}
    if hasattr(agent, "replay"):
        own = {"replay": dataclasses.replace(agent.replay, batch_size=2 * agent.replay.batch_size)}
    elif hasattr(agent, "separate_value_torso"):
        own = {"separate_value_torso": not agent.separate_value_torso}
    torso = dataclasses.replace(agent.torso, hidden_sizes=(7, 5))
    optimizer = dataclasses.replace(agent.optimizer, epsilon=1.25e-7)
    return dataclasses.replace(agent, torso=torso, optimizer=optimizer, **own)


@pytest.mark.slow
@pytest.mark.parametrize("preset", [*OWN_NUMBERS, *from_packages(), "humanoid-sac", "seaquest-dqn"])
def test_a_written_file_is_parsed_to_the_same_configuration(tmp_path, preset):
    file = tmp_path / "tuned.json"
    for config in (changed(preset), PRESETS[preset].make()):
        write_config_file(file, preset, config_options(config, preset), {"gain": 1.5})
        name, options = read_config_file(file)
        assert name == preset
        assert parse(name, options) == config


def test_a_task_changes_hyperparameters_of_agents_that_it_has():
    for task in TASKS:
        assert set(task.changes) <= set(task.env_steps)
    for preset, changes in {
        "swimmer-ppo": {"discount": 0.9999},
        "swimmer-sac": {"discount": 0.9999},
        "mountaincarcontinuous-sac": {"noise_correlation": 0.9},
        "mountaincarcontinuous-ppo": {"discount": 0.9999},
        "lunarlandercontinuous-ppo": {
            **{"discount": 0.999, "trace_decay": 0.98, "entropy_coefficient": 0.01},
            **{"epochs": 4, "minibatches": 256},
        },
    }.items():
        neutral = PRESETS[preset.rpartition("-")[2]].make().agent
        assert PRESETS[preset].make().agent == dataclasses.replace(neutral, **changes)
    assert PRESETS["lunarlandercontinuous-ppo"].make().steps_per_cycle == 1024
    assert PRESETS["lunarlandercontinuous-impala"].make().steps_per_cycle == 128


def test_only_what_differs_from_the_preset_is_written():
    config = dataclasses.replace(PRESETS["cartpole"].make(), num_envs=128, update_devices=(1, 2))
    assert config_options(config, "cartpole") == {"num-envs": 128, "update-devices": [1, 2]}


def test_a_fixed_strategy_that_changed_is_an_option_that_the_command_line_has(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    config = with_fixed_strategy(PRESETS["lbf"].make(), Path("runs/a"))
    RunFolder(run).write_config(config, "lbf", [])
    options = config_options(with_fixed_strategy(config, "runs/b"), str(run), config)
    assert options == {"agent.frozen.agent/agent-1": "runs/b"}
    words = [word for name, one in options.items() for word in option_words(config, name, one)]
    _, read = read_config([str(run), *words], "sebulba sweep")
    assert read.agent.frozen == {"agent/agent_1": "runs/b"}


def with_fixed_strategy(config, strategy):
    agent = dataclasses.replace(config.agent, frozen={"agent/agent_1": strategy})
    return dataclasses.replace(config, agent=agent)


def test_an_agent_that_options_cannot_make_is_refused():
    config = dataclasses.replace(PRESETS["lbf"].make(), agent=PRESETS["ppo"].make().agent)
    with pytest.raises(UsageError, match="no options make PPOConfig of the configuration 'lbf'"):
        config_options(config, "lbf")


def test_name_and_folder_of_a_run_are_not_written():
    config = dataclasses.replace(PRESETS["cartpole"].make(), name="one", run_dir="there")
    assert config_options(config, "cartpole") == {}


def test_options_on_the_command_line_win_over_those_of_the_file(tmp_path):
    file = written(tmp_path, {"config": "cartpole", "options": {"num-envs": 64, "seed": 3}})
    preset, options = read_config_file(file)
    config = parse(preset, [*options, "--num-envs", "16"])
    assert (config.num_envs, config.seed) == (16, 3)


def test_short_options_are_taken(tmp_path):
    file = written(tmp_path, {"config": "cartpole", "options": {"learning-rate": 0.25}})
    assert parse(*read_config_file(file)).agent.learning_rate == 0.25


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ("{", "config.json is not JSON"),
        ([1], "not a JSON object"),
        ({"options": {}}, "unknown configuration None under 'config'; use impala"),
        ({"config": "cartpol"}, "unknown configuration 'cartpol'"),
        ({"config": ["cartpole"]}, "unknown configuration ['cartpole']"),
        ({"config": "cartpole", "options": [3]}, "options=[3], which must be an object"),
        ({"config": "cartpole", "option": {}}, "unknown key 'option'; use config, options"),
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path, record, words):
    with pytest.raises(UsageError) as refused:
        read_config_file(written(tmp_path, record))
    assert words in str(refused.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"none\.json does not exist; use one that .* tune wrote"):
        read_config_file(tmp_path / "none.json")


def test_a_file_that_cannot_be_written_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="cannot be written"):
        write_config_file(tmp_path / "no" / "where.json", "cartpole", {})


@pytest.mark.parametrize("option", ["num-env", "agent.learning-rat", "env.rewardclip"])
def test_an_unknown_option_is_refused_by_the_command_line(tmp_path, capsys, option):
    file = written(tmp_path, {"config": "cartpole", "options": {option: True}})
    preset, options = read_config_file(file)
    with pytest.raises(SystemExit):
        parse(preset, options)
    assert option in capsys.readouterr().err


def test_reading_does_not_import_jax():
    code = "import sys, sebulba.configs.files; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"config": "cartpole",\n "options": {"seed": 1,}}', "line 2.*no comma"),
        ('{"config": "cartpole",\n// mine\n "options": {}}', "line 2.*no comments"),
        ('{"config": "cartpole",\n "options": {"seed": 1,\n "seed": 2}}', "twice, in line 2 and 3"),
        (
            '{"config": "cartpole", "options": {\n"num-envs": 8,\n"num_envs": 16}}',
            "2 and 3; keep one",
        ),
        (
            '{"config": "cartpole", "options": {\n"env": {"id": "x",\n"num_threads": 8},\n'
            '"env.num-threads": 16}}',
            "in line 3 and 4; keep one",
        ),
    ],
    ids=["comma", "comment", "doubled", "spellings", "nested spellings"],
)
def test_a_slip_of_an_editor_is_refused_with_its_line(tmp_path, text, said):
    file = tmp_path / "mine.json"
    file.write_text(text)
    with pytest.raises(UsageError, match=said) as caught:
        read_config_file(file)
    assert "train again" not in str(caught.value)


def test_options_may_be_nested_as_in_the_file_that_a_run_writes(tmp_path):
    file = tmp_path / "mine.json"
    nested = {"agent": {"learning-rate": 0.5, "torso": {"kind": "mlp"}}, "env": {"id": "x"}}
    file.write_text(json.dumps({"config": "cartpole", "options": nested}))
    expected = ["--agent.learning-rate=0.5", "--agent.torso.kind=mlp", "--env.id=x"]
    assert read_config_file(file) == ("cartpole", expected)
    twice = nested | {"agent.learning_rate": 0.1}
    file.write_text(json.dumps({"config": "cartpole", "options": twice}))
    with pytest.raises(UsageError, match=r"'agent.learning-rate' and 'agent.learning_rate', one"):
        read_config_file(file)


def test_a_byte_order_mark_is_skipped(tmp_path):
    file = tmp_path / "mine.json"
    file.write_bytes(b"\xef\xbb\xbf" + b'{"config": "cartpole", "options": {"seed": 7}}')
    assert read_config_file(file) == ("cartpole", ["--seed=7"])


def test_a_list_takes_one_line_and_means_the_same(tmp_path):
    options = {"sizes": [64, 64], "names": ["a, b", "[c]\n"], "none": [], "curve": [[1, 2.5], [3]]}
    write_config_file(tmp_path / "mine.json", "cartpole", options)
    text = (tmp_path / "mine.json").read_text()
    assert json.loads(text)["options"] == options
    assert '"sizes": [64, 64],' in text and "[1, 2.5]," in text
