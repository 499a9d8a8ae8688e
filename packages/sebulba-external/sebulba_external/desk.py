"""Where observations arrive and actions are chosen: one row a seat."""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from sebulba.agent import Agent
from sebulba.support.trees import KeyData, is_key
from sebulba.types import EnvStep, PyTree
from sebulba_external import protocol
from sebulba_external.protocol import ProtocolError

if TYPE_CHECKING:
    from sebulba_external.local import LocalPolicies

MOST_REWARD = float(np.finfo(np.float32).max)
REPORTS = ("begin", "step", "end")
"""Messages of a client that has a seat."""


class Answer(NamedTuple):
    """What the policy chose in one call, leaves ``[B, ...]``; only rows that asked count."""

    action: np.ndarray
    """Actions, ``[B, *action_shape]``."""
    extras: PyTree
    """``ActionOutput.extras``."""
    version: int
    """Of the networks."""


class Acting(NamedTuple):
    """What acts."""

    version: int
    """Of the networks; rises."""
    networks: PyTree
    """Acting networks."""


class Desk:
    """Acts for those seats that ask; the recurrent state of the others waits."""

    def __init__(self, agent: Agent, num_seats: int, step_state: PyTree, *, explore: bool) -> None:
        """Act with ``agent``.

        Args:
          agent: The algorithm.
          num_seats: B.
          step_state: Of B environments; copied.
          explore: Act as in training, not as the evaluation policy, in seats that do not say.
        """
        self.agent = agent
        self.num_seats = num_seats
        self.acting = Acting(0, None)
        """What acts from the next call on; replace it as a whole."""
        self.explores_by_default = explore
        self.explores = np.full(num_seats, explore)
        """Seats that act as in training."""
        row: EnvStep = jax.tree.map(np.array, agent.empty_env_step(num_seats))
        dtype = jax.dtypes.canonicalize_dtype(row.prev_action.dtype)
        self.row = row._replace(prev_action=row.prev_action.astype(dtype))
        """The latest row of each seat, which ``report`` writes."""
        self.in_episode = np.zeros(num_seats, np.bool_)
        """Seats whose episode has begun and not ended."""
        is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
        spec = agent.step_state_spec()
        self._is_own = [tuple(x) != () for x in jax.tree.leaves(spec, is_leaf=is_spec)]
        self._spec = jax.tree.structure(spec, is_leaf=is_spec)
        self._keys = KeyData(step_state)
        self._step_state = self._keys.unwrap(jax.tree.map(jnp.copy, step_state))
        self._rows = 0
        """Rows since the last step of all seats."""
        self._act = jax.jit(self._act_for_some, donate_argnums=1, static_argnames="explore")

    @property
    def parts(self) -> dict[str, np.ndarray]:
        """Observations ``[B, ...]`` by part; an observation without parts is the part ""."""
        obs = self.row.obs
        return obs if isinstance(obs, dict) else {"": obs}

    @functools.cached_property
    def local(self) -> LocalPolicies:
        """What clients that act themselves get of it, and give."""
        from sebulba_external.local import LocalPolicies

        return LocalPolicies(self)

    @property
    def longest_frame(self) -> int:
        """Most bytes of a message that reports."""
        sizes = (
            part[0].nbytes + len(name.encode()) + protocol.SPARE_BYTES_A_PART
            for name, part in self.parts.items()
        )
        return sum(sizes) + protocol.SPARE_BYTES

    def shapes(self) -> dict[str, Any]:
        """Return what a client has to know of observations and actions."""
        action = self.row.prev_action
        parts = self.parts.items()
        return {
            "observation": {name: [x.dtype.str, list(x.shape[1:])] for name, x in parts},
            "action": [action.dtype.str, list(action.shape[1:])],
        }

    def observation_of(self, message: dict[str, Any], *rows: int) -> dict[str, np.ndarray]:
        """Return the observation in a message, ``[*rows, ...]``, by part.

        Raises:
          ProtocolError: It does not fit, or is not finite.
        """
        given = message.get("observation")
        if not isinstance(given, dict) or given.keys() != self.parts.keys():
            raise ProtocolError(f"'observation' must be a map with the parts {sorted(self.parts)}")
        return {
            name: protocol.finite_array_of(
                f"the observation {name!r}", given[name], like.dtype, (*rows, *like.shape[1:])
            )
            for name, like in self.parts.items()
        }

    def report(self, seat: int, message: dict[str, Any]) -> None:
        """Write what a client reports into its row.

        Raises:
          ProtocolError: It breaks the protocol; nothing is written.
        """
        kind = message["type"]
        if kind not in REPORTS:
            raise ProtocolError(f"type={kind!r} is unknown; use {', '.join(REPORTS)}")
        is_first, is_end = kind == "begin", kind == "end"
        if not is_first and not self.in_episode[seat]:
            raise ProtocolError(f"{kind!r} came outside of an episode; send 'begin' first")
        obs = self.observation_of(message)
        reward = 0.0 if is_first else _finite(message.get("reward"))
        row, is_cut = self.row, message.get("truncated") is True
        for name, part in self.parts.items():
            part[seat] = obs[name]
        row.reward[seat], row.is_first[seat] = reward, is_first
        row.terminated[seat], row.truncated[seat] = is_end and not is_cut, is_end and is_cut
        if is_first:
            row.prev_action[seat] = 0
        self.in_episode[seat] = not is_end

    def answer(self, asked: np.ndarray) -> Answer:
        """Act in the rows of the seats in ``asked [B]`` bool, which all explore, or none does."""
        row = jax.tree.map(np.copy, self.row)  # JAX may alias what it is given
        explore = bool(self.explores[asked].all()) if asked.any() else self.explores_by_default
        self._rows += int(asked.sum()) * explore
        is_step = np.bool_(self._rows >= self.num_seats)
        self._rows -= self.num_seats * int(is_step)
        version, networks = self.acting
        action, extras, self._step_state = self._act(
            networks, self._step_state, row, asked, is_step, explore=explore
        )
        chosen, extras = jax.tree.map(np.asarray, (action, extras))
        answer = Answer(chosen, extras, version)
        self.row.prev_action[asked] = answer.action[asked]
        return answer

    def count(self, rows: int) -> None:
        """Have exploration go on by ``rows`` that a client acted in itself."""
        self._rows += rows
        steps, self._rows = divmod(self._rows, self.num_seats)
        if steps:
            wrapped = self._keys.wrap(self._step_state)
            self._step_state = self._keys.unwrap(self.agent.advance_step_state(wrapped, steps))

    def _act_for_some(
        self,
        networks: PyTree,
        step_state: PyTree,
        row: EnvStep,
        asked: jax.Array,
        is_step: jax.Array,
        *,
        explore: bool,
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Act; a count that all seats share rises when as many rows were acted in as there are."""
        wrapped = self._keys.wrap(step_state)
        output, new = self.agent.act(networks, wrapped, row, explore=explore)

        def chosen(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(asked.reshape(-1, *[1] * (new.ndim - 1)), new, old)

        def counted(new: jax.Array, old: jax.Array) -> jax.Array:
            is_count = not is_key(new) and jnp.issubdtype(new.dtype, jnp.integer)
            return jnp.where(is_step, new, old) if is_count else new

        unwrap = self._keys.unwrap
        parts = [
            jax.tree.map(chosen, unwrap(n), unwrap(o))
            if own
            else unwrap(jax.tree.map(counted, n, o))
            for own, n, o in zip(self._is_own, self._split(new), self._split(wrapped), strict=True)
        ]
        return output.action, output.extras, jax.tree.unflatten(self._spec, parts)

    def state_of(self, seat: int) -> list[PyTree]:
        """Return the step state in parts, on the host: a seat's rows, and what all seats share."""
        pairs = zip(self._is_own, self._split(self._step_state), strict=True)
        of_seat = operator.itemgetter(seat)
        return [
            jax.tree.map(lambda x, own=own: of_seat(np.array(x)) if own else np.array(x), part)
            for own, part in pairs
        ]

    def step_state(self, parts: list[PyTree], newest: int) -> PyTree:
        """Return the step state of B ``state_of``, ``[B, ...]``; what seats share is the newest."""
        of_newest = operator.itemgetter(newest)
        shared = (
            part if own else jax.tree.map(of_newest, part)
            for own, part in zip(self._is_own, parts, strict=True)
        )
        leaves = jax.tree.map(jnp.array, list(shared))
        return self._keys.wrap(jax.tree.unflatten(self._spec, leaves))

    def of_seats(self, seats: list[int]) -> tuple[PyTree, list[bool]]:
        """Return the step state for some seats, with typed keys, and which leaves have rows."""
        leaves: list[Any] = []
        is_own: list[bool] = []
        for own, part in zip(self._is_own, self._split(self._step_state), strict=True):
            for leaf in jax.tree.leaves(part):
                array = np.array(leaf)
                leaves.append(array[seats] if own else array)
                is_own.append(own)
        state = jax.tree.unflatten(jax.tree.structure(self._step_state), leaves)
        return self._keys.wrap(state), is_own

    def _split(self, step_state: PyTree) -> list[PyTree]:
        """Return the parts of a step state for which the agent's spec has an entry each."""
        return self._spec.flatten_up_to(step_state)  # type: ignore[attr-defined]


def _finite(reward: Any) -> float:
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        raise ProtocolError(f"reward={reward!r} must be a number")
    if not abs(reward) <= MOST_REWARD:
        raise ProtocolError(f"reward={reward!r} must be a finite number of 32 bits")
    return float(reward)
