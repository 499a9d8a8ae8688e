"""Returns of several seeds as one curve, with the uncertainty of so few. Free of JAX.

The interquartile mean and the bootstrap over seeds are those of Agarwal et al. 2021, "Deep
reinforcement learning at the edge of the statistical precipice" (arXiv 2108.13264, section 4).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from sebulba.errors import UsageError
from sebulba.runs.metrics_file import is_number
from sebulba.runs.summary import RunSummary

POINTS = 200
"""Points of a curve."""
RESAMPLES = 2000
"""Samples of the bootstrap."""
CONFIDENCE = 0.95
"""Share of the bootstrapped means that an interval holds."""
TRIMMED = 0.25
"""Share of the seeds that the interquartile mean leaves out at either end."""
KINDS = ("evaluation", "training")
"""What returns are of: the policy that was evaluated, or the last 100 training episodes."""
ALIASES = {"agent": "agent_config", "env": "env.id"}
"""Short names of keys of a configuration."""


class Points(NamedTuple):
    """Returns of one run."""

    env_steps: np.ndarray
    """``[N]``, ascending."""
    seconds: np.ndarray
    """Seconds of the run at these, ``[N]``."""
    returns: np.ndarray
    """Mean returns, ``[N]``."""


class Curve(NamedTuple):
    """Returns of the seeds of a group."""

    x: np.ndarray
    """Environment steps, up to where all seeds have returns, or seconds, ``[P]``."""
    mean: np.ndarray
    """Mean over seeds, ``[P]``."""
    iqm: np.ndarray
    """Interquartile mean over seeds, ``[P]``."""
    low: np.ndarray
    """Lower end of the interval of ``iqm``, ``[P]``; of one seed that seed."""
    high: np.ndarray
    """Upper end, ``[P]``."""


class Group(NamedTuple):
    """Runs of one environment that are seeds of one thing."""

    env: str
    """Environment."""
    name: str
    """What the runs have in common, as ``by`` says."""
    points: list[Points]
    """Returns of each run."""

    @property
    def by_env_steps(self) -> Curve:
        """Returns over environment steps."""
        return curve([(p.env_steps, p.returns) for p in self.points])

    @property
    def by_seconds(self) -> Curve:
        """Returns over the wall clock, as long as the longest seed; others keep their last."""
        return curve([(p.seconds, p.returns) for p in self.points], to_the_longest=True)

    def seconds_until(self, env_steps: float) -> float:
        """Return how long it took until every seed had come so far."""
        return max(float(np.interp(env_steps, p.env_steps, p.seconds)) for p in self.points)


def kind_of(runs: Iterable[RunSummary]) -> str:
    """Return ``evaluation`` if all runs have evaluations, otherwise ``training``."""
    return KINDS[0] if all(run.last_evaluation is not None for run in runs) else KINDS[1]


def grouped(runs: Sequence[RunSummary], by: str, kind: str) -> list[Group]:
    """Return runs by environment and by what their configurations have under the key ``by``.

    Args:
      runs: Runs, whose seeds differ at least.
      by: Dotted name in ``config.json``, such as ``agent.learning_rate``; or agent, or env.
      kind: One of ``KINDS``.

    Raises:
      UsageError: A configuration has no such key, or a run has no such returns.
    """
    groups: dict[tuple[str, str], list[Points]] = {}
    for run in runs:
        key = (_value(run, "env"), _value(run, by))
        groups.setdefault(key, []).append(points_of(run, kind))
    return [Group(env, name, points) for (env, name), points in sorted(groups.items())]


def _value(run: RunSummary, key: str) -> str:
    name = ALIASES.get(key, key)
    if name in run.config:
        value = run.config[name]
        text = value if isinstance(value, str) else json.dumps(value)
        return run.agent_name if name == "agent_config" else text
    from difflib import get_close_matches

    near = get_close_matches(name, run.config, n=3)
    raise UsageError(
        f"--by {key}: the configuration of {run.folder} has no such key; use agent, env, preset, "
        f"name or {', '.join(near) or 'a dotted name, such as agent.learning_rate'}"
    )


def points_of(run: RunSummary, kind: str) -> Points:
    """Return the returns of a run.

    Raises:
      UsageError: It has none of this kind.
    """
    names = (
        ("eval_env_steps", "eval_return_mean")
        if kind == KINDS[0]
        else ("env_steps", "episode_return_mean")
    )
    rows = [
        (record[names[0]], seconds if is_number(seconds) else 0.0, record[names[1]])
        for record in run.records
        for seconds in (record.get("seconds"),)
        if all(is_number(record.get(name)) for name in names)
    ]
    if not rows:
        raise UsageError(
            f"{run.folder} has no returns of {kind}; leave it out, or use --of "
            f"{KINDS[1 - KINDS.index(kind)]}"
        )
    table = np.array(sorted(rows), float)
    return Points(*table[np.unique(table[:, 0], return_index=True)[1]].T)


def curve(seeds: Sequence[tuple[np.ndarray, np.ndarray]], *, to_the_longest: bool = False) -> Curve:
    """Return the returns of some seeds as one curve.

    Args:
      seeds: ``x``, ascending, and returns of each, ``[N]``; N may differ. Between points returns
        are interpolated; before its first point a seed has the return of that.
      to_the_longest: Go on until the longest seed ends, and not only until the shortest does.
    """
    last = (max if to_the_longest else min)(x[-1] for x, _ in seeds)
    first = min(min(x[0] for x, _ in seeds), last)
    x = np.linspace(first, last, POINTS if last > first else 1)
    values = np.stack([np.interp(x, *seed) for seed in seeds])
    low, high = interval(values)
    return Curve(x, values.mean(0), interquartile_mean(values), low, high)


def interquartile_mean(values: np.ndarray, axis: int = 0) -> np.ndarray:
    """Return the mean of the middle half of the seeds; of fewer than four, of all of them."""
    from scipy.stats import trim_mean

    return np.asarray(trim_mean(values, TRIMMED, axis=axis))


def interval(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the bootstrapped interval of the interquartile mean of ``values [seeds, P]``.

    It is the percentile interval over seeds that are drawn with replacement.
    """
    seeds = len(values)
    if seeds == 1:
        return values[0], values[0]
    drawn = np.random.default_rng(0).integers(seeds, size=(RESAMPLES, seeds))
    means = interquartile_mean(values[drawn], axis=1)
    rest = (1.0 - CONFIDENCE) / 2
    low, high = np.quantile(means, (rest, 1.0 - rest), axis=0)
    return low, high
