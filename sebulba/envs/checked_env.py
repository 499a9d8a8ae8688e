"""A wrapper that checks one user-provided environment against its contract.

This module needs no JAX: worker processes import it.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from sebulba.envs.first_episodes import Offsets
from sebulba.envs.jax_env import is_jax_env
from sebulba.envs.returned import RESET, STEP, flag_of, make_obs_check, number_of, parts_of
from sebulba.envs.saving import saved_env
from sebulba.envs.saving.plain_data import pack, unpack
from sebulba.envs.spaces import (
    canonical_action_space,
    canonical_observation_space,
    make_native_action,
    require_spaces,
)
from sebulba.errors import EnvError, UsageError, text_of


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
        self.given_state = b""
        """What ``saved`` returned, set before ``restored`` is called."""
        self.reset_options: dict | None = None
        """Options of every reset that is given none, such as that after an episode."""
        self._resets_next = False  # it was put back where its vector would reset it next
        self._fault_of_copies: str | None = None  # None until it is known
        env = make_env()
        if is_jax_env(env):
            raise UsageError(
                f"the environment factory returned a {type(env).__name__}, written in JAX; "
                "pass the environment itself, or annotate the function: def f() -> sebulba.JaxEnv"
            )
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
        self._check_obs = make_obs_check(self.observation_space)
        name = type(env.unwrapped).__name__
        self.offsets = Offsets(name, watches=index == 0, is_single=True)
        self._native_action = make_native_action(env.action_space)
        self._is_discrete = isinstance(env.action_space, spaces.Discrete)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        """Reset; raise EnvError unless ``(observation, info)`` comes back."""
        self._has_ended = self._resets_next = False
        result = self._call(self.env.reset, seed=seed, options=options or self.reset_options)
        try:
            obs, _ = parts_of(result, RESET, "reset")
            return self._check_obs(obs, "obs of reset"), {}
        except EnvError as error:
            raise EnvError(f"{self._place()}: {error}") from error

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        """Step; raise EnvError unless five values of the right kind come back."""
        if self._resets_next:
            return self.reset()[0], 0.0, False, False, {}
        self._num_steps += 1
        # Copy the action: the rows of the vector's action may be read-only or aliased.
        native = self._native_action(np.array(action))
        result = self._call(self.env.step, native[()] if self._is_discrete else native)
        try:
            given, reward, terminated, truncated, _ = parts_of(result, STEP, "step")
            terminated = flag_of(terminated, "terminated")
            truncated = flag_of(truncated, "truncated")
            obs, reward = self._check_obs(given, "obs"), number_of(reward, "reward")
        except EnvError as error:
            raise EnvError(f"{self._place()}: {error}") from error
        self.offsets.look(given)
        self._has_ended = terminated or truncated
        return obs, reward, terminated, truncated, {}

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

    def restored(self) -> str | None:
        """Go on from ``given_state``; returns why if that is not possible.

        An environment whose episode had ended is reset at its next step, because its vector
        environment's record of that end was not saved.
        """
        try:
            state, self.given_state = self.given_state, b""
            num_steps, has_ended, saved = unpack(state)
            env = saved_env.restore(saved, self.env)
        except Exception as error:  # a user's code may raise anything here
            return f"environment {self._index} could not be restored: {text_of(error)}"
        self.env = env
        self._num_steps, self._has_ended, self._resets_next = num_steps, False, has_ended
        return None

    def render(self) -> Any:
        return self._call(self.env.render)

    def close(self) -> None:
        if self._before_close is not None:
            self._before_close()
        self.env.close()

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
