"""Going on from a checkpoint: bit for bit in lockstep, without a gap anywhere else.

Every loop here is a new one, with a new agent, that knows nothing but the files.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from pathlib import Path
from typing import Any

import gymnasium
import jax
import numpy as np
import pytest

import sebulba
from sebulba.agents.configs import ReplayConfig, TorsoConfig, make_agent
from sebulba.checkpoints.checkpointer import Checkpointer
from sebulba.errors import UsageError
from sebulba.support.trees import host_copy
from tests.faults.counts import rounds
from tests.support.agent_suite import AGENTS
from tests.support.loop_helpers import Recorder, leaves_equal, make_tiny_loop
from tests.support.tiny import CountingEnv

STEPS, ENVS = 5, 4
REPLAY = ReplayConfig(
    capacity=600, batch_size=8, updates_per_cycle=2, warm_up_cycles=6, prioritized=True
)
FAR = 1 << 40
A_CYCLE = STEPS * ENVS


class Waiting(Checkpointer):
    """Writes every checkpoint that is due before training goes on, so that none is left out."""

    def save(self, *what: Any) -> None:
        super().save(*what)
        assert self._saver.wait(300)


def config_of(name: str) -> Any:
    config = AGENTS[name].config
    if name == "impala-lstm":
        return dataclasses.replace(config, normalize_observations=True, normalize_rewards=True)
    if hasattr(config, "replay"):
        return dataclasses.replace(config, replay=REPLAY, normalize_observations=True)
    return config


def factory_of(name: str, env: str | None = None) -> Any:
    its = "Pendulum-v1" if AGENTS[name].actions == "continuous" else "CartPole-v1"
    return sebulba.make_env_factory(env or its, backend="gymnasium", max_episode_steps=13)


class Trained:
    """What came of a loop of its own."""

    def __init__(
        self,
        name: str,
        folder: Path,
        *num_cycles: int,
        resume: bool = False,
        config: Any = None,
        num_envs: int = ENVS,
        drop_replay: bool = False,
        every_updates: int = FAR,
        env: str | None = None,
        **options: Any,
    ) -> None:
        """Run once for each of ``num_cycles``, and save at the end of each."""
        factory, self.recorder = factory_of(name, env), Recorder()
        agent = make_agent(sebulba.env_spec(factory), config or config_of(name))
        options = {
            "schedule": "lockstep",
            "inference_devices": [0],
            "update_devices": [0],
        } | options
        with (
            Waiting(folder, every_updates=every_updates, keep_last=99) as checkpointer,
            sebulba.GymnasiumLoop(
                factory,
                agent,
                num_envs,
                observe_cycle=self.recorder,
                checkpointer=checkpointer,
                **options,
            ) as loop,
        ):
            if resume:
                checkpoint = checkpointer.load_newest()
                self.record = checkpoint.snapshot.record
                state = loop.restore(checkpoint, drop_replay=drop_replay)
            else:
                state = loop.new_state(3, STEPS)
            self.first_state, self.notes = host_copy(state), loop.resume_notes
            self.counters = loop._session.counters
            for number in num_cycles:
                result = loop.run(state, number, STEPS)
                state = result.state
                self.state, self.counters = host_copy(state), result.counters
                self.metrics = result.metrics

    def assert_went_on_as(self, other: Trained) -> None:
        """Check that the end is that of ``other``, which was not resumed, and the way there."""
        assert not self.notes
        assert leaves_equal(self.state, other.state)
        assert self.counters == other.counters
        mine = self.recorder.trajectories
        assert mine and leaves_equal(mine, other.recorder.trajectories[-len(mine) :])
        for metric in ("episodes", "episode_return_mean", "episode_length_mean", "env_steps"):
            assert self.metrics[metric] == other.metrics[metric]


def numbers(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())


def copy_until(folder: Path, env_steps: int, to: Path) -> Path:
    """Copy the checkpoints up to ``env_steps``, as if the run had been killed then."""
    for number in numbers(folder):
        if number <= env_steps:
            shutil.copytree(folder / f"{number:012d}", to / f"{number:012d}")
    return to


IN_CI = ("impala-lstm", "ppo", "dqn", "r2d2")
ALL = (*IN_CI, "sac", "ddpg")


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL[: rounds(len(IN_CI), len(ALL))])
def test_a_resumed_run_is_bit_for_bit_the_one_that_was_not(name, tmp_path):
    half, whole = 8, 16
    never = Trained(name, tmp_path / "never", half, whole - half, every_updates=7)
    saved = numbers(tmp_path / "never")
    in_the_middle = [n for n in saved if half * A_CYCLE < n < whole * A_CYCLE][-1]
    for number in [in_the_middle] + [half * A_CYCLE] * (name == "ppo"):
        folder = copy_until(tmp_path / "never", number, tmp_path / str(number))
        resumed = Trained(name, folder, whole - number // A_CYCLE, resume=True)
        assert resumed.record["round"] and resumed.record["counters"]["env_steps"] == number
        resumed.assert_went_on_as(never)


def resumed(name: str, folder: Path, *num_cycles: int, **options: Any) -> Trained:
    """Resume a copy, so that ``folder`` can be resumed again."""
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        return Trained(name, Path(copy), *num_cycles, resume=True, **options)


@pytest.fixture(scope="module")
def on_policy(tmp_path_factory) -> tuple[Path, Trained]:
    """A run of 2 Inferencers with memory and statistics."""
    folder = tmp_path_factory.mktemp("on-policy")
    return folder, Trained("impala-lstm", folder, 8)


@pytest.fixture(scope="module")
def off_policy(tmp_path_factory) -> tuple[Path, Trained]:
    """A run of 2 Inferencers with a replay."""
    folder = tmp_path_factory.mktemp("off-policy")
    return folder, Trained("dqn", folder, 8)


def joined(step_states: Any, name: str) -> list[np.ndarray]:
    """Return a part of all step states, environments in their global order."""
    parts = zip(*(jax.tree.leaves(getattr(s, name)) for s in step_states), strict=True)
    return [np.concatenate(leaves) for leaves in parts]


@pytest.mark.slow
def test_one_update_device_becomes_four_and_one_again(on_policy, tmp_path):
    folder, saved = on_policy
    one = resumed("impala-lstm", folder, 4, 4)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    four = Trained("impala-lstm", tmp_path, 4, resume=True, update_devices=[0, 1, 2, 3])
    assert leaves_equal(four.first_state, saved.state) and not four.notes
    again = Trained("impala-lstm", tmp_path, 4, resume=True)
    assert leaves_equal(again.first_state, four.state) and not again.notes
    assert again.counters == one.counters
    for x, y in zip(*map(jax.tree.leaves, (again.state[:2], one.state[:2])), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_replay_on_one_update_device_comes_back_on_four(off_policy):
    folder, saved = off_policy
    four = resumed("dqn", folder, 4, update_devices=[0, 1, 2, 3])
    assert leaves_equal(four.first_state, saved.state) and not four.notes
    assert four.counters.updates == saved.counters.updates + 4 * REPLAY.updates_per_cycle


@pytest.mark.slow
@pytest.mark.parametrize(("num_inferencers", "num_envs"), [(1, 8), (4, 2)])
def test_environments_are_split_anew_over_other_numbers_of_inferencers(
    on_policy, num_inferencers, num_envs
):
    folder, saved = on_policy
    num_cycles = [4] if num_inferencers == 4 else []
    sizes: Any = {"num_envs": num_envs, "num_inferencers_per_device": num_inferencers}
    other = resumed("impala-lstm", folder, *num_cycles, **sizes)
    assert len(other.first_state.step) == num_inferencers
    before, after = (joined(t.step, "core") for t in (saved.state, other.first_state))
    assert leaves_equal(before, after) and np.any(after[0])
    assert leaves_equal(other.first_state[:2], saved.state[:2])
    statistics = (t.experience.statistics.observations for t in (saved.state, other.first_state))
    assert leaves_equal(*statistics)
    assert any("8 environments are split over" in note for note in other.notes)
    assert any("new episodes from fresh seeds" in note for note in other.notes)
    assert other.counters.env_steps == saved.counters.env_steps + STEPS * num_envs * sum(num_cycles)
    assert other.counters.dropped_stop_cycles == 2  # the round that was in flight


@pytest.mark.slow
def test_another_total_of_environments_begins_with_new_step_states(on_policy):
    folder, saved = on_policy
    other = resumed("impala-lstm", folder, num_envs=6)
    assert not any(np.any(core) for core in joined(other.first_state.step, "core"))
    assert any("step states begin anew" in note for note in other.notes)
    assert leaves_equal(other.first_state[:2], saved.state[:2])
    statistics = (t.experience.statistics.observations for t in (saved.state, other.first_state))
    assert leaves_equal(*statistics)


@pytest.mark.slow
@pytest.mark.parametrize("num_envs", [8, 6])
def test_a_replay_that_does_not_fit_is_refused_or_dropped(off_policy, num_envs):
    folder, saved = off_policy
    sizes: Any = {"num_envs": num_envs, "num_inferencers_per_device": 1}
    with pytest.raises(UsageError, match=r"experience/.*\(2 Inferencers x 4 env.*--drop-replay"):
        resumed("dqn", folder, **sizes)
    # On until three trajectories more than the warm-up takes.
    num_cycles = [REPLAY.warm_up_cycles - 1 + 3] if num_envs == 8 else []
    other = resumed("dqn", folder, *num_cycles, drop_replay=True, **sizes)
    assert any("the replay is dropped" in note for note in other.notes)
    assert leaves_equal(other.first_state[:2], saved.state[:2])
    replay = other.first_state.experience
    assert not replay.weight.any() and not replay.stream.any() and not replay.trajectories.any()
    # What the networks are used to outlasts the replay.
    assert leaves_equal(replay.statistics, saved.state.experience.statistics)
    assert float(replay.statistics[0].num_samples) > 1
    assert other.counters.warm_up_from == saved.counters.cycles
    updates = 3 * REPLAY.updates_per_cycle * len(num_cycles)
    assert other.counters.updates == saved.counters.updates + updates


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(lstm_size=9), "networks/.* in the checkpoint and .* now"),
        (dict(torso=TorsoConfig(hidden_sizes=(32, 32))), "is not in the checkpoint, and .* now"),
        (dict(lstm_size=0), "is in the checkpoint only"),
    ],
)
def test_another_network_is_refused_with_the_difference(on_policy, change, words):
    folder, _ = on_policy
    with pytest.raises(UsageError, match=words):
        resumed(
            "impala-lstm", folder, config=dataclasses.replace(config_of("impala-lstm"), **change)
        )


def test_bounds_that_are_no_longer_those_of_the_checkpoint_are_said(tmp_path):
    class Wider(CountingEnv):
        observation_space = gymnasium.spaces.Box(-2e6, 2e6, (2,), np.float32)

    with Checkpointer(tmp_path) as checkpointer:
        loop, _ = make_tiny_loop(checkpointer=checkpointer)
        with loop:
            loop.run(loop.new_state(0, 5), 2, 5)
        checkpoint = checkpointer.load_newest()
    for env, said in ((CountingEnv, []), (Wider, ["observations is Box(-2e+06"])):
        loop, _ = make_tiny_loop(env)
        with loop:
            loop.restore(checkpoint)
            notes = [note for note in loop.resume_notes if "space of the" in note]
        assert len(notes) == len(said)
        assert all(words in note for words, note in zip(said, notes, strict=True)), notes


@pytest.mark.slow
def test_another_environment_is_refused_with_the_difference(off_policy):
    folder, _ = off_policy
    with pytest.raises(UsageError, match="does not fit"):
        resumed("dqn", folder, env="Acrobot-v1")


@pytest.mark.slow
def test_schedules_may_change_and_what_that_loses_is_counted(off_policy):
    folder, saved = off_policy
    streaming = resumed("dqn", folder, 5, schedule="async")
    assert streaming.notes == ["the round that was in flight is dropped"]
    assert streaming.counters.cycles == saved.counters.cycles + 5
    assert streaming.counters.dropped_stop_cycles == 2
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        first = Trained("dqn", Path(copy), 5, resume=True, schedule="async")
        second = Trained("dqn", Path(copy), 4, resume=True)
    assert leaves_equal(second.first_state, first.state) and not second.notes
    assert second.counters.dropped_stop_cycles == 2  # nothing is counted twice


@pytest.mark.slow
def test_what_a_periodic_checkpoint_of_a_stream_loses_is_counted(tmp_path):
    trained = Trained("dqn", tmp_path / "all", 20, schedule="async", every_updates=8)
    assert not trained.counters.dropped_cycles
    for number in numbers(tmp_path / "all")[:-1]:
        copy_until(tmp_path / "all", number, tmp_path / str(number))
        other = Trained("dqn", tmp_path / str(number), resume=True, schedule="async")
        cycles = [inferencer["cycle"] for inferencer in other.record["inferencers"]]
        assert other.record["lost_cycles"] == sum(cycles) - number // A_CYCLE
        assert not other.record["round"]
