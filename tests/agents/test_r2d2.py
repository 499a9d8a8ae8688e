"""R2D2: recurrent state, burn-in, targets and priorities; and the tasks that need memory."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rlax

from sebulba.agents.configs import (
    OptimizerConfig,
    R2D2Config,
    ReplayConfig,
    TargetConfig,
    TorsoConfig,
)
from sebulba.agents.kernels.returns import Transitions
from sebulba.agents.nets.torso import zero_core
from sebulba.agents.r2d2 import R2D2, sequence_priority
from sebulba.envs import make_env_factory
from sebulba.errors import UsageError
from sebulba.support.files import dataclass_from_json
from sebulba.tools.check.agent_driver import Streams, T, run_spec
from sebulba.types import EnvStep, RunSpec
from tests.agents.test_dqn import with_axis
from tests.support.agent_driver import BOX_SPEC, SPEC, Driver

TINY = R2D2Config(
    num_steps=2,
    sequence_length=8,
    burn_in=4,
    lstm_size=5,
    head_hidden_sizes=(),
    torso=TorsoConfig(hidden_sizes=(7,), activation="relu"),
    optimizer=OptimizerConfig("sgd", max_grad_norm=0.0),
    replay=ReplayConfig(
        capacity=800, batch_size=12, warm_up_cycles=5, prioritized=True, priority_exponent=0.9
    ),
    target=TargetConfig(period=3),
)


class ActedStreams(Streams):
    """Rows that say what was done before them."""

    def next_row(self, inferencer: int, row: EnvStep, action: jax.Array) -> EnvStep:
        """Return the row after ``row``."""
        row = super().next_row(inferencer, row, action)
        return row._replace(prev_action=np.asarray(action))


@pytest.fixture(scope="module")
def driver() -> Driver:
    driver = Driver(R2D2(SPEC, TINY), make_streams=ActedStreams)
    for cycle in range(8):
        driver.cycle(cycle % 2)
    return driver


def rows_of(rng: np.random.Generator, num_rows: int, num_envs: int) -> EnvStep:
    """Return rows of which none begins an episode."""
    no_flag = np.zeros((num_rows, num_envs), bool)
    return EnvStep(
        obs=rng.normal(size=(num_rows, num_envs, 3)).astype(np.float32),
        prev_action=rng.integers(2, 7, (num_rows, num_envs)).astype(np.int32),
        reward=rng.normal(size=(num_rows, num_envs)).astype(np.float32),
        terminated=no_flag,
        truncated=no_flag,
        is_first=no_flag,
    )


@pytest.mark.slow
def test_stored_state_is_the_one_that_acted(driver: Driver) -> None:
    agent: Any = driver.agent
    experience = driver.state.experience
    trajectory, initial, final = driver.streams.next(driver._acting, 0)
    output = jax.jit(agent.evaluate)(
        driver._acting, jax.tree.map(lambda x: x[:-1], trajectory.env_step), initial.core
    )
    for seen, acted in zip(output.core, final.core, strict=True):
        np.testing.assert_allclose(seen, acted, atol=1e-6)
    # What is drawn begins with the recurrent state, and ends a cycle later in that of the next.

    @jax.jit
    def core_after_a_cycle(experience: Any) -> Any:
        draw = agent.replay.draw(experience, jax.random.key(0), 12)
        sequence = agent.replay.gathered(experience, draw, 1.0)
        rows = jax.tree.map(lambda x: x[:T], sequence.env_step)
        return draw, agent.evaluate(driver._acting, rows, sequence.core).core

    draw, core = with_axis(core_after_a_cycle, experience)
    place = (draw.row // T + 1) % experience.cycle.shape[1]
    for seen, stored in zip(core, experience.core, strict=True):
        np.testing.assert_allclose(seen, stored[draw.inferencer, place, draw.env], atol=1e-6)


@pytest.mark.slow
def test_burn_in_moves_the_state_and_carries_no_gradient(driver: Driver) -> None:
    agent: Any = driver.agent
    rows = rows_of(np.random.default_rng(0), 13, 2)
    core = zero_core(agent.config, 2)

    @jax.jit
    def values(obs: Any) -> jax.Array:
        return agent._unroll(driver._acting, rows._replace(obs=obs), core).values.sum()

    grads = jax.jit(jax.grad(values))(jnp.asarray(rows.obs))
    assert values(rows.obs) != values(np.concatenate([rows.obs[:4] + 1.0, rows.obs[4:]]))
    np.testing.assert_array_equal(grads[:4], 0.0)
    assert (np.abs(grads[4:]).sum((1, 2)) > 0).all()


def test_nothing_of_an_episode_is_seen_in_the_next(driver: Driver) -> None:
    agent: Any = driver.agent
    rows = rows_of(np.random.default_rng(1), 6, 2)
    is_first = rows.is_first.copy()
    is_first[3, 0] = True
    rows = rows._replace(is_first=is_first)
    past = np.arange(6)[:, None, None] < 3
    other = rows._replace(
        obs=np.where(past, 5.0, rows.obs).astype(np.float32),
        prev_action=np.where(past[..., 0] | is_first, 2, rows.prev_action).astype(np.int32),
        reward=np.where(past[..., 0] | is_first, 7.0, rows.reward).astype(np.float32),
    )
    one, two = (
        jax.jit(agent.evaluate)(driver._acting, x, zero_core(agent.config, 2)).values
        for x in (rows, other)
    )
    np.testing.assert_array_equal(one[3:, 0], two[3:, 0])
    assert np.abs(one[3:, 1] - two[3:, 1]).min() > 0


def test_the_lstm_sees_the_tanh_of_rewards_and_in_older_records_the_rewards(driver: Driver) -> None:
    record = dataclasses.asdict(TINY)
    assert dataclass_from_json(R2D2Config, record).seen_reward == "tanh"
    del record["seen_reward"]
    older = R2D2(SPEC, dataclass_from_json(R2D2Config, record))
    rows = rows_of(np.random.default_rng(4), 3, 2)
    squashed = rows._replace(reward=np.tanh(rows.reward))
    of_tanh, of_raw, of_squashed = (
        np.asarray(agent._inputs(given, ())[4])
        for agent, given in ((driver.agent, rows), (older, rows), (older, squashed))
    )
    np.testing.assert_array_equal(of_raw[:, -1], rows.reward.ravel())
    np.testing.assert_allclose(of_tanh, of_squashed, rtol=1e-6)


def test_without_an_lstm_only_the_observation_counts() -> None:
    agent = R2D2(SPEC, dataclasses.replace(TINY, lstm_size=0))
    networks = jax.jit(agent.new_networks)(jax.random.key(0))
    rows = rows_of(np.random.default_rng(2), 4, 3)
    other = rows._replace(
        obs=np.concatenate([rows.obs[:-1] + 1.0, rows.obs[-1:]]),
        prev_action=rows.prev_action[::-1],
        reward=rows.reward + 1.0,
    )
    one, two = (jax.jit(agent.evaluate)(networks, x, ()).values for x in (rows, other))
    np.testing.assert_array_equal(one[-1], two[-1])


@pytest.mark.parametrize("rescale", [True, False])
def test_targets_are_those_of_rlax(rescale: bool) -> None:
    agent = R2D2(SPEC, dataclasses.replace(TINY, num_steps=3, rescale_values=rescale))
    rng = np.random.default_rng(3)
    values, target_values = rng.normal(size=(2, 9, 2, 5)).astype(np.float32)
    step = Transitions(
        reward=rng.normal(size=(8, 2)).astype(np.float32),
        discount=np.full((8, 2), 0.9, np.float32),
        last=np.zeros((8, 2), bool),
        valid=np.ones((8, 2), bool),
    )
    targets = jax.jit(agent._targets)(values, target_values, step)
    pair = rlax.SIGNED_HYPERBOLIC_PAIR if rescale else rlax.IDENTITY_PAIR
    for env in range(2):
        action = np.argmax(values[1:, env], axis=-1)
        taken = np.zeros(8, np.int32)
        error = rlax.transformed_n_step_q_learning(
            values[:-1, env], taken, target_values[1:, env], action, step.reward[:, env],
            step.discount[:, env], 3, True, pair,
        )  # fmt: skip
        np.testing.assert_allclose(targets[:, env] - values[:-1, env, 0], error, atol=2e-4)


def test_priority_is_mostly_the_largest_error() -> None:
    size = jnp.array([[1.0, 0.0], [4.0, 2.0], [1.0, 0.0]])
    valid = jnp.array([[True, False], [True, True], [True, True]])
    np.testing.assert_allclose(sequence_priority(size, valid, 0.9), [3.8, 1.9], rtol=1e-6)


@pytest.mark.slow
def test_zero_state_learns_otherwise(driver: Driver) -> None:
    networks, opt, experience, _ = driver.state
    losses = []
    for stored_state in (True, False):
        agent = R2D2(SPEC, dataclasses.replace(TINY, stored_state=stored_state))
        loss = functools.partial(agent.loss, networks, opt, key=jax.random.key(0))
        losses.append(with_axis(loss, experience)[0])
    assert abs(losses[0] - losses[1]) > 1e-6


def test_updates_give_priorities_and_count_what_they_draw(driver: Driver) -> None:
    metrics = driver.cycle()
    # Updates follow the trajectories 5 to 9; one has 6 x 8 rows, a draw learns from 12 x 8.
    assert metrics["samples_per_insert"] == pytest.approx(5 * 96 / (9 * 48))
    weight = driver.state.experience.weight
    assert metrics["replay_size"] == (weight > 0).sum()
    assert len(np.unique(weight)) > 8


def test_refuses_sequences_that_do_not_end_with_a_trajectory() -> None:
    agent = R2D2(SPEC, dataclasses.replace(TINY, sequence_length=9))
    with pytest.raises(UsageError, match=r"makes 13 rows.*steps_per_cycle=6.*length=8 or 14"):
        agent.check_run(run_spec())
    with pytest.raises(UsageError, match=r"capacity=800 must be at least \d+ env steps"):
        R2D2(SPEC, TINY).check_run(
            RunSpec(num_envs=80, num_inferencers=2, steps_per_cycle=6, num_update_devices=1)
        )


def test_refuses_continuous_actions_by_name() -> None:
    with pytest.raises(UsageError, match="must be a Discrete for R2D2"):
        R2D2(BOX_SPEC, TINY)


# The tasks that need memory.


@pytest.mark.parametrize(
    "name", ["RepeatObservation", "cartpole_without_velocities", "acrobot_without_velocities"]
)
def test_tasks_are_the_same_stepped_and_fused(name: str) -> None:
    factory = make_env_factory(f"sebulba.envs.memory_tasks:{name}")
    stepped, fused = factory(3, [5, 6, 7]), factory(3, [5, 6, 7])
    first, state_and_step = stepped.reset(), fused.fused()
    assert not isinstance(state_and_step, str)
    np.testing.assert_array_equal(first.obs, fused.reset().obs)
    state, step = state_and_step.state, jax.jit(state_and_step.step)
    rng = np.random.default_rng(0)
    for _ in range(70):
        action = rng.integers(0, 2, 3).astype(np.int32)
        state, output, num_invalid = step(state, action)
        assert num_invalid == 0
        leaves = jax.tree.leaves(stepped.step(action)), jax.tree.leaves(output)
        for a, b in zip(*leaves, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)
            assert np.asarray(a).dtype == b.dtype


def test_repeating_what_was_observed_is_rewarded() -> None:
    env = make_env_factory(
        "sebulba.envs.memory_tasks:RepeatObservation", delay=3, num_symbols=4, episode_length=9
    )(50, list(range(50)))
    output, seen, returns = env.reset(), [], 0.0
    for t in range(9):
        seen.append(output.obs)
        output = env.step(seen[t - 3] if t >= 3 else output.obs)
        returns += output.reward
        assert output.terminated.all() == (t == 8)
    np.testing.assert_array_equal(returns, 6.0)
    assert np.bincount(np.concatenate(seen), minlength=4).min() > 80
    output = env.step(output.obs)
    assert output.is_first.all() and not output.reward.any() and not output.terminated.any()
