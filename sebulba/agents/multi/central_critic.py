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
    own = spec.groups[group].spec
    others = {name: space for name, space, _ in _others(spec, group)}
    if not others:
        return own
    parts = _parts(own)
    first = [name for name in parts if own.has_channels_first("" if _is_bare(own) else name)]
    first += [name for name, _, is_first in _others(spec, group) if is_first]
    return dataclasses.replace(
        own,
        observation_space=gymnasium.spaces.Dict({**parts, **others}),
        eval_only=(*own.eval_only, *others),
        channels_first=tuple(first),
    )


def _others(spec: MultiAgentSpec, group: str) -> Iterator[tuple[str, gymnasium.Space, bool]]:
    """Yield name and space of each part, and whether it is an image with its channels first."""
    for name, other in spec.groups.items():
        for number in _numbers(other, is_own=name == group):
            where = f"others/{name}/{number}"
            if other.waits:
                yield where, gymnasium.spaces.MultiBinary(1), False
            for part, space in _parts(other.spec).items():
                if part != COMMON:
                    first = other.spec.has_channels_first("" if _is_bare(other.spec) else part)
                    yield f"{where}/{part}", space, first


def _numbers(group: Group, *, is_own: bool) -> range:
    return range(int(is_own), len(group.slots))


def _is_bare(spec: EnvSpec) -> bool:
    return not isinstance(spec.observation_space, gymnasium.spaces.Dict)


def _parts(spec: EnvSpec) -> dict[str, gymnasium.Space]:
    space = spec.observation_space
    if isinstance(space, gymnasium.spaces.Dict):
        return dict(space.spaces)
    return {OBSERVATION: space}


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
    axis = num_leading + 1
    others: dict[str, jax.Array] = {}
    for name, other in spec.groups.items():
        parts: dict[str, Any] = {"": env_step.acting[name]} if other.waits else {}
        seen = env_step.obs[name]
        parts |= seen if isinstance(seen, dict) else {OBSERVATION: seen}
        for number in _numbers(other, is_own=name == group):
            shown = np.full(len(slots), number)
            if name == group:
                shown = (np.array(slots) + number) % len(other.slots)
            for part, x in parts.items():
                rows = jnp.take(jnp.asarray(x), shown, axis=axis)
                begin, rest = rows.shape[:num_leading], rows.shape[num_leading + 2 :]
                rows = rows.reshape(*begin, rows.shape[num_leading] * len(slots), *rest)
                where = f"others/{name}/{number}"
                if not part:
                    others[where] = rows[..., None].astype(jnp.int8)
                else:
                    others[f"{where}/{part}"] = rows
    if not others:
        return obs
    return {**(obs if isinstance(obs, dict) else {OBSERVATION: obs}), **others}


def policy_part(spec: EnvSpec, obs: PyTree) -> PyTree:
    """Return what a policy sees of what its learner does, given the spec of its group."""
    space = spec.policy_spec.observation_space
    if isinstance(space, gymnasium.spaces.Dict):
        return {name: obs[name] for name in space.spaces}
    return obs[OBSERVATION] if isinstance(obs, dict) else obs
