"""The component of on-policy agents that normalises observations and rewards."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from sebulba.agents.configs.on_policy import OnPolicyConfig
from sebulba.agents.kernels.normalization import (
    REWARD_STATISTICS_SPEC,
    ObservationNormalizer,
    new_reward_statistics,
    normalized_rewards,
)
from sebulba.types import EnvSpec, EnvStep, FinalObs, PyTree, RunSpec, Trajectory


class Statistics(NamedTuple):
    """Running statistics; ``()`` for what is not normalised."""

    observations: PyTree
    """See ``ObservationNormalizer``."""
    rewards: PyTree
    """``RewardStatistics``."""


class Normalization:
    """Normalises observations and rewards if the configuration says so; it holds no arrays."""

    def __init__(self, spec: EnvSpec, config: OnPolicyConfig) -> None:
        """Find the parts of an observation that are to be normalised, if there are any."""
        self._discount = config.discount
        self._rewards = config.normalize_rewards
        self._observations: ObservationNormalizer | None = None
        if config.normalize_observations:
            flattened = config.torso.kind == "mlp"
            normalizer = ObservationNormalizer(spec, images_are_flattened=flattened)
            self._observations = normalizer if normalizer else None

    @property
    def scales_observations(self) -> bool:
        """Whether observations are normalised."""
        return self._observations is not None

    def new(self, run: RunSpec) -> Statistics:
        """Return statistics without samples."""
        return Statistics(
            observations=self._observations.new() if self._observations else (),
            rewards=new_reward_statistics(run.num_inferencers, run.num_envs)
            if self._rewards
            else (),
        )

    def spec(self) -> Statistics:
        """Return a prefix tree of PartitionSpecs of the statistics."""
        return Statistics(P(), REWARD_STATISTICS_SPEC if self._rewards else P())

    def refit(self, new: Statistics, saved: Statistics) -> Statistics:
        """Return the saved statistics in the shapes of ``new``, which has other environments."""
        rewards = new.rewards
        if self._rewards:
            rewards = rewards._replace(moments=saved.rewards.moments)
        return Statistics(saved.observations, rewards)

    def scaling(self, statistics: Statistics) -> PyTree:
        """Return what policies scale observations with; ``()`` where they do not."""
        return self._observations.scaling(statistics.observations) if self._observations else ()

    def scaled(self, scaling: PyTree, obs: PyTree) -> PyTree:
        """Return observations ``[T, B, ...]`` as networks see them."""
        return self._observations(scaling, obs) if self._observations else obs

    def scaled_row(self, scaling: PyTree, row: EnvStep) -> EnvStep:
        """Return rows ``[T, B, ...]`` with all observations as networks see them."""
        final = row.final
        if isinstance(final, FinalObs):
            final = final._replace(obs=self.scaled(scaling, final.obs))
        return row._replace(obs=self.scaled(scaling, row.obs), final=final)

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
        row, (observations, rewards) = trajectory.env_step, statistics
        if self._observations:
            acted_on = jax.tree.map(lambda x: x[:-1], row.obs)
            observations = self._observations.update(observations, acted_on)
            if isinstance(row.final, FinalObs):
                final = jax.tree.map(lambda x: x[1:], row.final)
                observations = self._observations.update(observations, final.obs, final.given)
            row = self.scaled_row(scaling, row)
        if self._rewards:
            inferencer = jnp.asarray(trajectory.inferencer)
            reward, rewards = normalized_rewards(rewards, row, inferencer, self._discount)
            row = row._replace(reward=reward)
        return trajectory._replace(env_step=row), Statistics(observations, rewards)
