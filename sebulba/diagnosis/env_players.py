"""Playing an environment for its checks: one alone, or a whole vector by its adapter."""

from __future__ import annotations

import contextlib
import copy
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import gymnasium
import jax
import numpy as np

from sebulba.envs.checked_env import CheckedEnv
from sebulba.types import EnvAdapter, EnvFactory


class Moment(NamedTuple):
    """What one step showed; leaves are ``[B, ...]``."""

    obs: Any
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    is_first: np.ndarray


class Player(Protocol):
    """An environment that is played."""

    observation_space: gymnasium.Space
    """As declared, for one alone; as it reaches JAX, for a vector."""
    action_space: gymnasium.Space

    def reset(self) -> Moment:
        """Begin."""
        ...

    def step(self, action: np.ndarray) -> Moment:
        """Act, ``[B, ...]``; an episode that has ended begins anew instead."""
        ...

    def close(self) -> None:
        """Free the environment."""
        ...


class Recorder(gymnasium.Wrapper):
    """Keeps what an environment returned, as it returned it."""

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
    """Plays one environment, held to its contract as in a run."""

    def __init__(self, make_one: Callable[[], Any], seed: int) -> None:
        """Make the environment; UsageError as the adapter raises it."""
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
        self.observation_space = self.recorder.observation_space
        self.action_space = self.checked.action_space

    @property
    def returned(self) -> Any:
        """What the environment's last reset or step returned."""
        return None if self.recorder is None else self.recorder.returned

    def reset(self) -> Moment:
        """Begin an episode; the first time with the seed."""
        seed, self._seed, self._ended = self._seed, None, False
        obs, _ = self.checked.reset(seed=seed)
        return _moment(obs, 0.0, False, False, True)

    def step(self, action: np.ndarray) -> Moment:
        """Act, or begin the next episode."""
        if self._ended:
            return self.reset()
        obs, reward, terminated, truncated, _ = self.checked.step(action[0])
        self._ended = terminated or truncated
        return _moment(obs, reward, terminated, truncated, False)

    def close(self) -> None:
        """Close the environment."""
        self.checked.close()


def _moment(obs: Any, *others: Any) -> Moment:
    return Moment(
        jax.tree.map(lambda leaf: np.asarray(leaf)[None], obs),
        *(np.array([other]) for other in others),
    )


class VectorPlayer:
    """Plays what a factory makes."""

    def __init__(self, factory: EnvFactory, seeds: list[int]) -> None:
        """Make the adapter."""
        self.adapter: EnvAdapter = factory(len(seeds), seeds)
        self.observation_space = self.adapter.spec.observation_space
        self.action_space = self.adapter.spec.action_space

    def reset(self) -> Moment:
        """Begin."""
        return _of_output(self.adapter.reset())

    def step(self, action: np.ndarray) -> Moment:
        """Act."""
        return _of_output(self.adapter.step(action))

    def close(self) -> None:
        """Close the adapter."""
        self.adapter.close()


def _of_output(output: Any) -> Moment:
    return Moment(output.obs, output.reward, output.terminated, output.truncated, output.is_first)


def close_quietly(player: Player) -> None:
    """Close; what that raises is the business of a check of its own."""
    with contextlib.suppress(Exception):
        player.close()


def actions(space: gymnasium.Space, num_envs: int, seed: int) -> Iterator[np.ndarray]:
    """Yield random actions ``[B, ...]`` without end, the same for the same seed."""
    space = copy.deepcopy(space)  # several environments may share theirs, with its generator
    space.seed(seed)
    while True:
        yield np.stack([np.asarray(space.sample(), space.dtype) for _ in range(num_envs)])


Fingerprint = dict[str, list[int]]
"""A checksum for each environment, by the name of what it is of."""


def fingerprint(moment: Moment) -> Fingerprint:
    """Return checksums of what a step showed."""
    named = jax.tree_util.tree_leaves_with_path(moment)
    return {
        jax.tree_util.keystr(path).lstrip("."): [
            zlib.crc32(np.ascontiguousarray(row).tobytes()) for row in np.asarray(leaf)
        ]
        for path, leaf in named
    }


def play(player: Player, other: Player | None, num_envs: int, num_steps: int) -> list[Fingerprint]:
    """Play and return what was shown, as checksums, ``num_steps + 1`` of them.

    Args:
      player: Gets the same actions every time.
      other: Plays in between, with actions of its own.
      num_envs: B.
      num_steps: Steps.
    """
    own_actions = actions(player.action_space, num_envs, 0)
    other_actions = actions(player.action_space, num_envs, 1)
    shown = [fingerprint(player.reset())]
    if other:
        other.reset()
    for _ in range(num_steps):
        if other:
            other.step(next(other_actions))
        shown.append(fingerprint(player.step(next(own_actions))))
    return shown


def first_difference(a: list[Fingerprint], b: list[Fingerprint]) -> str | None:
    """Return where two plays differ first, in words, None if nowhere."""
    for step, (in_a, in_b) in enumerate(zip(a, b, strict=True)):
        if names := [name for name in in_a if in_a[name] != in_b.get(name)]:
            place = "the beginning" if step == 0 else f"step {step}"
            return f"{', '.join(names)} at {place}"
    return None
