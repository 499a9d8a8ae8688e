"""What agents that learn from a data set share: a replay that holds it, and their cycle."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any, Self

import jax
import jax.numpy as jnp

from sebulba.agent import LEARNER_AXIS
from sebulba.agents.bases.off_policy import OffPolicyAgent
from sebulba.agents.replay.transitions_and_sequences import Draw, Replay, TransitionReplay
from sebulba.errors import UsageError
from sebulba.inference.cycle import CyclePrograms
from sebulba.metrics.timer import PhaseTimer
from sebulba.support.checks import require
from sebulba.types import ActionOutput, EnvAdapter, EnvStep, PyTree, RunSpec, Trajectory
from sebulba_offline.cycle import DataCycle, num_trajectories
from sebulba_offline.dataset import load, read_record

TRIES = 4
"""Starts that are drawn for one of a batch; the first that is a transition is taken."""
DATA, ONLINE = 0, 1
"""The rings of a replay that holds data and what the agent did."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataReplay(TransitionReplay):
    """A replay with the data in ring 0 and, once the environment is stepped, its rows in ring 1."""

    dataset: str
    """Folder of the data set."""
    data_share: float | None
    """Share of data in a batch; None where there is nothing else."""

    def num_rows(self, run: RunSpec) -> int:
        """Return R: what holds the data, up to the capacity; with two rings, the capacity."""
        rows_a_trajectory = run.num_envs * run.steps_per_cycle
        most = self.capacity // rows_a_trajectory
        if self.data_share is None:
            with contextlib.suppress(UsageError):  # a policy is loaded where its data are not
                most = min(most, trajectories_of(self.dataset, run))
        return most * run.steps_per_cycle

    def new(self, trajectory: Trajectory, core: PyTree, run: RunSpec) -> Replay:
        """Return an empty store, with its rings in the place of Inferencers."""
        rings = 1 if self.data_share is None else 2
        return super().new(trajectory, core, dataclasses.replace(run, num_inferencers=rings))

    def insert(self, replay: Replay, trajectory: Trajectory, core: PyTree = ()) -> Replay:
        """Take a trajectory into its ring; ``extras`` says which."""
        if self.data_share is not None:
            ring = jnp.where(trajectory.extras[0, 0], DATA, ONLINE)
            trajectory = trajectory._replace(inferencer=ring)
        return super().insert(replay, trajectory, core)

    def draw(self, replay: Replay, key: jax.Array, batch_size: int) -> Draw:
        """Draw this device's share of a batch uniformly, ``data_share`` of it from the data.

        No sum over weights is needed. Rows that are no start are drawn again, ``TRIES`` times in
        all; what is then none has probability 0.
        """
        num = batch_size // jax.lax.axis_size(LEARNER_AXIS)
        filled = replay.steps_per_cycle * jnp.minimum(replay.trajectories, replay.cycle.shape[1])
        ring = jnp.zeros(num, jnp.int32)
        if self.data_share is not None:
            is_online = jnp.arange(num) >= round(self.data_share * num)
            has_data, has_online = filled[DATA] > 0, filled[ONLINE] > 0
            ring = jnp.where((is_online & has_online) | ~has_data, ONLINE, DATA)
        row_key, env_key = jax.random.split(key)
        num_envs = replay.weight.shape[2]
        row = jax.random.randint(row_key, (TRIES, num), 0, jnp.maximum(filled[ring], 1)[None])
        env = jax.random.randint(env_key, (TRIES, num), 0, num_envs)
        is_start = replay.weight[ring[None], row, env] > 0
        first = jnp.argmax(is_start, axis=0)[None]
        row, env, is_drawn = (
            jnp.take_along_axis(x, first, axis=0)[0] for x in (row, env, is_start)
        )
        share = 1.0 / jnp.maximum(filled[ring] * num_envs, 1)
        cycle = replay.cycle[ring, row // replay.steps_per_cycle]
        return Draw(ring, row, env, cycle, jnp.where(is_drawn, share, 0.0))


def trajectories_of(dataset: str, run: RunSpec) -> int:
    """Return how many trajectories hold a data set."""
    rows = int(read_record(dataset)["rows"])
    return num_trajectories(rows, run.num_envs * run.steps_per_cycle)


class LearnsFromData(OffPolicyAgent):
    """An agent of transitions whose configuration has ``DataFields``: the first base of such."""

    config: Any
    _run: RunSpec | None = None

    def hold_data(self) -> None:
        """Give the agent its replay; the last thing that a constructor does."""
        config, fields = self.config, dataclasses.fields(TransitionReplay)
        self.replay = DataReplay(
            **{field.name: getattr(self.replay, field.name) for field in fields},
            dataset=config.dataset,
            data_share=None if config.online_after_env_steps is None else config.data_share,
        )

    def check_run(self, run: RunSpec) -> None:
        """Check that there is a data set, and a single Inferencer to read it."""
        require(
            self.config.dataset != "",
            "agent.dataset",
            "",
            "must be the folder of a data set",
            "record one with sebulba dataset record RUN --out DIR, and give --agent.dataset DIR",
        )
        read_record(self.config.dataset)
        if run.num_inferencers * run.num_hosts != 1:
            raise UsageError(
                f"{run.num_inferencers * run.num_hosts} Inferencers cannot read one data set; use "
                "--num-inferencers-per-device 1 and one inference device"
            )
        super().check_run(run)

    def for_run(self, run: RunSpec) -> Self:
        there = super().for_run(run)
        there._run = run
        there.__dict__.pop("_cycles_of_data", None)
        return there

    @functools.cached_property
    def _cycles_of_data(self) -> int:
        return 1 if self._run is None else trajectories_of(self.config.dataset, self._run)

    def num_off_policy_optims_per_cycle(self, cycle: int) -> int:
        """Return the updates that are due; none until the replay holds all of the data."""
        return 0 if cycle < self._cycles_of_data else super().num_off_policy_optims_per_cycle(cycle)

    def make_cycle(
        self, env: EnvAdapter, programs: CyclePrograms, device: jax.Device, timer: PhaseTimer
    ) -> DataCycle:
        """Return a cycle that reads the data set."""
        online_after = self.config.online_after_env_steps
        if online_after is not None:
            run = programs.run
            cycles = -(-online_after // (run.num_envs * run.steps_per_cycle))
            online_after = max(cycles, trajectories_of(self.config.dataset, run))
        dataset = load(self.config.dataset)
        return DataCycle(dataset, env, programs, device, timer, online_after=online_after)

    def step(
        self, networks: PyTree, step_state: Any, env_step: EnvStep, *, explore: bool = True
    ) -> tuple[ActionOutput, Any]:
        """Act; where the replay has two rings, ``extras`` say that this is no data."""
        act: Any = super().step  # type: ignore[safe-super]
        output, step_state = act(networks, step_state, env_step, explore=explore)
        if self.config.online_after_env_steps is not None:
            output = output._replace(extras=jnp.zeros(env_step.is_first.shape, jnp.bool_))
        return output, step_state
