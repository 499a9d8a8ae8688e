"""The command line: what it refuses and how, what a run leaves behind, exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import sebulba
from sebulba.commands import cli
from sebulba.configs.presets import OWN_NUMBERS, PRESETS
from sebulba.envs import make_env_factory
from sebulba.errors import is_env_failure
from sebulba.metrics.plots import read_records
from sebulba.runs.folder import RunFolder
from sebulba.runs.read_config import COMMON_OPTIONS, parse
from sebulba.runs.signals import StopOnSignal

ROOT = Path(__file__).parents[2]


class Guess(gymnasium.Env):
    """Observes a Dict; an episode is 5 guesses."""

    observation_space = spaces.Dict({"x": spaces.Box(-1, 1, (3,)), "k": spaces.Discrete(2)})
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._obs(), {}

    def _obs(self):
        self.k = int(self.np_random.integers(2))
        return {"x": self.np_random.uniform(-1, 1, 3).astype(np.float32), "k": self.k}

    def step(self, action):
        reward = float(action == self.k)
        self.t += 1
        return self._obs(), reward, False, self.t >= 5, {}


class Breaks(Guess):
    def step(self, action):
        if self.t == 3:
            raise RuntimeError("planted in step")
        return super().step(action)


class FourTuple(Guess):
    def step(self, action):
        return super().step(action)[:4]


class ExplodingReward(Guess):
    def step(self, action):
        obs, _, terminated, truncated, info = super().step(action)
        return obs, 3e38, terminated, truncated, info


SMALL = [
    *("--num-envs", "4", "--steps-per-cycle", "5", "--total-env-steps", "600"),
    *("--num-inferencers-per-device", "1", "--agent.torso.hidden-sizes", "8"),
    *("--compile-cache", "off", "--metrics-interval-s", "0"),
]
ONE_DEVICE = ["--inference-devices", "0", "--update-devices", "0"]


def train(folder: Path | None, env: str, *options: str) -> int:
    where = [] if folder is None else ["--run-dir", str(folder)]
    env = f"tests.runs.test_cli:{env}" if env in globals() else env
    return cli.main(["train", "cartpole", "--env.id", env, *SMALL, *ONE_DEVICE, *where, *options])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "guess"
    assert train(folder, "Guess", "--learning-rate", "0.02", "--seed", "3") == 0
    return folder


# What a run leaves behind.


def test_a_run_leaves_everything_in_its_folder(run):
    names = {path.name for path in run.iterdir()}
    assert names == {
        *("config.json", "metrics.jsonl", "tensorboard", "learning_curve.png", "policy"),
        *("checkpoints", "ended.txt", ".lock", "episodes.jsonl"),
    }
    assert len(list((run / "tensorboard").iterdir())) == 1
    assert (run / "learning_curve.png").read_bytes().startswith(b"\x89PNG")


def test_the_metrics_have_every_promised_name_and_grow(run):
    records = read_records(run / "metrics.jsonl")
    names = {
        *("updates", "env_steps", "seconds", "env_steps_per_s", "episode_return_mean"),
        *("episode_length_mean", "policy_lag_mean", "policy_lag_max", "loss"),
    }
    assert all(names <= record.keys() for record in records)
    assert records[0]["episodes_averaged"] < 100 == records[-1]["episodes_averaged"]
    assert records[-1]["env_steps"] == 600 and records[-1]["updates"] == 30
    assert records[-1]["episode_length_mean"] == 5.0
    for name in ("env_steps", "updates", "seconds"):
        values = [record[name] for record in records]
        assert values == sorted(values)


def test_the_config_says_what_ran(run):
    record = json.loads((run / "config.json").read_text())
    assert record["agent"]["learning_rate"] == 0.02
    assert record["seed"] == 3
    assert record["env"]["id"] == "tests.runs.test_cli:Guess"
    assert record["command"][:3] == ["sebulba", "train", "cartpole"]
    assert record["preset"] == "cartpole" and record["sebulba"] == sebulba.__version__


@pytest.mark.slow
def test_line_and_config_say_which_backend_makes_the_environment_and_resuming_keeps_it(
    capsys, tmp_path, monkeypatch
):
    run = tmp_path / "r"
    monkeypatch.setattr("sebulba.envs.envpool_adapter.envpool_id", lambda env: None)
    assert train(run, "CartPole-v1", "--no-anneal-learning-rate") == 0
    monkeypatch.undo()  # as after an update of envpool, which now has the id
    longer = ["--resume", "--total-env-steps", "700", "--no-anneal-learning-rate"]
    assert train(run, "CartPole-v1", *longer) == 0
    said = f"sebulba: CartPole-v1 (gymnasium {gymnasium.__version__}) in {run}"
    assert capsys.readouterr().out.splitlines().count(said) == 2
    record = json.loads((run / "config.json").read_text())
    assert record["environment"] == {
        "id": "CartPole-v1",
        "backend": "gymnasium",
        "versions": {"gymnasium": gymnasium.__version__},
    }
    assert record["env"]["backend"] is None
    assert cli.main(["eval", str(run), "--episodes", "1", "--num-envs", "1"]) == 0


@pytest.mark.slow
def test_the_policy_acts_and_is_evaluated(run, capsys, tmp_path):
    policy = sebulba.load_policy(run)
    env = Guess()
    obs, _ = env.reset(seed=1)
    state = None
    for _ in range(5):
        action, state = policy(obs, state)
        obs, *_ = env.step(action)
    file = tmp_path / "result.json"
    options = ["--episodes", "11", "--num-envs", "3", "--seed", "7", "--json", str(file)]
    assert cli.main(["eval", str(run), *options]) == 0
    shown = capsys.readouterr().out
    assert "over 11 episodes, mean length 5.0" in shown and "95 % confidence" in shown
    assert len(json.loads(file.read_text())["returns"]) == 11


@pytest.mark.slow
def test_a_folder_may_be_used_again_after_a_run_that_had_nothing(tmp_path, capsys):
    folder = RunFolder(tmp_path / "again")
    assert train(folder.path, "Breaks") == cli.EXIT_ENV
    first = folder.record()
    assert folder.holds_nothing and "planted in step" in folder.ended.read_text()
    assert train(folder.path, "Guess", "--seed", "3") == 0
    assert folder.record()["run_id"] != first["run_id"] and folder.record()["seed"] == 3
    assert not folder.last_transition.exists() and not folder.holds_nothing
    capsys.readouterr()
    assert train(folder.path, "Guess") == cli.EXIT_USAGE
    assert "already holds a run" in capsys.readouterr().err


def test_a_folder_that_holds_a_run_is_refused(run, capsys):
    before = (run / "metrics.jsonl").read_bytes()
    assert train(run, "Guess") == cli.EXIT_USAGE
    assert "already holds a run" in capsys.readouterr().err
    assert (run / "metrics.jsonl").read_bytes() == before


def test_folders_without_a_name_do_not_collide(tmp_path, monkeypatch):
    from sebulba.runs.folder import choose_run_folder

    monkeypatch.chdir(tmp_path)
    config = PRESETS["pong"].make()
    folders = []
    for _ in range(3):
        folders.append(choose_run_folder(config, "pong"))
        folders[-1].create()
    assert len({folder.path for folder in folders}) == 3
    assert all(folder.path.name.startswith("pong-2") for folder in folders)


# What is refused.


def refused(capsys, *argv: str) -> str:
    assert cli.main(argv) == cli.EXIT_USAGE
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    # Boxes break lines anywhere.
    return " ".join(captured.err.replace("│", " ").split())


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "usage:"),
        (["trian"], "use train"),
        (["train"], "cartpole"),
        (["train", "cartpol"], "use cartpole"),
        (["train", "zzz"], "use impala or ppo or dqn"),
        (["train", "cartpole", "--num-env", "3"], "--num-envs"),
        (["train", "cartpole", "--agent.learning-rat", "3"], "--agent.learning-rate"),
        (["train", "cartpole", "--seed", "x"], "'x'"),
        (["train", "cartpole", "--seed", "2147483648"], "seed=2147483648 must be a 32-bit"),
        (["train", "cartpole", "--num-envs", "0"], "num_envs=0 must be at least 1"),
        (["train", "cartpole", "--schedule", "lock"], "lockstep"),
        (["train", "cartpole", "--learning-rate", "-1"], "learning_rate=-1.0 must be"),
        (["train", "cartpole", "--learning_rate=nan"], "learning_rate=nan"),
        (["train", "cartpole", "--agent.torso", "resnet"], "impala_resnet"),
        (["train", "cartpole", "--name", ".."], "name='..' must be one folder name"),
        (
            ["train", "cartpole", "--schedule", "lockstep", "--max-policy-lag", "0"],
            "use 1 or None",
        ),
        (["bench"], "BENCHMARK"),
        (["bench", "tran"], "train"),
        (["bench", "scale", "--repeats", "1"], "repeats=1 must be at least 5"),
        (["bench", "scale", "--num-env", "4"], "--num-envs"),
        (["bench", "train", "cartpole", "--compare", "prototype"], "processes"),
        (["bench", "learn", "cartpole"], "use python -m benchmarks learn in a checkout"),
        (["bench", "train", "cartpol"], "cartpole"),
        (["bench", "train", "cartpole", "--num-envs", "0"], "num_envs=0 must be at least 1"),
        (["bench", "train", "cartpole", "--seconds", "0"], "seconds=0.0 must be above 0"),
        (["bench", "tune", "cartpole"], "--output"),
        (["bench", "tune", "cartpole", "--output", "no/where/x.json"], "make it"),
        (["bench", "scale", "--axes", "colour"], "num-envs"),
        (["bench", "scale", "--num-envs", "0"], "num_envs=0 must be at least 1"),
        (["bench", "memory", "--minutes", "-1", "--num-envs", "4"], "minutes=-1.0 must be above 0"),
        (["train", "nowhere.json"], "nowhere.json does not exist"),
        (["eval"], "RUN"),
        (["eval", "nowhere", "--seed", "99999999999"], "seed=99999999999 must be a 32-bit"),
        (["eval", "nowhere", "--json", "no/where/x.json"], "make it"),
        (["eval", "nowhere"], "nowhere/config.json cannot be read"),
        (["eval", "nowhere", "--episodes", "0"], "episodes=0 must be at least 1"),
    ],
)
def test_wrong_words_are_refused_and_what_is_near_is_named(capsys, argv, words):
    assert words in refused(capsys, *argv)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--env.id", "CartPole-v9"], "CartPole-v1"),
        (["--env.id", "tests.runs.test_cli:Nothing"], "Nothing"),
        (["--env.id", "no_such_module:Env"], "no_such_module"),
        (["--env.noop-max", "3"], "noop_max"),
        (["--inference-devices", "99"], "99"),
        (["--num-envs", "3", "--update-devices", "0", "1"], "num_envs=3 must be divisible by"),
        (["--num-cpu-devices", "5"], "num_cpu_devices=5"),
    ],
)
def test_a_run_that_cannot_start_is_refused_and_leaves_no_folder(capsys, tmp_path, options, words):
    argv = ["train", "cartpole", "--compile-cache", "off", "--run-dir", str(tmp_path / "r")]
    assert cli.main([*argv, *options]) == cli.EXIT_USAGE
    captured = capsys.readouterr()
    assert words in captured.err and "Traceback" not in captured.err
    assert not (tmp_path / "r").exists() and str(tmp_path) not in captured.out


def test_help_goes_to_standard_output_and_lists_what_there_is(capsys):
    for argv, words in (
        (["--help"], ["train", "eval"]),
        (["train", "--help"], list(PRESETS)),
        (["train", "pong", "--help-all"], ["--num-envs", "--env.episodic-life", "--learning-rate"]),
        (["eval", "--help"], ["--episodes"]),
        (["--version"], [sebulba.__version__]),
    ):
        assert cli.main(argv) == 0
        shown = capsys.readouterr().out
        assert all(word in shown for word in words)


def test_the_list_of_configurations_is_in_two_columns(capsys):
    cli.main(["train", "--help"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line[:2] == "  "]
    of_presets = [line for line in lines if line.split()[0] in OWN_NUMBERS]
    assert len(of_presets) == len(OWN_NUMBERS)
    column = max(map(len, OWN_NUMBERS)) + 4
    assert all(line[column - 2 : column].isspace() for line in of_presets)
    assert not any(line[column].isspace() for line in of_presets)
    assert max(map(len, lines)) <= 80


def test_help_fills_the_width_of_the_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    cli.main(["train", "cartpole", "--help-all"])
    shown = capsys.readouterr().out
    assert "which play the evaluation policy in a thread of their own" in shown.replace(
        " │\n│       ", " "
    )
    assert max(map(len, shown.splitlines())) <= 120


@pytest.mark.parametrize(
    "words",
    [
        ["--env.options", "size", "4", "is_slippery", "False"],
        ["--env.options.size", "4", "--env.options.is-slippery", "False"],
        ["--env.options.size=4", "--seed", "1", "--env.options", "is_slippery", "False"],
    ],
)
def test_options_of_the_environment_may_be_written_in_either_way(words):
    config = parse("cartpole", words)
    assert config.env.options == {"size": 4, "is_slippery": False}
    assert parse("cartpole", ["--env.options.size", "5"], default=config).env.options == {
        "size": 5,
        "is_slippery": False,
    }


def test_an_option_of_the_environment_needs_a_value(capsys):
    said = refused(capsys, "train", "cartpole", "--env.options.size", "--seed", "1")
    assert "--env.options.size needs a value" in said


@pytest.mark.parametrize(("word", "number"), [("1e6", 10**6), ("2.5e5", 250_000), ("1_000", 1000)])
def test_whole_numbers_may_have_an_exponent(word, number, capsys):
    assert parse("cartpole", ["--total-env-steps", word]).total_env_steps == number
    for wrong in ("1.5", "1e400", "nan", "many"):
        with pytest.raises(SystemExit):
            parse("cartpole", [f"--total-env-steps={wrong}"])
        assert f"'{wrong}' is not a whole number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--num-envs", "0"], "num_envs=0 must be at least 1; use 1 or more"),
        (["--agent.learning-rate", "-1"], "learning_rate=-1.0 must be a positive number"),
        (["--agent.torso.hidden-sizes", "0"], "torso.hidden_sizes=0 must be"),
    ],
)
def test_a_rule_that_is_broken_is_said_without_the_class_that_has_it(capsys, words, says):
    said = refused(capsys, "train", "cartpole", *words)
    assert said.startswith(f"sebulba: error: {says}")


def test_the_short_help_shows_options_that_exist_and_their_defaults(capsys):
    assert cli.main(["train", "cartpole", "--seed", "5", "--help"]) == 0
    short = capsys.readouterr().out
    options = [option.split()[0] for group in COMMON_OPTIONS.values() for option in group]
    assert len(short.splitlines()) < 33 and "CartPole-v1" in short and "[32]" in short
    assert cli.main(["train", "cartpole", "--help-all"]) == 0
    shown = capsys.readouterr().out
    for option in options:
        assert f"  {option} " in short and re.search(rf"{option}[ ,]", shown)


def test_a_wrong_option_ends_before_jax_is_imported():
    code = (
        "import sys\n"
        "from sebulba.commands.cli import main\n"
        "codes = [main(['train', 'cartpole', '--num-env', '3']), main(['train', 'x']),\n"
        "         main(['train', 'cartpole', '--help']), main(['eval', 'nowhere'])]\n"
        "print(codes, 'jax' in sys.modules, 'gymnasium' in sys.modules, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stderr.splitlines()[-1] == "[2, 2, 0, 2] False False"


# How a run fails.


def test_an_environment_that_raises_ends_with_its_traceback_and_3(capsys, tmp_path):
    assert train(tmp_path / "r", "Breaks") == cli.EXIT_ENV
    error = capsys.readouterr().err
    assert "test_cli.py" in error and 'raise RuntimeError("planted in step")' in error
    last = error.splitlines()[-1]
    assert last.startswith("sebulba: environment: RuntimeError: planted in step")
    assert "environment" in last and "step 4" in last


class BreaksLate(Guess):
    steps = 0

    def step(self, action):
        self.steps += 1
        if self.steps == 100:
            raise RuntimeError("planted late")
        return super().step(action)


@pytest.mark.slow
def test_what_was_learned_before_a_failure_is_saved(capsys, tmp_path):
    run = tmp_path / "r"
    assert train(run, "BreaksLate", "--total-env-steps", "1000000") == cli.EXIT_ENV
    assert "as it was last published" in capsys.readouterr().out
    observation = {"x": np.zeros(3, np.float32), "k": 1}
    action, _ = sebulba.load_policy(run)(observation, None)
    assert action in Guess.action_space
    assert (run / "learning_curve.png").exists()


@pytest.mark.slow
def test_an_environment_that_breaks_its_contract_ends_with_3(capsys, tmp_path):
    assert train(tmp_path / "r", "FourTuple") == cli.EXIT_ENV
    assert "tuple of 4" in capsys.readouterr().err.splitlines()[-1]


def test_a_loss_that_is_not_finite_ends_with_4_and_saves_no_policy(capsys, tmp_path):
    options = ["--agent.reward-scale", "1e30"]
    assert train(tmp_path / "r", "ExplodingReward", *options) == cli.EXIT_NOT_FINITE
    assert "sebulba: not finite:" in capsys.readouterr().err
    assert not (tmp_path / "r" / "policy").exists()


class Continuous(Guess):
    action_space = spaces.Box(-1, 1, (2,))

    def step(self, action):
        self.k = 0
        return super().step(0)


@pytest.mark.slow
def test_networks_that_are_not_finite_are_not_blamed_on_the_environment(capsys, tmp_path):
    options = ["--learning-rate", "1e30", "--total-env-steps", "100000"]
    assert train(tmp_path / "r", "Continuous", *options) == cli.EXIT_NOT_FINITE
    assert "sebulba: not finite:" in capsys.readouterr().err


class Exits(Guess):
    def step(self, action):
        sys.exit(0)


def test_an_environment_that_exits_does_not_end_the_run_as_if_all_were_well(capsys, tmp_path):
    assert train(tmp_path / "r", "Exits") == cli.EXIT_ENV
    error = capsys.readouterr().err
    assert "sys.exit(0)" in error and "in step" in error


def test_a_run_without_a_policy_yet_is_not_called_damaged(capsys, tmp_path):
    assert train(tmp_path / "r", "Breaks") == cli.EXIT_ENV
    capsys.readouterr()
    assert "no policy yet" in refused(capsys, "eval", str(tmp_path / "r"))


def test_other_errors_are_not_blamed_on_the_environment():
    try:
        raise KeyError("ours")
    except KeyError as error:
        assert not is_env_failure(error)


@pytest.mark.slow
@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_and_nothing_learned_is_lost(which, tmp_path, capsys):
    folder = tmp_path / "r"

    def send() -> None:
        while not (folder / "metrics.jsonl").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), which)

    sender = threading.Thread(target=send)
    sender.start()
    before = signal.getsignal(which)
    assert train(folder, "Guess", "--total-env-steps", "100000000") == 128 + which
    sender.join()
    assert signal.getsignal(which) is before
    shown = capsys.readouterr().out
    assert re.search(r"^stopped at [\d,]+ of 100,000,000 env steps, all saved: mean", shown, re.M)
    assert f"\nresume it: sebulba resume {folder}\n" in shown
    assert (folder / "learning_curve.png").exists()
    sebulba.load_policy(folder)


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_there_is_a_loop_ends_the_process_whatever_is_being_imported(which):
    program = f"""
import os
from sebulba.runs.folder import RunFolder
from sebulba.runs.signals import StopOnSignal
with StopOnSignal():
    try:
        os.kill(os.getpid(), {int(which)})
        print("alive", flush=True)
    except BaseException:
        print("lost", flush=True)
print("alive", flush=True)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 128 + which
    assert not done.stdout and "before there was anything to save" in done.stderr


def test_a_second_signal_amid_the_handler_of_the_first_is_left_alone():
    class Loop:
        stops = 0

        def stop(self):  # its lock cannot be taken twice
            self.stops += 1
            signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGINT)
    with StopOnSignal() as stop_on_signal:
        stop_on_signal.attach(loop := Loop())
        signal.raise_signal(signal.SIGTERM)
    assert loop.stops == 1 and stop_on_signal.exit_code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.slow
def test_worker_processes_leave_the_signals_of_the_main_process_alone():
    def handlers():
        return signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    before = handlers()
    env = make_env_factory("CartPole-v1", backend="gymnasium", vectorization="async")(2, [0, 1])
    try:
        assert handlers() == before
    finally:
        env.close()
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGTERM, before[1])


# Around the command line.


@pytest.mark.slow
def test_forced_cpu_devices_in_a_process_of_its_own(tmp_path):
    options = ["--num-cpu-devices", "4", "--inference-devices", "0", "--update-devices", "1", "3"]
    command = [sys.executable, "-m", "sebulba", "train", "cartpole", "--run-dir", "r"]
    done = subprocess.run(
        [*command, *SMALL, *options],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "on cpu:0; updates on cpu:1, cpu:3" in done.stdout
    assert (tmp_path / "r" / "policy" / "arrays.npz").exists()


def test_a_warning_of_the_package_is_printed_in_its_words_alone():
    of = lambda file: cli._words_of_warning("lost", RuntimeWarning, file, 3, None)  # noqa: E731
    assert of(cli.__file__) == "sebulba: warning: lost\n"
    assert of("/elsewhere.py").startswith("/elsewhere.py:3: RuntimeWarning: lost")


@pytest.mark.slow
def test_a_run_too_short_for_an_update_says_that_it_learned_nothing(capsys, tmp_path):
    words = ["pendulum-sac", "--total-env-steps", "64", "--run-dir", str(tmp_path / "r")]
    assert cli.main(["train", *words, "--compile-cache", "off"]) == cli.EXIT_OK
    said = capsys.readouterr().out
    assert "nothing was learned" in said and "--agent.replay.warm-up-env-steps" in said
