"""What wrappers of single environments share that change observations.

This module needs no JAX: worker processes import it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium

from sebulba.errors import EnvError, shown


class ObsWrapper(gymnasium.Wrapper):
    """Changes observations; results of a wrong form pass unchanged, and CheckedEnv refuses them."""

    def reset(self, **arguments: Any) -> Any:
        result = self.env.reset(**arguments)
        if not isinstance(result, tuple) or len(result) != 2:
            return result
        obs, info = result
        return self.changed(obs, info, "reset", at_end=False), info

    def step(self, action: Any) -> Any:
        result = self.env.step(action)
        if not isinstance(result, tuple) or len(result) != 5:
            return result
        obs, reward, terminated, truncated, info = result
        at_end = bool(terminated or truncated)
        obs = self.changed(obs, info, "step", at_end=at_end)
        return obs, reward, terminated, truncated, info

    def changed(self, obs: Any, info: Any, method: str, *, at_end: bool) -> Any:
        """Return what is observed in place of ``obs``.

        Args:
          obs: Of the environment inside.
          info: That came with it.
          method: ``"reset"`` or ``"step"``.
          at_end: The episode ended here.
        """
        raise NotImplementedError


def part_of(obs: Any, path: Sequence[str | int], where: str = "the observation") -> Any:
    """Return a part of an observation; numbers in ``path`` are places in a tuple or list.

    Raises:
      EnvError: There is no such part; the message begins with ``where``.
    """
    for key in path:
        is_there = (
            isinstance(obs, tuple | list) and key < len(obs)
            if isinstance(key, int)
            else isinstance(obs, Mapping) and key in obs
        )
        if not is_there:
            name = ".".join(map(str, path))
            got = list(obs) if isinstance(obs, Mapping) else obs
            raise EnvError(f"{where} must have the part {name!r}; got {shown(got)}")
        obs = obs[key]
    return obs
