"""The store of a replay: a ring of rows per Inferencer, environments split over update devices.

Row r of a ring holds ``EnvStep`` r and what was done there. A trajectory of T transitions writes
its rows 0 to T-1; its row T is row 0 of the same Inferencer's next trajectory and comes with that.
A *start* is where a transition or a sequence may begin. Its weight is above 0 exactly while all
rows that it needs are in the store, one after the other: none overwritten, none yet to come, no
trajectory missing between (a gap in ``cycle``), no frame stack that cannot be rebuilt.

All functions are pure and run inside the agent's, where arrays are this device's shard and the
axis ``"learner"`` is bound. The loop donates the store, so a ring is written in place.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from sebulba.agent import LEARNER_AXIS
from sebulba.agents.configs import ReplayConfig
from sebulba.agents.kernels.normalization import ObservationNormalizer, new_observations
from sebulba.agents.replay.frame_stack import (
    STACK_SPEC,
    StackState,
    new_stack_state,
    rebuild,
    take_apart,
)
from sebulba.agents.replay.sampling import draw_in_proportion
from sebulba.errors import UsageError
from sebulba.support.checks import check_divisible
from sebulba.types import COMMON, EnvSpec, EnvStep, FinalObs, PyTree, RunSpec, Trajectory

MIN_PRIORITY = 1e-6
"""Smaller priorities count as this: a start of weight 0 would never be drawn again."""


class Rows(NamedTuple):
    """What is kept of each row, ``[J, R, B, ...]``: an ``EnvStep`` and the action taken there."""

    obs: PyTree
    """Observations; where frames are stacked the newest frame only. ``COMMON`` may have a row for
    each environment only (``ReplayLayout.slots``)."""
    action: PyTree
    """Action taken in this row."""
    extras: PyTree
    """``ActionOutput.extras`` of that action."""
    reward: jax.Array
    """Consequence of the action of the row before, as are the flags."""
    terminated: jax.Array
    """``EnvStep.terminated``."""
    truncated: jax.Array
    """``EnvStep.truncated``."""
    is_first: jax.Array
    """``EnvStep.is_first``."""
    final: FinalObs | tuple[()] = ()
    """``EnvStep.final``; its observations are kept whole."""

    @property
    def consequences(self) -> EnvStep:
        """Reward and flags as an ``EnvStep``, without observations and action."""
        step = EnvStep((), (), *self[3:])  # type: ignore[arg-type]
        return step._replace(final=step.final._replace(obs=())) if step.final else step


class Replay(NamedTuple):
    """The store: J Inferencers, R rows each in S = R / T trajectories, B environments."""

    rows: Rows
    """``[J, R, B, ...]``."""
    core: PyTree
    """Recurrent state before the first row of each trajectory, ``[J, S, B, ...]``."""
    prev_action: PyTree
    """Action before that row, ``[J, S, B, ...]``; ``()`` for transitions."""
    stack: StackState | tuple[()]
    """What rebuilds frame stacks; ``()`` where frames are not stacked."""
    weight: jax.Array
    """``[J, starts, B]`` float32: ``priority ** priority_exponent``, 0 where none can start."""
    cycle: jax.Array
    """``[J, S]`` int32: cycle of the trajectory in each place; negative where there is none."""
    trajectories: jax.Array
    """``[J]`` int32: trajectories inserted so far; modulo S, the place of the next one."""
    stream: jax.Array
    """``[J]`` int32: trajectories since the last gap, including the newest, at most S."""
    max_priority: jax.Array
    """Scalar: the largest priority so far, at least 1; new starts get it."""
    statistics: PyTree = ()
    """Running statistics of all observations that were inserted, overwritten ones too, the same on
    all devices (see ``ObservationNormalizer``); ``()`` where none are normalised."""

    @property
    def num_rows(self) -> int:
        """R."""
        return self.rows.reward.shape[1]

    @property
    def steps_per_cycle(self) -> int:
        """T."""
        return self.num_rows // self.cycle.shape[1]


class Draw(NamedTuple):
    """N starts, ``[N]``, of this device's shard."""

    inferencer: jax.Array
    """Inferencer whose environment it is."""
    row: jax.Array
    """Row of the ring where the start is."""
    env: jax.Array
    """Environment, counted on this device."""
    cycle: jax.Array
    """Cycle of the trajectory of this row, which tells later whether it was overwritten."""
    probability: jax.Array
    """Probability that a draw of the whole batch takes this start: its share of this device's
    weights, divided by the number of devices. 0 where nothing could be drawn."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayLayout(abc.ABC):
    """How rows are kept and drawn; a subclass says what a start is."""

    capacity: int
    """Environment steps that are kept, over all Inferencers of all hosts; rounded down to whole
    trajectories."""
    priority_exponent: float = 0.0
    """Draws are in proportion to ``priority ** priority_exponent``; 0 is uniform."""
    frame_stack: int = 0
    """K where observations are ``[K, H, W]`` stacks (``EnvSpec.frame_stack``): frames are kept
    once and stacks rebuilt (see ``frame_stack.py``). 0 keeps observations as they are."""
    slots: int = 1
    """A where A rows side by side are of one environment: ``obs[COMMON]``, which they share, is
    kept once for each environment."""
    normalizer: ObservationNormalizer | None = None
    """What counts the statistics of observations; they are kept as they came all the same."""

    @classmethod
    def of(cls, spec: EnvSpec, config: ReplayConfig, **sizes: Any) -> Self:
        """Return the layout for observations of ``spec``; ``sizes`` are the subclass's own."""
        return cls(
            capacity=config.capacity,
            priority_exponent=config.priority_exponent if config.prioritized else 0.0,
            frame_stack=spec.frame_stack,
            **sizes,
        )

    # What a subclass decides.

    @property
    @abc.abstractmethod
    def rows_of_start(self) -> int:
        """Rows that must follow each other until the first of them can be drawn."""

    @abc.abstractmethod
    def rows_between_starts(self, steps_per_cycle: int) -> int:
        """Return the number of rows from one start to the next."""

    @abc.abstractmethod
    def gathered(self, replay: Replay, draw: Draw, discount: float) -> PyTree:
        """Return what begins at ``draw``, as losses get it.

        Args:
          replay: Read only.
          draw: N starts.
          discount: Factor of the rewards of a transition, per environment step.
        """

    @abc.abstractmethod
    def gathered_spec(self) -> PyTree:
        """Return a prefix tree of PartitionSpecs that say which axis of ``gathered`` is N."""

    def may_start(self, replay: Replay, inferencer: jax.Array, rows: jax.Array) -> jax.Array:
        """Return which rows may be starts once all that they need is there, ``[rows, B]``."""
        return jnp.ones((len(rows), replay.weight.shape[2]), jnp.bool_)

    def kept_prev_action(self, trajectory: Trajectory) -> PyTree:
        """Return the action before row 0 of a trajectory, ``[B, ...]``, if it is kept."""
        return ()

    # Before the run.

    def check_run(self, run: RunSpec, batch_size: int) -> None:
        """Check that the capacity holds a start, and that devices draw equal shares of a batch.

        Raises:
          UsageError: They do not.
        """
        steps, row_size = run.steps_per_cycle, run.num_envs_in_all
        # The newest trajectory, the rows that its first starts need before it, and the rows whose
        # frame stacks are incomplete because older frames were overwritten.
        needed = steps + self.rows_of_start - 1 + max(self.frame_stack - 1, 0)
        needed = -(-needed // steps) * steps * row_size
        if self.num_rows(run) * row_size < needed:
            hosts = f"{run.num_hosts} hosts x " if run.num_hosts > 1 else ""
            raise UsageError(
                f"capacity={self.capacity} must be at least {needed} env steps: a draw spans "
                f"{self.rows_of_start} rows, and {hosts}{run.num_inferencers} Inferencers x "
                f"{run.num_envs} environments insert trajectories of {steps}; use {needed} or more"
            )
        devices = run.num_update_devices * run.num_hosts
        check_divisible("batch_size", batch_size, devices, f"the {devices} update devices")

    def num_rows(self, run: RunSpec) -> int:
        """Return R: the capacity in whole trajectories of each Inferencer."""
        steps = run.steps_per_cycle
        return self.capacity // (run.num_envs_in_all * steps) * steps

    def new(self, trajectory: Trajectory, core: PyTree, run: RunSpec) -> Replay:
        """Return an empty store in global shapes.

        Args:
          trajectory: An example (``Agent.empty_trajectory``), ``[T+1, B, ...]``.
          core: An example of the recurrent state of one Inferencer, ``[B, ...]``, or ``()``.
          run: Sizes; they have passed ``check_run``.
        """
        num_rows, count, steps = self.num_rows(run), run.num_inferencers, run.steps_per_cycle
        rows, stack = self._kept(trajectory), ()
        if self.frame_stack:
            example = jax.ShapeDtypeStruct(rows.obs.shape[2:], rows.obs.dtype)
            stack = new_stack_state(count, num_rows, run.num_envs, example)  # type: ignore[assignment]
            rows = rows._replace(obs=rows.obs[:, :, -1])

        def zeros(number: int, tree: PyTree) -> PyTree:
            return jax.tree.map(lambda x: jnp.zeros((count, number, *x.shape), x.dtype), tree)

        return Replay(
            rows=zeros(num_rows, jax.tree.map(lambda x: x[0], rows)),
            core=zeros(num_rows // steps, core),
            prev_action=zeros(num_rows // steps, self.kept_prev_action(trajectory)),
            stack=stack,
            weight=jnp.zeros((count, num_rows // self.rows_between_starts(steps), run.num_envs)),
            cycle=jnp.full((count, num_rows // steps), -2, jnp.int32),
            trajectories=jnp.zeros((count,), jnp.int32),
            stream=jnp.zeros((count,), jnp.int32),
            max_priority=jnp.float32(1),
            statistics=self.new_statistics(),
        )

    def spec(self) -> Replay:
        """Return a prefix tree of PartitionSpecs: environments are split, counters replicated."""
        split: PyTree = P(None, None, LEARNER_AXIS)
        same: PyTree = P()
        stack = STACK_SPEC if self.frame_stack else ()
        return Replay(split, split, split, stack, split, same, same, same, same, same)

    # In the update.

    def insert(self, replay: Replay, trajectory: Trajectory, core: PyTree = ()) -> Replay:
        """Take one trajectory in, over the oldest of the same Inferencer.

        Starts that this trajectory completes get the largest priority so far.

        Args:
          replay: Donated by the loop; written in place.
          trajectory: This device's shard, ``[T+1, B, ...]``.
          core: Recurrent state before row 0, ``[B, ...]``; ``()`` if ``new`` was given that.
        """
        j = jnp.asarray(trajectory.inferencer, jnp.int32)
        num_places = replay.cycle.shape[1]
        place = replay.trajectories[j] % num_places
        head = place * replay.steps_per_cycle
        goes_on = trajectory.cycle == replay.cycle[j, (place - 1) % num_places] + 1
        rows, stack = self._kept(trajectory), replay.stack
        if isinstance(stack, StackState):
            frames, stack = take_apart(stack, rows.obs, j, head, goes_on)
            rows = rows._replace(obs=frames)

        def write(into: PyTree, what: PyTree, at: jax.Array) -> PyTree:
            def one(leaf: jax.Array, new: jax.Array) -> jax.Array:
                where = (j, at) + (jnp.zeros_like(j),) * (leaf.ndim - 2)
                return jax.lax.dynamic_update_slice(leaf, new[None].astype(leaf.dtype), where)

            return jax.tree.map(one, into, what)

        before = jax.tree.map(lambda x: x[None], (core, self.kept_prev_action(trajectory)))
        core, prev_action = write((replay.core, replay.prev_action), before, place)
        stream = jnp.where(goes_on, jnp.minimum(replay.stream[j] + 1, num_places), 1)
        replay = replay._replace(
            rows=write(replay.rows, rows, head),
            core=core,
            prev_action=prev_action,
            stack=stack,
            cycle=replay.cycle.at[j, place].set(trajectory.cycle),
            trajectories=replay.trajectories.at[j].add(1),
            stream=replay.stream.at[j].set(stream),
            statistics=self.counted(replay.statistics, trajectory),
        )
        return replay._replace(weight=self._weigh(replay, j, head))

    def _weigh(self, replay: Replay, inferencer: jax.Array, head: jax.Array) -> jax.Array:
        """Return the weights after a trajectory was written from row ``head`` on."""
        between, num_rows = self.rows_between_starts(replay.steps_per_cycle), replay.num_rows
        # Starts that this trajectory completes, and after them those that still lack rows.
        complete, lack = replay.steps_per_cycle // between, (self.rows_of_start - 1) // between
        window = head + between * (jnp.arange(complete + lack) - lack)
        rows = window[:complete] % num_rows
        rows_before = (replay.stream[inferencer] - 1) * replay.steps_per_cycle
        can_start = (window[:complete] >= head - rows_before)[:, None]
        can_start &= self.may_start(replay, inferencer, rows)
        if isinstance(replay.stack, StackState):
            needed = (rows[:, None] + jnp.arange(self.rows_of_start)[None]) % num_rows
            built = replay.stack.code[inferencer, needed] < self.frame_stack
            can_start &= jnp.all(built, axis=1)
        new = jnp.where(can_start, replay.max_priority**self.priority_exponent, 0.0)
        new = jnp.concatenate([new, jnp.zeros((lack, new.shape[1]))])
        weight = replay.weight.at[inferencer, window % num_rows // between].set(new)
        if isinstance(replay.stack, StackState):
            # The oldest starts, whose older frames have just been overwritten.
            ages = jnp.arange(0, self.frame_stack - 1, between)
            oldest = (head + replay.steps_per_cycle + ages) % num_rows
            keeps = replay.stack.code[inferencer, oldest] <= ages[:, None]
            weight = weight.at[inferencer, oldest // between].multiply(keeps)
        return weight

    def new_statistics(self) -> PyTree:
        """Return statistics of no observation; ``()`` where none are normalised."""
        return self.normalizer.new() if self.normalizer else ()

    def counted(self, statistics: PyTree, trajectory: Trajectory) -> PyTree:
        """Return the statistics with the observations of this device's shard, ``[T+1, B, ...]``."""
        if not self.normalizer:
            return statistics
        for obs, counts in new_observations(trajectory.env_step):
            statistics = self.normalizer.update(statistics, obs, counts)
        return statistics

    def draw(self, replay: Replay, key: jax.Array, batch_size: int) -> Draw:
        """Draw this device's share of a batch from its own shard, with replacement.

        Args:
          replay: Read only.
          key: Typed key that differs by device.
          batch_size: Of all devices together, a multiple of their number; static.
        """
        devices = jax.lax.axis_size(LEARNER_AXIS)
        weight = replay.weight.reshape(-1)
        index, total = draw_in_proportion(key, weight, batch_size // devices)
        j, start, env = jnp.unravel_index(index, replay.weight.shape)
        row = start * self.rows_between_starts(replay.steps_per_cycle)
        share = weight[index] / jnp.where(total > 0, total, 1.0)
        cycle = replay.cycle[j, row // replay.steps_per_cycle]
        return Draw(j, row, env, cycle, share / devices)

    def set_priority(self, replay: Replay, draw: Draw, priority: jax.Array) -> Replay:
        """Set the priorities of starts; one that can no longer be drawn keeps weight 0.

        Args:
          replay: Donated by the loop.
          draw: Of this replay; trajectories may have been inserted since.
          priority: ``[N]``, at least 0; smaller ones count as ``MIN_PRIORITY``. Where it is not
            finite (the update is then skipped), the start keeps its priority.
        """
        if not self.priority_exponent:
            return replay
        priority = jnp.asarray(jax.lax.stop_gradient(priority), replay.max_priority.dtype)
        priority = jnp.maximum(priority, MIN_PRIORITY)
        start = draw.row // self.rows_between_starts(replay.steps_per_cycle)
        index = (draw.inferencer, start, draw.env)
        old = replay.weight[index]
        cycle = replay.cycle[draw.inferencer, draw.row // replay.steps_per_cycle]
        is_there = (cycle == draw.cycle) & (old > 0) & jnp.isfinite(priority)
        new = jnp.where(is_there, priority**self.priority_exponent, old)
        # A start drawn twice gets the larger priority: the order of a scatter is not defined.
        weight = replay.weight.at[index].set(jnp.where(is_there, 0.0, old)).at[index].max(new)
        largest = jax.lax.pmax(jnp.max(jnp.where(is_there, priority, 0.0)), LEARNER_AXIS)
        return replay._replace(
            weight=weight,
            max_priority=jnp.maximum(replay.max_priority, largest),
        )

    def importance_weights(self, replay: Replay, draw: Draw, exponent: float) -> jax.Array:
        """Return ``(1 / (size P)) ** exponent``, divided by the largest of the whole batch.

        Source: Schaul et al. 2016 (arXiv 1511.05952), section 3.4.

        Args:
          replay: As it was drawn from.
          draw: N starts.
          exponent: Beta, static; 0 gives ones.

        Returns:
          ``[N]`` in [0, 1]; 0 where nothing could be drawn.
        """
        is_drawn = draw.probability > 0
        if not exponent:  # without counting the starts
            return is_drawn.astype(jnp.float32)
        expected = self.size(replay) * jnp.where(is_drawn, draw.probability, 1.0)
        weight = jnp.where(is_drawn, expected**-exponent, 0.0)
        largest = jax.lax.pmax(jnp.max(weight), LEARNER_AXIS)
        return (weight / jnp.where(largest > 0, largest, 1.0)).astype(jnp.float32)

    def size(self, replay: Replay) -> jax.Array:
        """Return the number of starts on all devices, scalar float32."""
        return jax.lax.psum(jnp.sum(replay.weight > 0, dtype=jnp.float32), LEARNER_AXIS)

    def inserted(self, replay: Replay) -> jax.Array:
        """Return the number of rows inserted so far on all devices, scalar float32."""
        num_envs = replay.weight.shape[2] * jax.lax.axis_size(LEARNER_AXIS)
        trajectories = jnp.sum(replay.trajectories, dtype=jnp.float32)
        return trajectories * (replay.steps_per_cycle * num_envs)

    def obs_at(self, replay: Replay, index: tuple[jax.Array, ...]) -> PyTree:
        """Return the observations at (inferencer, row, env), each ``[...]``, as inserted."""
        if isinstance(replay.stack, StackState):
            return rebuild(replay.rows.obs, replay.stack.code, index, self.frame_stack)
        if self.slots == 1:
            return rows_at(replay.rows.obs, index)
        own = {name: part for name, part in replay.rows.obs.items() if name != COMMON}
        inferencer, row, env = index
        shared = rows_at(replay.rows.obs[COMMON], (inferencer, row, env // self.slots))
        return {**rows_at(own, index), COMMON: shared}

    def _kept(self, trajectory: Trajectory) -> Rows:
        """Return what is kept of rows 0 to T-1; frame stacks are whole."""
        step = jax.tree.map(lambda x: jnp.asarray(x)[:-1], trajectory.env_step)
        done = trajectory.action, trajectory.extras
        flags = step.terminated, step.truncated, step.is_first
        rows = Rows(step.obs, *done, step.reward, *flags, step.final)
        if self.slots == 1:
            return rows
        shared = jax.tree.map(lambda x: x[:, :: self.slots], rows.obs[COMMON])
        return rows._replace(obs={**rows.obs, COMMON: shared})


def rows_at(tree: PyTree, index: tuple[jax.Array, ...]) -> PyTree:
    """Return rows of leaves ``[J, R, B, ...]``; the index is inside."""
    return jax.tree.map(lambda x: x.at[index].get(mode="promise_in_bounds"), tree)
