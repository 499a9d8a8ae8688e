"""Random network distillation: rewards for what was seldom observed.

Source: Burda et al. 2018, "Exploration by Random Network Distillation" (arXiv 1810.12894). A
*predictor* learns what a *target*, a network that is never trained, says of observations; where it
is wrong, not much like it has been observed. Unlike the paper, bonuses are added to rewards, so
that one value is learned of both, and they end with the episode.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from sebulba.agent import LEARNER_AXIS, Loss
from sebulba.agents.configs import TorsoConfig
from sebulba.agents.configs.auxiliary import RandomNetworkDistillationConfig
from sebulba.agents.kernels.normalization import (
    Moments,
    ObservationNormalizer,
    new_moments,
    updated_moments,
)
from sebulba.agents.kernels.optimizer import make_optimizer, masked_mean
from sebulba.agents.multi.auxiliary import Auxiliary, Seen
from sebulba.agents.nets.encoder import Encoded, ObservationEncoder
from sebulba.agents.nets.torso import Torso, dense
from sebulba.types import EnvStep, MultiAgentSpec, PyTree, Trajectory, empty_env_step


class Features(nn.Module):
    """From an encoded observation to numbers, ``[N, features]``."""

    torso: TorsoConfig
    features: int

    @nn.compact
    def __call__(self, encoded: Encoded) -> jax.Array:
        """Return the numbers."""
        return dense(self.features, math.sqrt(2))(Torso(self.torso)(encoded))


class Novelty(NamedTuple):
    """What is kept of one group."""

    obs: PyTree
    """Observations of the newest trajectory, ``[T+1, N, ...]``, normalised."""
    acting: jax.Array
    """``[T+1, N]`` bool: the others are not learned from."""
    observations: tuple[Moments, ...]
    """Statistics of all observations so far."""
    errors: Moments
    """Moments of all errors so far."""
    target: PyTree
    """Parameters of the network that is never trained."""


class RandomNetworkDistillation(Auxiliary[RandomNetworkDistillationConfig]):
    """A predictor and a target for every group; ``networks`` are the predictors."""

    def __init__(self, spec: MultiAgentSpec, config: RandomNetworkDistillationConfig) -> None:
        """Describe the networks; raise UsageError for observations that they cannot take."""
        super().__init__(spec, config)
        self.specs = {name: group.spec.policy_spec for name, group in spec.groups.items()}
        self._normalizers = {
            name: ObservationNormalizer(one.observation_space, config.torso)
            for name, one in self.specs.items()
        }
        self._encoders = {
            name: ObservationEncoder(one, config.torso) for name, one in self.specs.items()
        }
        self._network = Features(config.torso, config.features)
        self.optimizer = make_optimizer(config.learning_rate, config.optimizer)
        jax.eval_shape(self.new_networks, jax.eval_shape(jax.random.key, 0))

    def new_networks(self, key: jax.Array) -> PyTree:
        networks = {}
        for i, (name, spec) in enumerate(self.specs.items()):
            encoded = self._encoders[name](empty_env_step(spec, 1).obs, num_leading=1)
            networks[name] = self._network.init(jax.random.fold_in(key, i), encoded)["params"]
        return networks

    def new_opt(self, networks: PyTree) -> PyTree:
        return self.optimizer.init(networks)

    def new_experience(
        self, key: jax.Array, networks: PyTree, seen: dict[str, Seen]
    ) -> dict[str, Novelty]:
        """Return targets, and statistics without samples."""
        experience = {}
        for name, target in self.new_networks(key).items():
            observations = self._normalizers[name].new()
            obs = self._normalized(name, observations, seen[name].env_step.obs)
            acting = seen[name].acting
            experience[name] = Novelty(obs, acting, observations, new_moments(), target)
        return experience

    def experience_spec(self) -> PyTree:
        """Split environments; targets and statistics are the same on all devices."""
        rows = P(None, LEARNER_AXIS)
        spec = Novelty(rows, rows, P(), P(), P())  # type: ignore[arg-type]
        return dict.fromkeys(self.specs, spec)

    def update_experience(
        self,
        experience: dict[str, Novelty],
        seen: dict[str, Seen],
        trajectory: Trajectory,
        networks: PyTree,
    ) -> dict[str, Novelty]:
        """Keep what was observed, and add it to the statistics."""
        new = {}
        for name in self.specs:
            own, obs, acting = experience[name], seen[name].env_step.obs, seen[name].acting
            observations = self._normalizers[name].update(own.observations, obs, acting)
            obs = self._normalized(name, observations, obs)
            error = self._error(name, networks[name], own.target, obs)
            errors = updated_moments(own.errors, error, acting)
            new[name] = Novelty(obs, acting, observations, errors, own.target)
        return new

    def reward(
        self, networks: PyTree, experience: dict[str, Novelty], group: str, rows: EnvStep
    ) -> jax.Array:
        """Return the errors of the predictor in standard deviations, times the scale."""
        own = experience[group]
        obs = self._normalized(group, own.observations, rows.obs)
        error = self._error(group, networks[group], own.target, obs)
        factor = self.config.bonus_scale * jax.lax.rsqrt(own.errors.variance + 1e-8)
        return factor * error

    def loss(
        self, networks: PyTree, opt: PyTree, experience: dict[str, Novelty], key: jax.Array
    ) -> Loss:
        """Return the mean error of the predictors on the newest trajectory."""
        metrics, total = {}, jnp.float32(0)
        for name in self.specs:
            own = experience[name]
            error = self._error(name, networks[name], own.target, own.obs)
            metrics[f"error/{name}"] = mean = masked_mean(error, own.acting)
            total += mean
        return total, (experience, metrics)

    def optimize(self, networks: PyTree, opt: PyTree, grads: PyTree) -> tuple[PyTree, PyTree]:
        updates, opt = self.optimizer.update(grads, opt, networks)
        return optax.apply_updates(networks, updates), opt

    def num_off_policy_optims_per_cycle(self, cycle: int) -> int:
        return self.config.updates_per_cycle

    def refit_experience(
        self, new: dict[str, Novelty], saved: dict[str, Novelty]
    ) -> dict[str, Novelty]:
        """Keep targets and statistics, and drop the trajectory, which has been learned from."""
        return {
            name: saved[name]._replace(obs=own.obs, acting=own.acting) for name, own in new.items()
        }

    def _normalized(self, group: str, observations: tuple[Moments, ...], obs: PyTree) -> PyTree:
        """Return observations ``[T, N, ...]`` in units of their standard deviations."""
        normalizer = self._normalizers[group]
        return normalizer(normalizer.scaling(observations), obs)

    def _error(self, group: str, predictor: PyTree, target: PyTree, obs: PyTree) -> jax.Array:
        """Return the mean square error of the prediction of ``obs [T, N, ...]``, ``[T, N]``."""
        encoded = self._encoders[group](obs, num_leading=2)
        predicted, wanted = (
            self._network.apply({"params": p}, encoded) for p in (predictor, target)
        )
        error = jnp.mean(jnp.square(jnp.asarray(predicted) - jnp.asarray(wanted)), axis=-1)
        return error.reshape(jax.tree.leaves(obs)[0].shape[:2])
