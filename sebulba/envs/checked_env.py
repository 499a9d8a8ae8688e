"""A wrapper that checks one user-provided environment against its contract.

This module needs no JAX: worker processes import it.
"""

from __future__ import annotations

import math
import pickle
import traceback
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from sebulba.envs.first_episodes import Offsets
from sebulba.envs.saving import saved_env
from sebulba.envs.saving.plain_data import pack, unpack
from sebulba.envs.spaces import (
    canonical_action_space,
    canonical_observation_space,
    make_native_action,
    require_spaces,
)
from sebulba.errors import EnvError, UsageError, shown, text_of

LARGEST_REWARD = float(np.finfo(np.float32).max)


class CheckedEnv(gymnasium.Env):
    """One environment with canonical spaces and dtypes, whose every output is checked.

    Infos are dropped: no code of ours reads them, and vector environments fail on infos whose keys
    vary.
    """

    def __init__(
        self,
        make_env: Callable[[], gymnasium.Env],
        index: int,
        *,
        in_worker: bool = False,
        before_close: Callable[[], None] | None = None,
    ) -> None:
        """Make the environment.

        Args:
          make_env: Makes the environment.
          index: Index in the vector, for messages.
          in_worker: Errors will be pickled on their way to the main process.
          before_close: Called before the environment is closed.
        """
        self._before_close = before_close
        self._index = index
        self._in_worker = in_worker
        self._num_steps = 0
        self._has_ended = False
        self._resets_next = False  # it was put back where its vector would reset it next
        self._fault_of_copies: str | None = None  # None until it is known
        env = make_env()
        if not isinstance(env, gymnasium.Env):
            raise UsageError(
                f"the environment factory returned a {type(env).__name__}; it must return a "
                "gymnasium.Env, or take the parameters num_envs and seeds and return a "
                "gymnasium.vector.VectorEnv"
            )
        require_spaces(env, type(env).__name__)
        self.env = env
        self.metadata = env.metadata or {}
        self.render_mode = env.render_mode
        self.observation_space = canonical_observation_space(env.observation_space)
        self.action_space = canonical_action_space(env.action_space)
        self._check_obs = _make_obs_check(self.observation_space)
        name = type(env.unwrapped).__name__
        self.offsets = Offsets(name, watches=index == 0, is_single=True)
        self._native_action = make_native_action(env.action_space)
        self._is_discrete = isinstance(env.action_space, spaces.Discrete)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        """Reset; raise EnvError unless ``(observation, info)`` comes back."""
        self._has_ended = self._resets_next = False
        result = self._call(self.env.reset, seed=seed, options=options)
        if not isinstance(result, tuple) or len(result) != 2:
            raise self._broken("reset", "a tuple (obs, info)", describe_result(result))
        return self._checked_obs(result[0], "obs of reset"), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        """Step; raise EnvError unless five values of the right kind come back."""
        if self._resets_next:
            return self.reset()[0], 0.0, False, False, {}
        self._num_steps += 1
        # Copy the action: the rows of the vector's action may be read-only or aliased.
        native = self._native_action(np.array(action))
        result = self._call(self.env.step, native[()] if self._is_discrete else native)
        if not isinstance(result, tuple) or len(result) != 5:
            raise self._broken(
                "step",
                "a tuple of 5 (obs, reward, terminated, truncated, info)",
                describe_result(result),
            )
        obs, reward, terminated, truncated, _ = result
        for name, flag in (("terminated", terminated), ("truncated", truncated)):
            if not (flag is False or flag is True or _is_flag(flag)):
                raise self._broken(name, "a bool", f"{shown(flag)} ({type(flag).__name__})")
        given, obs = obs, self._checked_obs(obs, "obs")
        self.offsets.look(given)
        self._has_ended = bool(terminated or truncated)
        return obs, self._checked_reward(reward), bool(terminated), bool(truncated), {}

    def saved(self) -> bytes | str:
        """Return the state of the environment, or the reason why there is none; never raises."""
        env = saved_env.save(self.env)
        if isinstance(env, bytes) and self._fault_of_copies is None:
            # All environments of a vector are made alike, so testing the first is enough.
            fault = saved_env.fault_of_copies(env) if self._index == 0 else None
            self._fault_of_copies = fault or ""
        reason = env if isinstance(env, str) else self._fault_of_copies
        if reason:
            return f"environment {self._index}: {reason}"
        return pack((self._num_steps, self._has_ended or self._resets_next, env))

    def restored(self, state: bytes) -> str | None:
        """Go on from ``state``, which ``saved`` returned; returns why if that is not possible.

        An environment whose episode had ended is reset at its next step, because its vector
        environment's record of that end was not saved.
        """
        try:
            # An older version of Sebulba pickled it.
            read = pickle.loads if state.startswith(pickle.PROTO) else unpack
            num_steps, has_ended, saved = read(state)
            env = saved_env.restore(saved, self.env)
        except Exception as error:  # a user's code may raise anything here
            return f"environment {self._index} could not be restored: {text_of(error)}"
        self.env = env
        self._num_steps, self._has_ended, self._resets_next = num_steps, False, has_ended
        return None

    def render(self) -> Any:
        """Return what the environment draws."""
        return self._call(self.env.render)

    def close(self) -> None:
        """Close the environment."""
        if self._before_close is not None:
            self._before_close()
        self.env.close()

    def _checked_obs(self, obs: Any, name: str) -> Any:
        checked, problem = self._check_obs(obs, name)
        if problem is not None:
            raise self._broken(*problem)
        return checked

    def _checked_reward(self, reward: Any) -> float:
        try:
            is_number = isinstance(reward, float) or (
                np.ndim(reward) == 0 and not isinstance(reward, str | bytes)
            )
            value = float(reward) if is_number else math.nan
        except Exception:  # a user's object may raise anything when converted
            value = math.nan
        if not abs(value) <= LARGEST_REWARD:
            raise self._broken("reward", "a finite number", _describe_number(reward))
        return value

    def _broken(self, name: str, expected: str, got: str) -> EnvError:
        return EnvError(f"{self._place()}: {name} must be {expected}; got {got}")

    def _place(self) -> str:
        return f"environment {self._index}, step {self._num_steps}"

    def _call(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Call ``function``; add a note that says where to what it raises."""
        try:
            return function(*args, **kwargs)
        except Exception as error:
            trace = "".join(traceback.format_exception(error)).rstrip()
            error.add_note(f"raised by {self._place()}")
            if not self._in_worker:
                raise
            # A traceback cannot be sent between processes, but its text can.
            error.add_note(f"in a worker process:\n{trace}")
            raise (error if _survives_pickle(error) else _stand_in(error)) from None


def _stand_in(error: Exception) -> EnvError:
    stand_in = EnvError(text_of(error))
    for note in error.__notes__:
        stand_in.add_note(note)
    return stand_in


def _survives_pickle(error: Exception) -> bool:
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)
    except Exception:
        # A user's exception that fails in any way when it is copied cannot be sent.
        return False


def _describe_number(value: Any) -> str:
    """Return what a value is that should be a number."""
    if isinstance(value, str | bytes):
        return f"the text {shown(value)}"
    shape = getattr(value, "shape", ())
    return f"{shown(value)}, an array of shape {shape}" if shape else shown(value)


def _is_flag(flag: Any) -> bool:
    """Tell whether it is NumPy's bool, or an array of NumPy or JAX that is one."""
    return np.ndim(flag) == 0 and getattr(flag, "dtype", None) == np.bool_


def describe_result(result: Any) -> str:
    """Return what a method returned that should return a tuple."""
    return (
        f"a tuple of {len(result)}" if isinstance(result, tuple) else f"a {type(result).__name__}"
    )


Problem = tuple[str, str, str]
"""Name of the value, what it must be, what it is."""
ObsCheck = Callable[[Any, str], tuple[Any, Problem | None]]


def _make_obs_check(space: gymnasium.Space) -> ObsCheck:
    """Return ``check(obs, name) -> (canonical obs, problem or None)``."""
    if not isinstance(space, spaces.Dict):
        return make_leaf_check(space)
    checks = {name: make_leaf_check(space[name]) for name in space.spaces}

    def check(obs: Any, name: str) -> tuple[Any, Problem | None]:
        if not isinstance(obs, dict) or obs.keys() != checks.keys():
            got = f"keys {shown(list(obs))}" if isinstance(obs, dict) else f"a {type(obs)}"
            return None, (name, f"a dict with keys {list(checks)}", got)
        checked = {}
        for key, check_leaf in checks.items():
            checked[key], problem = check_leaf(obs[key], f"{name}[{key!r}]")
            if problem is not None:
                return None, problem
        return checked, None

    return check


def make_leaf_check(space: gymnasium.Space) -> ObsCheck:
    shape, dtype = space.shape or (), np.dtype(space.dtype)
    low, high = _value_range(space)

    def check(obs: Any, name: str) -> tuple[Any, Problem | None]:
        try:
            # A copy: environments that share a buffer would overwrite each other's observation
            # before the vector environment has gathered them.
            array = np.array(obs)
        except Exception as error:  # a user's object may raise anything when converted
            expected = f"an array of shape {shape} and dtype {dtype}"
            return None, (name, expected, f"{shown(obs)} ({text_of(error)})")
        if array.shape != shape or not (
            array.dtype == dtype or np.can_cast(array.dtype, dtype, "same_kind")
        ):
            expected = f"an array of shape {shape} and dtype {dtype}"
            return None, (name, expected, f"shape {array.shape} and dtype {array.dtype}")
        if array.dtype != dtype:
            with np.errstate(over="ignore"):  # too large a number becomes infinite: found below
                array = array.astype(dtype)
        if dtype.kind == "f":
            # The sum of squares is cheaper to test, but it may overflow although all is finite.
            if not math.isfinite(np.vdot(array, array)) and not np.isfinite(array).all():
                value = array[~np.isfinite(array)][0]
                return None, (name, "finite numbers", f"{value}")
        elif low is not None and ((array < low) | (array > high)).any():
            return None, (name, f"inside {space}", f"{array}")
        return array, None

    return check


def _value_range(space: gymnasium.Space) -> tuple[Any, Any]:
    """Return the smallest and the largest value, or (None, None) for a Box of floats or bytes."""
    match space:
        case spaces.Discrete():
            return space.start, space.start + space.n - 1
        case spaces.MultiDiscrete():
            return space.start, space.start + space.nvec - 1
        case spaces.MultiBinary():
            return 0, 1
    assert isinstance(space, spaces.Box)
    if space.dtype.kind in "iu" and space.dtype.itemsize > 1:
        return space.low, space.high
    return None, None
