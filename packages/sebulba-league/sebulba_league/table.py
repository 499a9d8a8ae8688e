"""What a run knows of its league: results by opponent and seat, who is met next. Free of JAX."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sebulba.errors import UsageError
from sebulba.tools.compare.tables import console, print_table
from sebulba_league.config import LeagueConfig
from sebulba_league.matchmakers import DRAWN, LOST, MATCHMAKERS, WON, Standings, win_rates

CONFIDENCE_95 = 1.96
"""Standard deviations."""


class Row(NamedTuple):
    """What is known of an opponent."""

    name: str
    """``#7`` of generation 7, or the name of an anchor."""
    games: np.ndarray
    """``[A]``: games by the learner's seat; old ones count less."""
    rates: np.ndarray
    """``[A]``: the learner's share of points by its seat; a draw is half of one."""
    margin: float
    """Half of the 95 % interval of their mean."""
    chance: float
    """Of being chosen next; 0 of an anchor, which has a lane of its own."""
    generation: int
    """-1 of an anchor."""

    @property
    def win_rate(self) -> float:
        """The mean over the seats."""
        return float(self.rates.mean())


def rows_of(config: LeagueConfig, arrays: Mapping[str, np.ndarray]) -> list[Row]:
    """Return the opponents of a league: snapshots, the oldest first, then anchors.

    Args:
      config: Of the run.
      arrays: Of a checkpoint, by name.

    Raises:
      UsageError: The checkpoint has no league.
    """
    try:
        generation, results = arrays["lasting/generation"], arrays["lasting/results"]
    except KeyError as error:
        raise UsageError(
            "the newest checkpoint has no league; name a run of a preset such as kuhn-league"
        ) from error
    standings = Standings(generation, results[: len(generation)], arrays["lasting/payoff"])
    chances = MATCHMAKERS[config.matchmaker](standings)
    order = [i for i in np.argsort(generation) if generation[i] >= 0]
    rows = [_row(f"#{generation[i]}", results[i], chances[i], generation[i]) for i in order]
    named = zip(config.anchors, results[len(generation) :], strict=True)
    return rows + [_row(name, own, 0.0, -1) for name, own in named]


def _row(name: str, results: np.ndarray, chance: float, generation: int) -> Row:
    games = results.sum(axis=-1)
    rates = win_rates(results)
    squares = (results[:, WON] + results[:, DRAWN] / 4) / np.maximum(games, 1.0)
    variance = np.where(games > 0, np.maximum(squares - rates**2, 0.0), 0.25)
    error = math.sqrt(float((variance / np.maximum(games, 1.0)).sum())) / len(games)
    return Row(name, games, rates, CONFIDENCE_95 * error, float(chance), int(generation))


def print_rows(rows: Sequence[Row], title: str) -> None:
    """Print a line for each opponent."""
    seats = range(len(rows[0].games))
    columns = ["opponent", *(f">seat {seat}" for seat in seats), ">win rate", ">games", ">next"]
    lines = (
        (
            row.name,
            *(f"{rate:.0%}" for rate in row.rates),
            f"{row.win_rate:.0%} ± {row.margin:.0%}" if row.games.all() else "?",
            f"{row.games.sum():,.0f}",
            f"{row.chance:.0%}" if row.generation >= 0 else "",
        )
        for row in rows
    )
    print_table(columns, lines, title)


def print_ratings(names: Sequence[str], ratings: np.ndarray, margins: np.ndarray) -> None:
    """Print Elo ratings, the best first."""
    order = np.argsort(-ratings)
    lines = ((names[i], f"{ratings[i]:+.0f}", f"± {margins[i]:.0f}") for i in order)
    print_table(("player", ">Elo", ">95 %"), lines, "ratings, from cross-play")
    console().print("An Elo difference of 100 means 64 % of the points.")


def record_of(row: Row) -> dict[str, Any]:
    """Return an opponent as JSON has it."""
    return {
        "opponent": row.name,
        "generation": row.generation if row.generation >= 0 else None,
        "games": row.games.tolist(),
        "win_rate_by_seat": row.rates.tolist(),
        "win_rate": row.win_rate,
        "interval_95": row.margin,
        "chance": row.chance,
    }


POINTS_A_FACTOR = 400 / math.log(10)
"""Elo points for a factor of e in the odds."""


def elo(results: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return Elo ratings with mean 0, ``[N]``, and half of their 95 % intervals.

    Bradley and Terry's model, by Newton's method (Hunter 2004, doi 10.1214/aos/1079120141); a draw
    is half a win for both. Everybody has drawn one more game against everybody, so that a player
    who won all has a rating.

    Args:
      results: ``[N, N, 3]``: games that player i won, drew and lost against player j, where i has
        the first seat.
    """
    size = len(results)
    half = results[..., DRAWN] / 2
    wins = results[..., WON] + half + (results[..., LOST] + half).T
    np.fill_diagonal(wins, 0.0)
    wins = wins + 0.5 * (1 - np.eye(size))
    games = wins + wins.T
    strength = np.zeros(size)
    for _ in range(100):
        expected = 1 / (1 + np.exp(strength[None] - strength[:, None]))
        gradient = (wins - games * expected).sum(axis=1)
        information = -games * expected * (1 - expected)
        information -= np.diag(information.sum(axis=1))
        step = np.linalg.pinv(information) @ gradient
        strength = strength + np.clip(step, -2, 2)
        strength -= strength.mean()
        if np.abs(step).max() < 1e-9:
            break
    errors = np.sqrt(np.maximum(np.diag(np.linalg.pinv(information)), 0.0))
    return POINTS_A_FACTOR * strength, POINTS_A_FACTOR * CONFIDENCE_95 * errors
