"""The update of an agent whose replay is in trajectory managers.

A trajectory goes to a manager; what an update draws comes from there and is placed on the update
devices as its experience; the priorities that it computes go back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sebulba.agent import Agent, AgentState
from sebulba.cluster.replay.sharded_replay import ShardedReplay
from sebulba.learning.update import Updater
from sebulba.transport.item import Item
from sebulba.transport.mesh import UpdateMesh
from sebulba.types import PyTree, RunSpec


class ManagedUpdater(Updater):
    """Takes optimizer steps on what ``store`` draws; every update is a program of its own."""

    def __init__(
        self,
        agent: Agent,
        mesh: UpdateMesh,
        update_key: jax.Array,
        skip_not_finite: bool = False,
        *,
        store: ShardedReplay,
    ) -> None:
        """Prepare the programs; the arguments are those of ``Updater``, and the store."""
        super().__init__(agent, mesh, update_key, skip_not_finite)
        self._store = store
        self._restored: PyTree = ()
        """A replay that was read and not put back yet."""

    def begin(self, run: RunSpec) -> None:
        super().begin(run)
        self._store.make(run)

    def clear(self) -> None:
        self._store.clear()

    def read(self, read: Callable[[Agent], Any], run: RunSpec) -> Any:
        """Read a state whose replay need not fit on an update device; see ``Updater.read``."""
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            resumed = read(self._store.agent)
            self._restored = resumed.state.experience
            drawn = jax.eval_shape(lambda: self._agent.new_state(jax.random.key(0), run).experience)
            drawn = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), drawn)
            lasting = self._store.agent.lasting_experience(self._restored)
            drawn = self._agent.with_lasting(drawn, lasting)
        return resumed._replace(state=resumed.state._replace(experience=drawn))

    def put_back(self) -> None:
        restored, self._restored = self._restored, ()
        self._store.put_back(restored)

    def close(self) -> None:
        self._store.close()

    def place(self, state: AgentState) -> None:
        """Copy the state, and tell the store the key of the updates."""
        super().place(state)
        self._store.begin(jax.device_get(self._key_data), str(self._key_impl))

    def experience_bytes(self) -> int:
        return self._store.num_bytes()

    def experience(self) -> PyTree:
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
        return self._store.lasting()

    def consume(self, item: Item, *, updates: int, due: int) -> PyTree | None:
        self._store.insert(item.trajectory, item.initial_step_state)
        if not due:
            return None
        self._find_metrics(())
        for number in range(updates, updates + due):
            self.sign_of_life()
            self._learn_from(self._store.sample(number), number)
        return self.acting_networks()

    def _learn_from(self, drawn: PyTree, number: int) -> None:
        self.wait()
        # A copy of its own: the update donates it, and on a CPU JAX may take the memory as it is,
        # which belongs to a manager, or to Ray.
        own = jax.tree.map(np.array, drawn)
        self._experience = jax.device_put(own, self._shardings)
        self._learn((), number, 1)
        self._store.update_priority(self._experience)

    def prepare(self, item: Item, *, due: int) -> None:
        self._find_metrics(())
