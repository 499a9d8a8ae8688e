"""The rule that decides which checkpoints are kept."""

from __future__ import annotations

import math
from collections.abc import Mapping


def numbers_to_keep(
    scores: Mapping[int, float | None], keep_last: int, milestone_every: int | None
) -> set[int]:
    """Return the numbers of the newest checkpoints, the best and the milestones.

    Args:
      scores: The score of each whole checkpoint, by number; the higher the better.
      keep_last: How many of the highest numbers to keep.
      milestone_every: Keep the first number at or after every multiple of this; None keeps none.
    """
    numbers = sorted(scores)
    kept = set(numbers[-keep_last:])
    scored = [(score, number) for number, score in scores.items() if score is not None]
    if scored:
        kept.add(max(scored)[1])  # of equal scores the later checkpoint
    if milestone_every is not None:
        multiple = 0
        for number in numbers:
            if number // milestone_every > multiple:
                multiple = number // milestone_every
                kept.add(number)
    return kept


def usable_score(score: float | None) -> float | None:
    """Return the score; None if it is not finite, since NaN cannot be compared with others."""
    return float(score) if score is not None and math.isfinite(score) else None
