"""The networks of an actor and of a critic that values its actions."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from sebulba.agents.configs import TorsoConfig
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


class Critic(nn.Module):
    """From an encoded observation and a unit action ``[N, K]`` to what they are worth, ``[N]``.

    The action joins the vector parts of the observation, and the features of its images, in front
    of the MLP; or the features of all of it, where the torso is one of one's own. With
    ``num_actions``, it is left out, and values are those of so many actions, ``[N, A]``.
    """

    torso: TorsoConfig
    num_actions: int = 0

    @nn.compact
    def __call__(self, encoded: Encoded, action: jax.Array) -> jax.Array:
        """Return the values."""
        action = action[:, : 0 if self.num_actions else None]
        parts = [encoded.vector, action]
        if self.torso.is_own:
            parts = [Torso(self.torso, name="torso")(encoded), action]
        elif encoded.images:
            only_images = encoded._replace(vector=encoded.vector[:, :0])
            parts.insert(0, Torso(self.torso, name="torso")(only_images))
        mlp = MLP(self.torso, name="mlp")
        head = dense(max(self.num_actions, 1), 1.0, "head", self.torso.initial_kernels)
        values = head(mlp(jnp.concatenate(parts, axis=-1)).astype(jnp.float32))
        return values if self.num_actions else values[:, 0]
