"""Lockstep and async: which networks act when, what is dropped, what is bit-identical."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.support.loop_helpers import Recorder, leaves_equal, make_tiny_loop
from tests.support.tiny import TinyAgent


def run_lockstep(num_cycles_of_runs, seed=3, **options):
    recorder = Recorder()
    options = {"schedule": "lockstep", "cycle": "stepped", "observe_cycle": recorder} | options
    loop, _ = make_tiny_loop("CartPole-v1", **options)
    with loop:
        state = loop.new_state(seed, 6)
        for num_cycles in num_cycles_of_runs:
            result = loop.run(state, num_cycles, 6)
            state = result.state
    return result, recorder


@pytest.mark.slow
@pytest.mark.parametrize("cycle", ["stepped", "fused"])
def test_lockstep_twice_gives_bit_identical_networks(cycle):
    first, _ = run_lockstep([40], cycle=cycle)
    second, _ = run_lockstep([40], cycle=cycle)
    assert leaves_equal(first.state.networks, second.state.networks)
    if cycle == "stepped":
        other, _ = run_lockstep([40], cycle=cycle, seed=4)
        assert not leaves_equal(first.state.networks, other.state.networks)


@pytest.mark.slow
@pytest.mark.parametrize("per_device", [0, 2])
def test_lockstep_in_two_runs_is_bit_identical_to_one(per_device):
    options = dict(num_inferencers_per_device=per_device, cycle="fused")
    whole, recorded = run_lockstep([24], **options)
    parts, recorded_parts = run_lockstep([8, 16], **options)
    assert leaves_equal(whole.state.networks, parts.state.networks)
    assert whole.counters == parts.counters
    # Also which networks acted: nearly equal ones may choose equal actions.
    assert len(recorded.trajectories) == 24
    for one, other in zip(recorded.trajectories, recorded_parts.trajectories, strict=True):
        assert leaves_equal(one, other)
    versions = [int(t.policy_version) for t in recorded_parts.trajectories]
    inferencers = max(1, per_device)
    assert versions == [max(0, i // inferencers - 1) for i in range(24)]


class NoTrajectory(TinyAgent):
    """Keeps nothing of the length of a cycle, so that it may change between runs."""

    def new_experience(self, key, networks, run):
        return {"reward": jnp.zeros(())}

    def update_experience(self, experience, initial, final, trajectory, networks):
        return {"reward": jax.lax.pmean(trajectory.env_step.reward.mean(), "learner")}

    def loss(self, networks, opt, experience, key):
        return (networks["w"] ** 2).sum() * experience["reward"], (experience, {})

    def experience_spec(self):
        return {"reward": P()}


@pytest.mark.slow
@pytest.mark.parametrize("per_device", [0, 2])
@pytest.mark.parametrize("schedule", ["async", "lockstep"])
def test_a_second_run_may_have_other_cycles(schedule, per_device):
    recorder = Recorder()
    loop, _ = make_tiny_loop(
        agent_class=NoTrajectory,
        schedule=schedule,
        num_inferencers_per_device=per_device,
        observe_cycle=recorder,
    )
    with loop:
        first = loop.run(loop.new_state(0, 6), 8, 6)
        second = loop.run(first.state, 8, 4)
    assert second.counters.cycles == 16
    assert second.counters.env_steps == 4 * (8 * 6 + 8 * 4)
    if schedule == "lockstep":
        assert second.counters.dropped_stop_cycles == max(1, per_device), "the round kept"
        assert all(
            int(t.policy_version) >= first.counters.policy_version
            for t in recorder.trajectories[8:]
        )


def test_inline_inferencers_lose_no_cycle_between_runs():
    recorder = Recorder()
    loop, _ = make_tiny_loop(
        num_inferencers_per_device=0, inference_devices=[0, 1], observe_cycle=recorder
    )
    with loop:
        first = loop.run(loop.new_state(0, 5), 3, 5)
        loop.run(first.state, 3, 5)
    for inferencer in range(2):
        cycles = [int(t.cycle) for t in recorder.of(inferencer)]
        assert cycles == list(range(len(cycles)))


@pytest.mark.slow
def test_lockstep_acts_with_the_networks_published_after_the_round_before_last():
    result, recorder = run_lockstep([20], num_inferencers_per_device=2)
    order = [(int(t.cycle), int(t.inferencer)) for t in recorder.trajectories]
    assert order == [(r, i) for r in range(10) for i in range(2)], "rounds, in Inferencer order"
    versions = [int(t.policy_version) for t in recorder.trajectories]
    assert versions == [max(0, r - 1) for r in range(10) for _ in range(2)]
    assert result.counters.policy_version == 10, "one publish a round"
    assert result.metrics["policy_lag_max"] == 1


def test_threads_and_inline_make_the_same_lockstep_training():
    inline, _ = run_lockstep([12], num_inferencers_per_device=0)
    threaded, _ = run_lockstep([12], num_inferencers_per_device=1)
    assert leaves_equal(inline.state.networks, threaded.state.networks)


def test_inferencers_have_their_own_noise_and_their_own_episodes():
    _, recorder = run_lockstep([4], num_inferencers_per_device=2)
    first, second = recorder.of(0)[0], recorder.of(1)[0]
    assert not np.isclose(first.env_step.obs[0][:, None], second.env_step.obs[0]).all(-1).any()
    assert not np.isin(first.extras["noise"], second.extras["noise"]).any()


def test_async_trajectories_of_an_inferencer_continue_one_another():
    recorder = Recorder()
    loop, _ = make_tiny_loop("CartPole-v1", cycle="stepped", observe_cycle=recorder)
    with loop:
        loop.run(loop.new_state(0, 6), 30, 6)
    for inferencer in range(2):
        trajectories = recorder.of(inferencer)
        assert [int(t.cycle) for t in trajectories] == list(range(len(trajectories)))
        for before, after in itertools.pairwise(trajectories):
            rows = (jax.tree.leaves(t.env_step) for t in (before, after))
            for last, first in zip(*rows, strict=True):
                np.testing.assert_array_equal(last[-1], first[0])
            assert np.all(after.extras["steps"][0] == before.extras["steps"][-1] + 1)


def test_lag_over_the_maximum_is_dropped_counted_and_leaves_a_gap():
    recorder = Recorder()
    loop, _ = make_tiny_loop(max_policy_lag=0, queue_size=4, observe_cycle=recorder)
    with loop:
        result = loop.run(loop.new_state(0, 5), 40, 5)
    counters = result.counters
    assert counters.cycles == 40 == len(recorder.trajectories)
    assert counters.dropped_lag_cycles > 0
    missing = 0
    for inferencer in range(2):
        cycles = [int(t.cycle) for t in recorder.of(inferencer)]
        assert cycles == sorted(set(cycles))
        missing += cycles[-1] + 1 - len(cycles)
    assert 0 < missing <= counters.dropped_lag_cycles


def test_no_trajectory_over_the_maximum_lag_is_consumed():
    lags = []

    def observe(trajectory, step_infos):
        lags.append(len(lags) - int(trajectory.policy_version))  # one publish a trajectory

    loop, _ = make_tiny_loop(max_policy_lag=1, queue_size=4, observe_cycle=observe)
    with loop:
        loop.run(loop.new_state(0, 5), 60, 5)
    assert max(lags) == 1


def test_inference_only_counts_and_never_updates():
    loop, _ = make_tiny_loop(inference_only=True)
    with loop:
        result = loop.run(loop.new_state(0, 5), 10, 5)
    assert (result.counters.cycles, result.counters.updates) == (10, 0)
    assert result.metrics["loss"] is None


def test_observed_metrics_and_every_promised_key_are_in_the_record():
    records = []

    class Writer:
        def write(self, metrics):
            records.append(dict(metrics))

        def close(self):
            pass

    image = np.zeros((4, 5, 3), np.uint8)
    loop, _ = make_tiny_loop(
        metric_writer=Writer(),
        metrics_interval_s=0.0,
        observe_cycle=lambda trajectory, infos: {"mine": 2.0, "picture": image},
    )
    with loop:
        loop.run(loop.new_state(0, 5), 120, 5)
    promised = {
        "updates",
        "env_steps",
        "seconds",
        "env_steps_per_s",
        "episode_return_mean",
        "episode_length_mean",
        "policy_lag_mean",
        "policy_lag_max",
        "loss",
        "valid_count",
    }
    assert promised <= records[0].keys()
    assert records[0]["episode_return_mean"] is None, "no episode has ended"
    averaged = [r["episodes_averaged"] for r in records]
    assert averaged == [min(r["episodes"], 100) for r in records]
    assert any(0 < few < 100 for few in averaged)
    assert records[0]["mine"] == 2.0
    assert records[0]["picture"].shape == (4, 5, 3)
    assert records[-1]["episode_return_mean"] == 7.0, "every episode pays 1 for 7 steps"
    assert records[-1]["episode_length_mean"] == 7.0
    assert [r["env_steps"] for r in records] == sorted(r["env_steps"] for r in records)
