"""Behaviour cloning: do what was done in the data.

Source: Pomerleau 1991 (doi 10.1162/neco.1991.3.1.88).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from sebulba.agent import Loss
from sebulba.agents.bases.off_policy import Opt
from sebulba.agents.kernels.distributions import Gaussian, make_distribution
from sebulba.agents.kernels.legal_actions import only_legal
from sebulba.agents.kernels.optimizer import make_optimizer
from sebulba.agents.nets.actor_and_critic import Actor
from sebulba.agents.nets.encoder import ObservationEncoder
from sebulba.agents.replay.transitions_and_sequences import Replay, TransitionReplay
from sebulba.types import (
    ActionMoments,
    ActionOutput,
    EnvSpec,
    EnvStep,
    PyTree,
    RunSpec,
    empty_env_step,
)
from sebulba_offline.configs import BCConfig
from sebulba_offline.learning import LearnsFromData


class StepState(NamedTuple):
    """What the agent carries from step to step."""

    key: jax.Array
    """Typed PRNG key of sampled actions."""


class BC(LearnsFromData):
    """The likeliest action of the data, or the mean of continuous ones, by its observation.

    ``networks`` is one actor: from an observation to logits, or to raw actions.
    """

    config: BCConfig

    def __init__(self, spec: EnvSpec, config: BCConfig) -> None:
        """Build the network's description; no arrays are made.

        Raises:
          UsageError: A space that the agent cannot take.
        """
        self.distribution = make_distribution(spec.action_space)
        self.encode = ObservationEncoder(spec, config.torso)
        self._actor = Actor(config.torso, self.distribution.num_params)
        replay = TransitionReplay.of(spec, config.replay)
        optimizer = make_optimizer(config.learning_rate, config.optimizer)
        super().__init__(spec, config, replay, optimizer)
        self.hold_data()

    def new_networks(self, key: jax.Array) -> PyTree:
        obs = self.encode(empty_env_step(self.spec, 1).obs, num_leading=1)
        return self._actor.init(key, obs)["params"]

    def with_target(self, networks: PyTree) -> PyTree:
        """Return nothing: there are no values to bootstrap from."""
        return ()

    def params(self, networks: PyTree, obs: PyTree) -> jax.Array:
        """Return logits, or raw actions, ``[N, P]``; ``obs [N, ...]`` as networks see them."""
        params = self._actor.apply({"params": networks}, self.encode(obs, num_leading=1))
        return only_legal(self.spec, obs, params)  # type: ignore[arg-type]

    def new_step_state(self, key: jax.Array, run: RunSpec, inferencer: int) -> StepState:
        return StepState(key)

    def step(
        self, networks: PyTree, step_state: StepState, env_step: EnvStep, *, explore: bool = True
    ) -> tuple[ActionOutput, StepState]:
        """Take the likeliest action, or sample discrete ones with ``explore``."""
        actor, env_step = self.as_seen(networks, env_step)
        params = self.params(actor, env_step.obs)
        key, sample_key = jax.random.split(step_state.key)
        distribution = self.distribution
        if isinstance(distribution, Gaussian):
            raw = params
        elif explore:
            raw = distribution.sample(params, sample_key)
        else:
            raw = distribution.mode(params)
        return ActionOutput(distribution.action(raw)), StepState(key)

    def acting_distribution(
        self, networks: PyTree, step_state: StepState, env_step: EnvStep
    ) -> PyTree:
        """Return the probabilities of discrete actions, or the continuous action."""
        actor, env_step = self.as_seen(networks, env_step)
        params = self.params(actor, env_step.obs)
        if not isinstance(self.distribution, Gaussian):
            return self.distribution.of_actions(params)
        action = self.distribution.action(params).astype(jnp.float32)
        return ActionMoments(action, jnp.zeros_like(action))

    def loss(self, networks: PyTree, opt: Opt, experience: Replay, key: jax.Array) -> Loss:
        """Return the mean loss of a batch.

        Of discrete actions it is minus their log-probability; of continuous ones, the mean squared
        distance of unit actions.
        """
        draw, weight = self.draw(experience, key)
        batch = self.gathered(experience, draw)
        params = self.params(networks, batch.obs)
        if isinstance(self.distribution, Gaussian):
            squashing = self.distribution.squashing
            error = squashing.unit(params) - squashing.unit_of(batch.action)
            loss = jnp.mean(jnp.square(error), axis=-1)
        else:
            loss = -self.distribution.log_prob(params, self.raw(batch.action))
        mean = jnp.mean(weight * loss)
        return mean, (experience, {"cloning_loss": mean})

    def raw(self, action: jax.Array) -> jax.Array:
        """Return indices from 0 of discrete actions ``[N, ...]``, as ``log_prob`` takes them."""
        raw = action - jnp.asarray(self.spec.action_space.start)[None]  # type: ignore[attr-defined]
        return raw if raw.ndim == 1 else raw.reshape(len(raw), -1)
