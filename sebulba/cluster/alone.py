"""All parts of a run in this process: the simplest implementation of ``Parts``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from sebulba.agent import Agent
from sebulba.inference.places import Given, Places
from sebulba.learning.peers import Peers
from sebulba.learning.update import Updater
from sebulba.options import LoopOptions
from sebulba.support.key_streams import UPDATE_STREAM
from sebulba.transport.hand_off import HandOffToMesh
from sebulba.transport.item import HandOff
from sebulba.transport.mesh import learner_mesh


class Parts(NamedTuple):
    """What a loop is put together from, wherever each part is."""

    agent: Agent
    """The agent, as the loop has it."""
    inferencers: Places
    """Makes environments and cycles."""
    hand_off: HandOff
    """Places what a cycle made where the updater takes it."""
    updater: Updater
    """Holds the state, and learns."""
    peers: Peers
    """Who else learns."""

    def close(self) -> None:
        """End what is in other processes; may be called twice."""
        try:
            self.updater.close()
        finally:
            self.inferencers.close()


def alone(given: Given, options: LoopOptions, update_devices: Sequence[jax.Device]) -> Parts:
    """Return parts that are all in this process."""
    mesh = learner_mesh(update_devices)
    return Parts(
        given.agent,
        Places(given),
        HandOffToMesh(given.agent, mesh),
        Updater(given.agent, mesh, *key_and_skip(options)),
        Peers(),
    )


def key_and_skip(options: LoopOptions) -> tuple[Any, bool]:
    """Return the key of updates, and whether those that are not finite are skipped."""
    key = jax.random.fold_in(jax.random.key(options.seed), UPDATE_STREAM)
    return key, options.faults.on_not_finite == "skip"
