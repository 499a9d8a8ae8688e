"""Observations of several levels as a Dict of one: Tuples, Dicts in Dicts, and text left out.

This module needs no JAX: worker processes import it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import gymnasium
from gymnasium import spaces

from sebulba.envs.obs_wrapper import ObsWrapper, part_of
from sebulba.envs.tree import OBSERVATION
from sebulba.errors import UsageError

LEFT_OUT = "text_left_out"
"""Where the metadata of an environment has the names of the parts that are text."""

Path = tuple[str | int, ...]


def flattened(env: gymnasium.Env) -> gymnasium.Env:
    """Return ``env`` with observations of one level, if its own have several, or have text.

    Others, and those of which nothing would be left, stay as they are.

    Raises:
      UsageError: Two parts would have the same name.
    """
    whole = getattr(env, "observation_space", None)
    parts = list(_parts(whole, ()))
    is_flat = all(len(path) < 2 and not _is_text(space) for path, space in parts)
    is_tuple = isinstance(whole, spaces.Tuple)
    if (is_flat and not is_tuple) or all(_is_text(space) for _, space in parts):
        return env
    return FlatPartsEnv(env, parts)


def warn_of_text(env: gymnasium.Env, name: str) -> None:
    """Warn of the parts of an environment's observations that are text and left out."""
    if left_out := (env.metadata or {}).get(LEFT_OUT):
        warnings.warn(
            f"{name!r} observes text, which networks cannot take: {', '.join(left_out)}; it is "
            "left out. A wrapper that encodes it as numbers keeps it",
            stacklevel=2,
        )


class FlatPartsEnv(ObsWrapper):
    """Has a part ``"a.0"`` for entry 0 of the Tuple ``"a"``, and none for text."""

    def __init__(self, env: gymnasium.Env, parts: list[tuple[Path, Any]]) -> None:
        """Take the spaces of the parts, by their paths."""
        super().__init__(env)
        kept = [(path, space) for path, space in parts if not _is_text(space)]
        self._paths = {_name(path): path for path, _ in kept}
        if len(self._paths) < len(kept):
            raise UsageError(
                f"observation_space={env.observation_space} has two parts of one name among "
                f"{', '.join(_name(path) for path, _ in kept)}; rename one"
            )
        self.observation_space = spaces.Dict({_name(path): space for path, space in kept})
        text = [_name(path) for path, space in parts if _is_text(space)]
        self.metadata = {**(env.metadata or {}), **({LEFT_OUT: text} if text else {})}

    def changed(self, obs: Any, info: Any, method: str, *, at_end: bool) -> dict[str, Any]:
        return {name: part_of(obs, path) for name, path in self._paths.items()}


def _parts(space: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Return the spaces that are no Dict and no Tuple, with where they are."""
    if isinstance(space, spaces.Dict) and all(isinstance(key, str) for key in space.spaces):
        for key, inner in space.spaces.items():
            yield from _parts(inner, (*path, key))
    elif isinstance(space, spaces.Tuple):
        for index, inner in enumerate(space.spaces):
            yield from _parts(inner, (*path, index))
    else:
        yield path, space


def _is_text(space: Any) -> bool:
    return isinstance(space, spaces.Text) or type(space).__name__ == "MissionSpace"  # MiniGrid's


def _name(path: Path) -> str:
    return ".".join(map(str, path)) or OBSERVATION
