"""What a central critic of a member sees beside its own observation: what all others observe.

Those are parts of the observation that are ``eval_only``, by the names
``others/GROUP/NUMBER/PART``. In the group of the member, number k is the k-th slot after its own,
around in a circle; in other groups it is the number of the slot. Where agents may have to wait,
``others/GROUP/NUMBER`` says who acts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from sebulba.types import COMMON, OBSERVATION, EnvSpec, EnvStep, Group, MultiAgentSpec, PyTree


def critic_spec(spec: MultiAgentSpec, group: str) -> EnvSpec:
    """Return what the learner of a member of ``group`` sees, of which others are ``eval_only``."""
    own, others = spec.groups[group].spec, list(_others(spec, group))
    if not others:
        return own
    parts = [*_parts(own), *others]
    return dataclasses.replace(
        own,
        observation_space=gymnasium.spaces.Dict({name: space for name, space, _ in parts}),
        eval_only=(*own.eval_only, *(name for name, _, _ in others)),
        channels_first=tuple(name for name, _, is_first in parts if is_first),
    )


Part = tuple[str, gymnasium.Space, bool]
"""Name and space of a part of an observation, and whether it has its channels first."""


def _others(spec: MultiAgentSpec, group: str) -> Iterator[Part]:
    for name, other in spec.groups.items():
        for number in _numbers(other, is_own=name == group):
            where = f"others/{name}/{number}"
            if other.waits:
                yield where, gymnasium.spaces.MultiBinary(1), False
            for part, space, is_first in _parts(other.spec):
                if part != COMMON:
                    yield f"{where}/{part}", space, is_first


def _numbers(group: Group, *, is_own: bool) -> range:
    return range(int(is_own), len(group.slots))


def _parts(spec: EnvSpec) -> Iterator[Part]:
    space = spec.observation_space
    if isinstance(space, gymnasium.spaces.Dict):
        yield from ((name, part, spec.has_channels_first(name)) for name, part in space.items())
    else:
        yield OBSERVATION, space, spec.has_channels_first("")


def with_others(
    spec: MultiAgentSpec,
    group: str,
    slots: Sequence[int],
    obs: PyTree,
    env_step: EnvStep,
    num_leading: int,
) -> PyTree:
    """Return the observation of a member with what all others observe.

    Args:
      spec: Of the environment.
      group: The member's.
      slots: Its n slots in that.
      obs: Its own observation, ``[*, B * n, ...]``.
      env_step: ``[*, B, A, ...]`` by group.
      num_leading: Dimensions before B.
    """
    others: dict[str, jax.Array] = {}
    for name, other in spec.groups.items():
        seen: Any = env_step.obs[name]
        seen = seen if isinstance(seen, dict) else {OBSERVATION: seen}
        parts = {f"/{part}": jnp.asarray(x) for part, x in seen.items()}
        if other.waits:
            parts[""] = jnp.asarray(env_step.acting[name])[..., None].astype(jnp.int8)
        for number in _numbers(other, is_own=name == group):
            shown = np.full(len(slots), number)
            if name == group:
                shown = (np.array(slots) + number) % len(other.slots)
            for part, x in parts.items():
                rows = jnp.take(x, shown, axis=num_leading + 1)
                rows = jax.lax.collapse(rows, num_leading, num_leading + 2)
                others[f"others/{name}/{number}{part}"] = rows
    if not others:
        return obs
    return {**(obs if isinstance(obs, dict) else {OBSERVATION: obs}), **others}


def policy_part(spec: EnvSpec, obs: PyTree) -> PyTree:
    """Return what a policy sees of what its learner does, given the spec of its group."""
    space = spec.policy_spec.observation_space
    if isinstance(space, gymnasium.spaces.Dict):
        return {name: obs[name] for name in space.spaces}
    return obs[OBSERVATION] if isinstance(obs, dict) else obs
