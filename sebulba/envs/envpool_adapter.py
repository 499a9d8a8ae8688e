"""envpool behind the EnvAdapter protocol, stepped and fused.

envpool aborts the process on bad input, so this module checks all input in Python first.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from sebulba.envs.envpool_families import check_family, import_envpool
from sebulba.envs.multi.envpool_cooperative import CooperativeAdapter, is_cooperative
from sebulba.envs.multi.envpool_games import SHOWN, GameAdapter, game_spec, is_game
from sebulba.envs.observation_parts import LegalActions
from sebulba.envs.option_checks import check_like, check_option_names
from sebulba.envs.pool import PoolAdapter, scattered
from sebulba.envs.seeds import check_seeds
from sebulba.envs.spaces import (
    canonical_action_space,
    canonical_observation_space,
    make_action_check,
    make_native_action,
)
from sebulba.envs.valid_actions import clamp
from sebulba.envs.xla_calls import without_side_effects
from sebulba.errors import EnvError, UsageError, shown
from sebulba.support.machine import num_cores
from sebulba.support.one_kernel import one_kernel
from sebulba.types import EnvAdapter, EnvOutput, EnvSpec, FusedEnv, PyTree

NUM_INFERENCERS = 2
"""Inferencers that the default number of threads expects to share the cores."""
MOST_COMPARED = 64
"""Most environments that are put in order by comparing each with each; more are scattered, which
takes linear time."""

RENDER_MODE = "render_mode"
DRAWN = "rgb_array"
"""The only ``render_mode`` that a pool may have."""
ATARI_HZ = 60
"""Frames of an Atari game in a second."""

_NOT_DRAWN = ("envpool.mujoco", "envpool.toy_text", "envpool.gfootball")
"""Families that draw nothing, or end the process if OpenGL is missing."""
_ONE_THREAD_FAMILIES = ("envpool.classic_control", "envpool.toy_text")
_OURS = {
    "num_envs": "the loop sets it",
    "seed": "the loop gives each environment its own",
    "env_seed": "the loop gives each environment its own",
    "batch_size": "all environments step together here",
    "max_num_players": "the id says it",
    "gym_reset_return_info": "it is always on",
    "base_path": "envpool knows where its files are",
    "task": "the id says it",
    "task_name": "the id says it",
}
_LARGEST = {
    "img_height": 4096,
    "img_width": 4096,
    "stack_num": 1024,
}


class EnvpoolAdapter(PoolAdapter):
    """An envpool (or anything with its interface) with next-step autoreset."""

    def __init__(self, pool: Any, *, name: str = "") -> None:
        """Take over ``pool``, made in synchronous mode with ``env_type="gymnasium"``.

        Raises:
          UsageError: ``pool`` is multi-player or asynchronous, or a space is not supported.
        """
        config = pool.config
        _check_one_player(config, name)
        super().__init__(pool)
        if config.get("batch_size", 0) not in (0, self.num_envs):
            raise UsageError(
                f"batch_size={config['batch_size']} of {name!r} must be num_envs={self.num_envs}: "
                "all environments step together"
            )
        self._step = native_step(pool) or pool.step
        self.spec = pool_spec(pool, config, name)
        self._check_action = make_action_check(self.spec.action_space, self.num_envs)
        *_, action_array = pool.spec.action_array_spec.values()
        self._action_dtype = np.dtype(action_array.dtype)  # the space of an int32 says int64
        self._native_action = make_native_action(pool.action_space, self._action_dtype)
        self._cast_obs = _make_obs_cast(self.spec.observation_space)
        self._bytes_in_order = np.arange(self.num_envs, dtype=np.int32).tobytes()
        self._ends = np.zeros(self.num_envs, np.bool_)
        self._legal = LegalActions()

    def reset(self) -> EnvOutput:
        obs, info = self._open_pool().reset()
        if (order := self._order(info)) is not None:
            obs = scattered(obs, order)
        self._ends = np.zeros(self.num_envs, np.bool_)
        first = EnvOutput.first(self._cast_obs(obs), self.num_envs)
        self._legal.look(self.spec, first.obs)
        return first

    def step(self, action: np.ndarray) -> EnvOutput:
        """Act; raise ActionError before an invalid action reaches native code."""
        self._open_pool()
        self._check_action(action)
        self._legal.check(self.spec, action)
        obs, reward, terminated, truncated, info = self._step(self._native_action(action))
        unclipped_reward, game_over = _game(reward, terminated, info)
        if (order := self._order(info)) is not None:
            obs, reward, terminated, truncated, unclipped_reward, game_over = scattered(
                (obs, reward, terminated, truncated, unclipped_reward, game_over), order
            )
        # The row after an end is a reset. Testing `elapsed_step == 0` would miss lost lives.
        is_first, self._ends = self._ends, terminated | truncated
        ends = self._ends if game_over is terminated else game_over.astype(np.bool_) | truncated
        obs = self._cast_obs(obs)
        self._legal.look(self.spec, obs, self._ends)
        return EnvOutput(
            obs=obs,
            reward=_as_float32(reward),
            terminated=terminated,
            truncated=truncated,
            is_first=is_first,
            unclipped_reward=_as_float32(unclipped_reward),
            episode_end=ends,
        )

    def fused(self) -> FusedEnv | str:
        pool = self._open_pool()
        if not sys.platform.startswith("linux"):
            return f"envpool has its XLA interface on Linux only, not on {sys.platform}"
        with jax.enable_x64(True):  # envpool asks JAX for the dtypes of its arrays
            handle, _, _, pool_step = pool.xla()
        space = self.spec.action_space
        action = jax.ShapeDtypeStruct((self.num_envs, *(space.shape or ())), space.dtype)
        pool_step = functools.partial(_narrow_step, pool_step, self._native_action)
        pool_step = without_side_effects(pool_step, handle, action)  # the handle chains the calls
        step = functools.partial(_fused_step, pool_step, self.spec)
        return FusedEnv((handle, np.zeros(self.num_envs, np.bool_)), step)

    def pictures(self) -> np.ndarray:
        """Return what the environments look like now, ``[B, height, width, 3]`` uint8.

        Atari is in colour and of full size, whatever the observations are.

        Raises:
          EnvError: The pool was not made with ``render_mode="rgb_array"``.
        """
        if self._open_pool().render_mode != DRAWN:
            raise EnvError(
                f"environment {self.spec.name!r} draws nothing; make it with render_mode={DRAWN!r}"
            )
        return self._pool.render(env_ids=np.arange(self.num_envs, dtype=np.int32))

    @property
    def pictures_per_second(self) -> float | None:
        """How many steps are a second of an Atari game; None for all else."""
        is_atari = "stack_num" in self._pool.config and "frame_skip" in self._pool.config
        return ATARI_HZ / self._pool.config["frame_skip"] if is_atari else None

    def close(self) -> None:
        self._step = None
        super().close()

    def _order(self, info: dict) -> np.ndarray | None:
        """Return the environments that the rows belong to, or None if they are in order."""
        order = info["env_id"]
        # Comparing bytes takes a fraction of the time of comparing arrays; these are int32.
        return None if order.tobytes() == self._bytes_in_order else order


def native_step(pool: Any) -> Callable[[np.ndarray], tuple] | None:
    """Return ``pool.step`` for checked actions without the Python around its native calls.

    That Python takes 10 of the 60 us of a step of 16 CartPoles, all under the interpreter's lock.
    The replacement relies on envpool's own description of its arrays.

    Returns:
      A function of an action in envpool's dtype, whose ``info`` has only what the adapter reads.
      None if the pool has no such description, has a step method of its own, or observes several
      arrays.
    """
    if not all(_is_of_envpool(pool, name) for name in ("step", "send", "recv")):
        return None
    state_keys = list(getattr(pool, "_state_keys", ()))
    action_keys = list(getattr(getattr(pool, "_spec", None), "_action_keys", ()))
    needed = {"info:env_id", "obs", "reward", "done", "trunc"}
    if not needed <= set(state_keys) or action_keys[:2] != ["env_id", "players.env_id"]:
        return None
    if len(action_keys) != 3:
        return None
    send, receive = pool._send, pool._recv
    obs, reward, done, trunc = (state_keys.index(k) for k in ("obs", "reward", "done", "trunc"))
    # Some families report termination apart, also in a step that truncates (envpool 1.2.7).
    end = state_keys.index("terminated") if "terminated" in state_keys else None
    infos = [
        (key, state_keys.index(f"info:{key}"))
        for key in ("env_id", "lives", "reward", "terminated")
        if f"info:{key}" in state_keys
    ]
    env_id = np.arange(int(pool.config["num_envs"]), dtype=np.int32)

    def step(action: np.ndarray) -> tuple:
        # Copy the action: envpool accepts only writable arrays.
        send([env_id, env_id, np.array(action, order="C")])
        state = receive()
        truncated = state[trunc]
        terminated = state[done] & ~truncated if end is None else state[end]
        info = {key: state[index] for key, index in infos}
        return state[obs], state[reward], terminated, truncated, info

    return step


def _is_of_envpool(pool: Any, name: str) -> bool:
    """Tell whether a method is envpool's, and not that of a subclass or of the instance."""
    method = getattr(type(pool), name, None)
    module = getattr(method, "__module__", "")
    return name not in vars(pool) and module.split(".")[0] == "envpool"


def _game(reward: Any, terminated: Any, info: dict) -> tuple[Any, Any]:
    """Return the unclipped reward, and whether the whole game is over, not only a life (Atari)."""
    if "lives" in info and "reward" in info and "terminated" in info:
        return info["reward"], info["terminated"]
    return reward, terminated


def _as_float32(array: np.ndarray) -> np.ndarray:
    return array if array.dtype == np.float32 else array.astype(np.float32)


def _make_obs_cast(canonical: gymnasium.Space) -> Callable[[PyTree], PyTree]:
    """Return a function that casts observations, NumPy or JAX, to the canonical dtypes.

    envpool returns fresh memory at every call, so arrays that need no cast are not copied.
    """
    if not isinstance(canonical, gymnasium.spaces.Dict):
        dtype = canonical.dtype
        return lambda obs: obs if obs.dtype == dtype else obs.astype(dtype)
    casts = {key: _make_obs_cast(canonical[key]) for key in canonical.spaces}
    return lambda obs: {key: cast(obs[key]) for key, cast in casts.items()}


def _narrow_step(
    pool_step: Any, native_action: Callable, handle: jax.Array, action: jax.Array
) -> tuple[jax.Array, tuple]:
    """Step a pool, some of whose arrays are 64 bits wide, with arrays of at most 32 bits."""

    def narrow(array: jax.Array) -> jax.Array:
        return array.astype(f"{array.dtype.kind}4") if array.dtype.itemsize == 8 else array

    # Convert row by row: the bounds of native_action are those of one environment.
    handle, output = pool_step(handle, jax.vmap(native_action)(action))
    return handle, jax.tree.map(narrow, output)


def _fused_step(
    pool_step: Any, spec: EnvSpec, state: PyTree, action: jax.Array
) -> tuple[PyTree, EnvOutput, jax.Array]:
    """Clamp actions, step, and put rows in order, as one pure function; see ``FusedEnv.step``."""
    handle, ends = state

    def after(ends: jax.Array, rows: jax.Array | None, pool_output: tuple) -> tuple:
        obs, reward, terminated, truncated, info = pool_output
        unclipped_reward, game_over = _game(reward, terminated, info)
        rows = _places_by_comparison(info["env_id"]) if rows is None else rows
        obs, reward, terminated, truncated, unclipped_reward, game_over = jax.tree.map(
            lambda x: x[rows], (obs, reward, terminated, truncated, unclipped_reward, game_over)
        )
        output = EnvOutput(
            obs=_make_obs_cast(spec.observation_space)(obs),
            reward=reward.astype(jnp.float32),
            terminated=terminated,
            truncated=truncated,
            is_first=ends,
            unclipped_reward=unclipped_reward.astype(jnp.float32),
            episode_end=game_over.astype(jnp.bool_) | truncated,
        )
        return output, terminated | truncated

    def before(action: jax.Array) -> tuple[jax.Array, jax.Array]:
        inside, num_invalid = clamp(action, spec.action_space)
        return inside.astype(spec.action_space.dtype), num_invalid

    action, num_invalid = one_kernel(before)(action)
    handle, pool_output = pool_step(handle, action)
    order = pool_output[-1]["env_id"]
    rows = _places(order) if len(order) > MOST_COMPARED else None
    # With one row some results are arguments, which XLA then cannot compile to one kernel: it ends
    # the process (JAX 0.10 and 0.12).
    put_in_order = one_kernel(after) if len(order) > 1 else after
    output, ends = put_in_order(ends, rows, pool_output)
    return (handle, ends), output, num_invalid


def _places(order: jax.Array) -> jax.Array:
    """Return the row of each environment, ``[B]``; ``order`` has the environment of each row."""
    return jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=order.dtype))


def _places_by_comparison(order: jax.Array) -> jax.Array:
    """Return the same in ``B * B`` steps, without a scatter, which needs a kernel of its own."""
    return jnp.argmax(order[None] == jnp.arange(len(order), dtype=order.dtype)[:, None], axis=1)


def _check_one_player(config: dict, name: str) -> None:
    if (players := config.get("max_num_players", 1)) > 1:
        raise UsageError(
            f"env={name!r} has max_num_players={players}; it must be 1, or that of a game whose "
            "players take turns, with current_player and legal_action_mask in its infos"
        )


def adapt_pool(pool: Any, name: str, **shows: Any) -> EnvAdapter:
    """Return the adapter of a pool, of one player or many, who see what ``shows`` says of a game.

    Raises:
      UsageError: ``pool`` cannot be adapted.
    """
    if is_game(pool.config, pool.spec):
        return GameAdapter(pool, name, **shows)
    adapter = EnvpoolAdapter(pool, name=name)
    many = CooperativeAdapter(adapter, name) if is_cooperative(name) else None
    return many or adapter  # type: ignore[return-value]


def pool_spec(pool: Any, config: dict, name: str) -> Any:
    """Return the spec of one environment of a pool (or of an envpool spec)."""
    if is_game(config, pool.spec):
        return game_spec(pool.spec, name)
    space = canonical_observation_space(pool.observation_space)
    stack = config.get("stack_num", 0)
    # Only a stack of single-channel images has one frame in each row of axis 0.
    is_stack = stack > 0 and len(space.shape or ()) == 3 and space.shape[0] == stack  # type: ignore[index]
    return EnvSpec(
        observation_space=space,
        action_space=canonical_action_space(_of_choices(pool.action_space)),
        frame_stack=stack if is_stack else 0,
        frame_skip=config.get("frame_skip", 1) if "stack_num" in config else 1,
        name=name,
        channels_first=True if stack > 0 and len(space.shape or ()) == 3 else None,
    )


def _of_choices(space: gymnasium.Space) -> gymnasium.Space:
    """Return the MultiDiscrete that envpool describes as a Box of integers."""
    if not isinstance(space, gymnasium.spaces.Box) or space.dtype.kind not in "iu":
        return space
    low, high = space.low.astype(np.int64), space.high.astype(np.int64)
    return gymnasium.spaces.MultiDiscrete(high - low + 1, start=low)


def envpool_id(env: str) -> str | None:
    """Return envpool's name of an id (``Pong-v5`` of ``ALE/Pong-v5``), or None if unknown."""
    envpool = import_envpool()

    known = envpool.list_all_envs()
    short = env.removeprefix("ALE/")
    return next((one for one in (env, short) if one in known), None)


def draws(env_id: str) -> bool:
    """Tell whether envpool draws what it knows as ``env_id``, safely and without a display."""
    return not _family(env_id).startswith(_NOT_DRAWN)


def _family(env_id: str) -> str:
    """Return the package that has an id of envpool's, such as ``envpool.mujoco.gym``."""
    import_envpool()
    from envpool.registration import registry

    return registry.specs[env_id][0]


def check_envpool_options(env_id: str, options: dict[str, Any]) -> None:
    """Raise UsageError for options that envpool does not know, or would abort on."""
    envpool = import_envpool()
    check_family(env_id, _family(env_id))
    with warnings.catch_warnings(action="ignore"):
        try:
            spec = envpool.make_spec(env_id)
        except Exception as error:
            # Families look for files and system libraries here; each raises errors of its own.
            raise UsageError(f"env={env_id!r} cannot be made by envpool: {error}") from error
    defaults = spec.config._asdict()
    if is_game(defaults, spec):
        defaults |= SHOWN
    else:
        _check_one_player(defaults, env_id)
    for name in options:
        if name in _OURS:
            raise UsageError(f"option {name!r} of {env_id} cannot be given: {_OURS[name]}")
    check_option_names(options, {*defaults, RENDER_MODE} - _OURS.keys(), env_id)
    for name, value in options.items():
        if name == RENDER_MODE:
            _check_draws(env_id, value)
            continue
        _check_option(env_id, name, value, defaults[name])


def _check_draws(env_id: str, render_mode: Any) -> None:
    if render_mode != DRAWN:
        raise UsageError(
            f"option {RENDER_MODE}={shown(render_mode)} of {env_id} must be {DRAWN!r}: envpool "
            "opens no window; use sebulba watch for one"
        )
    if not draws(env_id):
        raise UsageError(
            f"envpool cannot draw {env_id!r}; drop {RENDER_MODE}, or pass backend='gymnasium'"
        )


def _check_option(env_id: str, name: str, value: Any, default: Any) -> None:
    if type(value) is type(default) and value == default:
        return
    # Sizes and counts that are too low abort or hang in native code. So an option whose default is
    # 1 or more must be at least 1, and one whose default is 0 or -1 must be at least that.
    smallest = min(default, 1) if isinstance(default, int) else None
    largest = _LARGEST.get(name)
    if name == "repeat_action_probability":
        smallest, largest = 0, 1
    check_like(name, value, default, env_id, smallest=smallest, largest=largest)


def default_num_threads(env_id: str) -> int:
    """Return the number of envpool threads for each of two Inferencers that share the cores.

    It is 1 for environments so cheap that waking a thread costs more than a step (classic control,
    toy text), and half of the cores for all others.
    """
    return 1 if has_one_thread(env_id) else threads_each(NUM_INFERENCERS, on_cpu=True)


def has_one_thread(env_id: str) -> bool:
    """Tell whether a step is so cheap that waking a thread costs more."""
    return _family(env_id) in _ONE_THREAD_FAMILIES


def threads_each(num_inferencers: int, *, on_cpu: bool) -> int:
    """Return the threads of the envpool of each Inferencer of this process.

    Those that infer on the CPU share the cores out; one alone leaves a core to the update. While an
    accelerator infers, the cores of an Inferencer would idle: all together have two threads a core.
    """
    cores = num_cores()
    if not on_cpu:
        return min(cores, max(1, 2 * cores // num_inferencers))
    return max(1, cores - 1 if num_inferencers == 1 else cores // num_inferencers)


def make_envpool(
    env_id: str,
    num_envs: int,
    seeds: Sequence[int],
    *,
    num_threads: int,
    options: dict[str, Any],
) -> EnvAdapter:
    """Make an envpool whose environment i has ``seeds[i]``; ``options`` have been checked.

    The pool has no more threads than environments.

    Raises:
      UsageError: The seeds break a rule, or the environment is not supported.
    """
    envpool = import_envpool()

    seeds = check_seeds(seeds, num_envs)
    ours = {name: value for name, value in options.items() if name in SHOWN}
    with warnings.catch_warnings(action="ignore"):
        # Spaces warn of lost precision when they are made.
        try:
            pool = envpool.make(
                env_id,
                env_type="gymnasium",
                num_envs=num_envs,
                num_threads=min(num_threads, num_envs),
                seed=list(seeds),
                **{name: value for name, value in options.items() if name not in SHOWN},
            )
        except Exception as error:
            raise UsageError(f"env={env_id!r} cannot be made by envpool: {error}") from error
        return adapt_pool(pool, env_id, **ours)
