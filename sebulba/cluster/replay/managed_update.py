"""The update of an agent whose replay is in trajectory managers.

A trajectory goes to a manager; what an update draws comes from there and is placed on the update
devices as its experience; the priorities that it computes go back.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from sebulba.agent import Agent, AgentState
from sebulba.learning.update import Updater
from sebulba.transport.trajectory_store import TrajectoryStore
from sebulba.types import PyTree, Trajectory


class ManagedUpdater(Updater):
    """Takes optimizer steps on what ``store`` draws; every update is a program of its own."""

    def __init__(
        self,
        agent: Agent,
        mesh: Mesh,
        update_key: jax.Array,
        store: TrajectoryStore,
        *,
        skip_not_finite: bool = False,
    ) -> None:
        """Prepare the programs; the arguments are those of ``Updater``, and the store."""
        super().__init__(agent, mesh, update_key, skip_not_finite=skip_not_finite)
        self._store = store

    def place(self, state: AgentState) -> None:
        """Copy the state, and tell the store the key of the updates."""
        super().place(state)
        self._store.begin(jax.device_get(self._key_data), str(self._key_impl))

    def experience_bytes(self) -> int:
        """Return the size of the replay."""
        return self._store.num_bytes()

    def experience(self) -> PyTree:
        """Return the replay, on the host."""
        return self._store.state()

    def acting_networks(self) -> PyTree:
        """Return the acting networks, with the statistics of all that was inserted until now."""
        # What was drawn last knows nothing of what came since. A copy of its own, as in
        # ``_learn_from``.
        lasting = jax.tree.map(np.array, self._store.lasting())
        lasting = jax.device_put(lasting, self._replicated)
        self._experience = self._agent.with_lasting(self._experience, lasting)
        return super().acting_networks()

    def lasting_experience(self) -> PyTree:
        """Return the part of the replay that a checkpoint keeps even without the rest."""
        return self._store.lasting()

    def consume(
        self, trajectory: Trajectory, initial: PyTree, final: PyTree, *, updates: int, due: int
    ) -> PyTree | None:
        """Give one trajectory to the store and take the optimizer steps that are then due.

        The arguments are those of ``Updater.consume``; the trajectory is on the host.
        """
        del final
        self._store.insert(trajectory, initial)
        if not due:
            return None
        self._find_metrics(())
        for number in range(updates, updates + due):
            self._learn_from(self._store.sample(number), number)
        self._updates_summed += due
        return self.acting_networks()

    def _learn_from(self, drawn: PyTree, number: int) -> None:
        self.wait()
        # A copy of its own: the update donates it, and on a CPU JAX may take the memory as it is,
        # which belongs to a manager, or to Ray.
        own = jax.tree.map(np.array, drawn)
        self._experience = jax.device_put(own, self._placed(own))
        state = (self._networks, self._opt, self._experience, self._metric_sums)
        self._networks, self._opt, self._experience, self._metric_sums = self._update(
            *state, self._key_data, np.uint32(number)
        )
        self._store.update_priority(self._experience)

    def _placed(self, drawn: PyTree) -> PyTree:
        """Return the sharding of each leaf."""
        return jax.tree.map(
            lambda sharding, subtree: jax.tree.map(lambda _: sharding, subtree),
            self._shardings,
            drawn,
        )

    def prepare(self, trajectory: Trajectory, initial: PyTree, final: PyTree, *, due: int) -> None:
        """Find the names of the metrics, before there is a trajectory."""
        del trajectory, initial, final, due
        self._find_metrics(())

    def _metric_shapes(self, given: tuple) -> PyTree:
        del given

        def metrics(*arguments: Any) -> PyTree:
            return self._metrics_shard(*arguments)[3]

        specs = (P(), P(), self._agent.experience_spec(), P(), P())
        state = self._networks, self._opt, self._experience
        return jax.eval_shape(self._map(metrics, specs, P()), *state, self._key_data, np.uint32(0))
