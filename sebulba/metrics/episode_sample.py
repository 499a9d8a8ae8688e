"""A sample of the episodes of a run: enough for a curve, however many there are. Free of JAX."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

MOST_EPISODES = 2000
"""Episodes in the sample of a whole run."""
GOLDEN_RATIO = (np.sqrt(5.0) - 1.0) / 2.0


class Episodes(NamedTuple):
    """A sample of the episodes of a run, in the order in which they ended."""

    indices: np.ndarray
    """``[N]`` int64: how many episodes of the run ended before each."""
    env_steps: np.ndarray
    """``[N]`` int64: environment steps of the run at the end of the cycle in which each ended."""
    returns: np.ndarray
    """``[N]`` float64: returns before any clipping of rewards."""

    def taken(self, where: np.ndarray) -> Episodes:
        """Return those episodes, given by index or mask."""
        return Episodes(*(values[where] for values in self))


def is_sampled(index: np.ndarray, num_episodes: np.ndarray | int) -> np.ndarray:
    """Tell which episodes are in the sample of a run of ``num_episodes``.

    The share of a sample is a power of two. Multiples of the golden ratio spread evenly, so that no
    environment is left out whose episodes end in turn with those of the others, and those in a
    sample of a longer run are in that of a shorter one, too.
    """
    halvings = np.ceil(np.log2(np.maximum(np.divide(num_episodes, MOST_EPISODES), 1.0)))
    return (np.asarray(index) * GOLDEN_RATIO) % 1.0 < 0.5**halvings


def joined(parts: Iterable[Episodes]) -> Episodes:
    """Return all of them, in order."""
    return Episodes(*map(np.concatenate, zip(*parts, strict=True)))


def episodes_of(lines: Sequence[Mapping[str, Any]]) -> Episodes | None:
    """Return the sample of the run whose log has these lines; None if there are none."""
    if not lines:
        return None
    names = {"index": np.int64, "at": np.int64, "returns": np.float64}
    episodes = joined(
        Episodes(*(np.array(line[name], dtype) for name, dtype in names.items())) for line in lines
    )
    return episodes.taken(is_sampled(episodes.indices, int(episodes.indices[-1]) + 1))
