"""Exact figures of games beside OpenSpiel's; skipped where it is not installed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sebulba_league.matchmakers import MATCHMAKERS, Standings

from benchmarks.studies import games

pyspiel: Any = pytest.importorskip("pyspiel", reason="the package open_spiel is not installed")
exploitability: Any = pytest.importorskip("open_spiel.python.algorithms.exploitability")
policies: Any = pytest.importorskip("open_spiel.python.policy")

RULES = {"kuhn_poker": games.KUHN, "leduc_poker": games.LEDUC}
ACTIONS = {"kuhn_poker": {0: 1, 1: 0}, "leduc_poker": {0: 2, 1: 0, 2: 1}}
"""Actions of the studies, by those of OpenSpiel: pass and bet; fold, call and raise."""
RANKS = {"kuhn_poker": (0, 1, 2), "leduc_poker": (0, 0, 1, 1, 2, 2)}


def key_of(name: str, state: Any) -> tuple:
    """Return what the studies call what the player to move knows."""
    played = [(one.player, one.action) for one in state.full_history()]
    cards = [RANKS[name][action] for player, action in played if player < 0]
    moves = tuple(ACTIONS[name][action] for player, action in played if player >= 0)
    mover = state.current_player()
    if name == "kuhn_poker":
        return mover, cards[mover], moves
    return mover, cards[mover], cards[2] if len(cards) > 2 else None, moves


def at_random(rules: games.Poker, seed: int) -> dict[tuple, np.ndarray]:
    """Return random chances of legal actions."""
    rng = np.random.default_rng(seed)

    def drawn(parts: dict[str, np.ndarray]) -> np.ndarray:
        weights = parts[games.MASK] * rng.exponential(size=parts[games.MASK].shape)
        return weights / weights.sum(axis=1, keepdims=True)

    return games.chances_of(rules, drawn)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", sorted(RULES))
def test_nash_conv_is_that_of_open_spiel(name, seed):
    chances = at_random(RULES[name], seed)
    game = pyspiel.load_game(name)
    table = policies.TabularPolicy(game)
    for row, state in enumerate(table.states):
        table.action_probability_array[row] = 0.0
        for action in state.legal_actions():
            chance = chances[key_of(name, state)][ACTIONS[name][action]]
            table.action_probability_array[row, action] = chance
    expected = exploitability.nash_conv(game, table)
    assert games.nash_conv_of(RULES[name], chances) == pytest.approx(expected, abs=1e-9)
    assert expected > 0.5


@pytest.mark.parametrize("size", [2, 5, 20])
def test_nobody_gains_against_the_meta_strategy(size):
    """By OpenSpiel's best replies in the matrix game of the snapshots."""
    gain = np.triu(np.random.default_rng(size).uniform(-0.5, 0.5, (size, size)), 1)
    gain -= gain.T
    standings = Standings(np.arange(size), np.zeros((size, 2, 3)), 0.5 + gain)
    names = [str(i) for i in range(size)]
    game = pyspiel.create_matrix_game("snapshots", "snapshots", names, names, gain, -gain)
    turns = pyspiel.convert_to_turn_based(game)

    def gained(name: str) -> float:
        table = policies.TabularPolicy(turns)
        table.action_probability_array[:] = MATCHMAKERS[name](standings)
        return exploitability.nash_conv(turns, table)

    assert gained("nash") == pytest.approx(0.0, abs=1e-6)
    assert gained("uniform") > 0.05
