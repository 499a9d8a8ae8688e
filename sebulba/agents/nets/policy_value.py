"""The network of a policy with a value: features, then one head for each."""

from __future__ import annotations

import math
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from sebulba.agents.configs.on_policy import OnPolicyConfig
from sebulba.agents.kernels import popart
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
    final_value: jax.Array | tuple[()] = ()
    """Value of the last observations before the resets of the rows, ``[T, B]``, if any are given
    to the network."""


class ActorCritic(nn.Module):
    """Torso, optional memory, and heads for policy and value.

    Of the parameters of the action distribution, ``num_params`` depend on the observation, and
    ``num_free_params``, the logarithms of standard deviations, do not.
    """

    num_params: int
    num_free_params: int
    config: OnPolicyConfig
    value_head: bool

    @nn.compact
    def __call__(
        self,
        encoded: Encoded,
        core: PyTree,
        is_first: jax.Array,
        final: Encoded | None = None,
        of_critic: tuple[Encoded, Encoded | None] | None = None,
    ) -> ActorCriticOutput:
        """Evaluate T rows of B environments.

        Args:
          encoded: ``[T * B, ...]``; all rows go through one matrix product a layer.
          core: Recurrent state before row 0, leaves ``[B, L]``, or ``()`` without a memory.
          is_first: ``[T, B]``; the recurrent state is reset there before the row is consumed.
          final: ``[T * B, ...]``, last observations before the resets of the rows.
          of_critic: What a value torso of its own sees in place of ``encoded`` and ``final``.
        """
        config = self.config
        torso = Torso(config.torso, name="torso")
        features, final_features = torso(encoded), () if final is None else torso(final)
        if config.lstm_size:
            memory = Core(config.lstm_size, config.memory, name="core")
            core, (features, final_features) = memory(core, features, is_first, final_features)
        params = dense(self.num_params, 0.01, "policy")(features)
        if self.num_free_params:
            init = nn.initializers.constant(math.log(config.initial_std))
            free = self.param("policy_free", init, (self.num_free_params,))
            free = jnp.broadcast_to(free[None], (params.shape[0], free.shape[0]))
            params = jnp.concatenate([params, free], axis=-1)
        value = jnp.zeros(is_first.shape)
        final_value = () if final is None else value
        if self.value_head:
            if config.separate_value_torso or config.central_critic:
                value_torso = Torso(config.torso, name="value_torso")
                encoded, final = (encoded, final) if of_critic is None else of_critic
                features = value_torso(encoded)
                final_features = () if final is None else value_torso(final)
            head = dense(1, 1.0, popart.HEAD)
            value, final_value = jax.tree.map(
                lambda x: head(x).reshape(is_first.shape), (features, final_features)
            )
            if config.popart:
                scale = self.param(popart.SCALE, lambda key: popart.new_statistics())
                value, final_value = jax.tree.map(
                    lambda x: popart.in_units_of_rewards(scale, x), (value, final_value)
                )
        return ActorCriticOutput(params.reshape(*is_first.shape, -1), value, core, final_value)
