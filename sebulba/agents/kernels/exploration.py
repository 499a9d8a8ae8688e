"""How much each environment explores."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sebulba.types import RunSpec

_LARGEST_INT32 = 2**31 - 1


def exploration_ladder(run: RunSpec, inferencer: int, *, base: float, exponent: float) -> jax.Array:
    """Return ``base ** (1 + exponent * i / (N - 1))`` for environment i of all N.

    The first environment of all explores at ``base`` and the last at ``base ** (1 + exponent)``;
    a single one at ``base``. Source: Horgan et al. 2018 (arXiv 1803.00933), section 4.1.

    Args:
      run: N is ``num_inferencers * num_envs``, of one host; each has the same ladder.
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
    steps: jax.Array
    """Steps of the vector environment so far, scalar int32, at most ``last``."""
    last: jax.Array
    """Steps after which it stays at ``final``, scalar int32."""

    @classmethod
    def new(cls, initial: float, final: jax.Array, env_steps: int, run: RunSpec) -> FallingEpsilon:
        """Return one that is at ``final [B]`` after ``env_steps`` of all Inferencers together."""
        last = min(-(-env_steps // run.num_envs_in_all), _LARGEST_INT32)
        return cls(jnp.float32(initial), final, jnp.int32(0), jnp.int32(last))

    @property
    def value(self) -> jax.Array:
        """The probability now, ``[B]``."""
        # Of integers: a share that grows by less than 3e-8 a step would stand still in float32.
        share = jnp.where(self.steps < self.last, self.steps / jnp.maximum(self.last, 1), 1.0)
        return self.initial + (self.final - self.initial) * share

    def advanced(self, num_steps: int = 1) -> FallingEpsilon:
        """Return the state after ``num_steps`` more steps of the vector environment."""
        left = self.last - self.steps
        return self._replace(steps=self.steps + jnp.minimum(left, min(num_steps, _LARGEST_INT32)))


def epsilon_greedy(
    key: jax.Array,
    greedy: jax.Array,
    num_actions: int,
    epsilon: jax.Array,
    legal: jax.Array | None = None,
) -> jax.Array:
    """Return ``greedy`` indices of actions, random ones with probability ``epsilon``.

    Args:
      key: Typed PRNG key.
      greedy: ``[B]`` int32, from 0.
      num_actions: Random indices are below this.
      epsilon: ``[B]``.
      legal: ``[B, num_actions]`` bool, which indices may be drawn; None for all.

    Returns:
      ``[B]`` int32.
    """
    explore_key, action_key = jax.random.split(key)
    explores = jax.random.uniform(explore_key, greedy.shape) < epsilon
    return jnp.where(explores, _random_index(action_key, greedy, num_actions, legal), greedy)


def _random_index(
    key: jax.Array, like: jax.Array, num_actions: int, legal: jax.Array | None
) -> jax.Array:
    """Return indices below ``num_actions``, ``[B]``, all that are legal alike."""
    if legal is None:
        return jax.random.randint(key, like.shape, 0, num_actions, like.dtype)
    equal = jnp.where(legal, 0.0, -jnp.inf)
    return jax.random.categorical(key, equal).astype(like.dtype)


class HeldActions(NamedTuple):
    """Random actions that environments take for several steps."""

    action: jax.Array
    """Which, ``[B]`` int32, from 0."""
    left: jax.Array
    """Steps that it is still to be taken, ``[B]`` int32."""

    @classmethod
    def new(cls, num_envs: int) -> HeldActions:
        """Return none."""
        return cls(jnp.zeros(num_envs, jnp.int32), jnp.zeros(num_envs, jnp.int32))


def held_epsilon_greedy(
    key: jax.Array,
    greedy: jax.Array,
    num_actions: int,
    epsilon: jax.Array,
    held: HeldActions,
    most_steps: int,
    is_first: jax.Array,
    legal: jax.Array | None = None,
) -> tuple[jax.Array, HeldActions]:
    """Return ``epsilon_greedy`` whose random actions last, and what is held for the next step.

    A random action begins with probability ``epsilon`` where none is held, and lasts n steps with a
    probability in proportion to 1 / n**2, n at most ``most_steps``. An episode's end and an action
    that has become illegal end it, too. Source: Dabney et al. 2020 (arXiv 2006.01782), section 4,
    with mu = 2.

    The other arguments are those of ``epsilon_greedy``.

    Args:
      held: Before this step.
      most_steps: At least 1.
      is_first: ``[B]`` bool, where an episode begins.
    """
    explore_key, action_key, length_key = jax.random.split(key, 3)
    left = jnp.where(is_first, 0, held.left)
    if legal is not None:
        may = jnp.take_along_axis(legal, held.action[:, None], axis=1)[:, 0]
        left = jnp.where(may, left, 0)
    begins = (left == 0) & (jax.random.uniform(explore_key, greedy.shape) < epsilon)
    shares = np.arange(1, most_steps + 1, dtype=np.float64) ** -2
    until = np.cumsum(shares / shares.sum()).astype(np.float32)[:-1]
    length = 1 + jnp.searchsorted(until, jax.random.uniform(length_key, greedy.shape))
    index = jnp.where(
        begins, _random_index(action_key, held.action, num_actions, legal), held.action
    )
    left = jnp.where(begins, length.astype(jnp.int32), left)
    action = jnp.where(left > 0, index.astype(greedy.dtype), greedy)
    return action, HeldActions(index, jnp.maximum(left - 1, 0))
