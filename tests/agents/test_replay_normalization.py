"""Agents with a replay normalise observations where they use them; the replay keeps them raw."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

import sebulba
from sebulba.agents.configs import (
    DDPGConfig,
    DQNConfig,
    R2D2Config,
    ReplayConfig,
    SACConfig,
    TorsoConfig,
    make_agent,
)
from sebulba.cluster.replay.sharded_replay import ManagerHere, ShardedReplay
from sebulba.errors import UsageError
from sebulba.types import EnvSpec, EnvStep, FinalObs, RunSpec, Trajectory
from tests.support.loop_helpers import leaves_equal

T, B, CYCLES = 4, 8, 5
RUN = RunSpec(num_envs=B, num_inferencers=1, steps_per_cycle=T, num_update_devices=1)
VECTOR = spaces.Box(-np.inf, np.inf, (3,), np.float32)
DISCRETE = spaces.Discrete(3, dtype=np.int32)
FORCE = spaces.Box(-1, 1, (2,), np.float32)
REPLAY = ReplayConfig(capacity=T * B * CYCLES, batch_size=16, warm_up_cycles=4)
COMMON: Any = {"torso": TorsoConfig(hidden_sizes=(8,), activation="relu"), "replay": REPLAY}
CASES: dict[str, tuple[Any, spaces.Space]] = {
    "dqn": (DQNConfig(num_steps=2, **COMMON), DISCRETE),
    "r2d2": (
        R2D2Config(lstm_size=4, burn_in=T, sequence_length=T, head_hidden_sizes=(), **COMMON),
        DISCRETE,
    ),
    "sac": (SACConfig(**COMMON), FORCE),
    "ddpg": (DDPGConfig(num_steps=2, **COMMON), FORCE),
}
NAMES = pytest.mark.parametrize(
    "name", ["dqn", pytest.param("r2d2", marks=pytest.mark.slow), "sac", "ddpg"]
)


def agent_of(name: str, *, normalize: bool = True, **spec: Any) -> Any:
    config, actions = CASES[name]
    config = dataclasses.replace(config, normalize_observations=normalize)
    return make_agent(EnvSpec(VECTOR, actions, name="Task-v0", **spec), config)


def observations(rng: Any, *shape: int) -> np.ndarray:
    """Return observations whose components have other sizes."""
    x = np.array([5.0, -0.2, 0.0]) + np.array([30.0, 0.1, 1.0]) * rng.normal(size=(*shape, 3))
    return x.astype(np.float32)


def trajectories(agent: Any, number: int = CYCLES) -> list[Trajectory]:
    """Return trajectories that follow each other; every row T is the next one's row 0."""
    rng = np.random.default_rng(0)
    rows = number * T + 1
    obs = observations(rng, rows, B)
    obs[6, 2, 0] = 4000.0  # far out: it is clipped
    is_end = rng.random((rows, B)) < 0.15
    is_first = np.concatenate([np.ones((1, B), bool), is_end[:-1]])
    final: Any = ()
    if agent.spec.final_obs:
        is_first, given = is_end, is_end
        final = FinalObs(observations(rng, rows, B), given)
    if isinstance(agent.spec.action_space, spaces.Discrete):
        action = rng.integers(3, size=(rows, B)).astype(np.int32)
    else:
        action = rng.uniform(-1, 1, (rows, B, 2)).astype(np.float32)
    reward = rng.normal(size=(rows, B)).astype(np.float32)
    terminated = is_end & (rng.random((rows, B)) < 0.5)
    step = EnvStep(obs, action, reward, terminated, is_end & ~terminated, is_first, final)

    def part(cycle: int) -> Trajectory:
        window = slice(cycle * T, cycle * T + T + 1)
        here = jax.tree.map(lambda x: x[window], step)
        of = jnp.int32(0), jnp.int32(0), jnp.int32(cycle)
        return Trajectory(here, action[window][:-1], (), *of)

    return [part(cycle) for cycle in range(number)]


def on_devices(function: Any, number: int, tree: Any, axis: int) -> Any:
    """Map over shards of ``tree`` along the axis of environments; the axis ``learner`` is bound."""
    shards = jax.tree.map(
        lambda x: (
            jnp.stack(jnp.split(x, number, axis)) if np.ndim(x) > axis else jnp.stack([x] * number)
        ),
        tree,
    )
    return jax.jit(jax.vmap(function, axis_name="learner"))(shards)


def filled(agent: Any) -> tuple[Any, Any]:
    """Return networks, and a replay with all trajectories."""
    networks = agent.new_networks(jax.random.key(1))
    replay = agent.new_experience(jax.random.key(2), networks, RUN)
    step = agent.new_step_state(jax.random.key(3), RUN, 0)

    def take(replay: Any, trajectory: Any) -> Any:
        return agent.update_experience(replay, step, step, trajectory, networks)

    take = jax.jit(jax.vmap(take, in_axes=None, axis_size=1, axis_name="learner"))
    for trajectory in trajectories(agent):
        replay = jax.tree.map(lambda x: x[0], take(replay, trajectory))
    return networks, replay


def expected_scaling(agent: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation, by NumPy, of all that was inserted."""
    seen = []
    for trajectory in trajectories(agent):
        seen.append(trajectory.env_step.obs[:-1].reshape(-1, 3))
        if isinstance(final := trajectory.env_step.final, FinalObs):
            seen.append(np.asarray(final.obs[1:])[np.asarray(final.given[1:])])
    everything = np.concatenate(seen).astype(np.float64)
    return everything.mean(0), everything.std(0)


def scaled(agent: Any, obs: Any) -> np.ndarray:
    mean, std = expected_scaling(agent)
    return np.clip((np.asarray(obs) - mean) / std, -10, 10).astype(np.float32)


@pytest.mark.parametrize("final_obs", [False, True])
@pytest.mark.parametrize("devices", [1, 4])
def test_statistics_are_those_of_all_that_was_inserted_on_any_devices(
    devices: int, final_obs: bool
) -> None:
    agent = agent_of("dqn", final_obs=final_obs)
    statistics = agent.replay.new_statistics()
    for trajectory in trajectories(agent):
        count = lambda t, s=statistics: agent.replay.counted(s, t)  # noqa: E731
        every = on_devices(count, devices, trajectory, 1)
        for leaf in jax.tree.leaves(every):
            np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[:1], leaf.shape))
        statistics = jax.tree.map(lambda x: x[0], every)
    (moments,) = statistics
    mean, std = expected_scaling(agent)
    np.testing.assert_allclose(moments.mean, mean, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(np.sqrt(moments.variance), std, rtol=1e-3)


@pytest.mark.slow
@NAMES
def test_the_loss_is_that_of_normalised_observations(name: str) -> None:
    agent, plain = agent_of(name), agent_of(name, normalize=False)
    networks, replay = filled(agent)
    raw = replay._replace(statistics=())
    kept = [np.asarray(t.env_step.obs)[:-1] for t in trajectories(agent)]
    np.testing.assert_array_equal(raw.rows.obs[0], np.concatenate(kept))
    obs = scaled(agent, raw.rows.obs)
    assert (obs == 10).any()
    given = raw._replace(rows=raw.rows._replace(obs=jnp.asarray(obs)))
    opt = agent.new_opt(jax.tree.map(lambda x: 1.1 * x + 0.05, networks))
    found = []
    for one, experience in ((agent, replay), (plain, given), (plain, raw)):
        loss = lambda n, e, one=one: one.loss(n, opt, e, jax.random.key(5))  # noqa: E731
        loss = jax.jit(jax.vmap(loss, in_axes=None, axis_size=1, axis_name="learner"))
        value, (_, metrics) = loss(networks, experience)
        found.append([value, metrics["value"]])
    np.testing.assert_allclose(found[0], found[1], rtol=2e-3)
    assert not np.allclose(found[0], found[2], rtol=0.05)


@pytest.mark.slow
@NAMES
def test_a_saved_policy_acts_and_values_as_on_normalised_observations(
    name: str, tmp_path: Any
) -> None:
    agent, plain = agent_of(name), agent_of(name, normalize=False)
    networks, replay = filled(agent)
    acting = agent.acting_networks(networks, replay)
    values = agent.value_networks(networks, replay)
    sebulba.save_policy(tmp_path, agent, acting, RUN, value_networks=values)
    policy = sebulba.load_policy(tmp_path)
    part = plain.acting_networks(networks, None)
    other = sebulba.policies.policy.Policy(plain, part, RUN, value_networks=values)
    obs = observations(np.random.default_rng(9), 6)
    seen = scaled(agent, obs)
    for mine, its in (
        (policy(obs)[0], other(seen)[0]),
        (policy.value(obs), other.value(seen)),
        (policy.distribution(obs), other.distribution(seen)),
    ):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4), mine, its)
    assert not np.allclose(policy.value(obs), other.value(obs), rtol=0.05)


def test_pixels_and_choices_leave_no_statistics() -> None:
    config = DQNConfig(normalize_observations=True, **COMMON)
    for space in (spaces.Box(0, 255, (4, 36, 36), np.uint8), DISCRETE):
        agent = make_agent(EnvSpec(space, DISCRETE), config)
        networks = jax.eval_shape(agent.new_networks, jax.random.key(0))
        assert agent.replay.new_statistics() == ()
        assert agent.acting_networks(networks, None) is networks


def test_what_is_scaled_by_its_bounds_is_not_normalised_as_well() -> None:
    torso = TorsoConfig(scale_bounded_observations=True)
    for config in (DQNConfig, SACConfig):
        with pytest.raises(
            UsageError, match=r"normalize_observations=True cannot be combined with torso\."
        ):
            config(normalize_observations=True, torso=torso)


@pytest.mark.slow
def test_trajectory_managers_have_the_statistics_of_all_parts_together() -> None:
    agent, run = agent_of("dqn"), dataclasses.replace(RUN, num_inferencers=2)
    step = agent.new_step_state(jax.random.key(3), run, 0)
    replay = ShardedReplay(agent, [ManagerHere(agent) for _ in range(2)])
    replay.make(run)
    for number, trajectory in enumerate(trajectories(agent)):
        replay.insert(trajectory._replace(inferencer=np.int32(number % 2)), step)
    mean, std = expected_scaling(agent)
    whole = replay.state()
    np.testing.assert_allclose(whole.statistics[0].mean, mean, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(np.sqrt(whole.statistics[0].variance), std, rtol=1e-3)
    again = ShardedReplay(agent, [ManagerHere(agent)])
    again.make(run)
    assert float(again.lasting()[0].num_samples) < 1
    again.put_back(whole)
    assert leaves_equal(again.state(), whole)
    # Before the first draw Inferencers act with a scaling that changes nothing.
    empty = agent.with_managers().new_experience(
        jax.random.key(0), agent.new_networks(jax.random.key(1)), run
    )
    assert leaves_equal(empty.statistics, agent.replay.new_statistics())
