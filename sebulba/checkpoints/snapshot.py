"""What one checkpoint holds."""

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
    """By name, such as ``networks/params/Dense_0/kernel``. Any shape, also ``()`` and without
    elements; booleans, numbers of up to 8 bytes (complex: 16) and those of ml_dtypes, such as
    bfloat16. Nobody writes to them until they are saved."""
    blobs: Mapping[str, bytes] = types.MappingProxyType({})
    """By name: what only its maker can read, such as pickled environments."""
