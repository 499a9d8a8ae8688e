"""Each kernel beside the equation of its paper, in NumPy and float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sebulba_offline import kernels

N, K, C = 7, 3, 2


def draws(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, shape).astype(np.float32)


@pytest.mark.parametrize("expectile", [0.5, 0.7, 0.9])
def test_the_expectile_loss_is_equation_4_of_iql(expectile: float) -> None:
    u = draws(0, N)
    wide = u.astype(np.float64)
    expected = np.abs(expectile - (wide < 0)) * wide**2
    np.testing.assert_allclose(kernels.expectile_loss(u, expectile), expected, rtol=1e-6)


def test_the_minimum_of_the_expectile_loss_is_the_expectile() -> None:
    """With tau = 0.9, samples above the expectile pull nine times as hard as those below."""
    samples = np.random.default_rng(1).normal(size=4000)
    loss = jax.jit(jax.grad(lambda v: jnp.mean(kernels.expectile_loss(samples - v, 0.9))))
    value = 0.0
    for _ in range(300):
        value -= 0.5 * float(loss(value))
    above = np.maximum(samples - value, 0).sum()
    below = np.maximum(value - samples, 0).sum()
    assert 0.9 * above == pytest.approx(0.1 * below, rel=1e-3)


def test_the_weight_of_an_advantage_is_that_of_equation_7_up_to_its_bound() -> None:
    advantage = draws(2, N)
    expected = np.minimum(np.exp(3.0 * advantage.astype(np.float64)), 100.0)
    np.testing.assert_allclose(kernels.advantage_weight(advantage, 3.0, 100.0), expected, rtol=1e-5)
    huge = kernels.advantage_weight(np.float32([1e30, -1e30]), 3.0, 100.0)
    np.testing.assert_allclose(huge, [100.0, 0.0], rtol=1e-5)
    gradient = jax.grad(lambda a: kernels.advantage_weight(a, 3.0, 100.0).sum())(advantage)
    assert not gradient.any()


def test_the_log_density_is_that_of_independent_gaussians() -> None:
    action, mean, log_std = draws(3, N, K), draws(4, N, K), draws(5, N, K) / 4
    std = np.exp(log_std.astype(np.float64))
    density = np.exp(-0.5 * ((action - mean) / std) ** 2) / (std * np.sqrt(2 * np.pi))
    expected = np.log(density).sum(axis=1)
    got = kernels.gaussian_log_prob(action, mean, log_std)
    np.testing.assert_allclose(got, expected, rtol=1e-4)


def test_the_target_of_rebrac_is_equation_4() -> None:
    values, action, of_data = draws(6, C, N), draws(7, N, K), draws(8, N, K)
    apart = ((action - of_data).astype(np.float64) ** 2).mean(axis=1)
    np.testing.assert_allclose(kernels.distance(action, of_data), apart, rtol=1e-5)
    got = kernels.penalised_value(values, apart.astype(np.float32), 0.3)
    np.testing.assert_allclose(got, values.min(axis=0) - 0.3 * apart, rtol=1e-4, atol=1e-5)


def test_the_loss_of_the_actor_is_that_of_td3_bc_over_alpha() -> None:
    value, apart, alpha = draws(9, N), np.abs(draws(10, N)), 2.5
    size = np.abs(value.astype(np.float64)).mean()
    expected = -(alpha / size * value - apart) / alpha  # equations 3 and 5
    got = kernels.regularised_actor_loss(value, apart, 1 / alpha, np.float32(size))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)

    def of_size(size: jax.Array) -> jax.Array:
        return kernels.regularised_actor_loss(value, apart, 0.4, size).sum()

    assert jax.grad(of_size)(jnp.float32(2.0)) == 0
