"""Replays on the update devices: of transitions, and of sequences with their recurrent state.

What they share is in :mod:`sebulba.agents.replay.store`. A layout is made in the agent's
constructor and holds no arrays::

    replay = TransitionReplay(capacity=100_000, num_steps=3, priority_exponent=0.6)
    experience = replay.new(self.empty_trajectory(networks, run), (), run)   # new_experience
    experience = replay.insert(experience, trajectory)                       # update_experience
    draw = replay.draw(experience, key, batch_size)                          # loss
    batch = replay.gathered(experience, draw, discount)
    weight = replay.importance_weights(experience, draw, 0.4)
    experience = replay.set_priority(experience, draw, jnp.abs(error))
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from sebulba.agent import LEARNER_AXIS
from sebulba.agents.replay.store import Draw, Replay, ReplayLayout, rows_at
from sebulba.types import EnvStep, FinalObs, PyTree, Trajectory

__all__ = ["Draw", "Replay", "Sequence", "SequenceReplay", "Transition", "TransitionReplay"]


class Transition(NamedTuple):
    """N transitions over up to n environment steps, leaves ``[N, ...]``."""

    obs: PyTree
    """Observation in which the action was taken."""
    action: jax.Array
    """Action of the first step."""
    extras: PyTree
    """``ActionOutput.extras`` of that action."""
    reward: jax.Array
    """Discounted sum of the rewards of k steps: n, or fewer where the episode ended."""
    discount: jax.Array
    """``gamma ** k``, or 0 where the episode terminated."""
    next_obs: PyTree
    """Observation after those k steps: the last one of the episode where it was truncated."""


class Sequence(NamedTuple):
    """N stretches of L transitions; kernels read the rows of it as those of a trajectory."""

    env_step: EnvStep
    """``[L+1, N, ...]``."""
    action: jax.Array
    """``[L, N, ...]``."""
    extras: PyTree
    """``[L, N, ...]``."""
    core: PyTree
    """Recurrent state before row 0, as it was when acting, ``[N, ...]``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransitionReplay(ReplayLayout):
    """Draws transitions over ``num_steps`` environment steps; every row may be a start.

    A transition that is not valid (from the last observation of an episode to the reset) is never
    a start, and no transition over several steps contains it.
    """

    num_steps: int = 1
    """n of n-step returns."""

    @property
    def rows_of_start(self) -> int:
        return self.num_steps + 1

    def rows_between_starts(self, steps_per_cycle: int) -> int:
        return 1

    def may_start(self, replay: Replay, inferencer: jax.Array, rows: jax.Array) -> jax.Array:
        """Return whether the transitions from these rows are valid, ``[rows, B]``."""
        after = jax.tree.map(
            lambda x: x[inferencer, (rows + 1) % replay.num_rows], replay.rows.consequences
        )
        return after.valid

    def gathered(self, replay: Replay, draw: Draw, discount: float) -> Transition:
        """Return the transitions that begin at ``draw``.

        ``sum_{i<k} gamma^i r_{t+i+1}``; the sum ends with the step that terminates or is cut
        short, before a step that an environment inserted, and after n steps.
        """
        j, row, env, num_rows = draw.inferencer, draw.row, draw.env, replay.num_rows
        step = jnp.arange(self.num_steps)[:, None]
        index = tuple(jnp.broadcast_arrays(j[None], (row[None] + 1 + step) % num_rows, env[None]))
        after = rows_at(replay.rows.consequences, index)
        valid, terminated = after.valid, after.terminated
        goes_on = jnp.cumprod(valid & ~terminated & ~after.truncated, axis=0) > 0
        is_summed = valid & jnp.concatenate([jnp.ones_like(valid[:1]), goes_on[:-1]])
        num_summed = jnp.sum(is_summed, axis=0, dtype=jnp.int32)
        factor = jnp.where(is_summed, jnp.float32(discount) ** step, 0.0)
        terminates = jnp.any(is_summed & terminated, axis=0)
        return Transition(
            obs=self.obs_at(replay, (j, row, env)),
            action=rows_at(replay.rows.action, (j, row, env)),
            extras=rows_at(replay.rows.extras, (j, row, env)),
            reward=jnp.sum(factor * after.reward, axis=0),
            discount=jnp.where(terminates, 0.0, jnp.float32(discount) ** num_summed),
            next_obs=self._next_obs(replay, (j, (row + num_summed) % num_rows, env)),
        )

    def gathered_spec(self) -> PyTree:
        return P(LEARNER_AXIS)

    def _next_obs(self, replay: Replay, index: tuple[jax.Array, ...]) -> PyTree:
        """Return what was observed at the end of transitions, ``[N, ...]``, before any reset."""
        obs = self.obs_at(replay, index)
        if not isinstance(replay.rows.final, FinalObs):
            return obs
        final = rows_at(replay.rows.final, index)

        def one(last: jax.Array, first: jax.Array) -> jax.Array:
            given = final.given.reshape(-1, *(1,) * (last.ndim - 1))
            return jnp.where(given, last, first)

        return jax.tree.map(one, final.obs, obs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceReplay(ReplayLayout):
    """Draws sequences of ``length`` transitions that begin where a trajectory began.

    There the recurrent state is known. Sequences overlap where ``length`` is above T. They keep
    the rows of inserted resets, which the kernels of returns mask.
    """

    length: int
    """L: transitions of a sequence, burn-in included; they span L + 1 rows."""

    @property
    def rows_of_start(self) -> int:
        return self.length + 1

    def rows_between_starts(self, steps_per_cycle: int) -> int:
        return steps_per_cycle

    def kept_prev_action(self, trajectory: Trajectory) -> PyTree:
        return jnp.asarray(trajectory.env_step.prev_action)[0]

    def gathered(self, replay: Replay, draw: Draw, discount: float) -> Sequence:
        """Return the sequences that begin at ``draw``; their rewards are not summed."""
        rows = (draw.row[None] + jnp.arange(self.length + 1)[:, None]) % replay.num_rows
        index = tuple(jnp.broadcast_arrays(draw.inferencer[None], rows, draw.env[None]))
        action, extras, *consequences = rows_at(replay.rows[1:], index)
        first = (draw.inferencer, draw.row // replay.steps_per_cycle, draw.env)
        core, prev_action = rows_at((replay.core, replay.prev_action), first)
        prev_action = jnp.concatenate([prev_action[None], action[:-1]])
        return Sequence(
            env_step=EnvStep(self.obs_at(replay, index), prev_action, *consequences),
            action=action[:-1],
            extras=jax.tree.map(lambda x: x[:-1], extras),
            core=core,
        )

    def gathered_spec(self) -> Sequence:
        rows: PyTree = P(None, LEARNER_AXIS)
        return Sequence(rows, rows, rows, P(LEARNER_AXIS))
