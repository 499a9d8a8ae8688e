"""The update of an agent whose replay is in trajectory managers.

A trajectory goes to a manager; what an update draws comes from there and is placed on the update
devices as its experience; the priorities that it computes go back.
"""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh

from sebulba.agent import Agent, AgentState
from sebulba.cluster.replay.sharded_replay import ShardedReplay
from sebulba.learning.update import Updater
from sebulba.transport.item import Item
from sebulba.types import PyTree


class ManagedUpdater(Updater):
    """Takes optimizer steps on what ``store`` draws; every update is a program of its own."""

    def __init__(
        self,
        agent: Agent,
        mesh: Mesh,
        update_key: jax.Array,
        store: ShardedReplay,
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

    def consume(self, item: Item, *, updates: int, due: int) -> PyTree | None:
        """Give one trajectory to the store and take the optimizer steps that are then due.

        The arguments are those of ``Updater.consume``; the trajectory is on the host.
        """
        self._store.insert(item.trajectory, item.initial_step_state)
        if not due:
            return None
        self._find_metrics(())
        for number in range(updates, updates + due):
            self._learn_from(self._store.sample(number), number)
        return self.acting_networks()

    def _learn_from(self, drawn: PyTree, number: int) -> None:
        self.wait()
        # A copy of its own: the update donates it, and on a CPU JAX may take the memory as it is,
        # which belongs to a manager, or to Ray.
        own = jax.tree.map(np.array, drawn)
        self._experience = jax.device_put(own, self._placed(own))
        self._learn((), number, 1)
        self._store.update_priority(self._experience)

    def _placed(self, drawn: PyTree) -> PyTree:
        """Return the sharding of each leaf."""
        return jax.tree.map(
            lambda sharding, subtree: jax.tree.map(lambda _: sharding, subtree),
            self._shardings,
            drawn,
        )

    def prepare(self, item: Item, *, due: int) -> None:
        """Find the names of the metrics, before there is a trajectory."""
        del item, due
        self._find_metrics(())
