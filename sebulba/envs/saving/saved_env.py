"""Environments saved as bytes and restored, and a test of whether such copies work.

This module needs no JAX: worker processes import it.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import itertools
import pickle
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils import EzPickle
from gymnasium.vector import AutoresetMode, VectorWrapper

from sebulba.envs.observation_parts import tags_of
from sebulba.envs.saving.plain_data import NotPlainError, check_copy, pack, unpack
from sebulba.envs.spaces import legal_action
from sebulba.errors import EnvError, text_of

REMEDY = "give it the methods get_state() and set_state(state)"
STEPS_COMPARED = 16
"""Most steps through which a copy is compared with a copy of that copy."""
COMPARE_S = 2.0
"""Seconds after which no further step of that comparison begins."""
_STEPS_BEFORE = 2


def save(env: Any) -> bytes | str:
    """Return the state of a single or vector environment, or the reason why there is none.

    The outermost wrapper (or the environment) that has ``get_state()`` and ``set_state(state)`` is
    asked for its state, which is saved with its random generator, those of all spaces, and the
    attributes of the wrappers around it. If all of that is plain data that comes back as it was
    (``plain_data.py``), no pickle is made. Otherwise, and if none has these methods, it
    is pickled, by cloudpickle if pickle cannot. The random generator stays shared with a wrapper;
    of anything else that a wrapper shares with the environment that was asked, it gets a copy.
    """
    layer = _layer_with_state(env)
    try:
        if layer is not None:
            state, random = layer.get_state(), getattr(layer.unwrapped, "_np_random", None)
            spaces = [_random_state(getattr(space, "_np_random", None)) for space in _spaces(env)]
            with contextlib.suppress(NotPlainError):
                attributes = _attributes(env, layer)
                check_copy(state)
                check_copy(attributes)
                return pack(("plain", state, _random_state(random), attributes, spaces))
            inner = _dumps((state, random, spaces))
            return pack(("pickled", inner, _dumps(env, {"without": layer, "random": random})))
        return pack(("pickled", None, _dumps(env)))
    except Exception as error:  # a user's code may raise anything here
        who = type([*_layers(env)][-1]).__name__
        what = "could not be pickled" if layer is None else "gave no state"
        return f"{who} {what} ({_describe(error)}); {REMEDY}"


def restore(data: bytes, env: Any) -> Any:
    """Return the environment that was saved as ``data``.

    Unpickling can run any code: pass only what a run of your own has saved.

    Args:
      data: Return value of ``save``.
      env: An environment that was made in the same way, and reset. Its layer that has
        ``set_state``, if there is one, becomes a part of the result; otherwise ``env`` is closed.

    Raises:
      EnvError: The saved spaces or wrappers are not those of ``env``.
      Exception: A user's code raised it.
    """
    kind, *content = unpack(data)
    layer = _layer_with_state(env)
    had_state = kind == "plain" or content[0] is not None
    if had_state != (layer is not None):
        had, has = ("a", "now no") if had_state else ("no", "now")
        raise EnvError(f"it had {had} get_state() when it was saved and has {has}; undo the change")
    if kind == "plain":
        state, random, attributes, spaces = content
        _set_attributes(env, layer, attributes)
        _set_state(env, layer, state, random, spaces)
        return env
    inner, outer = content
    random = None if layer is None else getattr(layer.unwrapped, "np_random", None)
    restored = _loads(outer, {"without": layer, "random": random})
    for name in ("observation_space", "action_space"):
        saved_space, space = getattr(restored, name), getattr(env, name)
        if saved_space != space:
            raise EnvError(f"{name}={saved_space} was saved, it is now {space}; undo the change")
    if layer is None:
        env.close()
        return restored
    state, random, spaces = _loads(inner)
    _set_state(restored, layer, state, _random_state(random), spaces)
    return restored


def fault_of_copies(data: bytes) -> str | None:
    """Return how the copies of an environment go wrong, or None if they do not.

    An environment may be pickled without an error and still lack something: what it keeps outside
    of Python, reads from the clock or draws from a global generator. So a copy is reset, stepped
    and copied again; then both copies are stepped with the same random actions and reset once more.
    Observations, rewards and flags must be equal. Differences that show only later, or only in
    another process, are not found. An environment with ``get_state`` is trusted.

    Args:
      data: Return value of ``save``; the environment itself is not touched.
    """
    kind, *content = unpack(data)
    if kind == "plain" or content[0] is not None:
        return None
    outer = content[1]
    try:
        with contextlib.ExitStack() as copies:
            one = _loads(outer)
            copies.callback(one.close)
            return _compare_with_copy(one, copies)
    except Exception as error:  # only a copy fails so: the environment itself has been played
        return f"a copy by pickle failed with {_describe(error)}; {REMEDY}"


def _random_state(random: Any) -> dict[str, Any] | None:
    return None if random is None else dict(_bit_generator(random).state)


def _bit_generator(random: Any) -> Any:
    """Return what draws the bits of a ``numpy.random.Generator`` or ``RandomState``."""
    return getattr(random, "bit_generator", None) or random._bit_generator


def _set_state(
    env: Any,
    layer: Any,
    state: Any,
    random: dict[str, Any] | None,
    spaces: Sequence[dict[str, Any] | None],
) -> None:
    """Give ``layer`` its state, and let all random generators go on.

    They are changed in place, because others may refer to them.

    Args:
      env: The outermost wrapper around ``layer``.
      layer: What has ``set_state``.
      state: What its ``get_state`` returned.
      random: State of ``layer.unwrapped.np_random``.
      spaces: States of the generators of ``_spaces(env)``.

    Raises:
      EnvError: There are other spaces.
    """
    layer.set_state(state)
    if random is not None:
        _bit_generator(layer.unwrapped.np_random).state = random
    if len(spaces) != (now := len(_spaces(env))):
        raise EnvError(f"it had {len(spaces)} spaces and has {now} now; undo the change")
    for space, space_random in zip(_spaces(env), spaces, strict=True):
        if space_random is not None:
            _bit_generator(space.np_random).state = space_random


def _spaces(env: Any) -> list[gymnasium.Space]:
    """Return the spaces that an environment and its wrappers made, each with all of its parts."""
    found = []
    rest = [value for layer in _layers(env) for value in getattr(layer, "__dict__", {}).values()]
    while rest:
        space = rest.pop()
        if isinstance(space, gymnasium.Space):
            found.append(space)
            parts = getattr(space, "spaces", ())
            rest += parts.values() if isinstance(parts, dict) else parts
    return found


def _attributes(env: Any, layer: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return the class and the attributes of each wrapper around ``layer``, from the outside.

    Left out is what a wrapper that was made in the same way has by itself: spaces, the
    specification of the environment, classes, and functions that refer to nothing that changes.

    Raises:
      NotPlainError: A wrapper has more than these.
    """
    found = []
    for wrapper in itertools.takewhile(lambda one: one is not layer, _layers(env)):
        if any(vars(one).get("__slots__") for one in type(wrapper).__mro__):
            raise NotPlainError(f"{type(wrapper).__name__} has __slots__")
        own = {name: value for name, value in vars(wrapper).items() if name != "env"}
        kept = {name: value for name, value in own.items() if not _is_fixed(value)}
        found.append((type(wrapper).__qualname__, kept))
    return found


def _is_fixed(value: Any) -> bool:
    if isinstance(value, FunctionType):
        return value.__closure__ is None
    return isinstance(value, gymnasium.Space | EnvSpec | type)


def _set_attributes(env: Any, layer: Any, attributes: list[tuple[str, dict[str, Any]]]) -> None:
    """Give the wrappers around ``layer`` the attributes that ``_attributes`` returned.

    Raises:
      EnvError: There are other wrappers.
    """
    wrappers = list(itertools.takewhile(lambda one: one is not layer, _layers(env)))
    now, before = [type(one).__qualname__ for one in wrappers], [name for name, _ in attributes]
    if now != before:
        raise EnvError(f"it was wrapped in {before} and is in {now} now; undo the change")
    for wrapper, (_, values) in zip(wrappers, attributes, strict=True):
        vars(wrapper).update(values)


def _layer_with_state(env: Any) -> Any:
    """Return the outermost layer that offers its state, or None if there is none."""
    return next((layer for layer in _layers(env) if _offers_state(layer)), None)


def _layers(env: Any) -> Iterator[Any]:
    yield env
    while isinstance(env, gymnasium.Wrapper | VectorWrapper):
        env = env.env
        yield env


def _offers_state(layer: Any) -> bool:
    """Tell whether ``get_state()`` and ``set_state(state)`` can be called like this.

    MuJoCo environments have a ``set_state(qpos, qvel)``, which is another method.
    """
    try:
        inspect.signature(layer.get_state).bind()
        inspect.signature(layer.set_state).bind(None)
    except (AttributeError, TypeError, ValueError):
        return False
    return True


def _dumps(value: Any, without: Mapping[str, Any] | None = None) -> bytes:
    """Return ``value`` pickled, with the names of the objects ``without`` in their places."""
    try:
        return _dump(_Pickler, value, without)
    except _NotWhole:
        raise
    except Exception:
        # cloudpickle can pickle lambdas and local classes. It is second because it also pickles a
        # class of the main script, whose copy would then not be the class that the script defines.
        return _dump(_CloudPickler, value, without)


def _dump(pickler_class: Any, value: Any, without: Mapping[str, Any] | None) -> bytes:
    file = io.BytesIO()
    pickler = pickler_class(file, pickle.HIGHEST_PROTOCOL)
    pickler.names = {id(one): name for name, one in (without or {}).items() if one is not None}
    pickler.dump(value)
    return file.getvalue()


class _NotWhole(pickle.PicklingError):
    """Pickling would succeed, but leave something out."""


class _LookingPickler:
    names: Mapping[int, str] = {}
    """By the identity of what is left out."""

    def persistent_id(self, value: Any) -> str | None:
        if id(value) in self.names:
            return self.names[id(value)]
        if isinstance(value, EzPickle) and type(value).__getstate__ is EzPickle.__getstate__:
            raise _NotWhole(
                f"{type(value).__name__}, an EzPickle, saves constructor arguments only"
            )
        return None


class _Pickler(_LookingPickler, pickle.Pickler):
    pass


class _CloudPickler(_LookingPickler, cloudpickle.Pickler):
    pass


class _Unpickler(pickle.Unpickler):
    without: Mapping[str, Any] = {}

    def persistent_load(self, pid: str) -> Any:
        return self.without[pid]


def _loads(data: bytes, without: Mapping[str, Any] | None = None) -> Any:
    unpickler = _Unpickler(io.BytesIO(data))
    unpickler.without = without or {}
    return unpickler.load()


def _compare_with_copy(one: Any, copies: contextlib.ExitStack) -> str | None:
    """Return where ``one`` and a copy of it, which ``copies`` closes, differ, or None."""
    actions = copy.deepcopy(one.action_space)
    actions.seed(0)
    seen: tuple = one.reset(seed=0)[:1]
    for _ in range(_STEPS_BEFORE):
        seen = _advance(one, _drawn(actions, one, seen))
    other = _loads(_dumps(one))
    copies.callback(other.close)
    until = time.monotonic() + COMPARE_S
    for step in range(STEPS_COMPARED):
        action = _drawn(actions, one, seen)
        seen = _advance(one, action)
        if not equal(seen, _advance(other, action)):
            return f"a copy by pickle goes on differently after {step + 1} steps; {REMEDY}"
        if time.monotonic() > until:
            break
    if not equal(one.reset()[0], other.reset()[0]):
        return f"a copy by pickle resets differently; {REMEDY}"
    return None


def _drawn(actions: gymnasium.Space, env: Any, seen: tuple) -> Any:
    """Return a random action, a legal one where the environment says which are."""
    if hasattr(env, "legal"):  # of many agents
        return env.legal(actions.sample())
    name = tags_of(env).get("legal_actions")
    if name is None or isinstance(env, gymnasium.vector.VectorEnv):
        return actions.sample()
    mask = seen[-1 if len(seen) in (1, 5) else 0][name]
    return legal_action(actions.sample(), mask, actions)


def _advance(env: Any, action: Any) -> tuple:
    """Step ``env``, reset what has ended, and return all that was observed."""
    obs, reward, terminated, truncated, _ = env.step(copy.deepcopy(action))
    seen = copy.deepcopy((obs, reward, terminated, truncated))
    ends = np.logical_or(terminated, truncated)
    if ends.ndim == 0:
        return (*seen, env.reset()[0]) if ends else seen
    if env.metadata.get("autoreset_mode") is AutoresetMode.DISABLED and ends.any():
        return (*seen, env.reset(options={"reset_mask": ends})[0])
    return seen


def equal(one: Any, other: Any) -> bool:
    """Tell whether two observations, or tuples of what was observed, are the same."""
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return np.array_equal(one, other)


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, _NotWhole) else text_of(error)
