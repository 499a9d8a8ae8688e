"""Wrappers around single Gymnasium environments, as the command line names them.

This module needs no JAX: worker processes import it.
"""

from __future__ import annotations

import ast
import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from sebulba.envs.obs_wrapper import ObsWrapper
from sebulba.envs.tree import SPEC
from sebulba.errors import UsageError, shown, text_of
from sebulba.options import SUBTRACT_OFFSET
from sebulba.support.user_code import load_attribute

EXAMPLE = "'gymnasium.wrappers:FrameStackObservation(stack_size=4)'"
FAR = 1e4
"""A number from here on counts as an offset: float32 tells no changes below its 1e-7 part apart."""
FARTHEST = 1e15
"""Larger numbers are placeholders, such as the largest float."""
MOST_OFFSETS = 256
"""Numbers of an observation that may have an offset."""


class SubtractOffset(ObsWrapper):
    """Subtracts constants from an observation, in float64, before anything makes it float32.

    What float32 cannot tell apart, such as times in seconds since 1970, is then observed.
    """

    def __init__(
        self, env: gymnasium.Env, offsets: Mapping[int, float] | Mapping[str, Mapping[int, float]]
    ) -> None:
        """Find the numbers that have an offset.

        Args:
          env: Observes a Box of floats, or a Dict with such parts.
          offsets: What to subtract, by the place of the number in the flattened Box; for a Dict,
            one such mapping by the name of each part.

        Raises:
          UsageError: There is no such number.
        """
        super().__init__(env)
        space = env.observation_space
        self._is_bare = not isinstance(space, spaces.Dict)
        parts: Any = {"": space} if self._is_bare else dict(space.spaces)  # type: ignore[attr-defined]
        by_part: Any = {"": offsets} if self._is_bare else offsets
        self._offsets: dict[str, np.ndarray] = {}
        for name, of_part in by_part.items():
            try:
                box, offset = parts[name], np.zeros(parts[name].shape)
                offset.flat[list(of_part)] = list(of_part.values())
                low, high = box.low - offset, box.high - offset
                parts[name] = spaces.Box(low, high, dtype=np.float64)
            except (KeyError, AttributeError, IndexError, TypeError, ValueError) as error:
                raise UsageError(
                    f"offsets={shown(offsets)} do not fit the observation {space}; give a number "
                    "by its place in a Box of floats, such as {0: 1.7e9}, and for a Dict by part"
                ) from error
            self._offsets[name] = offset
        self.observation_space = parts[""] if self._is_bare else spaces.Dict(parts)

    def changed(self, obs: Any, info: Any, method: str, *, at_end: bool) -> Any:
        if self._is_bare:
            return self._without("", obs)
        if not isinstance(obs, Mapping):
            return obs  # CheckedEnv says what is wrong
        return {name: self._without(name, part) for name, part in obs.items()}

    def _without(self, name: str, part: Any) -> Any:
        offset = self._offsets.get(name)
        if offset is None or np.shape(part) != offset.shape:
            return part
        return np.asarray(part, np.float64) - offset


def find_offsets(env: gymnasium.Env, seed: int) -> str | None:
    """Return the wrapper that subtracts what is far from 0 in the first observation of ``env``.

    Args:
      env: A single environment, as it was made or with wrappers around it; it is reset.
      seed: Of that reset.

    Returns:
      The wrapper as ``load_wrapper`` takes it; None where no number of 64 bits is that far from 0,
      or nobody can say.
    """
    while type(env).__module__.startswith(__package__ or "") and isinstance(env, ObsWrapper):
        if isinstance(env, SubtractOffset):
            break
        env = env.env  # the wrappers of users are inside these
    space = getattr(env, "observation_space", None)
    parts: Any = space.spaces if isinstance(space, spaces.Dict) else {"": space}
    wide = [name for name, part in parts.items() if getattr(part, "dtype", None) == np.float64]
    if not wide:
        return None
    try:
        obs, _ = env.reset(seed=seed)
        seen = {name: np.asarray(obs[name] if name else obs, np.float64).ravel() for name in wide}
    except Exception:  # of the user's code: the run says it at its own first reset
        return None
    found: dict[str, dict[int, float]] = {}
    for name, values in seen.items():
        for place in np.flatnonzero((np.abs(values) >= FAR) & (np.abs(values) < FARTHEST)):
            found.setdefault(name, {})[int(place)] = float(values[place])
    if not found or sum(map(len, found.values())) > MOST_OFFSETS:
        return None
    return f"{SUBTRACT_OFFSET}(offsets={found.get('', found)!r})"


def wrapped(
    make_env: Callable[[], Any], wrappers: Sequence[Callable[[gymnasium.Env], Any]], name: str
) -> Any:
    """Make an environment and put wrappers around it, the first innermost.

    Args:
      make_env: Makes the environment.
      wrappers: What ``load_wrapper`` returned.
      name: Of the environment, for messages.

    Raises:
      UsageError: It has many agents, or a wrapper raises or returns no environment.
    """
    env = make_env()
    if not isinstance(env, gymnasium.Env):
        return env  # CheckedEnv says what is wrong
    if SPEC in (env.metadata or {}):
        env.close()
        raise UsageError(
            f"wrappers are for one agent, and {name!r} has many; wrap it in a function of your own "
            "that returns it, and name that as env"
        )
    for wrapper in wrappers:
        who = f"wrapper {_name(wrapper)} around {name!r}"
        try:
            outer = wrapper(env)
        except Exception as error:  # a user's code may raise anything here
            env.close()
            raise UsageError(
                f"{who} cannot be made: {text_of(error)}; give its arguments, as in {EXAMPLE}, or "
                "leave it out"
            ) from error
        if not isinstance(outer, gymnasium.Env):
            env.close()
            raise UsageError(f"{who} returned {shown(outer)}; it must return a gymnasium.Env")
        env = outer
    return env


def warn_of_statistics(env: gymnasium.Env, name: str) -> None:
    """Warn of running statistics in wrappers, which no policy and no checkpoint has."""
    while isinstance(env, gymnasium.Wrapper):
        # Of a class such as Gymnasium's ``RunningMeanStd``.
        parts = "mean", "var", "count", "update"
        held = [k for k, one in vars(env).items() if all(hasattr(one, part) for part in parts)]
        if held:
            warnings.warn(
                f"{type(env).__name__} around {name!r} keeps running statistics ({held[0]}), each "
                "environment its own, and the policy does not have them: it plays worse than it "
                "was trained; leave the wrapper out and use --agent.normalize-observations, or of "
                "rewards --agent.normalize-rewards",
                stacklevel=3,
            )
        env = env.env


def load_wrapper(wrapper: Any) -> Callable[[gymnasium.Env], Any]:
    """Return the function of an environment that a wrapper is.

    Args:
      wrapper: ``"module:attribute"``, ``"module:attribute(name=value)"`` with values as Python
        writes them, or a class or function of one environment.

    Raises:
      UsageError: It is none of these, or lacks arguments or has others.
    """
    if not isinstance(wrapper, str):
        if not callable(wrapper):
            raise UsageError(
                f"wrapper {shown(wrapper)} must be 'module:attribute' or a function of an "
                f"environment; use for example {EXAMPLE}"
            )
        return wrapper
    path, bracket, _ = wrapper.partition("(")
    arguments = _arguments(wrapper) if bracket else {}
    found = load_attribute("wrapper", path)
    if not callable(found):
        raise UsageError(f"wrapper {wrapper!r} is {shown(found)}; name a class or a function")
    if isinstance(found, type) and issubclass(found, gymnasium.vector.VectorWrapper):
        raise UsageError(
            f"wrapper {wrapper!r} is for vector environments; name one for single environments"
        )
    try:
        inspect.signature(found).bind(None, **arguments)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"wrapper {wrapper!r}: {error}; it takes {_parameters(found)}, written as in {EXAMPLE}"
        ) from error
    return functools.partial(found, **arguments) if arguments else found


def _arguments(wrapper: str) -> dict[str, Any]:
    """Return the arguments in ``module:attribute(name=value, ...)``."""
    rule = f"wrapper {wrapper!r} must be written as {EXAMPLE}, in quotes for the shell"
    try:
        call = ast.parse(wrapper.partition(":")[2].strip(), mode="eval").body
        if isinstance(call, ast.Call) and not call.args and all(one.arg for one in call.keywords):
            return {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError) as error:
        raise UsageError(rule) from error
    raise UsageError(rule)


def _parameters(wrapper: Any) -> str:
    """Return the names of what a wrapper takes beside the environment."""
    try:
        _, *names = inspect.signature(wrapper).parameters
    except (TypeError, ValueError):
        return "an environment first"
    return ", ".join(names) or "nothing but an environment"


def _name(wrapper: Any) -> str:
    inner = wrapper.func if isinstance(wrapper, functools.partial) else wrapper
    return getattr(inner, "__qualname__", None) or shown(inner)
