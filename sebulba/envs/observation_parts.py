"""Parts of an observation that are not for the policy: legal actions, and what the learner sees.

An environment of a single agent says which those are by a tree of one ``AgentNode``, or its user by
options: where Gymnasium's ``action_mask`` is, and what is privileged. This module needs no JAX:
worker processes import it.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

from sebulba.envs.flat_parts import flattened
from sebulba.envs.obs_wrapper import ObsWrapper, part_of
from sebulba.envs.spaces import (
    canonical_action_space,
    canonical_observation_space,
    check_legal,
    has_legal,
    num_choices,
    require_spaces,
)
from sebulba.envs.tree import OBSERVATION, SPEC, AgentNode, action_parts, compile_tree, named_parts
from sebulba.errors import EnvError, UsageError, shown
from sebulba.types import EnvSpec

MASK = "action_mask"
"""Where Gymnasium's environments have the mask of legal actions: in observation or info."""
TAGS = "observation_tags"
"""Where the metadata of an environment has fields of its ``EnvSpec`` that its spaces do not say."""
ActionMaskPlace = Literal["observation", "info"]


def tags_of(env: Any) -> dict[str, Any]:
    """Return ``eval_only`` and ``legal_actions`` of an environment, single or vector, if it has."""
    return dict((getattr(env, "metadata", None) or {}).get(TAGS) or {})


def spec_of(env: Any, name: str, prefix: str = "", **fields: Any) -> EnvSpec:
    """Return the spec of one environment.

    Args:
      env: Has the two spaces, and perhaps tags.
      name: Name of the spec.
      prefix: Before the names of the spaces.
      **fields: Other fields of the spec.

    Raises:
      UsageError: It lacks a space, or one is not supported.
    """
    require_spaces(env, f"env={name or type(env).__name__!r}", prefix)
    return EnvSpec(
        observation_space=canonical_observation_space(getattr(env, f"{prefix}observation_space")),
        action_space=canonical_action_space(getattr(env, f"{prefix}action_space")),
        name=name,
        **tags_of(env),
        **fields,
    )


def prepared(
    make_env: Callable[[], Any], action_mask: ActionMaskPlace | None = None
) -> gymnasium.Env:
    """Make a single environment whose spaces and observations are as its spec will say.

    Args:
      make_env: Makes it.
      action_mask: Where its mask of legal actions is.
    """
    env = make_env()
    if not isinstance(env, gymnasium.Env):
        return env  # CheckedEnv says what is wrong
    if SPEC in (env.metadata or {}):
        if action_mask:
            raise UsageError(
                f"action_mask={action_mask!r} is for a single agent, and "
                f"{type(env.unwrapped).__name__} has many; use Obs(MultiBinary(n), "
                "legal_actions=True) in its tree"
            )
        return env
    if env.has_wrapper_attr("tree") and isinstance(env.get_wrapper_attr("tree"), AgentNode):
        env = NodeEnv(env)
    return flattened(ActionMaskEnv(env, action_mask) if action_mask else env)


class NodeEnv(ObsWrapper):
    """A ``gymnasium.Env`` whose attribute ``tree`` is an ``AgentNode``, in place of its spaces."""

    def __init__(self, env: gymnasium.Env) -> None:
        """Take the spaces from the tree.

        Raises:
          UsageError: It breaks a rule.
        """
        super().__init__(env)
        node = env.get_wrapper_attr("tree")
        spec = compile_tree(node)
        assert isinstance(spec, EnvSpec)
        self.observation_space, self.action_space = spec.observation_space, spec.action_space
        tags = {"eval_only": spec.eval_only, "legal_actions": spec.legal_actions}
        self.metadata = {**env.metadata, TAGS: tags}
        self._names = [name for name, _ in named_parts(node.obs, "")]
        self._act = node.act.space

    def step(self, action: Any) -> Any:
        return super().step(action_parts(action, self._act))

    def changed(self, obs: Any, info: Any, method: str, *, at_end: bool) -> Any:
        if self._names == [""]:
            return obs
        return {name: part_of(obs, name.split(".")) for name in self._names}


class ActionMaskEnv(ObsWrapper):
    """Has the mask of legal actions in the observation, as MultiBinary under ``action_mask``."""

    def __init__(self, env: gymnasium.Env, place: ActionMaskPlace) -> None:
        """Find the mask.

        Args:
          env: The environment.
          place: Its mask is a part of the observation, or of the infos of reset and step.

        Raises:
          UsageError: There is none, or its space or the actions do not fit.
        """
        super().__init__(env)
        self._place, self._who = place, type(env.unwrapped).__name__
        size = _mask_size(env.action_space, self._who)
        self._size = size
        space = env.observation_space
        parts = dict(space.spaces) if isinstance(space, spaces.Dict) else {OBSERVATION: space}
        declared = parts.pop(MASK, None)
        if place == "observation":
            _check_mask_space(declared, size, self._who)
        elif declared is not None:
            raise UsageError(
                f"action_mask='info' of {self._who}, whose observation has a part {MASK!r}; use "
                "action_mask='observation'"
            )
        if not parts:
            raise UsageError(f"{self._who} observes only its {MASK}; add another part")
        self._is_bare = not isinstance(space, spaces.Dict)
        self.observation_space = spaces.Dict({**parts, MASK: spaces.MultiBinary(size)})
        tags = {**tags_of(env), "legal_actions": MASK}
        self.metadata = {**env.metadata, TAGS: tags}

    def changed(self, obs: Any, info: Any, method: str, *, at_end: bool) -> Any:
        holder = info if self._place == "info" else obs
        if not isinstance(holder, Mapping) or MASK not in holder:
            if self._place == "observation":
                return obs  # CheckedEnv says which part is missing
            if not at_end:
                raise EnvError(f"info of {method} must have {MASK!r}; got {shown(holder)}")
            mask = np.zeros(self._size, np.int8)
        else:
            mask = self._mask(holder[MASK], f"{self._place} of {method}")
        rest = {OBSERVATION: obs} if self._is_bare else obs
        return {**rest, MASK: mask} if isinstance(rest, Mapping) else obs

    def _mask(self, value: Any, where: str) -> np.ndarray:
        """Return the mask as MultiBinary; those of a MultiDiscrete's parts side by side."""
        parts = value if isinstance(value, tuple | list) else [value]
        try:
            mask = np.concatenate([np.atleast_1d(np.asarray(part)) for part in parts])
            fits = mask.shape == (self._size,) and bool(((mask == 0) | (mask == 1)).all())
        except (TypeError, ValueError):
            fits = False
        if not fits:
            raise EnvError(
                f"{MASK} in the {where} must be {self._size} numbers 0 or 1, one for each action; "
                f"got {shown(value)}"
            )
        return mask.astype(np.int8)


def _mask_size(space: Any, who: str) -> int:
    size = num_choices(space)
    if size is None:
        raise UsageError(
            f"action_mask is for Discrete and MultiDiscrete actions, and those of {who} are "
            f"{space}; drop it"
        )
    return size


def _check_mask_space(space: Any, size: int, who: str) -> None:
    """Raise UsageError unless a space is that of a mask, or of one for each part of an action."""
    parts: Sequence[Any] = space.spaces if isinstance(space, spaces.Tuple) else [space]
    if all(map(_is_flags, parts)) and sum(part.shape[0] for part in parts) == size:
        return
    got = "there is none" if space is None else f"it is {space}"
    raise UsageError(
        f"action_mask='observation' of {who}: the observation must be a Dict with {MASK!r}, "
        f"MultiBinary({size}) or Box(0, 1, ({size},), np.int8), one entry for each action; {got}"
    )


def _is_flags(space: Any) -> bool:
    if isinstance(space, spaces.MultiBinary):
        return len(space.shape) == 1
    is_row = isinstance(space, spaces.Box) and len(space.shape) == 1 and space.dtype.kind in "biu"
    return is_row and bool((space.low == 0).all() and (space.high == 1).all())


def warn_of_unused_mask(env: gymnasium.Env, name: str) -> None:
    """Warn of a mask of legal actions that an environment offers and no option uses."""
    space, size = env.observation_space, num_choices(env.action_space)
    if size is None or tags_of(env).get("legal_actions"):
        return
    if isinstance(space, spaces.Dict) and (mask := space.spaces.get(MASK)) is not None:
        if not (_is_flags(mask) and mask.shape == (size,)):
            return
        how = f"as the part {MASK!r} of its observation"
        remedy = "use --env.action-mask observation"
    elif env.has_wrapper_attr("action_masks") and callable(env.get_wrapper_attr("action_masks")):
        how = "by its method action_masks()"
        remedy = f"put the mask into the infos of reset and step as {MASK!r}, and use "
        remedy += "--env.action-mask info"
    else:
        return
    warnings.warn(
        f"{name!r} offers a mask of legal actions {how}, but no option uses it: agents may take "
        f"illegal actions; {remedy}",
        stacklevel=3,
    )


def marked(
    spec: EnvSpec, action_mask: ActionMaskPlace | None, privileged: Sequence[str]
) -> EnvSpec:
    """Return a spec that says which parts are legal actions, and which the learner alone sees.

    Args:
      spec: Of the environment.
      action_mask: ``"observation"`` finds the mask in a spec that does not say it.
      privileged: Names of parts that the policy never sees.

    Raises:
      UsageError: There is no such part, or it cannot be that.
    """
    if action_mask and spec.legal_actions is None:
        spec = _with_mask_part(spec)
    if not privileged:
        return spec
    who = f"privileged={list(privileged)} of {spec.name!r}"
    if spec.eval_only:
        raise UsageError(f"{who}, whose tree declares eval_only parts; drop it")
    space = spec.observation_space
    if not isinstance(space, spaces.Dict):
        raise UsageError(f"{who} names parts of a Dict, and observations are {space}; drop it")
    for name in privileged:
        if name not in space.spaces or name == spec.legal_actions:
            has = ", ".join(sorted(part for part in space.spaces if part != spec.legal_actions))
            raise UsageError(f"{who}: {name!r} is not one of its parts; use {has}")
    if not space.spaces.keys() - set(privileged) - {spec.legal_actions}:
        raise UsageError(f"{who} leaves nothing that the policy sees; leave a part out")
    return dataclasses.replace(spec, eval_only=tuple(dict.fromkeys(privileged)))


def _with_mask_part(spec: EnvSpec) -> EnvSpec:
    size = _mask_size(spec.action_space, repr(spec.name))
    space = spec.observation_space
    parts = dict(space.spaces) if isinstance(space, spaces.Dict) else {}
    mask = parts.get(MASK)
    _check_mask_space(mask, size, repr(spec.name))
    assert mask is not None and mask.dtype is not None
    if mask.dtype != np.int8:
        raise UsageError(
            f"action_mask='observation' of {spec.name!r}: {MASK!r} is {mask}; use MultiBinary"
        )
    parts[MASK] = spaces.MultiBinary(size)
    return dataclasses.replace(spec, observation_space=spaces.Dict(parts), legal_actions=MASK)


class LegalActions:
    """Which actions of B environments are legal in the row that is acted on next."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self._mask: np.ndarray | None = None
        self._num_steps = 0

    def forget(self) -> None:
        """Know nothing: the environments were put back."""
        self._mask = None

    def check(self, spec: EnvSpec, action: np.ndarray) -> None:
        """Raise ActionError for the first action ``[B, ...]`` that is not legal."""
        if self._mask is None:
            return
        everybody = np.ones(len(action), np.bool_)
        check_legal(
            self._mask, action, spec.action_space, everybody, lambda row: f"environment {row}"
        )

    def look(self, spec: EnvSpec, obs: Any, at_end: np.ndarray | None = None) -> None:
        """Take the mask from observations ``[B, ...]``.

        Args:
          spec: Names the part that it is.
          obs: Observations, which nobody writes again.
          at_end: ``[B]``, rows in which nobody acts; None after a reset.

        Raises:
          EnvError: No action is legal where one has to be taken.
        """
        if spec.legal_actions is None:
            return
        self._mask = obs[spec.legal_actions]
        self._num_steps += at_end is not None
        stuck = ~has_legal(self._mask, spec.action_space).all(axis=1)
        if at_end is not None:
            stuck &= ~at_end
        if stuck.any():
            raise EnvError(
                f"environment {int(np.argmax(stuck))}, step {self._num_steps}: "
                f"{spec.legal_actions} allows no action, but the episode continues; allow one, or "
                "end the episode"
            )
