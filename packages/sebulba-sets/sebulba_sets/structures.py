"""How likely the environments of a set are, given the returns of the episodes so far."""

from __future__ import annotations

import abc
import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sebulba.errors import UsageError, shown
from sebulba.support.checks import nearest

RECENT = 100
"""Episodes of an environment whose returns are averaged, as in ``episode_return_mean``."""


class Results:
    """Returns of the ended episodes of n environments."""

    def __init__(self, size: int) -> None:
        """Begin without episodes."""
        self.episodes = np.zeros(size, np.int64)
        self.best = np.full(size, -np.inf)
        """Greatest mean of ``GATE_EPISODES`` episodes in a row."""
        self.summed = np.zeros(size)
        """Sum over episodes of the means of all environments then, once each has one."""
        self.counted = 0
        """How many such sums there are."""
        self._recent = [collections.deque[float](maxlen=RECENT) for _ in range(size)]

    def add(self, env: int, value: float) -> None:
        """Add the return of an episode of environment number ``env``."""
        recent = self._recent[env]
        recent.append(value)
        self.episodes[env] += 1
        if len(recent) >= GATE_EPISODES:
            newest = [*recent][-GATE_EPISODES:]
            self.best[env] = max(self.best[env], math.fsum(newest) / GATE_EPISODES)
        if self.episodes.all():
            self.summed += self.means()
            self.counted += 1

    def recent(self, env: int) -> list[float]:
        """Return the returns of its last ``RECENT`` episodes."""
        return [*self._recent[env]]

    def means(self) -> np.ndarray:
        """Return the means over the last ``RECENT`` episodes, ``[n]``; NaN where there are none."""
        return np.array([math.fsum(x) / len(x) if x else math.nan for x in self._recent])

    def state(self) -> list[Any]:
        """Return all of it as plain data."""
        recent = [[*returns] for returns in self._recent]
        return [self.episodes, self.best, self.summed, self.counted, recent]

    @classmethod
    def restored(cls, state: Sequence[Any]) -> Results:
        """Return the results whose ``state()`` this is."""
        *arrays, counted, recent = state
        results = cls(len(recent))
        results.episodes, results.best, results.summed = (np.array(x) for x in arrays)
        results.counted = int(counted)
        for own, returns in zip(results._recent, recent, strict=True):
            own.extend(returns)
        return results


GATE_EPISODES = 20
"""Episodes in a row whose mean return opens a gate."""


class Structure(abc.ABC):
    """A pure function of results."""

    @abc.abstractmethod
    def weights(self, results: Results) -> np.ndarray:
        """Return the probability of each environment, ``[n]`` float64, with the sum 1."""


@dataclasses.dataclass(frozen=True)
class Prior(Structure):
    """Fixed probabilities of draws; a share of draws is not one of steps."""

    fixed: tuple[float, ...]
    """Of each environment."""

    def weights(self, results: Results) -> np.ndarray:
        return np.array(self.fixed, np.float64)

    @classmethod
    def uniform(cls, names: Sequence[str]) -> Prior:
        """Return equal probabilities."""
        return cls((1.0 / len(names),) * len(names))

    @classmethod
    def named(cls, names: Sequence[str], weights: Any) -> Prior:
        """Return the probabilities that ``weights`` has by name.

        Raises:
          UsageError: A name is missing or unknown, or they are no probabilities.
        """
        given = numbers_by_name("weights", weights, names)
        if missing := [name for name in names if name not in given]:
            raise UsageError(
                f"weights={shown(weights)} lacks {missing[0]!r}; give 0 to leave it out"
            )
        total, least = math.fsum(given.values()), min(given.values())
        if least < 0 or abs(total - 1) > 1e-6:
            wrong = f"of 0 or more, not {least:g}" if least < 0 else f"of sum 1, not {total:g}"
            raise UsageError(
                f"weights={shown(weights)} must be probabilities {wrong}; "
                f"use for example {dict.fromkeys(names, round(1 / len(names), 3))}"
            )
        return cls(tuple(given[name] / total for name in names))


@dataclasses.dataclass(frozen=True)
class Curriculum(Structure):
    """Environments are open once others have a mean return; the open ones are equally likely."""

    after: tuple[tuple[int, ...], ...]
    """Of each environment, the numbers of those that open it."""
    gates: tuple[float, ...]
    """Of each environment, the mean return of ``GATE_EPISODES`` episodes by which it opens others;
    an open one stays open."""

    def weights(self, results: Results) -> np.ndarray:
        passed = results.best >= self.gates
        is_open = np.array([all(passed[i] for i in needed) for needed in self.after])
        return is_open / is_open.sum()

    @classmethod
    def named(cls, names: Sequence[str], after: Any, gate: Any) -> Curriculum:
        """Return the curriculum that ``after``, names by name, and ``gate`` describe.

        Raises:
          UsageError: A name is unknown, an environment waits for itself, or a gate is no number.
        """
        if not isinstance(after, Mapping) or not after:
            raise UsageError(
                f"after={shown(after)} must be a dict such as {{'hard': 'easy'}}, or "
                "{'hard': ['easy', 'middle']}"
            )
        needed: dict[str, tuple[str, ...]] = {name: () for name in names}
        for name, before in after.items():
            before = (before,) if isinstance(before, str) else tuple(before)
            for one in (name, *before):
                check_known("after", one, names)
            needed[name] = before
        opened: set[str] = set()
        while ready := {n for n in names if n not in opened and opened.issuperset(needed[n])}:
            opened |= ready
        if circle := [name for name in names if name not in opened]:
            raise UsageError(
                f"after={shown(after)} lets {circle[0]!r} wait for itself; let one of "
                f"{', '.join(circle)} wait for none of them"
            )
        gates = gate if isinstance(gate, Mapping) else dict.fromkeys(names, gate)
        known = numbers_by_name("gate", gates, names)
        opens = {one for before in needed.values() for one in before}
        if missing := sorted(opens - known.keys()):
            raise UsageError(f"gate={shown(gate)} lacks {missing[0]!r}; give its mean return")
        places = {name: number for number, name in enumerate(names)}
        return cls(
            tuple(tuple(places[one] for one in needed[name]) for name in names),
            tuple(known.get(name, math.inf) for name in names),
        )


@dataclasses.dataclass(frozen=True)
class Adversarial(Structure):
    """Multiplicative weights on regret (Freund and Schapire 1999, "Adaptive game playing using
    multiplicative weights"): what lags behind is drawn more often.

    After each episode, an environment's logarithm of the weight grows by ``step_size`` times its
    regret: ``best`` minus its mean return.
    """

    best: tuple[float, ...]
    """Of each environment, the return that it could have."""
    step_size: float = 0.01
    """In units of 1 / return."""
    floor: float = 0.1
    """Share of the draws that is uniform, so that no mean becomes old."""

    def weights(self, results: Results) -> np.ndarray:
        size = len(self.best)
        if not results.episodes.all():  # each is seen once first
            unseen = results.episodes == 0
            return unseen / unseen.sum()
        tilt = self.step_size * (results.counted * np.array(self.best) - results.summed)
        chances = np.exp(tilt - tilt.max())
        return (1 - self.floor) * chances / chances.sum() + self.floor / size

    @classmethod
    def named(cls, names: Sequence[str], best: Any, step_size: Any) -> Adversarial:
        """Return it, given the best returns: a number, or numbers by name.

        Raises:
          UsageError: A name is missing or unknown, or something is no number.
        """
        known = best if isinstance(best, Mapping) else dict.fromkeys(names, best)
        numbers = numbers_by_name("best", known, names)
        if missing := [name for name in names if name not in numbers]:
            raise UsageError(
                f"best={shown(best)} lacks {missing[0]!r}; give the return it could have"
            )
        (size,) = numbers_by_name("step_size", {"": step_size}, [""]).values()
        if size <= 0:
            raise UsageError(f"step_size={size} must be above 0; use 0.01")
        return cls(tuple(numbers[name] for name in names), size)


def check_known(option: str, name: Any, names: Sequence[str]) -> None:
    """Raise UsageError unless a set has an environment of that name."""
    if name not in names:
        hint = nearest(str(name), names) or f"; it has {', '.join(names)}"
        raise UsageError(f"{option} names {shown(name)}, which is not in the set{hint}")


def numbers_by_name(option: str, given: Any, names: Sequence[str]) -> dict[str, float]:
    """Return finite numbers by name; raise UsageError where something is unknown or no number."""
    if not isinstance(given, Mapping):
        raise UsageError(f"{option}={shown(given)} must be a dict such as {{{names[0]!r}: 0.5}}")
    for name, value in given.items():
        check_known(option, name, names)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value):
            where = f"{option}[{name!r}]" if name else option
            raise UsageError(f"{where}={shown(value)} must be a finite number; use 0.5")
    return {name: float(value) for name, value in given.items()}
