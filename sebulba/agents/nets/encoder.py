"""From an observation of any supported space to arrays that networks take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from sebulba.agents.configs import TorsoConfig
from sebulba.errors import UsageError
from sebulba.types import EnvSpec, PyTree

_WIDEST_BOUND = 1e6


class Encoded(NamedTuple):
    """An observation as networks take it; leading dimensions are merged, ``[N, ...]``."""

    vector: jax.Array
    """``[N, V]`` float32; V is 0 where everything is an image."""
    images: tuple[jax.Array, ...]
    """Each ``[N, height, width, channels]`` float32."""


class ObservationEncoder:
    """Makes arrays for networks from observations, without parameters.

    Box is flattened, Discrete and MultiDiscrete are one-hot, MultiBinary is 0 and 1, a Dict is all
    its parts; images (Box of 3 dimensions, or of uint8 pixels) stay images unless the torso is
    "mlp", with channels last and uint8 scaled by 1/255, and boards if it is "board_cnn".
    """

    def __init__(self, spec: EnvSpec, config: TorsoConfig) -> None:
        """Take shapes and bounds from the observation space.

        Raises:
          UsageError: An observation space that networks cannot take.
        """
        self._spec = spec
        self._images = config.kind != "mlp"
        self._boards = config.kind == "board_cnn"
        self._scale_bounded = config.scale_bounded_observations

    def __call__(self, obs: PyTree, num_leading: int) -> Encoded:
        """Encode observations with ``num_leading`` leading dimensions, which are merged into N."""
        vectors: list[jax.Array] = []
        images: list[jax.Array] = []
        for name, space, leaf in _parts(self._spec.observation_space, obs):
            x = jax.lax.collapse(jnp.asarray(leaf), 0, num_leading)
            is_binary = isinstance(space, gymnasium.spaces.MultiBinary)
            is_board = self._boards and is_binary and len(space.shape or ()) == 3
            if is_board or (self._images and is_image(space)):
                images.append(self._image(x, name))
            elif isinstance(space, gymnasium.spaces.Discrete):
                vectors.append(jax.nn.one_hot(x - int(space.start), int(space.n)))
            elif isinstance(space, gymnasium.spaces.MultiDiscrete):
                vectors.append(_multi_one_hot(x, space))
            elif is_binary:
                vectors.append(x.reshape(x.shape[0], -1).astype(jnp.float32))
            elif not isinstance(space, gymnasium.spaces.Box):
                raise UsageError(
                    f"observation_space={space} must be a Box, Discrete, MultiDiscrete, "
                    "MultiBinary or a Dict of these; use a wrapper that gives one"
                )
            else:
                vectors.append(self._flat(x, space))
        if not vectors:
            vectors = [jnp.zeros((images[0].shape[0], 0), jnp.float32)]
        return Encoded(jnp.concatenate(vectors, axis=-1), tuple(images))

    def _image(self, x: jax.Array, name: str) -> jax.Array:
        """Return ``[N, height, width, channels]``."""
        if x.ndim == 5:  # A stack of colour frames, [N, stack, height, width, channels].
            x = jnp.moveaxis(x, 1, -2).reshape(x.shape[0], x.shape[2], x.shape[3], -1)
        elif x.ndim == 3:
            x = x[..., None]
        elif self._spec.has_channels_first(name):
            x = jnp.moveaxis(x, 1, -1)
        return _unit_pixels(x)

    def _flat(self, x: jax.Array, space: gymnasium.spaces.Box) -> jax.Array:
        x = _unit_pixels(x).reshape(x.shape[0], -1)
        if not self._scale_bounded or space.dtype == np.uint8:
            return x
        low, high = space.low.astype(np.float64).ravel(), space.high.astype(np.float64).ravel()
        bounded = (low < high) & (np.abs(low) < _WIDEST_BOUND) & (np.abs(high) < _WIDEST_BOUND)
        scale = np.divide(2.0, high - low, out=np.ones_like(low), where=bounded)
        shift = np.where(bounded, -1.0 - np.where(bounded, low, 0.0) * scale, 0.0)
        return x * scale.astype(np.float32)[None] + shift.astype(np.float32)[None]


def _parts(
    space: gymnasium.Space, obs: PyTree, name: str = ""
) -> Iterator[tuple[str, gymnasium.Space, PyTree]]:
    """Yield name, space and array of each part of observations."""
    if not isinstance(space, gymnasium.spaces.Dict):
        yield name, space, obs
        return
    for part in sorted(space.spaces):
        yield from _parts(space[part], obs[part], part)


def is_image(space: gymnasium.Space) -> bool:
    """Tell whether a space is one of images: 3 dimensions, or uint8 pixels of 2 to 4."""
    if not isinstance(space, gymnasium.spaces.Box):
        return False
    return len(space.shape) == 3 or (space.dtype == np.uint8 and len(space.shape) in (2, 4))


def _unit_pixels(x: jax.Array) -> jax.Array:
    scale = 1.0 / 255.0 if x.dtype == jnp.uint8 else 1.0
    return x.astype(jnp.float32) * scale


def _multi_one_hot(x: jax.Array, space: gymnasium.spaces.MultiDiscrete) -> jax.Array:
    x = x.reshape(x.shape[0], -1) - np.asarray(space.start, np.int32).ravel()[None]
    parts = [jax.nn.one_hot(x[:, k], int(n)) for k, n in enumerate(space.nvec.flat)]
    return jnp.concatenate(parts, axis=-1)
