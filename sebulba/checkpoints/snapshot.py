"""The content of one checkpoint."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np


class Snapshot(NamedTuple):
    """Everything that training needs to go on, as plain data on the host."""

    record: Mapping[str, Any]
    """What JSON can hold: counters, versions, the configuration. Tuples come back as lists, and
    keys as strings."""
    arrays: Mapping[str, np.ndarray]
    """By name, such as ``networks/params/Dense_0/kernel``. Any shape, also ``()`` or empty; dtypes
    are booleans, numbers of up to 8 bytes (complex: 16) and those of ml_dtypes, such as bfloat16.
    Nobody may write to them until they are saved."""
    blobs: Mapping[str, bytes] = types.MappingProxyType({})
    """Bytes by name that only their maker can read, such as pickled environments."""
