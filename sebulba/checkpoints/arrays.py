"""Writes and reads arrays by orbax, which is imported when first used, since it imports JAX.

Arrays of several hosts are files of NumPy instead: among processes that ``jax.distributed`` has
joined, orbax writes NumPy arrays on the first alone, and has all of them wait for each other.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sebulba.checkpoints.manifest import ArrayEntry, DamageError
from sebulba.errors import CheckpointError

NUMPY = ".npy"
"""Ending of a file of NumPy."""


def write_arrays(
    folder: Path, arrays: Mapping[str, np.ndarray], *, by_orbax: bool = True
) -> tuple[ArrayEntry, ...]:
    """Write arrays into a new ``folder``, which is not made if all arrays are empty.

    Args:
      by_orbax: Let orbax write them; otherwise each is a file of NumPy.

    Returns:
      An entry for each array, in the order of ``arrays``.
    """
    storable = [_storable(name, array) for name, array in arrays.items()]
    with concurrent.futures.ThreadPoolExecutor(1) as hashing:  # while they are written
        checksums = hashing.map(_checksum, storable)
        _write(folder, storable, by_orbax)
        return tuple(
            ArrayEntry(name, array.shape, array.dtype.name, array.nbytes, checksum)
            for (name, array), checksum in zip(arrays.items(), checksums, strict=True)
        )


def _write(folder: Path, storable: Sequence[np.ndarray], by_orbax: bool) -> None:
    # orbax gets numbers as names, since an array's name may be any text. It has no empty arrays.
    tree = {_key(place): stored for place, stored in enumerate(storable) if stored.size}
    if tree and not by_orbax:
        folder.mkdir()
        for key, stored in tree.items():
            np.save(folder / f"{key}{NUMPY}", stored, allow_pickle=False)
    elif tree:
        import orbax.checkpoint as ocp

        with _checkpointer() as checkpointer:
            checkpointer.save(folder.absolute(), args=ocp.args.PyTreeSave(tree))


def read_arrays(folder: Path, entries: Sequence[ArrayEntry]) -> dict[str, np.ndarray]:
    """Return the arrays that ``write_arrays`` wrote, by name; the caller owns them."""
    import ml_dtypes  # noqa: F401  so that NumPy knows dtypes such as bfloat16 by name

    wanted = [_key(place) for place, entry in enumerate(entries) if entry.num_bytes]
    stored: dict[str, np.ndarray] = {}
    if wanted and (folder / f"{wanted[0]}{NUMPY}").exists():
        stored = {key: np.load(folder / f"{key}{NUMPY}", allow_pickle=False) for key in wanted}
    elif wanted:
        import orbax.checkpoint as ocp

        as_numpy = dict.fromkeys(wanted, ocp.RestoreArgs(restore_type=np.ndarray))
        with _checkpointer() as checkpointer:
            how = ocp.args.PyTreeRestore(restore_args=as_numpy)
            stored = checkpointer.restore(folder.absolute(), args=how)
    restored = {}
    for place, entry in enumerate(entries):
        try:
            restored[entry.name] = _restored(stored.get(_key(place)), entry)
        except ValueError as error:
            what = f"array {entry.name} {error}"
            raise DamageError(folder.parent, what) from error
    return restored


def _key(place: int) -> str:
    return f"{place:06d}"


def _restored(stored: np.ndarray | None, entry: ArrayEntry) -> np.ndarray:
    dtype = np.dtype(entry.dtype)
    if not entry.num_bytes:
        return np.empty(entry.shape, dtype)
    if stored is None:
        raise ValueError("is missing")
    if stored.shape != entry.shape or stored.dtype != _storable_dtype(dtype):
        raise ValueError(
            f"is {stored.dtype}{list(stored.shape)}, but was saved as {dtype}{list(entry.shape)}"
        )
    if _checksum(stored) != entry.sha256:
        raise ValueError("has another checksum")
    return stored.view(dtype)


def _storable(name: str, array: np.ndarray) -> np.ndarray:
    dtype = _own_dtype(array)
    is_own = dtype.isbuiltin == 2 and dtype.itemsize in (1, 2, 4, 8)  # registered by ml_dtypes
    is_number = dtype.isbuiltin == 1 and dtype.char in "?bBhHiIlLqQefdFD"
    if not is_own and not is_number:
        raise CheckpointError(
            f"array {name} has dtype {dtype!r}, which no checkpoint can hold; use booleans or "
            "numbers of up to 64 bits in the byte order of the machine"
        )
    return np.asarray(array, dtype, order="C").view(_storable_dtype(dtype))


def _own_dtype(array: np.ndarray) -> np.dtype:
    """Return the dtype object that NumPy or ml_dtypes registered; an unpickled array has a copy."""
    with contextlib.suppress(TypeError):
        registered = np.dtype(array.dtype.name)
        if registered == array.dtype:
            return registered
    return array.dtype


def _storable_dtype(dtype: np.dtype) -> np.dtype:
    """Return ``dtype``, or unsigned integers of its width if it is one of ml_dtypes."""
    return np.dtype(f"u{dtype.itemsize}") if dtype.isbuiltin == 2 else dtype


def _checksum(array: np.ndarray) -> str:
    elements = np.asarray(array, order="C").reshape(-1).view(np.uint8)
    return hashlib.sha256(elements.data).hexdigest()


@contextlib.contextmanager
def _checkpointer() -> Iterator[Any]:
    """Yield a checkpointer of orbax that handles NumPy arrays and prints nothing.

    Without the filter, orbax would also log, over many lines, the errors that it raises.
    """
    import orbax.checkpoint as ocp

    from sebulba.checkpoints.orbax_handler import PatientNumpyHandler

    def is_of_another(record: logging.LogRecord) -> bool:
        return "orbax" not in record.pathname

    registry = ocp.type_handlers.create_type_handler_registry((np.ndarray, PatientNumpyHandler()))
    logger = logging.getLogger("absl")
    logger.addFilter(is_of_another)
    try:
        pytrees = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
        with ocp.Checkpointer(pytrees) as checkpointer:
            yield checkpointer
    finally:
        logger.removeFilter(is_of_another)
