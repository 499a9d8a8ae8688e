"""A network of your own in an agent that is there: Impala with layer norm and skip connections.

    python examples/custom_network.py

Override two methods of an on-policy agent: ``new_networks``, which makes the parameters, and
``evaluate``, which is called both to act (T = 1) and in the loss (T + 1 rows). Everything else, the
distribution of actions, the loss and the optimizer, stays as it is.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import sebulba
from sebulba.agents.bases.on_policy import ActorCriticOutput
from sebulba.agents.configs import ImpalaConfig, OptimizerConfig
from sebulba.agents.impala import Impala


class ResidualNetwork(nn.Module):
    """``[..., O] -> parameters of the action distribution [..., P], value [...]``."""

    num_params: int
    features: int = 64
    num_blocks: int = 2

    @nn.compact
    def __call__(self, obs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Apply all blocks, and a head for each output."""
        x = nn.Dense(self.features)(obs.astype(jnp.float32))
        for _ in range(self.num_blocks):
            x = x + nn.Dense(self.features)(nn.relu(nn.LayerNorm()(x)))
        params = nn.Dense(self.num_params, kernel_init=nn.initializers.orthogonal(0.01))(x)
        return params, nn.Dense(1)(x)[..., 0]


class ResidualImpala(Impala):
    """Impala whose policy and value are a ``ResidualNetwork``; observations are vectors."""

    @property
    def residual(self) -> Any:
        """The module; ``num_params`` is 2 for CartPole, the logits of its actions."""
        return ResidualNetwork(self.distribution.num_params)

    def new_networks(self, key: jax.Array) -> Any:
        """Return the initial parameters."""
        return self.residual.init(key, jnp.zeros(self.spec.observation_space.shape))

    def evaluate(self, networks: Any, obs: Any, core: Any, is_first: Any) -> ActorCriticOutput:
        """Evaluate rows of observations, ``[T, B, O]``; there is no recurrent state, ``core``."""
        params, value = self.residual.apply(networks, obs)
        return ActorCriticOutput(params, value, core)


def train(num_cycles: int = 300, **options: Any) -> sebulba.Result:
    """Train on CartPole-v1 and return what ``GymnasiumLoop.run`` returned."""
    env = sebulba.make_env_factory("CartPole-v1")
    config = ImpalaConfig(
        learning_rate=2e-3,
        entropy_coefficient=0.002,
        reward_scale=0.1,
        optimizer=OptimizerConfig(epsilon=1e-3),
    )
    agent = ResidualImpala(sebulba.env_spec(env), config)
    with sebulba.GymnasiumLoop(env, agent, num_envs=32, **options) as loop:
        state = loop.new_state(0, steps_per_cycle=32)
        return loop.run(state, num_cycles, steps_per_cycle=32)


if __name__ == "__main__":
    result = train()
    mean = result.metrics["episode_return_mean"]
    print(f"mean return after {result.counters.env_steps:,} env steps: {mean:.1f} (random: 22)")
