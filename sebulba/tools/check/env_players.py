"""Playing an environment for its checks: a single one, or a vector by its adapter."""

from __future__ import annotations

import contextlib
import copy
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import jax
import numpy as np

from sebulba.envs.checked_env import CheckedEnv
from sebulba.envs.multi.population_env import SPEC
from sebulba.envs.observation_parts import tags_of
from sebulba.envs.spaces import legal_action
from sebulba.types import EnvAdapter, EnvOutput, EnvSpec, Group, MultiAgentSpec


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
        self.is_population: bool = SPEC in self.checked.metadata
        """It has many agents, whose rows only the adapter of a vector tells apart."""
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


class RandomActions:
    """Random actions, legal ones where a mask says which are; the same for the same seed."""

    def __init__(self, spec: EnvSpec | MultiAgentSpec, num_envs: int, seed: int) -> None:
        """Draw for ``num_envs`` environments of ``spec``."""
        self._many = isinstance(spec, MultiAgentSpec)
        groups: Mapping[str, Any] = (
            spec.groups if isinstance(spec, MultiAgentSpec) else {"": Group(spec, ())}
        )
        self._groups: dict[str, tuple[Any, str | None, tuple[int, ...]]] = {}
        for name, group in groups.items():
            # Several environments may share a space and its generator.
            space = copy.deepcopy(group.spec.action_space)
            space.seed(seed)
            shape = (num_envs, len(group.slots)) if self._many else (num_envs,)
            self._groups[name] = (space, group.spec.legal_actions, shape)

    def __call__(self, output: EnvOutput) -> Any:
        """Return the actions ``[B, ...]``, or ``{group: [B, A, ...]}``, that follow ``output``."""
        if not self._many:
            return self._drawn("", output.obs)
        return {name: self._drawn(name, output.obs[name]) for name in self._groups}

    def _drawn(self, name: str, obs: Any) -> np.ndarray:
        space, legal, shape = self._groups[name]
        drawn = [np.asarray(space.sample(), space.dtype) for _ in range(math.prod(shape))]
        if legal is not None:
            masks = np.asarray(obs[legal]).reshape(len(drawn), -1)
            drawn = [legal_action(*one, space) for one in zip(drawn, masks, strict=True)]
        return np.stack(drawn).reshape(*shape, *(space.shape or ()))


def slots_of(tree: Any) -> np.ndarray:
    """Return rewards or flags of all slots side by side, ``[B, slots]``."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    return np.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1)


def in_brief(output: EnvOutput) -> EnvOutput:
    """Return rewards and flags of environments, ``[B]``, where ``output`` has those of slots.

    The reward is the sum of the sizes. An episode that ended for all is truncated if nobody has
    reached a terminal state.
    """
    if not isinstance(output.reward, dict):
        return output
    ends, terminated = output.episode_end, slots_of(output.terminated).any(axis=1)
    return output._replace(
        obs=(),
        reward=np.abs(slots_of(output.reward)).sum(axis=1),
        terminated=ends & terminated,
        truncated=ends & ~terminated,
        is_first=slots_of(output.is_first).all(axis=1),
        acting=(),
    )


Fingerprint = dict[str, list[int]]
"""A checksum for each environment, by the name of an array."""
COMPARED = ("obs", "reward", "terminated", "truncated", "is_first", "final", "acting")
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
    """Play, with ``other`` stepped in between, and return the checksums of all ``num_steps + 1``
    outputs."""
    choose, choose_other = (RandomActions(player.spec, num_envs, seed) for seed in (0, 1))
    output = player.reset()
    shown = [fingerprint(output)]
    others = other.reset() if other else None
    for _ in range(num_steps):
        if other and others:
            others = other.step(choose_other(others))
        output = player.step(choose(output))
        shown.append(fingerprint(output))
    return shown


def first_difference(a: list[Fingerprint], b: list[Fingerprint]) -> str | None:
    """Return in words where two plays differ first, or None if they do not."""
    for step, (in_a, in_b) in enumerate(zip(a, b, strict=True)):
        if names := [name for name in in_a if in_a[name] != in_b.get(name)]:
            place = "the beginning" if step == 0 else f"step {step}"
            return f"{', '.join(names)} at {place}"
    return None
