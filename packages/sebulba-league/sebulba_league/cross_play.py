"""Snapshots play each other: all pairs at once, every player from both seats."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

from sebulba.envs import make_env_factory, seed_block
from sebulba.errors import UsageError
from sebulba.inference.cycle import env_step_of, no_action
from sebulba.loops.evaluation import DRAWN as DRAWN_SIZE
from sebulba.support.checks import check_count
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
    back = np.argsort(rows.ravel())
    learner, group = league.learner, league.group

    @jax.jit
    def act(networks: PyTree, state: PyTree, env_step: PyTree) -> tuple[PyTree, PyTree]:
        seats = league.seats(env_step, rows.ravel(), 0)
        view = jax.tree.map(lambda x: x.reshape(*rows.shape, *x.shape[1:]), seats)
        output, state = jax.vmap(learner.step)(networks, state, view)
        action = output.action[group]
        action = action.reshape(-1, *action.shape[3:])[back]
        return {group: action.reshape(num_envs, 2, *action.shape[1:])}, state

    run = RunSpec(rows.shape[1], num_inferencers=1, steps_per_cycle=1, num_update_devices=1)
    keys = jax.random.split(jax.random.key(seed), size)
    state = jax.vmap(lambda key: learner.new_step_state(key, run, 0))(keys)
    quota = np.full(num_envs, games // copies)
    quota[np.arange(num_envs) % copies < games % copies] += 1
    results, score = np.zeros((size, size, 3)), np.zeros(num_envs)
    try:
        output, action = adapter.reset(), no_action(adapter)
        while quota.any():
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
