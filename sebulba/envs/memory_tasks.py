"""Tasks that need memory, for the command line as ``sebulba.envs.memory_tasks:NAME``."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import gymnasium
import jax.numpy as jnp
import numpy as np

from sebulba.envs.envpool_adapter import make_envpool
from sebulba.envs.policy_view import View
from sebulba.envs.saving.sealed import seal, unseal
from sebulba.envs.spaces import make_action_check
from sebulba.types import EnvAdapter, EnvOutput, EnvSpec, FusedEnv, PyTree

EPISODES_A_RESET = 2**20
"""Numbers of episodes that are reserved for the time between two resets."""


def cartpole_without_velocities(num_envs: int, seeds: list[int]) -> EnvAdapter:
    """Return envpool's CartPole-v1, observing only the cart's position and the pole's angle."""
    env = make_envpool("CartPole-v1", num_envs, seeds, num_threads=1, options={})
    return SelectedComponents(env, (0, 2))


def acrobot_without_velocities(num_envs: int, seeds: list[int]) -> EnvAdapter:
    """Return envpool's Acrobot-v1, observing only the cosines and sines of its two angles."""
    env = make_envpool("Acrobot-v1", num_envs, seeds, num_threads=1, options={})
    return SelectedComponents(env, (0, 1, 2, 3))


class SelectedComponents(View):
    """Shows only some components of an environment's observation, which is a vector."""

    def __init__(self, env: EnvAdapter, components: tuple[int, ...]) -> None:
        """Show ``components`` of ``env``, whose observation is a Box of one dimension."""
        super().__init__(env)
        self._components = np.array(components)
        space = env.spec.observation_space
        assert isinstance(space, gymnasium.spaces.Box)
        observed = gymnasium.spaces.Box(
            space.low[self._components], space.high[self._components], dtype=space.dtype.type
        )
        self.spec = dataclasses.replace(env.spec, observation_space=observed)

    def seen(self, output: EnvOutput) -> EnvOutput:
        return output._replace(obs=output.obs[:, self._components])


class RepeatObservation:
    """Shows a random symbol at every step and rewards repeating that of ``delay`` steps ago.

    The best return is ``episode_length - delay``; guessing blindly gets that over ``num_symbols``.
    Symbols are a hash of seed, episode and time, so that the state consists of two counters.
    """

    def __init__(
        self,
        num_envs: int,
        seeds: list[int],
        delay: int = 8,
        num_symbols: int = 2,
        episode_length: int = 64,
    ) -> None:
        """Make ``num_envs`` tasks that begin their episodes together."""
        self.num_envs = num_envs
        symbols = gymnasium.spaces.Discrete(num_symbols, dtype=np.int32)
        self.spec = EnvSpec(symbols, symbols, name="RepeatObservation")
        self._seed = np.array(seeds, np.uint32)
        self._sizes = delay, num_symbols, episode_length
        self._check_action = make_action_check(symbols, num_envs)
        self._num_resets = 0
        # Episode and time after a reset, in arrays that a fused cycle reads again after each reset.
        self._first = np.zeros(num_envs, np.int32), np.zeros(num_envs, np.int32)
        self._state = self._first

    def reset(self) -> EnvOutput:
        """Begin episodes that were not played before."""
        # This object does not know how many episodes a fused cycle has played.
        self._first[0][:] = self._num_resets * EPISODES_A_RESET % 2**31
        self._num_resets += 1
        self._state = self._first
        obs = _symbol(self._seed, *self._state, self._sizes[1])
        return EnvOutput.first(obs, self.num_envs)

    def step(self, action: np.ndarray) -> EnvOutput:
        self._check_action(action)
        self._state, output = _repeat_step(np, self._seed, self._sizes, self._state, action)
        return output

    def state(self) -> bytes:
        """Return the seed and the counters of every task, and the number of resets."""
        content = (self._seed, self._num_resets, self._state)
        return seal(content, of=self._who(), num_envs=self.num_envs)

    def put_back(self, state: bytes) -> None:
        """Go on from ``state``, which includes the seeds."""
        content = unseal(state, of=self._who(), num_envs=self.num_envs)
        self._seed, self._num_resets, self._state = content

    def _who(self) -> str:
        return f"environment {self.spec.name!r} with (delay, num_symbols, length) {self._sizes}"

    def fused(self) -> FusedEnv:
        num_symbols = self._sizes[1]

        def step(state: PyTree, action: Any) -> tuple[PyTree, EnvOutput, Any]:
            inside = jnp.clip(action, 0, num_symbols - 1)
            state, output = _repeat_step(jnp, self._seed, self._sizes, state, inside)
            return state, output, jnp.sum(inside != action, dtype=jnp.int32)

        return FusedEnv(self._first, step)

    def close(self) -> None:
        """Do nothing: there is nothing to free."""


def _repeat_step(
    xp: Any, seed: np.ndarray, sizes: tuple[int, int, int], state: PyTree, action: Any
) -> tuple[PyTree, EnvOutput]:
    """Step all environments; one whose episode has ended is reset and ignores its action."""
    delay, num_symbols, length = sizes
    episode, t = state
    is_first = t == length
    asked = _symbol(seed, episode, xp.maximum(t - delay, 0), num_symbols)
    right = (action == asked) & (t >= delay) & ~is_first
    episode = (episode + is_first).astype(np.int32)
    t = xp.where(is_first, 0, t + 1).astype(np.int32)
    reward, ended = right.astype(np.float32), t == length
    output = EnvOutput(
        obs=_symbol(seed, episode, t, num_symbols),
        reward=reward,
        terminated=ended,
        truncated=xp.zeros_like(ended),
        is_first=is_first,
        unclipped_reward=reward,
        episode_end=ended,
    )
    return (episode, t), output


def _symbol(seed: Any, episode: Any, t: Any, num_symbols: int) -> Any:
    mixed = functools.reduce(
        _mix, (episode.astype(np.uint32), t.astype(np.uint32)), _mix(seed, np.uint32(0))
    )
    return (mixed % np.uint32(num_symbols)).astype(np.int32)


def _mix(hashed: Any, x: Any) -> Any:
    """Return a hash of two uint32 (a multiply-xorshift round, which is meant to overflow)."""
    y = hashed + x * np.uint32(0x9E3779B9) + np.uint32(0x7F4A7C15)
    y = (y ^ (y >> np.uint32(16))) * np.uint32(0x7FEB352D)
    y = (y ^ (y >> np.uint32(15))) * np.uint32(0x846CA68B)
    return y ^ (y >> np.uint32(16))
