"""From encoded observations to features: MLP, image networks, recurrent core."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from sebulba.agents.configs import TorsoConfig
from sebulba.agents.configs.network_and_optimizer import TORSOS
from sebulba.agents.nets.encoder import Encoded
from sebulba.agents.nets.memories import LRU, WINDOW, GTrXL
from sebulba.errors import UsageError, shown
from sebulba.support.user_code import load_attribute
from sebulba.types import PyTree

_NATURE_CNN_LEAST_PIXELS = 36


@functools.cache
def orthogonal(scale: float) -> nn.initializers.Initializer:
    """Return what makes kernels of orthogonal rows or columns, times ``scale`` (Saxe et al. 2014).

    Whenever a network is traced flax asks each initializer for a shape, and this one has a QR
    decomposition to trace. One that is jitted is traced for a shape once, or once more in programs
    for several devices.
    """
    return jax.jit(nn.initializers.orthogonal(scale), static_argnums=(1, 2))


def dense(
    size: int,
    scale: float,
    name: str | None = None,
    kernels: str = "orthogonal",
    dtype: str = "float32",
) -> nn.Dense:
    """Return a dense layer whose kernel is orthogonal, times ``scale``, before training.

    Args:
      size: Units.
      scale: Of an orthogonal kernel.
      name: In the parameters.
      kernels: ``TorsoConfig.initial_kernels``; lecun_normal has no scale.
      dtype: Of what it computes; its parameters are float32.
    """
    is_normal = kernels == "lecun_normal"
    init = nn.initializers.lecun_normal() if is_normal else orthogonal(scale)
    return nn.Dense(size, kernel_init=init, dtype=dtype, name=name)


def _active(
    x: jax.Array, config: TorsoConfig, activation: Callable[[jax.Array], jax.Array] = nn.relu
) -> jax.Array:
    """Return the activation of ``x``, normalised before it where ``config`` says so."""
    return activation(nn.LayerNorm(dtype=config.dtype)(x) if config.layer_norm else x)


def _features(x: jax.Array, config: TorsoConfig, size: int) -> jax.Array:
    """Return the output ``[N, size]`` of the dense layer that ends a network for images."""
    x = dense(size, math.sqrt(2), dtype=config.dtype)(x.reshape(x.shape[0], -1))
    return _active(x, config)


class MLP(nn.Module):
    """Dense layers, each followed by the activation: ``[N, V] -> [N, sizes[-1]]``.

    Or residual blocks, each with four times as many units inside (SimBa, section 4 of arXiv
    2410.09754).
    """

    config: TorsoConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply all layers."""
        config = self.config
        if config.residual:
            norm = functools.partial(nn.LayerNorm, dtype=config.dtype)
            x = dense(config.hidden_sizes[0], 1.0, dtype=config.dtype)(x)
            for size in config.hidden_sizes:
                wide = functools.partial(nn.Dense, kernel_init=nn.initializers.he_normal())
                y = nn.relu(wide(4 * size, dtype=config.dtype)(norm()(x)))
                x = x + wide(size, dtype=config.dtype)(y)
            return norm()(x)
        for size in config.hidden_sizes:
            x = dense(size, math.sqrt(2), None, config.initial_kernels, config.dtype)(x)
            x = _active(x, config, getattr(nn, config.activation))
        return x


class NatureCNN(nn.Module):
    """Three convolutions and a dense layer (Mnih et al. 2015): ``[N, H, W, C] -> [N, features]``.

    Raises:
      UsageError: An image of fewer than 36 x 36 pixels, which the strides would use up.
    """

    config: TorsoConfig
    layers = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
    padding, least_pixels, most_features = "VALID", _NATURE_CNN_LEAST_PIXELS, math.inf

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply all layers."""
        if min(x.shape[1:3]) < self.least_pixels:
            raise UsageError(
                f"torso.kind={self.config.kind!r} needs images of {self.least_pixels} x "
                f"{self.least_pixels} pixels, not {x.shape[1]} x {x.shape[2]}; use auto or mlp"
            )
        conv = functools.partial(
            nn.Conv,
            padding=self.padding,
            kernel_init=orthogonal(math.sqrt(2)),
            dtype=self.config.dtype,
        )
        for channels, window, stride in self.layers:
            x = _active(conv(channels, (window, window), stride)(x), self.config)
        return _features(x, self.config, min(self.config.image_features, self.most_features))  # type: ignore[arg-type]


class SmallCNN(NatureCNN):
    """A convolution of 16 channels and a dense layer, for images of a few pixels.

    ``[N, H, W, C] -> [N, features]``, as the networks of MinAtar (Young and Tian 2019), but with
    padding, so that an image of one pixel will do.
    """

    layers = ((16, 3, 1),)  # type: ignore[assignment]
    padding, least_pixels, most_features = "SAME", 1, 128


class BoardCNN(NatureCNN):
    """64 windows of 4 x 4 cells, as ConnectFour needs them, and a dense layer of at most 128."""

    layers = ((64, 4, 1),)  # type: ignore[assignment]
    least_pixels, most_features = 4, 128


class ImpalaResNet(nn.Module):
    """The deep network of IMPALA (Espeholt et al. 2018, figure 3, right).

    ``[N, H, W, C] -> [N, features]``. Each section halves height and width.
    """

    config: TorsoConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply all sections and the dense layer."""
        config = self.config
        conv = functools.partial(nn.Conv, kernel_size=(3, 3), dtype=config.dtype)
        for channels in config.resnet_channels:
            x = conv(channels)(x)
            x = nn.max_pool(x, (3, 3), (2, 2), padding="SAME")
            for _ in range(2):
                y = conv(channels)(_active(x, config))
                x = x + conv(channels)(_active(y, config))
        return _features(_active(x, config), config, config.image_features)


_NETWORKS = dict(zip(TORSOS[2:], (SmallCNN, BoardCNN, NatureCNN, ImpalaResNet), strict=True))


class Torso(nn.Module):
    """From an encoded observation to features, ``[N, F]``: images by CNN, vectors by MLP.

    A network of one's own takes all parts: one of a single vector ``[N, V]``, or of a single image
    ``[N, height, width, channels]``, is given this array, and any other an ``Encoded``.
    """

    config: TorsoConfig

    @nn.compact
    def __call__(self, encoded: Encoded) -> jax.Array:
        """Return the features of all parts, side by side, float32."""
        if self.config.is_own:
            arrays = [*encoded.images, *([encoded.vector] if encoded.vector.shape[-1] else [])]
            given = arrays[0] if len(arrays) == 1 else Encoded(encoded.vector, encoded.images)
            return _checked_features(self.config.kind, own_torso(self.config.kind)(given))
        parts = [self._image_network(image)(image) for image in encoded.images]
        if encoded.vector.shape[-1]:
            parts.append(MLP(self.config)(encoded.vector))
        return jnp.concatenate(parts, axis=-1).astype(jnp.float32)

    def _image_network(self, image: jax.Array) -> nn.Module:
        kind, (height, width) = self.config.kind, image.shape[1:3]
        if kind == "auto" and min(height, width) >= _NATURE_CNN_LEAST_PIXELS:
            kind = "nature_cnn"
        elif kind == "auto":
            is_small = height * width <= self.config.small_image_pixels
            kind = "small_cnn" if is_small else "impala_resnet"
        return _NETWORKS[kind](self.config)


def own_torso(name: str) -> nn.Module:
    """Return the network that ``module:attribute`` names: a flax module, or what returns one.

    Raises:
      UsageError: It names nothing else, or needs arguments.
    """
    found = load_attribute("torso.kind", name)
    try:
        network = found() if callable(found) and not isinstance(found, nn.Module) else found
    except TypeError as error:
        raise UsageError(
            f"torso.kind={name!r} cannot be made without arguments ({error}); give every field a "
            "default, or name a function that returns it"
        ) from error
    if not isinstance(network, nn.Module):
        raise UsageError(
            f"torso.kind={name!r} is {shown(found)}; it must be a flax module (flax.linen.Module), "
            "or a function that returns one"
        )
    return network


def _checked_features(name: str, features: Any) -> jax.Array:
    if isinstance(features, jax.Array) and features.ndim == 2:
        return features
    got = getattr(features, "shape", type(features).__name__)
    raise UsageError(
        f"torso.kind={name!r} returns {got}; it must return features [N, F] for N observations"
    )


class Core(nn.Module):
    """A memory over time whose state is zero where an episode begins."""

    size: int
    memory: str | None = None
    """``MemoryConfig.memory``."""

    @nn.compact
    def __call__(
        self,
        state: PyTree,
        features: jax.Array,
        is_first: jax.Array,
        final: jax.Array | tuple[()] = (),
    ) -> tuple[PyTree, tuple[jax.Array, jax.Array | tuple[()]]]:
        """Run over ``features [T * B, F]`` and ``is_first [T, B]``.

        Features ``final [T * B, F]`` are of last observations before the resets of the same rows:
        their outputs follow from the state before the row, and the state does not go on from them.

        Returns:
          The state after row T-1, as ``zero_core`` describes it; outputs ``[T * B, size]``, and
          those of ``final``.
        """

        def row(cell: Any, state: PyTree, x: PyTree) -> tuple[Any, PyTree]:
            features_t, is_first_t, final_t = x
            of_final = jax.tree.map(lambda final: cell(state, final)[1], final_t)
            state = jax.tree.map(lambda leaf: jnp.where(is_first_t[:, None], 0.0, leaf), state)
            state, output = cell(state, features_t)
            return state, (output, of_final)

        rows, final_rows = jax.tree.map(lambda x: x.reshape(*is_first.shape, -1), (features, final))
        if self.memory in ("lru", "gtrxl"):
            at_once: Any = LRU if self.memory == "lru" else GTrXL
            state, outputs = at_once(self.size)(state, rows, is_first, final_rows)
        else:
            scan = nn.scan(row, variable_broadcast="params", split_rngs={"params": False})
            kind: Any = nn.GRUCell if self.memory == "gru" else nn.OptimizedLSTMCell
            cell = kind(self.size, recurrent_kernel_init=orthogonal(1.0))
            state, outputs = scan(cell, state, (rows, is_first, final_rows))
        return state, jax.tree.map(lambda x: x.reshape(is_first.size, -1), outputs)


def zero_core(config: Any, num_envs: int) -> PyTree:
    """Return the state of a ``Core`` of B environments before any step; ``()`` for no memory.

    It is ``[B, size]`` of a GRU, two of these of an LSTM, and also of an LRU: real and imaginary
    part. Of a GTrXL it is the last 64 inputs ``[B, 64, size]``, and how many there are, ``[B]``.
    """
    if not config.lstm_size:
        return ()
    if config.memory == "gtrxl":
        return jnp.zeros((num_envs, WINDOW, config.lstm_size)), jnp.zeros(num_envs)
    parts = [jnp.zeros((num_envs, config.lstm_size)) for _ in range(2)]
    return parts[0] if config.memory == "gru" else tuple(parts)


def has_convolutions(networks: PyTree) -> bool:
    """Tell whether networks have kernels of convolutions, which alone have over two dimensions."""
    return any(leaf.ndim > 2 for leaf in jax.tree.leaves(networks))
