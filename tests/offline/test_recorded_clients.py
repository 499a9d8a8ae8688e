"""Episodes of clients are recorded seat by seat, whichever place of a trajectory they fill."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sebulba_external.client import Client
from sebulba_offline.dataset import load
from sebulba_offline.recorder import Recorder

from sebulba.agents.configs import DQNConfig, ReplayConfig
from sebulba.agents.dqn import DQN
from sebulba.agents.impala import Impala
from tests.external.telling import SPEC, B, T, in_threads, reward_of, training

REPLAY = ReplayConfig(capacity=1024, batch_size=32, updates_per_cycle=1, warm_up_cycles=2)


def play(client: int, address: str, token: str, stop: threading.Event) -> None:
    """Play episodes whose rows say ``[client, episode, step]``; some end, are cut or break off."""
    rng = np.random.default_rng(client)
    episode = 0
    while not stop.is_set():
        with contextlib.suppress(OSError), Client(address, token) as seat:
            for _ in range(30):
                episode += 1
                length = int(rng.integers(1, 13))
                observation = np.array([client, episode, 0], np.float32)
                action = int(seat.begin(observation))
                for step in range(1, length + 1):
                    if stop.wait(client * 2e-4) or rng.random() < 0.02:
                        break  # the connection as well
                    reward = reward_of(observation, action)
                    observation = np.array([client, episode, step], np.float32)
                    if step == length:
                        seat.end(reward, observation, truncated=episode % 2 == 0)
                    else:
                        action = int(seat.step(reward, observation))
                else:
                    continue
                break


@pytest.mark.slow
@pytest.mark.parametrize("agent", [Impala, DQN])
def test_episodes_of_clients_are_whole(tmp_path: Path, agent: Any) -> None:
    config = DQNConfig(replay=REPLAY) if agent is DQN else None
    returns: list[float] = []
    stop = threading.Event()
    with Recorder(tmp_path / "data", SPEC) as recorder:

        def observe(trajectory: Any, infos: Any) -> None:
            recorder(trajectory, infos)
            returns.extend(infos.episode_returns)

        address = f"unix:{tmp_path}/s"
        with training(address, config, agent, observe_cycle=observe) as (given, loop):
            in_threads(play, *((k, given.address, given.token, stop) for k in range(B - 1)))
            loop.train(total_env_steps=4096, steps_per_cycle=T)
            stop.set()
            dropped = given.counts["columns_dropped"]
    dataset = load(tmp_path / "data")
    told, rows = dataset.episodes(), dataset.rows
    obs, acts = rows.obs, ~(rows.terminated | rows.truncated)
    before, after = obs[:-1][acts[:-1]], obs[1:][acts[:-1]]
    np.testing.assert_array_equal(before[:, :2], after[:, :2])
    np.testing.assert_array_equal(before[:, 2] + 1, after[:, 2])
    expected = [reward_of(*one) for one in zip(before, rows.action[acts], strict=True)]
    np.testing.assert_array_equal(rows.reward[1:][acts[:-1]], np.float32(expected))
    assert not obs[rows.is_first][:, 2].any()
    assert (obs[rows.terminated][:, 1] % 2 == 1).all()
    assert len({tuple(one) for one in obs[told.first]}) == len(told.first) > 200
    # A column that was dropped has the begin of at most one episode that ended in another.
    found = np.round(told.returns, 3).tolist()
    missing = [value for value in np.round(returns, 3).tolist() if value not in found]
    assert len(missing) <= dropped and len(returns) > 200
    assert told.lengths.sum() > 2500
