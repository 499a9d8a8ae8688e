"""Agents that stress the contract from all ends go through every kind of loop."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sebulba
from sebulba import RunSpec
from sebulba.agents.configs import ImpalaConfig, SimplePolicyGradientConfig, TorsoConfig, make_agent
from tests.support import contract_agents
from tests.support.agent_driver import quick_state
from tests.support.loop_helpers import inferencer_threads, leaves_equal, make_tiny_loop

SMALL = TorsoConfig(hidden_sizes=(8,))

CONTRACT_AGENTS = {
    "minibatch": lambda spec: contract_agents.MinibatchAgent(
        spec, contract_agents.MinibatchConfig()
    ),
    "replay": lambda spec: contract_agents.RecurrentReplayAgent(
        spec, contract_agents.ReplayConfig()
    ),
    "target": lambda spec: contract_agents.TargetNetworkAgent(spec, contract_agents.TargetConfig()),
}
AGENTS = CONTRACT_AGENTS | {
    "impala lstm": lambda spec: make_agent(spec, ImpalaConfig(torso=SMALL, lstm_size=6)),
    "simple policy gradient": lambda spec: make_agent(
        spec, SimplePolicyGradientConfig(torso=SMALL)
    ),
}
NUM_CYCLES, T, B = 16, 6, 8
# Every Inferencer compiles a fused cycle of its own.
ONE_A_DEVICE = {"num_inferencers_per_device": 1}


def run(name, losses=None, **options):
    """Run an agent; the losses of windows in which there was an update go into ``losses``."""

    class Losses:
        def write(self, metrics):
            if losses is not None and metrics["loss"] is not None:
                losses.append(metrics["loss"])

    agent = AGENTS[name](sebulba.env_spec("CartPole-v1"))
    options = {"inference_devices": [0], "update_devices": [0], "seed": 1} | options
    options["metric_writer"] = Losses()
    with sebulba.GymnasiumLoop("CartPole-v1", agent, B, **options) as loop:
        devices = len(loop.update_devices)
        state = quick_state(agent, RunSpec(B, loop.num_inferencers, T, devices))
        return agent, loop.run(state, NUM_CYCLES, T)


def due(agent):
    return sum(agent.num_off_policy_optims_per_cycle(c) for c in range(1, NUM_CYCLES + 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", AGENTS)
@pytest.mark.parametrize(
    "options",
    [
        dict(schedule="async", cycle="stepped"),
        dict(schedule="async", cycle="fused", update_devices=[1, 2, 3, 4], **ONE_A_DEVICE),
        dict(
            schedule="lockstep",
            cycle="fused",
            inference_devices=[0, 1],
            update_devices=[2],
            **ONE_A_DEVICE,
        ),
        dict(schedule="async", cycle="stepped", num_inferencers_per_device=0),
    ],
    ids=["stepped", "fused to 4 devices", "lockstep from 2 devices", "inline"],
)
def test_every_agent_goes_through_every_loop(name, options):
    losses: list[float] = []
    agent, result = run(name, losses, **options)
    assert result.counters.cycles == NUM_CYCLES
    assert result.counters.updates == due(agent) > 0
    assert losses and np.isfinite(losses).all()
    assert not inferencer_threads()
    for leaf in jax.tree.leaves(result.state):
        assert not jnp.issubdtype(leaf.dtype, jnp.floating) or np.isfinite(leaf).all()
        if leaf.is_fully_replicated and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            shards = [np.asarray(shard.data) for shard in leaf.addressable_shards]
            for shard in shards[1:]:
                np.testing.assert_array_equal(shards[0], shard, "a P() leaf must be one value")


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTRACT_AGENTS)  # the others are asked in test_agents_suite
def test_every_agent_is_bit_reproducible_in_lockstep(name):
    first, second = (run(name, schedule="lockstep", cycle="stepped")[1] for _ in range(2))
    assert leaves_equal(first.state.networks, second.state.networks)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["replay", "target"])
def test_updates_below_one_per_cycle_publish_only_when_due(name):
    agent, result = run(name, cycle="stepped")
    publishing = sum(agent.num_off_policy_optims_per_cycle(c) > 0 for c in range(1, NUM_CYCLES + 1))
    assert result.counters.policy_version == publishing < NUM_CYCLES


@pytest.mark.slow
@pytest.mark.parametrize("cycle", ["stepped", "fused"])
def test_a_key_of_any_kind_makes_a_state_and_stays_of_its_kind(cycle):
    loop, _ = make_tiny_loop("CartPole-v1", cycle=cycle, **ONE_A_DEVICE)
    with loop:
        for impl in ("threefry2x32", "rbg", "threefry2x32"):
            state = loop.new_state(jax.random.key(3, impl=impl), 5)
            result = loop.run(state, 4, 5)
            for step_state in result.state.step:
                kinds = {
                    jax.random.key_impl(leaf)
                    for leaf in jax.tree.leaves(step_state)
                    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
                }
                assert kinds == {impl}
