"""What an environment written in JAX has to offer, and how one is told from others. Free of JAX."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import gymnasium
import numpy as np

from sebulba.envs.option_checks import check_number

if TYPE_CHECKING:
    import jax

    from sebulba.envs.tree import Population
    from sebulba.types import PyTree

Stepped: TypeAlias = "tuple[PyTree, PyTree, Any, Any, Any]"
"""Observation, state, reward, terminated and truncated."""
NUM_STEP_ARGUMENTS = 3
"""A step takes a key, a state and an action."""


class JaxEnv(Protocol):
    """One environment as two pure JAX functions, which are mapped over environments and compiled.

    All that changes is in ``state``: a pytree of arrays, typed keys among them if wanted, whose
    structure, shapes and dtypes stay the same. ``step`` does not reset, and does not need a limit
    on the length of episodes: ``max_episode_steps`` sets one from outside. It is also called with
    states of episodes that have ended, and what it returns for them is not used. A class need not
    inherit from this one.
    """

    observation_space: gymnasium.Space
    """Box, Discrete, MultiDiscrete, MultiBinary, or a Dict of these."""
    action_space: gymnasium.Space
    """Box of floats, Discrete or MultiDiscrete."""
    # A Dict may have ``privileged``, a tuple: its parts that only the learner sees.

    def reset(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        """Begin an episode with a typed PRNG key; return ``(obs, state)``."""
        ...

    def step(self, key: jax.Array, state: PyTree, action: jax.Array) -> Stepped:
        """Act; return ``(obs, state, reward, terminated, truncated)``, the last three scalars."""
        ...


def is_jax_env(env: Any) -> bool:
    """Tell whether this is an object, or a class of objects, that a ``JaxEnv`` could be.

    It has ``reset``, and a ``step`` that cannot do with fewer than a key, a state and an action.
    """
    of_gymnasium = gymnasium.Env, gymnasium.vector.VectorEnv
    if isinstance(env, of_gymnasium) or not hasattr(env, "reset"):
        return False
    step = getattr(env, "step", None)
    try:
        parameters = list(inspect.signature(step).parameters.values())  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    needed = [
        one
        for one in parameters
        if one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    return len(needed) - isinstance(env, type) >= NUM_STEP_ARGUMENTS


def makes_jax_env(make_env: Callable) -> bool:
    """Tell whether this is a class of JAX environments, or a function annotated to return one.

    A ``functools.partial`` of one is, too.
    """
    while isinstance(make_env, functools.partial):
        make_env = make_env.func
    if isinstance(make_env, type):
        return is_jax_env(make_env)
    try:
        returned = typing.get_type_hints(make_env).get("return")
    except Exception:  # a hint may name anything
        return False
    return isinstance(returned, type) and (
        returned in (JaxEnv, MultiAgentJaxEnv) or is_jax_env(returned)
    )


class MultiAgentJaxEnv(Protocol):
    """One environment of many agents as pure JAX functions; like ``JaxEnv`` but for what is said.

    Observations, actions and rewards are dicts by *group* (``sebulba.describe`` prints them), each
    with an axis of the group's A slots in front. Where agents may have to wait, there is a third
    method, ``acting(state)``, which returns ``{group: [A]}`` bools: who chooses an action next. At
    least one does, until the episode is over.
    """

    tree: Population
    """Who there can be, what each observes and does."""

    def reset(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        """Begin an episode; return ``(obs, state)``.

        ``obs`` is ``{group: [A, ...]}`` (a dict of these by part), with what all observe under
        ``"common"`` where the tree has that.
        """
        ...

    def step(self, key: jax.Array, state: PyTree, actions: dict[str, jax.Array]) -> Stepped:
        """Act; return ``(obs, state, reward, terminated, truncated)``.

        ``actions`` are those of all slots, ``{group: [A, ...]}``; those of slots that wait mean
        nothing. The last three results are ``{group: [A]}``, or one scalar for all. Who is
        truncated is shown its last observation, whether it acted or not. The episode is over when
        all have ended, or nobody acts next. Without ``acting`` all end at once: ``terminated`` and
        ``truncated`` are scalars.
        """
        ...


class TimeLimit:
    """Truncates the episodes of a ``JaxEnv``, of one agent or many, after a number of steps."""

    # Those that the environment has.
    observation_space: gymnasium.Space
    action_space: gymnasium.Space
    tree: Population
    privileged: tuple[str, ...]

    def __init__(self, env: JaxEnv | MultiAgentJaxEnv, max_episode_steps: int) -> None:
        """Limit ``env`` to ``max_episode_steps``, at least 1."""
        check_number("max_episode_steps", max_episode_steps, default=1000, smallest=1)
        for name in ("observation_space", "action_space", "tree", "privileged"):
            if hasattr(env, name):
                setattr(self, name, getattr(env, name))
        if acting := getattr(env, "acting", None):
            self.acting = lambda state: acting(state[0])
        self._env: Any = env
        self._limit = max_episode_steps

    def reset(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        """Begin an episode and count its steps."""
        obs, state = self._env.reset(key)
        return obs, (state, np.int32(0))

    def step(self, key: jax.Array, state: PyTree, action: PyTree) -> Stepped:
        """Act, and truncate at the limit."""
        inside, num_steps = state
        obs, inside, reward, terminated, truncated = self._env.step(key, inside, action)
        num_steps += 1
        is_last = num_steps >= self._limit
        if isinstance(truncated, Mapping):
            truncated = {group: flags | is_last for group, flags in truncated.items()}
        else:
            truncated |= is_last
        return obs, (inside, num_steps), reward, terminated, truncated
