"""SAC: its loss and gradients by hand, its temperature, and what it learns on probes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sebulba.agents.configs import SACConfig, TorsoConfig
from sebulba.agents.off_policy import Opt
from sebulba.agents.sac import SAC
from tests.actor_critic import UNBOUNDED, GivenReplay, linear


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
