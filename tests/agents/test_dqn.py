"""DQN: its loss cell by cell, its variants, and probes."""

from __future__ import annotations

import dataclasses
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sebulba.agents.configs import (
    DQNConfig,
    OptimizerConfig,
    ReplayConfig,
    TargetConfig,
    TorsoConfig,
)
from sebulba.agents.dqn import DQN
from sebulba.agents.nets.q_networks import QHead
from sebulba.errors import UsageError
from sebulba.tools.check.agent_driver import Streams, run_spec
from sebulba.types import EnvSpec
from tests.support.agent_driver import BOX_SPEC, SPEC, Driver, quick_state

TINY = DQNConfig(
    num_steps=2,
    loss="squared",
    reward_scale=0.5,
    torso=TorsoConfig(hidden_sizes=(7,), activation="relu"),
    optimizer=OptimizerConfig("sgd", max_grad_norm=0.0),
    replay=ReplayConfig(
        capacity=400, batch_size=12, updates_per_cycle=2, warm_up_cycles=2, prioritized=True
    ),
    target=TargetConfig(period=3),
)


def with_axis(function: Any, experience: Any) -> Any:
    """Return ``function(experience)``, called where the axis of one update device is bound."""
    one = jax.tree.map(lambda x: x[None], experience)
    return jax.tree.map(lambda x: x[0], jax.jit(jax.vmap(function, axis_name="learner"))(one))


@pytest.fixture(scope="module")
def driven() -> tuple[Driver, list[dict[str, float]]]:
    """Return what five cycles leave, and their metrics."""
    driver = Driver(DQN(SPEC, TINY))
    return driver, [driver.cycle(cycle % 2) for cycle in range(5)]


@pytest.mark.slow
@pytest.mark.parametrize("double", [True, False])
def test_loss_is_that_of_the_equations(driven: Any, double: bool) -> None:
    agent: Any = DQN(SPEC, dataclasses.replace(TINY, double=double))
    networks, opt, experience, _ = driven[0].state
    assert driven[0].updates == 8
    key = jax.random.key(3)
    draw, weight = with_axis(lambda x: agent.draw(x, key), experience)
    loss, (after, metrics) = with_axis(lambda x: agent.loss(networks, opt, x, key), experience)

    batch = with_axis(lambda x: agent.replay.gathered(x, draw, 0.99), experience)
    of = jax.jit(agent.values)
    online, target = of(networks, batch.next_obs), of(opt.target, batch.next_obs)
    assert np.abs(online - target).max() > 1e-6
    rows = np.arange(12)
    best = np.argmax(online if double else target, axis=1)
    error = 0.5 * batch.reward + batch.discount * np.asarray(target)[rows, best]
    error -= np.asarray(of(networks, batch.obs))[rows, np.asarray(batch.action) - 2]
    np.testing.assert_allclose(loss, np.mean(weight * 0.5 * error**2), rtol=1e-4)
    np.testing.assert_allclose(metrics["td_error"], np.abs(error).mean(), rtol=1e-4)
    new = after.weight[draw.inferencer, draw.row, draw.env]
    np.testing.assert_allclose(new, np.abs(error) ** 0.6, rtol=1e-3)


@pytest.mark.slow
def test_ratio_of_samples_to_inserts_is_reported(driven: Any) -> None:
    _, metrics = driven
    # Cycles 2 to 5 draw 2 x 12 each; a trajectory has 6 x 8 rows. Metrics are means of two updates.
    assert metrics[0] == {}
    assert metrics[3]["samples_per_insert"] == pytest.approx((60 + 72) / 2 / (4 * 48))


def test_dueling_values_ignore_what_all_advantages_share() -> None:
    head = QHead(num_actions=3, hidden_sizes=(5,), dueling=True)
    features = jax.random.normal(jax.random.key(0), (4, 2))
    variables: Any = jax.jit(head.init)(jax.random.key(1), features)
    apply: Any = jax.jit(head.apply)
    values = apply(variables, features)
    variables["params"]["advantage"]["bias"] += 7.0
    np.testing.assert_allclose(apply(variables, features), values, atol=1e-5)
    variables["params"]["value"]["bias"] += 7.0
    np.testing.assert_allclose(apply(variables, features), values + 7.0, atol=1e-5)


def test_evaluation_is_greedy_and_exploration_is_not() -> None:
    config = dataclasses.replace(TINY, initial_epsilon=1.0, final_epsilon=1.0)
    agent = DQN(SPEC, config)
    state = quick_state(agent, run_spec())
    row = Streams(agent, state).first_row(0)
    best = 2 + np.argmax(agent.values(state.networks, row.obs), axis=1)
    step = jax.jit(agent.step, static_argnames="explore")
    output, _ = step(state.networks, state.step[0], row, explore=False)
    np.testing.assert_array_equal(output.action, best)
    output, after = step(state.networks, state.step[0], row)
    assert output.action.dtype == np.int32 and np.any(output.action != best)
    again, _ = step(state.networks, after, row)
    assert np.any(output.action != again.action)


def test_refuses_continuous_actions_by_name() -> None:
    with pytest.raises(UsageError, match=r"action_space=Box.* must be a Discrete for DQN"):
        DQN(BOX_SPEC, TINY)


def test_refuses_a_warm_up_that_leaves_nothing_to_draw() -> None:
    config = dataclasses.replace(TINY, num_steps=9)
    with pytest.raises(UsageError, match=r"warm_up_cycles=2 is too small.*use 3 or more"):
        DQN(SPEC, config).check_run(run_spec())


def test_takes_images() -> None:
    space = gymnasium.spaces.Box(0, 255, (4, 36, 36), np.uint8)
    spec = EnvSpec(space, SPEC.action_space, frame_stack=4)
    agent = DQN(spec, DQNConfig(dueling=True, head_hidden_sizes=(3,)))
    shapes = jax.eval_shape(
        lambda key: agent.values(agent.new_networks(key), jnp.zeros((2, 4, 36, 36), jnp.uint8)),
        jax.random.key(0),
    )
    assert shapes.shape == (2, 5)
