"""What the tests of the loop share."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import sebulba
from sebulba.checkpoints.checkpointer import Checkpointer
from sebulba.support.trees import host_copy
from tests.support.tiny import CountingEnv, TinyAgent, TinyConfig


def inferencer_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("inferencer-")]


def make_tiny_loop(env: Any = CountingEnv, num_envs: int = 4, **options: Any) -> Any:
    """Return (loop, agent) of the tiny agent on ``env``."""
    config = options.pop("config", TinyConfig())
    agent = options.pop("agent_class", TinyAgent)(sebulba.env_spec(env), config)
    options = {"inference_devices": [0], "update_devices": [0]} | options
    return sebulba.GymnasiumLoop(env, agent, num_envs, **options), agent


def run_in_lockstep(
    folder: Path,
    factory: Any,
    agent: Any,
    *num_cycles: int,
    num_envs: int = 4,
    resume: bool = False,
    after_each: Callable[[], None] = lambda: None,
) -> tuple[Any, Any, Any]:
    """Train one Inferencer, with checkpoints in ``folder``, for runs of so many cycles.

    Returns:
      The state, the last result, and the notes of the resumption.
    """
    with (
        Checkpointer(folder, every_updates=1 << 40) as checkpointer,
        sebulba.GymnasiumLoop(
            factory,
            agent,
            num_envs=num_envs,
            schedule="lockstep",
            num_inferencers_per_device=1,
            inference_devices=[0],
            update_devices=[0],
            checkpointer=checkpointer,
        ) as loop,
    ):
        saved = checkpointer.load_newest() if resume else None
        state = loop.restore(saved) if saved else loop.new_state(0, steps_per_cycle=8)
        for number in num_cycles:
            result = loop.run(state, num_cycles=number, steps_per_cycle=8)
            state = result.state
            after_each()
        return host_copy(state), result, loop.resume_notes


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
