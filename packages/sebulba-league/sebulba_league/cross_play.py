"""Snapshots play each other: all pairs at once, every player from both seats."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sebulba.envs import make_env_factory, seed_block
from sebulba.errors import UsageError
from sebulba.inference.cycle import env_step_of, no_action
from sebulba.loops.evaluation import DRAWN as DRAWN_SIZE
from sebulba.support.checks import check_count
from sebulba.support.one_kernel import left_alone
from sebulba.types import PyTree, RunSpec
from sebulba_league.agent import LeagueAgent
from sebulba_league.matchmakers import DRAWN, LOST, WON

LEAST_ENVS = 256
"""Games that are played side by side, if pairs are few."""


def cross_play(
    league: LeagueAgent, networks: PyTree, env: Any, *, games: int = 20, seed: int = 1
) -> np.ndarray:
    """Return the results of ``games`` games of every pair, ``[N, N, 3]``.

    Cell (i, j) counts what player i won, drew and lost from the first seat, with j in the second.
    How many games an environment plays is fixed beforehand, so that short ones are not favoured.
    Players act by chance, as in training.

    Args:
      league: Of two seats; its learner acts.
      networks: ``[N, ...]``: acting networks.
      env: Whatever ``sebulba.make_env_factory`` takes.
      games: At least 1.
      seed: Of the environments and of actions, an int32.

    Raises:
      UsageError: A number is out of range, or the game has more seats.
    """
    check_count("games", games)
    if league.lanes.seats != 2:
        raise UsageError(f"cross-play needs games of 2 seats; this one has {league.lanes.seats}")
    size = len(jax.tree.leaves(networks)[0])
    copies = min(games, math.ceil(LEAST_ENVS / size**2))
    num_envs = size * size * copies
    seeds = seed_block(seed, inferencer=0, num_inferencers=1, num_envs=num_envs)
    adapter = make_env_factory(env)(num_envs, seeds)
    first, second = (np.arange(num_envs) // copies // n % size for n in (size, 1))
    rows = np.stack(
        [
            np.concatenate([2 * np.flatnonzero(first == i), 2 * np.flatnonzero(second == i) + 1])
            for i in range(size)
        ]
    )
    group = league.group
    act, state = _actors(league, rows, num_envs, seed)
    quota = np.full(num_envs, games // copies)
    quota[np.arange(num_envs) % copies < games % copies] += 1
    results, score = np.zeros((size, size, 3)), np.zeros(num_envs)
    try:
        output, action = adapter.reset(), no_action(adapter)
        while quota.any():
            with left_alone():  # all players together are too many for one kernel
                action, state = act(networks, state, env_step_of(output, action))
            action = jax.tree.map(np.asarray, action)
            output = adapter.step(action)
            score += output.unclipped_reward[group][:, 0]
            ended = output.episode_end & (quota > 0)
            outcome = np.where(score > DRAWN_SIZE, WON, np.where(score < -DRAWN_SIZE, LOST, DRAWN))
            np.add.at(results, (first[ended], second[ended], outcome[ended]), 1)
            quota[ended] -= 1
            score[output.episode_end] = 0.0
    finally:
        adapter.close()
    return results


def _actors(
    league: LeagueAgent, rows: np.ndarray, num_envs: int, seed: int
) -> tuple[Callable[..., tuple[PyTree, PyTree]], PyTree]:
    """Return the program in which all players act, and their states.

    In games with turns half of the rows wait. If players have no memory, the program then acts
    for as many rows of each player as usually act at once, and for all where more do.

    Args:
      league: Of two seats.
      rows: ``[N, R]``: row ``2 * b + seat`` of each player.
      num_envs: B.
      seed: Of actions.
    """
    learner, group, (size, most) = league.learner, league.group, rows.shape
    keys = jax.random.split(jax.random.key(seed), size)
    run = RunSpec(most, num_inferencers=1, steps_per_cycle=1, num_update_devices=1)

    def answered(actions: jax.Array, chosen: Any) -> dict[str, jax.Array]:
        flat = jnp.zeros((2 * num_envs, *actions.shape[2:]), actions.dtype)
        flat = flat.at[chosen].set(actions)
        return {group: flat.reshape(num_envs, 2, *flat.shape[1:])}

    def view(env_step: PyTree, chosen: Any) -> PyTree:
        seats = league.seats(env_step, chosen.ravel(), 0)
        return jax.tree.map(lambda x: x.reshape(*chosen.shape, *x.shape[1:]), seats)

    @jax.jit
    def act(networks: PyTree, state: PyTree, env_step: PyTree) -> tuple[PyTree, PyTree]:
        output, state = jax.vmap(learner.step)(networks, state, view(env_step, rows))
        return answered(output.action[group][:, :, 0], rows), state

    ((name, member),) = learner.members.items()
    step_state = member.agent.new_step_state
    if not member.waits or any(map(any, jax.tree.leaves(member.agent.step_state_spec()))):
        return act, jax.vmap(lambda key: learner.new_step_state(key, run, 0))(keys)
    usual = min(most, most // 2 + math.ceil(1.5 * math.sqrt(most)))

    @jax.jit
    def act_in_turn(networks: PyTree, state: PyTree, env_step: PyTree) -> tuple[PyTree, PyTree]:
        acting = env_step.acting[group].reshape(-1)[rows]

        def of(count: int) -> tuple[PyTree, PyTree]:
            first = jnp.argsort(~acting, axis=1, stable=True)[:, :count]
            chosen = jnp.take_along_axis(jnp.asarray(rows), first, axis=1)

            def one(networks: PyTree, state: PyTree, seats: PyTree) -> tuple[PyTree, PyTree]:
                row = learner._view(member, seats, 0)
                output, state = member.agent.act(networks, state, row)
                return output.action, state

            actions, after = jax.vmap(one)(networks[name], state, view(env_step, chosen))
            return answered(actions, chosen), after

        is_usual = acting.sum(axis=1).max() <= usual
        return jax.lax.cond(is_usual, lambda: of(usual), lambda: of(most))

    return act_in_turn, jax.vmap(lambda key: step_state(key, run, 0))(keys)
