"""An environment that writes into every observation and reward where it belongs.

The observation encodes (seed, episode, t, last action), the reward the same in one number, so that
one cell out of place anywhere between the environment and the loss shows. The same environment
exists as a ``gymnasium.Env``, as a pool with envpool's interface, and in JAX behind envpool's
``xla()``. Everything is a function of small integers, exact in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from sebulba.envs.envpool_adapter import EnvpoolAdapter
from sebulba.inference.cycle import env_step_of
from sebulba.types import EnvAdapter, EnvStep, FinalObs, PyTree

NUM_ACTIONS = 4
LONGEST_EPISODE = 12

Mode = Literal["next_step", "same_step"]
"""How ends are delivered; a DISABLED vector environment is delivered as "same_step"."""


# The environment as functions of integers or integer arrays.


def episode_length(seed: Any, episode: Any) -> Any:
    """Return the length of an episode, 1 to LONGEST_EPISODE."""
    e = episode % 256
    return 1 + (seed % 1021 + 5 * e + e * e) % LONGEST_EPISODE


def episode_end(seed: Any, episode: Any) -> tuple[Any, Any]:
    """Return (terminated, truncated) of the last step; one of five ends is both."""
    kind = (seed % 1021 + 3 * (episode % 256)) % 5
    return (kind != 2) & (kind != 3), kind >= 2


def reward_of(seed: Any, episode: Any, t: Any, action: Any) -> Any:
    """Return the reward of the action that led to step t; exact in float32, never 0."""
    return (((seed % 1021) * 256 + episode % 256) * 16 + t) * NUM_ACTIONS + action


def observation_of(xp: Any, seed: Any, episode: Any, t: Any, last_action: Any) -> Any:
    """Return ``[..., 5]`` float32; ``last_action`` is -1 where an episode begins."""
    return xp.stack([seed >> 16, seed & 0xFFFF, episode, t, last_action], axis=-1).astype(
        xp.float32
    )


OBSERVATION_SPACE = spaces.Box(-1, 2**24, (5,), np.float32)
DICT_OBSERVATION_SPACE = spaces.Dict(
    where=spaces.Box(0, 2**24, (4,), np.float32), last=spaces.Discrete(NUM_ACTIONS + 1)
)


class OracleEnv(gymnasium.Env):
    """The oracle as one Gymnasium environment; its seed is its name."""

    observation_space: gymnasium.Space = OBSERVATION_SPACE

    def __init__(self) -> None:
        self.action_space = spaces.Discrete(NUM_ACTIONS)
        self._episode = -1

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        if seed is not None:
            self._seed, self._episode = seed, -1
        self._episode += 1
        self._t = 0
        return self._observe(-1), {}

    def step(self, action: Any) -> tuple:
        self._t += 1
        terminated = truncated = False
        if self._t == episode_length(self._seed, self._episode):
            terminated, truncated = episode_end(self._seed, self._episode)
        reward = reward_of(self._seed, self._episode, self._t, int(action))
        return self._observe(int(action)), float(reward), terminated, truncated, {}

    def _observe(self, last_action: int) -> Any:
        seed = self._seed
        return np.array(
            [seed >> 16, seed & 0xFFFF, self._episode, self._t, last_action], np.float32
        )


class DictOracleEnv(OracleEnv):
    """The oracle with a Dict observation."""

    observation_space = DICT_OBSERVATION_SPACE

    def _observe(self, last_action: int) -> Any:
        return {"where": super()._observe(last_action)[:4], "last": last_action + 1}


class OraclePool:
    """The oracle with envpool's interface: rows in any order, next-step reset."""

    observation_space = OBSERVATION_SPACE
    action_space = spaces.Discrete(NUM_ACTIONS)

    def __init__(self, seeds: list[int]) -> None:
        num_envs = len(seeds)
        self.config = {"num_envs": num_envs, "batch_size": num_envs, "max_num_players": 1}
        self.spec = SimpleNamespace(
            state_array_spec={"obs": SimpleNamespace(dtype=np.float32)},
            action_array_spec={"action": SimpleNamespace(dtype=np.int32)},
        )
        self.is_closed = False
        self._seed = np.asarray(seeds, np.int32)
        self._state: PyTree = (np.full(num_envs, -1, np.int32),) * 2
        self._order = np.random.default_rng(0)

    def reset(self) -> tuple:
        num_envs = self.config["num_envs"]
        self._state = self._state[0] + 1, np.zeros(num_envs, np.int32)
        obs = observation_of(np, self._seed, *self._state, np.full(num_envs, -1))
        order = self._order.permutation(num_envs).astype(np.int32)
        return obs[order], {"env_id": order}

    def step(self, action: np.ndarray) -> tuple:
        assert action.dtype == np.int32 and len(action) == self.config["num_envs"]
        order = self._order.permutation(len(action)).astype(np.int32)
        self._state, rows = _pool_step(np, self._seed, self._state, action)
        return self._rows(rows, order)

    def _rows(self, rows: tuple, order: Any) -> tuple:
        # A trap: in envpool, too, `elapsed_step` is not zeroed at every reset.
        info = {"env_id": order, "elapsed_step": 0 * order}
        return (*(x[order] for x in rows), info)

    def xla(self) -> tuple:
        """Return (handle, recv, send, step); the handle of this one is its state."""
        seed = jnp.asarray(self._seed)

        def step(handle: PyTree, action: jax.Array) -> tuple:
            *state, key = handle
            key, order_key = jax.random.split(key)
            order = jax.random.permutation(order_key, jnp.arange(len(seed), dtype=jnp.int32))
            state, rows = _pool_step(jnp, seed, tuple(state), action)
            return (*state, key), self._rows(rows, order)

        first = np.zeros_like(self._seed)
        return (first, first, np.array([0, 1], np.uint32)), None, None, step

    def close(self) -> None:
        self.is_closed = True


def _pool_step(xp: Any, seed: Any, state: tuple, action: Any) -> tuple:
    """Step all environments; one that ended is reset and ignores its action."""
    episode, t = state
    is_reset = t == episode_length(seed, episode)
    episode = episode + is_reset
    t = xp.where(is_reset, 0, t + 1).astype(xp.int32)
    is_end = t == episode_length(seed, episode)
    # Of a reset row t is 0, which no episode's length is.
    terminated, truncated = (flag & is_end for flag in episode_end(seed, episode))
    reward = xp.where(is_reset, 0, reward_of(seed, episode, t, action)).astype(xp.float32)
    obs = observation_of(xp, seed, episode, t, xp.where(is_reset, -1, action))
    return (episode.astype(xp.int32), t), (obs, reward, terminated, truncated)


# Ways to make it.


def pool_adapter(num_envs: int, seeds: list[int]) -> EnvpoolAdapter:
    """Return the oracle behind the envpool adapter, stepped or fused."""
    return EnvpoolAdapter(OraclePool(seeds[:num_envs]), name="oracle pool")


def vector_env(
    mode: AutoresetMode, cls: type, asynchronous: bool, num_envs: int, seeds: list[int]
) -> gymnasium.vector.VectorEnv:
    """Return a ready-made vector environment of oracles."""
    if asynchronous:
        return AsyncVectorEnv([cls] * num_envs, autoreset_mode=mode, context="forkserver")
    return SyncVectorEnv([cls] * num_envs, autoreset_mode=mode)


def ready_made(
    mode: AutoresetMode, cls: type = OracleEnv, *, asynchronous: bool = False
) -> Callable:
    """Return a factory of the form ``(num_envs, seeds) -> VectorEnv``."""
    return functools.partial(vector_env, mode, cls, asynchronous)


ORACLES: dict[str, tuple[Any, dict[str, Any], Mode]] = {
    "single": (OracleEnv, {}, "next_step"),
    "single_dict": (DictOracleEnv, {}, "next_step"),
    "single_async": (OracleEnv, {"vectorization": "async"}, "next_step"),
    "single_dict_async": (DictOracleEnv, {"vectorization": "async"}, "next_step"),
    "vector_next_step": (ready_made(AutoresetMode.NEXT_STEP), {}, "next_step"),
    "vector_same_step": (ready_made(AutoresetMode.SAME_STEP), {}, "same_step"),
    "vector_disabled": (ready_made(AutoresetMode.DISABLED, DictOracleEnv), {}, "same_step"),
    "async_next_step": (ready_made(AutoresetMode.NEXT_STEP, asynchronous=True), {}, "next_step"),
    "async_same_step": (ready_made(AutoresetMode.SAME_STEP, asynchronous=True), {}, "same_step"),
    "async_disabled": (ready_made(AutoresetMode.DISABLED, asynchronous=True), {}, "same_step"),
    "pool": (pool_adapter, {}, "next_step"),
}
"""Every way through the adapters: what ``make_env_factory`` takes, its options, the mode."""


# Rolling out and checking.


def rollout(env: EnvAdapter, actions: np.ndarray, first: EnvStep | None = None) -> EnvStep:
    """Return the ``[T+1, B]`` EnvSteps of ``actions [T, B]``; goes on from ``first`` if given."""
    if first is None:
        first = env_step_of(env.reset(), np.zeros_like(actions[0]))
    rows = [first]
    rows.extend(env_step_of(env.step(action), action) for action in actions)
    return jax.tree.map(lambda *x: np.stack(x), *rows)


def misplaced_cells(env_step: EnvStep, action: Any, *, mode: Mode) -> int:
    """Count cells of a trajectory of oracles that are not where they belong.

    Args:
      env_step: ``[T+1, B, ...]``, from anywhere in a run; row 0 may be in mid-episode.
      action: ``[T, B]``.
      mode: How ends were delivered.
    """
    env_step, action = jax.tree.map(np.asarray, (env_step, action))
    seed, episode, t, last = _decode(env_step.obs)
    wrong = _count(seed != seed[:1]) + seed.shape[1] - len(np.unique(seed[0]))
    wrong += _count(env_step.prev_action[1:] != action)
    # What the flags say about themselves.
    is_end = t == episode_length(seed, episode)
    wrong += _count(env_step.is_first != (t == 0)) + _count((t == 0) != (last == -1))
    wrong += _count(t > episode_length(seed, episode))
    # Rows 1 to T, from the row before and its action.
    before = SimpleNamespace(seed=seed[:-1], episode=episode[:-1], t=t[:-1], is_end=is_end[:-1])
    wrong += _wrong_steps(env_step, action, before, (episode[1:], t[1:], last[1:]), mode)
    return wrong + _wrong_first_row(env_step, (seed[0], episode[0], t[0], last[0]), mode)


def _decode(obs: Any) -> tuple[np.ndarray, ...]:
    if isinstance(obs, dict):
        fields = np.concatenate([obs["where"], obs["last"][..., None] - 1], axis=-1)
    else:
        fields = obs
    high, low, episode, t, last = np.moveaxis(fields.astype(np.int64), -1, 0)
    return (high << 16) | low, episode, t, last


def _wrong_steps(env_step: EnvStep, action: Any, before: Any, after: tuple, mode: Mode) -> int:
    """Count the wrong cells of rows 1 to T against those that ``before`` and ``action`` imply."""
    t = before.t + 1
    length = episode_length(before.seed, before.episode)
    ends_now = t == length
    starts_anew = before.is_end if mode == "next_step" else ends_now
    is_inserted = before.is_end if mode == "next_step" else np.zeros_like(before.is_end)
    expected_place = (
        before.episode + starts_anew,
        np.where(starts_anew, 0, t),
        np.where(starts_anew, -1, action),
    )
    wrong = sum(_count(x != y) for x, y in zip(after, expected_place, strict=True))
    reward = np.where(is_inserted, 0, reward_of(before.seed, before.episode, t, action))
    wrong += _count(env_step.reward[1:] != reward)
    ends = ends_now & ~is_inserted
    terminated, truncated = episode_end(before.seed, before.episode)
    wrong += _count(env_step.terminated[1:] != (terminated & ends))
    wrong += _count(env_step.truncated[1:] != (truncated & ends))
    # The mask of the loss leaves out exactly what has no action.
    wrong += _count(env_step.valid[1:] == is_inserted)
    return wrong + _wrong_final(env_step.final, before, ends, t, action, mode)


def _wrong_final(final: Any, before: Any, ends: Any, t: Any, action: Any, mode: Mode) -> int:
    """Count the wrong cells of the last observations of rows 1 to T."""
    if mode == "next_step" or not isinstance(final, FinalObs):
        return 0 if mode == "next_step" and not final else 1
    wrong = _count(final.given[1:] != ends)
    expected = before.seed, before.episode, t, action
    for is_there, should_be in zip(_decode(final.obs), expected, strict=True):
        wrong += _count((is_there[1:] != should_be) & ends)
    return wrong


def _wrong_first_row(env_step: EnvStep, place: tuple, mode: Mode) -> int:
    """Count the wrong cells of row 0, from its own observation and previous action."""
    seed, episode, t, last = place
    row = jax.tree.map(lambda x: x[0], env_step)
    terminated, truncated = episode_end(seed, episode)
    ends = t == episode_length(seed, episode)
    expected_reward = np.where(t > 0, reward_of(seed, episode, t, row.prev_action), 0)
    expected = [expected_reward, terminated & ends, truncated & ends]
    # In same-step mode a first observation comes with the end of the episode before it, unless
    # `reset` was called.
    was_reset = (row.reward == 0) & ~row.terminated & ~row.truncated
    if mode == "same_step":
        previous = episode - 1
        carries_end = (t == 0) & ~was_reset
        length = episode_length(seed, previous)
        of_end = (reward_of(seed, previous, length, row.prev_action), *episode_end(seed, previous))
        expected = [np.where(carries_end, x, y) for x, y in zip(of_end, expected, strict=True)]
    got = row.reward, row.terminated, row.truncated
    wrong = sum(_count(x != y) for x, y in zip(got, expected, strict=True))
    return wrong + _count((t > 0) & (last != row.prev_action))


def _count(is_wrong: np.ndarray) -> int:
    return int(np.sum(is_wrong))


def cartpole_violations(env_step: EnvStep, action: Any) -> int:
    """Count transitions of envpool's CartPole-v1 that do not follow from its equations.

    Barto, Sutton and Anderson (1983), as in Gymnasium: Euler steps of 0.02 s, an end beyond 2.4 m
    or 12 degrees, a cut after 500 steps; next-step autoreset.

    Args:
      env_step: ``[T+1, B, ...]``, from anywhere in a run.
      action: ``[T, B]``.
    """
    env_step, action = jax.tree.map(np.asarray, (env_step, action))
    after, inserted = env_step.obs[1:].astype(np.float64), env_step.is_first[1:]
    ends = env_step.terminated | env_step.truncated
    expected = _cartpole_next(env_step.obs[:-1].astype(np.float64), action)
    wrong = ~inserted & ~np.isclose(after, expected, rtol=1e-4, atol=1e-5).all(-1)
    wrong |= inserted & (np.abs(after) > 0.05).any(-1)
    wrong |= inserted != ends[:-1]
    wrong |= env_step.reward[1:] != np.where(inserted, 0, 1)
    wrong |= env_step.prev_action[1:] != action
    limit = np.array([2.4, 12 * 2 * np.pi / 360])
    excess = (np.abs(after[..., [0, 2]]) / limit - 1).max(-1)
    # A state right on the limit may be rounded to either side.
    wrong |= env_step.terminated[1:] & (excess < -1e-5)
    wrong |= ~ends[1:] & (excess > 1e-5)
    wrong |= inserted & ends[1:]
    steps, is_known = _steps_since_first(env_step.is_first)
    is_full = is_known & (steps == 500)
    wrong |= (is_full & ~env_step.truncated)[1:] | (is_known & ~is_full & env_step.truncated)[1:]
    return _count(wrong)


def _cartpole_next(state: np.ndarray, action: np.ndarray) -> np.ndarray:
    x, x_dot, theta, theta_dot = np.moveaxis(state, -1, 0)
    gravity, cart, pole, half_length, tau = 9.8, 1.0, 0.1, 0.5, 0.02
    force = np.where(action == 1, 10.0, -10.0)
    sin, cos = np.sin(theta), np.cos(theta)
    push = (force + pole * half_length * theta_dot**2 * sin) / (cart + pole)
    theta_acc = (gravity * sin - cos * push) / (
        half_length * (4 / 3 - pole * cos**2 / (cart + pole))
    )
    x_acc = push - pole * half_length * theta_acc * cos / (cart + pole)
    return np.stack(
        [
            x + tau * x_dot,
            x_dot + tau * x_acc,
            theta + tau * theta_dot,
            theta_dot + tau * theta_acc,
        ],
        axis=-1,
    )


def _steps_since_first(is_first: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return steps since the last ``is_first``, and whether there was one, ``[T+1, B]``."""
    rows = np.arange(len(is_first))[:, None]
    latest = np.maximum.accumulate(np.where(is_first, rows, -1), axis=0)
    return rows - latest, latest >= 0
