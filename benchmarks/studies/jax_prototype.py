"""PPO on a gymnax environment as somebody would write it without this library.

All of training is one compiled scan: act, learn, act, learn, in turn, on one device (the layout of
PureJaxRL, Lu et al. 2022). Nothing here imports the loop, the adapters or the agents. Nothing is
checked, counted, saved, recovered or stopped in time; truncations count as terminations.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from sebulba.agents.configs import PPOConfig
from sebulba.types import PyTree

orthogonal = nn.initializers.orthogonal


class Transitions(NamedTuple):
    """What a step leaves to learn from, ``[T, B, ...]``."""

    obs: jax.Array
    """Flat observations."""
    action: jax.Array
    """Actions taken."""
    log_prob: jax.Array
    """Of the action."""
    value: jax.Array
    """Of the observation."""
    reward: jax.Array
    """Of the action."""
    done: jax.Array
    """The episode ended."""


class ActorCritic(nn.Module):
    """Two towers of two hidden layers of 64."""

    num_actions: int

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return logits and value."""

        def tower(x: jax.Array, size: int, scale: float) -> jax.Array:
            for _ in range(2):
                x = nn.relu(nn.Dense(64, kernel_init=orthogonal(np.sqrt(2)))(x))
            return nn.Dense(size, kernel_init=orthogonal(scale))(x)

        return tower(x, self.num_actions, 0.01), tower(x, 1, 1.0)[..., 0]


class JaxPrototype:
    """Trains on the default device."""

    def __init__(
        self, env_id: str, config: PPOConfig, num_envs: int, num_steps: int, num_updates: int
    ) -> None:
        """Make it.

        Args:
          env_id: Id of gymnax's.
          config: Hyper-parameters, without those of the network.
          num_envs: B.
          num_steps: T.
          num_updates: Trajectories over which the learning rate falls to 0.
        """
        import gymnax

        self._env, self._params = gymnax.make(env_id)
        self._config, self._sizes = config, (num_steps, num_envs)
        self.env_steps_per_cycle = num_envs * num_steps
        self._network = ActorCritic(self._env.action_space(self._params).n)
        a_trajectory = config.epochs * config.minibatches
        rate = optax.linear_schedule(config.learning_rate, 0.0, num_updates * a_trajectory)
        self._optimizer = optax.chain(
            optax.clip_by_global_norm(config.optimizer.max_grad_norm),
            optax.adam(rate, eps=config.optimizer.epsilon),
        )
        self._state = jax.jit(self._begin)(jax.random.key(0))
        self._train = jax.jit(
            lambda state, number: jax.lax.scan(self._cycle, state, None, number),
            static_argnums=1,
            donate_argnums=0,
        )

    def train(self, num_cycles: int) -> float:
        """Go on for this many trajectories; return the mean reward of a step."""
        self._state, reward = self._train(self._state, num_cycles)
        return float(reward.mean())

    def _begin(self, key: jax.Array) -> PyTree:
        key, reset_key = jax.random.split(key)
        keys = jax.random.split(reset_key, self._sizes[1])
        obs, env_state = jax.vmap(lambda k: self._env.reset(k, self._params))(keys)
        obs = obs.reshape(self._sizes[1], -1)
        networks = self._network.init(key, obs)
        return networks, self._optimizer.init(networks), env_state, obs, key

    def _evaluate(self, networks: PyTree, obs: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self._network.apply(networks, obs)  # type: ignore[return-value]

    def _cycle(self, state: PyTree, _: None) -> tuple[PyTree, jax.Array]:
        networks, opt, env_state, obs, key = state
        (env_state, obs, key), rows = jax.lax.scan(
            functools.partial(self._step, networks), (env_state, obs, key), None, self._sizes[0]
        )
        advantages = self._advantages(rows, self._evaluate(networks, obs)[1])
        batch = jax.tree.map(
            lambda x: x.reshape(-1, *x.shape[2:]), (rows, advantages, advantages + rows.value)
        )
        (networks, opt, key), _ = jax.lax.scan(
            functools.partial(self._epoch, batch), (networks, opt, key), None, self._config.epochs
        )
        return (networks, opt, env_state, obs, key), rows.reward.mean()

    def _step(self, networks: PyTree, carry: PyTree, _: None) -> tuple[PyTree, Transitions]:
        env_state, obs, key = carry
        key, action_key, env_key = jax.random.split(key, 3)
        logits, value = self._evaluate(networks, obs)
        action = jax.random.categorical(action_key, logits)
        log_prob = _log_prob(logits, action)
        keys = jax.random.split(env_key, len(obs))
        step = jax.vmap(lambda k, s, a: self._env.step(k, s, a, self._params))
        next_obs, env_state, reward, *ends, _ = step(keys, env_state, action)
        done = functools.reduce(jnp.logical_or, ends)
        row = Transitions(obs, action, log_prob, value, reward, done)
        return (env_state, next_obs.reshape(obs.shape), key), row

    def _advantages(self, rows: Transitions, last_value: jax.Array) -> jax.Array:
        discount, decay = self._config.discount, self._config.trace_decay

        def back(carry: tuple, row: Transitions) -> tuple[tuple, jax.Array]:
            advantage, next_value = carry
            goes_on = discount * (1 - row.done)
            delta = row.reward + goes_on * next_value - row.value
            advantage = delta + goes_on * decay * advantage
            return (advantage, row.value), advantage

        first = jnp.zeros_like(last_value), last_value
        return jax.lax.scan(back, first, rows, reverse=True, unroll=16)[1]

    def _epoch(self, batch: PyTree, carry: PyTree, _: None) -> tuple[PyTree, None]:
        networks, opt, key = carry
        key, order_key = jax.random.split(key)
        order = jax.random.permutation(order_key, self.env_steps_per_cycle)
        minibatches = jax.tree.map(
            lambda x: x[order].reshape(self._config.minibatches, -1, *x.shape[1:]), batch
        )

        def update(carry: PyTree, minibatch: PyTree) -> tuple[PyTree, None]:
            networks, opt = carry
            grads = jax.grad(self._loss)(networks, *minibatch)
            changes, opt = self._optimizer.update(grads, opt)
            return (optax.apply_updates(networks, changes), opt), None

        (networks, opt), _ = jax.lax.scan(update, (networks, opt), minibatches)
        return (networks, opt, key), None

    def _loss(
        self, networks: PyTree, rows: Transitions, advantage: jax.Array, target: jax.Array
    ) -> jax.Array:
        config = self._config
        logits, value = self._evaluate(networks, rows.obs)
        moved = jnp.clip(value - rows.value, -config.value_clip, config.value_clip)
        value_error = jnp.maximum((value - target) ** 2, (rows.value + moved - target) ** 2)
        ratio = jnp.exp(_log_prob(logits, rows.action) - rows.log_prob)
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        clipped = jnp.clip(ratio, 1 - config.ratio_clip, 1 + config.ratio_clip)
        gain = jnp.minimum(ratio * advantage, clipped * advantage)
        log_probs = jax.nn.log_softmax(logits)
        entropy = -(jnp.exp(log_probs) * log_probs).sum(-1)
        value_loss = 0.5 * config.value_coefficient * value_error.mean()
        return value_loss - gain.mean() - config.entropy_coefficient * entropy.mean()


def _log_prob(logits: jax.Array, action: jax.Array) -> jax.Array:
    return jnp.take_along_axis(jax.nn.log_softmax(logits), action[..., None], -1)[..., 0]
