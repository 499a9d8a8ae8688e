"""How much each environment explores."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from sebulba.agent import LEARNER_AXIS
from sebulba.types import RunSpec


def exploration_ladder(run: RunSpec, inferencer: int, *, base: float, exponent: float) -> jax.Array:
    """Return ``base ** (1 + exponent * i / (N - 1))`` for environment i of all N.

    The first environment of all explores at ``base`` and the last at ``base ** (1 + exponent)``;
    a single one at ``base``. Source: Horgan et al. 2018 (arXiv 1803.00933), section 4.1.

    Args:
      run: N is ``num_inferencers * num_envs``.
      inferencer: Whose environments.
      base: Probability of a random action, or scale of the noise.
      exponent: Alpha of the paper; 0 gives all the same.

    Returns:
      ``[B]`` float32.
    """
    index = inferencer * run.num_envs + jnp.arange(run.num_envs)
    last = max(run.num_inferencers * run.num_envs - 1, 1)
    return jnp.float32(base) ** (1.0 + exponent * index.astype(jnp.float32) / last)


class FallingEpsilon(NamedTuple):
    """Probability of a random action, which falls linearly while its Inferencer steps."""

    initial: jax.Array
    """At the beginning, scalar."""
    final: jax.Array
    """In the end, ``[B]``."""
    share: jax.Array
    """Share of the way from initial to final that is done, scalar from 0 to 1."""
    share_per_step: jax.Array
    """What a step of the vector environment adds to ``share``, scalar."""

    @classmethod
    def new(cls, initial: float, final: jax.Array, env_steps: int, run: RunSpec) -> FallingEpsilon:
        """Return one that is at ``final [B]`` after ``env_steps`` of all Inferencers together."""
        per_step = run.num_inferencers * run.num_envs / env_steps if env_steps else 1.0
        begin = 0.0 if env_steps else 1.0
        return cls(jnp.float32(initial), final, jnp.float32(begin), jnp.float32(per_step))

    @property
    def value(self) -> jax.Array:
        """The probability now, ``[B]``."""
        return self.initial + (self.final - self.initial) * self.share

    def stepped(self) -> FallingEpsilon:
        """Return the state after a step of the vector environment."""
        return self._replace(share=jnp.minimum(self.share + self.share_per_step, 1.0))


FALLING_EPSILON_SPEC = FallingEpsilon(P(), P(LEARNER_AXIS), P(), P())  # type: ignore[arg-type]
"""PartitionSpecs of a FallingEpsilon."""


def epsilon_greedy(
    key: jax.Array, greedy: jax.Array, num_actions: int, epsilon: jax.Array
) -> jax.Array:
    """Return ``greedy`` indices of actions, random ones with probability ``epsilon``.

    Args:
      key: Typed PRNG key.
      greedy: ``[B]`` int32, from 0.
      num_actions: Random indices are below this.
      epsilon: ``[B]``.

    Returns:
      ``[B]`` int32.
    """
    explore_key, action_key = jax.random.split(key)
    explores = jax.random.uniform(explore_key, greedy.shape) < epsilon
    other = jax.random.randint(action_key, greedy.shape, 0, num_actions, greedy.dtype)
    return jnp.where(explores, other, greedy)
