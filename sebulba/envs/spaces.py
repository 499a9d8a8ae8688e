"""Spaces as they reach JAX, and checks of their values.

This module needs no JAX: worker processes import it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from sebulba.errors import ActionError, UsageError, shown
from sebulba.types import Group

OBSERVATION_SPACES = "Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of these"
ACTION_SPACES = "Box of floats, Discrete or MultiDiscrete"

WRAP = "; wrap the environment: "
"""Comes before the remedy in a message about a space that is not supported."""

_NARROW = {"float64": np.float32, "int64": np.int32, "uint64": np.uint32}
_LARGEST = 1e30
"""A bound beyond this, or nearer to 0 than its inverse without being 0, is no bound: environments
that know no bound report the largest or the smallest positive float."""


def canonical_observation_space(space: Any) -> gymnasium.Space:
    """Return ``space`` with the dtypes that reach JAX (no 64-bit ones).

    Raises:
      UsageError: A space is not supported; the message names its path.
    """
    if not isinstance(space, spaces.Dict):
        return _canonical(space, "observation_space", OBSERVATION_SPACES)
    if not space.spaces:
        raise UsageError("observation_space is a Dict without entries; give it at least one")
    for name in space.spaces:
        if not isinstance(name, str):
            raise UsageError(f"observation_space has the key {name!r}; keys must be text")
    return spaces.Dict(
        {
            name: _canonical(space[name], f"observation_space[{name!r}]", OBSERVATION_SPACES)
            for name in sorted(space.spaces)
        }
    )


def require_spaces(env: Any, who: str, prefix: str = "") -> None:
    """Raise UsageError unless an environment has the two spaces, as attributes after ``prefix``."""
    for name in (f"{prefix}observation_space", f"{prefix}action_space"):
        if not isinstance(found := getattr(env, name, "nothing"), gymnasium.Space):
            raise UsageError(
                f"{who} must have an attribute {name} that is a gymnasium.Space; got {shown(found)}"
            )


def canonical_action_space(space: Any) -> gymnasium.Space:
    """Return ``space`` with the dtypes that reach JAX (no 64-bit ones).

    Raises:
      UsageError: ``space`` is not supported.
    """
    name = "action_space"
    if isinstance(space, spaces.Dict | spaces.MultiBinary) or (
        isinstance(space, spaces.Box) and space.dtype.kind != "f"
    ):
        raise _unsupported(space, name, ACTION_SPACES)
    return _canonical(space, name, ACTION_SPACES)


def _canonical(space: Any, path: str, supported: str) -> gymnasium.Space:
    match space:
        case spaces.Box():
            return _canonical_box(space, path)
        case spaces.Discrete():
            _check_int32(path, space)
            return spaces.Discrete(int(space.n), start=int(space.start), dtype=np.int32)
        case spaces.MultiDiscrete():
            _check_size(path, space)
            _check_int32(path, space)
            return spaces.MultiDiscrete(space.nvec, dtype=np.int32, start=space.start)
        case spaces.MultiBinary():
            _check_size(path, space)
            return spaces.MultiBinary(space.n)
    raise _unsupported(space, path, supported)


def _unsupported(space: Any, path: str, supported: str) -> UsageError:
    if path == "action_space":
        wrapper = "TransformAction(env, function, action_space) takes actions of another space"
    elif isinstance(space, spaces.Dict | spaces.Tuple):
        wrapper = "FlattenObservation(env) makes one vector of it"
    elif "[" in path:
        wrapper = "FilterObservation(env, keys) leaves it out"
    else:
        wrapper = "TransformObservation(env, function, observation_space) makes another of it"
    of_minigrid = (
        ", and for MiniGrid minigrid.wrappers.ImgObsWrapper(env) keeps the image alone and "
        "FlatObsWrapper(env) makes one vector of image and mission"
    )
    return UsageError(
        f"{path}={space} is not supported; it must be {supported}{WRAP}gymnasium.wrappers.{wrapper}"
        f"{of_minigrid if type(space).__name__ in ('Text', 'MissionSpace') else ''}; give the "
        "function that returns the wrapped one, as my_module:make"
    )


def _canonical_box(space: spaces.Box, path: str) -> spaces.Box:
    _check_size(path, space)
    low, high = space.low, space.high
    dtype: Any = _NARROW.get(space.dtype.name, space.dtype.type)
    if np.isnan(low).any() or np.isnan(high).any() or (low > high).any():
        raise UsageError(f"{path}={space} has bounds that are NaN or crossed; correct low and high")
    if space.dtype.kind != "f":
        return spaces.Box(*_narrow_int_bounds(path, space, dtype), dtype=dtype)
    # Ask this of the bounds that the environment declared, before they are rounded.
    no_low, no_high = _is_no_bound(low), _is_no_bound(high)
    low, high = low.astype(np.float64), high.astype(np.float64)
    return spaces.Box(
        np.where(no_low, -np.inf, low).astype(dtype),
        np.where(no_high, np.inf, high).astype(dtype),
        dtype=dtype,
    )


def _is_no_bound(bound: np.ndarray) -> np.ndarray:
    size = np.abs(bound.astype(np.float64))
    return (size > _LARGEST) | ((size > 0) & (size < 1 / _LARGEST))


def _narrow_int_bounds(path: str, space: spaces.Box, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    if np.dtype(dtype) == space.dtype:
        return space.low, space.high
    wide, narrow = np.iinfo(space.low.dtype.name), np.iinfo(dtype)
    low = np.where(space.low == wide.min, narrow.min, space.low)
    high = np.where(space.high == wide.max, narrow.max, space.high)
    if (low < narrow.min).any() or (high > narrow.max).any():
        raise UsageError(
            f"{path}={space} must have bounds that fit into 32 bits, which JAX uses; scale it"
        )
    return low.astype(dtype), high.astype(dtype)


def _check_size(path: str, space: gymnasium.Space) -> None:
    if 0 in (space.shape or ()):
        raise UsageError(f"{path}={space} has shape {space.shape}, without elements; none may be 0")


def _check_int32(path: str, space: gymnasium.Space) -> None:
    low, high = choices(space)
    if np.min(low) < -(2**31) or np.max(high) >= 2**31:
        raise UsageError(f"{path}={space} must have values that fit 32 bits")


ActionCheck = Callable[[np.ndarray], None]


def make_action_check(space: gymnasium.Space, num_envs: int) -> ActionCheck:
    """Return a check of actions ``[B, *shape]`` that costs a few microseconds.

    Args:
      space: Canonical action space of one environment.
      num_envs: B.

    Returns:
      A function that raises ActionError naming the environment, the value and the rule.
    """
    shape, dtype = (num_envs, *(space.shape or ())), space.dtype
    is_inside = _make_is_inside(space)

    def check(action: np.ndarray) -> None:
        # Test `type` first: a list has neither a shape nor a dtype.
        if type(action) is not np.ndarray or action.shape != shape or action.dtype != dtype:
            raise ActionError(_describe_wrong_array(action, shape, dtype))
        if not is_inside(action):
            raise ActionError(_describe_outside(action, space))

    return check


def choices(space: gymnasium.Space) -> tuple[Any, Any]:
    """Return the first and the last value of a Discrete or MultiDiscrete."""
    assert isinstance(space, spaces.Discrete | spaces.MultiDiscrete)
    count = space.n if isinstance(space, spaces.Discrete) else space.nvec
    return space.start, space.start + count - 1


def num_choices(space: gymnasium.Space) -> int | None:
    """Return how many entries a mask of legal actions has; None for a Box."""
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    return int(space.nvec.sum()) if isinstance(space, spaces.MultiDiscrete) else None


def check_legal(
    mask: np.ndarray,
    action: np.ndarray,
    space: gymnasium.Space,
    acting: np.ndarray,
    who: Callable[[int], str],
) -> None:
    """Check that actions are among the legal ones; where none is legal, all are.

    Args:
      mask: ``[N, entries]``.
      action: ``[N, ...]``, inside ``space``.
      space: Discrete or MultiDiscrete.
      acting: ``[N]`` bool; the actions of others are not looked at.
      who: Names a row.

    Raises:
      ActionError: One is not; the message names whose.
    """
    mask = mask.astype(np.bool_)
    begin = first_entries(space)
    index = action.reshape(len(action), -1) - np.asarray(space.start).ravel()  # type: ignore[attr-defined]
    legal = np.take_along_axis(mask, index + begin, axis=1)
    wrong = (has_legal(mask, space) & ~legal).any(axis=1) & acting
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ActionError(
            f"action {action[row]} of {who(row)} is not legal; the agent must choose an action "
            "that its mask allows"
        )


def check_legal_of_slots(mask: Any, action: np.ndarray, group: Group, acting: Any) -> None:
    """Check that actions of a group are legal, as ``check_legal`` does; name the agent if not.

    Args:
      mask: ``[B, A, entries]``.
      action: ``[B * A, ...]``.
      group: Of the A slots.
      acting: ``[B, A]`` or ``[B * A]`` bool.
    """
    slots, mask = group.slots, np.asarray(mask).reshape(len(action), -1)

    def who(row: int) -> str:
        return f"agent {slots[row % len(slots)]!r} of environment {row // len(slots)}"

    check_legal(mask, action, group.spec.action_space, np.asarray(acting).ravel(), who)


class SlotActions:
    """Which actions of the slots of B environments can be taken in the row that is acted on."""

    def __init__(self, groups: Mapping[str, Group], num_envs: int) -> None:
        """Know the groups, and of no row yet."""
        self._groups = groups
        self._checks = {
            name: make_action_check(group.spec.action_space, num_envs * len(group.slots))
            for name, group in groups.items()
        }
        self._legal: Mapping[str, Any] = {}
        self._acting: Mapping[str, Any] = {}

    def look(self, legal: Mapping[str, Any], acting: Any) -> None:
        """Take who acts, ``{group: [B, A]}`` bool, and ``masks_of`` what they observe."""
        self._legal, self._acting = legal, acting or {}

    def check(self, action: Any) -> None:
        """Raise ActionError for actions ``{group: [B, A, ...]}`` that are outside or not legal."""
        if not isinstance(action, Mapping) or action.keys() != self._groups.keys():
            raise ActionError(f"actions must be a dict of {', '.join(self._groups)}; got {action}")
        for name, check in self._checks.items():
            flat = action[name].reshape(-1, *action[name].shape[2:])
            check(flat)
            if name in self._legal:
                acting = self._acting.get(name, np.ones(len(flat), np.bool_))
                check_legal_of_slots(self._legal[name], flat, self._groups[name], acting)


def masks_of(groups: Mapping[str, Group], obs: Any) -> dict[str, Any]:
    """Return the masks of legal actions in observations, by group, where there are any."""
    masks = {name: group.spec.legal_actions for name, group in groups.items()}
    return {name: obs[name][mask] for name, mask in masks.items() if mask is not None}


def has_legal(mask: np.ndarray, space: gymnasium.Space) -> np.ndarray:
    """Return whether a mask ``[N, entries]`` allows anything, for each part of an action."""
    return np.logical_or.reduceat(mask.astype(np.bool_), first_entries(space), axis=1)


def legal_action(action: Any, mask: np.ndarray, space: gymnasium.Space) -> np.ndarray:
    """Return ``action``, or where it is not legal a legal one that is made of it; for one agent.

    Args:
      action: One action inside ``space``.
      mask: ``[entries]``.
      space: Discrete or MultiDiscrete.
    """
    start = np.asarray(space.start)  # type: ignore[attr-defined]
    index = (np.asarray(action) - start).reshape(-1)
    for part, mine in enumerate(np.split(np.asarray(mask) > 0, first_entries(space)[1:])):
        if mine.any() and not mine[index[part]]:
            legal = np.flatnonzero(mine)
            index[part] = legal[index[part] % len(legal)]
    return (index.reshape(start.shape) + start).astype(space.dtype)


def first_entries(space: gymnasium.Space) -> np.ndarray:
    """Return where the entries of each part of an action begin in a mask."""
    assert isinstance(space, spaces.Discrete | spaces.MultiDiscrete)
    sizes = np.array([space.n]) if isinstance(space, spaces.Discrete) else space.nvec.ravel()
    return np.concatenate([[0], np.cumsum(sizes)[:-1]])


def _make_is_inside(space: gymnasium.Space) -> Callable[[np.ndarray], bool]:
    if isinstance(space, spaces.Box):
        # Infinite bounds become the largest finite numbers, so that infinite actions are outside;
        # NaN fails every comparison.
        limit = np.finfo(space.dtype).max
        low, high = np.clip(space.low, -limit, limit), np.clip(space.high, -limit, limit)
        return lambda action: bool(((action >= low) & (action <= high)).all())
    # In unsigned arithmetic modulo 2^32 one comparison tests both ends, whatever `start` is.
    if isinstance(space, spaces.Discrete):
        n, start = np.uint32(space.n), np.int32(space.start)
        # `array.max()` would take twice as long.
        if start == 0:
            return lambda action: bool(np.maximum.reduce(action.view(np.uint32)) < n)
        return lambda action: bool(np.maximum.reduce((action - start).view(np.uint32)) < n)
    assert isinstance(space, spaces.MultiDiscrete)
    nvec, first = space.nvec.astype(np.uint32), space.start
    return lambda action: bool(((action - first).view(np.uint32) < nvec).all())


def _describe_wrong_array(action: Any, shape: tuple[int, ...], dtype: Any) -> str:
    got = (
        f"shape {action.shape} and dtype {action.dtype}"
        if isinstance(action, np.ndarray)
        else f"a {type(action).__name__}"
    )
    return (
        f"actions must be a NumPy array of shape {shape} and dtype {dtype}, one row per "
        f"environment; got {got}"
    )


def _describe_outside(action: np.ndarray, space: gymnasium.Space) -> str:
    is_inside = _make_is_inside(space)
    index = next(i for i in range(len(action)) if not is_inside(action[i : i + 1]))
    return (
        f"action {action[index]} for environment {index} is outside {space}; the agent must "
        "return actions inside the space, without NaN"
    )


def make_native_action(
    native: gymnasium.Space, dtype: Any = None
) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function from checked actions, NumPy or JAX, to those of the declared space.

    A bound rounded to float32 may lie just outside the float64 bound, so they are clipped.

    Args:
      native: The action space as the environment declares it.
      dtype: Dtype that the environment receives, if not that of ``native``.
    """
    dtype = np.dtype(native.dtype if dtype is None else dtype)
    if dtype != np.float64:
        return lambda action: action if action.dtype == dtype else action.astype(dtype)
    assert isinstance(native, spaces.Box)
    no_low, no_high = _is_no_bound(native.low), _is_no_bound(native.high)
    low, high = np.where(no_low, -np.inf, native.low), np.where(no_high, np.inf, native.high)
    return lambda action: action.astype(np.float64).clip(low, high)
