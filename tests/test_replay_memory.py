"""The replay is in memory once while a run goes on."""

from __future__ import annotations

import jax
import pytest

import sebulba
from sebulba.agents.configs import DQNConfig, ReplayConfig, TorsoConfig
from sebulba.agents.dqn import DQN
from sebulba.commands.cli import main
from sebulba.metrics.episode_log import EpisodeLog
from sebulba.tools.bench.memory_use import device_bytes

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
