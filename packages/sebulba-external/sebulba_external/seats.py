"""Seats: clients connect, ask for actions, and their experience trains the networks."""

from __future__ import annotations

import contextlib
import hmac
import operator
import os
import queue
import secrets
import selectors
import socket
import threading
import time
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import sebulba
from sebulba.agents.bases.off_policy import OffPolicyAgent
from sebulba.inference.cycle import CyclePrograms
from sebulba.metrics.timer import PhaseTimer
from sebulba.transport.item import Item
from sebulba.types import EnvAdapter, PyTree
from sebulba_external import protocol
from sebulba_external.columns import Column, Places, SeatColumns
from sebulba_external.protocol import ProtocolError

LOOPBACK = ("localhost", "127.0.0.1", "::1")
MOST_CONNECTIONS = 256
HELLO_WITHIN_S = 5.0
"""A connection has to say hello, and end a frame that it began, within so many seconds."""
WAKE_S = 0.05
COLUMNS_A_SEAT = 4
"""Columns a seat that wait for the update; beyond them the oldest are dropped, and counted."""


class ExternalEnv(gymnasium.Env):
    """The spaces of an environment that clients drive; the trainer never steps it."""

    def __init__(self, observation_space: gymnasium.Space, action_space: gymnasium.Space) -> None:
        """Take the spaces of the clients' observations and actions."""
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, **_: Any) -> Any:
        """Raise: clients begin episodes."""
        raise sebulba.EnvError("clients begin the episodes of an ExternalEnv; it cannot be reset")

    def step(self, action: Any) -> Any:
        """Raise: clients step."""
        raise sebulba.EnvError("clients step an ExternalEnv; it cannot be stepped")


class _Connection:
    """A client: its socket, what of a frame has come, and its seat."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.data = bytearray()
        self.due = time.monotonic() + HELLO_WITHIN_S
        """When it is dropped, unless a hello or the rest of a frame comes; 0: never."""
        self.seat: int | None = None


class Seats:
    """The trainer's side: a cycle for ``GymnasiumLoop(cycle=seats.cycle)``.

    There are as many seats as environments. Whoever asks is answered, in one call of the policy for
    all who ask at once; a client that is slow costs the others nothing. A trajectory is made of the
    next B columns that are complete, from whichever seats.

    .. code-block:: python

        with Seats("unix:/tmp/seats") as seats:
            env = ExternalEnv(observation_space, action_space)
            loop = GymnasiumLoop(env, agent, num_envs=8, cycle=seats.cycle, ...)
            loop.train(total_env_steps=500_000, steps_per_cycle=32)
    """

    def __init__(self, address: str = "127.0.0.1:0", *, token: str | None = None) -> None:
        """Listen at ``unix:PATH`` or ``HOST:PORT``; 0 takes a free port.

        Args:
          address: Clients connect here. They are welcomed once the policy is compiled.
          token: Clients have to say it; None makes one.

        Raises:
          UsageError: An address beyond this machine with an empty token.
        """
        self.token = secrets.token_urlsafe(24) if token is None else token
        is_local = address.startswith("unix:") or address.rpartition(":")[0] in LOOPBACK
        if not self.token and not is_local:
            raise sebulba.UsageError(
                f"address={address!r} is open to other machines, and token is empty; "
                "leave token out to have one made"
            )
        self._listener, self.address = _listen(address)
        self.counts = {"asked": 0, "batches": 0, "refused": 0, "vanished": 0, "columns_dropped": 0}
        """What happened: requests, calls of the policy, clients refused, episodes cut because the
        client was gone, columns that the update was too slow for."""
        self._closed = threading.Event()
        self._cycle: ServedCycle | None = None

    def cycle(
        self, env: EnvAdapter, programs: CyclePrograms, device: jax.Device, timer: PhaseTimer
    ) -> ServedCycle:
        """Make the cycle; one Inferencer serves all seats.

        Raises:
          UsageError: A second Inferencer.
        """
        if self._cycle is not None:
            raise sebulba.UsageError(
                "seats are served by one Inferencer; use num_inferencers_per_device=1 and one "
                "inference device"
            )
        self._cycle = ServedCycle(self, env, programs, timer)
        return self._cycle

    def close(self) -> None:
        """Stop to answer, and close all connections."""
        self._closed.set()
        if self._cycle is not None:
            self._cycle.join()
        self._listener.close()
        if self.address.startswith("unix:"):
            with contextlib.suppress(OSError):
                os.unlink(self.address.removeprefix("unix:"))

    def __enter__(self) -> Seats:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _listen(address: str) -> tuple[socket.socket, str]:
    """Return a listening socket and its address; a Unix socket is open to its owner alone."""
    if address.startswith("unix:"):
        path = address.removeprefix("unix:")
        listener = socket.socket(socket.AF_UNIX)
        before = os.umask(0o177)
        try:
            listener.bind(path)
        finally:
            os.umask(before)
    else:
        host, _, port = address.rpartition(":")
        listener = socket.create_server((host, int(port)))
        address = f"{host}:{listener.getsockname()[1]}"
    listener.listen(MOST_CONNECTIONS)
    listener.setblocking(False)
    return listener, address


class ServedCycle:
    """A cycle that answers clients in a thread of its own, and collects what they do."""

    kind = "served"

    def __init__(
        self, seats: Seats, env: EnvAdapter, programs: CyclePrograms, timer: PhaseTimer
    ) -> None:
        """Serve ``env.num_envs`` seats."""
        self._seats, self._env, self._timer = seats, env, timer
        self._num_seats = env.num_envs
        self._complete: queue.Queue[tuple[int, Column]] = queue.Queue()
        self._networks: list = []
        self._places = Places(env.num_envs, marks_seams=isinstance(programs.agent, OffPolicyAgent))
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._step_state: PyTree = None
        self.use(programs)

    def use(self, programs: CyclePrograms) -> None:
        """Use other programs from the next cycle on."""
        self._programs = programs
        spec = programs.agent.step_state_spec()
        is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
        self._is_own = [tuple(x) != () for x in jax.tree.leaves(spec, is_leaf=is_spec)]
        self._spec = jax.tree.structure(spec, is_leaf=is_spec)
        self._act = jax.jit(self._act_for_some, donate_argnums=1)
        self.columns = [
            SeatColumns(programs.shapes, programs.run.steps_per_cycle)
            for _ in range(self._num_seats)
        ]

    def reset(self) -> None:
        """Do nothing: clients begin episodes."""

    def position(self) -> str:
        """Return why the environment cannot be saved."""
        return "clients drive the environment"

    def put_back(self, position: bytes) -> None:
        """Raise: see ``position``."""
        raise sebulba.EnvError("clients drive the environment; they begin new episodes")

    def run(
        self, networks: PyTree, step_state: PyTree, stop: threading.Event
    ) -> tuple[Item | None, PyTree]:
        """Wait for B columns; see ``Cycle.run``."""
        self._networks = jax.tree.leaves(networks)
        if self._thread is None:
            self._step_state = self._programs.keys.unwrap(self._programs.copy(step_state))
            self._thread = threading.Thread(target=self._serve, name="seats", daemon=True)
            self._thread.start()
        columns: list[tuple[int, Column]] = []
        with self._timer.phase("take"):  # a wait for clients is no hang
            while len(columns) < self._num_seats:
                if self._error is not None:
                    raise self._error
                if stop.is_set():
                    return None, step_state
                with contextlib.suppress(queue.Empty):
                    columns.append(self._complete.get(timeout=WAKE_S))
        with self._timer.phase("finish"):
            trajectory, initial, final, infos = self._places.joined(columns)
            initial, final = self._with_own(step_state, initial), self._with_own(step_state, final)
            return Item(trajectory, initial, final, infos), step_state

    def join(self) -> None:
        """Wait for the thread that answers, which ends when the seats are closed."""
        if self._thread is not None:
            self._thread.join()

    # The rows of the step state that belong to seats

    def _parts(self, step_state: PyTree) -> list[PyTree]:
        """Return the parts of a step state for which the agent's spec has an entry each."""
        return self._spec.flatten_up_to(step_state)  # type: ignore[attr-defined]

    def _act_for_some(
        self, networks: list, step_state: PyTree, leaves: list, asked: jax.Array
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Act for all seats; only those that asked get another recurrent state."""
        action, extras, new = self._programs.act_once(networks, step_state, leaves)

        def chosen(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(asked.reshape(-1, *[1] * (new.ndim - 1)), new, old)

        pairs = zip(self._is_own, self._parts(new), self._parts(step_state), strict=True)
        parts = [jax.tree.map(chosen, n, o) if own else n for own, n, o in pairs]
        return action, extras, jax.tree.unflatten(self._spec, parts)

    def _own(self, seat: int) -> list[PyTree]:
        """Return a seat's rows of the step state, on the host."""
        pairs = zip(self._is_own, self._parts(self._step_state), strict=True)
        return [jax.tree.map(lambda x: np.asarray(x)[seat].copy(), p) for own, p in pairs if own]

    def _with_own(self, step_state: PyTree, own: list[PyTree]) -> PyTree:
        """Return a copy of ``step_state`` with rows ``[B, ...]`` in the place of its own."""
        rows = iter(own)
        pairs = zip(self._is_own, self._parts(self._programs.copy(step_state)), strict=True)
        parts = [jax.tree.map(jnp.asarray, next(rows)) if own else part for own, part in pairs]
        return jax.tree.unflatten(self._spec, parts)

    # The thread that answers

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            try:
                self._row = self._programs.agent.empty_env_step(self._num_seats)
                self._row = jax.tree.map(np.array, self._row)
                self._answer(np.zeros(self._num_seats, np.bool_))  # compiles
                self._taken: dict[int, _Connection] = {}
                selector.register(self._seats._listener, selectors.EVENT_READ)
                while not self._seats._closed.is_set():
                    self._poll(selector)
            except BaseException as error:
                self._error = error
            finally:
                for key in list(selector.get_map().values()):
                    if key.data is not None:
                        key.data.socket.close()

    def _poll(self, selector: selectors.BaseSelector) -> None:
        asking: list[_Connection] = []
        for key, _ in selector.select(WAKE_S):
            if key.data is None:
                self._accept(selector)
                continue
            try:
                if self._read(key.data):
                    asking.append(key.data)
            except (ProtocolError, OSError) as error:
                self._drop(selector, key.data, error)
        self._drop_late(selector)
        if asking:
            asked = np.zeros(self._num_seats, np.bool_)
            asked[[client.seat for client in asking if client.seat is not None]] = True
            actions = self._answer(asked)
            for client in asking:
                data = actions[client.seat].astype(self._action.newbyteorder("<")).tobytes()
                try:
                    client.socket.sendall(protocol.pack({"type": "action", "action": data}))
                except OSError as error:
                    self._drop(selector, client, error)
            self._seats.counts["asked"] += len(asking)
            self._seats.counts["batches"] += 1

    def _answer(self, asked: np.ndarray) -> np.ndarray:
        """Act in the latest rows of the seats that asked; return actions ``[B, ...]``."""
        leaves = [leaf.copy() for leaf in jax.tree.leaves(self._row)]  # JAX may alias them
        action, extras, self._step_state = self._act(
            self._networks, self._step_state, leaves, asked
        )
        action, extras = jax.tree.map(np.asarray, (action, extras))
        self._action = action.dtype
        for seat in np.flatnonzero(asked):
            self.columns[seat].act(action[seat], jax.tree.map(operator.itemgetter(seat), extras))
            self._row.prev_action[seat] = action[seat]
        return action

    def _accept(self, selector: selectors.BaseSelector) -> None:
        connection, _ = self._seats._listener.accept()
        if len(selector.get_map()) > MOST_CONNECTIONS:
            connection.close()
            self._seats.counts["refused"] += 1
            return
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        selector.register(connection, selectors.EVENT_READ, _Connection(connection))

    def _drop_late(self, selector: selectors.BaseSelector) -> None:
        now = time.monotonic()
        late = [k.data for k in selector.get_map().values() if k.data and 0 < k.data.due < now]
        for client in late:
            self._drop(selector, client, ProtocolError("no whole message came in time"))

    def _drop(
        self, selector: selectors.BaseSelector, client: _Connection, error: Exception
    ) -> None:
        """Close a connection, after a word about why; its episode is cut."""
        if isinstance(error, ProtocolError):
            self._seats.counts["refused"] += 1
            with contextlib.suppress(OSError):
                client.socket.sendall(protocol.pack({"type": "error", "message": str(error)}))
        selector.unregister(client.socket)
        client.socket.close()
        if client.seat is not None:
            if self.columns[client.seat].in_episode:
                self._seats.counts["vanished"] += 1
                self.columns[client.seat].cut()
            del self._taken[client.seat]

    def _read(self, client: _Connection) -> bool:
        """Take what has come; return whether the client asks for an action."""
        data = client.socket.recv(1 << 16)
        if not data:
            raise ConnectionError("closed")
        client.data += data
        asks = False
        while len(client.data) >= protocol.LENGTH.size:
            (length,) = protocol.LENGTH.unpack_from(client.data)
            if length > self._longest():
                raise ProtocolError(
                    f"a frame has {length} bytes; at most {self._longest()} are allowed"
                )
            end = protocol.LENGTH.size + length
            if len(client.data) < end:
                break
            if asks:
                raise ProtocolError("a message came before the last one was answered")
            asks = self._handle(client, protocol.unpack(bytes(client.data[4:end])))
            del client.data[:end]
        is_pending = client.seat is None or bool(client.data)
        client.due = (client.due or time.monotonic() + HELLO_WITHIN_S) if is_pending else 0
        return asks

    def _longest(self) -> int:
        parts = jax.tree.leaves(self._row.obs)
        return sum(part[0].nbytes for part in parts) + protocol.SPARE_BYTES

    def _handle(self, client: _Connection, message: dict[str, Any]) -> bool:
        kind = message["type"]
        if client.seat is None:
            if kind != "hello":
                raise ProtocolError(f"the first message is {kind!r}; it must be 'hello'")
            self._welcome(client, message)
            return False
        if kind not in ("begin", "step", "end"):
            raise ProtocolError(f"type={kind!r} is unknown; use begin, step or end")
        columns, seat = self.columns[client.seat], client.seat
        if kind == "begin":
            columns.cut()
        elif not columns.in_episode:
            raise ProtocolError(f"{kind!r} came outside of an episode; send 'begin' first")
        is_end, is_cut = kind == "end", message.get("truncated") is True
        row = self._row
        for name, array in self._obs_parts().items():
            array[seat] = self._part_of(message, name, array)
        row.reward[seat] = 0.0 if kind == "begin" else _finite(message.get("reward"))
        row.is_first[seat] = kind == "begin"
        row.terminated[seat], row.truncated[seat] = is_end and not is_cut, is_end and is_cut
        if kind == "begin":
            row.prev_action[seat] = 0
        column = columns.add(jax.tree.map(lambda x: x[seat], row), self._own(seat))
        if column is not None:
            self._keep(seat, column)
        if is_end:
            columns.act(None, None)
        return not is_end

    def _keep(self, seat: int, column: Column) -> None:
        while self._complete.qsize() >= COLUMNS_A_SEAT * self._num_seats:
            with contextlib.suppress(queue.Empty):
                self._complete.get_nowait()
                self._seats.counts["columns_dropped"] += 1
        self._complete.put((seat, column))

    def _obs_parts(self) -> dict[str, np.ndarray]:
        obs = self._row.obs
        return obs if isinstance(obs, dict) else {"": obs}

    def _part_of(self, message: dict[str, Any], name: str, like: np.ndarray) -> np.ndarray:
        given = message.get("observation")
        if not isinstance(given, dict) or given.keys() != self._obs_parts().keys():
            raise ProtocolError(
                f"'observation' must be a map with the parts {sorted(self._obs_parts())}"
            )
        part = protocol.array_of(given[name], like.dtype.str, like.shape[1:])
        if part.dtype.kind == "f" and not np.isfinite(part).all():
            raise ProtocolError(f"the observation {name!r} has a value that is not finite")
        return part

    def _welcome(self, client: _Connection, message: dict[str, Any]) -> None:
        token, version = message.get("token"), message.get("version")
        if not isinstance(token, str) or not hmac.compare_digest(
            token.encode(), self._seats.token.encode()
        ):
            raise ProtocolError("the token is wrong")
        if version != protocol.VERSION:
            raise ProtocolError(f"version={version!r}; this trainer has {protocol.VERSION}")
        free = sorted(set(range(self._num_seats)) - self._taken.keys())
        if not free:
            raise ProtocolError(f"all {self._num_seats} seats are taken")
        client.seat = free[0]
        self._taken[client.seat] = client
        parts = self._obs_parts().items()
        action = self._row.prev_action
        welcome = {
            "type": "welcome",
            "version": protocol.VERSION,
            "seat": client.seat,
            "observation": {name: [x.dtype.str, list(x.shape[1:])] for name, x in parts},
            "action": [action.dtype.str, list(action.shape[1:])],
        }
        client.socket.sendall(protocol.pack(welcome))


def _finite(reward: Any) -> float:
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not np.isfinite(reward):
        raise ProtocolError(f"reward={reward!r} must be a finite number")
    return float(reward)
