"""Values that nobody should give to anything, for hypothesis."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.faults.counts import rounds


def examples(short: int, long: int) -> settings:
    """Return the settings of a test of so many bad inputs."""
    return settings(
        max_examples=rounds(short, long),
        deadline=None,
        database=None,
        derandomize=short == rounds(short, long),
        suppress_health_check=list(HealthCheck),
    )


class Awkward:
    """Raises whatever is done with it."""

    def _raise(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("awkward")

    __repr__ = __eq__ = __bool__ = __len__ = __iter__ = __float__ = __int__ = __index__ = _raise
    __lt__ = __le__ = __gt__ = __ge__ = __array__ = _raise
    __hash__ = object.__hash__


class AwkwardError(Exception):
    """Cannot be shown, and cannot be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.args = (Awkward(),)

    def __str__(self) -> str:
        raise RuntimeError("awkward")

    __repr__ = __str__

    def __reduce__(self) -> Any:
        raise RuntimeError("awkward")


class TwoArguments(Exception):
    """Does not come back from a pickle."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


DTYPES = st.sampled_from(
    [np.float16, np.float32, np.float64, np.int8, np.int32, np.int64, np.uint8, np.uint64]
    + [np.bool_, np.complex64, "U3", "S2", "datetime64[s]", object]
)

ARRAYS = DTYPES.flatmap(
    lambda dtype: (
        st.just(np.array([None, [1, 2]], object))
        if dtype is object
        else hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    )
)

NUMBERS = st.one_of(
    st.integers(),
    st.integers(-3, 70),
    st.sampled_from([2**31 - 1, 2**31, -(2**31) - 1, 2**53, 2**63, 10**400, -(10**400)]),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([0.0, -0.0, 1e-320, 1e308, 3.5e38]),
)

WORDS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        ["", " ", "None", "auto", "nan", "1e9", "-1", "../x", "a/b", "\x00", "ünï", "--"]
    ),
)

ODD = st.one_of(
    st.none(),
    st.booleans(),
    NUMBERS,
    WORDS,
    st.binary(max_size=4),
    st.complex_numbers(),
    ARRAYS,
    st.lists(NUMBERS, max_size=3),
    st.tuples(NUMBERS, WORDS),
    st.lists(st.lists(st.integers(0, 3), max_size=3), max_size=3),
    st.dictionaries(WORDS, NUMBERS, max_size=2),
    st.sampled_from([int, object, len, ..., NotImplemented, range(3), slice(2)]),
    st.builds(Awkward),
    st.builds(object),
    st.sampled_from([np.float32(2.5), np.int64(3), np.bool_(True), np.float64("nan")]),
)
