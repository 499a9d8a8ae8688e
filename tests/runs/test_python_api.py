"""``sebulba.train``, ``sebulba.resume`` and ``GymnasiumLoop.train``: the commands, from Python."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import subprocess
import sys

import gymnasium
import jax
import numpy as np
import pytest

import sebulba
from sebulba.agents.configs import ImpalaConfig, TorsoConfig
from sebulba.agents.impala import Impala
from sebulba.commands import cli
from sebulba.configs.files import config_options
from sebulba.configs.presets import PRESETS
from sebulba.errors import UsageError
from sebulba.runs import api, jax_setup
from sebulba.runs.folder import RunFolder
from sebulba.runs.wording import in_python, setting

FAST = {
    **{"num_envs": 4, "steps_per_cycle": 8, "schedule": "lockstep", "cycle": "stepped"},
    "writers": (),
}
ONE_DEVICE = {"inference_devices": (0,), "update_devices": (0,)}


class Walk(gymnasium.Env):
    """Ends after ten steps."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.zeros(2, np.float32), float(action), self.steps == 10, False, {}


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def train(config="cartpole", **changes):
    return sebulba.train(config, **{**FAST, **ONE_DEVICE, "total_env_steps": 256, **changes})


def arrays(networks):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(networks)]


@pytest.mark.slow
def test_notes_name_keywords_where_a_run_is_begun_from_python(capsys):
    train(name="mine")
    assert "; in a run that is to go on after them, anneal_learning_rate=False keeps it" in (
        capsys.readouterr().out
    )
    assert cli.main(["resume", "runs/mine"]) == 0
    assert "--total-env-steps N --extension-learning-rate X trains on" in capsys.readouterr().out
    sebulba.resume("runs/mine")
    said = capsys.readouterr().out
    assert "total_env_steps=N extension_learning_rate=X trains on" in said and "--" not in said
    with pytest.raises(sebulba.UsageError, match=r"another name=X, or go on with it by resume="):
        train(name="mine")
    with in_python():
        assert setting("agent.replay.warm_up_cycles", "N") == (
            'agent={"replay": {"warm_up_cycles": N}}'
        )


@pytest.mark.slow
def test_train_makes_the_run_that_the_command_makes(tmp_path):
    result = train(name="python", seed=3, agent={"learning_rate": 1e-3})
    assert result.counters.env_steps == 256 and result.folder == tmp_path / "runs" / "python"
    words = "--name command --seed 3 --learning-rate 1e-3 --num-envs 4 --steps-per-cycle 8"
    words += " --schedule lockstep --cycle stepped --total-env-steps 256"
    words += " --inference-devices 0 --update-devices 0"
    assert cli.main(["train", "cartpole", *words.split(), "--writers"]) == 0
    ours, theirs = (RunFolder(tmp_path / "runs" / name) for name in ("python", "command"))
    assert {path.name for path in ours.root.iterdir()} == {
        path.name for path in theirs.root.iterdir()
    }
    one, other = (sebulba.load_policy(folder.root) for folder in (ours, theirs))
    seen = np.linspace(-1, 1, 80, dtype=np.float32).reshape(20, 4)
    for ours_, theirs_ in zip(*(arrays(p.distribution(seen)) for p in (one, other)), strict=True):
        np.testing.assert_array_equal(ours_, theirs_)


@pytest.mark.slow
def test_resume_counts_env_steps_from_the_beginning(tmp_path):
    train(name="mine", anneal_learning_rate=False)
    result = sebulba.resume(tmp_path / "runs" / "mine", total_env_steps=512)
    assert result.counters.env_steps == 512
    again = sebulba.resume("runs/mine")  # nothing is left to do
    assert again.counters.env_steps == 512 and again.folder == tmp_path / "runs" / "mine"
    for one, other in zip(*map(arrays, (result.state.networks, again.state.networks)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_an_environment_may_be_a_class_of_a_module(tmp_path):
    result = train("ppo", env=Walk, name="walk")
    env = json.loads((result.folder / "config.json").read_text())["env"]
    assert env["id"] == f"{__name__}:Walk" and result.metrics["episodes"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("guard", ["", 'if __name__ == "__main__": '], ids=["bare", "guarded"])
@pytest.mark.parametrize("what", ["'ppo', env=Mine", "'cartpole', agent=MyAgent"])
def test_a_script_may_train_its_own_classes(tmp_path, guard, what):
    """It is imported again by its name; without the guard that is refused, not done for ever."""
    own = "\n".join(
        [
            "import sebulba, gymnasium",
            "class Mine(gymnasium.wrappers.TimeLimit):",
            "    def __init__(self):",
            "        super().__init__(gymnasium.make('CartPole-v1').unwrapped, 20)",
            "from sebulba.agents.ppo import PPO",
            "class MyAgent(PPO): pass",
            f"{guard}sebulba.train({what}, total_env_steps=64, num_envs=4,",
            "    steps_per_cycle=8, writers=(), name='mine')",
        ]
    )
    (tmp_path / "script.py").write_text(own)
    done = subprocess.run(
        [sys.executable, "script.py"], capture_output=True, text=True, timeout=300
    )
    if guard:
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "runs" / "mine" / "policy").is_dir()
    else:
        assert done.returncode == 1 and 'call it below: if __name__ == "__main__":' in done.stderr


@pytest.mark.slow
def test_ctrl_c_saves_everything_and_is_raised_then(tmp_path):
    (tmp_path / "script.py").write_text(
        "import os, signal, sebulba\n"
        "def interrupt(record):\n"
        "    if record['updates'] > 5: os.kill(os.getpid(), signal.SIGINT)\n"
        "if __name__ == '__main__':\n"
        "    signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "    try:\n"
        "        sebulba.train('cartpole', num_envs=4, steps_per_cycle=8, cycle='stepped',\n"
        "            name='r', total_env_steps=10**9, writers=(), metrics_interval_s=0.01,\n"
        "            callbacks=('script.py:interrupt',))\n"
        "    except KeyboardInterrupt:\n"
        "        print('raised', signal.getsignal(signal.SIGINT) is signal.default_int_handler)\n"
    )
    done = subprocess.run(
        [sys.executable, "script.py"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and "raised True" in done.stdout, done.stderr
    run = RunFolder(tmp_path / "runs" / "r")
    run.check_has_checkpoints()
    assert run.policy.is_dir() and "stopped by Ctrl-C" in run.ended.read_text()


@pytest.mark.parametrize(
    ("config", "changes", "says"),
    [
        ("cartpol", {}, "configuration 'cartpol' is unknown"),
        (3, {}, "config=3 must be the name of a preset"),
        ("cartpole", {"num_env": 3}, "num_env is not a field; the nearest are num_envs,"),
        ("cartpole", {"agent": {"learning": 1.0}}, "agent.learning is not a field"),
        ("cartpole", {"env": lambda: None}, "cannot be found again by its name"),
        ("cartpole", {"total_env_steps": 0}, "total_env_steps=0"),
    ],
)
def test_what_is_wrong_is_said_before_anything_begins(tmp_path, config, changes, says):
    with pytest.raises(sebulba.UsageError, match=None) as caught:
        sebulba.train(config, **changes)
    assert says in str(caught.value) and not list(tmp_path.iterdir())


def test_a_list_stands_for_a_tuple():
    changes = {"inference_devices": ["cpu:0", 1], "agent": {"torso": {"hidden_sizes": [8, 8]}}}
    config = api._changed(PRESETS["cartpole"].make(), changes)
    assert config.inference_devices == ("cpu:0", 1) and config.agent.torso.hidden_sizes == (8, 8)
    with pytest.raises(UsageError, match="must be a tuple, each of it a whole number or text, or"):
        api._changed(config, {"update_devices": [0.5]})


def test_an_environment_takes_the_place_of_the_id_alone(monkeypatch):
    def of(**changes):
        return api._configured("atari-ppo", changes)[1].env

    before = PRESETS["atari-ppo"].make().env
    assert before.episodic_life
    assert of(env="Breakout-v5") == dataclasses.replace(before, id="Breakout-v5")
    assert of(env={"frame_skip": 2}) == dataclasses.replace(before, frame_skip=2)


@pytest.mark.parametrize("name", ["env.id", "env.wrappers", "callbacks", "agent.torso.kind"])
def test_code_that_a_file_names_is_not_imported_without_trust(tmp_path, name):
    file = tmp_path / "theirs.json"
    file.write_text(json.dumps({"config": "cartpole", "options": {name: "planted_module:make"}}))
    with pytest.raises(sebulba.UsageError, match="nothing says who wrote the file"):
        sebulba.train(str(file))
    assert "planted_module" not in sys.modules
    with pytest.raises(sebulba.UsageError, match="planted_module"):  # looked for, and not there
        sebulba.train(str(file), trust=True)


def test_a_file_with_an_unknown_option_is_refused(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"config": "cartpole", "options": {"nothing": 1}}))
    with pytest.raises(sebulba.UsageError, match=r"mine\.json"):
        sebulba.train(str(file))


@pytest.mark.slow
def test_output_without_an_encoding_will_do():
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        train(total_env_steps=64)
    assert "done: " in printed.getvalue()


@pytest.mark.parametrize(
    ("is_there", "words"),
    [(True, "must be chosen before JAX starts"), (False, r"'sebulba\[tpu\]'")],
)
def test_another_platform_than_the_one_that_runs_is_refused(is_there, words, monkeypatch):
    monkeypatch.setattr(jax_setup, "has_accelerator", lambda: is_there)
    with pytest.raises(sebulba.UsageError, match=words):
        train(platform="tpu")


def test_an_experiment_has_the_name_of_a_preset_with_its_agent():
    """So that its folder may be swept, which writes options for a preset."""
    for name in ("cartpole", "pendulum-sac", "kuhn"):
        config = PRESETS[name].make()
        preset, same = api._configured(config, {})
        assert same == config and type(PRESETS[preset].make().agent) is type(config.agent)
        assert config_options(config, preset)


def test_an_environment_that_is_made_already_is_refused():
    with pytest.raises(sebulba.UsageError, match=r"class or function that makes .*not a TimeLimit"):
        sebulba.train("ppo", env=gymnasium.make("CartPole-v1"))


def test_an_experiment_is_taken_as_it_is(tmp_path):
    config = PRESETS["cartpole"].make()
    with pytest.raises(sebulba.UsageError, match="must be divisible by"):
        sebulba.train(config, num_envs=3, update_devices=(0, 1), inference_devices=(0,))


def loop(**keywords):
    env = sebulba.make_env_factory("CartPole-v1")
    agent = Impala(sebulba.env_spec(env), ImpalaConfig(torso=TorsoConfig(hidden_sizes=(8,))))
    return sebulba.GymnasiumLoop(env, agent, 4, schedule="lockstep", **ONE_DEVICE, **keywords)


@pytest.mark.slow
def test_a_loop_trains_to_a_total_and_on_from_its_checkpoints(tmp_path):
    with (
        sebulba.Checkpointer(tmp_path / "saved", every_s=600) as checkpointer,
        loop(checkpointer=checkpointer) as first,
    ):
        assert first.train(total_env_steps=100, steps_per_cycle=8).counters.env_steps == 128
        done = first.train(total_env_steps=200, steps_per_cycle=8)
        assert done.counters.env_steps == 256
        assert first.train(total_env_steps=256).state is done.state
        with pytest.raises(sebulba.UsageError, match="steps_per_cycle=9, and this run has 8"):
            first.train(total_env_steps=300, steps_per_cycle=9)
        with pytest.raises(sebulba.UsageError, match=r"seed='a' must be an integer"):
            first.train(total_env_steps=300, seed="a")
    with (
        sebulba.Checkpointer(tmp_path / "saved", every_s=600) as checkpointer,
        loop(checkpointer=checkpointer) as second,
    ):
        result = second.train(total_env_steps=320)
        assert result.counters.env_steps == 320 and second.counters.env_steps == 320


@pytest.mark.slow
def test_a_loop_does_not_begin_anew_after_a_run_that_failed():
    def fail(*_):
        raise RuntimeError("planted")

    with loop(observe_cycle=fail) as failing:
        with pytest.raises(RuntimeError, match="planted"):
            failing.train(total_env_steps=64, steps_per_cycle=8)
        with pytest.raises(sebulba.UsageError, match="the last run of this loop failed"):
            failing.train(total_env_steps=64, steps_per_cycle=8)
