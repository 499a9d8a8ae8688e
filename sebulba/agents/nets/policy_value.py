"""The network of a policy with a value: features, then one head for each."""

from __future__ import annotations

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from sebulba.agents.configs import TorsoConfig
from sebulba.agents.nets.encoder import Encoded
from sebulba.agents.nets.torso import Core, Torso, dense
from sebulba.types import PyTree


class ActorCriticOutput(NamedTuple):
    """What a policy says of every row, ``[T, B, ...]``."""

    params: jax.Array
    """Parameters of the action distribution, ``[T, B, P]``."""
    value: jax.Array
    """``[T, B]``; zeros where there is no value head."""
    core: PyTree
    """Recurrent state after the last row, ``[B, ...]``."""


class ActorCritic(nn.Module):
    """Torso, optional LSTM, and heads for policy and value.

    Of the parameters of the action distribution, ``num_params`` depend on the observation, and
    ``num_free_params``, which are ``initial_free_param`` before training, do not.
    """

    num_params: int
    num_free_params: int
    initial_free_param: float
    torso: TorsoConfig
    lstm_size: int
    value_head: bool
    separate_value_torso: bool

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
        params = dense(self.num_params, 0.01, "policy")(features)
        if self.num_free_params:
            init = nn.initializers.constant(self.initial_free_param)
            free = self.param("policy_free", init, (self.num_free_params,))
            free = jnp.broadcast_to(free[None], (params.shape[0], free.shape[0]))
            params = jnp.concatenate([params, free], axis=-1)
        value = jnp.zeros(is_first.shape)
        if self.value_head:
            if self.separate_value_torso:
                features = Torso(self.torso, name="value_torso")(encoded)
            value = dense(1, 1.0, "value")(features).reshape(is_first.shape)
        return ActorCriticOutput(params.reshape(*is_first.shape, -1), value, core)
