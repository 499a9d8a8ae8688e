"""One walk through an environment with random actions, and what was seen on the way."""

from __future__ import annotations

import dataclasses
import functools
import re
import time
from typing import Any

import gymnasium
import jax
import numpy as np
from gymnasium import spaces

from sebulba.errors import EnvError, describe_error
from sebulba.inference.cycle import env_step_of
from sebulba.tools.check.env_players import (
    Player,
    RandomActions,
    SinglePlayer,
    in_brief,
    slots_of,
)
from sebulba.types import EnvOutput

TOLERANCE = 1e-3
"""Share of the width of a range by which observations may leave it."""

_BROKEN = re.compile(
    r"(?:^|: )(obs|observations?|rewards?|reset|step|terminated)\b(?! of (?:reset|step) name)"
)
"""Finds what an error of an adapter is about."""
PARTS = {
    **dict.fromkeys(("obs", "observation", "observations"), "observations"),
    **dict.fromkeys(("reward", "rewards"), "rewards"),
}
"""The checks that report such an error; all others are reported by the check "steps"."""


@dataclasses.dataclass
class Walk:
    """What was seen on a walk."""

    steps: int = 0
    """Vector steps."""
    step_s: float = 0.0
    """Mean seconds of a vector step."""
    broken: dict[str, str] = dataclasses.field(default_factory=dict)
    """The breach of the contract that ended the walk, by the name of the check that reports it."""
    rewards: list[np.ndarray] = dataclasses.field(default_factory=list)
    """Rewards of each step, ``[B, slots]``."""
    acting: dict[str, list[np.ndarray]] = dataclasses.field(default_factory=dict)
    """Who acts after each step, ``[B, A]`` by group; without those where all always do."""
    terminated: int = 0
    """Episodes that were terminated."""
    truncated: int = 0
    """Episodes that were truncated."""
    both: int = 0
    """Episodes that were both."""
    plain_ends: int = 0
    """Ends whose row shows the last observation; other rows show the next episode already."""
    masked: int = 0
    """Truncations whose last observation is given nowhere."""
    after_end: str = ""
    """What was wrong with a row that begins an episode."""
    outside: str = ""
    """An observation outside its bounds."""
    is_far_outside: bool = False
    """An observation is outside by more than the width of the range."""
    cast: str = ""
    """An observation whose dtype is not that of its space."""
    lost: str = ""
    """Changes that policies cannot see; what helps."""
    rewritten: int = 0
    """Number of observations that the next step changed."""
    info_keys: set[frozenset] = dataclasses.field(default_factory=set)
    """The different sets of keys of infos."""

    @property
    def share_acting(self) -> dict[str, list[float]]:
        """In how large a share of rows each slot acts, by group."""
        return {
            group: np.concatenate(rows).mean(axis=0).tolist() for group, rows in self.acting.items()
        }

    @property
    def sum_of_rewards(self) -> float:
        """The sum of all rewards of all agents."""
        return float(sum(rewards.sum() for rewards in self.rewards))

    @property
    def ends(self) -> int:
        """Episodes that ended."""
        return self.terminated + self.truncated - self.both


def walk(player: Player, num_envs: int, num_steps: int, seed: int, longest_s: float) -> Walk:
    """Play with random actions and look at what comes back.

    Args:
      player: The environment, which its caller closes.
      num_envs: Number of environments of the player.
      num_steps: Number of steps; fewer if they take longer than ``longest_s``.
      seed: Seed of the actions.
      longest_s: Longest time of the walk, in seconds.
    """
    seen = Walk()
    choose = RandomActions(player.spec, num_envs, seed)
    watch = _Watch(player, seen)
    began = time.monotonic()
    try:
        ended = watch.look(player.reset, np.zeros(num_envs, np.bool_))
        while ended is not None and seen.steps < num_steps:
            action = choose(watch.last)
            before = time.monotonic()
            ended = watch.look(functools.partial(player.step, action), ended)
            seen.step_s += time.monotonic() - before
            seen.steps += 1
            if time.monotonic() - began > longest_s:
                break
    finally:
        seen.step_s /= max(1, seen.steps)
    env: Any = player.checked if isinstance(player, SinglePlayer) else player
    seen.lost = env.offsets.told if hasattr(env, "offsets") else ""
    return seen


class _Watch:
    """Looks at what a player shows."""

    def __init__(self, player: Player, seen: Walk) -> None:
        self._player = player
        self._seen = seen
        self._bounds = _bounds(player.spec.observation_space)
        self._previous: tuple[list[np.ndarray], list[np.ndarray]] | None = None
        self.last: Any = None
        """The last output."""

    def look(self, act: Any, ended: np.ndarray) -> np.ndarray | None:
        """Act and look; return which episodes have ended, or None if the walk cannot go on."""
        is_single = isinstance(self._player, SinglePlayer)
        try:
            output = act()
        except EnvError as error:
            what = _BROKEN.search(str(error))
            part = PARTS.get(what[1] if what else "", "steps")
            self._seen.broken[part] = str(error)
            return None
        except Exception as error:
            notes = "".join(f"; {line}" for line in getattr(error, "__notes__", ()))
            self._seen.broken["steps"] = describe_error(error) + notes
            return None
        finally:
            self._look_at_raw()
        self.last = output
        brief = in_brief(output)
        self._look_at_flags(brief, ended)
        self._seen.rewards.append(slots_of(output.reward))
        for group, acting in (output.acting or {}).items():
            self._seen.acting.setdefault(group, []).append(np.asarray(acting))
        self._look_for_not_finite(output)
        if not is_single:
            self._look_at_leaves([np.asarray(leaf) for leaf in jax.tree.leaves(output.obs)])
            self._look_at_range(output.obs)
        return brief.terminated | brief.truncated

    def _look_for_not_finite(self, output: EnvOutput) -> None:
        """Look for numbers that are not finite, which a vector's adapter does not look for."""
        step = self._seen.steps
        if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((output.obs, output.final))):
            self._seen.broken["observations"] = f"step {step}: obs is not finite"
        if not np.isfinite(self._seen.rewards[-1]).all():
            self._seen.broken["rewards"] = f"step {step}: reward is {output.reward}"

    def _look_at_raw(self) -> None:
        returned = getattr(self._player, "returned", None)
        if not isinstance(returned, tuple) or len(returned) not in (2, 5):
            return
        info = returned[-1]
        self._seen.info_keys.add(
            frozenset(map(str, info)) if isinstance(info, dict) else frozenset([repr(type(info))])
        )
        leaves = jax.tree.leaves(returned[0])
        self._look_at_leaves([leaf for leaf in leaves if isinstance(leaf, np.ndarray)])
        self._look_at_range(returned[0])

    def _look_at_leaves(self, leaves: list[np.ndarray]) -> None:
        if self._previous is not None:
            then, copies = self._previous
            changed = any(
                not np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
                for a, b in zip(then, copies, strict=True)
            )
            self._seen.rewritten += changed
        self._previous = leaves, [leaf.copy() for leaf in leaves]

    def _look_at_range(self, obs: Any) -> None:
        for path, (low, high, dtype) in self._bounds.items():
            part = obs
            for key in path:
                part = part.get(key) if isinstance(part, dict) else ()
            leaf = np.asarray(part)
            name = "obs" + "".join(f"[{key!r}]" for key in path)
            if leaf.dtype != dtype and leaf.dtype.kind in "fiu" and not self._seen.cast:
                self._seen.cast = f"{name} is {leaf.dtype}, its space {dtype}"
            if leaf.dtype.kind != "f" or leaf.shape[-low.ndim or leaf.ndim :] != low.shape:
                continue
            with np.errstate(invalid="ignore", over="ignore"):
                width = np.where(np.isfinite(high - low), high - low, 0)
                is_outside = (leaf < low - TOLERANCE * width) | (leaf > high + TOLERANCE * width)
                is_far = (leaf < low - width) | (leaf > high + width)
            self._seen.is_far_outside |= bool((is_far & (width > 0)).any())
            if is_outside.any() and not self._seen.outside:
                value = leaf[is_outside][0]
                self._seen.outside = (
                    f"{name} has {value:g} at step {self._seen.steps}, its space is "
                    f"{low.min():g} to {high.max():g}"
                )

    def _look_at_flags(self, output: EnvOutput, ended: np.ndarray) -> None:
        seen, terminated, truncated = self._seen, output.terminated, output.truncated
        seen.terminated += int(terminated.sum())
        seen.truncated += int(truncated.sum())
        seen.both += int((terminated & truncated).sum())
        ends = terminated | truncated
        seen.plain_ends += int((ends & ~output.is_first).sum())
        masked = env_step_of(output, ()).masked_truncation
        seen.masked += int(np.sum(masked))
        if not seen.plain_ends or seen.after_end:
            return
        # The step after an end resets and does nothing else.
        wrong = ended & output.is_first & (ends | (output.reward != 0))
        if wrong.any():
            i = int(np.argmax(wrong))
            flags = f"terminated {output.terminated[i]}, truncated {output.truncated[i]}"
            seen.after_end = (
                f"environment {i} at step {seen.steps + 1}, which comes after an end and only "
                f"resets: reward {output.reward[i]:g}, {flags}"
            )


def _bounds(
    space: gymnasium.Space, path: tuple[str, ...] = ()
) -> dict[tuple[str, ...], tuple[np.ndarray, np.ndarray, np.dtype]]:
    """Return the bounds and dtype of each Box of floats, by its keys from the outside."""
    if isinstance(space, spaces.Dict):
        inside = (_bounds(part, (*path, key)) for key, part in space.spaces.items())
        return {where: bounds for part in inside for where, bounds in part.items()}
    if isinstance(space, spaces.Box) and space.dtype.kind == "f":
        return {path: (space.low, space.high, space.dtype)}
    return {}
