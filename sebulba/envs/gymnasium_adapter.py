"""Gymnasium environments and vector environments behind the EnvAdapter protocol."""

from __future__ import annotations

import contextlib
import multiprocessing
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from sebulba.envs.device_arrays import DeviceArrays, are_on_device
from sebulba.envs.first_episodes import Offsets, VectorPromises
from sebulba.envs.observation_parts import LegalActions, spec_of
from sebulba.envs.returned import RESET, STEP, make_obs_check, own_array, parts_of
from sebulba.envs.saving import saved_env
from sebulba.envs.saving.sealed import seal, unseal
from sebulba.envs.seeds import check_seeds
from sebulba.envs.spaces import make_action_check, make_native_action
from sebulba.envs.vectorize import end_workers, guilty_workers, has_died, holds_checked_envs
from sebulba.errors import EnvError, UsageError, shown, text_of
from sebulba.types import EnvOutput, EnvSpec, FinalObs, FusedEnv, PyTree, empty_env_step

BOOL, FLOAT = np.dtype(np.bool_), np.dtype(np.float32)
STEP_TIMEOUT_S = 60.0
"""Seconds after which a worker process that has not finished a step counts as hung."""

ONE_DRAWS = (
    "render_mode='human' draws a single environment, in the main thread; use num_envs=1 and "
    "num_inferencers_per_device=0 on one device, or train without it and watch the policy in a "
    "loop of your own with sebulba.load_policy, as in docs/policies.md"
)
"""Libraries that draw end the process where several threads use them."""


class GymnasiumAdapter:
    """A Gymnasium vector environment in any of the three autoreset modes.

    With NEXT_STEP, rows pass through unchanged. With SAME_STEP and DISABLED, the row of the step
    that ended an episode has its reward and flags, but the next episode's first observation
    (``is_first``), and no row is inserted. The last observation is in ``EnvOutput.final``: that of
    ``info["final_obs"]``, or the one before the adapter's own reset. Arrays of another device than
    the CPU stay there (``DeviceArrays``).
    """

    def __init__(
        self,
        vector_env: VectorEnv,
        seeds: Sequence[int],
        *,
        name: str = "",
        step_timeout_s: float = STEP_TIMEOUT_S,
    ) -> None:
        """Take over ``vector_env``, which ``close`` closes.

        Args:
          vector_env: Any Gymnasium vector environment that states its autoreset mode.
          seeds: ``[B]`` non-negative int32, given to the first ``reset``.
          name: Name for messages.
          step_timeout_s: Longest time that worker processes may take for a step or reset.

        Raises:
          UsageError: The spaces or the autoreset mode are not supported, or several environments
            would draw.
        """
        self._vector_env = vector_env
        self._is_closed = False
        self._has_failed = False
        self._num_steps = 0
        self.num_envs = vector_env.num_envs
        self._rows = (self.num_envs,)
        self._seeds: list[int] | None = _check_gymnasium_seeds(seeds, self.num_envs)
        self._step_timeout_s = step_timeout_s
        self._mode = _autoreset_mode(vector_env)
        self.draws = vector_env.render_mode == "human"
        """It shows itself in a window at every step."""
        if self.draws and self.num_envs > 1:
            raise UsageError(f"num_envs={self.num_envs} of env={name!r}: {ONE_DRAWS}")
        self.spec = vector_env_spec(vector_env, name)
        self._no_final: FinalObs | tuple[()] = ()
        if self.spec.final_obs:
            self._no_final = FinalObs.none(empty_env_step(self.spec, self.num_envs).obs)
        self._check_action = make_action_check(self.spec.action_space, self.num_envs)
        self._native_action = make_native_action(vector_env.single_action_space)
        self._ends = np.zeros(self.num_envs, np.bool_)
        self._on_device: DeviceArrays | None = None
        self._own = make_obs_check(self.spec.observation_space, self.num_envs)
        self._fault_of_copies: str | None = None
        self._legal = LegalActions()
        is_ready_made = not holds_checked_envs(vector_env)
        self._promises = VectorPromises(name, watches=is_ready_made)
        # Single environments look for themselves.
        self.offsets = Offsets(name, watches=is_ready_made)

    def reset(self) -> EnvOutput:
        """Begin new episodes in all environments, the first time with the seeds."""
        self._check_open()
        seed: Any = self._seeds
        if seed is not None and not isinstance(
            self._vector_env.unwrapped, SyncVectorEnv | AsyncVectorEnv
        ):
            # The base class promises only that it takes one integer.
            seed = seed[0]
        obs = self._obs_of_reset(self._ask("reset", seed=seed))
        self._seeds = None
        if self._on_device is None and are_on_device(obs):
            self._on_device = DeviceArrays(self.spec, self.num_envs, self._mode, obs)
        if self._on_device is not None:
            return self._on_device.first(obs)
        self._ends = np.zeros(self.num_envs, np.bool_)
        first = EnvOutput.first(self._own(obs, "obs"), self.num_envs, self._no_final)
        self._legal.look(self.spec, first.obs)
        return first

    def step(self, action: np.ndarray) -> EnvOutput:
        """Act in all environments.

        Raises:
          ActionError: An action is invalid; no environment has received it.
          EnvError: A worker died or hung, or the environment broke its contract.
        """
        self._check_open()
        if self._on_device is None:
            self._check_action(action)
            self._legal.check(self.spec, action)
            action = self._native_action(action)
        else:
            action = self._on_device.action(action)
        result = self._ask("step", action)
        self._num_steps += 1
        where = f"vector environment {self.spec.name!r}, step {self._num_steps}: step"
        given_obs, reward, terminated, truncated, info = parts_of(result, STEP, where)
        if self._on_device is not None:
            return self._on_device.step(*result)
        obs = self._own(given_obs, "obs")
        if self.offsets.is_looking:
            parts = given_obs if isinstance(given_obs, dict) else {"": given_obs}
            self.offsets.look({name: np.asarray(leaf)[0] for name, leaf in parts.items()})
        reward = self._own_reward(reward)
        terminated, truncated = (
            own_array(flag, "terminated and truncated", self._rows, BOOL)
            for flag in (terminated, truncated)
        )
        ends = terminated | truncated
        is_first, final = ends, self._no_final
        if self._mode is AutoresetMode.NEXT_STEP:
            is_first, self._ends = self._ends, ends
            self._promises.step(is_first, ends, reward)
        elif ends.any():
            if self._mode is AutoresetMode.DISABLED:
                final = FinalObs(jax.tree.map(np.copy, obs), ends)
                obs = self._reset_some(ends, obs)
            else:
                final = self._final_of(info, ends, given_obs)
        self._legal.look(self.spec, obs, ends & ~is_first)
        return EnvOutput(obs, reward, terminated, truncated, is_first, reward, ends, final)

    def use_reset_options(self, options: dict) -> None:
        """Give ``options`` to every reset of single environments from now on."""
        self._check_open()
        with self._worker_errors():
            self._vector_env.set_attr("reset_options", [options] * self.num_envs)  # type: ignore[attr-defined]

    def fused(self) -> FusedEnv | str:
        return "a Gymnasium environment is Python code, not JAX functions"

    def pictures(self) -> np.ndarray:
        """Return what the environments look like now, ``[B, height, width, 3]`` uint8.

        Raises:
          EnvError: They draw nothing, or no such pictures; a worker died or hung.
          Exception: Whatever an environment raises that cannot draw.
        """
        self._check_open()
        is_async = isinstance(self._vector_env, AsyncVectorEnv)
        frames = self._ask("call", "render") if is_async else self._vector_env.render()
        return checked_pictures(frames, self.num_envs, self._who())

    @property
    def pictures_per_second(self) -> float | None:
        """How many of its steps are a second, where the environment says so."""
        return (self._vector_env.metadata or {}).get("render_fps")

    def state(self) -> bytes | str:
        """Return the state from which to go on, or the reason why there is none.

        Single environments that ``make_vector_env`` vectorised are saved one by one
        (``saved_env.save``), a ready-made vector environment as a whole. The first call tests
        whether copies work (``saved_env.fault_of_copies``).
        """
        self._check_open()
        saved = self._saved_envs()
        if isinstance(saved, str):
            return saved
        content = (self._ends, self._num_steps, self._seeds, saved)
        return seal(content, of=self._who(), num_envs=self.num_envs)

    def put_back(self, state: bytes) -> None:
        """Begin new episodes, then go on from ``state``.

        Whether actions are legal is not checked in the next step. Unpickling can run any code:
        pass only what a run of your own has saved.

        Raises:
          EnvError: ``state`` does not fit, or a worker died or hung; ``reset`` is still possible.
        """
        self._check_open()
        ends, num_steps, seeds, saved = unseal(state, of=self._who(), num_envs=self.num_envs)
        # Reset first, so that nothing of the earlier state is left, not even in worker processes.
        seeds_of_now = self._seeds
        self.reset()
        self._seeds = seeds_of_now
        if isinstance(saved, list):
            env: Any = self._vector_env
            with self._worker_errors():
                env.set_attr("given_state", saved)
            if problem := next(filter(None, self._ask("call", "restored")), None):
                raise EnvError(problem)
        else:
            self._put_back_whole(saved)
        self._ends, self._num_steps, self._seeds = ends, num_steps, seeds
        self._legal.forget()

    def close(self) -> None:
        """Close the vector environment; kill worker processes that hang or have failed."""
        if self._is_closed:
            return
        self._is_closed = True
        env = self._vector_env
        with warnings.catch_warnings(action="ignore"):
            if isinstance(env, AsyncVectorEnv) and self._has_failed:
                end_workers(env)
            else:
                env.close()

    def _who(self) -> str:
        return f"environment {self.spec.name!r}"

    def _saved_envs(self) -> list[bytes] | bytes | str:
        """Return a state per single environment, one for the whole vector, or a reason for none."""
        env = self._vector_env
        if self._on_device is not None:
            return f"{self._who()} has its arrays on a device"
        if holds_checked_envs(env):
            states = self._ask("call", "saved")
            return next((state for state in states if isinstance(state, str)), list(states))
        if isinstance(env.unwrapped, AsyncVectorEnv):
            return (
                f"{self._who()} is an AsyncVectorEnv, which keeps its environments in worker "
                "processes; hand over a single environment and vectorization='async'"
            )
        saved = saved_env.save(env)
        if isinstance(saved, bytes) and self._fault_of_copies is None:
            self._fault_of_copies = saved_env.fault_of_copies(saved) or ""
        reason = saved if isinstance(saved, str) else self._fault_of_copies
        return f"{self._who()}: {reason}" if reason else saved

    def _put_back_whole(self, saved: bytes) -> None:
        try:
            self._vector_env = saved_env.restore(saved, self._vector_env)
        except Exception as error:  # a user's code may raise anything here
            raise EnvError(f"{self._who()} could not be restored: {text_of(error)}") from error

    def _ask(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """Call a method of the vector environment; of one with workers, within the time limit."""
        env = self._vector_env
        with self._worker_errors():
            if not isinstance(env, AsyncVectorEnv):
                return getattr(env, method)(*arguments, **keywords)
            getattr(env, f"{method}_async")(*arguments, **keywords)
            return getattr(env, f"{method}_wait")(self._step_timeout_s)

    def _obs_of_reset(self, result: Any) -> Any:
        return parts_of(result, RESET, f"vector environment {self.spec.name!r}: reset")[0]

    def _reset_some(self, ends: np.ndarray, obs: PyTree) -> PyTree:
        """Return ``obs`` with rows ``ends`` replaced by the next episodes' first observations."""
        result = self._ask("reset", options={"reset_mask": ends.copy()})
        first = self._own(self._obs_of_reset(result), "obs")
        self._promises.partial_reset(ends, obs, first)
        if not isinstance(obs, dict):
            obs[ends] = first[ends]
        else:
            for key, leaf in obs.items():
                leaf[ends] = first[key][ends]
        return obs

    def _final_of(self, info: Any, ends: np.ndarray, given_obs: Any) -> FinalObs:
        """Return the last observations that ``info["final_obs"]`` has for the episodes in ``ends``.

        It has one for each environment (None where no episode ended), as Gymnasium says, or all in
        one batch, as environments on accelerators do.
        """
        assert isinstance(self._no_final, FinalObs)
        found = info.get("final_obs") if isinstance(info, dict) else None
        if found is None:
            return self._no_final
        self._promises.final_obs(given_obs, found)
        given = ends & np.asarray(info.get("_final_obs", ends), np.bool_)
        if isinstance(found, list | tuple) or getattr(found, "dtype", None) == np.dtype(object):
            given &= np.array([obs is not None for obs in found])
            nothing = jax.tree.map(lambda x: x[0], self._no_final.obs)
            rows = [
                obs if is_given else nothing for obs, is_given in zip(found, given, strict=True)
            ]
            found = _stacked(rows)
        return FinalObs(self._own(found, "info['final_obs']"), given)

    def _own_reward(self, reward: Any) -> np.ndarray:
        reward = own_array(reward, "reward", self._rows, FLOAT)
        if not np.isfinite(reward).all():
            index = int(np.argmin(np.isfinite(reward)))
            raise EnvError(
                f"environment {index}: reward must be a finite float32 number; got {reward[index]}"
            )
        return reward

    def _check_open(self) -> None:
        if self._is_closed:
            raise EnvError(f"environment {self.spec.name!r} is closed; make a new one")

    @contextlib.contextmanager
    def _worker_errors(self) -> Iterator[None]:
        """Raise EnvError in place of the errors by which a dead or hung worker process shows."""
        self._has_failed = True  # stays so unless the block ends without an error
        try:
            yield
            self._has_failed = False
        except multiprocessing.TimeoutError as error:
            workers = guilty_workers(self._vector_env, lambda pipe, process: not pipe.poll())
            raise EnvError(
                f"environment {workers} did not answer within {self._step_timeout_s:g} s; repair "
                "it, or pass a larger step_timeout_s"
            ) from error
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            if not isinstance(self._vector_env.unwrapped, AsyncVectorEnv):
                raise
            workers = guilty_workers(self._vector_env.unwrapped, has_died)
            # Drop the traceback: its frames hold a buffer of what was to be sent, and often become
            # part of a reference cycle, in which Python 3.12.1 crashes when it collects the buffer.
            cause = error.with_traceback(None)
            raise EnvError(f"the worker process of environment {workers} died") from cause


def checked_pictures(frames: Any, num_envs: int, who: str) -> np.ndarray:
    """Return what environments drew as one array; raise EnvError if it is anything else."""
    if frames is None or any(frame is None for frame in frames):
        raise EnvError(
            f"{who} cannot be filmed; it needs a parameter render_mode, here 'rgb_array', and a "
            "method render() that returns an array [height, width, 3] of uint8"
        )
    arrays = [np.asarray(frame) for frame in frames]
    shape = arrays[0].shape if arrays else ()
    for array in arrays:
        is_picture = array.ndim == 3 and array.shape[2] == 3 and array.dtype == np.uint8
        if not is_picture or array.shape != shape or len(arrays) != num_envs:
            raise EnvError(
                f"{who}: render must return an array [height, width, 3] of uint8, of one size for "
                f"all {num_envs} environments; got {len(arrays)} of shape {array.shape} and dtype "
                f"{array.dtype}"
            )
    return np.stack(arrays)


def vector_env_spec(vector_env: VectorEnv, name: str) -> EnvSpec:
    """Return the spec of one environment of ``vector_env``."""
    final_obs = _autoreset_mode(vector_env) is not AutoresetMode.NEXT_STEP
    return spec_of(vector_env, name, "single_", final_obs=final_obs)


def _autoreset_mode(vector_env: VectorEnv) -> AutoresetMode:
    mode = (vector_env.metadata or {}).get("autoreset_mode")
    try:
        return mode if isinstance(mode, AutoresetMode) else AutoresetMode(mode)
    except ValueError as error:
        modes = ", ".join(str(m) for m in AutoresetMode)
        raise UsageError(
            f"metadata['autoreset_mode']={shown(mode)} of {vector_env} must be one of {modes}; "
            "set the mode of the vector environment"
        ) from error


def _check_gymnasium_seeds(seeds: Sequence[int], num_envs: int) -> list[int]:
    checked = check_seeds(seeds, num_envs)
    for i, seed in enumerate(checked):
        if seed < 0:
            raise UsageError(
                f"seeds[{i}]={seed} must not be negative for Gymnasium; use seed_block"
            )
    return checked


def _stacked(rows: list[PyTree]) -> PyTree:
    try:
        return jax.tree.map(lambda *x: np.stack(x), *rows)
    except ValueError as error:
        raise EnvError(
            f"info['final_obs'] must have observations as reset returns them; {text_of(error)}"
        ) from error
