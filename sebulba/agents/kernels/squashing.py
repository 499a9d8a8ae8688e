"""From unbounded numbers to the actions of a Box, and back."""

from __future__ import annotations

import math

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

_WIDEST_RANGE = 1e30
_NARROWEST_RANGE = 1e-30


class Squashing:
    """Maps raw numbers to unit actions, and unit actions to those of a Box of K components.

    A component with two sensible bounds has the unit action ``tanh(raw)``, and -1 and 1 are its
    bounds; any other is the same number everywhere. Raw and unit actions are ``[..., K]`` float32.
    """

    def __init__(self, space: gymnasium.spaces.Box) -> None:
        """Take shape and bounds from ``space``."""
        self._shape = space.shape
        self._dtype = np.dtype(jax.dtypes.canonicalize_dtype(space.dtype))
        self.size = math.prod(space.shape)
        low, high = space.low.astype(np.float64).ravel(), space.high.astype(np.float64).ravel()
        with np.errstate(over="ignore", invalid="ignore"):
            width = high - low
        # Some environments declare bounds of 1e30 or 2e-308, which nobody means.
        self._bounded = (width > _NARROWEST_RANGE) & (width < _WIDEST_RANGE)
        self._scale = np.where(self._bounded, width / 2, 1.0).astype(np.float32)
        self._shift = np.where(self._bounded, low + self._scale, 0.0).astype(np.float32)
        self._low, self._high = _inside(low, high)

    def unbounded(self) -> list[int]:
        """Return the components without two sensible bounds, by their place in the flat action."""
        return np.flatnonzero(~self._bounded).tolist()

    def unit(self, raw: jax.Array) -> jax.Array:
        """Return the unit actions of raw numbers, ``[..., K]``."""
        return jnp.where(_row(self._bounded, raw), jnp.tanh(raw), raw)

    def clip(self, unit: jax.Array) -> jax.Array:
        """Clip unit actions to [-1, 1] where they are bounded."""
        return jnp.where(_row(self._bounded, unit), jnp.clip(unit, -1.0, 1.0), unit)

    def action(self, unit: jax.Array) -> jax.Array:
        """Return the actions that the environment receives, ``[..., *action_shape]``.

        Clipped into the bounds as float32 numbers, in the dtype of the space.
        """
        action = unit * _row(self._scale, unit) + _row(self._shift, unit)
        action = jnp.clip(action, _row(self._low, unit), _row(self._high, unit))
        return action.reshape(*unit.shape[:-1], *self._shape).astype(self._dtype)

    def unit_of(self, action: jax.Array) -> jax.Array:
        """Return the unit actions of what the environment received, ``[..., K]`` float32."""
        leading = action.shape[: action.ndim - len(self._shape)]
        flat = action.reshape(*leading, self.size).astype(jnp.float32)
        return (flat - _row(self._shift, flat)) / _row(self._scale, flat)

    def log_slope(self, raw: jax.Array) -> jax.Array:
        """Return ``log |d unit / d raw|``, ``[..., K]``; finite however large raw is."""
        # 1 - tanh(x)^2 = 4 / (e^x + e^-x)^2
        of_tanh = 2.0 * (math.log(2.0) - raw - jax.nn.softplus(-2.0 * raw))
        return jnp.where(_row(self._bounded, raw), of_tanh, 0.0)


def _row(x: np.ndarray, like: jax.Array) -> np.ndarray:
    """Return ``x [K]`` with as many dimensions as ``like``."""
    return x.reshape((1,) * (like.ndim - 1) + (-1,))


def _inside(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return float32 bounds that lie within float64 ones."""
    with np.errstate(over="ignore"):
        low32, high32 = low.astype(np.float32), high.astype(np.float32)
    low32 = np.where(low32 < low, np.nextafter(low32, np.float32(np.inf)), low32)
    high32 = np.where(high32 > high, np.nextafter(high32, np.float32(-np.inf)), high32)
    return low32, high32
