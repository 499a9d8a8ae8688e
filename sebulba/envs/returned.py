"""What the methods of environments return, checked in one way for all adapters.

This module needs no JAX: worker processes import it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from sebulba.envs.spaces import choices
from sebulba.errors import EnvError, shown, text_of

LARGEST_REWARD = float(np.finfo(np.float32).max)
RESET = "obs, info"
STEP = "obs, reward, terminated, truncated, info"


def parts_of(result: Any, names: str, method: str) -> tuple:
    """Return ``result`` if it is a tuple with as many parts as there are names.

    Raises:
      EnvError: It is not; the message begins with ``method``.
    """
    number = names.count(",") + 1
    if isinstance(result, tuple) and len(result) == number:
        return result
    is_tuple = isinstance(result, tuple)
    got = f"a tuple of {len(result)}" if is_tuple else f"a {type(result).__name__}"
    raise EnvError(f"{method} must return a tuple of {number} ({names}); got {got}")


def by_name(value: Any, names: Collection[str], what: str) -> Mapping[str, Any]:
    """Return ``value`` if it is a dict of these names; raise EnvError if it is not."""
    if isinstance(value, Mapping) and value.keys() == {*names}:
        return value
    got = f"keys {shown(list(value))}" if isinstance(value, Mapping) else f"a {type(value)}"
    raise EnvError(f"{what} must be a dict with keys {sorted(names)}; got {got}")


def own_array(value: Any, what: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return a copy of ``value`` in this dtype, which nobody writes again.

    Floats that are too large for it become infinite.

    Raises:
      EnvError: It is no array of this shape that can be cast without loss of its kind, or has
        integers that are too large.
    """
    try:
        array = np.array(value, order="C")
    except Exception as error:  # a user's object may raise anything when converted
        got = f"{shown(value)} ({text_of(error)})"
    else:
        if array.shape == shape:
            if array.dtype == dtype:
                return array
            if np.can_cast(array.dtype, dtype, "same_kind"):
                with np.errstate(over="ignore"):
                    cast = array.astype(dtype)
                if dtype.kind == "f" or np.array_equal(cast, array):
                    return cast
                raise EnvError(f"{what} has integers beyond the {dtype} that JAX uses; scale it")
        got = f"shape {array.shape} and dtype {array.dtype}"
    raise EnvError(f"{what} must be an array of shape {shape} and dtype {dtype}; got {got}")


def number_of(value: Any, what: str) -> float:
    """Return a reward as a float; raise EnvError if it is no finite number of 32 bits."""
    try:
        is_number = isinstance(value, float) or (
            np.ndim(value) == 0 and not isinstance(value, str | bytes)
        )
        number = float(value) if is_number else math.nan
    except Exception:  # a user's object may raise anything when converted
        number = math.nan
    if abs(number) <= LARGEST_REWARD:
        return number
    shape = getattr(value, "shape", ())
    text = "the text " if isinstance(value, str | bytes) else ""
    got = f"{text}{shown(value)}{f', an array of shape {shape}' if shape else ''}"
    raise EnvError(f"{what} must be a finite number as float32; got {got}")


def flag_of(value: Any, what: str) -> bool:
    """Return a flag; raise EnvError unless it is a bool of Python, or one of NumPy or JAX."""
    if value is False or value is True:
        return value
    if np.ndim(value) == 0 and getattr(value, "dtype", None) == np.bool_:
        return bool(value)
    raise EnvError(f"{what} must be a bool; got {shown(value)} ({type(value).__name__})")


ObsCheck = Callable[[Any, str], Any]
"""Returns a copy of an observation in canonical dtypes; raises EnvError, which begins with the
name that it is given."""


def make_obs_check(space: gymnasium.Space, num_envs: int | None = None) -> ObsCheck:
    """Return a check of observations in ``space``; with ``num_envs``, of ``[B, ...]``.

    Values are checked in single observations only.
    """
    if isinstance(space, spaces.Dict):
        checks = {name: make_obs_check(part, num_envs) for name, part in space.spaces.items()}
        return lambda obs, name: {
            key: checks[key](part, f"{name}[{key!r}]")
            for key, part in by_name(obs, checks, name).items()
        }
    dtype = np.dtype(space.dtype)
    if num_envs is not None:
        shape = (num_envs, *(space.shape or ()))
        return lambda obs, name: own_array(obs, name, shape, dtype)
    shape = space.shape or ()
    low, high = _value_range(space)

    def check(obs: Any, name: str) -> np.ndarray:
        array = own_array(obs, name, shape, dtype)
        if dtype.kind == "f":
            # The sum of squares is cheaper to test, but it may overflow although all is finite.
            if not math.isfinite(np.vdot(array, array)) and not np.isfinite(array).all():
                raise EnvError(
                    f"{name} must be finite numbers as {dtype}; got {array[~np.isfinite(array)][0]}"
                )
        elif low is not None and ((array < low) | (array > high)).any():
            raise EnvError(f"{name} must be inside {space}; got {array}")
        return array

    return check


def _value_range(space: gymnasium.Space) -> tuple[Any, Any]:
    """Return the smallest and the largest value, or (None, None) for a Box of floats or bytes."""
    match space:
        case spaces.Discrete() | spaces.MultiDiscrete():
            return choices(space)
        case spaces.MultiBinary():
            return 0, 1
    assert isinstance(space, spaces.Box)
    if space.dtype.kind in "iu" and space.dtype.itemsize > 1:
        return space.low, space.high
    return None, None
