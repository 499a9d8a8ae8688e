"""A corridor whose first cell tells which way to turn at its end, for agents with a memory.

    sebulba train ppo --agent.memory lstm --env.id benchmarks.studies.t_maze:TMaze \
        --env.options.length 50
"""

from __future__ import annotations

import gymnasium
import jax
import jax.numpy as jnp


class TMaze:
    """A JAX environment: the passive T-maze of Ni et al. 2023, arXiv 2307.03864.

    0 and 1 turn, 2 goes on, 3 goes back. An episode has ``length`` + 1 steps. A step that ends
    behind where an agent is that has always gone on costs 1 / ``length``, and the right turn at the
    junction, in the last step, is worth 1. Without a memory 0.5 is the most.
    """

    observation_space = gymnasium.spaces.Box(-1, 1, (3,))
    """The first cell: which way to turn, -1 or 1; whether this is the first; or the junction."""
    action_space = gymnasium.spaces.Discrete(4)

    def __init__(self, length: int = 50) -> None:
        """Make a corridor of so many cells before the junction."""
        self.length = length

    def reset(self, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Begin in the first cell; the state is the way to turn, the cell, and the time."""
        state = jnp.append(jax.random.bernoulli(key).astype(jnp.int32), jnp.zeros(2, jnp.int32))
        return self._seen(state), state

    def step(
        self, key: jax.Array, state: jax.Array, action: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, bool]:
        """Move, or turn at the junction."""
        goal, cell, time = state
        moved = jnp.clip(cell + (action == 2) - (action == 3), 0, self.length)
        is_last = time == self.length
        won = (cell == self.length) & (action == goal)
        reward = jnp.where(is_last, won * 1.0, (moved <= time) / -self.length)
        state = jnp.stack([goal, moved, time + 1])
        return self._seen(state), state, reward, is_last, False

    def _seen(self, state: jax.Array) -> jax.Array:
        goal, cell, _ = state
        is_first = cell == 0
        return jnp.stack([is_first * (2.0 * goal - 1), is_first, cell == self.length])
