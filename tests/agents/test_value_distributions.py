"""Distributional DQN: kernels beside rlax and the paper's loops, network, loss and options."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sebulba.agents.configs import DQNConfig
from sebulba.agents.dqn import DQN
from sebulba.agents.kernels.value_distributions import (
    categorical_td,
    expected_value,
    logits_of,
    projected,
    quantile_td,
)
from sebulba.agents.nets.q_networks import QHead
from sebulba.errors import UsageError
from sebulba.tools.check.agent_driver import run_spec
from tests.agents.test_dqn import TINY, with_axis
from tests.agents.test_returns import import_rlax
from tests.support.agent_driver import SPEC, Driver, quick_state

ATOMS = dataclasses.replace(TINY, loss="huber", atoms=5, value_min=-1.5, value_max=2.0)
QUANTILES = dataclasses.replace(TINY, loss="huber", quantiles=4)


def algorithm_1(probability: Any, reward: float, discount: float, support: Any) -> np.ndarray:
    """Return the projected target of Bellemare et al. 2017, algorithm 1, in its loop."""
    low, high, spacing = support[0], support[-1], support[1] - support[0]
    target = np.zeros(len(support))
    for value, share in zip(support, probability, strict=True):
        b = (np.clip(reward + discount * value, low, high) - low) / spacing
        below, above = int(np.floor(b)), int(np.ceil(b))
        if below == above:  # the paper loses the probability of an atom that needs no division
            target[below] += share
        else:
            target[below] += share * (above - b)
            target[above] += share * (b - below)
    return target


def test_projection_by_hand() -> None:
    support = jnp.asarray([0.0, 1.0, 2.0])
    got = projected(jnp.asarray([-3.0, 0.25, 2.0, 9.0]), jnp.asarray([0.1, 0.4, 0.2, 0.3]), support)
    np.testing.assert_allclose(got, [0.1 + 0.4 * 0.75, 0.4 * 0.25, 0.2 + 0.3], rtol=1e-6)


@pytest.mark.filterwarnings("ignore:Rlax:PendingDeprecationWarning")
@pytest.mark.parametrize(
    ("reward", "discount"), [(0.3, 0.9), (-7.0, 0.9), (40.0, 0.5), (0.0, 1.0), (1.3, 0.0)]
)
def test_target_and_loss_are_those_of_the_paper_and_of_rlax(reward: float, discount: float) -> None:
    rng = np.random.default_rng(0)
    support = np.linspace(-4.0, 6.0, 7)
    logits, next_logits = rng.normal(size=(2, 3, 7)).astype(np.float32)
    selector = np.asarray([0.1, 0.5, 0.2], np.float32)
    probability = np.exp(next_logits[1]) / np.exp(next_logits[1]).sum()
    target = algorithm_1(probability, reward, discount, support)
    atoms = jnp.asarray(support, jnp.float32)
    got = projected(reward + discount * atoms, jnp.asarray(probability), atoms)
    np.testing.assert_allclose(got, target, atol=1e-6)
    rlax: Any = import_rlax()
    theirs = rlax.categorical_l2_project(reward + discount * atoms, jnp.asarray(probability), atoms)
    np.testing.assert_allclose(got, theirs, atol=1e-6)

    scalars = jnp.asarray(reward), jnp.asarray(discount)

    def loss(logits: Any) -> Any:
        return categorical_td(logits[2], jnp.asarray(next_logits[1]), *scalars, atoms)[0]

    def loss_of_rlax(logits: Any) -> Any:
        return rlax.categorical_double_q_learning(
            atoms, logits, 2, *scalars, atoms, jnp.asarray(next_logits), jnp.asarray(selector)
        )

    log_probability = logits[2] - np.log(np.exp(logits[2]).sum())
    np.testing.assert_allclose(loss(logits), -(target * log_probability).sum(), rtol=1e-5)
    ours, gradient = jax.value_and_grad(loss)(jnp.asarray(logits))
    value, theirs = jax.value_and_grad(loss_of_rlax)(jnp.asarray(logits))
    np.testing.assert_allclose(ours, value, rtol=1e-5)
    np.testing.assert_allclose(gradient, theirs, atol=1e-6)


def algorithm_1_of_quantiles(theta: Any, next_theta: Any, reward: float, discount: float) -> float:
    """Return the loss of Dabney et al. 2018 (arXiv 1710.10044), algorithm 1, in its loop."""
    total = 0.0
    for i, value in enumerate(theta):
        tau = (2 * i + 1) / (2 * len(theta))
        for next_value in next_theta:
            u = reward + discount * next_value - value
            huber = 0.5 * u**2 if abs(u) <= 1 else abs(u) - 0.5
            total += abs(tau - (u < 0)) * huber / len(next_theta)
    return total


@pytest.mark.filterwarnings("ignore:Rlax:PendingDeprecationWarning")
@pytest.mark.parametrize(("reward", "discount"), [(0.3, 0.9), (-7.0, 0.9), (1.3, 0.0)])
def test_the_loss_of_quantiles_is_that_of_the_paper_and_of_rlax(
    reward: float, discount: float
) -> None:
    rng = np.random.default_rng(1)
    values, next_values = rng.normal(size=(2, 3, 7)).astype(np.float32)
    rlax: Any = import_rlax()
    best = int(np.argmax(next_values.mean(axis=1)))
    scalars = jnp.asarray(reward), jnp.asarray(discount)

    def loss(theta: Any) -> Any:
        return quantile_td(theta[2], jnp.asarray(next_values[best]), *scalars)

    def loss_of_rlax(theta: Any) -> Any:
        tau, following = (jnp.arange(7) + 0.5) / 7, jnp.asarray(next_values.T)
        return rlax.quantile_q_learning(theta.T, tau, 2, *scalars, following, following, 1.0)

    wanted = algorithm_1_of_quantiles(values[2], next_values[best], reward, discount)
    ours, gradient = jax.value_and_grad(loss)(jnp.asarray(values))
    value, theirs = jax.value_and_grad(loss_of_rlax)(jnp.asarray(values))
    np.testing.assert_allclose([ours, value], wanted, rtol=1e-5)
    np.testing.assert_allclose(gradient, theirs, atol=1e-6)


def test_quantiles_settle_where_their_shares_of_a_distribution_are() -> None:
    sample = jnp.asarray(np.random.default_rng(2).uniform(0.0, 40.0, size=500), jnp.float32)
    zero, one = jnp.zeros(()), jnp.ones(())
    descend = jax.jit(jax.grad(lambda theta: quantile_td(theta, sample, zero, one)))
    theta = jnp.full(4, 20.0)
    for _ in range(200):
        theta -= 1.0 * descend(theta)
    np.testing.assert_allclose(theta, [5.0, 15.0, 25.0, 35.0], atol=1.5)


class Drawn:
    """DQN after three cycles, and the loss of what it draws then."""

    def __init__(self, config: DQNConfig) -> None:
        agent: Any = DQN(SPEC, config)
        driver = Driver(agent)
        for cycle in range(3):
            driver.cycle(cycle % 2)
        self.networks, self.opt, experience, _ = driver.state
        key = jax.random.key(3)
        draw, self.weight = with_axis(lambda x: agent.draw(x, key), experience)
        self.loss, (after, self.metrics) = with_axis(
            lambda x: agent.loss(self.networks, self.opt, x, key), experience
        )
        self.batch = with_axis(lambda x: agent.replay.gathered(x, draw, 0.99), experience)
        self.priority = after.weight[draw.inferencer, draw.row, draw.env]
        self.values_and_logits = jax.jit(agent._values_and_logits)


@pytest.mark.slow
def test_the_loss_of_a_batch_of_quantiles_is_that_of_the_paper() -> None:
    drawn = Drawn(QUANTILES)
    networks, opt, batch, of = drawn.networks, drawn.opt, drawn.batch, drawn.values_and_logits
    best = np.argmax(of(networks, batch.next_obs)[0], axis=1)
    target, (values, theta) = of(opt.target, batch.next_obs)[1], of(networks, batch.obs)
    np.testing.assert_allclose(values, np.mean(theta, axis=-1), atol=1e-5)
    losses, errors = [], []
    for i, action in enumerate(np.asarray(batch.action) - 2):
        reward, discount = 0.5 * float(batch.reward[i]), float(batch.discount[i])
        following = np.asarray(target[i, best[i]])
        losses.append(algorithm_1_of_quantiles(theta[i, action], following, reward, discount))
        errors.append(reward + discount * following.mean() - float(values[i, action]))
    np.testing.assert_allclose(drawn.loss, np.mean(drawn.weight * np.asarray(losses)), rtol=1e-4)
    np.testing.assert_allclose(drawn.priority, np.abs(errors) ** 0.6, rtol=2e-3)


def test_a_right_prediction_has_no_divergence_and_no_gradient_reaches_the_target() -> None:
    support, logits = jnp.linspace(-2.0, 2.0, 6), jax.random.normal(jax.random.key(0), (6,))
    zero, one = jnp.zeros(()), jnp.ones(())
    loss, divergence = categorical_td(logits, logits, zero, one, support)
    np.testing.assert_allclose(divergence, 0.0, atol=1e-6)
    probability = jax.nn.softmax(logits)
    np.testing.assert_allclose(loss, -jnp.sum(probability * jnp.log(probability)), rtol=1e-5)
    gradient = jax.grad(lambda x: categorical_td(logits, x, zero, one, support)[0])
    np.testing.assert_array_equal(gradient(logits), np.zeros(6))
    _, other = categorical_td(logits, -logits, zero, one, support)
    assert other > 0.1


def test_the_mean_of_a_target_inside_the_support_is_that_of_the_equation() -> None:
    support = jnp.linspace(-10.0, 10.0, 51)
    logits = -jnp.square(support - 1.0)
    target = projected(0.7 + 0.5 * support, jax.nn.softmax(logits), support)
    mean = expected_value(logits, support)
    np.testing.assert_allclose(jnp.dot(target, support), 0.7 + 0.5 * mean, rtol=1e-5)


def test_logits_of_an_action() -> None:
    logits = jnp.arange(24.0).reshape(2, 3, 4)
    np.testing.assert_array_equal(
        logits_of(logits, jnp.asarray([2, 0])), [logits[0, 2], logits[1, 0]]
    )


def test_dueling_streams_are_joined_atom_by_atom() -> None:
    head = QHead(num_actions=3, hidden_sizes=(5,), dueling=True, atoms=4)
    features = jax.random.normal(jax.random.key(0), (2, 7))
    variables: Any = jax.jit(head.init)(jax.random.key(1), features)
    apply: Any = jax.jit(head.apply)
    logits = apply(variables, features)
    assert logits.shape == (2, 3, 4)
    shift = jnp.arange(4.0)
    variables["params"]["advantage"]["bias"] += jnp.tile(shift, 3)  # alike in all actions
    np.testing.assert_allclose(apply(variables, features), logits, atol=1e-5)
    variables["params"]["value"]["bias"] += shift
    np.testing.assert_allclose(apply(variables, features), logits + shift[None, None], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("double", "dueling"), [(True, True), (False, False)])
def test_loss_is_that_of_the_paper(double: bool, dueling: bool) -> None:
    drawn = Drawn(dataclasses.replace(ATOMS, double=double, dueling=dueling))
    networks, opt, batch, of = drawn.networks, drawn.opt, drawn.batch, drawn.values_and_logits
    online, (target, target_logits) = (
        of(networks, batch.next_obs)[0],
        of(opt.target, batch.next_obs),
    )
    _, logits = of(networks, batch.obs)
    best = np.argmax(online if double else target, axis=1)
    support = np.linspace(-1.5, 2.0, 5)
    losses, divergences = [], []
    for i, action in enumerate(np.asarray(batch.action) - 2):
        next_probability = np.asarray(jax.nn.softmax(target_logits[i, best[i]]))
        reward, discount = 0.5 * float(batch.reward[i]), float(batch.discount[i])
        wanted = algorithm_1(next_probability, reward, discount, support)
        log_probability = np.asarray(jax.nn.log_softmax(logits[i, action]))
        losses.append(-np.sum(wanted * log_probability))
        held = wanted > 0
        divergences.append(losses[-1] + np.sum(wanted[held] * np.log(wanted[held])))
    np.testing.assert_allclose(drawn.loss, np.mean(drawn.weight * np.asarray(losses)), rtol=1e-4)
    np.testing.assert_allclose(drawn.priority, np.asarray(divergences) ** 0.6, rtol=2e-3)
    assert np.isfinite(drawn.metrics["td_error"])


def test_actions_are_chosen_by_the_means() -> None:
    agent = DQN(SPEC, ATOMS)
    state = quick_state(agent, run_spec())
    obs = jnp.asarray(np.random.default_rng(0).normal(size=(6, *SPEC.observation_space.shape)))
    values, logits = agent._values_and_logits(state.networks, obs)
    means = np.asarray(jax.nn.softmax(logits)) @ np.linspace(-1.5, 2.0, 5)
    np.testing.assert_allclose(values, means, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"atoms": 1}, r"atoms=1 must be a whole number of at least 2; use 51, or None"),
        ({"value_min": 3.0, "value_max": 3.0}, r"value_min=3.0 must be below value_max=3.0"),
        ({"value_max": float("inf")}, r"value_min=-10.0 must be below value_max=inf, and both fin"),
        ({"value_min": float("nan")}, r"value_min=nan must be below"),
        (
            {"atoms": None, "value_max": 100.0},
            r"value_max=100.0 has no use without atoms",
        ),
        ({"loss": "squared"}, r"loss='?squared'? has no use with atoms"),
        ({"quantiles": 5}, r"quantiles=5 cannot be combined with atoms.*leave one out"),
        ({"atoms": None, "quantiles": 1}, r"quantiles=1 must be a whole number of at least 2"),
        ({"atoms": None, "quantiles": 5, "loss": "squared"}, r"loss='?squared'? has no use with"),
    ],
)
def test_refuses_what_is_no_support(fields: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        DQNConfig(**{"atoms": 51, **fields})


def test_without_atoms_networks_are_as_they_were() -> None:
    agent = DQN(SPEC, TINY)
    networks = quick_state(agent, run_spec()).networks
    assert networks["head"]["advantage"]["kernel"].shape == (7, agent.actions.num_params)
    assert DQNConfig().support == () and len(DQNConfig(atoms=51).support) == 51
    np.testing.assert_allclose(DQNConfig(atoms=51).support, np.linspace(-10, 10, 51))
