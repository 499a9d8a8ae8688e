"""A run whose inference and updates are on different devices learns what a run on one learns."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

import sebulba
from sebulba.agents.configs import TorsoConfig, make_agent
from sebulba.configs.presets import PRESETS
from tests.loops.test_cycles import OnAccelerator
from tests.support.loop_helpers import leaves_equal

T, NUM_ENVS, CYCLES = 8, 4, 12


def trained(preset, inference, update, cycle="fused", cycles=CYCLES, minibatches=2):
    """Return the networks and optimizer state after some cycles in lockstep."""
    config = PRESETS[preset].make().agent
    changes = {"torso": TorsoConfig(hidden_sizes=(16,))}
    if hasattr(config, "replay"):
        changes["replay"] = dataclasses.replace(
            config.replay, capacity=2048, batch_size=16, warm_up_cycles=2, updates_per_cycle=2
        )
    if hasattr(config, "minibatches"):
        changes["minibatches"] = minibatches
    agent = make_agent(sebulba.env_spec("CartPole-v1"), dataclasses.replace(config, **changes))
    with sebulba.GymnasiumLoop(
        "CartPole-v1",
        agent,
        NUM_ENVS,
        schedule="lockstep",
        inference_devices=inference,
        update_devices=update,
        num_inferencers_per_device=1,
        cycle=cycle,
    ) as loop:
        result = loop.run(loop.new_state(3, T), cycles, T)
    return jax.device_get((result.state.networks, result.state.opt)), result.counters.updates


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["cartpole", "cartpole-ppo", "cartpole-dqn"])
def test_inference_on_one_device_and_updates_on_another_have_the_bits_of_one(preset):
    one, updates = trained(preset, ["cpu:0"], ["cpu:0"])
    hybrid, hybrid_updates = trained(preset, ["cpu:0"], ["cpu:1"])
    assert updates == hybrid_updates > 5
    assert leaves_equal(one, hybrid)
    moved, _ = trained(preset, ["cpu:2"], ["cpu:1"])
    assert leaves_equal(one, moved)


@pytest.mark.slow
def test_stepped_on_a_pretended_accelerator_has_the_bits_of_stepped_on_a_cpu():
    here, _ = trained("cartpole", ["cpu:0"], ["cpu:0"], "stepped")
    there, _ = trained("cartpole", ["cpu:1"], ["cpu:2"], OnAccelerator)
    assert leaves_equal(here, there)


@pytest.mark.slow
def test_two_update_devices_differ_by_the_order_of_sums_only():
    # Two cycles act before anything is learned; after them, other bits choose other actions. Each
    # device draws minibatches of its own columns, so there is one.
    options = {"cycles": 2, "minibatches": 1}
    one, _ = trained("cartpole", ["cpu:0"], ["cpu:0"], **options)
    two, updates = trained("cartpole", ["cpu:0"], ["cpu:1", "cpu:2"], **options)
    assert updates == 2

    def close(x, y):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)

    jax.tree.map(close, one[0], two[0])
