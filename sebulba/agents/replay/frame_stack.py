"""Stores frames once: takes stacks apart when rows are inserted, rebuilds them when drawn.

A row of a frame-stacked environment repeats K-1 of its K frames from the rows before. Only the
newest is kept, with one byte a row that says how far back in the store the older ones are:

- ``0 .. K-1``: the *reach*, rows since the stack last restarted, at most K-1. Frame i before the
  newest is the newest frame of row ``r - min(i, reach)``.
- ``K .. 2K-2``: the stack restarted with frames that are nowhere in the store, ``code - K`` rows
  ago, so that this row cannot be rebuilt.

A stack restarts where its older frames differ from the newer frames of the previous row, which are
compared. ``is_first`` does not tell that: envpool fills the stack with the first frame when a game
begins, but continues the old stack after a lost life.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from sebulba.agent import LEARNER_AXIS


class StackState(NamedTuple):
    """What is kept beside the newest frames."""

    code: jax.Array
    """``[J, R, B]`` uint8: the reach of each row (see above)."""
    last: jax.Array
    """``[J, B, K-1, H, W]``: newer frames of the newest row, which its next row must repeat."""
    lost: jax.Array
    """Scalar int32: restarts inside a stream that repeated no frame and cannot be rebuilt."""


STACK_SPEC = StackState(P(None, None, LEARNER_AXIS), P(None, LEARNER_AXIS), P())  # type: ignore[arg-type]
"""Prefix tree of PartitionSpecs of a StackState."""


def new_stack_state(
    num_inferencers: int, num_rows: int, num_envs: int, stack: jax.ShapeDtypeStruct
) -> StackState:
    """Return the state of an empty store.

    Args:
      num_inferencers: J.
      num_rows: R.
      num_envs: B.
      stack: Shape and dtype of one observation, ``[K, H, W]``.
    """
    depth, *frame = stack.shape
    return StackState(
        code=jnp.zeros((num_inferencers, num_rows, num_envs), jnp.uint8),
        last=jnp.zeros((num_inferencers, num_envs, depth - 1, *frame), stack.dtype),
        lost=jnp.int32(0),
    )


def take_apart(
    state: StackState,
    stacks: jax.Array,
    inferencer: jax.Array,
    head: jax.Array,
    goes_on: jax.Array,
) -> tuple[jax.Array, StackState]:
    """Return the newest frames of the rows of one trajectory, and the state that goes with them.

    Args:
      state: Of the store, before these rows.
      stacks: ``[T, B, K, H, W]``.
      inferencer: Scalar, whose rows these are.
      head: Scalar, the row of the store where they begin.
      goes_on: Scalar bool: row 0 follows the newest row of the store.

    Returns:
      Frames ``[T, B, H, W]`` and the state.
    """
    num_rows = state.code.shape[1]
    depth = stacks.shape[2]
    newest = stacks[:, :, -1]
    before = jnp.concatenate([state.last[inferencer][None], stacks[:-1, :, 1:]])
    continues = _same(stacks[:, :, :-1], before)
    repeats = _same(stacks, jnp.broadcast_to(newest[:, :, None], stacks.shape))

    def next_code(code: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple:
        continues, repeats = row
        grown = jnp.where(code == depth - 1, depth - 1, code + 1)
        grown = jnp.where(grown == 2 * depth - 1, depth - 1, grown)
        code = jnp.where(continues, grown, jnp.where(repeats, 0, depth)).astype(jnp.uint8)
        return code, code

    carry = state.code[inferencer, (head - 1) % num_rows]
    code: jax.Array
    _, code = jax.lax.scan(next_code, carry, (continues, repeats))
    is_lost = (code == depth).at[0].set((code[0] == depth) & goes_on)
    lost = jax.lax.psum(jnp.sum(is_lost, dtype=jnp.int32), LEARNER_AXIS)
    return newest, StackState(
        code=jax.lax.dynamic_update_slice(
            state.code, code[None], (inferencer, head, jnp.zeros_like(head))
        ),
        last=jax.lax.dynamic_update_index_in_dim(state.last, stacks[-1, :, 1:], inferencer, 0),
        lost=state.lost + lost,
    )


def _same(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return whether stacks ``[T, B, ...]`` are equal, ``[T, B]``."""
    return jnp.all(x == y, axis=tuple(range(2, x.ndim)))


def rebuild(
    frames: jax.Array,
    code: jax.Array,
    index: tuple[jax.Array, ...],
    depth: int,
) -> jax.Array:
    """Return the stacks of rows that can be rebuilt, newest frame last.

    Args:
      frames: ``[J, R, B, H, W]``, the newest frames.
      code: ``[J, R, B]``.
      index: Inferencer, row and environment, each ``[...]``.
      depth: K.

    Returns:
      ``[..., K, H, W]``.
    """
    reach = code.at[index].get(mode="promise_in_bounds").astype(jnp.int32)[..., None]
    inferencer, row, env = (x[..., None] for x in index)
    ages = jnp.arange(depth - 1, -1, -1).reshape((1,) * (row.ndim - 1) + (depth,))
    rows = (row - jnp.minimum(ages, reach)) % frames.shape[1]
    return frames.at[inferencer, rows, env].get(mode="promise_in_bounds")
