"""Exams of leagues: mixtures in sequence form, alpha-beta and a solver of ConnectFour, mazes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.studies import connect_four, games, mazes
from benchmarks.studies.league_games import mixture


def kuhn_equilibrium(a: float) -> dict[tuple, np.ndarray]:
    """Return the equilibrium of Kuhn 1950 whose first player bets with the lowest card by ``a``."""
    bets = {
        (): [a, 0.0, 3 * a],
        (1, 0): [0.0, a + 1 / 3, 1.0],
        (0,): [0.0, 1 / 3, 1.0],
        (1,): [1 / 3, 0.0, 1.0],
    }
    return {
        (len(history) % 2, card, history): np.array([bet, 1 - bet])
        for history, by_card in bets.items()
        for card, bet in enumerate(by_card)
    }


def test_a_mixture_of_equilibria_is_one():
    players = [kuhn_equilibrium(0.0), kuhn_equilibrium(1 / 3)]
    for chances in (*players, mixture(games.KUHN, players, [1.0, 3.0])):
        assert games.nash_conv_of(games.KUHN, chances) == pytest.approx(0.0, abs=1e-9)


def test_a_player_of_a_mixture_counts_where_its_own_actions_lead():
    """Who always bets first is not there when a check was answered by a bet."""
    bettor = {key: np.array([1.0, 0.0]) for key in kuhn_equilibrium(0.0)}
    checks = {key: np.array([0.0, 1.0]) for key in bettor}
    mixed = mixture(games.KUHN, [bettor, checks], [3.0, 1.0])
    for card in range(3):
        np.testing.assert_allclose(mixed[0, card, ()], [0.75, 0.25])
        np.testing.assert_allclose(mixed[0, card, (1, 0)], [0.0, 1.0])
        np.testing.assert_allclose(mixed[1, card, (0,)], [0.75, 0.25])


def board_of(text: str) -> np.ndarray:
    """Return a board of six lines, in which x is the player who moves."""
    rows = [line.strip() for line in text.strip().splitlines()]
    return np.array([[[cell == "x", cell == "o"] for cell in row] for row in rows], np.int8)


OPEN_THREE = """
    .......
    .......
    .......
    .......
    ..oo...
    ..xx..o
"""


def test_integers_are_the_board():
    own, both = connect_four.bits_of(board_of(OPEN_THREE))
    assert own == (1 << 14) | (1 << 21)
    assert both == own | (1 << 15) | (1 << 22) | (1 << 42)
    assert connect_four.is_four(0b1111 << 7) and not connect_four.is_four(0b111 << 7)
    for step in (1, 6, 7, 8):
        assert connect_four.is_four(sum(1 << 3 + i * step for i in range(4)))
    assert len(connect_four.LINES) == 69


def test_looking_ahead_takes_a_win_that_one_move_does_not_show():
    """Three in a row with both ends free win: x needs columns 1 and 4, or 4 and then 1 or 5."""
    rng = np.random.default_rng(0)
    boards = np.repeat(board_of(OPEN_THREE)[None], 20, axis=0)
    legal = connect_four.legal_of(boards)
    chosen = connect_four.looks_ahead(4)(boards, legal, rng)
    assert set(chosen.tolist()) <= {1, 4}
    assert len(set(games.wins_or_blocks(boards, legal, rng).tolist())) > 2


def brute(own: int, both: int) -> int:
    """Return the result without a table, threats or an order."""
    if both == connect_four.CELLS:
        return 0
    found = -1
    for _, bit in connect_four.moves(both):
        found = max(found, 1 if connect_four.is_four(own | bit) else -brute(both ^ own, both | bit))
    return found


def test_the_solver_knows_what_trying_everything_finds():
    rng, found = np.random.default_rng(0), set()
    for _ in range(300):
        own, both = 0, 0
        while both.bit_count() < 35:
            legal = [bit for _, bit in connect_four.moves(both)]
            legal = [bit for bit in legal if not connect_four.is_four(own | bit)]
            if not legal:
                break
            bit = legal[rng.integers(len(legal))]
            own, both = both ^ own, both | bit
        else:
            result = connect_four.result(own, both, {})
            assert result == brute(own, both)
            found.add(result)
    assert found == {1, 0, -1}


class First:
    """Takes the first column that is free."""

    def __call__(self, obs: Any) -> tuple[np.ndarray, None]:
        return obs["action_mask"].argmax(axis=-1), None


class Script:
    """Looks ahead, or plays at random."""

    def __init__(self, plies: int) -> None:
        self.act = connect_four.looks_ahead(plies) if plies else games.at_random
        self.rng = np.random.default_rng(1)

    def __call__(self, obs: Any) -> tuple[np.ndarray, None]:
        return self.act(obs["observation"], obs["action_mask"], self.rng), None


def test_the_stronger_player_wins_from_both_seats():
    counts = connect_four.against(connect_four.looks_ahead(2), games.at_random, games=20)
    assert (counts.sum(axis=1) >= 20).all() and (counts[:, 0] > 0.8 * counts.sum(axis=1)).all()


def test_the_greedy_move_of_one_who_looks_ahead_keeps_results_more_often():
    shares = [
        connect_four.solved(Script(plies), 20, empty=6)  # type: ignore[arg-type]
        for plies in (0, 2)
    ]
    assert all(one["positions"] == 20 for one in shares)
    assert shares[0]["all"] < 0.8 < shares[1]["all"]


def test_mazes_are_as_far_as_they_should_be():
    keys = jax.random.split(jax.random.key(0), 200)

    def far(maze: mazes.Maze) -> np.ndarray:
        free, start, goal, _ = jax.jit(jax.vmap(maze.reset))(keys)[1]
        all_far = jax.jit(jax.vmap(mazes.distances))(free, start)
        return np.asarray(all_far[jnp.arange(len(keys)), goal[:, 0], goal[:, 1]])

    assert (far(mazes.Maze(1.0)) == 1).mean() > 0.95
    assert np.isinf(far(mazes.Maze(0.0, 1.0))).mean() > 0.95
    solvable = far(mazes.Maze())
    assert np.isfinite(solvable).all() and (solvable >= mazes.LEAST_DISTANCE).mean() > 0.9
