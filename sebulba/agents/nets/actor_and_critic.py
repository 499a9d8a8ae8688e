"""The networks of an actor and of a critic that values its actions."""

from __future__ import annotations

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.lax import pmean, stop_gradient

from sebulba.agent import LEARNER_AXIS
from sebulba.agents.configs import TorsoConfig
from sebulba.agents.kernels.averages import AVERAGES, following
from sebulba.agents.nets.encoder import Encoded
from sebulba.agents.nets.torso import MLP, Torso, dense


class Actor(nn.Module):
    """From an encoded observation to numbers that say what to do, ``[N, num_params]``."""

    torso: TorsoConfig
    num_params: int

    @nn.compact
    def __call__(self, encoded: Encoded) -> jax.Array:
        """Return numbers that are near 0 before training, if kernels are orthogonal."""
        features = Torso(self.torso, name="torso")(encoded)
        return dense(self.num_params, 0.01, "head", self.torso.initial_kernels)(features)


class BatchRenorm(nn.Module):
    """Batch renormalisation (Ioffe 2017, arXiv 1702.03275) of ``[N, F]``, over all update devices.

    Limits, momentum and a start without correction are those of CrossQ (Bhatt et al. 2024,
    openreview.net/forum?id=PczQtTsTIX; github.com/adityab/CrossQ).
    """

    least_deviation = 1e-3
    most_scale, most_shift = 3.0, 5.0
    first_updates = 100_000

    @nn.compact
    def __call__(self, x: jax.Array, updates: jax.Array | None = None) -> jax.Array:
        """Normalise by running moments, or in a loss by those of the batch.

        Args:
          x: ``[N, F]``.
          updates: In a loss: updates so far. The module then sows a term of the loss into
            ``AVERAGES``, by which its running moments follow.
        """
        width = x.shape[1]
        moments = {"mean": jnp.zeros(width, jnp.float32), "variance": jnp.ones(width, jnp.float32)}
        averages = self.param(AVERAGES, lambda key: moments)
        scale = self.param("scale", nn.initializers.ones, (width,), jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (width,), jnp.float32)
        x, running = x.astype(jnp.float32), stop_gradient(averages)
        moments, corrects = running, jnp.bool_(False)
        if updates is not None:
            corrects = updates >= self.first_updates
            mean = pmean(jnp.mean(x, axis=0), LEARNER_AXIS)
            variance = pmean(jnp.mean(jnp.square(x - mean[None]), axis=0), LEARNER_AXIS)
            moments = {"mean": mean, "variance": variance}
            self.sow(AVERAGES, "loss", following(averages, moments))
        deviation = jnp.sqrt(moments["variance"] + self.least_deviation)
        known = jnp.sqrt(running["variance"] + self.least_deviation)
        most, reach = self.most_scale, self.most_shift
        r = jnp.clip(stop_gradient(deviation) / known, 1.0 / most, most)
        d = jnp.clip((stop_gradient(moments["mean"]) - running["mean"]) / known, -reach, reach)
        normalized = (x - moments["mean"][None]) / deviation[None]
        normalized = jnp.where(corrects, normalized * r[None] + d[None], normalized)
        return normalized * scale[None] + bias[None]


class Critic(nn.Module):
    """From an encoded observation and a unit action ``[N, K]`` to what they are worth, ``[N]``.

    The action joins the vector parts of the observation, and the features of its images, in front
    of the MLP; or the features of all of it, where the torso is one of one's own. With
    ``num_actions``, it is left out, and values are those of so many actions, ``[N, A]``.
    """

    torso: TorsoConfig
    num_actions: int = 0
    crossq: bool = False

    @nn.compact
    def __call__(
        self, encoded: Encoded, action: jax.Array, updates: jax.Array | None = None
    ) -> jax.Array:
        """Return the values; ``updates`` are those of CrossQ's ``BatchRenorm``."""
        action = action[:, : 0 if self.num_actions else None]
        parts = [encoded.vector, action]
        if self.torso.is_own:
            parts = [Torso(self.torso, name="torso")(encoded), action]
        elif encoded.images:
            only_images = encoded._replace(vector=encoded.vector[:, :0])
            parts.insert(0, Torso(self.torso, name="torso")(only_images))
        x = jnp.concatenate(parts, axis=-1)
        x = self._crossq(x, updates) if self.crossq else MLP(self.torso, name="mlp")(x)
        head = dense(max(self.num_actions, 1), 1.0, "head", self.torso.initial_kernels)
        values = head(x.astype(jnp.float32))
        return values if self.num_actions else values[:, 0]

    def _crossq(self, x: jax.Array, updates: jax.Array | None) -> jax.Array:
        """Return the output of an MLP whose inputs and hidden units are batch-renormalised."""
        config, x = self.torso, BatchRenorm()(x, updates)
        for size in config.hidden_sizes:
            x = dense(size, math.sqrt(2), None, config.initial_kernels, config.dtype)(x)
            x = BatchRenorm()(getattr(nn, config.activation)(x), updates)
        return x
