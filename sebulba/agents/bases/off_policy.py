"""What agents that learn from a replay share: storage, ratio of updates, target networks."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Generic, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
import optax

from sebulba.agent import Agent
from sebulba.agents.bases.normalization import ActingNetworks
from sebulba.agents.configs.off_policy import OffPolicyConfig
from sebulba.agents.configs.replay import Schedule
from sebulba.agents.kernels.normalization import ObservationNormalizer
from sebulba.agents.nets.torso import has_convolutions
from sebulba.agents.replay.frame_stack import StackState
from sebulba.agents.replay.remote_sample import DrawnLayout
from sebulba.agents.replay.store import Draw, Replay, ReplayLayout
from sebulba.agents.replay.transitions_and_sequences import Transition
from sebulba.errors import UsageError
from sebulba.support.platforms import cond_on_cpu
from sebulba.types import EnvSpec, EnvStep, FinalObs, PyTree, RunSpec, Trajectory

ConfigT = TypeVar("ConfigT", bound=OffPolicyConfig)
ReplayT = TypeVar("ReplayT", bound=ReplayLayout)


class Opt(NamedTuple):
    """What ``optimize`` writes; the same on all update devices."""

    optimizer: PyTree
    """State of the optimizer."""
    target: PyTree
    """Target networks, laid out as ``OffPolicyAgent.with_target`` returns them."""
    updates: jax.Array
    """Updates so far, int32."""


class OffPolicyAgent(Agent[ConfigT], Generic[ConfigT, ReplayT]):
    """An agent whose experience is a replay; a subclass adds networks, ``step`` and ``loss``."""

    def __init__(
        self,
        spec: EnvSpec,
        config: ConfigT,
        replay: ReplayT,
        optimizer: optax.GradientTransformation,
    ) -> None:
        """Take the components. A subclass describes its networks before it calls this.

        Raises:
          UsageError: An observation space that the networks cannot take.
        """
        super().__init__(spec, config)
        self.normalizer = ObservationNormalizer(
            spec.policy_spec.observation_space, config.torso, is_on=config.normalize_observations
        )
        self.replay = dataclasses.replace(replay, normalizer=self.normalizer)
        self.optimizer = optimizer
        self._schedule: Schedule | None = None
        # An observation space that does not fit raises here and not later in a thread.
        networks = jax.eval_shape(self.new_networks, jax.eval_shape(jax.random.key, 0))
        self.updates_in_one_program = not has_convolutions(networks)

    # What a subclass may override.

    def with_target(self, networks: PyTree) -> PyTree:
        """Return the part of ``networks`` that has a target network."""
        return networks

    def acting_part(self, networks: PyTree) -> PyTree:
        """Return the part of ``networks`` that acts."""
        return networks

    def recurrent_state(self, step_state: PyTree) -> PyTree:
        """Return the part of a step state that the replay stores with each trajectory."""
        return ()

    # The contract.

    def check_run(self, run: RunSpec) -> None:
        """Check that the update devices can share a batch, and that warm-up fills enough."""
        self.replay.check_run(run, self.config.replay.batch_size)
        check_warm_up(self._schedule_of(run).first, self.replay.rows_of_start, run)

    def for_run(self, run: RunSpec) -> Self:
        there = copy.copy(self)
        there._schedule = self._schedule_of(run)
        return there

    def _schedule_of(self, run: RunSpec) -> Schedule:
        least = least_warm_up(self.replay.rows_of_start, run)
        env_steps = run.num_hosts * run.num_envs * run.steps_per_cycle
        return self.config.replay.schedule(env_steps, least)

    def new_opt(self, networks: PyTree) -> Opt:
        """Return the initial optimizer state and targets equal to ``networks``."""
        target = jax.tree.map(jnp.copy, self.with_target(networks))
        return Opt(self.optimizer.init(networks), target, jnp.int32(0))

    def optimize(self, networks: PyTree, opt: Opt, grads: PyTree) -> tuple[PyTree, Opt]:
        """Take one optimizer step, and move the target at the end of its period."""
        updates, optimizer = self.optimizer.update(grads, opt.optimizer, networks)
        networks = optax.apply_updates(networks, updates)
        config = self.config.target
        target = moved_target(
            opt.target, self.with_target(networks), opt.updates + 1, config.period, config.rate
        )
        return networks, Opt(optimizer, target, opt.updates + 1)

    def new_experience(self, key: jax.Array, networks: PyTree, run: RunSpec) -> Replay:
        acting = self._acting_networks(networks, self.normalizer.new())
        trajectory = self.empty_trajectory(acting, run)
        core = self.recurrent_state(self.new_step_state(key, run, 0))
        return self.replay.new(trajectory, core, run)

    def update_experience(
        self,
        experience: Replay,
        initial_step_state: PyTree,
        final_step_state: PyTree,
        trajectory: Trajectory,
        networks: PyTree,
    ) -> Replay:
        """Insert the trajectory, with the recurrent state before its first row."""
        return self.replay.insert(experience, trajectory, self.recurrent_state(initial_step_state))

    def experience_spec(self) -> PyTree:
        return self.replay.spec()

    def acting_networks(self, networks: PyTree, experience: Replay) -> PyTree:
        return self._acting_networks(networks, experience.statistics if self.normalizer else ())

    def _acting_networks(self, networks: PyTree, statistics: PyTree) -> PyTree:
        acting, normalizer = self.acting_part(networks), self.normalizer
        return ActingNetworks(acting, normalizer.scaling(statistics)) if normalizer else acting

    def lasting_experience(self, experience: Replay) -> PyTree:
        return experience.statistics

    def with_lasting(self, experience: Replay, lasting: PyTree) -> Replay:
        return experience._replace(statistics=lasting)

    def num_off_policy_optims_per_cycle(self, cycle: int) -> int:
        return (self._schedule or self.config.replay.schedule()).due(cycle)

    # For trajectory managers.

    def loss_keys(self, key: jax.Array) -> tuple[jax.Array, ...]:
        """Return the keys that ``loss`` makes of the one that it is given; the first one draws."""
        return (key,)

    def with_managers(self) -> Self:
        """Return this agent with its replay in trajectory managers.

        Its experience is what an update draws (``Drawn``).
        """
        config = self.config
        return self.with_replay(
            DrawnLayout(
                of=self.replay, batch_size=config.replay.batch_size, discount=config.discount
            )
        )

    def with_replay(self, layout: ReplayLayout | DrawnLayout) -> Self:
        """Return this agent with another layout of its replay."""
        there = copy.copy(self)
        there.replay = layout  # type: ignore[assignment]
        return there

    # For acting.

    def as_seen(self, networks: PyTree, env_step: EnvStep) -> tuple[PyTree, EnvStep]:
        """Return what acts, and rows ``[B, ...]`` as its networks see them.

        Args:
          networks: Acting networks.
          env_step: As the environment gave it.
        """
        if not isinstance(networks, ActingNetworks):
            return networks, env_step
        obs = self.normalizer(networks.scaling, env_step.obs)
        return networks.networks, env_step._replace(obs=obs)

    # For a loss.

    def gathered(self, experience: Replay, draw: Draw) -> PyTree:
        """Return what the replay has at ``draw``, with observations as networks see them."""
        drawn = self.replay.gathered(experience, draw, self.config.discount)
        scaling = self.normalizer.scaling(experience.statistics) if self.normalizer else ()
        scaled = functools.partial(self.normalizer, scaling)
        if isinstance(drawn, Transition):
            return drawn._replace(obs=scaled(drawn.obs), next_obs=scaled(drawn.next_obs))
        row, final = drawn.env_step, drawn.env_step.final
        if isinstance(final, FinalObs):
            final = final._replace(obs=scaled(final.obs))
        return drawn._replace(env_step=row._replace(obs=scaled(row.obs), final=final))

    def draw(self, experience: Replay, key: jax.Array) -> tuple[Draw, jax.Array]:
        """Return this device's share of a batch, and its importance weights ``[N]``."""
        config = self.config.replay
        draw = self.replay.draw(experience, key, config.batch_size)
        exponent = config.importance_exponent if config.prioritized else 0.0
        return draw, self.replay.importance_weights(experience, draw, exponent)

    def set_priority(self, experience: Replay, draw: Draw, priority: jax.Array) -> Replay:
        """Set the priorities ``[N]`` of what was drawn; a uniform replay has none."""
        if not self.config.replay.prioritized:
            return experience
        return self.replay.set_priority(experience, draw, priority)

    def replay_metrics(
        self, experience: Replay, opt: Opt, rows_per_sample: int = 1
    ) -> dict[str, jax.Array]:
        """Return how full the replay is, draws per inserted row, and frame stacks that were lost.

        The ratio counts from when the replay was begun, including warm-up and this update.

        Args:
          experience: This device's shard.
          opt: Counts the updates before this one.
          rows_per_sample: Environment steps in each item of a batch.
        """
        config = self.config.replay
        rows_per_update = config.batch_size * rows_per_sample
        # Not ``opt.updates``: a run may have been resumed with an empty replay.
        first, every, each, at_first = self._schedule or config.schedule()
        since = jnp.sum(experience.trajectories) - first
        updates = at_first + (since - 1) // every * each + (opt.updates - at_first) % each
        updates = jnp.where(since > 0, updates, opt.updates % at_first)
        inserted = jnp.maximum(self.replay.inserted(experience), 1.0)
        metrics = {
            "replay_size": self.replay.size(experience),
            "samples_per_insert": (updates + 1.0) * rows_per_update / inserted,
        }
        if isinstance(experience.stack, StackState):
            metrics["replay_stacks_lost"] = experience.stack.lost.astype(jnp.float32)
        return metrics


def moved_target(
    target: PyTree, networks: PyTree, updates: jax.Array, period: int, rate: float
) -> PyTree:
    """Return ``target``, moved towards ``networks`` after every ``period`` updates.

    Sources: rate 1, Mnih et al. 2015 (doi 10.1038/nature14236), algorithm 1; period 1,
    Lillicrap et al. 2015 (arXiv 1509.02971), algorithm 1.

    Args:
      target: Laid out as ``networks``.
      networks: After the update.
      updates: Updates so far, including the one that made ``networks``, int32.
      period: Updates between two moves.
      rate: Share of the way to ``networks`` that a move goes, in (0, 1].
    """
    moved = networks if rate == 1.0 else optax.incremental_update(networks, target, rate)
    if period == 1:
        return moved
    return cond_on_cpu(updates % period == 0, lambda: moved, lambda: target)


def least_warm_up(rows_of_start: int, run: RunSpec) -> int:
    """Return the trajectories after which so many rows, which a draw needs, surely are there."""
    # With one trajectory fewer from each, all Inferencers may still lack one.
    return (-(-rows_of_start // run.steps_per_cycle) - 1) * run.num_inferencers + 1


def check_warm_up(warm_up_cycles: int, rows_of_start: int, run: RunSpec) -> None:
    """Raise UsageError unless there is something to draw after so many trajectories."""
    least = least_warm_up(rows_of_start, run)
    if warm_up_cycles < least:
        raise UsageError(
            f"replay.warm_up_cycles={warm_up_cycles} is too small: a draw needs {rows_of_start} "
            f"rows, {-(-rows_of_start // run.steps_per_cycle)} trajectories of one of "
            f"{run.num_inferencers} Inferencers; use {least} or more"
        )
