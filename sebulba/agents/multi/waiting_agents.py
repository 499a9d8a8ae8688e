"""Agents that wait: the rows of a slot become an ordinary trajectory of one agent.

A slot's row is *kept* if the slot acts in it, or if its episode ended there and it had acted. What
it is shown in a kept row are its rewards since the last one, and whether an episode began since
then, so one decision is one transition: its discount is that of a decision, not of a step.

``pack`` puts the row that was kept last before a cycle, which *pends* until its transition is
complete, before those of the cycle, and fills up with rows that are not valid. A reward before the
first action of an episode is nobody's, and is counted.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from sebulba.types import EnvStep, PyTree, Trajectory


class Pending(NamedTuple):
    """The row that was kept last, of N slots, ``[N, ...]``, and what was done there."""

    row: EnvStep
    """As it was shown to the agent."""
    action: jax.Array
    """What the agent did."""
    extras: PyTree
    """``ActionOutput.extras`` of that."""
    rows_before: PyTree
    """The parts of its step state that are ``[N, ...]``, before it."""


class TurnState(NamedTuple):
    """Where N slots stand between two rows, ``[N, ...]``."""

    acted: jax.Array
    """Bool: it has acted in this episode."""
    is_first: jax.Array
    """Bool: an episode began since the row that was kept last."""
    reward: jax.Array
    """Sum of the rewards since then."""
    uncredited: jax.Array
    """Sum of the sizes of the rewards that were nobody's."""
    streak: jax.Array
    """int32: how many of the last rows were kept one after the other."""
    pending: Pending
    """The row that was kept last."""


class Shown(NamedTuple):
    """What a row is to the agent."""

    row: EnvStep
    """``[N, ...]``."""
    keep: jax.Array
    """``[N]`` bool: it is a row of the slot's own trajectory."""
    acts: jax.Array
    """``[N]`` bool: the slot's action counts."""


def new_turns(row: EnvStep, action: jax.Array, extras: PyTree, rows_before: PyTree) -> TurnState:
    """Return the state before the first row; the arguments are examples, ``[N, ...]``."""
    none = jax.tree.map(jnp.zeros_like, Pending(row, action, extras, rows_before))
    no_flag, no_reward = (jnp.zeros(row.reward.shape, dtype) for dtype in (jnp.bool_, jnp.float32))
    # An invalid row: what comes after it is the first row of an episode.
    none = none._replace(row=none.row._replace(is_first=~no_flag), rows_before=rows_before)
    no_row = jnp.zeros(row.reward.shape, jnp.int32)
    return TurnState(no_flag, ~no_flag, no_reward, no_reward, no_row, none)


def show(state: TurnState, row: EnvStep, acting: jax.Array) -> Shown:
    """Return a row of the environment as the agent sees it.

    Args:
      state: Before the row.
      row: ``[N, ...]``; its ``prev_action`` is not read.
      acting: ``[N]`` bool.
    """
    ended = row.terminated | row.truncated
    acted = state.acted & ~row.is_first
    acts = acting & ~ended
    shown = row._replace(
        prev_action=state.pending.action,
        reward=jnp.where(acted, state.reward + row.reward, 0.0),
        is_first=state.is_first | row.is_first,
    )
    return Shown(shown, acts | (ended & acted), acts)


def advance(state: TurnState, row: EnvStep, shown: Shown, new: Pending) -> TurnState:
    """Return the state after a row.

    Args:
      state: Before the row.
      row: As the environment gave it.
      shown: What ``show`` returned.
      new: The row as it pends if it is kept.
    """
    keep, ended = shown.keep, row.terminated | row.truncated
    acted = state.acted & ~row.is_first
    return TurnState(
        acted=(acted | shown.acts) & ~ended,
        is_first=jnp.asarray((shown.row.is_first & ~keep) | ended),
        reward=jnp.where(keep, 0.0, shown.row.reward),
        uncredited=state.uncredited + jnp.where(acted, 0.0, jnp.abs(row.reward)),
        streak=jnp.where(keep, state.streak + 1, 0),
        pending=chosen(keep, new, state.pending),
    )


def chosen(keep: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """Return ``new`` in the rows ``[N]`` where ``keep`` is true, else ``old``."""

    def one(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(keep.reshape(keep.shape + (1,) * (new.ndim - 1)), new, old)

    return jax.tree.map(one, new, old)


def pack(
    state: TurnState, trajectory: Trajectory, acting: jax.Array, *, joins: bool
) -> tuple[Trajectory, PyTree]:
    """Return the trajectory of every slot as if it were alone.

    Args:
      state: Before row 0.
      trajectory: ``[T+1, N, ...]``; row T belongs to the next.
      acting: ``[T+1, N]`` bool.
      joins: Row 0 follows the last row of the trajectory before, as in a replay. Where that one had
        rows left over, row 0 then is marked as not valid.

    Returns:
      The packed trajectory, ``[T+1, N, ...]``, and the rows of the step state before its row 0.
    """
    rows, actions = trajectory.env_step, trajectory.action

    def body(state: TurnState, x: PyTree) -> tuple[TurnState, PyTree]:
        row, acting, action = x
        shown = show(state, row, acting)
        pending = state.pending._replace(action=action)  # all that ``show`` reads of it
        return advance(state, row, shown, pending), (shown.row, shown.keep)

    taken = jax.tree.map(lambda x: x[:-1], (rows, acting))
    begin = state._replace(pending=state.pending._replace(row=(), extras=(), rows_before=()))  # type: ignore[arg-type]
    _, (shown, keep) = jax.lax.scan(body, begin, (*taken, actions))
    order, is_row = _kept_first(keep)

    def packed(first: jax.Array, rest: jax.Array) -> jax.Array:
        shape = (*rest.shape[:2], *(1,) * (rest.ndim - 2))
        moved = jnp.take_along_axis(rest, order.reshape(shape), axis=0)
        # Left-over rows repeat the first, so that no statistics count what nobody observed.
        moved = jnp.where(is_row.reshape(shape), moved, first[None])
        return jnp.concatenate([first[None], moved])

    pending = state.pending
    first = pending.row
    if joins:
        first = _where_valid(first, state.streak >= len(keep))
    env_step = jax.tree.map(packed, first, shown)
    env_step = _where_valid(env_step, jnp.concatenate([jnp.ones_like(is_row[:1]), is_row]))
    done = jax.tree.map(
        lambda first, rest: packed(first, rest)[:-1],
        (pending.action, pending.extras),
        (actions, trajectory.extras),
    )
    packed_trajectory = trajectory._replace(env_step=env_step, action=done[0], extras=done[1])
    return packed_trajectory, pending.rows_before


def _kept_first(keep: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the numbers of the kept rows of each slot, and where there are any left.

    Args:
      keep: ``[T, N]`` bool.

    Returns:
      ``[T, N]`` int32: the i-th row that slot n kept; arbitrary where it kept no more. And
      ``[T, N]`` bool: it did.
    """
    so_far = jnp.cumsum(keep, axis=0, dtype=jnp.int32)
    number = jnp.arange(1, len(keep) + 1, dtype=jnp.int32)
    # By a search: XLA's CPU compiler does not end with an argsort in the program of an update.
    order = jax.vmap(lambda column: jnp.searchsorted(column, number), in_axes=1, out_axes=1)(so_far)
    return jnp.minimum(order, len(keep) - 1), number[:, None] <= so_far[-1:]


def _where_valid(rows: EnvStep, valid: jax.Array) -> EnvStep:
    """Return ``rows``, of which those that are not ``valid`` begin an episode without a reward."""
    return rows._replace(
        reward=jnp.where(valid, rows.reward, 0.0),
        terminated=rows.terminated & valid,
        truncated=rows.truncated & valid,
        is_first=rows.is_first | ~valid,
    )
