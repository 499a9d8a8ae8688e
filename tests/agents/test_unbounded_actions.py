"""SAC and DDPG where a component of the action lacks a bound: what critics see, what is learned."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sebulba.agents.configs import (
    DDPGConfig,
    ReplayConfig,
    SACConfig,
    TargetConfig,
    TorsoConfig,
    make_agent,
)
from sebulba.agents.kernels.squashing import Squashing
from sebulba.support.files import dataclass_from_json
from sebulba.types import EnvSpec
from tests.support import probes
from tests.support.actor_critic import Trained, spaces

INF = np.inf
MIXED = spaces.Box(
    np.float32([-INF, 0, 3, -INF, -2, -1e30]), np.float32([INF, INF, 1e30, -1, 6, 1e30])
)
"""No bound, lower ones, an upper one, two bounds, and two that nobody means."""
RAW_NUMBERS = jnp.tile(jnp.linspace(-60.0, 60.0, 241)[:, None], (1, 6))


@pytest.mark.parametrize("config", [SACConfig(), DDPGConfig()], ids=["sac", "ddpg"])
def test_critics_see_of_an_action_what_the_environment_gets(config: Any) -> None:
    agent = make_agent(EnvSpec(spaces.Box(-1, 1, (3,)), MIXED), config)
    unit = agent.squashing.unit(RAW_NUMBERS)
    action = agent.squashing.action(unit)
    assert np.all(np.isfinite(action)) and MIXED.contains(np.asarray(action[0]))
    np.testing.assert_allclose(agent.squashing.unit_of(action), unit, rtol=1e-4, atol=1e-5)


def test_policies_begin_at_sizes_of_one_and_reach_large_ones() -> None:
    squashing = Squashing(MIXED, soft=True)

    def action(raw: float) -> np.ndarray:
        return np.asarray(squashing.action(squashing.unit(jnp.full(6, raw))))

    np.testing.assert_allclose(action(0.0), [0, 0.693, 3.693, -1.693, 2, 0], atol=1e-3)
    np.testing.assert_allclose(action(30.0), [30, 30, 33, -1, 6, 30], rtol=1e-5)
    np.testing.assert_allclose(action(-30.0), [-30, 0, 3, -31, -2, -30], atol=1e-5)


def test_the_slope_is_the_derivative_of_the_unit_action() -> None:
    squashing = Squashing(MIXED, soft=True)
    raw = jnp.asarray([0.7, -2.0, 5.0, 0.1, -0.4, 11.0])
    expected = jnp.log(jnp.diag(jax.jacobian(squashing.unit)(raw)))
    np.testing.assert_allclose(squashing.log_slope(raw), expected, rtol=1e-4, atol=1e-5)


def test_random_actions_and_noise_stay_in_the_range() -> None:
    squashing = Squashing(MIXED, soft=True)
    action = np.asarray(squashing.action(squashing.at_random(jax.random.key(0), 10_000)))
    np.testing.assert_allclose(action.min(0), [-6, 0, 3, -13.2, -2, -6], atol=0.2)
    np.testing.assert_allclose(action.max(0), [6, 12.2, 15.2, -1, 6, 6], atol=0.2)
    clipped = np.asarray(squashing.clip(jnp.full(6, 1e9)))
    np.testing.assert_allclose(clipped[:5], [1e9, 1e9, 1e9, 0, 1])


def test_two_bounds_are_as_without_soft_bounds() -> None:
    space = spaces.Box(np.float32([-2, 0]), np.float32([2, 8]))
    plain, other = Squashing(space), Squashing(space, soft=True)
    raw = RAW_NUMBERS[:, :2]

    def program(squashing: Squashing) -> str:
        def all_of_it(raw: jax.Array) -> Any:
            unit = squashing.unit(raw)
            action = squashing.action(squashing.clip(unit))
            return action, squashing.unit_of(action), squashing.log_slope(raw)

        return str(jax.make_jaxpr(all_of_it)(raw))

    assert program(plain) == program(other)


@pytest.mark.parametrize("config", [SACConfig(), DDPGConfig()], ids=["sac", "ddpg"])
def test_a_record_from_before_soft_bounds_clips(config: Any) -> None:
    record = dataclasses.asdict(config)
    assert dataclass_from_json(type(config), record) == config
    del record["single_bounds"]
    assert dataclass_from_json(type(config), record).single_bounds == "clipped"
    assert dataclass_from_json(type(config), {}) == config


class Thirty(probes.ContinuousTarget):
    """The best action is 45 at one observation and 15 at the other."""

    action_space = spaces.Box(0, INF, (1,), np.float32)

    def reward(self, action: Any) -> float:
        return -abs(float(action[0]) / 30 - 1 - 0.5 * self._sign)


class ThirtyOrLess(Thirty):
    """The best action is 30 or -30."""

    action_space = spaces.Box(-INF, INF, (1,), np.float32)

    def reward(self, action: Any) -> float:
        return -abs(float(action[0]) / 30 - self._sign)


SMALL: Any = {
    "learning_rate": 1e-2,
    "critic_learning_rate": 1e-2,
    "discount": 0.5,
    "random_env_steps": 400,
    "torso": TorsoConfig(hidden_sizes=(32,), activation="relu"),
    "replay": ReplayConfig(capacity=4000, batch_size=64, updates_per_cycle=8, warm_up_cycles=10),
    "target": TargetConfig(rate=0.1),
}


@pytest.mark.slow
@pytest.mark.parametrize(("probe", "best"), [(Thirty, [45, 15]), (ThirtyOrLess, [30, -30])])
def test_sac_finds_best_actions_of_thirty(probe: Any, best: list[float]) -> None:
    trained = Trained(probe, SACConfig(**SMALL), 100)
    np.testing.assert_allclose(trained.action(1.0, -1.0), best, rtol=0.35)
