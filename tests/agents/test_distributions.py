"""Action distributions: against distrax, and inside the space whatever the parameters are."""

from __future__ import annotations

import warnings
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sebulba.agents.configs import PPOConfig
from sebulba.agents.kernels.distributions import (
    Categorical,
    Gaussian,
    MultiCategorical,
    SquashedGaussian,
    make_distribution,
)
from sebulba.errors import UsageError

spaces = gymnasium.spaces

DISCRETE = spaces.Discrete(5, start=-2, dtype=np.int32)
MULTI = spaces.MultiDiscrete(
    np.array([[3, 2], [4, 6]]), np.int32, start=np.array([[0, 7], [-1, 0]])
)
BOUNDED = spaces.Box(np.float32([-2, 0, 1]), np.float32([2, 0.1, 9]))
MIXED = spaces.Box(
    np.float32([[-np.inf, -1], [0, -1e30]]), np.float32([[np.inf, 1], [np.inf, 1e30]])
)


def distrax() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import distrax
    return distrax


def random_params(dist: Any, *leading: int) -> jax.Array:
    size = dist.num_params + dist.num_free_params
    return jax.random.normal(jax.random.key(3), (*leading, size))


@pytest.mark.parametrize("space", [DISCRETE, MULTI, BOUNDED, MIXED], ids=str)
def test_actions_are_in_the_space(space: Any) -> None:
    dist = make_distribution(space)

    @jax.jit
    def actions(params: jax.Array) -> Any:
        raws = dist.sample(params, jax.random.key(1)), dist.mode(params)
        for raw in raws:
            assert dist.log_prob(params, raw).shape == dist.entropy(params).shape == (7, 3)
        return [dist.action(raw) for raw in raws]

    for scale in (0.0, 1.0, 1e4):
        for action in map(np.asarray, actions(scale * random_params(dist, 7, 3))):
            assert action.dtype == space.dtype
            assert action.shape == (7, 3, *space.shape)
            assert all(space.contains(a) for a in action.reshape(-1, *space.shape))


def test_categorical_is_that_of_distrax() -> None:
    dist = Categorical(DISCRETE)
    params = 2 * random_params(dist, 11)
    oracle = distrax().Categorical(params)
    raw = dist.sample(params, jax.random.key(0))
    np.testing.assert_allclose(dist.log_prob(params, raw), oracle.log_prob(raw), atol=1e-6)
    np.testing.assert_allclose(dist.entropy(params), oracle.entropy(), atol=1e-6)
    np.testing.assert_array_equal(dist.action(jnp.arange(5)), [-2, -1, 0, 1, 2])


@pytest.mark.slow
def test_multi_categorical_is_the_product_of_its_parts() -> None:
    dist = MultiCategorical(MULTI)
    params = 2 * random_params(dist, 11)
    raw = jax.jit(dist.sample)(params, jax.random.key(0))

    @jax.jit
    def of_parts(params: jax.Array, raw: jax.Array) -> Any:
        parts = jnp.split(params, [3, 5, 9], axis=-1)
        oracles = [distrax().Categorical(logits) for logits in parts]
        log_prob = sum(oracle.log_prob(raw[:, k]) for k, oracle in enumerate(oracles))
        return log_prob, sum(oracle.entropy() for oracle in oracles)

    log_prob, entropy = of_parts(params, raw)
    np.testing.assert_allclose(jax.jit(dist.log_prob)(params, raw), log_prob, atol=1e-5)
    np.testing.assert_allclose(jax.jit(dist.entropy)(params), entropy, atol=1e-5)
    action = dist.action(jnp.asarray([2, 1, 3, 5]))
    np.testing.assert_array_equal(action, [[2, 8], [2, 5]])


def test_entries_of_a_multi_categorical_are_drawn_independently() -> None:
    dist = MultiCategorical(spaces.MultiDiscrete([2, 2], np.int32))
    raw = np.asarray(dist.sample(jnp.zeros((4000, 4)), jax.random.key(0)))
    assert abs(np.mean(raw[:, 0] == raw[:, 1]) - 0.5) < 0.05


def test_gaussian_is_that_of_distrax() -> None:
    dist = Gaussian(BOUNDED)
    params = random_params(dist, 11)
    mean, log_std = np.split(params, 2, axis=-1)
    oracle = distrax().MultivariateNormalDiag(mean, np.exp(log_std))
    raw = dist.sample(params, jax.random.key(0))
    np.testing.assert_allclose(dist.log_prob(params, raw), oracle.log_prob(raw), atol=1e-5)
    np.testing.assert_allclose(dist.mode(params), mean)


@pytest.mark.parametrize("std", [0.05, 0.5, 0.87, 2.0, 7.3])
@pytest.mark.parametrize("mean", [0.0, 0.7, -3.0])
def test_the_entropy_of_a_gaussian_is_that_of_the_action_that_is_played(std: float, mean: float):
    dist = Gaussian(MIXED)  # its second component is squashed
    params = jnp.concatenate([jnp.full(4, mean), jnp.full(4, np.log(std))])
    rng = np.random.default_rng(0)
    raw = mean + std * rng.standard_normal(400_000)
    of_raw = np.log(std) + 0.5 * np.log(2 * np.pi * np.e)
    slope = 2 * (np.log(2) - raw - np.logaddexp(0, -2 * raw))
    sampled = 4 * of_raw + slope.mean()
    assert dist.entropy(params) == pytest.approx(sampled, abs=0.03 + 0.01 * std)


def test_squashed_actions_have_most_entropy_at_a_deviation_below_one() -> None:
    dist = Gaussian(spaces.Box(-1, 1, (1,)))
    stds = np.geomspace(0.1, 7.0, 60)
    entropy = [float(dist.entropy(jnp.asarray([0.0, np.log(std)]))) for std in stds]
    assert 0.8 < stds[int(np.argmax(entropy))] < 0.95
    assert max(entropy) == pytest.approx(0.67, abs=0.02)


@pytest.mark.parametrize("log_std", [-9.0, -5.0, 2.0, 4.0])
def test_a_deviation_at_or_beyond_its_bound_comes_back(log_std: float) -> None:
    dist = Gaussian(spaces.Box(-np.inf, np.inf, (1,)))
    raw = jnp.asarray([0.0 if log_std > 0 else 1.0])  # likelier with a deviation within the bounds

    def loss(log_std: jax.Array) -> jax.Array:
        return -dist.log_prob(jnp.stack([0.0, log_std]), raw)

    inward = -np.sign(log_std)
    assert -np.sign(jax.grad(loss)(log_std)) == inward
    assert jax.grad(lambda x: -loss(x))(log_std) == 0, "and is not pushed further out"


def test_a_first_deviation_beyond_its_bounds_is_refused() -> None:
    for std in (10.0, 0.001):
        with pytest.raises(UsageError, match=r"initial_std=.* from 0\.00673.* to 7"):
            PPOConfig(initial_std=std)


def test_only_bounds_that_nobody_means_count_as_none() -> None:
    dist = Gaussian(spaces.Box(np.float64([0, 0]), np.float64([1e8, 1e-9]), dtype=np.float64))
    np.testing.assert_allclose(dist.action(jnp.zeros(2)), [5e7, 5e-10], rtol=1e-6)
    largest = float(np.finfo(np.float32).max)
    for low, high in ((-1e30, 1e30), (-largest, largest), (-2.2e-308, 2.2e-308)):
        space = spaces.Box(np.float64([low]), np.float64([high]), dtype=np.float64)
        assert not Gaussian(space).squashing._bounded.any()


def test_squashing_meets_both_bounds_and_the_middle() -> None:
    dist = Gaussian(BOUNDED)
    for raw, expected in ((-50.0, [-2, 0, 1]), (0.0, [0, 0.05, 5]), (50.0, [2, 0.1, 9])):
        np.testing.assert_allclose(dist.action(jnp.full(3, raw)), expected, rtol=1e-6)


def test_unbounded_and_absurdly_bounded_components_are_not_squashed() -> None:
    action = Gaussian(MIXED).action(jnp.asarray([3.0, 3.0, -3.0, 3.0]))
    np.testing.assert_allclose(action, [[3.0, np.tanh(3.0)], [0.0, 3.0]], rtol=1e-6)


def test_float64_bounds_are_not_exceeded_in_float32() -> None:
    space = spaces.Box(np.float64([-0.3, 0.1]), np.float64([0.7, 0.9]), dtype=np.float64)
    dist = Gaussian(space)
    for raw in (-1e3, 1e3):
        action = np.asarray(dist.action(jnp.full(2, raw))).astype(np.float64)
        assert np.all(space.low <= action) and np.all(action <= space.high)


def test_squashed_gaussian_is_that_of_distrax() -> None:
    dist = SquashedGaussian(BOUNDED)
    params = 0.3 * random_params(dist, 11)  # distrax inverts tanh, and 1 has no inverse
    mean, log_std = np.split(params, 2, axis=-1)
    tanh = distrax().Block(distrax().Tanh(), 1)
    oracle = distrax().Transformed(distrax().MultivariateNormalDiag(mean, np.exp(log_std)), tanh)
    raw = dist.sample(params, jax.random.key(0))
    expected = oracle.log_prob(dist.squashing.unit(raw))
    np.testing.assert_allclose(dist.log_prob(params, raw), expected, atol=1e-3)
    np.testing.assert_allclose(dist.mode(params), mean)


def test_log_density_of_a_squashed_action_is_finite_at_the_bounds() -> None:
    dist = SquashedGaussian(BOUNDED)
    raw = jnp.full(3, 40.0)
    slope = 3 * 2 * (np.log(2) - 40)
    wide = jnp.asarray([40.0] * 3 + [0.0] * 3)
    expected = -1.5 * np.log(2 * np.pi) - slope
    np.testing.assert_allclose(dist.log_prob(wide, raw), expected, rtol=1e-6)


def test_unbounded_components_keep_the_density_of_the_gaussian() -> None:
    params, raw = jnp.zeros(8), jnp.asarray([0.3, 0.4, -0.5, 0.6])
    squashed = SquashedGaussian(MIXED).log_prob(params, raw)
    slope = np.log(1 - np.tanh(0.4) ** 2)
    np.testing.assert_allclose(squashed, Gaussian(MIXED).log_prob(params, raw) - slope, rtol=1e-6)


def test_unit_actions_come_back_from_the_actions_of_the_environment() -> None:
    squashing = SquashedGaussian(BOUNDED).squashing
    unit = jnp.asarray([[-1.0, 0.25, 0.5], [1.0, 0.0, -0.75]])
    action = squashing.action(unit)
    np.testing.assert_allclose(action[0], [-2.0, 0.0625, 7.0], rtol=1e-6)
    np.testing.assert_allclose(squashing.unit_of(action), unit, atol=1e-6)
    clipped = squashing.clip(jnp.asarray([[-1.5, 0.0, 7.0]]))
    np.testing.assert_array_equal(clipped, [[-1.0, 0.0, 1.0]])
