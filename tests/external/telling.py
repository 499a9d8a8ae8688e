"""Training on clients whose rows say whose they are, and a check of what is learned from."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from gymnasium import spaces
from sebulba_external.seats import Seats

import sebulba
from sebulba.agents.configs import ImpalaConfig
from sebulba.agents.impala import Impala

B, T = 4, 8
ONE = {"num_inferencers_per_device": 1, "inference_devices": [0], "update_devices": [0]}
SPACE = spaces.Box(-1.0, 1e6, (3,), np.float32)
ACTIONS = spaces.Discrete(5, start=2)
SPEC = sebulba.EnvSpec(SPACE, ACTIONS)


def reward_of(observation: np.ndarray, action: int) -> float:
    return float(observation[0] + 0.5 * observation[2] - action)


class Checker:
    """Checks every transition that the update is given."""

    def __init__(self, num_steps: int = T) -> None:
        self.num_steps = num_steps
        self.valid = self.ends = 0
        self.clients: set[int] = set()

    def __call__(self, trajectory: Any, infos: Any) -> None:
        rows, actions = trajectory.env_step, np.asarray(trajectory.action)
        obs, valid = np.asarray(rows.obs), np.asarray(rows.valid[1:])
        assert obs.shape == (self.num_steps + 1, B, 3)
        before, after = obs[:-1][valid], obs[1:][valid]
        chosen = actions[valid]
        assert np.array_equal(before[:, :2], after[:, :2])
        assert np.array_equal(before[:, 2] + 1, after[:, 2])
        expected = [reward_of(row, action) for row, action in zip(before, chosen, strict=True)]
        assert np.array_equal(np.asarray(rows.reward)[1:][valid], np.asarray(expected, np.float32))
        assert np.array_equal(np.asarray(rows.prev_action)[1:][valid], chosen)
        first = np.asarray(rows.is_first)
        assert not obs[first][:, 2].any()
        # An episode that nobody ended was cut at its last observation.
        over = np.asarray(rows.terminated | rows.truncated)
        assert (over | first)[:-1][np.asarray(rows.inserted)[1:]].all()
        self.valid += int(valid.sum())
        self.ends += int(infos.episode_end.sum())
        self.clients |= set(obs[..., 0].astype(int).flat)


@contextlib.contextmanager
def training(
    address: str, config: Any = None, agent: Callable[..., Any] = Impala, **changes: Any
) -> Iterator[tuple[Seats, sebulba.GymnasiumLoop]]:
    config = config or ImpalaConfig(learning_rate=1e-3)
    with (
        Seats(SPEC, address) as given,
        sebulba.GymnasiumLoop(
            given, agent(given.spec, config), num_envs=B, **ONE | changes
        ) as loop,
    ):
        yield given, loop


def in_threads(work: Callable[..., None], *arguments: tuple) -> list[threading.Thread]:
    threads = [threading.Thread(target=work, args=args, daemon=True) for args in arguments]
    for thread in threads:
        thread.start()
    return threads
