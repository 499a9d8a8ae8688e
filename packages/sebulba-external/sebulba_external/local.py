"""Gives policies to clients that act without a round trip, and takes the rows that they made."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from sebulba.errors import UsageError, text_of
from sebulba.support.trees import is_key
from sebulba.types import EnvStep, PyTree
from sebulba_external import protocol
from sebulba_external.program import encode
from sebulba_external.protocol import (
    FIRST,
    TERMINATED,
    TRUNCATED,
    ProtocolError,
    finite_array_of,
)
from sebulba_external.traced import REMEDY, traced

if TYPE_CHECKING:
    from sebulba_external.desk import Desk


MOST_PROGRAMS = 16
"""Of different numbers of streams: each takes time to trace, in which nobody is answered."""


class Rows(NamedTuple):
    """What a client played in one of its streams, with one version of the policy."""

    version: int
    """Which."""
    env_step: EnvStep
    """``[n, ...]``."""
    acted: np.ndarray
    """``[n]`` bool: all but the last row of an episode."""
    action: np.ndarray
    """``[n, ...]``."""
    extras: PyTree
    """``ActionOutput.extras``, ``[n, ...]``."""
    state: Callable[[int], list[PyTree]]
    """Returns the parts of the step state before a row, as ``Desk.state_of``."""


class LocalPolicies:
    """The policy of a desk for clients that act themselves."""

    def __init__(self, desk: Desk) -> None:
        """Serve ``desk``."""
        self._desk = desk
        self._programs: dict[tuple[int, bool], dict[str, Any]] = {}
        self._arrays: tuple[int, list[np.ndarray]] = -1, []
        state, self._is_own = desk.of_seats([0])
        self._state_leaves = jax.tree.leaves(state)
        row = desk.agent.empty_env_step(1)
        act = functools.partial(desk.agent.act, explore=True)
        output, _ = jax.eval_shape(act, desk.acting.networks, state, row)
        self._action: Any = output.action
        self._extras: Any = output.extras

    @functools.cached_property
    def longest_frame(self) -> int:
        """Most bytes of a message with rows."""
        leaves = [*jax.tree.leaves(self._extras), self._action, *self._state_leaves]
        of_row = sum(0 if is_key(x) else int(np.prod(x.shape)) * 8 for x in leaves)
        return protocol.MOST_ROWS * (self._desk.longest_frame + of_row)

    def policy(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a client that asks for the policy.

        Raises:
          ProtocolError: It asks for what cannot be; or its operations are beyond NumPy clients.
        """
        desk, acting, want = self._desk, self._desk.acting, message.get("want")
        extras = [[np.dtype(x.dtype).str, list(x.shape[1:])] for x in jax.tree.leaves(self._extras)]
        if want == "extras":  # of a client with a strategy
            return {"type": "policy", "version": acting.version, "extras": extras}
        seats, explore = message.get("seats"), message.get("explore") is True
        if not isinstance(seats, list) or not 0 < len(seats) <= protocol.MOST_STREAMS:
            raise ProtocolError(f"'seats' must be a list of 1 to {protocol.MOST_STREAMS}")
        if not all(type(seat) is int and 0 <= seat < desk.num_seats for seat in seats):
            raise ProtocolError(f"'seats' must be numbers below {desk.num_seats}")
        if message.get("have") == acting.version:
            return {"type": "policy", "version": acting.version}
        state, is_own = desk.of_seats(seats)
        key = len(seats), explore
        if key not in self._programs:
            if len(self._programs) == MOST_PROGRAMS:
                raise ProtocolError("clients with too many different numbers of streams")
            row = desk.agent.empty_env_step(len(seats))
            try:
                program = traced(desk.agent, acting.networks, state, row, explore=explore)
            except UsageError as error:
                raise ProtocolError(str(error)) from None
            except Exception as error:  # of an agent of the user's, for another number of streams
                raise ProtocolError(
                    f"the agent cannot be traced: {text_of(error)}; {REMEDY}"
                ) from None
            self._programs[key] = program
        program = self._programs[key]
        if self._arrays[0] != acting.version:
            leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(acting.networks)]
            self._arrays = acting.version, leaves
        arrays = [
            encode(array) if at >= 0 else None
            for array, at in zip(self._arrays[1], program["inputs"], strict=False)
        ]
        answer = {
            "type": "policy",
            "version": acting.version,
            "arrays": arrays,
            "state": [None if is_key(x) else encode(x) for x in jax.tree.leaves(state)],
        }
        if want == "program":
            answer |= {"program": program, "own": is_own, "extras": extras}
        return answer

    def rows(self, seat: int, message: dict[str, Any]) -> Rows:
        """Read what a client played in a seat's stream.

        Raises:
          ProtocolError: It breaks the protocol.
        """
        desk, count, version = self._desk, message.get("count"), message.get("version")
        if type(count) is not int or not 0 < count <= protocol.MOST_ROWS:
            raise ProtocolError(f"count={count!r} must be from 1 to {protocol.MOST_ROWS}")
        if type(version) is not int:
            raise ProtocolError(f"version={version!r} must be a number")
        parts = desk.observation_of(message, count)
        reward = finite_array_of("reward", message.get("reward"), np.dtype(np.float32), (count,))
        flags = finite_array_of("flags", message.get("flags"), np.dtype(np.uint8), (count,))
        first, ended = (flags & FIRST) > 0, (flags & (TERMINATED | TRUNCATED)) > 0
        in_episode = np.append(desk.in_episode[seat], ~ended[:-1])
        if (first & ended).any() or (~first & ~in_episode).any():
            raise ProtocolError("'flags': an episode begins with FIRST, and ends once")
        # An episode that another follows without an end was cut, unless it is its first row.
        cut = np.append(first[1:], False) & ~(ended | first)
        action, extras = self._acted(message, count)
        acted = ~ended
        space = desk.agent.spec.action_space
        if not all(space.contains(one) for one in action[acted]):
            raise ProtocolError(f"'action' has one that is not in {space}")
        before = np.concatenate([desk.row.prev_action[seat][None], action[:-1]])
        before[first] = 0
        env_step = EnvStep(
            obs=parts[""] if parts.keys() == {""} else parts,
            prev_action=before.astype(desk.row.prev_action.dtype),
            reward=np.where(first, np.float32(0), reward),
            terminated=(flags & TERMINATED) > 0,
            truncated=(ended | cut) & ((flags & TERMINATED) == 0),
            is_first=first,
        )
        state = self._states(seat, message.get("state"), count)
        desk.row.prev_action[seat] = action[-1]
        desk.in_episode[seat] = not ended[-1]
        return Rows(version, env_step, acted, action, extras, state)

    def _acted(self, message: dict[str, Any], count: int) -> tuple[np.ndarray, PyTree]:
        like = self._action
        action = finite_array_of(
            "action", message.get("action"), like.dtype, (count, *like.shape[1:])
        )
        leaves, tree = jax.tree.flatten(self._extras)
        given = message.get("extras")
        if not isinstance(given, list) or len(given) != len(leaves):
            raise ProtocolError(f"'extras' must be a list of {len(leaves)} arrays")
        return action, jax.tree.unflatten(
            tree,
            [
                finite_array_of("extras", one, leaf.dtype, (count, *leaf.shape[1:]))
                for one, leaf in zip(given, leaves, strict=True)
            ],
        )

    def _states(self, seat: int, given: Any, count: int) -> Callable[[int], list[PyTree]]:
        desk, likes = self._desk, self._state_leaves
        if given is None:  # of a fixed strategy
            return lambda row: desk.state_of(seat)
        if not isinstance(given, list) or len(given) != len(likes):
            raise ProtocolError(f"'state' must be a list of {len(likes)} arrays")
        arrays = [
            None
            if is_key(like)
            else finite_array_of(
                "state", one, like.dtype, (count, *like.shape[1:]) if own else like.shape
            )
            for one, like, own in zip(given, likes, self._is_own, strict=True)
        ]

        def before(row: int) -> list[PyTree]:
            leaves, tree = jax.tree.flatten(desk.state_of(seat))
            chosen = [
                leaf if array is None else array[row] if own else array
                for leaf, array, own in zip(leaves, arrays, self._is_own, strict=True)
            ]
            return jax.tree.unflatten(tree, chosen)

        return before
