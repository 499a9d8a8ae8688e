"""Networks: from an observation of any supported space to policy parameters and a value."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from sebulba.agents.configs import TorsoConfig
from sebulba.errors import UsageError
from sebulba.types import EnvSpec, PyTree

_NATURE_CNN_LEAST_PIXELS = 36
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
    "mlp", with channels last and uint8 scaled by 1/255.
    """

    def __init__(self, spec: EnvSpec, config: TorsoConfig) -> None:
        """Take shapes and bounds from the observation space.

        Raises:
          UsageError: An observation space that networks cannot take.
        """
        self._space = spec.observation_space
        self._frame_stack = spec.frame_stack
        self._images = config.kind != "mlp"
        self._scale_bounded = config.scale_bounded_observations

    def __call__(self, obs: PyTree, num_leading: int) -> Encoded:
        """Encode observations with ``num_leading`` leading dimensions, which are merged into N."""
        vectors: list[jax.Array] = []
        images: list[jax.Array] = []
        self._encode(self._space, obs, num_leading, vectors, images)
        if vectors:
            return Encoded(jnp.concatenate(vectors, axis=-1), tuple(images))
        return Encoded(jnp.zeros((images[0].shape[0], 0), jnp.float32), tuple(images))

    def _encode(
        self,
        space: gymnasium.Space,
        obs: PyTree,
        num_leading: int,
        vectors: list[jax.Array],
        images: list[jax.Array],
    ) -> None:
        if isinstance(space, gymnasium.spaces.Dict):
            for name in sorted(space.spaces):
                self._encode(space[name], obs[name], num_leading, vectors, images)
            return
        x = jnp.asarray(obs)
        x = x.reshape(math.prod(x.shape[:num_leading]), *x.shape[num_leading:])
        if isinstance(space, gymnasium.spaces.Discrete):
            vectors.append(jax.nn.one_hot(x - int(space.start), int(space.n)))
        elif isinstance(space, gymnasium.spaces.MultiDiscrete):
            vectors.append(_multi_one_hot(x, space))
        elif isinstance(space, gymnasium.spaces.MultiBinary):
            vectors.append(x.reshape(x.shape[0], -1).astype(jnp.float32))
        elif not isinstance(space, gymnasium.spaces.Box):
            raise UsageError(
                f"observation_space={space} must be a Box, Discrete, MultiDiscrete, MultiBinary "
                "or a Dict of these; wrap the environment to give one"
            )
        elif self._images and is_image(space):
            images.append(self._image(x))
        else:
            vectors.append(self._flat(x, space))

    def _image(self, x: jax.Array) -> jax.Array:
        """Return ``[N, height, width, channels]``."""
        if x.ndim == 5:  # A stack of colour frames, [N, stack, height, width, channels].
            x = jnp.moveaxis(x, 1, -2).reshape(x.shape[0], x.shape[2], x.shape[3], -1)
        elif x.ndim == 3:
            x = x[..., None]
        elif self._frame_stack or x.shape[1] < min(x.shape[2:]):
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


@functools.cache
def orthogonal(scale: float) -> nn.initializers.Initializer:
    """Return what makes kernels of orthogonal rows or columns, times ``scale`` (Saxe et al. 2014).

    Whenever a network is traced flax asks each initializer for a shape, and this one has a QR
    decomposition to trace. One that is jitted is traced for a shape once, or once more in programs
    for several devices.
    """
    return jax.jit(nn.initializers.orthogonal(scale), static_argnums=(1, 2))


def _dense(size: int, scale: float, name: str | None = None) -> nn.Dense:
    return nn.Dense(size, kernel_init=orthogonal(scale), name=name)


class MLP(nn.Module):
    """Dense layers, each followed by the activation: ``[N, V] -> [N, sizes[-1]]``."""

    sizes: tuple[int, ...]
    activation: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply all layers."""
        activation: Callable[[jax.Array], jax.Array] = getattr(nn, self.activation)
        for size in self.sizes:
            x = activation(_dense(size, math.sqrt(2))(x))
        return x


class NatureCNN(nn.Module):
    """Three convolutions and a dense layer (Mnih et al. 2015): ``[N, H, W, C] -> [N, features]``.

    Raises:
      UsageError: An image of fewer than 36 x 36 pixels, which the strides would use up.
    """

    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply all layers."""
        if min(x.shape[1:3]) < _NATURE_CNN_LEAST_PIXELS:
            raise UsageError(
                f"torso.kind='nature_cnn' cannot take images of {x.shape[1]} x {x.shape[2]} "
                "pixels, it needs 36 x 36; use impala_resnet or mlp"
            )
        init = orthogonal(math.sqrt(2))
        for channels, window, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
            conv = nn.Conv(channels, (window, window), stride, padding="VALID", kernel_init=init)
            x = nn.relu(conv(x))
        return nn.relu(_dense(self.features, math.sqrt(2))(x.reshape(x.shape[0], -1)))


class ImpalaResNet(nn.Module):
    """The deep network of IMPALA (Espeholt et al. 2018, figure 3, right).

    ``[N, H, W, C] -> [N, features]``. Each section halves height and width.
    """

    channels: tuple[int, ...]
    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply all sections and the dense layer."""
        for channels in self.channels:
            x = nn.Conv(channels, (3, 3))(x)
            x = nn.max_pool(x, (3, 3), (2, 2), padding="SAME")
            for _ in range(2):
                y = nn.Conv(channels, (3, 3))(nn.relu(x))
                x = x + nn.Conv(channels, (3, 3))(nn.relu(y))
        x = nn.relu(x)
        return nn.relu(_dense(self.features, math.sqrt(2))(x.reshape(x.shape[0], -1)))


class Torso(nn.Module):
    """From an encoded observation to features, ``[N, F]``: images by CNN, vectors by MLP."""

    config: TorsoConfig

    @nn.compact
    def __call__(self, encoded: Encoded) -> jax.Array:
        """Return the features of all parts, side by side."""
        parts = [self._image_network(image)(image) for image in encoded.images]
        if encoded.vector.shape[-1]:
            parts.append(MLP(self.config.hidden_sizes, self.config.activation)(encoded.vector))
        return jnp.concatenate(parts, axis=-1)

    def _image_network(self, image: jax.Array) -> nn.Module:
        kind = self.config.kind
        if kind == "auto":
            large = min(image.shape[1:3]) >= _NATURE_CNN_LEAST_PIXELS
            kind = "nature_cnn" if large else "impala_resnet"
        if kind == "nature_cnn":
            return NatureCNN(self.config.image_features)
        return ImpalaResNet(self.config.resnet_channels, self.config.image_features)


class Core(nn.Module):
    """An LSTM over time whose state is zero where an episode begins."""

    size: int

    @nn.compact
    def __call__(
        self, state: PyTree, features: jax.Array, is_first: jax.Array
    ) -> tuple[PyTree, jax.Array]:
        """Run over ``features [T, B, F]`` and ``is_first [T, B]``.

        Returns:
          The state after row T-1, ``([B, size], [B, size])``, and outputs ``[T, B, size]``.
        """

        def row(cell: Any, state: PyTree, x: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
            features_t, is_first_t = x
            state = jax.tree.map(lambda leaf: jnp.where(is_first_t[:, None], 0.0, leaf), state)
            return cell(state, features_t)

        scan = nn.scan(row, variable_broadcast="params", split_rngs={"params": False})
        cell = nn.OptimizedLSTMCell(self.size, recurrent_kernel_init=orthogonal(1.0))
        return scan(cell, state, (features, is_first))


class ActorCriticOutput(NamedTuple):
    """What a policy says of every row, ``[T, B, ...]``."""

    params: jax.Array
    """Parameters of the action distribution, ``[T, B, P]``."""
    value: jax.Array
    """``[T, B]``; zeros where there is no value head."""
    core: PyTree
    """Recurrent state after the last row, ``[B, ...]``."""


@dataclasses.dataclass(frozen=True)
class HeadSizes:
    """What the heads put out."""

    num_params: int
    """Parameters of the action distribution that depend on the observation."""
    num_free_params: int
    """Parameters that do not."""
    initial_free_param: float
    """Their value before training."""


class ActorCritic(nn.Module):
    """Torso, optional LSTM, and heads for policy and value."""

    heads: HeadSizes
    torso: TorsoConfig
    lstm_size: int = 0
    value_head: bool = True
    separate_value_torso: bool = False

    @nn.compact
    def __call__(self, encoded: Encoded, core: PyTree, is_first: jax.Array) -> ActorCriticOutput:
        """Evaluate T rows of B environments.

        Args:
          encoded: ``[T * B, ...]``; all rows go through one matrix product a layer.
          core: Recurrent state before row 0, ``([B, L], [B, L])``, or ``()`` without an LSTM.
          is_first: ``[T, B]``; the recurrent state is reset there before the row is consumed.
        """
        features = Torso(self.torso, name="torso")(encoded)
        if self.lstm_size:
            rows = features.reshape(*is_first.shape, -1)
            core, rows = Core(self.lstm_size, name="core")(core, rows, is_first)
            features = rows.reshape(features.shape[0], -1)
        params = _dense(self.heads.num_params, 0.01, "policy")(features)
        if self.heads.num_free_params:
            init = nn.initializers.constant(self.heads.initial_free_param)
            free = self.param("policy_free", init, (self.heads.num_free_params,))
            free = jnp.broadcast_to(free[None], (params.shape[0], free.shape[0]))
            params = jnp.concatenate([params, free], axis=-1)
        value = jnp.zeros(is_first.shape)
        if self.value_head:
            if self.separate_value_torso:
                features = Torso(self.torso, name="value_torso")(encoded)
            value = _dense(1, 1.0, "value")(features).reshape(is_first.shape)
        return ActorCriticOutput(params.reshape(*is_first.shape, -1), value, core)
