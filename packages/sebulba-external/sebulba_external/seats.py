"""The trainer's side: clients take seats, and their experience trains the networks."""

from __future__ import annotations

import contextlib
import functools
import operator
import queue
import ssl
import threading
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import numpy as np

import sebulba
from sebulba.agents.bases.off_policy import OffPolicyAgent
from sebulba.agents.impala import Impala
from sebulba.inference.cycle import CyclePrograms
from sebulba.metrics.timer import PhaseTimer
from sebulba.transport.item import Item
from sebulba.transport.staging import Staging
from sebulba.types import PyTree
from sebulba_external.columns import Column, ColumnJoiner, SeatColumns
from sebulba_external.desk import Acting, Answer, Desk
from sebulba_external.environments import spec_like
from sebulba_external.listener import WAKE_S, Listener, Watcher
from sebulba_external.local import Rows
from sebulba_external.simulators import Simulators

COLUMNS_A_SEAT = 4
"""Columns a seat that wait for the update; beyond them the oldest are dropped, and counted."""
OLDEST_ON_POLICY = 2
"""Versions that an agent without a correction for older policies may be behind."""
DRIVEN = "clients drive the environment"
SHOWN = ("welcomed", "resumed", "refused", "broke_off", "rows_refused")
"""Counts of a listener that are metrics."""
A_RUN = 1 << 32
"""Versions of one run; clients see its number and the version in one number."""


class Seats:
    """Seats for clients, as the environment of a ``GymnasiumLoop``.

    There are as many seats as environments. Whoever asks is answered, in one call of the policy for
    all who ask at once; a client that is slow costs the others nothing. A trajectory is made of the
    next B columns that are complete, from whichever seats.

    .. code-block:: python

        with Seats("CartPole-v1", "unix:/tmp/seats") as seats:
            agent = Impala(seats.spec, ImpalaConfig())
            loop = GymnasiumLoop(seats, agent, num_envs=8, num_inferencers_per_device=1, ...)
            loop.train(total_env_steps=500_000, steps_per_cycle=32)
    """

    def __init__(
        self,
        like: Any,
        address: str = "127.0.0.1:0",
        *,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        command: str = "",
        simulators: int = 0,
    ) -> None:
        """Listen at ``unix:PATH`` or ``HOST:PORT``.

        Args:
          like: What has the spaces of the clients: an ``EnvSpec``, or an environment as
            ``make_env_factory`` takes it, which is never stepped.
          address: A port of 0 takes a free one.
          token: Clients have to say it; None makes one.
          tls: Of the server's side, with its certificate, to encrypt TCP.
          command: Starts simulators, see ``Simulators``; "" starts none.
          simulators: How many at a time; 0 is one for each seat.

        Raises:
          UsageError: An environment of many agents, or an address as ``Listener`` refuses it.
        """
        self.spec = spec_like(like)
        """Of one client."""
        self.listener = Listener(address, token, tls)
        self.command, self.num_simulators = command, simulators
        self._vector: SeatsVector | None = None

    @property
    def address(self) -> str:
        """Where clients connect."""
        return self.listener.address

    @property
    def token(self) -> str:
        """What clients have to say."""
        return self.listener.token

    @property
    def counts(self) -> dict[str, int]:
        """``listener.COUNTS``, and how many columns the update was too slow for."""
        cycle = None if self._vector is None else self._vector.cycle
        return self.listener.counts | {"columns_dropped": cycle.columns_dropped if cycle else 0}

    def __call__(self, num_envs: int, seeds: list[int]) -> SeatsVector:
        """Make the vector environment of the one Inferencer; its number is that of the seats.

        Raises:
          UsageError: A second Inferencer; or a command that cannot be read.
        """
        if self._vector is not None and not self._vector.is_closed:
            raise sebulba.UsageError(
                "seats are served by one Inferencer; use num_inferencers_per_device=1 and one "
                "inference device"
            )
        self._vector = SeatsVector(self, seeds)
        return self._vector

    def close(self) -> None:
        """Stop to answer, and close all connections."""
        self.listener.close()

    def __enter__(self) -> Seats:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class SeatsVector:
    """The adapter of seats: it cannot be stepped, and brings its cycle."""

    closes_seats = False
    """Whether nobody else closes the seats."""

    def __init__(self, seats: Seats, seeds: list[int]) -> None:
        """Start the simulators, if there is a command."""
        self.spec, self.num_envs = seats.spec, len(seeds)
        self._seats = seats
        self.cycle: ServedCycle | None = None
        """What serves the seats."""
        self.is_closed = False
        self._simulators: Simulators | None = None
        if seats.command:
            count = seats.num_simulators or self.num_envs
            where = seats.address, seats.token
            self._simulators = Simulators(seats.command, count, *where, seeds)

    def make_cycle(
        self, programs: CyclePrograms, device: jax.Device, timer: PhaseTimer
    ) -> ServedCycle:
        """Return the cycle that clients drive."""
        listener = self._seats.listener
        self.cycle = ServedCycle(listener, self.num_envs, programs, timer, self._simulators)
        return self.cycle

    @staticmethod
    def metrics_of(vectors: Sequence[SeatsVector]) -> dict[str, float]:
        """Return the metrics of the seats of all vectors; docs/external.md names them."""
        seats = [vector._seats for vector in vectors]
        listeners = [one.listener for one in seats]
        counts = {name: sum(one.counts[name] for one in seats) for name in seats[0].counts}
        starts = [0 if one._simulators is None else one._simulators.restarts for one in vectors]
        taken = [second for one in listeners for second in one.latencies.copy()]
        metrics = {
            "seats/clients": sum(one.num_clients for one in listeners),
            "seats/requests_per_batch": counts["asked"] / max(1, counts["batches"]),
            "seats/simulator_restarts": sum(starts),
            **{f"seats/{name}": counts[name] for name in (*SHOWN, "columns_dropped")},
        }
        for q, name in ((0.5, "p50"), (0.99, "p99")):
            metrics |= {f"seats/answer_{name}_ms": 1e3 * float(np.quantile(taken or [0.0], q))}
        return metrics

    def reset(self) -> NoReturn:
        """Raise: clients begin episodes."""
        raise sebulba.EnvError(
            "clients drive the environment; it cannot be reset and stepped. To see what a policy "
            "does, serve it to them: sebulba serve RUN"
        )

    def step(self, action: Any) -> NoReturn:
        """Raise: clients step."""
        self.reset()

    def fused(self) -> str:
        """Return why there is no fused cycle."""
        return DRIVEN

    def state(self) -> str:
        """Return why it cannot be saved."""
        return DRIVEN

    def put_back(self, state: bytes) -> NoReturn:
        """Raise: see ``state``."""
        self.reset()

    def close(self) -> None:
        """Kill the simulators and close the connections."""
        self.is_closed = True
        if self._simulators is not None:
            self._simulators.close()
        if self.closes_seats:
            self._seats.close()
        else:
            self._seats.listener.stop()


class ServedCycle(Watcher):
    """A cycle whose clients are answered in a thread of its own, and that collects their rows."""

    kind = "served"
    staging: Staging | None = None
    """Where newer networks come, which act from the next request on; set by the loop."""
    policy_version: int | None = None
    """Of the oldest networks that acted in the trajectory that was made last, if it is known."""

    def __init__(
        self,
        listener: Listener,
        num_seats: int,
        programs: CyclePrograms,
        timer: PhaseTimer,
        simulators: Simulators | None = None,
    ) -> None:
        """Serve ``num_seats`` clients of ``listener``; ``simulators`` are some, if not None."""
        self._simulators = simulators
        self._listener, self._num_seats, self._timer = listener, num_seats, timer
        self._complete: queue.Queue[tuple[int, Column]] = queue.Queue()
        agent = programs.agent
        self._joiner = ColumnJoiner(num_seats, marks_seams=isinstance(agent, OffPolicyAgent))
        corrects = isinstance(agent, OffPolicyAgent | Impala)
        self.most_lag = A_RUN if corrects else OLDEST_ON_POLICY
        """Versions that what a client acted in itself may be old."""
        self.columns_dropped = 0
        self._desk: Desk | None = None
        self._run = 0
        """Number of the run: what is left of one before is not learned from."""
        self.use(programs)
        self._columns = [self._new_columns() for _ in range(num_seats)]
        self._has_gap = np.zeros(num_seats, np.bool_)

    def use(self, programs: CyclePrograms) -> None:
        """Use other programs from the next cycle on."""
        self._programs = programs
        self._run += 1

    def _new_columns(self, number: int = -1) -> SeatColumns:
        columns = SeatColumns(self._programs.shapes, self._programs.run.steps_per_cycle)
        columns.run, columns.number = self._run, number
        return columns

    def reset(self) -> None:
        """Begin a run: what clients played before is not learned from."""
        self._run += 1

    def position(self) -> str:
        """Return why the environment cannot be saved."""
        return DRIVEN

    def put_back(self, position: bytes) -> None:
        """Raise: see ``position``."""
        raise sebulba.EnvError("clients drive the environment; they begin new episodes")

    def run(
        self, networks: PyTree, step_state: PyTree, stop: threading.Event
    ) -> tuple[Item | None, PyTree]:
        """Wait for B columns; see ``Cycle.run``."""
        desk = self._desk_with(networks, step_state)
        columns: list[tuple[int, Column]] = []
        with self._timer.phase("take"):  # a wait for clients is no hang
            while len(columns) < self._num_seats:
                self._listener.check()
                if self._simulators is not None:
                    self._simulators.check()
                if stop.is_set():
                    return None, step_state
                with contextlib.suppress(queue.Empty):
                    seat, column = self._complete.get(timeout=WAKE_S)
                    if column.version >> 32 == self._run:
                        columns.append((seat, column))
                self._renew(networks)
        with self._timer.phase("finish"):
            trajectory, initial, final, infos, newest = self._joiner.joined(columns)
            if self.staging is not None:
                self.policy_version = min(column.version for _, column in columns) % A_RUN
            # The desk goes on with a state of its own; the third is for checkpoints.
            states = [desk.step_state(parts, newest) for parts in (initial, final, final)]
            return Item(trajectory, states[0], states[1], infos), states[2]

    def _renew(self, networks: PyTree) -> None:
        """Act with the newest networks that there are."""
        assert self._desk is not None
        acting, version = self._desk.acting, self._run * A_RUN
        newest = None if self.staging is None else self.staging.newest()
        if newest is not None:
            version, networks = version + newest.policy_version, newest.networks
        elif acting.version >= version:  # nobody says which
            version = acting.version + (networks is not acting.networks)
        if version != acting.version:
            jax.block_until_ready(networks)
            self._desk.acting = Acting(version, networks)

    def _desk_with(self, networks: PyTree, step_state: PyTree) -> Desk:
        """Return the desk, which acts with ``networks``, or newer ones, from now on."""
        is_new = self._desk is None
        if self._desk is None:
            agent = self._programs.agent
            self._desk = Desk(agent, self._num_seats, step_state, explore=True)
        self._renew(networks)
        if is_new:
            self._listener.start(self._desk, self)
        return self._desk

    # What the listener reports, in the thread that answers.

    def _columns_of(self, seat: int) -> SeatColumns:
        """Return the seat's columns, new ones in a new run."""
        columns = self._columns[seat]
        if columns.run != self._run:  # here, since no row of the seat waits for its action
            columns = self._new_columns(columns.number + 1)  # a gap: it continues nothing
            self._columns[seat] = columns
        if self._simulators is not None:  # in this thread, since an update may take long
            self._simulators.seated = self._listener.counts["welcomed"]
        return columns

    def reported(self, seat: int) -> None:
        """Add a row to the seat's column."""
        assert self._desk is not None
        columns = self._columns_of(seat)
        if not self._desk.explores[seat]:
            return
        row = jax.tree.map(operator.itemgetter(seat), self._desk.row)
        self._keep(seat, columns.add(row, functools.partial(self._desk.state_of, seat)))
        if not self._desk.in_episode[seat]:
            columns.act(None)

    def answered(self, asked: np.ndarray, answer: Answer) -> None:
        """Add what was chosen to the columns."""
        assert self._desk is not None
        for seat in np.flatnonzero(asked & self._desk.explores):
            action, extras = jax.tree.map(operator.itemgetter(seat), answer[:2])
            self._columns[seat].act(action, extras, answer.version)

    def played(self, seat: int, rows: Rows) -> str:
        """Add what a client acted in itself, if it is not too old."""
        assert self._desk is not None
        columns, newest = self._columns_of(seat), self._desk.acting.version
        lag = newest - rows.version
        if not 0 <= lag <= self.most_lag or rows.version >> 32 != self._run:
            columns.cut()
            self._has_gap[seat] = True
            agent = type(self._programs.agent).__name__
            return (
                f"rows were acted in with version {rows.version % A_RUN} of the policy, and the "
                f"newest is {newest % A_RUN}; {agent} takes those that are at most {self.most_lag} "
                "old, of the same run. Call sync() more often, or train Impala or an agent with a "
                "replay"
            )
        begin = 0
        if self._has_gap[seat]:  # what comes after a gap continues nothing
            begin = int(not rows.acted[0])
            for leaf in (rows.env_step.reward, rows.env_step.prev_action):
                leaf[begin : begin + 1] = 0
            rows.env_step.is_first[begin : begin + 1] = True
            self._has_gap[seat] = begin == len(rows.acted)
        for at in range(begin, len(rows.acted)):
            row, action, extras = jax.tree.map(
                operator.itemgetter(at), (rows.env_step, rows.action, rows.extras)
            )
            self._keep(seat, columns.add(row, functools.partial(rows.state, at)))
            columns.act(action if rows.acted[at] else None, extras, rows.version)
        self._desk.count(int(rows.acted.sum()))
        return ""

    def left(self, seat: int) -> None:
        """Cut the episode."""
        self._columns[seat].cut()

    def _keep(self, seat: int, column: Column | None) -> None:
        if column is None:
            return
        while self._complete.qsize() >= COLUMNS_A_SEAT * self._num_seats:
            with contextlib.suppress(queue.Empty):
                self._complete.get_nowait()
                self.columns_dropped += 1
        self._complete.put((seat, column))
