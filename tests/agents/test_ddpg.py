"""DDPG: its loss and gradients by hand, its noise, and what it learns on probes."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sebulba.agents.bases.off_policy import Opt
from sebulba.agents.configs import DDPGConfig, ReplayConfig, TargetConfig, TorsoConfig
from sebulba.agents.ddpg import DDPG
from sebulba.errors import UsageError
from sebulba.types import EnvSpec, RunSpec, empty_env_step
from tests.support.actor_critic import (
    UNBOUNDED,
    ContinuousDiscounting,
    GivenReplay,
    Trained,
    linear,
    spaces,
)

NETWORKS = {"actor": linear(1.0), "critics": (linear(1.0, 2.0), linear(2.0, -1.0))}
TARGET = {"actor": linear(0.5), "critics": (linear(1.0, 1.0), linear(3.0, 0.0, bias=-3.5))}


def loss_and_gradient(num_critics: int, weight: Any = (1.0, 0.5), **config: Any) -> Any:
    """Return ((loss, (priorities, metrics)), gradient)."""
    torso = TorsoConfig(hidden_sizes=())
    config |= {"torso": torso, "num_critics": num_critics}
    agent: Any = DDPG(UNBOUNDED, DDPGConfig(**config))
    GivenReplay(agent, weight)
    networks, target = (
        {**tree, "critics": tree["critics"][:num_critics]} for tree in (NETWORKS, TARGET)
    )
    gradient = jax.value_and_grad(agent.loss, has_aux=True)
    return gradient(networks, Opt((), target, jnp.int32(0)), (), jax.random.key(0))


def test_loss_is_that_computed_by_hand() -> None:
    (loss, (priority, metrics)), _ = loss_and_gradient(1)
    # The target actor does 1 at the first next state 2, which its critic values at 3.
    errors = np.array([2.0, 0.0]) - [1 + 0.9 * 3, 2.0]
    critic_loss = 0.5 * np.mean([1.0, 0.5] * errors**2)
    assert metrics["critic_loss"] == pytest.approx(critic_loss)
    assert metrics["actor_loss"] == pytest.approx(-np.mean([1 + 2 * 1, 2 + 2 * 2]))
    assert loss == pytest.approx(critic_loss - 4.5)
    np.testing.assert_allclose(priority, np.abs(errors), rtol=1e-6)


def test_the_smaller_of_two_target_critics_counts() -> None:
    (_, (priority, metrics)), _ = loss_and_gradient(2)
    errors = np.array([[2.0, 0.0], [1.5, 5.0]]) - [1 + 0.9 * 2.5, 2.0]
    np.testing.assert_allclose(priority, np.mean(np.abs(errors), axis=0), rtol=1e-6)
    # The actor follows the first.
    assert metrics["actor_loss"] == pytest.approx(-4.5)


def test_actor_and_critics_have_the_gradient_of_their_own_loss() -> None:
    _, gradient = loss_and_gradient(1)
    errors = np.array([-1.7, -2.0]) * [1.0, 0.5]
    np.testing.assert_allclose(
        np.ravel(gradient["critics"][0]["head"]["kernel"]),
        [np.mean(errors * [1, 2]), np.mean(errors * [0.5, -1])],
        rtol=1e-5,
    )
    # The critic rises by 2 with each unit of action; the mean observation is 1.5.
    assert gradient["actor"]["head"]["kernel"] == pytest.approx(-2 * 1.5)
    _, without_critic_loss = loss_and_gradient(1, weight=(0.0, 0.0))
    leaves = jax.tree.leaves(without_critic_loss["critics"])
    assert all(np.all(leaf == 0) for leaf in leaves)


def test_smoothing_moves_the_targets_action_within_its_clip() -> None:
    (_, (plain, _)), _ = loss_and_gradient(1)
    (_, (smoothed, _)), _ = loss_and_gradient(1, target_noise=0.1)
    assert 0 < abs(plain[0] - smoothed[0]) <= 0.9 * 0.25 + 1e-6
    assert plain[1] == smoothed[1]  # terminal: no target action


APE_X = DDPGConfig(
    learning_rate=1e-2,
    critic_learning_rate=1e-2,
    discount=0.5,
    num_steps=2,
    num_critics=2,
    noise_scale=0.5,
    noise_exponent=1.0,
    torso=TorsoConfig(hidden_sizes=(16,), activation="relu"),
    replay=ReplayConfig(capacity=1600, batch_size=32, updates_per_cycle=8, prioritized=True),
    target=TargetConfig(rate=0.1),
)


@pytest.mark.slow
def test_learns_the_discounted_value() -> None:
    trained = Trained(ContinuousDiscounting, APE_X, 60)
    np.testing.assert_allclose(trained.values(1.0, -1.0), [[0.5, 1.0]] * 2, atol=0.15)


def test_noise_is_a_ladder_over_the_environments_of_all_inferencers() -> None:
    agent = DDPG(UNBOUNDED, APE_X)
    run = RunSpec(num_envs=2, num_inferencers=2, steps_per_cycle=4, num_update_devices=1)
    scales = [agent.new_step_state(jax.random.key(0), run, j).noise_scale for j in range(2)]
    np.testing.assert_allclose(np.concatenate(scales), 0.5 ** (1 + np.arange(4) / 3), rtol=1e-6)


def test_noise_has_its_scale_and_evaluation_has_none() -> None:
    num_envs = 3000
    agent = DDPG(UNBOUNDED, DDPGConfig(noise_scale=0.3, torso=TorsoConfig(hidden_sizes=())))
    run = RunSpec(num_envs, num_inferencers=1, steps_per_cycle=4, num_update_devices=1)
    env_step = empty_env_step(UNBOUNDED, num_envs)
    actor = linear(1.0, bias=0.7)
    for explore, scale in ((True, 0.3), (False, 0.0)):
        step_state = agent.new_step_state(jax.random.key(0), run, 0)
        action = agent.step(actor, step_state, env_step, explore=explore)[0].action
        assert np.mean(action) == pytest.approx(0.7, abs=0.03)
        assert np.std(action) == pytest.approx(scale, abs=0.02)


@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_noise_follows_that_of_the_step_before_as_far_as_asked_for(correlation: float) -> None:
    num_envs, torso = 3000, TorsoConfig(hidden_sizes=())
    config = DDPGConfig(noise_scale=0.3, noise_correlation=correlation, torso=torso)
    agent = DDPG(UNBOUNDED, config)
    run = RunSpec(num_envs, num_inferencers=1, steps_per_cycle=4, num_update_devices=1)
    env_step, actor = empty_env_step(UNBOUNDED, num_envs), linear(1.0, bias=0.7)
    step_state, noises = agent.new_step_state(jax.random.key(0), run, 0), []
    for _ in range(4):
        output, step_state = agent.step(actor, step_state, env_step)
        noises.append(np.ravel(output.action) - 0.7)
    for before, after in itertools.pairwise(noises):
        assert np.corrcoef(before, after)[0, 1] == pytest.approx(correlation, abs=0.06)
        assert np.std(after) == pytest.approx(0.3, abs=0.02)


def test_refuses_discrete_actions() -> None:
    with pytest.raises(UsageError, match="must be a Box of floats for DDPG"):
        DDPG(EnvSpec(UNBOUNDED.observation_space, spaces.Discrete(3)), DDPGConfig())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_steps", 0),
        ("num_critics", 0),
        ("target_noise", -0.1),
        ("noise_scale", 1.5),
        ("noise_correlation", 1.0),
    ],
)
def test_refuses_with_name_and_remedy(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=rf"{name}=.*; use"):
        DDPGConfig(**{name: value})
