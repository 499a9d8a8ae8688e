"""The hand-off places trajectories and step states on the update devices."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from sebulba.agent import LEARNER_AXIS, TRAJECTORY_SPEC, Agent, spec_of_each_leaf
from sebulba.support.trees import copy_tree, is_on
from sebulba.transport.item import Item
from sebulba.transport.mesh import UpdateMesh
from sebulba.types import PyTree

MOST_COPIED_BYTES = 1 << 18
"""Up to this size a jitted copy is faster than ``jax.device_put``, which takes 15 us a leaf: 25
instead of 135 us for a cycle of 16 steps of 32 CartPoles."""


class HandOffToHost:
    """Brings the rows of a cycle to the host, from where they go to a trajectory manager."""

    def __call__(self, item: Item) -> Item:
        """Return the trajectory on the host; step states stay where they are."""
        return item._replace(trajectory=jax.device_get(item.trajectory))


class HandOffToMesh:
    """Places the results of a cycle on the update devices, environments split over them."""

    def __init__(self, agent: Agent, mesh: Mesh) -> None:
        """Prepare for ``mesh``, whose size must divide B."""
        self._agent = agent
        self._split = NamedSharding(mesh, P(LEARNER_AXIS))
        self._split_rows = NamedSharding(mesh, P(None, LEARNER_AXIS))
        self._copy = jax.jit(copy_tree, out_shardings=SingleDeviceSharding(mesh.devices.flat[0]))

    def __call__(self, item: Item) -> Item:
        """Return trajectory and step states on the update devices; ``item`` is not used again."""
        trajectory, initial, final, step_infos = item
        env_step, action, extras = self._place(trajectory[:3])
        placed = trajectory._replace(env_step=env_step, action=action, extras=extras)
        shard = self._agent.shard_step_state
        return Item(placed, shard(initial, self._split), shard(final, self._split), step_infos)

    def _place(self, rows: PyTree) -> PyTree:
        """Split ``[T, B, ...]`` over the mesh; arrays that are in place already are not copied."""
        devices = self._split.mesh.devices
        device = devices.flat[0]
        if devices.size > 1:
            return jax.device_put(rows, self._split_rows)
        if is_on(rows, device):
            return rows
        leaves = jax.tree.leaves(rows)
        is_small = sum(leaf.nbytes for leaf in leaves) <= MOST_COPIED_BYTES
        # A jitted program takes arrays of the host and of its own device only.
        if is_small and all(isinstance(x, np.ndarray) or is_on(x, device) for x in leaves):
            return self._copy(rows)
        return jax.device_put(rows, device)


class HandOffToHosts:
    """Places the results of a cycle on this host's update devices, as its part of a trajectory.

    The trajectory has the rows of all hosts, ordered by host; no row leaves its host.
    """

    def __init__(self, agent: Agent, hosts: UpdateMesh) -> None:
        """Prepare for the update devices of all hosts."""
        self._hosts = hosts
        self._hand_off = HandOffToMesh(agent, hosts.local)
        self._step_spec = agent.step_state_spec()

    def __call__(self, item: Item) -> Item:
        """Return arrays over all hosts; ``item`` is not used again.

        Leaves of a step state that have no row for each environment stay those of their host.
        """
        trajectory, initial, final, step_infos = self._hand_off(item)
        env_step, action, extras = map(self._hosts.lift, trajectory[:3], TRAJECTORY_SPEC[:3])
        placed = trajectory._replace(env_step=env_step, action=action, extras=extras)
        initial, final = (self._hosts.lift(x, self._specs_of(x)) for x in (initial, final))
        return Item(placed, initial, final, step_infos)

    def _specs_of(self, step_state: PyTree) -> PyTree:
        """Return how each leaf was placed; on one device its sharding does not say it."""
        if self._hosts.local.size > 1:
            return jax.tree.map(lambda leaf: leaf.sharding.spec, step_state)
        return spec_of_each_leaf(self._step_spec, step_state)
