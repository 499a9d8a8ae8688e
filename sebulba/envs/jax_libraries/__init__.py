"""Libraries of JAX environments, whose ids are ``LIBRARY:ID``. One module knows each.

A module here has ``ids()`` and ``make(env_id, options)``, and imports its library only when these
are called. In each, ``truncated`` comes from somewhere else, which the class in it says.
"""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import importlib.util
import warnings
from typing import Any

import gymnasium
import numpy as np

from sebulba.envs.jax_env import JaxEnv, MultiAgentJaxEnv
from sebulba.errors import UsageError, text_of
from sebulba.options import JAX_LIBRARIES
from sebulba.support.checks import nearest

IMPORTED = {"playground": "mujoco_playground"}
"""What is imported of a library whose ids, package and extra have another name."""
NO_LIMIT = np.iinfo(np.int32).max
"""Steps of an episode without a time limit."""


def library_of(env: str) -> str | None:
    """Return the library that ``env`` names before its colon; None if it names none."""
    library, colon, _ = env.partition(":")
    return library if colon and library in JAX_LIBRARIES else None


def make_library_env(env: str, options: dict[str, Any]) -> JaxEnv | MultiAgentJaxEnv:
    """Make the environment ``LIBRARY:ID``.

    Args:
      env: Library and id.
      options: Options of the environment, ``max_episode_steps`` among them.

    Raises:
      UsageError: The library is not installed, or has no such id or option.
    """
    module, env_id = _checked(env)
    with warnings.catch_warnings(action="ignore"):
        try:
            return module.make(env_id, options)
        except UsageError:
            raise
        except Exception as error:  # of the library: files that are not there, bad values, ...
            raise UsageError(f"env={env!r} cannot be made: {text_of(error)}") from error


def box(low: Any, high: Any, shape: tuple[int, ...], dtype: np.dtype) -> gymnasium.spaces.Box:
    """Return a Box whose bounds, arrays of a library or numbers, are spread over ``shape``."""
    low, high = (np.broadcast_to(np.asarray(x), shape).astype(dtype) for x in (low, high))
    return gymnasium.spaces.Box(low, high, dtype=dtype.type)


def space_of(library: str, space: Any, shown: Any = None) -> gymnasium.Space:
    """Return a space of gymnax or jaxmarl as one of Gymnasium's.

    Args:
      library: Its name, for messages.
      space: The space.
      shown: Shapes of an observation of it: some spaces say integers where floats are shown.
    """
    kind = type(space).__name__
    if kind == "Discrete":
        return gymnasium.spaces.Discrete(int(space.n), dtype=np.int32)
    if kind == "MultiDiscrete":
        return gymnasium.spaces.MultiDiscrete(np.asarray(space.num_categories), dtype=np.int32)
    if kind == "Dict":
        parts = {
            name: space_of(library, part, shown[name] if isinstance(shown, dict) else None)
            for name, part in space.spaces.items()
        }
        return gymnasium.spaces.Dict(parts)
    if kind != "Box":
        raise UsageError(f"{library}'s space {kind} is not supported; it must be Discrete or Box")
    shape, dtype = tuple(space.shape), np.dtype(space.dtype)
    if dtype == np.bool_:
        return gymnasium.spaces.MultiBinary(shape)
    if dtype.kind != "f" and np.dtype(getattr(shown, "dtype", dtype)).kind == "f":
        dtype = np.dtype(np.float32)
    return box(space.low, space.high, shape, dtype)


def without_limit(env: Any, attribute: str) -> Any:
    """Return a copy of an environment whose ``attribute``, a time limit, is never reached."""
    env = copy.copy(env)
    setattr(env, attribute, NO_LIMIT)
    return env


def library_versions(env: str) -> dict[str, str]:
    """Return the version of the library that ``env`` names.

    Raises:
      UsageError: The library is not installed, or has no such id.
    """
    _checked(env)
    library = env.partition(":")[0]
    return {library: importlib.metadata.version(library)}


def _checked(env: str) -> tuple[Any, str]:
    """Return the module that knows the library of ``env``, and the id, which it has."""
    library, _, env_id = env.partition(":")
    if importlib.util.find_spec(IMPORTED.get(library, library)) is None:
        raise UsageError(
            f"env={env!r} needs {library}, which is not installed; pip install 'sebulba[{library}]'"
        )
    module = importlib.import_module(f"{__name__}.{library}_env")
    with warnings.catch_warnings(action="ignore"):
        try:
            known = module.ids()
        except Exception as error:  # a library that does not fit this JAX
            version = importlib.metadata.version(library)
            raise UsageError(
                f"env={env!r} needs {library}, and version {version} cannot be imported: "
                f"{text_of(error)}"
            ) from error
    if env_id not in known:
        hint = nearest(env_id, known) or f"; it has {', '.join(sorted(known))}"
        raise UsageError(f"env={env!r}: {env_id!r} is not an id of {library}{hint}")
    return module, env_id
