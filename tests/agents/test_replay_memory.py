"""The replay is in memory once while a run goes on; a checkpoint has what it was filled with."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import sebulba
from sebulba.agent import LEARNER_AXIS
from sebulba.agents.configs import DQNConfig, ReplayConfig, TorsoConfig
from sebulba.agents.dqn import DQN
from sebulba.checkpoints.checkpointer import Checkpointer
from sebulba.commands.cli import main
from sebulba.loops.snapshot_trees import copy_of_filled
from sebulba.metrics.episode_log import EpisodeLog
from sebulba.support.trees import num_bytes
from sebulba.tools.bench.memory_use import device_bytes
from sebulba.transport.mesh import learner_mesh
from tests.support.loop_helpers import leaves_equal

REPLAY = ReplayConfig(capacity=100_000, batch_size=16, warm_up_cycles=2)


@pytest.mark.slow
def test_a_run_from_python_holds_its_replay_once():
    agent = DQN(
        sebulba.env_spec("CartPole-v1"),
        DQNConfig(torso=TorsoConfig(hidden_sizes=(8,)), replay=REPLAY),
    )
    seen = []
    with sebulba.GymnasiumLoop(
        "CartPole-v1",
        agent,
        8,
        inference_devices=[0],
        update_devices=[0],
        observe_cycle=lambda *_: seen.append(device_bytes()),
    ) as loop:
        before = device_bytes()
        shape = jax.eval_shape(lambda key: loop.new_state(key, 8), jax.random.key(0))
        replay = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shape.experience))
        loop.run(loop.new_state(0, 8), 6, 8)
    print("replay", replay, "live", max(seen) - before)
    assert replay > 3e6 and len(seen) == 6
    assert max(seen) - before < 1.3 * replay


@pytest.mark.slow
def test_a_run_from_the_command_line_holds_its_replay_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen = []
    observe = EpisodeLog.observe

    def noted(log, *arguments):
        seen.append(device_bytes())
        return observe(log, *arguments)

    monkeypatch.setattr(EpisodeLog, "observe", noted)
    before = device_bytes()
    words = ["--total-env-steps", "2000", "--agent.replay.capacity", "200000"]
    assert main(["train", "cartpole-dqn", *words]) == 0
    print("live", max(seen) - before)
    replay = 200_000 * 33  # bytes of an env step: observation, action, reward, flags, weight
    assert max(seen) - before < 1.4 * replay


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_a_checkpoint_has_what_a_replay_was_filled_with_and_restores_the_rest(tmp_path, devices):
    config = DQNConfig(
        torso=TorsoConfig(hidden_sizes=(8,)), replay=dataclasses.replace(REPLAY, capacity=1_000_000)
    )
    agent = DQN(sebulba.env_spec("CartPole-v1"), config)

    def new_loop(checkpointer=None):
        return sebulba.GymnasiumLoop(
            "CartPole-v1",
            agent,
            8,
            inference_devices=[0],
            update_devices=range(devices),
            checkpointer=checkpointer,
        )

    with Checkpointer(tmp_path) as checkpointer:
        with new_loop(checkpointer) as loop:
            end = loop.run(loop.new_state(0, 8), 6, 8).state.experience
        checkpoint = checkpointer.load_newest()
    obs = checkpoint.snapshot.arrays["experience/rows/obs"]
    size = sum(array.nbytes for array in checkpoint.snapshot.arrays.values())
    print("rows", obs.shape[1], "of", end.rows.obs.shape[1], "bytes", size, "of", num_bytes(end))
    assert obs.shape[1] < end.rows.obs.shape[1] / 10
    assert size < num_bytes(end) / 5
    with new_loop() as loop:
        assert leaves_equal(end, loop.restore(checkpoint).experience)


@pytest.mark.parametrize("devices", [1, 4])
def test_what_is_copied_of_a_replay_is_exact_and_does_not_hold_it(devices):
    sharding = NamedSharding(learner_mesh(jax.devices()[:devices]), P(None, None, LEARNER_AXIS))
    write = jax.jit(
        lambda x: x.at[1, 100, 3, 5].set(-0.0), donate_argnums=0, out_shardings=sharding
    )

    def places(x):
        return [shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards]

    replay = write(jax.device_put(jnp.zeros((2, 4096, 8, 64)), sharding))
    copy, before = copy_of_filled(replay), places(replay)
    assert 100 < copy.shape[1] < 200 and np.signbit(copy[1, 100, 3, 5])
    assert places(write(replay)) == before, "it is donated still"
