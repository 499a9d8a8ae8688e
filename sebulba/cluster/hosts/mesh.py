"""The update devices of all hosts as one mesh, and arrays on the way between it and one host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sebulba.agent import is_spec, spec_of_each_leaf
from sebulba.errors import UsageError
from sebulba.support.trees import is_key, owned_copy
from sebulba.transport.mesh import UpdateMesh, learner_mesh
from sebulba.types import PyTree


class HostMesh(UpdateMesh):
    """The update devices of this host, and those of all hosts, ordered by host.

    An array of one host that is split over its devices is this host's part of one that is split
    over all of them: rows of host 0 come first. To lift it, or to take a part out, copies nothing.
    """

    def __init__(self, local: Sequence[jax.Device], devices: Sequence[jax.Device]) -> None:
        """Make both meshes.

        Args:
          devices: Update devices of all hosts, as many of each.
        """
        self.local = learner_mesh(local)
        self.whole = learner_mesh(devices)
        self.num_hosts = len(devices) // len(local)

    def lift(self, tree: PyTree, specs: Callable[[], PyTree]) -> PyTree:
        """Return arrays over all hosts; see ``UpdateMesh.lift``.

        What spans all hosts already stays as it is. Under ``P()`` a leaf should be equal on all
        hosts; nothing checks it.
        """

        def one(spec: P, leaf: jax.Array) -> jax.Array:
            if not leaf.is_fully_addressable:
                return leaf
            if self.local.size > 1:
                assert isinstance(leaf.sharding, NamedSharding)
                spec = leaf.sharding.spec
            shape = [
                size * (self.num_hosts if axis else 1)
                for size, axis in zip(leaf.shape, _padded(spec, leaf.ndim), strict=True)
            ]
            return _of_shards(leaf, shape, NamedSharding(self.whole, spec))

        return _map_specs(one, specs(), tree)

    def parts(self, tree: PyTree) -> PyTree:

        def one(leaf: PyTree) -> PyTree:
            if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
                return leaf
            assert isinstance(leaf.sharding, NamedSharding)
            spec = leaf.sharding.spec
            shape = [
                size // (self.num_hosts if axis else 1)
                for size, axis in zip(leaf.shape, _padded(spec, leaf.ndim), strict=True)
            ]
            return _of_shards(leaf, shape, NamedSharding(self.local, spec))

        return jax.tree.map(one, tree)

    def replicate(self, tree: PyTree) -> PyTree:
        """Place ``tree`` on the devices of all hosts, without a comparison of the hosts' values."""
        return self.put(tree, P())

    def put(self, tree: PyTree, specs: PyTree) -> PyTree:
        """Return copies over all hosts of which the arrays of ``tree`` are this host's parts."""

        def one(spec: P, leaf: jax.Array) -> jax.Array:
            if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
                return owned_copy(leaf, NamedSharding(self.whole, spec))
            return self.lift(owned_copy(leaf, NamedSharding(self.local, spec)), lambda: spec)

        return _map_specs(one, specs, tree)


def devices_of_hosts(local: Sequence[jax.Device], num_hosts: int) -> list[jax.Device]:
    """Return the devices of every host that have the same places there as ``local`` have here.

    Raises:
      UsageError: A host has fewer devices.
    """
    here = jax.local_devices()
    places = [here.index(device) for device in local]
    devices: list[jax.Device] = []
    for host in range(num_hosts):
        there = jax.local_devices(process_index=host)
        if len(there) != len(here):
            raise UsageError(
                f"host {host} has {len(there)} devices and this one has {len(here)}; all hosts "
                "need the same number"
            )
        devices += [there[place] for place in places]
    return devices


def _padded(spec: P, ndim: int) -> tuple:
    return (*spec, *(None,) * (ndim - len(spec)))


def _map_specs(one: object, specs: PyTree, tree: PyTree) -> PyTree:
    return jax.tree.map(one, spec_of_each_leaf(specs, tree), tree, is_leaf=is_spec)  # type: ignore[arg-type]


def _of_shards(leaf: jax.Array, shape: Sequence[int], sharding: NamedSharding) -> jax.Array:
    """Return an array of ``shape`` whose shards on this host are those of ``leaf``."""
    if is_key(leaf):
        # The shards of a typed key are typed too, and JAX puts arrays of numbers together only.
        data = jax.random.key_data(leaf)
        spec = P(*_padded(sharding.spec, leaf.ndim), None)
        of_numbers = NamedSharding(sharding.mesh, spec)
        whole = _of_shards(data, (*shape, *data.shape[leaf.ndim :]), of_numbers)
        return jax.random.wrap_key_data(whole, impl=jax.random.key_impl(leaf))
    shards = [shard.data for shard in leaf.addressable_shards]
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, shards)
