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
from sebulba.envs.observation_parts import tags_of
from sebulba.envs.plain_data import pack, unpack
from sebulba.envs.spaces import legal_action
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
        self._obs: Any = None

        def make() -> Any:
            self.made = make_one()
            if not isinstance(self.made, gymnasium.Env):
                return self.made
            self.recorder = Recorder(self.made)
            return self.recorder

        self.checked = CheckedEnv(make, 0)
        assert self.recorder is not None, "CheckedEnv refuses anything else"
        self.spec: EnvSpec = EnvSpec(
            self.recorder.observation_space, self.checked.action_space, **tags_of(self.recorder)
        )
        """The observation space is the declared one, not that which reaches JAX."""

    @property
    def returned(self) -> Any:
        """The return value of the environment's last ``reset`` or ``step``."""
        return None if self.recorder is None else self.recorder.returned

    def reset(self) -> EnvOutput:
        """Begin an episode, the first one with the seed."""
        seed, self._seed, self._ended = self._seed, None, False
        obs, _ = self.checked.reset(seed=seed)
        self._obs = obs
        return EnvOutput.first(_as_rows(obs), 1)

    def step(self, action: np.ndarray) -> EnvOutput:
        """Act, or begin the next episode."""
        if self._ended:
            return self.reset()
        legal = self.spec.legal_actions
        one = (
            action[0]
            if legal is None
            else _legal_action(action, self._obs[legal][None], self.spec)[0]
        )
        obs, reward, terminated, truncated, _ = self.checked.step(one)
        self._obs = obs
        self._ended = terminated or truncated
        return EnvOutput(
            *_as_rows((obs, reward, terminated, truncated, False, reward, self._ended))
        )

    def close(self) -> None:
        """Free the environment."""
        self.checked.close()


class LegalPlayer:
    """A vector that gets a legal action wherever the one that it is given is not legal."""

    def __init__(self, env: EnvAdapter) -> None:
        """Take over ``env``, whose spec says which part of the observation is the mask."""
        self._env: Any = env
        self._mask: np.ndarray | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def reset(self) -> EnvOutput:
        """Begin new episodes."""
        return self._seen(self._env.reset())

    def step(self, action: np.ndarray) -> EnvOutput:
        """Act in all environments."""
        return self._seen(self._env.step(_legal_action(action, self._mask, self._env.spec)))

    def state(self) -> bytes | str:
        """Return the state with the mask, or why there is none."""
        state = self._env.state()
        return state if isinstance(state, str) else pack((state, self._mask))

    def put_back(self, state: bytes) -> None:
        """Go on from ``state``."""
        of_env, self._mask = unpack(state)
        self._env.put_back(of_env)

    def _seen(self, output: EnvOutput) -> EnvOutput:
        self._mask = output.obs[self._env.spec.legal_actions]
        return output


def legal_player(env: Any) -> Any:
    """Return ``env``, with legal actions only where its spec has some."""
    has_mask = isinstance(env.spec, EnvSpec) and env.spec.legal_actions is not None
    return LegalPlayer(env) if has_mask else env


def _legal_action(action: np.ndarray, mask: Any, spec: EnvSpec) -> np.ndarray:
    rows = zip(action, mask, strict=True)
    return np.stack([legal_action(one, legal, spec.action_space) for one, legal in rows])


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
