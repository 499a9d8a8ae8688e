"""Evaluation beside training: what is played when, that it changes nothing, and how it ends."""

from __future__ import annotations

import io
import json
import shutil
import threading
import time

import gymnasium
import jax
import numpy as np
import pytest
from gymnasium import spaces
from rich.console import Console

import sebulba
from sebulba.commands import cli
from sebulba.envs import seed_block
from sebulba.errors import EnvError, HangError, UsageError
from sebulba.inference import hangs
from sebulba.loops.evaluation import EvaluationPlayer, evaluation_seeds
from sebulba.loops.evaluation_thread import Evaluator, Heartbeat
from sebulba.metrics.live_panel import PanelWriter
from sebulba.metrics.plots import learning_curve, read_records
from sebulba.metrics.writers import LinesWriter, TensorBoardWriter
from tests.support.loop_helpers import counting, inferencer_threads, leaves_equal, make_tiny_loop
from tests.support.tiny import CountingEnv, TinyAgent, TinyConfig

T, B = 5, 4
ROUND = 2 * T * B
"""Environment steps in a round of two Inferencers."""


class Records:
    """A metric writer that keeps the records."""

    def __init__(self) -> None:
        self.all: list[dict] = []

    def write(self, metrics) -> None:
        self.all.append(dict(metrics))

    def close(self) -> None:
        pass

    def evaluations(self, name: str = "eval_env_steps") -> list:
        return [record[name] for record in self.all if "eval_return_mean" in record]


class FakePlay:
    """Plays nothing; keeps the networks it was given, and waits while it is told to."""

    def __init__(self, wait_for: threading.Event | None = None) -> None:
        self.networks: list = []
        self.threads: set[str] = set()
        self.began = threading.Event()
        self.wait_for = wait_for

    def __call__(self, networks, stop):
        self.began.set()
        self.threads.add(threading.current_thread().name)
        self.networks.append(networks)
        while self.wait_for is not None and not self.wait_for.wait(0.01):
            if stop.is_set():
                return None
        return {"eval_return_mean": float(len(self.networks))}


def evaluator_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "evaluator"]


def run(play, num_cycles: int, every: int, records: Records | None = None, **options):
    """Train the tiny agent and return (result, records)."""
    records = records or Records()
    loop, _ = make_tiny_loop(
        num_envs=B,
        evaluator=None if play is None else Evaluator(play, every),
        metric_writer=records,
        metrics_interval_s=0.0,
        **options,
    )
    with loop:
        result = loop.run(loop.new_state(0, T), num_cycles, T)
    assert not inferencer_threads() and not evaluator_threads()
    return result, records


# When, and with what.


@pytest.mark.slow
def test_lockstep_is_bit_identical_with_evaluation_and_evaluates_alike_twice():
    without, _ = run(None, 12, 0, schedule="lockstep")
    seen = []
    for _ in range(2):
        agent = TinyAgent(sebulba.env_spec(CountingEnv), TinyConfig())
        with EvaluationPlayer(agent, CountingEnv, num_episodes=7, num_envs=3) as player:
            result, records = run(player, 12, 2 * ROUND, schedule="lockstep")
        assert leaves_equal(without.state._replace(step=()), result.state._replace(step=()))
        names = ("eval_env_steps", "eval_return_mean", "eval_episodes", "eval_skipped")
        seen.append([records.evaluations(name) for name in names])
    assert seen[0] == seen[1]
    env_steps, returns, episodes, skipped = seen[0]
    assert env_steps == [2 * ROUND, 4 * ROUND, 6 * ROUND]
    assert set(returns) == {7.0} and set(episodes) == {7} and set(skipped) == {0}


def test_lockstep_waits_rather_than_skips():
    play = FakePlay(threading.Event())
    release = threading.Timer(0.3, play.wait_for.set)
    release.start()
    _, records = run(play, 20, ROUND, schedule="lockstep")
    assert records.evaluations() == [ROUND * r for r in range(1, 11)]
    assert play.threads == {"evaluator"}


def test_training_does_not_wait_and_the_last_two_are_always_played():
    trained, cycle = threading.Event(), T * B

    class Writer(Records):
        def write(self, metrics) -> None:
            super().write(metrics)
            if metrics["cycles"] == 30:
                trained.set()

    records = Writer()
    result, _ = run(FakePlay(trained), 30, 3 * cycle, records, num_inferencers_per_device=1)
    assert records.evaluations() == [3 * cycle, 27 * cycle, 30 * cycle]
    assert records.evaluations("eval_skipped")[-1] == 7
    assert result.metrics["eval_env_steps"] == 30 * cycle
    assert [r["env_steps"] for r in records.all] == sorted(r["env_steps"] for r in records.all)


def test_the_end_is_evaluated_even_if_no_mark_was_passed_and_only_once():
    _, records = run(FakePlay(), 3, 1000)
    assert records.evaluations() == [3 * T * B]
    _, records = run(FakePlay(), 4, 2 * T * B, num_inferencers_per_device=1)
    assert records.evaluations() == [2 * T * B, 4 * T * B]


def test_a_second_run_goes_on_where_the_first_ended():
    records = Records()
    loop, _ = make_tiny_loop(
        num_envs=B,
        evaluator=Evaluator(FakePlay(), 4 * ROUND),
        metric_writer=records,
        schedule="lockstep",
    )
    with loop:
        first = loop.run(loop.new_state(0, T), 6, T)
        loop.run(first.state, 6, T)
    assert records.evaluations() == [3 * ROUND, 4 * ROUND, 6 * ROUND]


@pytest.mark.parametrize("schedule", ["async", "lockstep"])
def test_played_networks_are_owned_and_those_of_their_time(schedule):
    play = FakePlay()
    result, _ = run(play, 8, 2 * ROUND, schedule=schedule, update_devices=[1, 2])
    assert len(play.networks) == 2 and not leaves_equal(*play.networks)
    assert leaves_equal(play.networks[-1], result.acting_networks)
    for leaf in jax.tree.leaves(play.networks):
        assert leaf.devices() == {jax.devices()[0]}, "the first inference device"


# How it ends.


class PlantedError(Exception):
    pass


class FailsAt:
    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, networks, stop):
        self.left -= 1
        if not self.left:
            raise PlantedError("in play")
        return {"eval_return_mean": 0.0}


@pytest.mark.parametrize(
    ("schedule", "per_device"), [("async", 2), ("lockstep", 2), ("lockstep", 0)]
)
def test_a_failure_of_the_evaluation_fails_the_run(schedule, per_device):
    loop, _ = make_tiny_loop(
        num_envs=B,
        schedule=schedule,
        num_inferencers_per_device=per_device,
        evaluator=Evaluator(FailsAt(2), 2 * ROUND),
    )
    with loop, pytest.raises(PlantedError) as caught:
        loop.run(loop.new_state(0, T), 100_000, T)
    assert "__call__" in [entry.name for entry in caught.traceback]
    notes = " ".join(caught.value.__notes__)
    assert "evaluation of the networks of" in notes
    assert ("'evaluator'" in notes) == (per_device > 0)
    assert not inferencer_threads() and not evaluator_threads()


@pytest.mark.parametrize("per_device", [2, 0])
def test_a_play_that_returns_nothing_without_being_stopped_is_an_error(per_device):
    with pytest.raises(TypeError, match="returned None, which means stopped"):
        run(lambda networks, stop: None, 20, ROUND, num_inferencers_per_device=per_device)


def test_a_failure_of_the_last_evaluation_fails_the_run():
    with pytest.raises(PlantedError):
        run(FailsAt(1), 3, 1000)


def test_an_environment_that_exits_in_evaluation_does_not_end_the_process_silently():
    def play(networks, stop):
        raise SystemExit(0)

    with pytest.raises(sebulba.EnvError, match=r"sys\.exit\(0\)"):
        run(play, 3, 1000)


@pytest.mark.parametrize("after_training", [False, True])
def test_a_stop_ends_the_evaluation_and_asks_for_no_other(after_training):
    play = FakePlay(threading.Event())  # never set
    # One that is due only at the end begins when the training is over.
    num_cycles, every = (5, 1000) if after_training else (10_000_000, 2)
    loop, _ = make_tiny_loop(num_envs=B, evaluator=Evaluator(play, every * ROUND))

    def stop() -> None:
        play.began.wait(300)
        loop.stop()

    threading.Thread(target=stop).start()
    with loop:
        result = loop.run(loop.new_state(0, T), num_cycles, T)
    assert result.stopped != after_training
    assert "eval_return_mean" not in result.metrics
    assert len(play.networks) == 1 and not evaluator_threads()


def test_an_evaluation_that_a_stop_cut_short_is_played_when_the_run_goes_on():
    play, records, every = FakePlay(threading.Event()), Records(), 50 * ROUND
    loop, _ = make_tiny_loop(
        num_envs=B,
        evaluator=Evaluator(play, every),
        metric_writer=records,
        metrics_interval_s=0.0,
        schedule="lockstep",
    )

    def stop() -> None:
        play.began.wait(300)
        loop.stop()

    threading.Thread(target=stop).start()
    with loop:
        first = loop.run(loop.new_state(0, T), 10_000_000, T)
        assert not records.evaluations()
        play.wait_for.set()
        loop.run(first.state, 4, T)
    stopped_at = first.counters.env_steps
    assert records.evaluations() == [stopped_at + ROUND, stopped_at + 2 * ROUND]


def test_a_failure_of_training_ends_the_evaluation():
    play = FakePlay(threading.Event())
    env = counting(fail_at=60, make_error=PlantedError)
    with pytest.raises(PlantedError):
        run(play, 100_000, ROUND, env=env)


def test_an_evaluation_that_does_not_end_is_named(monkeypatch):
    monkeypatch.setattr(hangs, "JOIN_S", 0.3)
    release = threading.Event()

    def play(networks, stop):
        loop.stop()
        release.wait(300)

    loop, _ = make_tiny_loop(num_envs=B, evaluator=Evaluator(play, ROUND))
    with loop:
        state = loop.new_state(0, T)
        with pytest.raises(HangError, match=r"evaluator:[\s\S]*release\.wait"):
            loop.run(state, 100_000, T)
        with pytest.raises(UsageError, match="still hangs"):
            loop.run(state, 1, T)
        release.set()
        while evaluator_threads():
            time.sleep(0.01)


def test_intervals_below_one_are_refused():
    with pytest.raises(UsageError, match="every_env_steps=0 must be at least 1"):
        Evaluator(FakePlay(), 0)


# The player.


class Pays(gymnasium.Env):
    """Pays its action for 3 steps; the evaluation policy takes that with the largest bias."""

    observation_space = spaces.Box(0, 1, (2,), np.float32)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.np_random.random(2, np.float32), {}

    def step(self, action):
        self.t += 1
        return self.np_random.random(2, np.float32), float(action), False, self.t >= 3, {}


def biased_to(action: int) -> dict:
    return {"w": np.zeros((2, 3), np.float32), "b": np.eye(3, dtype=np.float32)[action]}


def test_the_player_is_greedy_and_says_what_is_best():
    best, go_on = [], threading.Event()
    agent = TinyAgent(sebulba.env_spec(Pays), TinyConfig())
    options = dict(num_episodes=5, num_envs=2, on_best=best.append)
    with EvaluationPlayer(agent, Pays, **options) as player:
        means = [player(biased_to(a), go_on)["eval_return_mean"] for a in (1, 0, 2, 2)]
        go_on.set()
        assert player(biased_to(1), go_on) is None
    assert means == [3.0, 0.0, 6.0, 6.0]
    assert [int(networks["b"].argmax()) for networks in best] == [1, 2, 2]  # of equals the later


def test_the_player_refuses_another_environment_and_no_episodes():
    agent = TinyAgent(sebulba.env_spec(Pays), TinyConfig())
    with pytest.raises(UsageError, match="not the policy's"):
        EvaluationPlayer(agent, "CartPole-v1")
    with pytest.raises(UsageError, match="num_episodes=0 must be at least 1"):
        EvaluationPlayer(agent, Pays, num_episodes=0)


class Dies(Pays):
    """Raises in its second step, as many times as are left."""

    left = 0
    made = 0

    def __init__(self) -> None:
        super().__init__()
        Dies.made += 1

    def step(self, action):
        if self.t == 1 and Dies.left:
            Dies.left -= 1
            raise OSError("the simulator is gone")
        return super().step(action)


def test_the_player_replaces_environments_that_fail_within_its_budget(monkeypatch):
    monkeypatch.setattr(Dies, "left", 2)
    monkeypatch.setattr(Dies, "made", 0)
    agent = TinyAgent(sebulba.env_spec(Dies), TinyConfig())
    go_on, made_before = threading.Event(), Dies.made
    with EvaluationPlayer(agent, Dies, num_episodes=5, num_envs=2, max_env_restarts=2) as player:
        first, second = (rf"restart {n} of 2\): .*the simulator is gone" for n in (1, 2))
        with (
            pytest.warns(RuntimeWarning, match=first),
            pytest.warns(RuntimeWarning, match=second),
        ):
            metrics = player(biased_to(1), go_on)
        assert metrics["eval_return_mean"] == 3.0 and metrics["eval_episodes"] == 5
        assert metrics["eval_env_restarts"] == 2 and Dies.made == made_before + 2 * 3
        monkeypatch.setattr(Dies, "left", 1)
        with pytest.raises(OSError, match="the simulator is gone"):
            player(biased_to(1), go_on)


class Waits(Pays):
    """Does not return from its first step until it may."""

    may = threading.Event()
    closed = threading.Event()

    def step(self, action):
        Waits.may.wait(300)
        return super().step(action)

    def close(self):
        Waits.closed.set()


def test_environments_that_hang_are_closed_when_their_step_returns():
    agent, stop = TinyAgent(sebulba.env_spec(Pays), TinyConfig()), Heartbeat()
    player = EvaluationPlayer(agent, Waits, num_envs=1)
    player_thread = threading.Thread(target=player, args=(biased_to(1), stop))
    stop.at = 0.0
    player_thread.start()
    while not stop.at:
        time.sleep(0.01)
    player.close()
    assert not Waits.closed.is_set()
    stop.set()
    Waits.may.set()
    player_thread.join(300)
    assert Waits.closed.wait(300)
    player.close()


def test_the_player_raises_what_is_no_fault_of_an_environment():
    agent = TinyAgent(sebulba.env_spec(Pays), TinyConfig())
    with EvaluationPlayer(agent, Pays, num_envs=2, max_env_restarts=2) as player:
        with pytest.raises(Exception):  # noqa: B017 (whatever JAX says of such networks)
            player({"w": None, "b": None}, threading.Event())
        assert player.env_restarts == 0
    with pytest.raises(UsageError, match="max_env_restarts=-1 must not be negative"):
        EvaluationPlayer(agent, Pays, max_env_restarts=-1)


def test_seeds_of_evaluations_anew_are_others():
    blocks = [evaluation_seeds(5, 25, generation) for generation in range(11)]
    assert len({seed for block in blocks for seed in block}) == 11 * 25


@pytest.mark.parametrize("num_envs", [1, 7, 25])
def test_seeds_of_evaluation_are_none_of_training(num_envs):
    seeds = evaluation_seeds(5, num_envs)
    assert len(set(seeds)) == num_envs and all(0 <= seed < 2**31 for seed in seeds)
    training = seed_block(5, inferencer=0, num_inferencers=1, num_envs=20_000)
    assert not set(seeds) & set(training)
    assert seeds != evaluation_seeds(6, num_envs)


# What is left behind.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "evaluated"
    options = {
        "env.id": "tests.loops.test_evaluation_in_training:Pays",
        "num-envs": "4",
        "steps-per-cycle": "5",
        "num-inferencers-per-device": "1",
        "total-env-steps": "90",
        "eval-every-env-steps": "40",
        "eval-episodes": "5",
        "eval-num-envs": "2",
        "agent.torso.hidden-sizes": "8",
        "metrics-interval-s": "0",
        "inference-devices": "0",
        "update-devices": "0",
        "run-dir": str(run_dir),
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    assert cli.main(["train", "cartpole", "--compile-cache", "off", *words]) == 0
    return run_dir


@pytest.mark.slow
def test_a_run_that_evaluates_leaves_its_results_and_the_best_policy(folder, capsys):
    records = read_records(folder / "metrics.jsonl")
    evaluated = [r for r in records if "eval_return_mean" in r]
    assert [r["eval_env_steps"] for r in evaluated] == [40, 80, 100]
    assert all(r["eval_episodes"] == 5 and r["loss"] is not None for r in evaluated)
    assert cli.main(["eval", str(folder), "--best", "--episodes", "4"]) == 0
    assert "over 4 episodes" in capsys.readouterr().out
    best = max(r["eval_return_mean"] for r in evaluated)
    policy = sebulba.load_policy(folder / "best_policy")
    assert sebulba.evaluate(policy, Pays, num_episodes=3).episode_return_mean == pytest.approx(best)
    assert not (folder / "best_policy.new").exists()


def test_best_is_refused_where_nothing_was_evaluated(folder, capsys, tmp_path):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert cli.main(["eval", str(tmp_path), "--best"]) == cli.EXIT_USAGE
    assert "no best policy" in capsys.readouterr().err


EVALUATED = {
    "env_steps": 900,
    "seconds": 61.0,
    "loss": 0.5,
    "eval_env_steps": 640,
    "eval_return_mean": 41.5,
    "eval_return_std": 2.25,
    "eval_episodes": 50,
}


def test_tensorboard_puts_an_evaluation_where_its_networks_were_taken(tmp_path, monkeypatch):
    steps = {}
    writer = TensorBoardWriter(tmp_path)
    monkeypatch.setattr(
        "tensorboardX.event_file_writer.EventsWriter.write_event",
        lambda self, event: steps.update({v.tag: event.step for v in event.summary.value}),
    )
    writer.write(EVALUATED)
    writer.close()
    assert steps["eval_return_mean"] == 640 and steps["loss"] == 900


def test_lines_panel_and_curve_show_evaluations(tmp_path):
    stream = io.StringIO()
    writer = LinesWriter(stream)
    writer.write(EVALUATED)
    assert "1:01  evaluation: return 41.5 ± 2.25" in stream.getvalue()
    assert "at 640 env steps" in stream.getvalue()

    view = PanelWriter("title", "folder", lambda: "devices")
    view.write(EVALUATED)
    view.write({"env_steps": 1000, "loss": 0.25})
    console = Console(file=io.StringIO(), width=100)
    console.print(view)
    shown = console.file.getvalue()
    assert "evaluation" in shown and "41.5" in shown and "at 640 env steps" in shown

    metrics, pictures = tmp_path / "metrics.jsonl", []
    for i, record in enumerate((EVALUATED, {"env_steps": 900})):
        metrics.write_text(json.dumps(record) + "\n")
        pictures.append(tmp_path / f"{i}.png")
        assert learning_curve(metrics, pictures[-1], "title")
    assert pictures[0].read_bytes() != pictures[1].read_bytes()


# On record.


TRAIN = [
    *("train", "cartpole", "--cycle", "stepped", "--agent.torso.hidden-sizes", "8"),
    *("--num-envs", "4", "--steps-per-cycle", "5", "--num-inferencers-per-device", "1"),
    *("--inference-devices", "0", "--update-devices", "0", "--compile-cache", "off"),
    *("--no-anneal-learning-rate", "--total-env-steps", "400", "--eval-every-env-steps", "200"),
    *("--eval-episodes", "2", "--eval-num-envs", "2"),
]


def evaluated_at(folder) -> list[int]:
    records = read_records(folder / "metrics.jsonl")
    return [record["eval_env_steps"] for record in records if "eval_env_steps" in record]


@pytest.mark.slow
def test_what_was_evaluated_is_not_evaluated_again_on_resume(tmp_path):
    folder = tmp_path / "r"
    assert cli.main([*TRAIN, "--run-dir", str(folder)]) == cli.EXIT_OK
    assert evaluated_at(folder)[-1] == 400
    assert cli.main(["resume", str(folder), "--total-env-steps", "700"]) == cli.EXIT_OK
    assert [at for at in evaluated_at(folder) if at >= 400] == [400, 600, 700]


@pytest.mark.slow
def test_the_evaluation_of_the_end_that_was_cut_short_is_played_on_resume(
    tmp_path, capsys, monkeypatch
):
    folder = tmp_path / "r"
    assert cli.main([*TRAIN, "--run-dir", str(folder)]) == cli.EXIT_OK
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(line for line in lines if '"eval_env_steps": 400' not in line))
    shutil.rmtree(folder / "policy")

    def fails(self, networks, stop):
        raise EnvError("gone")

    with monkeypatch.context() as patch:
        patch.setattr(EvaluationPlayer, "__call__", fails)
        assert cli.main(["resume", str(folder)]) == cli.EXIT_ENV
    assert (folder / "policy").exists() and "gone" in (folder / "ended.txt").read_text()
    capsys.readouterr()
    for played in (True, False):
        assert cli.main(["resume", str(folder)]) == cli.EXIT_OK
        assert ("playing the evaluation of the end" in capsys.readouterr().out) == played
        assert evaluated_at(folder)[-1] == 400 and evaluated_at(folder).count(400) == 1
