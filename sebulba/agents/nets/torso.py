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
from sebulba.agents.nets.encoder import Encoded
from sebulba.errors import UsageError, shown
from sebulba.support.user_code import load_attribute
from sebulba.types import PyTree

_NATURE_CNN_LEAST_PIXELS = 36
_SMALL_CNN_MOST_FEATURES = 128


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


class MLP(nn.Module):
    """Dense layers, each followed by the activation: ``[N, V] -> [N, sizes[-1]]``."""

    sizes: tuple[int, ...]
    activation: str
    kernels: str = "orthogonal"
    dtype: str = "float32"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply all layers."""
        activation: Callable[[jax.Array], jax.Array] = getattr(nn, self.activation)
        for size in self.sizes:
            x = activation(dense(size, math.sqrt(2), None, self.kernels, self.dtype)(x))
        return x


class NatureCNN(nn.Module):
    """Three convolutions and a dense layer (Mnih et al. 2015): ``[N, H, W, C] -> [N, features]``.

    Raises:
      UsageError: An image of fewer than 36 x 36 pixels, which the strides would use up.
    """

    features: int
    dtype: str = "float32"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply all layers."""
        if min(x.shape[1:3]) < _NATURE_CNN_LEAST_PIXELS:
            raise UsageError(
                f"torso.kind='nature_cnn' cannot take images of {x.shape[1]} x {x.shape[2]} "
                "pixels, it needs 36 x 36; use auto, impala_resnet or mlp"
            )
        conv = functools.partial(
            nn.Conv, padding="VALID", kernel_init=orthogonal(math.sqrt(2)), dtype=self.dtype
        )
        for channels, window, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
            x = nn.relu(conv(channels, (window, window), stride)(x))
        last = dense(self.features, math.sqrt(2), dtype=self.dtype)
        return nn.relu(last(x.reshape(x.shape[0], -1)))


class SmallCNN(nn.Module):
    """A convolution of 16 channels and a dense layer, for images of a few pixels.

    ``[N, H, W, C] -> [N, features]``, as the networks of MinAtar (Young and Tian 2019).
    """

    features: int
    dtype: str = "float32"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply both layers."""
        init = orthogonal(math.sqrt(2))
        x = nn.relu(nn.Conv(16, (3, 3), kernel_init=init, dtype=self.dtype)(x))
        last = dense(self.features, math.sqrt(2), dtype=self.dtype)
        return nn.relu(last(x.reshape(x.shape[0], -1)))


class ImpalaResNet(nn.Module):
    """The deep network of IMPALA (Espeholt et al. 2018, figure 3, right).

    ``[N, H, W, C] -> [N, features]``. Each section halves height and width.
    """

    channels: tuple[int, ...]
    features: int
    dtype: str = "float32"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply all sections and the dense layer."""
        conv = functools.partial(nn.Conv, kernel_size=(3, 3), dtype=self.dtype)
        for channels in self.channels:
            x = conv(channels)(x)
            x = nn.max_pool(x, (3, 3), (2, 2), padding="SAME")
            for _ in range(2):
                y = conv(channels)(nn.relu(x))
                x = x + conv(channels)(nn.relu(y))
        x = nn.relu(x)
        last = dense(self.features, math.sqrt(2), dtype=self.dtype)
        return nn.relu(last(x.reshape(x.shape[0], -1)))


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
            return _checked_features(self.config.kind, own_torso(self.config.kind)(_only(encoded)))
        parts = [self._image_network(image)(image) for image in encoded.images]
        if encoded.vector.shape[-1]:
            config = self.config
            kernels, dtype = config.initial_kernels, config.dtype
            mlp = MLP(config.hidden_sizes, config.activation, kernels, dtype)
            parts.append(mlp(encoded.vector))
        return jnp.concatenate(parts, axis=-1).astype(jnp.float32)

    def _image_network(self, image: jax.Array) -> nn.Module:
        kind, dtype = self.config.kind, self.config.dtype
        if kind == "auto":
            kind = self._by_size(*image.shape[1:3])
        if kind == "nature_cnn":
            return NatureCNN(self.config.image_features, dtype)
        if kind == "small_cnn":
            return SmallCNN(min(self.config.image_features, _SMALL_CNN_MOST_FEATURES), dtype)
        return ImpalaResNet(self.config.resnet_channels, self.config.image_features, dtype)

    def _by_size(self, height: int, width: int) -> str:
        """Return the network that "auto" takes for images of this size."""
        if min(height, width) >= _NATURE_CNN_LEAST_PIXELS:
            return "nature_cnn"
        is_small = height * width <= self.config.small_image_pixels
        return "small_cnn" if is_small else "impala_resnet"


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


def _only(encoded: Encoded) -> Any:
    """Return the only array of an observation; all of it where there are several."""
    arrays = [*encoded.images, *([encoded.vector] if encoded.vector.shape[-1] else [])]
    return arrays[0] if len(arrays) == 1 else encoded


def _checked_features(name: str, features: Any) -> jax.Array:
    if isinstance(features, jax.Array) and features.ndim == 2:
        return features
    got = getattr(features, "shape", type(features).__name__)
    raise UsageError(
        f"torso.kind={name!r} returns {got}; it must return features [N, F] for N observations"
    )


class Core(nn.Module):
    """An LSTM over time whose state is zero where an episode begins."""

    size: int

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
          The state after row T-1, ``([B, size], [B, size])``; outputs ``[T * B, size]``, and those
          of ``final``.
        """

        def row(cell: Any, state: PyTree, x: PyTree) -> tuple[Any, PyTree]:
            features_t, is_first_t, final_t = x
            of_final = jax.tree.map(lambda final: cell(state, final)[1], final_t)
            state = jax.tree.map(lambda leaf: jnp.where(is_first_t[:, None], 0.0, leaf), state)
            state, output = cell(state, features_t)
            return state, (output, of_final)

        scan = nn.scan(row, variable_broadcast="params", split_rngs={"params": False})
        cell = nn.OptimizedLSTMCell(self.size, recurrent_kernel_init=orthogonal(1.0))
        rows, final_rows = jax.tree.map(lambda x: x.reshape(*is_first.shape, -1), (features, final))
        state, outputs = scan(cell, state, (rows, is_first, final_rows))
        return state, jax.tree.map(lambda x: x.reshape(is_first.size, -1), outputs)


def zero_core(size: int, num_envs: int) -> PyTree:
    """Return the state of a ``Core`` of B environments before any step; ``()`` for size 0."""
    return tuple(jnp.zeros((num_envs, size)) for _ in range(2)) if size else ()


def has_convolutions(networks: PyTree) -> bool:
    """Tell whether networks have kernels of convolutions, which alone have over two dimensions."""
    return any(leaf.ndim > 2 for leaf in jax.tree.leaves(networks))
