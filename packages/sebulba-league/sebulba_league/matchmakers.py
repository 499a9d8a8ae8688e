"""Who is met next: functions of the standings, without a state of their own.

Vinyals et al. 2019 (AlphaStar, doi 10.1038/s41586-019-1724-z), methods, "prioritized fictitious
self-play" and "populating the league".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from sebulba.errors import UsageError, shown
from sebulba.support.user_code import load_attribute

WON, DRAWN, LOST = range(3)
"""Columns of a table of results, as the learner sees them."""
PRIOR_GAMES = 2.0
"""Games, half of them won, that are added to those of every opponent and seat."""
FORGOTTEN = 0.3
"""AlphaStar: win rate below which a snapshot is one that the main agent has forgotten to beat."""
VERIFICATION = 0.15 / 0.65
"""AlphaStar: share of forgotten snapshots in what the main agent plays beside itself, where 0.5 of
all its games are prioritized, 0.15 against forgotten ones, and the others against itself."""

EXPLORED = 0.1
"""Share of games in PSRO against any snapshot."""
CHANCES_OFF = 1e-6
"""Most by which the sum of a user's chances may differ from 1."""


class Standings(NamedTuple):
    """What is known of H snapshots."""

    generation: np.ndarray
    """``[H]`` int: a number that rises from snapshot to snapshot; -1 where there is none."""
    results: np.ndarray
    """``[H, A, 3]``: games that the learner won, drew and lost, by its seat."""
    payoff: np.ndarray
    """``[H, H]``: share of points of a row against a column, as of when the newer was made."""
    gate: float = 0.7
    """Share of points of the learner with which a curriculum opens the next snapshot."""

    @property
    def win_rate(self) -> np.ndarray:
        """``[H]``: the learner's share of points, a draw half of one; each seat counts the same."""
        return win_rates(self.results).mean(axis=-1)


def win_rates(results: np.ndarray) -> np.ndarray:
    """Return shares of points, ``[*, A]``, given results ``[*, A, 3]``; a half without any game."""
    points = results[..., WON] + results[..., DRAWN] / 2
    return (points + PRIOR_GAMES / 2) / (results.sum(axis=-1) + PRIOR_GAMES)


Matchmaker = Callable[[Standings], np.ndarray]
"""Returns the chance of each snapshot, ``[H]``; where there is none it is 0."""


def latest(standings: Standings) -> np.ndarray:
    """Return certainty of the newest snapshot."""
    return _shares(standings, standings.generation == standings.generation.max())


def uniform(standings: Standings) -> np.ndarray:
    """Return the same chance for all snapshots."""
    return _shares(standings, np.ones(len(standings.generation)))


def pfsp(standings: Standings) -> np.ndarray:
    """Prefer the hardest: ``(1 - w)^2`` for a win rate of w."""
    return _shares(standings, (1 - standings.win_rate) ** 2)


def pfsp_variance(standings: Standings) -> np.ndarray:
    """Prefer those of the learner's own strength: ``w (1 - w)``."""
    return _shares(standings, standings.win_rate * (1 - standings.win_rate))


def main(standings: Standings) -> np.ndarray:
    """Return AlphaStar's main agent: the hardest, and some that it has forgotten to beat."""
    forgotten = standings.win_rate < FORGOTTEN
    if not (forgotten & (standings.generation >= 0)).any():
        return pfsp(standings)
    checked = _shares(standings, np.where(forgotten, pfsp_variance(standings), 0.0))
    return (1 - VERIFICATION) * pfsp(standings) + VERIFICATION * checked


def league_exploiter(standings: Standings) -> np.ndarray:
    """Return AlphaStar's league exploiter: those that are not beaten, ``min(1/2, 1 - w)``."""
    return _shares(standings, np.minimum(0.5, 1 - standings.win_rate))


def nash(standings: Standings) -> np.ndarray:
    """Return an equilibrium of the game in which players choose snapshots.

    The meta-strategy of policy-space response oracles (Lanctot et al. 2017, arXiv 1711.00832) for
    two players, by linear programming. What snapshots are worth against each other is known from
    the games of training.
    """
    from scipy.optimize import linprog  # slow to import

    there = uniform(standings) > 0
    gain = standings.payoff[np.ix_(there, there)].astype(np.float64) - 0.5
    size = len(gain)
    # Maximize v such that every column loses at least v; the unknowns are the shares, then v.
    solved = linprog(
        np.append(np.zeros(size), -1.0),
        A_ub=np.hstack([-gain.T, np.ones((size, 1))]),
        b_ub=np.zeros(size),
        A_eq=np.append(np.ones(size), 0.0)[None],
        b_eq=[1.0],
        bounds=[(0, None)] * size + [(None, None)],
    )
    weights = np.zeros(len(there))
    weights[there] = np.maximum(solved.x[:-1], 0.0)
    return _shares(standings, weights)


def psro(standings: Standings) -> np.ndarray:
    """Return the equilibrium, and a tenth of the games against any snapshot.

    Lanctot et al. give every strategy a least share, too. Without it, what a learner is worth
    against those outside the equilibrium stays unknown.
    """
    return (1 - EXPLORED) * nash(standings) + EXPLORED * uniform(standings)


def curriculum(standings: Standings) -> np.ndarray:
    """Return the same chance for all that are open: a snapshot opens when all older are beaten."""
    beaten = standings.win_rate >= standings.gate
    held = standings.generation[(standings.generation >= 0) & ~beaten]
    newest_open = held.min() if len(held) else standings.generation.max()
    return _shares(standings, standings.generation <= newest_open)


def _shares(standings: Standings, weights: np.ndarray) -> np.ndarray:
    weights = np.where(standings.generation >= 0, weights, 0.0).astype(np.float64)
    if not weights.any():
        raise UsageError(
            "the history is empty, so there is nobody to meet; begin with a snapshot, as new "
            "experiences do"
        )
    return weights / weights.sum()


MATCHMAKERS: Mapping[str, Matchmaker] = {
    "latest": latest,
    "uniform": uniform,
    "pfsp": pfsp,
    "pfsp-variance": pfsp_variance,
    "main": main,
    "league-exploiter": league_exploiter,
    "nash": nash,
    "psro": psro,
    "curriculum": curriculum,
}
"""By the name in a configuration."""


def matchmaker_of(name: str) -> Matchmaker:
    """Return a matchmaker, given its name or ``module:attribute``.

    Raises:
      UsageError: What a user's own function returns are no chances of the snapshots; when called.
    """
    if name in MATCHMAKERS:
        return MATCHMAKERS[name]
    own = load_attribute("agent.matchmaker", name)

    def checked(standings: Standings) -> np.ndarray:
        chances = np.asarray(own(standings), np.float64)
        there = standings.generation >= 0
        fits = chances.shape == there.shape and np.isfinite(chances).all()
        if not fits or (chances < 0).any() or abs(chances[there].sum() - 1) > CHANCES_OFF:
            raise UsageError(
                f"agent.matchmaker={name!r} returned {shown(chances.tolist())}; return the chance "
                f"of each of the {len(there)} rows of generation, with the sum 1 over those that "
                "are not -1"
            )
        return _shares(standings, chances)

    return checked
