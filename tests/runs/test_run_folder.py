"""The folder of a run: with which configurations it may be gone on with."""

from __future__ import annotations

import dataclasses
import json

import pytest

from sebulba.agents.configs import MultiAgentConfig, PPOConfig
from sebulba.commands import cli
from sebulba.configs.presets import PRESETS
from sebulba.errors import UsageError
from sebulba.options import CheckpointOptions
from sebulba.runs.folder import RunFolder, choose_run_folder


@pytest.fixture
def begun(tmp_path):
    """Return (folder, configuration) of a run of cartpole-ppo, whose learning rate falls."""
    config = PRESETS["cartpole-ppo"].make()
    assert config.anneal_learning_rate
    folder = RunFolder(tmp_path)
    folder.write_config(config, "cartpole-ppo", ["sebulba", "train", "cartpole-ppo"])
    return folder, config


@pytest.mark.parametrize("key", ["episode_return_mean", "mean_return"])
def test_the_best_return_is_read_by_the_key_of_now_and_by_that_of_earlier_runs(key, tmp_path):
    best = RunFolder(tmp_path).best_policy
    best.mkdir(parents=True)
    (best / "evaluation.json").write_text(f'{{"{key}": 2.5}}')
    assert RunFolder(tmp_path).best_return() == 2.5


def test_a_run_may_be_gone_on_with_as_it_was_and_on_other_devices(begun):
    folder, config = begun
    folder.check_resumable(config)
    folder.check_resumable(
        dataclasses.replace(
            config,
            num_cpu_devices=4,
            update_devices=(0, 1, 2, 3),
            schedule="lockstep",
            queue_size=5,
            checkpoint=CheckpointOptions(every_s=1.0),
        )
    )


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("steps_per_cycle", 7, "steps_per_cycle is .* in the run and 7 now"),
        ("seed", 5, "seed is 0 in the run and 5 now"),
        ("total_env_steps", 123_000, r"total_env_steps is .* and 123000 now \(the learning rate"),
        ("num_envs", 24, r"num_envs is .* and 24 now \(the learning rate"),
        ("env", "Acrobot-v1", "env.id is 'CartPole-v1' in the run and 'Acrobot-v1' now"),
        ("agent", 0.5, "agent.discount is .* in the run and 0.5 now"),
    ],
)
def test_another_configuration_is_refused_with_the_difference(begun, field, value, words):
    folder, config = begun
    if field == "env":
        value = dataclasses.replace(config.env, id=value)
    if field == "agent":
        value = dataclasses.replace(config.agent, discount=value)
    with pytest.raises(UsageError, match=words):
        folder.check_resumable(dataclasses.replace(config, **{field: value}))


def test_members_of_an_agent_are_read_as_they_were_written_and_compared(tmp_path):
    config = PRESETS["lbf"].make()
    folder = RunFolder(tmp_path)
    folder.write_config(config, "lbf", ["sebulba", "train", "lbf"])
    preset, read = folder.read_config()
    assert (preset, read) == ("lbf", config)
    novelty = dataclasses.replace(config.agent.auxiliary["novelty"], bonus_scale=0.5)
    agent = dataclasses.replace(config.agent, auxiliary={"novelty": novelty})
    words = r"agent.auxiliary.novelty.bonus_scale is 0.01 in the run and 0.5 now"
    with pytest.raises(UsageError, match=words):
        folder.check_resumable(dataclasses.replace(config, agent=agent))


def test_other_dicts_of_hyper_parameters_are_read_as_they_were_written(tmp_path):
    config = PRESETS["lbf"].make()
    agent = dataclasses.replace(config.agent, frozen={"agent/agent_1": "runs/a"})
    config = dataclasses.replace(config, agent=agent)
    RunFolder(tmp_path).write_config(config, "lbf", ["sebulba", "train", "lbf"])
    assert RunFolder(tmp_path).read_config(trust=True)[1] == config


def test_a_fixed_strategy_is_kept_and_named_if_it_is_a_folder(tmp_path):
    config = PRESETS["lbf"].make()

    def with_strategy(strategy):
        agent = dataclasses.replace(config.agent, frozen={"agent/agent_1": strategy})
        return dataclasses.replace(config, agent=agent)

    folder = RunFolder(tmp_path)
    folder.write_config(with_strategy(tmp_path / "a"), "lbf", [])
    assert folder.read_config()[1].agent.frozen == {"agent/agent_1": str(tmp_path / "a")}
    named = with_strategy(tmp_path / "a").named_code()
    assert named == [f"the policy in {str(tmp_path / 'a')!r}"]
    with pytest.raises(UsageError, match=r"frozen\['agent/agent_1'\]=.*cannot be saved in"):
        folder.write_config(with_strategy(lambda obs, key: obs), "lbf", [])


def test_a_run_stays_with_the_backend_that_it_chose(begun):
    folder, config = begun
    resumed = dataclasses.replace(config, resume=True, run_dir=str(folder.path))
    assert folder.chosen_env(resumed) == config.env  # of a version that did not write it
    folder.write_config(config, "cartpole-ppo", [], {"id": "x", "backend": "gymnasium"})
    chosen = dataclasses.replace(config.env, backend="gymnasium")
    assert folder.chosen_env(resumed) == chosen
    assert folder.chosen_env(config) == config.env  # begins anew
    assert folder.read_env_config(folder.trust(False), folder.record()) == chosen
    folder.check_resumable(config)
    with pytest.raises(UsageError, match=r"env\.backend is None in the run and 'envpool' now"):
        folder.check_resumable(
            dataclasses.replace(config, env=dataclasses.replace(config.env, backend="envpool"))
        )
    folder.write_config(config, "cartpole-ppo", [], {"backend": 7})
    with pytest.raises(UsageError, match="backend"):
        folder.chosen_env(resumed)


def test_processes_that_begin_in_the_same_second_get_folders_of_their_own(monkeypatch):
    config, folders = PRESETS["cartpole"].make(), set()
    for process in (1, 2):
        monkeypatch.setattr("os.getpid", lambda process=process: process)
        folders.add(choose_run_folder(config, "cartpole").path.name.rpartition("-")[2])
    assert folders == {"1", "2"}


def test_only_the_records_that_are_kept_say_what_was_evaluated(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.evaluated_at(10) == 0
    folder.metrics.write_text(
        '{"env_steps": 5, "eval_env_steps": 4}\nnot json\n{"env_steps": 8}\n'
        '{"env_steps": 20, "eval_env_steps": 9}\n{"env_steps": 1, "eval'
    )
    assert folder.evaluated_at(10) == 4
    assert folder.evaluated_at(20) == 9


def test_episodes_that_a_checkpoint_does_not_know_are_dropped_with_the_records(tmp_path):
    folder = RunFolder(tmp_path)
    folder.metrics.write_text('{"env_steps": 5}\n{"env_steps": 9}\n')
    folder.episodes.write_text('{"env_steps": 5, "index": [0]}\n{"env_steps": 9, "index": [1]}\n')
    assert folder.drop_metrics_after(5) == 1
    assert folder.metrics.read_text() == '{"env_steps": 5}\n'
    assert folder.episodes.read_text() == '{"env_steps": 5, "index": [0]}\n'


def test_all_differences_are_named_at_once(begun):
    folder, config = begun
    with pytest.raises(UsageError, match=r"seed is .*; steps_per_cycle is .*begin a new run"):
        folder.check_resumable(dataclasses.replace(config, seed=5, steps_per_cycle=7))


def test_a_run_whose_learning_rate_fell_goes_on_at_a_rate_that_is_given(begun):
    folder, config = begun
    total = config.total_env_steps
    longer = dataclasses.replace(
        config, total_env_steps=2 * total, resume=True, run_dir=str(folder.path)
    )
    with pytest.raises(UsageError, match="--extension-learning-rate X goes on from there"):
        folder.check_resumable(longer)
    extended = dataclasses.replace(longer, extension_learning_rate=1e-4)
    for _ in range(2):  # the second time it is extended already, as for a scheduler's words
        folder.check_resumable(extended)
        goes_on = folder.continued(extended)
        assert (goes_on.anneal_env_steps, goes_on.total_env_steps) == (total, 2 * total)
        folder.write_config(goes_on, "cartpole-ppo", [])
    assert goes_on.annealed_cycles == config.annealed_cycles == config.num_cycles(1)
    _, saved = folder.read_config()
    assert folder.continued(dataclasses.replace(saved, total_env_steps=3 * total)) == (
        dataclasses.replace(saved, total_env_steps=3 * total)
    )
    folder.check_resumable(dataclasses.replace(saved, total_env_steps=3 * total))
    for change, words in (
        ({"extension_learning_rate": 2e-4}, "extension_learning_rate is 0.0001 in the run"),
        ({"anneal_env_steps": 5}, "anneal_env_steps is .* in the run and 5 now"),
        ({"num_envs": 24}, r"num_envs is .* and 24 now \(the learning rate"),
    ):
        with pytest.raises(UsageError, match=words):
            folder.check_resumable(dataclasses.replace(saved, **change))


def test_the_command_of_a_run_goes_on_with_what_its_agent_did_before_there_was_an_option(tmp_path):
    config = dataclasses.replace(PRESETS["pendulum-sac"].make(), run_dir=str(tmp_path), resume=True)
    folder = RunFolder(tmp_path)
    folder.write_config(config, "pendulum-sac", ["sebulba", "train", "pendulum-sac"])
    assert folder.continued(config) == config
    record = json.loads(folder.config.read_text())
    assert record["agent"].pop("single_bounds") == "soft"
    assert record["agent"]["torso"].pop("normalize_small_images")
    folder.config.write_text(json.dumps(record))
    before = folder.continued(config).agent
    assert before.single_bounds == "clipped" and not before.torso.normalize_small_images
    folder.check_resumable(config)
    other = dataclasses.replace(config, agent=dataclasses.replace(config.agent, discount=0.5))
    with pytest.raises(UsageError, match=r"agent\.discount is"):
        folder.check_resumable(other)


def test_a_run_that_is_not_extended_keeps_its_schedule(begun):
    _, config = begun
    ready = dataclasses.replace(config, extension_learning_rate=1e-4)
    assert ready.agent_for(7) == config.agent_for(7)
    extended = dataclasses.replace(ready, anneal_env_steps=1000, total_env_steps=2000)
    share = extended.agent_for(7).optimizer.share_after_schedule
    assert share * config.agent.learning_rate == pytest.approx(1e-4)


def test_a_run_of_many_agents_is_extended_at_one_rate_of_all():
    agents = {"a": PPOConfig(learning_rate=1e-3), "b": PPOConfig(learning_rate=1e-2)}
    config = dataclasses.replace(
        PRESETS["ppo"].make(),
        agent=MultiAgentConfig(agents),
        total_env_steps=2000,
        **{"anneal_learning_rate": True, "anneal_env_steps": 1000, "extension_learning_rate": 1e-4},
    )
    extended = config.agent_for({"a": 7, "b": 7}).agents
    shares = {name: one.optimizer.share_after_schedule for name, one in extended.items()}
    assert shares == pytest.approx({"a": 0.1, "b": 0.01})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"anneal_env_steps": 5}, "anneal_env_steps=5 needs a learning rate after the fall"),
        ({"extension_learning_rate": 0.0}, "extension_learning_rate=0.0 must be"),
        (
            {"extension_learning_rate": 1e-4, "anneal_learning_rate": False},
            "needs anneal_learning_rate=True",
        ),
    ],
)
def test_a_learning_rate_that_can_never_be_used_is_refused(begun, fields, words):
    with pytest.raises(UsageError, match=words):
        dataclasses.replace(begun[1], **fields)


def test_a_longer_run_is_no_other_where_the_learning_rate_stays(tmp_path):
    config = dataclasses.replace(PRESETS["cartpole-ppo"].make(), anneal_learning_rate=False)
    folder = RunFolder(tmp_path)
    folder.write_config(config, "cartpole-ppo", ["sebulba", "train", "cartpole-ppo"])
    folder.check_resumable(dataclasses.replace(config, total_env_steps=10**9, num_envs=24))


MOVES = """
import gymnasium, numpy as np, os, pathlib
class Moves(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        os.chdir(pathlib.Path(__file__).with_name("elsewhere"))
        self.t = 0
        return np.zeros(3, np.float32), {}
    def step(self, action):
        self.t += 1
        return np.zeros(3, np.float32), float(action), False, self.t == 5, {}
"""


@pytest.mark.slow
def test_an_environment_may_change_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "moves.py").write_text(MOVES)
    (tmp_path / "elsewhere").mkdir()
    words = ["--env.id", "moves.py:Moves", "--num-envs", "4", "--steps-per-cycle", "8"]
    words += ["--agent.minibatches", "1", "--agent.epochs", "1", "--agent.torso.hidden-sizes", "8"]
    words += ["--checkpoint.every-updates", "2", "--eval-every-env-steps", "100"]
    assert cli.main(["train", "ppo", *words, "--total-env-steps", "300", "--name", "a"]) == 0
    run = tmp_path / "runs" / "a"
    assert {"metrics.jsonl", "policy", "checkpoints", "learning_curve.png"} <= {
        path.name for path in run.iterdir()
    }
    assert len((run / "metrics.jsonl").read_text().splitlines()) > 0
    assert not any((tmp_path / "elsewhere").iterdir())


def test_a_run_that_is_resumed_by_its_folder_keeps_its_name(tmp_path):
    config = dataclasses.replace(PRESETS["cartpole-ppo"].make(), name="one")
    folder = RunFolder(tmp_path)
    folder.write_config(config, "cartpole-ppo", [])
    by_folder = dataclasses.replace(config, name=None, run_dir=str(tmp_path), resume=True)
    folder.write_config(by_folder, "cartpole-ppo", [])
    assert folder.record()["name"] == "one"
