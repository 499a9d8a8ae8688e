"""What the tests of the loop share."""

from __future__ import annotations

import functools
import threading
from typing import Any

import jax
import numpy as np

import sebulba
from tests.support.tiny import CountingEnv, TinyAgent, TinyConfig


def inferencer_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("inferencer-")]


def make_tiny_loop(env: Any = CountingEnv, num_envs: int = 4, **options: Any) -> Any:
    """Return (loop, agent) of the tiny agent on ``env``."""
    config = options.pop("config", TinyConfig())
    agent = options.pop("agent_class", TinyAgent)(sebulba.env_spec(env), config)
    options = {"inference_devices": [0], "update_devices": [0]} | options
    return sebulba.GymnasiumLoop(env, agent, num_envs, **options), agent


def counting(**kwargs: Any) -> Any:
    return functools.partial(CountingEnv, **kwargs)


class Recorder:
    """An ``observe_cycle`` that keeps host copies of every trajectory."""

    def __init__(self) -> None:
        self.trajectories: list[Any] = []
        self.step_infos: list[Any] = []

    def __call__(self, trajectory: Any, step_infos: Any) -> None:
        self.trajectories.append(jax.tree.map(lambda x: np.array(x, copy=True), trajectory))
        self.step_infos.append(step_infos)

    def of(self, inferencer: int) -> list[Any]:
        return [t for t in self.trajectories if int(t.inferencer) == inferencer]

    def joined(self, inferencer: int) -> tuple[Any, Any]:
        """Return (env_step [N*T+1, B], action [N*T, B]) of one Inferencer's trajectories."""
        trajectories = self.of(inferencer)
        rows = [jax.tree.map(lambda x: x[:-1], t.env_step) for t in trajectories]
        rows.append(jax.tree.map(lambda x: x[-1:], trajectories[-1].env_step))
        env_step = jax.tree.map(lambda *x: np.concatenate(x), *rows)
        return env_step, np.concatenate([t.action for t in trajectories])


def leaves_equal(a: Any, b: Any) -> bool:
    return all(
        np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )
