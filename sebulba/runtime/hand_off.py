"""The hand-off: what a cycle made, placed on the update devices."""

from __future__ import annotations

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sebulba.agent import LEARNER_AXIS, Agent
from sebulba.runtime.copies import is_on
from sebulba.types import PyTree, Trajectory


class HandOffToMesh:
    """Places what a cycle made on the update devices, environments split over them."""

    def __init__(self, agent: Agent, mesh: Mesh, num_envs: int) -> None:
        """Hand over to ``mesh``; B = ``num_envs`` is a multiple of its size."""
        self._agent = agent
        self._num_envs = num_envs
        self._split = NamedSharding(mesh, P(LEARNER_AXIS))
        self._split_rows = NamedSharding(mesh, P(None, LEARNER_AXIS))

    def __call__(
        self, trajectory: Trajectory, initial: PyTree, final: PyTree
    ) -> tuple[Trajectory, PyTree, PyTree]:
        """Return (trajectory, initial, final) placed; the arguments are not used again."""
        shard = self._agent.shard_step_state
        env_step, action, extras = self._place(trajectory[:3])
        return (
            trajectory._replace(env_step=env_step, action=action, extras=extras),
            shard(initial, self._split, num_envs=self._num_envs),
            shard(final, self._split, num_envs=self._num_envs),
        )

    def _place(self, rows: PyTree) -> PyTree:
        """Split ``[T, B, ...]`` over the mesh.

        What is where it is to go already is left alone: that ``jax.device_put`` costs 10 us a leaf.
        """
        devices = self._split.mesh.devices
        if devices.size > 1:
            return jax.device_put(rows, self._split_rows)
        return rows if is_on(rows, devices.flat[0]) else jax.device_put(rows, devices.flat[0])
