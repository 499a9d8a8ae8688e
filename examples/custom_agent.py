"""An agent of your own: advantage actor-critic on CartPole-v1.

    python examples/custom_agent.py

A template. An agent is a subclass of ``sebulba.Agent`` with a frozen dataclass of hyper-parameters;
``examples/impala.py`` explains what travels from method to method, and in which shapes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import sebulba
from sebulba.agent import TRAJECTORY_SPEC
from sebulba.agents.kernels.optimizer import masked_mean
from sebulba.agents.kernels.returns import n_step_returns, transitions


@dataclasses.dataclass(frozen=True)
class A2CConfig:
    """Hyper-parameters of A2C."""

    learning_rate: float = 3e-3
    """Step size of Adam."""
    discount: float = 0.98
    """Discount per environment step."""


class A2C(sebulba.Agent[A2CConfig]):
    """One update for every trajectory, as if the networks that acted were the newest ones."""

    def __init__(self, spec: sebulba.EnvSpec, config: A2CConfig) -> None:
        super().__init__(spec, config)
        num_actions = int(spec.action_space.n)  # type: ignore[attr-defined]
        # [..., O] -> [..., A + 1]: the logits of all actions, and the value.
        self.network: Any = nn.Sequential([nn.Dense(64), nn.tanh, nn.Dense(num_actions + 1)])
        self.optimizer = optax.adam(config.learning_rate)

    # The initial state: networks, optimizer, experience, and a step state for each Inferencer.

    def new_networks(self, key):
        return self.network.init(key, jnp.zeros(self.spec.observation_space.shape))

    def new_opt(self, networks):
        return self.optimizer.init(networks)

    def new_experience(self, key, networks, run):
        return self.empty_trajectory(networks, run)

    def new_step_state(self, key, run, inferencer):
        return key

    # Acting: obs [B, O] -> action [B].

    def step(self, networks, step_state, env_step, *, explore=True):
        logits = self.network.apply(networks, env_step.obs)[:, :-1]
        next_key, key = jax.random.split(step_state)
        action = jax.random.categorical(key, logits) if explore else jnp.argmax(logits, axis=-1)
        return sebulba.ActionOutput(action.astype(self.spec.action_space.dtype)), next_key

    def acting_distribution(self, networks, step_state, env_step):
        """What ``Policy.distribution`` and ``sebulba export`` say; nothing else needs it."""
        return jax.nn.softmax(self.network.apply(networks, env_step.obs)[:, :-1])

    # Learning: a trajectory in, new networks out.

    def update_experience(self, experience, initial, final, trajectory, networks):
        return trajectory

    def loss(self, networks, opt, experience, key):
        trajectory = experience
        output = self.network.apply(networks, trajectory.env_step.obs)  # [T+1, B, A + 1]
        logits, value = output[:-1, :, :-1], output[..., -1]
        step = transitions(trajectory, self.config.discount)  # [T, B]
        returns = jax.vmap(n_step_returns, in_axes=1, out_axes=1)(value, step)  # [T, B]
        advantage = returns - value[:-1]
        chosen = jax.nn.one_hot(trajectory.action, logits.shape[-1])
        log_prob = jnp.sum(chosen * jax.nn.log_softmax(logits), axis=-1)
        policy_loss = masked_mean(-jax.lax.stop_gradient(advantage) * log_prob, step.valid)
        value_loss = masked_mean(jnp.square(advantage), step.valid)
        return policy_loss + 0.5 * value_loss, (experience, {"value_loss": value_loss})

    def optimize(self, networks, opt, grads):
        updates, opt = self.optimizer.update(grads, opt, networks)
        return optax.apply_updates(networks, updates), opt

    def experience_spec(self):
        return TRAJECTORY_SPEC


def train(num_cycles: int = 400, **options: Any) -> sebulba.Result:
    """Train on CartPole-v1 and return what ``GymnasiumLoop.run`` returned."""
    env = sebulba.make_env_factory("CartPole-v1")
    agent = A2C(sebulba.env_spec(env), A2CConfig())
    with sebulba.GymnasiumLoop(env, agent, num_envs=32, **options) as loop:
        state = loop.new_state(0, steps_per_cycle=32)
        return loop.run(state, num_cycles, steps_per_cycle=32)


if __name__ == "__main__":
    result = train()
    mean = result.metrics["episode_return_mean"]
    print(f"mean return after {result.counters.env_steps:,} env steps: {mean:.1f} (random: 22)")
