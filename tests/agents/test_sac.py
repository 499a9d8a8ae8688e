"""SAC: its loss and gradients by hand, its temperature, and what it learns on probes."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sebulba.agents.bases.off_policy import Opt
from sebulba.agents.configs import (
    OptimizerConfig,
    ReplayConfig,
    SACConfig,
    TargetConfig,
    TorsoConfig,
)
from sebulba.agents.sac import SAC
from sebulba.errors import UsageError
from sebulba.types import EnvSpec, RunSpec, empty_env_step
from tests.support import probes
from tests.support.actor_critic import (
    UNBOUNDED,
    GivenReplay,
    Trained,
    linear,
    spaces,
)


class GivenDistribution:
    """Samples the first parameter, with the second as log-density."""

    def sample(self, params: jax.Array, key: jax.Array) -> jax.Array:
        return params[:, :1]

    def log_prob(self, params: jax.Array, raw: jax.Array) -> jax.Array:
        return params[:, 1]


NETWORKS = {
    "actor": linear([1.0, 0.1]),
    "critics": (linear(1.0, 2.0), linear(2.0, -1.0)),
    "log_temperature": jnp.log(jnp.float32(0.5)),
}
TARGET = (linear(1.0, 1.0), linear(3.0, 0.0, bias=-1.0))


def loss_and_gradient(networks: Any = NETWORKS, weight: Any = (1.0, 0.5), **config: Any) -> Any:
    """Return ((loss, (priorities, metrics)), gradient)."""
    agent: Any = SAC(UNBOUNDED, SACConfig(torso=TorsoConfig(hidden_sizes=()), **config))
    GivenReplay(agent, weight)
    agent.distribution = GivenDistribution()
    opt = Opt((), TARGET, jnp.int32(0))
    gradient = jax.value_and_grad(agent.loss, has_aux=True)
    return gradient(networks, opt, (), jax.random.key(0))


def test_loss_is_that_computed_by_hand() -> None:
    (loss, (priority, metrics)), _ = loss_and_gradient()
    # Target critics say min(4, 5) of the first next state, minus 0.5 * 0.2 for its entropy.
    targets = np.array([1 + 0.9 * 3.9, 2.0])
    errors = np.array([[2.0, 0.0], [1.5, 5.0]]) - targets
    critic_loss = 0.5 * np.sum(np.mean([1.0, 0.5] * errors**2, axis=1))
    # min(3, 1) and min(6, 2) of the actions now, whose log-densities are 0.1 and 0.2.
    actor_loss = np.mean([0.5 * 0.1 - 1, 0.5 * 0.2 - 2])
    temperature_loss = 0.5 * (-0.15 + 1)
    assert metrics["critic_loss"] == pytest.approx(critic_loss)
    assert metrics["actor_loss"] == pytest.approx(actor_loss)
    assert metrics["entropy"] == pytest.approx(-0.15)
    assert metrics["temperature"] == pytest.approx(0.5)
    assert loss == pytest.approx(critic_loss + actor_loss + temperature_loss)
    np.testing.assert_allclose(priority, np.mean(np.abs(errors), axis=0), rtol=1e-6)


def test_each_part_has_the_gradient_of_its_own_loss() -> None:
    _, gradient = loss_and_gradient()
    kernel = lambda tree: np.ravel(tree["head"]["kernel"])  # noqa: E731
    first, second = gradient["critics"]
    errors = np.array([-2.51, -2.0]) * [1.0, 0.5], np.array([-3.01, 3.0]) * [1.0, 0.5]
    for critic, error in zip((first, second), errors, strict=True):
        np.testing.assert_allclose(
            kernel(critic), [np.mean(error * [1, 2]), np.mean(error * [0.5, -1])], atol=1e-5
        )
    # The second critic, whose values are smaller, falls by 1 with each unit of action.
    np.testing.assert_allclose(kernel(gradient["actor"]), [1.5, 0.5 * 1.5], rtol=1e-5)
    assert gradient["log_temperature"] == pytest.approx(0.5 * 0.85)


def test_the_actors_loss_leaves_the_critics_alone() -> None:
    _, gradient = loss_and_gradient(weight=(0.0, 0.0))
    assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(gradient["critics"]))
    assert np.any(gradient["actor"]["head"]["kernel"] != 0)


def test_the_critics_loss_leaves_the_actor_alone() -> None:
    indifferent = (linear(1.0, 0.0), linear(2.0, 0.0))
    cold = {**NETWORKS, "critics": indifferent, "log_temperature": jnp.float32(-99.0)}
    (_, (_, metrics)), gradient = loss_and_gradient(cold)
    assert metrics["critic_loss"] > 1
    assert all(np.all(np.abs(leaf) < 1e-20) for leaf in jax.tree.leaves(gradient["actor"]))


@pytest.mark.parametrize(("target_entropy", "sign"), [(-1.0, 1), (0.5, -1)])
def test_temperature_falls_while_entropy_is_above_its_target(
    target_entropy: float, sign: int
) -> None:
    _, gradient = loss_and_gradient(target_entropy=target_entropy)
    assert np.sign(gradient["log_temperature"]) == sign


def test_each_part_has_its_own_learning_rate_and_only_critics_have_targets() -> None:
    config = SACConfig(
        learning_rate=0.1,
        critic_learning_rate=0.2,
        temperature_learning_rate=0.3,
        torso=TorsoConfig(hidden_sizes=()),
        optimizer=OptimizerConfig("sgd", max_grad_norm=0.0),
        target=TargetConfig(rate=0.5),
    )
    agent = SAC(UNBOUNDED, config)
    opt = agent.new_opt(NETWORKS)
    networks, opt = agent.optimize(NETWORKS, opt, jax.tree.map(jnp.ones_like, NETWORKS))

    def moved(now: Any, before: Any) -> list[float]:
        return jax.tree.leaves(jax.tree.map(lambda x, y: float(np.max(y - x)), now, before))

    assert moved(networks["actor"], NETWORKS["actor"]) == pytest.approx([0.1] * 2)
    assert moved(networks["critics"], NETWORKS["critics"]) == pytest.approx([0.2] * 4)
    assert moved(networks["log_temperature"], NETWORKS["log_temperature"]) == pytest.approx([0.3])
    assert moved(opt.target, NETWORKS["critics"]) == pytest.approx([0.1] * 4)


SMALL = SACConfig(
    learning_rate=1e-2,
    critic_learning_rate=1e-2,
    temperature_learning_rate=1e-2,
    discount=0.5,
    initial_temperature=0.1,
    torso=TorsoConfig(hidden_sizes=(16,), activation="relu"),
    replay=ReplayConfig(capacity=1600, batch_size=32, updates_per_cycle=8),
    target=TargetConfig(rate=0.1),
)


@pytest.mark.slow
def test_learns_actions_by_the_observation_and_keeps_its_entropy() -> None:
    trained = Trained(probes.ContinuousTarget, SMALL, 80)
    np.testing.assert_allclose(trained.action(1.0, -1.0), [0.5, -0.5], atol=0.15)
    assert trained.metrics["entropy"] == pytest.approx(-1.0, abs=0.4)
    assert trained.metrics["samples_per_insert"] == pytest.approx(8 * 32 / 20, rel=0.05)


# Acting.

BOUNDED = EnvSpec(spaces.Box(-1, 1, (3,)), spaces.Box(np.float32([-2, 0]), np.float32([2, 8])))
RUN = RunSpec(num_envs=5, num_inferencers=2, steps_per_cycle=4, num_update_devices=1)


def acted(num_steps: int, *, explore: bool = True, **config: Any) -> Any:
    """Return the actions of successive steps, ``[num_steps, 5, 2]``."""
    torso = TorsoConfig(hidden_sizes=(7,))
    agent = SAC(BOUNDED, SACConfig(torso=torso, **config))
    actor = agent.new_networks(jax.random.key(0))["actor"]
    # Saturated, so that a random action is told from one of the policy.
    actor["head"]["bias"] = jnp.asarray([50.0, -50.0, -9.0, -9.0])
    step_state, actions = agent.new_step_state(jax.random.key(1), RUN, 0), []
    step = jax.jit(agent.step, static_argnames="explore")
    for _ in range(num_steps):
        output, step_state = step(actor, step_state, empty_env_step(BOUNDED, 5), explore=explore)
        actions.append(output.action)
    return np.stack(actions)


@pytest.mark.slow
def test_acts_at_random_at_first_over_all_inferencers() -> None:
    actions = acted(6, random_env_steps=32)
    np.testing.assert_array_equal(np.all(actions[4:] == [2, 0], axis=(1, 2)), True)
    first = actions[:4].reshape(-1, 2)
    assert len(np.unique(first, axis=0)) == len(first)
    assert np.all(np.abs(first[:, 0]) < 2) and np.any(first[:, 1] > 4)


@pytest.mark.parametrize("correlation", [0.0, 0.8])
def test_samples_follow_those_of_the_step_before_as_far_as_asked_for(correlation: float) -> None:
    num_envs, torso = 3000, TorsoConfig(hidden_sizes=(7,))
    agent = SAC(UNBOUNDED, SACConfig(torso=torso, noise_correlation=correlation))
    actor = agent.new_networks(jax.random.key(0))["actor"]
    run = dataclasses.replace(RUN, num_envs=num_envs)
    step_state, actions = agent.new_step_state(jax.random.key(1), run, 0), []
    step = jax.jit(agent.step)
    for _ in range(4):
        output, step_state = step(actor, step_state, empty_env_step(UNBOUNDED, num_envs))
        actions.append(np.ravel(output.action))
    for before, after in itertools.pairwise(actions):
        assert np.corrcoef(before, after)[0, 1] == pytest.approx(correlation, abs=0.06)
        assert np.std(after) == pytest.approx(np.std(actions[0]), rel=0.06)


def test_evaluation_acts_by_the_middle_of_the_policy() -> None:
    actions = acted(2, explore=False, random_env_steps=32)
    np.testing.assert_array_equal(actions, np.broadcast_to(np.float32([2, 0]), actions.shape))


def test_only_the_actor_is_staged() -> None:
    networks = {"actor": 1, "critics": (2, 3), "log_temperature": 4}
    assert SAC(BOUNDED, SACConfig()).acting_networks(networks, None) == 1


# Spaces and hyper-parameters.


@pytest.mark.parametrize("space", [spaces.MultiDiscrete([2, 3]), spaces.Box(0, 9, (1,), np.int32)])
def test_refuses_actions_that_are_neither_continuous_nor_of_one_choice(space: Any) -> None:
    with pytest.raises(UsageError, match="must be a Box of floats for SAC"):
        SAC(EnvSpec(BOUNDED.observation_space, space), SACConfig())


def test_takes_images_beside_vectors() -> None:
    image = spaces.Box(0, 255, (9, 11, 3), np.uint8)
    space = spaces.Dict({"image": image, "vector": BOUNDED.observation_space})
    agent = SAC(EnvSpec(space, BOUNDED.action_space), SACConfig())
    networks = jax.eval_shape(agent.new_networks, jax.random.key(0))
    obs = {"image": jnp.zeros((6, 9, 11, 3), jnp.uint8), "vector": jnp.zeros((6, 3))}

    def outputs(networks: Any) -> Any:
        encoded = agent.encode(obs, num_leading=1)
        values = agent.values(networks["critics"], encoded, jnp.zeros((6, 2)))
        return values, agent.policy(networks["actor"], encoded)

    values, params = jax.eval_shape(outputs, networks)
    assert values.shape == (2, 6) and params.shape == (6, 4)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("critic_learning_rate", 0.0),
        ("temperature_learning_rate", -1.0),
        ("initial_temperature", 0.0),
        ("target_entropy", float("nan")),
        ("random_env_steps", -1),
        ("discount", 1.5),
    ],
)
def test_refuses_with_name_and_remedy(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=rf"{name}=.*; use"):
        SACConfig(**{name: value})
