"""A stepped cycle with plain Python bookkeeping, to measure what jitting and donating it gains."""

from __future__ import annotations

import threading
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from sebulba.errors import EnvError
from sebulba.inference.cycle import (
    CyclePrograms,
    env_step_of,
    info_columns,
    no_action,
)
from sebulba.inference.episodes import EpisodeStatistics
from sebulba.metrics.timer import PhaseTimer
from sebulba.transport.item import Item
from sebulba.types import EnvAdapter, EnvStep, PyTree, Trajectory


class PlainCycle:
    """Acts by the same jitted policy without donation, and stacks lists of rows at the end."""

    kind = "plain"

    def __init__(
        self, env: EnvAdapter, programs: CyclePrograms, device: jax.Device, timer: PhaseTimer
    ) -> None:
        """Make the cycle; it takes the arguments of ``SteppedCycle``."""
        self._env = env
        self._device = device
        self._timer = timer
        self._env_step: EnvStep | None = None
        self._statistics = EpisodeStatistics(env.num_envs)
        self.use(programs)

    def use(self, programs: CyclePrograms) -> None:
        """Use other programs from the next cycle on."""
        self._length = programs.run.steps_per_cycle
        self._act: Callable = jax.jit(programs.agent.act)

    def reset(self) -> None:
        """Begin new episodes."""
        prev_action = jax.device_put(no_action(self._env), self._device)
        self._env_step = env_step_of(self._env.reset(), prev_action)
        self._statistics = EpisodeStatistics(self._env.num_envs)

    def position(self) -> str:
        """Return why there is no position."""
        return "a plain cycle exists to be measured"

    def put_back(self, position: bytes) -> None:
        """Raise EnvError."""
        raise EnvError(self.position())

    def run(
        self, networks: PyTree, step_state: PyTree, stop: threading.Event
    ) -> tuple[Item | None, PyTree]:
        """Run one cycle; see ``Cycle.run``."""
        env_step, initial = self._env_step, step_state
        assert env_step is not None, "reset comes first"
        env_steps, outputs, rows = [env_step], [], []
        for _ in range(self._length):
            if stop.is_set():
                self._env_step = env_step
                return None, step_state
            with self._timer.phase("act"):
                output, step_state = self._act(networks, step_state, env_step)
                action = np.asarray(output.action)
            with self._timer.phase("env_step"):
                env_output = self._env.step(action)
            env_step = env_step_of(env_output, output.action)
            env_steps.append(env_step)
            outputs.append(output)
            rows.append(env_output)
        self._env_step = env_step
        with self._timer.phase("finish"):
            stacked = jax.tree.map(lambda *x: jnp.stack(x), *env_steps)
            actions, extras = jax.tree.map(lambda *x: jnp.stack(x), *outputs)
            columns = zip(
                *(
                    info_columns(row.unclipped_reward, row.episode_end, env_step, ())
                    for row, env_step in zip(rows, env_steps[1:], strict=True)
                ),
                strict=True,
            )
            infos = self._statistics.add(*map(np.stack, columns))
        return Item(Trajectory(stacked, actions, extras), initial, step_state, infos), step_state
