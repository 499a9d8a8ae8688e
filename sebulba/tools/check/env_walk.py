"""One walk through an environment with random actions, and what was seen on the way."""

from __future__ import annotations

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
from sebulba.tools.check.env_players import Player, RandomActions, SinglePlayer, in_brief, slots_of
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


class Walk:
    """A walk through an environment, and what was seen on the way."""

    def __init__(self, player: Player, num_envs: int) -> None:
        """Begin at a player of ``num_envs`` environments, which its caller closes."""
        self._player = player
        self._num_envs = num_envs
        self._bounds = _bounds(player.spec.observation_space)
        self._previous: tuple[list[np.ndarray], list[np.ndarray]] | None = None
        self._output: Any = None
        self.steps = 0
        """Vector steps."""
        self.step_s = 0.0
        """Mean seconds of a vector step."""
        self.broken: dict[str, str] = {}
        """The breach of the contract that ended the walk, by the check that reports it."""
        self.rewards: list[np.ndarray] = []
        """Rewards of each step, ``[B, slots]``."""
        self.acting: dict[str, list[np.ndarray]] = {}
        """Who acts after each step, ``[B, A]`` by group; without those where all always do."""
        self.terminated = self.truncated = self.both = 0
        """Episodes that ended so."""
        self.plain_ends = 0
        """Ends whose row shows the last observation; other rows show the next episode already."""
        self.masked = 0
        """Truncations whose last observation is given nowhere."""
        self.after_end = ""
        """What was wrong with a row that begins an episode."""
        self.outside = ""
        """An observation outside its bounds."""
        self.is_far_outside = False
        """An observation is outside by more than the width of the range."""
        self.cast = ""
        """An observation whose dtype is not that of its space."""
        self.lost = ""
        """Changes that policies cannot see; what helps."""
        self.rewritten = 0
        """Number of observations that the next step changed."""
        self.info_keys: set[frozenset] = set()
        """The different sets of keys of infos."""

    @property
    def ends(self) -> int:
        """Episodes that ended."""
        return self.terminated + self.truncated - self.both

    def run(self, num_steps: int, seed: int, longest_s: float) -> Walk:
        """Play with random actions for at most ``longest_s`` seconds; return this walk."""
        player = self._player
        choose = RandomActions(player.spec, self._num_envs, seed)
        began, in_steps_s = time.monotonic(), 0.0
        ended = self._look(player.reset, np.zeros(self._num_envs, np.bool_))
        while ended is not None and self.steps < num_steps:
            action = choose(self._output)
            before = time.monotonic()
            ended = self._look(functools.partial(player.step, action), ended)
            in_steps_s += time.monotonic() - before
            self.steps += 1
            if time.monotonic() - began > longest_s:
                break
        self.step_s = in_steps_s / max(1, self.steps)
        env: Any = player.checked if isinstance(player, SinglePlayer) else player
        self.lost = env.offsets.told if hasattr(env, "offsets") else ""
        return self

    def _look(self, act: Any, ended: np.ndarray) -> np.ndarray | None:
        """Act and look; return which episodes have ended, or None if the walk cannot go on."""
        is_single = isinstance(self._player, SinglePlayer)
        try:
            output = act()
        except EnvError as error:
            what = _BROKEN.search(str(error))
            part = PARTS.get(what[1] if what else "", "steps")
            self.broken[part] = str(error)
            return None
        except Exception as error:
            notes = "".join(f"; {line}" for line in getattr(error, "__notes__", ()))
            self.broken["steps"] = describe_error(error) + notes
            return None
        finally:
            self._look_at_raw()
        self._output = output
        brief = in_brief(output)
        self._look_at_flags(brief, ended)
        self.rewards.append(slots_of(output.reward))
        for group, acting in (output.acting or {}).items():
            self.acting.setdefault(group, []).append(np.asarray(acting))
        self._look_for_not_finite(output)
        if not is_single:
            self._look_at_leaves([np.asarray(leaf) for leaf in jax.tree.leaves(output.obs)])
            self._look_at_range(output.obs)
        return brief.terminated | brief.truncated

    def _look_for_not_finite(self, output: EnvOutput) -> None:
        """Look for numbers that are not finite, which a vector's adapter does not look for."""
        step = self.steps
        if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((output.obs, output.final))):
            self.broken["observations"] = f"step {step}: obs is not finite"
        if not np.isfinite(self.rewards[-1]).all():
            self.broken["rewards"] = f"step {step}: reward is {output.reward}"

    def _look_at_raw(self) -> None:
        returned = getattr(self._player, "returned", None)
        if not isinstance(returned, tuple) or len(returned) not in (2, 5):
            return
        info = returned[-1]
        self.info_keys.add(
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
            self.rewritten += changed
        self._previous = leaves, [leaf.copy() for leaf in leaves]

    def _look_at_range(self, obs: Any) -> None:
        for path, (low, high, dtype) in self._bounds.items():
            part = obs
            for key in path:
                part = part.get(key) if isinstance(part, dict) else ()
            leaf = np.asarray(part)
            name = "obs" + "".join(f"[{key!r}]" for key in path)
            if leaf.dtype != dtype and leaf.dtype.kind in "fiu" and not self.cast:
                self.cast = f"{name} is {leaf.dtype}, its space {dtype}"
            if leaf.dtype.kind != "f" or leaf.shape[-low.ndim or leaf.ndim :] != low.shape:
                continue
            with np.errstate(invalid="ignore", over="ignore"):
                width = np.where(np.isfinite(high - low), high - low, 0)
                is_outside = (leaf < low - TOLERANCE * width) | (leaf > high + TOLERANCE * width)
                is_far = (leaf < low - width) | (leaf > high + width)
            self.is_far_outside |= bool((is_far & (width > 0)).any())
            if is_outside.any() and not self.outside:
                value = leaf[is_outside][0]
                self.outside = (
                    f"{name} has {value:g} at step {self.steps}, its space is "
                    f"{low.min():g} to {high.max():g}"
                )

    def _look_at_flags(self, output: EnvOutput, ended: np.ndarray) -> None:
        terminated, truncated = output.terminated, output.truncated
        self.terminated += int(terminated.sum())
        self.truncated += int(truncated.sum())
        self.both += int((terminated & truncated).sum())
        ends = terminated | truncated
        self.plain_ends += int((ends & ~output.is_first).sum())
        masked = env_step_of(output, ()).masked_truncation
        self.masked += int(np.sum(masked))
        if not self.plain_ends or self.after_end:
            return
        # The step after an end resets and does nothing else.
        wrong = ended & output.is_first & (ends | (output.reward != 0))
        if wrong.any():
            i = int(np.argmax(wrong))
            flags = f"terminated {output.terminated[i]}, truncated {output.truncated[i]}"
            self.after_end = (
                f"environment {i} at step {self.steps + 1}, which comes after an end and only "
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
