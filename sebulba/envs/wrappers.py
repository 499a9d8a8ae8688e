"""Wrappers around single Gymnasium environments, as the command line names them.

This module needs no JAX: worker processes import it.
"""

from __future__ import annotations

import ast
import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium

from sebulba.envs.tree import SPEC
from sebulba.errors import UsageError, shown, text_of
from sebulba.support.user_code import load_attribute

EXAMPLE = "'gymnasium.wrappers:FrameStackObservation(stack_size=4)'"


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
                f"{who} cannot be made: {text_of(error)}; give it what it needs, as in {EXAMPLE}, "
                "or leave it out"
            ) from error
        if not isinstance(outer, gymnasium.Env):
            env.close()
            raise UsageError(f"{who} returned {shown(outer)}; it must return a gymnasium.Env")
        env = outer
    return env


def warn_of_statistics(env: gymnasium.Env, name: str) -> None:
    """Warn of running statistics in wrappers, which no policy and no checkpoint has."""
    while isinstance(env, gymnasium.Wrapper):
        held = [key for key, value in vars(env).items() if _is_running_statistics(value)]
        if held:
            warnings.warn(
                f"{type(env).__name__} around {name!r} keeps running statistics ({held[0]}), each "
                "environment its own, and the policy does not have them: it plays worse than it "
                "was trained; leave the wrapper out and use --agent.normalize-observations, or of "
                "rewards --agent.normalize-rewards",
                stacklevel=3,
            )
        env = env.env


def _is_running_statistics(value: Any) -> bool:
    """Tell whether a value is of a class such as Gymnasium's ``RunningMeanStd``."""
    return all(hasattr(value, key) for key in ("mean", "var", "count", "update"))


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
