"""Values learned on probe environments; what agents do there is in ``test_suite``."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import sebulba
from sebulba.agents.configs import (
    ImpalaConfig,
    OptimizerConfig,
    TorsoConfig,
    make_agent,
)
from tests.support import probes

TORSO = TorsoConfig(hidden_sizes=(16,))
OPTIMIZER = OptimizerConfig("adam", max_grad_norm=10.0)
IMPALA = {
    "learning_rate": 1e-2,
    "discount": 0.5,
    "entropy_coefficient": 0.0,
    "torso": TORSO,
    "optimizer": OPTIMIZER,
}


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


@pytest.mark.slow
def test_learns_a_constant_value() -> None:
    trained = Trained(probes.ConstantValue, ImpalaConfig(**IMPALA))
    np.testing.assert_allclose(trained.values(1.0), [1.0], atol=0.1)


def test_learns_a_value_that_depends_on_the_observation() -> None:
    trained = Trained(probes.ObservationValue, ImpalaConfig(**IMPALA))
    np.testing.assert_allclose(trained.values(1.0, -1.0), [1.0, -1.0], atol=0.1)


@pytest.mark.slow
def test_discounts_what_comes_later() -> None:
    trained = Trained(probes.Discounting, ImpalaConfig(**IMPALA))
    np.testing.assert_allclose(trained.values(1.0, -1.0), [0.5, 1.0], atol=0.1)
