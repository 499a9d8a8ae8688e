"""Networks of the values of discrete actions, with an optional recurrent core."""

from __future__ import annotations

import functools
from typing import NamedTuple

import flax.linen as nn
import gymnasium
import jax
import jax.numpy as jnp

from sebulba.agents.configs import TorsoConfig
from sebulba.agents.configs.off_policy import ValueBasedConfig
from sebulba.agents.kernels.distributions import Categorical
from sebulba.agents.kernels.value_distributions import expected_value
from sebulba.agents.nets.encoder import Encoded
from sebulba.agents.nets.torso import MLP, Core, Torso, dense
from sebulba.errors import UsageError
from sebulba.types import PyTree


class QOutput(NamedTuple):
    """What every row is worth, ``[T, B, ...]``."""

    values: jax.Array
    """Value of every action, ``[T, B, A]``."""
    core: PyTree
    """Recurrent state after the last row, ``[B, ...]``."""
    final_values: jax.Array | tuple[()] = ()
    """Values of the last observations before the resets of the rows, ``[T, B, A]``, if any are
    given to the network."""
    logits: jax.Array | tuple[()] = ()
    """Of the distributions of the values: logits ``[T, B, A, atoms]``, or the quantiles themselves,
    ``[T, B, A, quantiles]``; ``()`` without either."""


NOISE = "noise"
"""Name of the stream of random numbers that noisy layers draw from."""


class NoisyDense(nn.Module):
    """A dense layer with factorised Gaussian noise of a learned size: ``[N, F] -> [N, size]``.

    ``y = (M + S * f(u) f(v)^T)^T x + m + s * f(v)`` with ``f(e) = sign(e) sqrt(|e|)``, and u and v
    drawn for each of the N rows from the stream ``NOISE``; without this stream they are 0.
    Source: Fortunato et al. 2018 (arXiv 1706.10295), equations 9 to 11 and section 3.2.
    """

    size: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the outputs."""
        bound = x.shape[1] ** -0.5
        uniform = functools.partial(jax.random.uniform, minval=-bound, maxval=bound)
        constant = nn.initializers.constant(0.5 * bound)
        mean = nn.Dense(self.size, kernel_init=uniform, bias_init=uniform, name="mean")
        noise = nn.Dense(self.size, kernel_init=constant, bias_init=constant, name="noise")
        of_inputs = self._noise(x.shape)
        return mean(x) + noise(x * of_inputs) * self._noise((x.shape[0], self.size))

    def _noise(self, shape: tuple[int, ...]) -> jax.Array:
        if not self.has_rng(NOISE):
            return jnp.zeros(shape, jnp.float32)
        noise = jax.random.normal(self.make_rng(NOISE), shape, jnp.float32)
        return jnp.sign(noise) * jnp.sqrt(jnp.abs(noise))


class QHead(nn.Module):
    """From features to the values of A actions: ``[N, F] -> [N, A]``.

    With atoms, to so many numbers of each: ``[N, F] -> [N, A, atoms]``, such as the logits of its
    distribution. Dueling: ``Q = V + A - mean(A)`` (Wang et al. 2016, arXiv 1511.06581, equation 9).
    """

    num_actions: int
    hidden_sizes: tuple[int, ...]
    dueling: bool
    atoms: int = 0
    noisy: bool = False

    @nn.compact
    def __call__(self, features: jax.Array) -> jax.Array:
        """Return the values, or the numbers of their distributions."""
        advantage = self._stream(features, self.num_actions, "advantage")
        if not self.dueling:
            return advantage
        value = self._stream(features, 1, "value")
        return value + advantage - jnp.mean(advantage, axis=1, keepdims=True)

    def _stream(self, features: jax.Array, size: int, name: str) -> jax.Array:
        units = size * max(self.atoms, 1)
        if self.noisy:
            for number, width in enumerate(self.hidden_sizes):
                features = nn.relu(NoisyDense(width, name=f"{name}_hidden_{number}")(features))
            outputs = NoisyDense(units, name=name)(features)
        else:
            layers = TorsoConfig(hidden_sizes=self.hidden_sizes, activation="relu")
            outputs = dense(units, 1.0, name)(MLP(layers, name=f"{name}_hidden")(features))
        return outputs.reshape(-1, size, self.atoms) if self.atoms else outputs


class QNetwork(nn.Module):
    """Torso, optional memory, and a head for the values of all actions.

    With a support, the head's logits are distributions over it, and values are their means. With
    quantiles, values are the means of what the head puts out.
    """

    num_actions: int
    config: ValueBasedConfig
    support: tuple[float, ...] = ()
    quantiles: int = 0
    noisy: bool = False

    @nn.compact
    def __call__(
        self,
        encoded: Encoded,
        core: PyTree,
        is_first: jax.Array,
        final: Encoded | None = None,
        past: jax.Array | None = None,
        final_past: jax.Array | None = None,
    ) -> QOutput:
        """Evaluate T rows of B environments.

        Args:
          encoded: ``[T * B, ...]``.
          core: Recurrent state before row 0, leaves ``[B, L]``, or ``()`` without a memory.
          is_first: ``[T, B]``; the recurrent state is reset there before the row is consumed.
          final: ``[T * B, ...]``, last observations before the resets of the rows.
          past: ``[T * B, K]``, what stands beside the features: previous action and reward.
          final_past: What stands beside their features.
        """
        config = self.config
        torso = Torso(config.torso, name="torso")
        features, final_features = torso(encoded), () if final is None else torso(final)
        if past is not None:
            features = jnp.concatenate([features, past], axis=-1)
        if final_past is not None and not isinstance(final_features, tuple):
            final_features = jnp.concatenate([final_features, final_past], axis=-1)
        if config.lstm_size:
            memory = Core(config.lstm_size, config.memory, name="core")
            core, (features, final_features) = memory(core, features, is_first, final_features)
        sizes, atoms = config.head_hidden_sizes, len(self.support) or self.quantiles
        head = QHead(self.num_actions, sizes, config.dueling, atoms, self.noisy, name="head")

        def evaluate(features: jax.Array) -> jax.Array:
            values = head(features)
            return values.reshape(*is_first.shape, *values.shape[1:])

        outputs = jax.tree.map(evaluate, (features, final_features))
        if not atoms:
            return QOutput(outputs[0], core, outputs[1])
        support = jnp.asarray(self.support)
        mean = functools.partial(expected_value, support=support)
        if self.quantiles:
            mean = functools.partial(jnp.mean, axis=-1)
        values, final_values = jax.tree.map(mean, outputs)
        return QOutput(values, core, final_values, outputs[0])


def discrete_actions(space: gymnasium.Space, agent_name: str) -> Categorical:
    """Return what turns indices of actions into actions.

    Raises:
      UsageError: Not a Discrete space.
    """
    if not isinstance(space, gymnasium.spaces.Discrete):
        raise UsageError(
            f"action_space={space} must be a Discrete for {agent_name}, which compares the values "
            "of all actions; use an agent for such actions, Impala, PPO, SAC or DDPG"
        )
    return Categorical(space)
