"""The trainer's side: clients take seats, and their experience trains the networks."""

from __future__ import annotations

import contextlib
import functools
import operator
import queue
import threading
from typing import Any

import gymnasium
import jax
import numpy as np

import sebulba
from sebulba.agents.bases.off_policy import OffPolicyAgent
from sebulba.inference.cycle import CyclePrograms
from sebulba.metrics.timer import PhaseTimer
from sebulba.transport.item import Item
from sebulba.types import EnvAdapter, PyTree
from sebulba_external.columns import Column, ColumnJoiner, SeatColumns
from sebulba_external.desk import Answer, Desk
from sebulba_external.listener import WAKE_S, Listener, Watcher
from sebulba_external.simulators import Simulators

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


class Seats:
    """Seats for clients, and a cycle that they drive, for ``GymnasiumLoop(cycle=seats.cycle)``.

    There are as many seats as environments. Whoever asks is answered, in one call of the policy for
    all who ask at once; a client that is slow costs the others nothing. A trajectory is made of the
    next B columns that are complete, from whichever seats.

    .. code-block:: python

        with Seats("unix:/tmp/seats") as seats:
            env = ExternalEnv(observation_space, action_space)
            loop = GymnasiumLoop(lambda: env, agent, num_envs=8, cycle=seats.cycle, ...)
            loop.train(total_env_steps=500_000, steps_per_cycle=32)
    """

    def __init__(self, address: str = "127.0.0.1:0", *, token: str | None = None) -> None:
        """Listen at ``unix:PATH`` or ``HOST:PORT``; see ``Listener``."""
        self.listener = Listener(address, token)
        self._cycle: ServedCycle | None = None

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
        """``Listener.counts``, and how many columns the update was too slow for."""
        dropped = 0 if self._cycle is None else self._cycle.columns_dropped
        return self.listener.counts | {"columns_dropped": dropped}

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
        self._cycle = ServedCycle(self.listener, env.num_envs, programs, timer)
        return self._cycle

    def close(self) -> None:
        """Stop to answer, and close all connections."""
        self.listener.close()

    def __enter__(self) -> Seats:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class ServedCycle(Watcher):
    """A cycle whose clients are answered in a thread of its own, and that collects their rows."""

    kind = "served"

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
        is_off_policy = isinstance(programs.agent, OffPolicyAgent)
        self._joiner = ColumnJoiner(num_seats, marks_seams=is_off_policy)
        self.columns_dropped = 0
        self._desk: Desk | None = None
        self.use(programs)
        self._columns = [self._new_columns() for _ in range(num_seats)]

    def use(self, programs: CyclePrograms) -> None:
        """Use other programs from the next cycle on."""
        self._programs = programs

    def _new_columns(self) -> SeatColumns:
        programs = self._programs
        return SeatColumns(programs.shapes, programs.run.steps_per_cycle)

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
        desk = self._desk_with(networks, step_state)
        columns: list[tuple[int, Column]] = []
        steps = self._programs.run.steps_per_cycle
        with self._timer.phase("take"):  # a wait for clients is no hang
            while len(columns) < self._num_seats:
                self._listener.check()
                if self._simulators is not None:
                    self._simulators.check()
                if stop.is_set():
                    return None, step_state
                with contextlib.suppress(queue.Empty):
                    seat, column = self._complete.get(timeout=WAKE_S)
                    if column.num_steps == steps:  # else of an earlier run
                        columns.append((seat, column))
        with self._timer.phase("finish"):
            trajectory, initial, final, infos, newest = self._joiner.joined(columns)
            # The desk goes on with a state of its own; the third is for checkpoints.
            states = [desk.step_state(parts, newest) for parts in (initial, final, final)]
            return Item(trajectory, states[0], states[1], infos), states[2]

    def _desk_with(self, networks: PyTree, step_state: PyTree) -> Desk:
        """Return the desk, which acts with ``networks`` from now on."""
        if self._desk is not None:
            self._desk.networks = networks
            return self._desk
        self._desk = desk = Desk(self._programs.agent, self._num_seats, step_state, explore=True)
        desk.networks = networks
        self._listener.start(desk, self)
        return desk

    # What the listener reports, in the thread that answers.

    def reported(self, seat: int) -> None:
        """Add a row to the seat's column."""
        assert self._desk is not None
        if self._columns[seat].num_steps != self._programs.run.steps_per_cycle:
            old, new = self._columns[seat], self._new_columns()
            new.number = old.number + 1  # a gap: what it writes continues nothing
            self._columns[seat] = new  # here, since no row of the seat waits for its action
        if self._simulators is not None:  # in this thread, since an update may take long
            self._simulators.seated = self._listener.counts["welcomed"]
        row = jax.tree.map(operator.itemgetter(seat), self._desk.row)
        column = self._columns[seat].add(row, functools.partial(self._desk.state_of, seat))
        if column is not None:
            self._keep(seat, column)
        if not self._desk.in_episode[seat]:
            self._columns[seat].act(None, None)

    def answered(self, asked: np.ndarray, answer: Answer) -> None:
        """Add what was chosen to the columns."""
        for seat in np.flatnonzero(asked):
            chosen = jax.tree.map(operator.itemgetter(seat), answer)
            self._columns[seat].act(chosen.action, chosen.extras)

    def left(self, seat: int) -> None:
        """Cut the episode."""
        self._columns[seat].cut()

    def _keep(self, seat: int, column: Column) -> None:
        while self._complete.qsize() >= COLUMNS_A_SEAT * self._num_seats:
            with contextlib.suppress(queue.Empty):
                self._complete.get_nowait()
                self.columns_dropped += 1
        self._complete.put((seat, column))
