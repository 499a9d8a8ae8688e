"""What is in a data set, in numbers: episodes, returns, and how it covers the spaces."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from sebulba_offline.dataset import Dataset, flat_arrays

PERCENTILES = (0, 25, 50, 75, 100)
MOST_LINES = 16
"""Components of observations and actions that are told one by one."""


def described(dataset: Dataset) -> dict[str, Any]:
    """Return what is in a data set, as a JSON object."""
    episodes, rows = dataset.episodes(), dataset.rows
    acts = ~(rows.terminated | rows.truncated)
    return {
        "env": dataset.record.get("env", ""),
        "episodes": len(episodes.lengths),
        "steps": int(episodes.lengths.sum()),
        "terminated_share": float(episodes.terminated.mean()),
        "return_mean": float(episodes.returns.mean()),
        "return_percentiles": np.percentile(episodes.returns, PERCENTILES).tolist(),
        "length_mean": float(episodes.lengths.mean()),
        "length_percentiles": np.percentile(episodes.lengths, PERCENTILES).tolist(),
        "action": _coverage(dataset.action_space, "action", rows.action[acts]),
        "observation": {
            name: _numbers(array) for name, array in flat_arrays(rows.obs, "obs") if array.ndim == 2
        },
        "about": dict(dataset.record.get("about", {})),
    }


def _coverage(space: Any, name: str, values: np.ndarray) -> dict[str, Any]:
    """Return how often each discrete action is taken, or the range of each component."""
    if isinstance(space, spaces.Discrete):
        counts = np.bincount(values.ravel() - space.start, minlength=int(space.n))
        return {"shares": (counts / counts.sum()).tolist()}
    return _numbers(values.reshape(len(values), -1))


def _numbers(values: np.ndarray) -> dict[str, Any]:
    """Return mean, deviation and range of each component of ``values [R, K]``."""
    wide = values.astype(np.float64)
    return {
        name: getattr(np, name)(wide, axis=0).tolist() for name in ("mean", "std", "min", "max")
    }


def lines(dataset: Dataset, about: dict[str, Any]) -> list[str]:
    """Return the description for people."""

    def spread(name: str) -> str:
        low, *_, high = about[f"{name}_percentiles"]
        middle = about[f"{name}_percentiles"][2]
        return (
            f"mean {about[f'{name}_mean']:.2f}, median {middle:.2f}, from {low:.2f} to {high:.2f}"
        )

    told = [
        f"{dataset.folder}: {about['env'] or 'an environment without a name'}",
        f"episodes  {about['episodes']:,}, {about['steps']:,} steps, "
        f"{100 * about['terminated_share']:.0f} % ended in a terminal state",
        f"returns   {spread('return')}",
        f"lengths   {spread('length')}",
    ]
    action = about["action"]
    if shares := action.get("shares"):
        said = ", ".join(f"{i}: {100 * share:.1f} %" for i, share in enumerate(shares[:MOST_LINES]))
        told.append(f"actions   {said}")
    else:
        told += _table("action", action)
    for name, numbers in about["observation"].items():
        told += _table(name, numbers)
    return told


def _table(name: str, numbers: dict[str, Any]) -> list[str]:
    rows = list(zip(*numbers.values(), strict=True))
    told = [f"{name:10}" + "".join(f"{column:>10}" for column in numbers)]
    told += [
        f"  [{i}]".ljust(10) + "".join(f"{value:10.3g}" for value in row)
        for i, row in enumerate(rows[:MOST_LINES])
    ]
    return told + ([f"  ... {len(rows) - MOST_LINES} more"] if len(rows) > MOST_LINES else [])
