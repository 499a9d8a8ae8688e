"""Elo ratings: of results in cross-play, and of a league in training. Free of JAX."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sebulba_league.matchmakers import DRAWN, LOST, WON

CONFIDENCE_95 = 1.96
"""Standard deviations."""
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
        # Ratings have no origin: what is added gives them the mean 0, and changes nothing else.
        step = np.linalg.solve(information + 1 / size, gradient)
        strength = strength + np.clip(step, -2, 2)
        strength -= strength.mean()
        if np.abs(step).max() < 1e-9:
            break
    variances = np.diag(np.linalg.inv(information + 1 / size)) - 1 / size
    errors = np.sqrt(np.maximum(variances, 0.0))
    return POINTS_A_FACTOR * strength, POINTS_A_FACTOR * CONFIDENCE_95 * errors


def ratings_now(league: Any) -> np.ndarray:
    """Return the ratings of a league as its field ``ratings`` has them, by all that is known.

    Ratings of the last time keep their mean, so that those of different times can be compared. The
    first of all is 0.

    Args:
      league: A ``LeagueExperience`` whose tables are NumPy's.
    """
    generation, record, ratings = league.generation, league.record, league.ratings.copy()
    size, others = record.shape[:2]
    results = np.zeros((others + 1, others + 1, 3))
    results[:size, :others], results[-1, :others] = record, league.results.sum(axis=1)
    there = np.append(np.flatnonzero(generation >= 0), np.arange(size, others + 1))
    fitted, margins = elo(results[np.ix_(there, there)])
    rated = ratings[there, 1] > 0
    rated[-1] = False  # the learner is another one by now
    before = ratings[there][rated, 0] if rated.any() else np.zeros(1)
    fitted += before.mean() - (fitted[rated] if rated.any() else fitted[:1]).mean()
    ratings[there] = np.stack([fitted, margins], axis=1)
    return ratings
