"""Playing an environment for its checks: a single one, or a vector by its adapter."""

from __future__ import annotations

import contextlib
import copy
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import jax
import numpy as np

from sebulba.envs.checked_env import CheckedEnv
from sebulba.types import EnvAdapter, EnvOutput, EnvSpec


class Recorder(gymnasium.Wrapper):
    """Keeps the last return value of an environment, unchanged."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self.returned: Any = None

    def reset(self, **arguments: Any) -> Any:
        self.returned = self.env.reset(**arguments)
        return self.returned

    def step(self, action: Any) -> Any:
        self.returned = self.env.step(action)
        return self.returned


class SinglePlayer:
    """Plays one environment, which is held to its contract as in a run."""

    def __init__(self, make_one: Callable[[], Any], seed: int) -> None:
        """Make the environment; raise UsageError as an adapter does."""
        self.made: Any = None
        self.recorder: Recorder | None = None
        self._seed: int | None = seed
        self._ended = False

        def make() -> Any:
            self.made = make_one()
            if not isinstance(self.made, gymnasium.Env):
                return self.made
            self.recorder = Recorder(self.made)
            return self.recorder

        self.checked = CheckedEnv(make, 0)
        assert self.recorder is not None, "CheckedEnv refuses anything else"
        self.spec: EnvSpec = EnvSpec(self.recorder.observation_space, self.checked.action_space)
        """The observation space is the declared one, not that which reaches JAX."""

    @property
    def returned(self) -> Any:
        """The return value of the environment's last ``reset`` or ``step``."""
        return None if self.recorder is None else self.recorder.returned

    def reset(self) -> EnvOutput:
        """Begin an episode, the first one with the seed."""
        seed, self._seed, self._ended = self._seed, None, False
        obs, _ = self.checked.reset(seed=seed)
        return EnvOutput.first(_as_rows(obs), 1)

    def step(self, action: np.ndarray) -> EnvOutput:
        """Act, or begin the next episode."""
        if self._ended:
            return self.reset()
        obs, reward, terminated, truncated, _ = self.checked.step(action[0])
        self._ended = terminated or truncated
        return EnvOutput(
            *_as_rows((obs, reward, terminated, truncated, False, reward, self._ended))
        )

    def close(self) -> None:
        """Free the environment."""
        self.checked.close()


Player = EnvAdapter | SinglePlayer
"""An environment that is played: a vector by its adapter, or a single one."""


def _as_rows(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: np.asarray(leaf)[None], tree)


def close_quietly(player: Player) -> None:
    """Close the player, and ignore what that raises, which another check reports."""
    with contextlib.suppress(Exception):
        player.close()


def actions(space: gymnasium.Space, num_envs: int, seed: int) -> Iterator[np.ndarray]:
    """Yield random actions ``[B, ...]`` without end, the same for the same seed."""
    space = copy.deepcopy(space)  # several environments may share a space and its generator
    space.seed(seed)
    while True:
        yield np.stack([np.asarray(space.sample(), space.dtype) for _ in range(num_envs)])


Fingerprint = dict[str, list[int]]
"""A checksum for each environment, by the name of an array."""
COMPARED = ("obs", "reward", "terminated", "truncated", "is_first", "final")
"""Fields of an output that are compared; the others follow from them."""


def fingerprint(output: EnvOutput) -> Fingerprint:
    """Return checksums of an output."""
    return {
        field + jax.tree_util.keystr(path): [
            zlib.crc32(np.ascontiguousarray(row).tobytes()) for row in np.asarray(leaf)
        ]
        for field in COMPARED
        for path, leaf in jax.tree_util.tree_leaves_with_path(getattr(output, field))
    }


def play(player: Player, other: Player | None, num_envs: int, num_steps: int) -> list[Fingerprint]:
    """Play, and return the checksums of all ``num_steps + 1`` outputs.

    Args:
      player: Player that gets the same actions at every call.
      other: Player that is stepped in between, with actions of its own, or None.
      num_envs: Number of environments of a player.
      num_steps: Number of steps.
    """
    own_actions = actions(player.spec.action_space, num_envs, 0)
    other_actions = actions(player.spec.action_space, num_envs, 1)
    shown = [fingerprint(player.reset())]
    if other:
        other.reset()
    for _ in range(num_steps):
        if other:
            other.step(next(other_actions))
        shown.append(fingerprint(player.step(next(own_actions))))
    return shown


def first_difference(a: list[Fingerprint], b: list[Fingerprint]) -> str | None:
    """Return in words where two plays differ first, or None if they do not."""
    for step, (in_a, in_b) in enumerate(zip(a, b, strict=True)):
        if names := [name for name in in_a if in_a[name] != in_b.get(name)]:
            place = "the beginning" if step == 0 else f"step {step}"
            return f"{', '.join(names)} at {place}"
    return None
