"""How agents normalise observations; of on-policy agents, rewards too."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from sebulba.agents.configs.network_and_optimizer import TorsoConfig
from sebulba.agents.configs.on_policy import OnPolicyConfig
from sebulba.agents.kernels.normalization import (
    REWARD_STATISTICS_SPEC,
    ObservationNormalizer,
    new_observations,
    new_reward_statistics,
    normalized_rewards,
)
from sebulba.types import EnvSpec, EnvStep, FinalObs, PyTree, RunSpec, Trajectory, without_parts


class ActingNetworks(NamedTuple):
    """The acting networks of an agent that normalises observations."""

    networks: PyTree
    """What acts, as it is where nothing is normalised."""
    scaling: PyTree
    """``ObservationNormalizer.scaling``."""


def observation_normalizer(spec: EnvSpec, torso: TorsoConfig, is_on: bool) -> ObservationNormalizer:
    """Return the normaliser of what policies see."""
    flattened = torso.kind == "mlp"
    return ObservationNormalizer(spec.policy_spec, images_are_flattened=flattened, is_on=is_on)


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
        is_on = config.normalize_observations
        self._observations = observation_normalizer(spec, config.torso, is_on)
        self._hidden: ObservationNormalizer | None = None
        if is_on:
            self._hidden = _of_hidden(spec, images_are_flattened=config.torso.kind == "mlp")

    @property
    def scales_observations(self) -> bool:
        """Whether observations are normalised."""
        return bool(self._observations)

    def new(self, run: RunSpec) -> Statistics:
        """Return statistics without samples."""
        return Statistics(
            observations=self._observations.new(),
            rewards=new_reward_statistics(run.num_inferencers, run.num_envs)
            if self._rewards
            else (),
            hidden=self._hidden.new() if self._hidden else (),
        )

    def spec(self) -> Statistics:
        """Return a prefix tree of PartitionSpecs of the statistics."""
        return Statistics(P(), REWARD_STATISTICS_SPEC if self._rewards else P(), P())

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
        return self._observations.scaling(statistics.observations)

    def scaled(self, scaling: PyTree, obs: PyTree) -> PyTree:
        """Return what policies see of observations ``[T, B, ...]`` as their networks see it."""
        return self._observations(scaling, obs)

    def metrics(self, obs: PyTree) -> dict[str, jax.Array]:
        """Return the share of ``obs``, as networks see them, ``[T, B, ...]``, that was clipped."""
        if not self._observations:
            return {}
        return {"observations_clipped": self._observations.clipped(self._apart(obs)[0])}

    def scaled_row(self, scaling: PyTree, row: EnvStep, statistics: Statistics) -> EnvStep:
        """Return rows ``[T, B, ...]`` with all observations as networks see them.

        Args:
          scaling: Of what policies see.
          row: The rows.
          statistics: Of what they do not see.
        """

        def scaled(obs: PyTree) -> PyTree:
            seen, hidden = self._apart(obs)
            seen = self.scaled(scaling, seen)
            if not self._eval_only:
                return seen
            if self._hidden:
                hidden = self._hidden(self._hidden.scaling(statistics.hidden), hidden)
            return {**seen, **hidden}

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
        new = self._observations.update(statistics.observations, seen, counts)
        statistics = statistics._replace(observations=new)
        if self._hidden:
            new = self._hidden.update(statistics.hidden, hidden, counts)
            statistics = statistics._replace(hidden=new)
        return statistics

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
        if self._observations or self._hidden:
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


def _of_hidden(spec: EnvSpec, **options: bool) -> ObservationNormalizer | None:
    """Return the normaliser of the parts that policies do not see, if there is anything to do."""
    if not spec.eval_only:
        return None
    parts = {name: spec.observation_space[name] for name in spec.eval_only}  # type: ignore[index]
    of_parts = dataclasses.replace(
        spec, observation_space=gymnasium.spaces.Dict(parts), eval_only=(), legal_actions=None
    )
    return ObservationNormalizer(of_parts, **options) or None
