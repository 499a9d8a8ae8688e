"""Networks of the values of discrete actions, with an optional recurrent core."""

from __future__ import annotations

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
    """Logits of the distributions of the values, ``[T, B, A, atoms]``; ``()`` without atoms."""


class QHead(nn.Module):
    """From features to the values of A actions: ``[N, F] -> [N, A]``.

    With atoms, to the logits of their distributions: ``[N, F] -> [N, A, atoms]``. Dueling:
    ``Q = V + A - mean(A)`` (Wang et al. 2016, arXiv 1511.06581, equation 9), of values or logits.
    """

    num_actions: int
    hidden_sizes: tuple[int, ...]
    dueling: bool
    atoms: int = 0

    @nn.compact
    def __call__(self, features: jax.Array) -> jax.Array:
        """Return the values, or the logits."""
        advantage = self._stream(features, self.num_actions, "advantage")
        if not self.dueling:
            return advantage
        value = self._stream(features, 1, "value")
        return value + advantage - jnp.mean(advantage, axis=1, keepdims=True)

    def _stream(self, features: jax.Array, size: int, name: str) -> jax.Array:
        layers = TorsoConfig(hidden_sizes=self.hidden_sizes, activation="relu")
        hidden = MLP(layers, name=f"{name}_hidden")(features)
        if not self.atoms:
            return dense(size, 1.0, name)(hidden)
        return dense(size * self.atoms, 1.0, name)(hidden).reshape(-1, size, self.atoms)


class QNetwork(nn.Module):
    """Torso, optional memory, and a head for the values of all actions.

    With a support, the head's logits are distributions over it, and values are their means.
    """

    num_actions: int
    config: ValueBasedConfig
    support: tuple[float, ...] = ()

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
        sizes, atoms = config.head_hidden_sizes, len(self.support)
        head = QHead(self.num_actions, sizes, config.dueling, atoms, name="head")

        def evaluate(features: jax.Array) -> jax.Array:
            values = head(features)
            return values.reshape(*is_first.shape, *values.shape[1:])

        outputs = jax.tree.map(evaluate, (features, final_features))
        if not atoms:
            return QOutput(outputs[0], core, outputs[1])
        support = jnp.asarray(self.support)
        values, final_values = jax.tree.map(lambda x: expected_value(x, support), outputs)
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
