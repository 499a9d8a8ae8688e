"""Whether an exported policy does what the policy does."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from sebulba.errors import UsageError
from sebulba.policies.export.acting import ACTION, PROBABILITIES, Acting, by_name
from sebulba.policies.export.forms import Run
from sebulba.policies.policy import Policy

OBSERVATIONS = 1000
"""That are tried, in episodes."""
EPISODE = 10
"""Steps of such an episode."""
TOLERANCE = 1e-5
"""Largest difference that is allowed, relative to numbers beyond 1."""


def largest_difference(policy: Policy, acting: Acting, run: Run, seed: int = 0) -> float:
    """Return by how much the exported policy differs from ``policy`` on random observations.

    Both play the same episodes, each with what it has carried itself. Of a discrete action that
    differs, the probabilities are compared, where they are known: two that are equal but for
    rounding may change places.

    Args:
      policy: Loaded without ``explore``.
      seed: Of the observations.

    Returns:
      The largest difference of an action, a probability, or what is carried.

    Raises:
      UsageError: It is larger than ``TOLERANCE``.
    """
    batch = acting.inputs[0].shape[0]
    random = np.random.default_rng(seed)
    state, carried, worst = policy.new_state(batch), dict(acting.initial), 0.0
    for step in range(-(-OBSERVATIONS // batch)):
        obs = _observations(policy.spec.observation_space, batch, random)
        row = {
            "reward": random.normal(size=batch).astype(np.float32),
            "terminated": np.zeros(batch, np.bool_),
            "truncated": np.zeros(batch, np.bool_),
            "is_first": np.full(batch, step % EPISODE == 0),
        }
        given = {**by_name({"obs": obs}), **row, **carried}
        answers = run([np.asarray(given[port.name], port.dtype) for port in acting.inputs])
        found = {port.name: one for port, one in zip(acting.outputs, answers, strict=True)}
        expected: dict[str, Any] = {}
        if PROBABILITIES in found:
            expected[PROBABILITIES] = policy.distribution(obs, state, **row)
        action, state = policy(obs, state, **row)
        worst = max(worst, _difference(found, {**expected, ACTION: action}))
        carried = {name: found[output] for name, output in acting.carried.items()}
    if not worst <= TOLERANCE:
        raise UsageError(
            f"the exported policy differs from the policy by {worst:.2g} in {OBSERVATIONS} random "
            f"observations, and {TOLERANCE:g} is allowed; it is not kept. Use another form"
        )
    return worst


def _observations(space: Any, batch: int, random: np.random.Generator) -> Any:
    if isinstance(space, spaces.Dict):
        return {name: _observations(part, batch, random) for name, part in space.items()}
    shape = (batch, *(space.shape or ()))
    if isinstance(space, spaces.Box) and space.dtype.kind == "f":
        low, high = np.maximum(space.low, -3.0), np.minimum(space.high, 3.0)
        return (low + (high - low) * random.random(shape)).astype(space.dtype)
    space.seed(int(random.integers(2**31)))
    return np.stack([space.sample() for _ in range(batch)]).astype(space.dtype).reshape(shape)


def _difference(found: dict[str, np.ndarray], expected: dict[str, Any]) -> float:
    """Return the largest difference; that of actions that are choices only if nothing else says."""
    worst = 0.0
    for name, right in expected.items():
        left, right = np.asarray(found[name]), np.asarray(right)
        if name == ACTION and left.dtype.kind in "iu":
            if (left == right).all():
                continue
            if PROBABILITIES not in found:
                return float("inf")
            # Those that differ must be as likely as each other.
            rows = np.arange(len(left))
            likely = np.asarray(found[PROBABILITIES])
            worst = max(worst, float(np.abs(likely[rows, left] - likely[rows, right]).max()))
            continue
        scale = np.maximum(1.0, np.abs(right.astype(np.float64)))
        worst = max(worst, float((np.abs(left.astype(np.float64) - right) / scale).max()))
    return worst
