"""The update devices of this process as a mesh; ``cluster/hosts/mesh.py`` has those of several."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sebulba.agent import LEARNER_AXIS, is_spec
from sebulba.support.trees import owned_copy
from sebulba.types import PyTree


class UpdateMesh:
    """The devices that an update runs on, on the axis ``"learner"``: those of this process."""

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        """Make a mesh of update devices of this process."""
        self.local = self.whole = learner_mesh(devices)

    def put(self, tree: PyTree, specs: PyTree) -> PyTree:
        """Return copies on the update devices.

        Args:
          tree: Arrays of this process.
          specs: Prefix tree of ``PartitionSpec``; one program copies what has one.
        """
        return jax.tree.map(
            lambda spec, subtree: owned_copy(subtree, NamedSharding(self.whole, spec)),
            specs,
            tree,
            is_leaf=is_spec,
        )

    def replicate(self, tree: PyTree) -> PyTree:
        """Place ``tree``, which is the same on all hosts, on every update device."""
        return jax.device_put(tree, NamedSharding(self.whole, P()))

    def lift(self, tree: PyTree, specs: Callable[[], PyTree]) -> PyTree:
        """Return arrays over all hosts, of which those of ``tree`` are this host's parts.

        Args:
          tree: Arrays on this host's update devices.
          specs: Returns a prefix tree of ``PartitionSpec``, which say how the arrays are split if
            there is one device; on several they say it themselves.
        """
        return tree

    def parts(self, tree: PyTree) -> PyTree:
        """Return this host's parts of arrays over all hosts."""
        return tree


def learner_mesh(devices: Sequence[jax.Device]) -> Mesh:
    """Return a mesh with the axis ``"learner"``."""
    return Mesh(np.array(devices), (LEARNER_AXIS,), axis_types=(AxisType.Auto,))
