"""What a run knows of its league: results by opponent and seat, who is met next. Free of JAX."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sebulba.errors import UsageError
from sebulba.tools.compare.tables import console, print_table
from sebulba_league.config import LeagueConfig
from sebulba_league.matchmakers import DRAWN, WON, Standings, matchmaker_of, nash, win_rates
from sebulba_league.ratings import CONFIDENCE_95


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
    meta: float
    """Its share of the meta-strategy, an equilibrium of the snapshots; 0 of an anchor."""
    elo: float
    """Elo rating as of the last time that lanes chose; NaN without any."""
    elo_margin: float
    """Half of its 95 % interval."""
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
    size = len(generation)
    standings = Standings(generation, results[:size], arrays["lasting/payoff"], config.gate)
    shares = np.zeros((len(results), 2))
    shares[:size] = np.stack([matchmaker_of(config.matchmaker)(standings), nash(standings)], axis=1)
    ratings = arrays.get("lasting/ratings", np.zeros((len(results) + 1, 2)))
    names = [*(f"#{number}" for number in generation), *config.anchors]
    numbers = [*generation, *(-1 for _ in config.anchors)]
    order = [i for i in np.argsort(generation) if generation[i] >= 0]
    return [
        _row(names[i], results[i], shares[i], ratings[i], int(numbers[i]))
        for i in [*order, *range(size, len(results))]
    ]


def snapshots_of(generation: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Return the rows and columns of a table ``[H, H]`` that are snapshots, the oldest first."""
    order = [i for i in np.argsort(generation) if generation[i] >= 0]
    return table[np.ix_(order, order)]


def _row(
    name: str, results: np.ndarray, shares: np.ndarray, rating: np.ndarray, generation: int
) -> Row:
    games = results.sum(axis=-1)
    rates = win_rates(results)
    squares = (results[:, WON] + results[:, DRAWN] / 4) / np.maximum(games, 1.0)
    variance = np.where(games > 0, np.maximum(squares - rates**2, 0.0), 0.25)
    error = math.sqrt(float((variance / np.maximum(games, 1.0)).sum())) / len(games)
    chance, meta = shares.tolist()
    elo, margin = rating.tolist() if rating[1] else (math.nan, math.nan)
    return Row(name, games, rates, CONFIDENCE_95 * error, chance, meta, elo, margin, generation)


def print_rows(rows: Sequence[Row], title: str) -> None:
    """Print a line for each opponent."""
    seats = range(len(rows[0].games))
    columns = ["opponent", *(f">seat {seat}" for seat in seats), ">win rate", ">games", ">next"]
    columns += [">meta", ">Elo"]
    lines = (
        (
            row.name,
            *(f"{r:.0%}" if n else "?" for r, n in zip(row.rates, row.games, strict=True)),
            f"{row.win_rate:.0%} ± {row.margin:.0%}" if row.games.all() else "?",
            f"{row.games.sum():,.0f}",
            f"{row.chance:.0%}" if row.generation >= 0 else "",
            f"{row.meta:.0%}" if row.generation >= 0 else "",
            "?" if math.isnan(row.elo) else f"{row.elo:+.0f} ± {row.elo_margin:.0f}",
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
        "meta_strategy": row.meta,
        "elo": None if math.isnan(row.elo) else row.elo,
        "elo_interval_95": None if math.isnan(row.elo) else row.elo_margin,
    }
