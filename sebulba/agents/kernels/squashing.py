"""From unbounded numbers to the actions of a Box, and back."""

from __future__ import annotations

import math

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

_WIDEST_RANGE = 1e30
_NARROWEST_RANGE = 1e-30
_RANDOM_REACH = 2.5
"""Random numbers of a component without two bounds are exp or sinh of numbers of up to this size:
up to 12 from a single bound, and 6 without one. Much wider ones let quadratic costs hide best
actions of 1."""


class Squashing:
    """Maps raw numbers to unit actions, and unit actions to those of a Box of K components.

    A component with two sensible bounds has the unit action ``tanh(raw)``, and -1 and 1 are its
    bounds. Any other is the same number everywhere, clipped into a bound that it has; or, with
    ``soft``, its distance from a single bound is ``softplus`` of raw, so that every unit action is
    what the environment gets. Raw and unit actions are ``[..., K]`` float32.
    """

    def __init__(self, space: gymnasium.spaces.Box, *, soft: bool = False) -> None:
        """Take shape and bounds from ``space``; ``soft``: components with one bound keep to it."""
        self._shape = space.shape
        self._dtype = np.dtype(jax.dtypes.canonicalize_dtype(space.dtype))
        self.size = math.prod(space.shape)
        low, high = space.low.astype(np.float64).ravel(), space.high.astype(np.float64).ravel()
        with np.errstate(over="ignore", invalid="ignore"):
            width = high - low
        # Some environments declare bounds of 1e30 or 2e-308, which nobody means.
        self._bounded = (width > _NARROWEST_RANGE) & (width < _WIDEST_RANGE)
        # 1: from the lower bound upwards, -1: from the upper one downwards, 0: two bounds or none.
        of_one = 1 * (np.abs(low) < _WIDEST_RANGE / 4) - (np.abs(high) < _WIDEST_RANGE / 4)
        is_soft = soft & ~(width < _WIDEST_RANGE)
        self._direction = np.where(is_soft, of_one, 0).astype(np.float32)
        self._scale = np.where(self._bounded, width / 2, 1.0).astype(np.float32)
        shift = np.where(self._bounded, low + self._scale, 0.0)
        shift = np.select([self._direction > 0, self._direction < 0], [low, high], shift)
        self._shift = shift.astype(np.float32)
        self._low, self._high = _inside(low, high)

    def unbounded(self) -> list[int]:
        """Return the components without two sensible bounds, by their place in the flat action."""
        return np.flatnonzero(~self._bounded).tolist()

    def unit(self, raw: jax.Array) -> jax.Array:
        """Return the unit actions of raw numbers, ``[..., K]``."""
        unit = jnp.where(_row(self._bounded, raw), jnp.tanh(raw), raw)
        direction = _row(self._direction, raw)
        return self._where_soft(jax.nn.softplus(direction * raw) * direction, unit)

    def clip(self, unit: jax.Array) -> jax.Array:
        """Clip unit actions to [-1, 1] where they are bounded, and to a soft bound."""
        clipped = jnp.where(_row(self._bounded, unit), jnp.clip(unit, -1.0, 1.0), unit)
        direction = _row(self._direction, unit)
        return self._where_soft(jnp.maximum(direction * unit, 0.0) * direction, clipped)

    def at_random(self, key: jax.Array, num_rows: int) -> jax.Array:
        """Draw random unit actions, ``[num_rows, K]``; uniform ones where they are bounded."""
        unit = jax.random.uniform(key, (num_rows, self.size), minval=-1.0, maxval=1.0)
        if self._bounded.all():
            return unit
        wide = self._where_soft(
            jnp.exp(_RANDOM_REACH * unit) * _row(self._direction, unit),
            jnp.sinh(_RANDOM_REACH * unit),
        )
        return jnp.where(_row(self._bounded, unit), unit, wide)

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
        slope = jnp.where(_row(self._bounded, raw), of_tanh, 0.0)
        return self._where_soft(jax.nn.log_sigmoid(_row(self._direction, raw) * raw), slope)

    def _where_soft(self, soft: jax.Array, other: jax.Array) -> jax.Array:
        """Choose by component; ``other`` alone where none has a soft bound."""
        if not self._direction.any():
            return other
        return jnp.where(_row(self._direction != 0, other), soft, other)


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
