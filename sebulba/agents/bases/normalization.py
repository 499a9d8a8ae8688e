"""How agents normalise observations; of on-policy agents, rewards too."""

from __future__ import annotations

from typing import NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from sebulba.agent import LEARNER_AXIS
from sebulba.agents.configs.on_policy import OnPolicyConfig
from sebulba.agents.kernels.normalization import (
    ObservationNormalizer,
    RewardStatistics,
    new_moments,
    new_observations,
    normalized_rewards,
)
from sebulba.types import EnvSpec, EnvStep, FinalObs, PyTree, RunSpec, Trajectory, without_parts


class ActingNetworks(NamedTuple):
    """The acting networks of an agent that normalises observations."""

    networks: PyTree
    """What acts, as it is where nothing is normalised."""
    scaling: PyTree
    """``ObservationNormalizer.scaling``."""


class Statistics(NamedTuple):
    """Running statistics; ``()`` for what is not normalised."""

    observations: PyTree
    """See ``ObservationNormalizer``."""
    rewards: PyTree
    """``RewardStatistics``."""
    hidden: PyTree = ()
    """See ``ObservationNormalizer``: of parts that the policy does not see."""


class Normalization:
    """Normalises observations and rewards if the configuration says so; it holds no arrays."""

    def __init__(self, spec: EnvSpec, config: OnPolicyConfig) -> None:
        """Find the parts of an observation that are to be normalised, if there are any."""
        self._discount = config.discount
        self._rewards = config.normalize_rewards
        self._eval_only = spec.eval_only
        hidden = {name: spec.observation_space[name] for name in spec.eval_only}  # type: ignore[index]
        self.observations, self._hidden = (
            ObservationNormalizer(space, config.torso, is_on=config.normalize_observations)
            for space in (spec.policy_spec.observation_space, gymnasium.spaces.Dict(hidden))
        )

    def new(self, run: RunSpec) -> Statistics:
        """Return statistics without samples."""
        so_far = jnp.zeros((run.num_inferencers, run.num_envs))
        rewards = RewardStatistics(new_moments(), so_far) if self._rewards else ()
        return Statistics(self.observations.new(), rewards, self._hidden.new())

    def spec(self) -> Statistics:
        """Return a prefix tree of PartitionSpecs of the statistics."""
        rewards: PyTree = RewardStatistics(P(), P(None, LEARNER_AXIS)) if self._rewards else P()  # type: ignore[arg-type]
        return Statistics(P(), rewards, P())

    def lasting(self, statistics: Statistics) -> Statistics:
        """Return statistics with the moments of rewards, and no sums of single environments."""
        rewards = statistics.rewards.moments if self._rewards else ()
        return statistics._replace(rewards=rewards)

    def with_lasting(self, statistics: Statistics, lasting: Statistics) -> Statistics:
        """Return ``lasting`` with the sums of the environments of ``statistics``."""
        rewards = statistics.rewards
        if self._rewards:
            rewards = rewards._replace(moments=lasting.rewards)
        return lasting._replace(rewards=rewards)

    def scaling(self, statistics: Statistics) -> PyTree:
        """Return what policies scale observations with; ``()`` where they do not."""
        return self.observations.scaling(statistics.observations)

    def metrics(self, obs: PyTree) -> dict[str, jax.Array]:
        """Return the share of ``obs``, as networks see them, ``[T, B, ...]``, that was clipped."""
        if not self.observations:
            return {}
        return {"observations_clipped": self.observations.clipped(self._apart(obs)[0])}

    def scaled_row(self, scaling: PyTree, row: EnvStep, statistics: Statistics) -> EnvStep:
        """Return rows ``[T, B, ...]`` with all observations as networks see them.

        Args:
          scaling: Of what policies see.
          row: The rows.
          statistics: Of what they do not see.
        """

        def scaled(obs: PyTree) -> PyTree:
            seen, hidden = self._apart(obs)
            seen = self.observations(scaling, seen)
            if not self._eval_only:
                return seen
            return {**seen, **self._hidden(self._hidden.scaling(statistics.hidden), hidden)}

        final = row.final
        if isinstance(final, FinalObs):
            final = final._replace(obs=scaled(final.obs))
        return row._replace(obs=scaled(row.obs), final=final)

    def _apart(self, obs: PyTree) -> tuple[PyTree, PyTree]:
        """Return what policies see of observations, and what they do not."""
        if not self._eval_only:
            return obs, {}
        hidden = {name: obs[name] for name in self._eval_only}
        return without_parts(obs, self._eval_only), hidden

    def _counted(self, statistics: Statistics, obs: PyTree, counts: jax.Array | None) -> Statistics:
        """Return the statistics with observations ``[T, B, ...]``, or with those that count."""
        seen, hidden = self._apart(obs)
        return statistics._replace(
            observations=self.observations.update(statistics.observations, seen, counts),
            hidden=self._hidden.update(statistics.hidden, hidden, counts),
        )

    def __call__(
        self, trajectory: Trajectory, scaling: PyTree, statistics: Statistics
    ) -> tuple[Trajectory, Statistics]:
        """Normalise a trajectory and add it to the statistics.

        Observations are scaled as they were when the trajectory was acted on, which may be several
        updates ago: with anything newer the policy would seem to have changed where it has not.
        Rewards are scaled with the newest statistics.

        Args:
          trajectory: ``[T+1, B, ...]``.
          scaling: What it was acted on with.
          statistics: Of the trajectories before.
        """
        row, before = trajectory.env_step, statistics
        if self.observations or self._hidden:
            for obs, counts in new_observations(row):
                statistics = self._counted(statistics, obs, counts)
            row = self.scaled_row(scaling, row, before)
        if self._rewards:
            inferencer = jnp.asarray(trajectory.inferencer)
            reward, rewards = normalized_rewards(
                statistics.rewards, row, inferencer, self._discount
            )
            row = row._replace(reward=reward)
            statistics = statistics._replace(rewards=rewards)
        return trajectory._replace(env_step=row), statistics
