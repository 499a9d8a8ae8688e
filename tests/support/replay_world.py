"""Experience whose cells say where they are from, and a plain model of what a replay keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from sebulba.agent import LEARNER_AXIS, TRAJECTORY_SPEC
from sebulba.types import EnvSpec, EnvStep, RunSpec, Trajectory

SPEC = EnvSpec(gymnasium.spaces.Box(-1, 1, (3,), np.float32), gymnasium.spaces.Discrete(7))


class Streams:
    """Endless experience of J Inferencers with B environments each, cut into trajectories.

    Even environments deliver ends in a row of their own (next-step reset), odd ones together with
    the reset observation. ``obs`` is (inferencer, environment, time).
    """

    def __init__(self, seed: int, run: RunSpec, num_cycles: int) -> None:
        rng = np.random.default_rng(seed)
        self.run = run
        shape = (run.num_inferencers, num_cycles * run.steps_per_cycle + 1, run.num_envs)
        ends = rng.random(shape) < 0.25
        ends[:, 0] = False
        same_step = np.broadcast_to(np.arange(shape[2]) % 2 == 1, shape)
        for t in range(1, shape[1]):  # no end in the row of a reset
            ends[:, t] &= ~(ends[:, t - 1] & ~same_step[:, t])
        after_end = np.roll(ends, 1, axis=1)
        after_end[:, 0] = True
        self.is_first = np.where(same_step, ends, after_end)
        self.is_first[:, 0] = True
        self.terminated = ends & (rng.random(shape) < 0.5)
        self.truncated = ends & ~self.terminated
        self.reward = rng.integers(-9, 10, shape).astype(np.float32)
        self.action = rng.integers(0, 7, shape).astype(np.int32)
        index = np.stack(np.meshgrid(*map(np.arange, shape), indexing="ij"), axis=-1)
        self.obs = index[..., [0, 2, 1]].astype(np.float32)

    def trajectory(self, inferencer: int, cycle: int) -> Trajectory:
        """Return the ``cycle``-th trajectory of an Inferencer."""
        steps = self.run.steps_per_cycle
        rows = np.arange(cycle * steps, (cycle + 1) * steps + 1)
        cut = lambda x: x[inferencer, rows]  # noqa: E731
        prev_action = np.where(rows[:, None] > 0, self.action[inferencer, rows - 1], 0)
        return Trajectory(
            env_step=EnvStep(
                cut(self.obs),
                prev_action,
                cut(self.reward),
                cut(self.terminated),
                cut(self.truncated),
                cut(self.is_first),
            ),
            action=cut(self.action)[:-1],
            extras={"time": cut(self.obs)[:-1, :, 2]},
            policy_version=np.int32(0),
            inferencer=np.int32(inferencer),
            cycle=np.int32(cycle),
        )

    def core(self, inferencer: int, cycle: int) -> np.ndarray:
        """Return a recurrent state that tells Inferencer, environment and time of row 0."""
        return 0.5 + self.obs[inferencer, cycle * self.run.steps_per_cycle]

    def orders(self, seed: int, num_cycles: int) -> list[tuple[int, int]]:
        """Return (inferencer, cycle) in the order of arrival; some are missing."""
        rng = np.random.default_rng(seed)
        arrivals = []
        left = [list(range(num_cycles)) for _ in range(self.run.num_inferencers)]
        while any(left):
            j = int(rng.integers(len(left)))
            if left[j]:
                arrivals.append((j, left[j].pop(0)))
        return [arrival for arrival in arrivals if rng.random() > 0.15]


class Kept:
    """The plain model of a store: per Inferencer a list of the newest S cycles that arrived."""

    def __init__(self, streams: Streams, num_places: int) -> None:
        self.streams = streams
        self.num_places = num_places
        self.arrived: list[list[int]] = [[] for _ in range(streams.run.num_inferencers)]

    def rows(self, inferencer: int) -> dict[int, int]:
        """Return where in the ring each time step is, of those that are kept."""
        steps, arrived = self.streams.run.steps_per_cycle, self.arrived[inferencer]
        newest = list(enumerate(arrived))[-self.num_places :]
        return {
            cycle * steps + t: (number % self.num_places) * steps + t
            for number, cycle in newest
            for t in range(steps)
        }

    def can_start(self, inferencer: int, rows_of_start: int, *, transitions: bool) -> np.ndarray:
        """Return what may be drawn, ``[R, B]``."""
        run, streams = self.streams.run, self.streams
        steps, where = run.steps_per_cycle, self.rows(inferencer)
        can = np.zeros((self.num_places * steps, run.num_envs), bool)
        for time, row in where.items():
            if not transitions and time % steps:
                continue
            can[row] = all(time + i in where for i in range(rows_of_start))
            if transitions and can[row].any():
                first = streams.is_first[inferencer, time + 1]
                can[row] = ~first | streams.terminated[inferencer, time + 1]
        return can


def mesh_of(num_devices: int) -> Mesh:
    """Return a mesh as the loop makes it."""
    return Mesh(np.array(jax.devices()[:num_devices]), (LEARNER_AXIS,))


def mapped(mesh: Mesh, function: Callable, in_specs: Any, out_specs: Any, **jit: Any) -> Callable:
    """Return ``function`` over the update devices, compiled."""
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False),
        **jit,
    )


def inserter(layout: Any, mesh: Mesh) -> Callable:
    """Return ``(replay, trajectory, core) -> replay``, donating the replay as the loop does."""
    in_specs = (layout.spec(), TRAJECTORY_SPEC, P(LEARNER_AXIS))
    return mapped(mesh, layout.insert, in_specs, layout.spec(), donate_argnums=0)
