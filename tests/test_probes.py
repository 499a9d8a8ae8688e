"""Agents learn the probe environments: each failure points at one capability."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import sebulba
from sebulba.agents.configs import (
    ImpalaConfig,
    OptimizerConfig,
    SimplePolicyGradientConfig,
    TorsoConfig,
)
from sebulba.agents.registry import make_agent
from tests import probes

TORSO = TorsoConfig(hidden_sizes=(16,))
OPTIMIZER = OptimizerConfig("adam", max_grad_norm=10.0)
IMPALA = {
    "learning_rate": 1e-2,
    "discount": 0.5,
    "entropy_coefficient": 0.0,
    "torso": TORSO,
    "optimizer": OPTIMIZER,
}
REINFORCE = SimplePolicyGradientConfig(
    learning_rate=1e-2, discount=0.5, torso=TORSO, optimizer=OPTIMIZER
)


class Trained:
    """An agent after some cycles on a probe."""

    def __init__(self, probe: Any, config: Any, num_cycles: int = 150) -> None:
        self.agent: Any = make_agent(sebulba.env_spec(probe), config)
        with sebulba.GymnasiumLoop(
            probe, self.agent, 16, num_inferencers_per_device=0,
            inference_devices=[0], update_devices=[0],
        ) as loop:  # fmt: skip
            result = loop.run(loop.new_state(0, 5), num_cycles, 5)
        self.networks = jax.device_get(result.acting_networks)

    def output(self, *signs: float) -> Any:
        """Return the network's output for each observation as the first of an episode."""
        obs = np.array(signs, np.float32)[None, :, None]
        is_first = np.ones((1, len(signs)), bool)
        core = self.agent.new_step_state(
            jax.random.key(0), sebulba.RunSpec(len(signs), 1, 5, 1), 0
        ).core
        return self.agent.evaluate(self.networks, obs, core, is_first)

    def values(self, *signs: float) -> np.ndarray:
        return np.asarray(self.output(*signs).value[0])

    def probability_of_1(self, *signs: float) -> np.ndarray:
        return np.asarray(jax.nn.softmax(self.output(*signs).params[0])[:, 1])


def test_learns_a_constant_value() -> None:
    trained = Trained(probes.ConstantValue, ImpalaConfig(**IMPALA))
    np.testing.assert_allclose(trained.values(1.0), [1.0], atol=0.1)


def test_learns_a_value_that_depends_on_the_observation() -> None:
    trained = Trained(probes.ObservationValue, ImpalaConfig(**IMPALA))
    np.testing.assert_allclose(trained.values(1.0, -1.0), [1.0, -1.0], atol=0.1)


def test_discounts_what_comes_later() -> None:
    trained = Trained(probes.Discounting, ImpalaConfig(**IMPALA))
    np.testing.assert_allclose(trained.values(1.0, -1.0), [0.5, 1.0], atol=0.1)


@pytest.mark.parametrize("config", [ImpalaConfig(**IMPALA), REINFORCE], ids=["impala", "reinforce"])
def test_prefers_the_action_that_is_worth_more(config: Any) -> None:
    trained = Trained(probes.ActionEffect, config)
    assert trained.probability_of_1(1.0) > 0.9


@pytest.mark.parametrize("config", [ImpalaConfig(**IMPALA), REINFORCE], ids=["impala", "reinforce"])
def test_chooses_actions_by_the_observation(config: Any) -> None:
    right, wrong = Trained(probes.ObservationAction, config).probability_of_1(1.0, -1.0)
    assert right > 0.9 and wrong < 0.1


@pytest.mark.parametrize("config", [ImpalaConfig(**IMPALA), REINFORCE], ids=["impala", "reinforce"])
def test_chooses_continuous_actions_by_the_observation(config: Any) -> None:
    trained = Trained(probes.ContinuousTarget, config, 300)
    mode = trained.agent.distribution.mode(trained.output(1.0, -1.0).params[0])
    action = trained.agent.distribution.action(mode)
    np.testing.assert_allclose(action[:, 0], [0.5, -0.5], atol=0.15)


def test_lstm_remembers_what_is_no_longer_observed() -> None:
    trained = Trained(probes.RememberedSign, ImpalaConfig(lstm_size=8, **IMPALA), 300)
    obs = np.array([[1.0, -1.0], [0.0, 0.0]], np.float32)[..., None]
    is_first = np.array([[True, True], [False, False]])
    core = trained.output(1.0, -1.0).core
    params = trained.agent.evaluate(trained.networks, obs, core, is_first).params[1]
    right, wrong = jax.nn.softmax(params)[:, 1]
    assert right > 0.9 and wrong < 0.1
