"""Writes the trees of a loop into a snapshot, under names, and reads them back."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sebulba.checkpoints.part_files import Snapshot
from sebulba.errors import UsageError
from sebulba.inference.inferencer import InferencerPosition
from sebulba.support.trees import host_copy, is_key, named_leaves
from sebulba.transport.item import Item
from sebulba.types import PyTree, RunSpec, StepInfos, Trajectory

LARGE_ARRAY_BYTES = 2**20
"""An array of an experience of at least this size is saved without rows that were never written."""
MOST_BLOCKS = 64
"""Blocks of rows in which those are looked for."""
MOST_DIFFERENCES = 5
"""Most differences that an error names."""
RENAMED = {"true_reward": "unclipped_reward"}
"""Fields of ``StepInfos`` by their names in older checkpoints."""
NUMBERS = ("inferencer", "cycle", "policy_version")
"""Fields of a trajectory that the record has, too."""


class SnapshotWriter:
    """Gathers trees under names into one snapshot."""

    def __init__(self) -> None:
        """Begin with an empty snapshot."""
        self.record: dict[str, Any] = {"keys": {}, "rows": {}}
        """The record, as JSON; by the names of leaves, ``keys`` has the kind of every typed PRNG
        key, and ``rows`` the length of axis 1 where zeros at its end were not saved."""
        self._arrays: dict[str, np.ndarray] = {}
        self._blobs: dict[str, bytes] = {}

    def add(self, prefix: str, tree: PyTree) -> None:
        """Add copies of the leaves of ``tree`` under the names ``prefix/path``."""
        self._add(prefix, tree, host_copy(tree))

    def add_experience(self, experience: PyTree) -> None:
        """Add copies of the leaves of the experience; of a replay, what it was filled with."""
        self._add("experience", experience, jax.tree.map(copy_of_filled, experience))

    def _add(self, prefix: str, tree: PyTree, copies: PyTree) -> None:
        names, leaves = _named(prefix, tree)
        for name, leaf, copy in zip(names, leaves, jax.tree.leaves(copies), strict=True):
            assert name not in self._arrays, f"two leaves are called {name}"
            self._arrays[name] = copy
            if isinstance(leaf, jax.Array) and is_key(leaf):
                self.record["keys"][name] = str(jax.random.key_impl(leaf))
            elif np.shape(leaf) != copy.shape:
                self.record["rows"][name] = leaf.shape[1]

    def add_inferencers(
        self, positions: Sequence[InferencerPosition], items: Sequence[Item]
    ) -> None:
        """Add where the Inferencers stand, and the trajectories made but not consumed."""
        self.record["inferencers"] = []
        for index, position in enumerate(positions):
            env = position.env
            if isinstance(env, bytes):
                self._blobs[f"env/{index}"] = env
            self.record["inferencers"].append(
                {
                    "cycle": position.cycle,
                    "env": None if isinstance(env, bytes) else env,
                    "has_step_state": position.step_state is not None,
                }
            )
            if position.step_state is not None:
                self.add(f"step/{index}", position.step_state)
        self.record["round"] = [
            {name: int(getattr(item.trajectory, name)) for name in NUMBERS} for item in items
        ]
        for index, item in enumerate(items):
            self.add(f"round/{index}", tuple(item))

    def snapshot(self) -> Snapshot:
        """Return the snapshot of what was added."""
        return Snapshot(self.record, self._arrays, self._blobs)


class SnapshotReader:
    """Reads trees from a snapshot that ``SnapshotWriter`` made."""

    def __init__(self, snapshot: Snapshot, zeros: Collection[str] = ()) -> None:
        """Read from ``snapshot``; what is named in ``zeros`` may be missing, and is zero then."""
        self.record = snapshot.record
        self._snapshot = snapshot
        self._zeros = zeros

    def tree(self, prefix: str, like: PyTree) -> PyTree:
        """Return a copy of the tree under ``prefix``, on the default device.

        Args:
          like: A tree of the same structure, of arrays or shapes.

        Raises:
          UsageError: The leaves differ from those of ``like`` in name, shape or dtype.
        """
        if different := self.differences(prefix, like):
            raise UsageError(
                f"the checkpoint does not fit this run: {'; '.join(different[:MOST_DIFFERENCES])}. "
                "Use the agent, the environment and the sizes that it was saved with"
            )
        there = self._snapshot.arrays
        leaves = [
            self._leaf(name) if name in there else jnp.zeros(leaf.shape, leaf.dtype)
            for name, leaf in zip(*_named(prefix, like), strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(like), leaves)

    def _leaf(self, name: str) -> jax.Array:
        saved = self._snapshot.arrays[name]
        if saved.shape != self._shape(name):
            filled, saved = saved, np.zeros(self._shape(name), saved.dtype)
            saved[:, : filled.shape[1]] = filled
        array = jnp.array(saved, copy=True)
        impl = self.record["keys"].get(name)
        return array if impl is None else jax.random.wrap_key_data(array, impl=impl)

    def lacks(self, prefix: str) -> bool:
        """Tell whether nothing was saved under ``prefix``."""
        return not any(f"{name}/".startswith(f"{prefix}/") for name in self._snapshot.arrays)

    def differences(self, prefix: str, like: PyTree) -> list[str]:
        """Return a line for each leaf of the tree under ``prefix`` that differs from ``like``."""
        wanted = dict(zip(*_named(prefix, like), strict=True))
        there = {n for n in self._snapshot.arrays if f"{n}/".startswith(f"{prefix}/")}
        found = [f"{name} is in the checkpoint only" for name in sorted(there - wanted.keys())]
        for name, leaf in wanted.items():
            now = f"{leaf.dtype}{list(leaf.shape)}"
            if name not in there and name.removeprefix(f"{prefix}/") in self._zeros:
                continue
            if name not in there:
                found.append(f"{name} is not in the checkpoint, and {now} now")
            elif (saved := self._describe(name)) != now:
                found.append(f"{name} is {saved} in the checkpoint and {now} now")
        return found

    def _describe(self, name: str) -> str:
        if name in self.record["keys"]:
            leaf = self._leaf(name)
            return f"{leaf.dtype}{list(leaf.shape)}"
        return f"{self._snapshot.arrays[name].dtype}{list(self._shape(name))}"

    def _shape(self, name: str) -> tuple[int, ...]:
        """Return the shape that a leaf had, of which zeros at the end of axis 1 are not saved."""
        shape = self._snapshot.arrays[name].shape
        rows = self.record.get("rows", {}).get(name)
        return shape if rows is None else (shape[0], rows, *shape[2:])

    def env(self, index: int) -> bytes | str:
        """Return the saved position of an Inferencer's environment, or why there is none."""
        saved = self._snapshot.blobs.get(f"env/{index}")
        return self.record["inferencers"][index]["env"] if saved is None else saved

    def round(self, trajectory: Trajectory, step_state: PyTree) -> list[Item]:
        """Return the trajectories that were made and not consumed, on the default device."""
        trajectory = Trajectory(*trajectory[:3])
        items = []
        for index, about in enumerate(self.record["round"]):
            prefix = f"round/{index}"
            likes = enumerate((trajectory, step_state, step_state))
            rows, initial, final = (self.tree(f"{prefix}/{i}", like) for i, like in likes)
            rows = rows._replace(**{name: np.array(x, np.int32) for name, x in about.items()})
            items.append(Item(rows, initial, final, self._step_infos(f"{prefix}/3")))
        return items

    def _step_infos(self, prefix: str) -> StepInfos:
        """Return the episodes of a round; rewards and slots by group where there are groups."""
        fields: dict[str, Any] = {}
        for name, array in self._snapshot.arrays.items():
            if name.startswith(f"{prefix}/"):
                field, _, group = name.removeprefix(f"{prefix}/").partition("/")
                field = RENAMED.get(field, field)
                if group:
                    fields.setdefault(field, {})[group] = array
                else:
                    fields[field] = array
        return StepInfos(**fields)

    def run_spec(self) -> RunSpec:
        """Return the sizes of the run that was saved."""
        return RunSpec(**self.record["run"])


def _named(prefix: str, tree: PyTree) -> tuple[list[str], list[Any]]:
    """Return the names of the leaves of ``tree`` under ``prefix``, and the leaves."""
    names, leaves = named_leaves(tree)
    if leaves and leaves[0] is tree:
        return [prefix], leaves
    return [f"{prefix}/{name}" for name in names], leaves


def copy_of_filled(leaf: PyTree) -> np.ndarray:
    """Return a copy of ``[J, R, ...]`` without most rows at its end that are zeros for all J.

    Of an array smaller than ``LARGE_ARRAY_BYTES`` all is copied. What is left out is zero bit for
    bit, which -0.0 is not; at least one row stays.
    """
    if is_key(leaf) or leaf.ndim < 2 or leaf.nbytes < LARGE_ARRAY_BYTES:
        return host_copy(leaf)
    if isinstance(leaf, jax.Array):
        of_device = [shard for shard in leaf.addressable_shards if shard.replica_id == 0]
        shards = [(shard.index, np.asarray(shard.data)) for shard in of_device]
    else:
        shards = [((slice(None),) * leaf.ndim, np.asarray(leaf))]
    if any(len(range(leaf.shape[1])[index[1]]) != leaf.shape[1] for index, _ in shards):
        return host_copy(leaf)
    end = max(_end_of_filled(shard) for _, shard in shards)
    copy = np.empty((leaf.shape[0], end, *leaf.shape[2:]), leaf.dtype)
    for index, shard in shards:
        copy[index[0], :, *index[2:]] = shard[:, :end]
    return copy


def _end_of_filled(array: np.ndarray) -> int:
    """Return a number of rows of ``[J, R, ...]`` behind which all are zeros."""
    block, end = -(-array.shape[1] // MOST_BLOCKS), array.shape[1]
    while end > block and not any(_has_bits(rows[end - block : end]) for rows in array):
        end -= block
    return end


def _has_bits(array: np.ndarray) -> bool:
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    num_whole = len(data) // 8 * 8  # in words, seven times as fast as ``any``
    words = np.bitwise_or.reduce(data[:num_whole].view(np.uint64))
    return bool(words) or bool(np.any(data[num_whole:]))
