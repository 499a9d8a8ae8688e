"""Levels of an environment in JAX, of which those are replayed from which most is learned."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sebulba.envs.jax_adapter import JaxAdapter, JaxEnvState
from sebulba.envs.jax_env import JaxEnv
from sebulba.support.checks import check_ranges, check_types, require
from sebulba.types import EnvAdapter, EnvOutput, PyTree

DECAY = 0.95
"""Of what is known of a level, with each episode of it: the policy is another one by then."""
PRIOR = 0.01
"""Both parameters of the beta prior of how often a level is solved: most levels are expected to be
solved always or never."""


class Levels(NamedTuple):
    """K levels that were played, and the one that each of B rows plays."""

    key: jax.Array
    """``[K, ...]`` uint32: data of the key that resets to the level."""
    is_used: jax.Array
    """``[K]`` bool."""
    solved: jax.Array
    """``[K]`` float32: decayed count of the episodes that solved it."""
    failed: jax.Array
    """``[K]`` float32."""
    place: jax.Array
    """``[B]`` int32: where the level of a row is kept; K if it no longer is."""
    next_key: jax.Array
    """``[B, ...]`` uint32: of the level that the next reset begins."""
    returns: jax.Array
    """``[B]`` float32, of the episode so far."""


def learnability(solved: jax.Array, failed: jax.Array) -> jax.Array:
    """Return the mean of ``p (1 - p)`` under a beta distribution of the share p of solved episodes.

    Rutherford et al. 2024, "No regrets" (arXiv 2408.15099), score levels by ``p (1 - p)``. A level
    that was solved once and failed once scores 34 times as much as one that only failed once. With
    a uniform prior (1 in place of ``PRIOR``) they score 0.2 and 0.17, and most replays are of
    unsolvable levels.
    """
    a, b = solved + PRIOR, failed + PRIOR
    return a * b / ((a + b) * (a + b + 1.0))


@dataclasses.dataclass(frozen=True)
class ReplayOptions:
    """How levels are replayed."""

    replay: float = 0.5
    """Probability that a reset replays a level instead of making one."""
    buffer: int = 256
    """Levels that are kept, at least as many as rows."""
    solved: float = 0.0
    """An episode of a greater return has solved its level."""

    def __post_init__(self) -> None:
        check_types(self, "")
        check_ranges(self, "", replay=(0, 1), buffer=1, solved=(-math.inf, math.inf))


class LevelReplayAdapter(JaxAdapter):
    """B copies of a ``JaxEnv`` whose levels, the keys of resets, are replayed by learnability.

    Levels belong to these rows, and are a part of the environment's state.
    """

    def __init__(
        self, env: JaxEnv, seeds: Sequence[int], options: ReplayOptions, *, name: str = ""
    ) -> None:
        """Make one environment for each of ``seeds``; see ``JaxAdapter``.

        Raises:
          UsageError: There are more rows than levels are kept.
        """
        require(
            options.buffer >= len(seeds),
            "buffer",
            options.buffer,
            f"must hold a level for each of the {len(seeds)} environments of an Inferencer",
            f"use {4 * len(seeds)}",
        )
        self._options, self._given = options, (env, seeds)
        super().__init__(env, seeds, name=name)

    def as_played(self) -> EnvAdapter:
        """Return the environment with new levels only."""
        env, seeds = self._given
        return JaxAdapter(env, seeds, name=self.spec.name)  # type: ignore[return-value]

    def _first_agents(self, inside: PyTree, obs: PyTree) -> Levels:
        size, num_envs = self._options.buffer, self.num_envs
        data = jax.random.key_data(jax.random.key(0))
        zeros = jnp.zeros(size, jnp.float32)
        return Levels(
            jnp.zeros((size, *data.shape), data.dtype),
            jnp.zeros(size, jnp.bool_),
            zeros,
            zeros,
            jnp.full(num_envs, size, jnp.int32),
            jnp.zeros((num_envs, *data.shape), data.dtype),
            jnp.zeros(num_envs, jnp.float32),
        )

    def _reset_keys(self, state: JaxEnvState, keys: jax.Array) -> jax.Array:
        return jax.random.wrap_key_data(state.agents.next_key)

    def _output(
        self, state: JaxEnvState, inside: PyTree, obs: PyTree, reward: Any, ends: tuple
    ) -> tuple[Levels, EnvOutput]:
        _, output = super()._output(state, inside, obs, reward, ends)
        levels: Levels = state.agents
        returns = jnp.where(state.ended, 0.0, levels.returns) + output.reward
        over = output.episode_end
        levels = self._with_results(levels, over, returns > self._options.solved)
        # A number that no step and no reset of this row folds in.
        number = jnp.uint32(2**31) + state.num_steps[0]
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key[0]), number)
        return self._with_draws(levels, over, key)._replace(returns=returns), output

    def _with_results(self, levels: Levels, over: jax.Array, is_solved: jax.Array) -> Levels:
        """Count the episodes ``over [B]`` for their levels."""
        none = jnp.zeros(self._options.buffer + 1)
        solved = none.at[levels.place].add(over & is_solved)[:-1]
        failed = none.at[levels.place].add(over & ~is_solved)[:-1]
        kept = DECAY ** (solved + failed)
        return levels._replace(
            solved=kept * levels.solved + solved, failed=kept * levels.failed + failed
        )

    def _with_draws(self, levels: Levels, over: jax.Array, key: jax.Array) -> Levels:
        """Draw the next levels of the rows that are ``over [B]``; keep those that are new."""
        size, num_envs = self._options.buffer, self.num_envs
        of_kind, of_place, of_level = jax.random.split(key, 3)
        score = jnp.where(levels.is_used, learnability(levels.solved, levels.failed), 0.0)
        old = jax.random.categorical(of_place, jnp.log(score), shape=(num_envs,))
        replays = jax.random.bernoulli(of_kind, self._options.replay, (num_envs,))
        replays &= levels.is_used.any()
        # New levels take the places of those from which least is learned.
        is_new = over & ~replays
        worst = jnp.argsort(jnp.where(levels.is_used, score, -1.0))
        taken = jnp.where(is_new, worst[jnp.cumsum(is_new) - 1], size)
        made = jax.random.key_data(jax.random.split(of_level, num_envs))
        # An episode of a level whose place is taken meanwhile counts for none.
        is_lost = jnp.zeros(size + 1, jnp.bool_).at[taken].set(True)
        place = jnp.where(over, jnp.where(replays, old, taken), levels.place)
        place = jnp.where(is_lost[place] & ~is_new, size, place)
        drawn = jnp.where(replays[:, None], levels.key[old], made)
        return levels._replace(
            key=levels.key.at[taken].set(made, mode="drop"),
            is_used=levels.is_used.at[taken].set(True, mode="drop"),
            solved=levels.solved.at[taken].set(0.0, mode="drop"),
            failed=levels.failed.at[taken].set(0.0, mode="drop"),
            place=place.astype(jnp.int32),
            next_key=jnp.where(over[:, None], drawn, levels.next_key),
        )
