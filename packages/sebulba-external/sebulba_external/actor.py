"""An actor: plays streams of observations, forwards experience, takes newer policies. No JAX."""

from __future__ import annotations

import ssl
import warnings
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import numpy as np

from sebulba_external import protocol
from sebulba_external.client import Client
from sebulba_external.program import Program, decode
from sebulba_external.protocol import FIRST, TERMINATED, TRUNCATED

Strategy = Callable[[Any], Any]
"""From an observation to an action; or to ``(action, *extras)`` for agents that learn from more,
such as ``(action, raw, log_prob)`` for Impala."""


class Begin(NamedTuple):
    """An episode begins."""

    observation: Any
    """Its first."""


class Step(NamedTuple):
    """The last action led on."""

    reward: float
    """Of it."""
    observation: Any
    """That it led to."""


class End(NamedTuple):
    """The last action led to the end of the episode."""

    reward: float
    """Of it."""
    observation: Any
    """The last."""
    truncated: bool = False
    """The episode was cut short."""


Report = Begin | Step | End


class Actor:
    """Plays one or many streams, such as the agents of a game.

    .. code-block:: python

        with Actor(address, token, streams=2, local=True) as actor:
            actions = actor.act({"left": Begin(x), "right": Begin(y)})
            while playing:
                ...
                actions = actor.act({"left": Step(1.0, x), "right": End(0.0, y)})
                if steps % 32 == 0:
                    actor.sync()

    A *served* actor asks the trainer for every action. A *local* one has the policy itself: it acts
    without a round trip, and ``sync`` sends what it played and takes a newer policy. One with a
    ``strategy`` acts by that instead. With ``explore=False`` it is an evaluation actor: it acts by
    the evaluation policy, and nothing is learned from it.
    """

    def __init__(
        self,
        address: str | None = None,
        token: str = "",
        *,
        streams: int = 1,
        local: bool = False,
        explore: bool = True,
        strategy: Strategy | None = None,
        seed: int | None = None,
        timeout_s: float | None = 60.0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Connect.

        Args:
          address: ``unix:PATH`` or ``HOST:PORT`` of a trainer or of ``sebulba serve``; None for a
            strategy from which nobody learns.
          token: What they want to hear.
          streams: How many play at a time, each in a seat of the trainer.
          local: Have the policy here.
          explore: Act as in training, and forward experience.
          strategy: Acts in place of the policy.
          seed: Of what a local policy draws.
          timeout_s: Longest wait for an answer, or its next piece.
          tls: As for ``Client``.

        Raises:
          ConnectionError: Nobody listens, or the trainer refused.
        """
        if address is None and strategy is None:
            raise ValueError("address=None is for an actor with a strategy; name the trainer")
        if not 0 < streams <= protocol.MOST_STREAMS:
            raise ValueError(f"streams={streams} must be from 1 to {protocol.MOST_STREAMS}; use 1")
        wishes: dict[str, Any] = {"timeout_s": timeout_s, "tls": tls, "explore": explore}
        self._is_local = local or strategy is not None
        self._learns = explore and address is not None
        self._clients: list[Client] = []
        self._streams: dict[Hashable, int] = {}
        self._num_streams = streams
        self.returns: list[float] = []
        """Of the episodes that ended."""
        self._sums = [0.0] * streams
        self.refused = 0
        """Messages with experience that the trainer did not learn from."""
        self._played: _Local | None = None
        self._strategy = strategy
        # One that evaluates locally only asks for the policy.
        count = 0 if address is None else streams if self._learns or not self._is_local else 1
        try:
            for _ in range(count):
                assert address is not None
                self._clients.append(Client(address, token, local=self._is_local, **wishes))
            if self._is_local and address is not None:
                self._played = _Local(self._clients, streams, explore, np.random.default_rng(seed))
                if strategy is not None:
                    self._played.follow()
                else:
                    self._played.take()
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> int:
        """Of the policy that a local actor has; -1 for another."""
        return -1 if self._played is None else self._played.version

    def act(self, reports: Mapping[Hashable, Report]) -> dict[Hashable, Any]:
        """Take what some streams report; return the actions of those whose episodes go on.

        Args:
          reports: By names of streams, which you choose.

        Raises:
          ValueError: More streams than were said; or an observation does not fit.
          ConnectionError: The trainer is gone, or refused.
        """
        at = {name: self._stream(name) for name in reports}
        for name, report in reports.items():
            self._count(at[name], report)
        going = [name for name, report in reports.items() if not isinstance(report, End)]
        if self._strategy is not None:
            return self._by_strategy(at, reports, self._strategy)
        if self._played is not None:
            actions = self._played.act({at[name]: one for name, one in reports.items()})
            return {name: actions[at[name]] for name in going}
        messages = {name: self._message(report) for name, report in reports.items()}
        for name, message in messages.items():  # all fit
            self._clients[at[name]].send(**message)
        return {name: self._clients[at[name]].receive_action() for name in going}

    def _by_strategy(
        self, at: dict, reports: Mapping[Hashable, Report], strategy: Strategy
    ) -> dict[Hashable, Any]:
        answers: dict[Hashable, Any] = {}
        for name, report in reports.items():
            action, extras = None, []
            if not isinstance(report, End):
                answer = strategy(report.observation)
                action, *extras = answer if isinstance(answer, tuple) else (answer,)
                answers[name] = action
            if self._played is not None and self._learns:
                packed = self._clients[0].packed(report.observation)
                self._played.record(at[name], report, packed, action, extras, None)
        return answers

    def sync(self) -> None:
        """Send what was played, and take a newer policy; a served actor has nothing to do."""
        if self._played is None:
            return
        if self._learns:
            words = self._played.send(follows=self._strategy is not None)
            self.refused += len(words)
            for one in words[:1]:
                warnings.warn(f"the trainer did not learn from it: {one}", stacklevel=2)
        if self._strategy is None:
            self._played.take()

    def close(self) -> None:
        """Give the seats back; what was played since the last ``sync`` is lost."""
        for client in self._clients:
            client.close()

    def __enter__(self) -> Actor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _stream(self, name: Hashable) -> int:
        if name not in self._streams:
            if len(self._streams) == self._num_streams:
                raise ValueError(
                    f"stream {name!r} is one more than streams={self._num_streams}: "
                    f"{', '.join(map(repr, self._streams))}"
                )
            self._streams[name] = len(self._streams)
        return self._streams[name]

    def _message(self, report: Report) -> dict[str, Any]:
        """Return what a served actor says."""
        message: dict[str, Any] = {
            "type": type(report).__name__.lower(),
            "observation": self._clients[0].packed(report.observation),
        }
        if not isinstance(report, Begin):
            message["reward"] = float(report.reward)
        if isinstance(report, End):
            message["truncated"] = bool(report.truncated)
        return message

    def _count(self, at: int, report: Report) -> None:
        if isinstance(report, Begin):
            self._sums[at] = 0.0
            return
        self._sums[at] += float(report.reward)
        if isinstance(report, End):
            self.returns.append(self._sums[at])


class _Rows:
    """What one stream played since it was sent, as lists of arrays."""

    def __init__(self) -> None:
        self.observation: dict[str, list[bytes]] = {}
        self.reward: list[float] = []
        self.flags: list[int] = []
        self.action: list[bytes] = []
        self.extras: list[list[bytes]] = []
        self.state: list[list[np.ndarray | None]] = []

    def cut(self, begin: int, end: int) -> dict[str, Any]:
        """Return some rows as the fields of a message."""
        rows = slice(begin, end)
        return {
            "count": len(self.flags[rows]),
            "observation": {name: b"".join(x[rows]) for name, x in self.observation.items()},
            "reward": np.asarray(self.reward[rows], "<f4").tobytes(),
            "flags": bytes(self.flags[rows]),
            "action": b"".join(self.action[rows]),
            "extras": [b"".join(x) for x in zip(*self.extras[rows], strict=True)],
        }


class _Local:
    """The policy on this side: streams are the rows of one batch."""

    def __init__(
        self, clients: list[Client], streams: int, explore: bool, random: np.random.Generator
    ) -> None:
        self.version = -1
        self._clients, self._streams, self._explore = clients, streams, explore
        self._random = random
        welcome = clients[0]
        self._dtype, shape = welcome.action
        self._parts = {
            name: np.zeros((streams, *size), dtype)
            for name, (dtype, size) in sorted(welcome.observation.items())
        }
        self._action = np.zeros((streams, *shape), self._dtype)
        self._reward = np.zeros(streams, np.float32)
        self._is_first = np.zeros(streams, np.bool_)
        self._program: Program | None = None
        self._rows = [_Rows() for _ in range(streams)]
        self._extras_like: list[list] = []

    def follow(self) -> None:
        """Take note of what a row needs, without a policy."""
        self._clients[0].send(type="policy", want="extras")
        answer = self._clients[0].receive("policy")
        self.version, self._extras_like = answer["version"], answer["extras"]

    def take(self) -> None:
        """Take the newest policy, if it is newer."""
        seats = [max(client.seat, 0) for client in self._clients]
        seats += [0] * (self._streams - len(seats))
        first = self._program is None
        want = "program" if first else "arrays"
        self._clients[0].send(
            type="policy", seats=seats, explore=self._explore, have=self.version, want=want
        )
        answer = self._clients[0].receive("policy")
        if answer["version"] == self.version:
            return
        self.version = answer["version"]
        self._arrays = [None if x is None else decode(x) for x in answer["arrays"]]
        state = [np.zeros((), np.uint32) if x is None else decode(x) for x in answer["state"]]
        if first:
            self._program = Program(answer["program"], self._random)
            self._is_own, self._extras_like = answer["own"], answer["extras"]
            self._is_key = [x is None for x in answer["state"]]
            self._state = [np.array(x) for x in state]
            return
        self._state = [
            old if own else new
            for own, old, new in zip(self._is_own, self._state, state, strict=True)
        ]

    def act(self, reports: dict[int, Report]) -> np.ndarray:
        """Return the actions of all streams, ``[B, ...]``; only of those that asked they count."""
        assert self._program is not None
        asked = np.zeros(self._streams, np.bool_)
        packed = {at: self._clients[0].packed(one.observation) for at, one in reports.items()}
        for at, report in reports.items():
            self._write(at, report, packed[at])
            asked[at] = not isinstance(report, End)
        flags = np.zeros(self._streams, np.bool_)
        obs = list(self._parts.values())
        row = (*obs, self._action, self._reward, flags, flags, self._is_first)
        out = self._program(*self._arrays, *self._state, *row)
        action, num = out[0], 1 + len(self._extras_like)

        def chosen(new: np.ndarray, old: np.ndarray) -> np.ndarray:
            return np.where(asked.reshape(-1, *[1] * (new.ndim - 1)), new, old)

        before, self._state = (
            self._state,
            [
                chosen(new, old) if own else new
                for own, new, old in zip(self._is_own, out[num:], self._state, strict=True)
            ],
        )
        self._action = chosen(action, self._action)
        if self._explore:
            for at, report in reports.items():
                extras = [x[at] for x in out[1:num]]
                taken = None if isinstance(report, End) else action[at]
                self.record(at, report, packed[at], taken, extras, before)
        return action

    def _write(self, at: int, report: Report, packed: dict[str, bytes]) -> None:
        is_first = isinstance(report, Begin)
        for name, array in self._parts.items():
            array[at] = protocol.array_of(packed[name], array.dtype.str, array.shape[1:])
        self._is_first[at] = is_first
        self._reward[at] = 0.0 if isinstance(report, Begin) else report.reward
        if is_first:
            self._action[at] = 0

    def record(
        self,
        at: int,
        report: Report,
        packed: dict[str, bytes],
        action: Any,
        extras: list[Any],
        state: list[np.ndarray] | None,
    ) -> None:
        """Keep a row for the trainer."""
        rows = self._rows[at]
        for name, data in packed.items():
            rows.observation.setdefault(name, []).append(data)
        rows.reward.append(0.0 if isinstance(report, Begin) else float(report.reward))
        ended = 0
        if isinstance(report, End):
            ended = TRUNCATED if report.truncated else TERMINATED
        rows.flags.append(FIRST if isinstance(report, Begin) else ended)
        dtype, shape = self._clients[at].action
        given = np.zeros(shape, dtype) if action is None else action
        rows.action.append(protocol.array_bytes(given, dtype, tuple(shape)))
        if len(extras) != len(self._extras_like) and action is not None:
            raise ValueError(
                f"a strategy returned {len(extras)} extras; the agent learns from "
                f"{len(self._extras_like)}: return (action, *extras)"
            )
        if action is None:
            extras = [np.zeros(size, kind) for kind, size in self._extras_like]
        rows.extras.append(
            [
                protocol.array_bytes(x, kind, tuple(size))
                for x, (kind, size) in zip(extras, self._extras_like, strict=True)
            ]
        )
        if state is not None:
            rows.state.append(
                [
                    x[at] if own else None if key else x
                    for x, own, key in zip(state, self._is_own, self._is_key, strict=True)
                ]
            )

    def send(self, *, follows: bool) -> list[str]:
        """Send what was played; return what the trainer says of what it refused.

        Args:
          follows: Rows are of the trainer's version from now on: a strategy made them.
        """
        words = []
        for rows, client in zip(self._rows, self._clients, strict=True):
            for begin in range(0, len(rows.flags), protocol.MOST_ROWS):
                end = begin + protocol.MOST_ROWS
                client.send(
                    type="rows",
                    version=self.version,
                    state=self._packed_state(rows.state[begin:end]),
                    **rows.cut(begin, end),
                )
                answer = client.receive("taken")
                words += [answer["refused"]] * bool(answer["refused"])
                if follows:
                    self.version = answer["version"]
        self._rows = [_Rows() for _ in self._rows]
        return words

    def _packed_state(self, rows: list[list[np.ndarray | None]]) -> list[bytes | None] | None:
        """Return the step state before rows: of each, or the last of what they share."""
        if not rows:
            return None
        return [
            None
            if key
            else b"".join(row[k].tobytes() for row in rows)  # type: ignore[union-attr]
            if own
            else rows[-1][k].tobytes()  # type: ignore[union-attr]
            for k, (own, key) in enumerate(zip(self._is_own, self._is_key, strict=True))
        ]
