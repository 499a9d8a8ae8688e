"""Networks of the values of discrete actions, with an optional recurrent core."""

from __future__ import annotations

from typing import NamedTuple

import flax.linen as nn
import gymnasium
import jax
import jax.numpy as jnp

from sebulba.agents.configs import TorsoConfig
from sebulba.agents.kernels.distributions import Categorical
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


class QHead(nn.Module):
    """From features to the values of A actions: ``[N, F] -> [N, A]``.

    Dueling: ``Q = V + A - mean(A)`` (Wang et al. 2016, arXiv 1511.06581, equation 9).
    """

    num_actions: int
    hidden_sizes: tuple[int, ...]
    dueling: bool

    @nn.compact
    def __call__(self, features: jax.Array) -> jax.Array:
        """Return the values."""
        advantage = self._stream(features, self.num_actions, "advantage")
        if not self.dueling:
            return advantage
        value = self._stream(features, 1, "value")
        return value + advantage - jnp.mean(advantage, axis=-1, keepdims=True)

    def _stream(self, features: jax.Array, size: int, name: str) -> jax.Array:
        hidden = MLP(self.hidden_sizes, "relu", name=f"{name}_hidden")(features)
        return dense(size, 1.0, name)(hidden)


class QNetwork(nn.Module):
    """Torso, optional LSTM, and a head for the values of all actions."""

    num_actions: int
    torso: TorsoConfig
    head_hidden_sizes: tuple[int, ...] = ()
    dueling: bool = False
    lstm_size: int = 0

    @nn.compact
    def __call__(
        self,
        encoded: Encoded,
        core: PyTree,
        is_first: jax.Array,
        past: jax.Array | None = None,
        final: Encoded | None = None,
        final_past: jax.Array | None = None,
    ) -> QOutput:
        """Evaluate T rows of B environments.

        Args:
          encoded: ``[T * B, ...]``.
          core: Recurrent state before row 0, ``([B, L], [B, L])``, or ``()`` without an LSTM.
          is_first: ``[T, B]``; the recurrent state is reset there before the row is consumed.
          past: ``[T * B, K]``, what stands beside the features: previous action and reward.
          final: ``[T * B, ...]``, last observations before the resets of the rows.
          final_past: What stands beside their features.
        """
        torso = Torso(self.torso, name="torso")
        features, final_features = torso(encoded), () if final is None else torso(final)
        if past is not None:
            features = jnp.concatenate([features, past], axis=-1)
        if final_past is not None and not isinstance(final_features, tuple):
            final_features = jnp.concatenate([final_features, final_past], axis=-1)
        if self.lstm_size:
            lstm = Core(self.lstm_size, name="core")
            core, (features, final_features) = lstm(core, features, is_first, final_features)
        head = QHead(self.num_actions, self.head_hidden_sizes, self.dueling, name="head")
        values, final_values = jax.tree.map(
            lambda x: head(x).reshape(*is_first.shape, -1), (features, final_features)
        )
        return QOutput(values, core, final_values)


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
