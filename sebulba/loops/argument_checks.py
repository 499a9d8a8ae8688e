"""Rules that arguments of a loop are held to, each with its remedy."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from sebulba.agent import AgentState
from sebulba.errors import UsageError, shown

MOST = 2**53
"""Of anything."""


def check_counts(**counts: tuple[int, int] | tuple[int, int, int]) -> None:
    """Raise unless each name's (value, least) is an int of at least that; or (.., .., most)."""
    for name, (value, least, *most) in counts.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise UsageError(f"{name}={shown(value)} must be an int; got {type(value).__name__}")
        if value < least:
            raise UsageError(f"{name}={shown(value)} must be at least {least}")
        if value > (limit := most[0] if most else MOST):
            raise UsageError(f"{name}={shown(value)} must be at most {limit}")


def check_number(name: str, value: float, *, is_positive: bool) -> None:
    """Raise unless ``value`` is a number above 0, or at least 0."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not value >= 0 or (is_positive and not value > 0):
        rule = "a positive number" if is_positive else "a number of at least 0"
        raise UsageError(f"{name}={shown(value)} must be {rule}")


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise unless ``value`` is one of ``choices``."""
    if not isinstance(value, str) or value not in choices:
        raise UsageError(f"{name}={shown(value)} must be one of {', '.join(map(repr, choices))}")


def check_divisible(num_envs: int, num_devices: int) -> None:
    """Raise unless environments split evenly over the update devices."""
    if num_envs % num_devices:
        below = num_envs // num_devices * num_devices
        nearest = f"{below} or {below + num_devices}" if below else f"{num_devices}"
        raise UsageError(
            f"num_envs={num_envs} must be divisible by the {num_devices} update devices; "
            f"use {nearest}"
        )


def check_state(state: AgentState, expected: AgentState) -> None:
    """Raise unless ``state`` has the structure and shapes that this run's agent makes."""
    remedy = (
        "use state = loop.new_state(key, steps_per_cycle) of this loop, with this steps_per_cycle"
    )
    if jax.tree.structure(state) != jax.tree.structure(expected):  # type: ignore[operator]
        raise UsageError(
            f"the agent state has another structure than this agent's in this loop "
            f"({len(state.step)} step states, {len(expected.step)} Inferencers); {remedy}"
        )
    for (path, leaf), other in zip(
        jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(expected), strict=True
    ):
        if jax.numpy.shape(leaf) != other.shape:
            raise UsageError(
                f"state{jax.tree_util.keystr(path)} has shape {jax.numpy.shape(leaf)}, but this "
                f"run makes {other.shape}; {remedy}"
            )
