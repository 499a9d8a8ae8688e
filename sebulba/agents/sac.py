"""Soft actor-critic (Haarnoja et al. 2018, arXiv 1801.01290 and 1812.05905).

Of discrete actions: Christodoulou 2019 (arXiv 1910.07207).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Self

import gymnasium
import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jax.scipy.special import log_ndtr

from sebulba.agent import Loss
from sebulba.agents.bases.actor_and_critics import ActorCriticsAgent, StepState, critic_loss
from sebulba.agents.bases.off_policy import Opt
from sebulba.agents.configs import SACConfig
from sebulba.agents.kernels.averages import AVERAGES, with_averages
from sebulba.agents.kernels.distributions import Categorical, SquashedGaussian
from sebulba.agents.kernels.legal_actions import ILLEGAL, legal_mask
from sebulba.agents.nets.encoder import Encoded, ObservationEncoder
from sebulba.agents.nets.q_networks import discrete_actions
from sebulba.agents.replay.transitions_and_sequences import Replay, Transition, TransitionReplay
from sebulba.support.checks import require
from sebulba.types import EnvSpec, EnvStep, PyTree

MOMENTS_RATE = 0.01
"""How far the running moments of CrossQ's critics follow those of a batch."""
TARGET_SHARE = 0.5
"""Mean entropy that a temperature keeps of discrete actions, as a share of the greatest. With 0.98,
as in the paper, a policy of two actions takes the worse one in four of ten steps."""


class SAC(ActorCriticsAgent[SACConfig]):
    """Two critics, a Gaussian policy that is squashed, and a temperature that learns.

    ``networks`` is ``{"actor", "critics", "log_temperature"}``; the critics have targets. For a
    Discrete space of actions, ``SAC(spec, config)`` is a ``DiscreteSAC``.
    """

    params_per_action = 2

    def __new__(cls, *arguments: Any, **keywords: Any) -> Self:
        spec = keywords.get("spec", next(iter(arguments), None))
        space = getattr(spec, "action_space", None)
        if cls is SAC and isinstance(space, gymnasium.spaces.Discrete):
            cls = DiscreteSAC  # type: ignore[assignment]
        return super().__new__(cls, *arguments, **keywords)

    def __init__(self, spec: EnvSpec, config: SACConfig) -> None:
        super().__init__(
            spec,
            config,
            TransitionReplay.of(spec, config.replay),
            params_per_action=self.params_per_action,
            num_critics=2,
            log_temperature=config.temperature_learning_rate,
        )
        if config.crossq:
            self.optimizer = with_averages(self.optimizer, MOMENTS_RATE)

    def new_squashing(self, space: gymnasium.Space, config: SACConfig) -> Any:
        squashing = super().new_squashing(space, config)
        self.distribution: Any = SquashedGaussian(squashing)
        return squashing

    def new_networks(self, key: jax.Array) -> dict[str, Any]:
        log_temperature = jnp.float32(math.log(self.config.initial_temperature))
        return {**super().new_networks(key), "log_temperature": log_temperature}

    def acting_distribution(
        self, networks: PyTree, step_state: StepState, env_step: EnvStep
    ) -> PyTree:
        """Return the moments, or the probabilities, of what is sampled in training."""
        actor, env_step = self.as_seen(networks, env_step)
        obs = self.encode(env_step.obs, num_leading=1)
        return self.distribution.of_actions(self.policy(actor, obs))

    def with_target(self, networks: PyTree) -> PyTree:
        return () if self.config.crossq else networks["critics"]

    def unit_action(
        self, params: jax.Array, noise: jax.Array, step_state: StepState, *, explore: bool
    ) -> jax.Array:
        """Sample actions, or take the middle of the distribution without ``explore``."""
        distribution = self.distribution
        raw = distribution.at(params, noise) if explore else distribution.mode(params)
        return self.squashing.unit(raw)

    def target_entropy(self, obs: Encoded) -> jax.Array | float:
        """Return the mean entropy that the temperature keeps where none is given, in nats."""
        return -float(self.squashing.size)

    def sampled(self, actor: PyTree, obs: Encoded, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Draw unit actions ``[N, K]``, differentiable in ``actor``, and their log-densities."""
        params = self.policy(actor, obs)
        raw = self.distribution.sample(params, key)
        return self.squashing.unit(raw), self.distribution.log_prob(params, raw)

    def loss_keys(self, key: jax.Array) -> tuple[jax.Array, ...]:
        """Return the keys of what is drawn, and of the actions after and at its observations."""
        return tuple(jax.random.split(key, 3))

    def loss(self, networks: PyTree, opt: Opt, experience: Replay, key: jax.Array) -> Loss:
        """Return the sum of the losses of critics, actor and temperature.

        Each trains its own part of the networks: the others are constants to it. Equations 5, 9
        and 18 of arXiv 1812.05905, with the smaller of two target critics (section 5).
        """
        draw_key, next_key, now_key = self.loss_keys(key)
        draw, weight, batch = self.batch(experience, draw_key)
        temperature = jnp.exp(networks["log_temperature"])

        next_action, log_prob = self.sampled(networks["actor"], batch.next_obs, next_key)
        outputs, next_outputs, averages_loss = self.outputs_of(networks, opt, batch, next_action)
        next_value = self.of_action(jnp.min(next_outputs, axis=0), next_action)
        next_value -= temperature * log_prob
        values = self.of_action(outputs, batch.action)
        loss, priority = critic_loss(values, batch, weight, next_value)

        action, log_prob = self.sampled(networks["actor"], batch.obs, now_key)
        outputs = self.outputs(stop_gradient(networks["critics"]), batch.obs, action)
        value = self.of_action(jnp.min(outputs, axis=0), action)
        actor_loss = jnp.mean(stop_gradient(temperature) * log_prob - value)
        entropy = -jnp.mean(stop_gradient(log_prob))
        given = self.config.target_entropy
        target_entropy = self.target_entropy(batch.obs) if given is None else given
        temperature_loss = temperature * (entropy - target_entropy)

        metrics = {
            "critic_loss": loss,
            "actor_loss": actor_loss,
            "value": jnp.mean(values),
            "entropy": entropy,
            "temperature": temperature,
            **self.replay_metrics(experience, opt),
        }
        experience = self.set_priority(experience, draw, priority)
        return loss + actor_loss + temperature_loss + averages_loss, (experience, metrics)

    def outputs_of(
        self, networks: PyTree, opt: Opt, batch: Transition, next_action: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array | float]:
        """Return what critics put out of a batch, and their targets of what follows it.

        CrossQ's critics are their own targets, and see both in one batch: algorithm 1 of Bhatt et
        al. 2024. The third is then the term of the loss by which their running moments follow.
        """
        critics = networks["critics"]
        if not self.config.crossq:
            next_outputs = self.outputs(opt.target, batch.next_obs, next_action)
            return self.outputs(critics, batch.obs, batch.action), next_outputs, 0.0
        now, then = (batch.obs, batch.action), (batch.next_obs, stop_gradient(next_action))
        obs, action = jax.tree.map(lambda x, y: jnp.concatenate([x, y]), now, then)
        both: list[Any] = [
            self._critic.apply({"params": one}, obs, action, opt.updates, mutable=AVERAGES)
            for one in critics
        ]
        outputs, next_outputs = jnp.split(jnp.stack([outputs for outputs, _ in both]), 2, axis=1)
        return outputs, next_outputs, sum(jax.tree.leaves([sown for _, sown in both]))


class OneHot:
    """Maps logits ``[..., A]`` to unit actions, one-hot vectors, and these to those of a Discrete.

    It stands in the place of a ``Squashing``.
    """

    def __init__(self, actions: Categorical) -> None:
        self._actions = actions
        self.size = actions.num_params

    def unit(self, logits: jax.Array) -> jax.Array:
        """Return the likeliest."""
        return jax.nn.one_hot(self._actions.mode(logits), self.size)

    def action(self, unit: jax.Array) -> jax.Array:
        """Return the actions that the environment receives, ``[...]``."""
        return self._actions.action(self._actions.mode(unit))

    def unit_of(self, action: jax.Array) -> jax.Array:
        """Return the unit actions of what the environment received."""
        return jax.nn.one_hot(self._actions.index(action), self.size)


class EncodedWithMask(NamedTuple):
    """``Encoded``, and which actions are legal."""

    vector: jax.Array
    """As that of ``Encoded``."""
    images: tuple[jax.Array, ...]
    """As those of ``Encoded``."""
    legal: jax.Array | None
    """``[N, A]`` bool; None where all always are."""


class EncoderWithMask(ObservationEncoder):
    """Also tells which actions are legal."""

    def __call__(self, obs: PyTree, num_leading: int) -> Any:
        return EncodedWithMask(*super().__call__(obs, num_leading), legal_mask(self._spec, obs))


class DiscreteSAC(SAC):
    """SAC of discrete actions, whose critics value all actions at once.

    Means over the policy are exact sums, in place of samples: equations 10 to 12 of arXiv
    1910.07207. So probabilities ``[N, A]`` stand for the unit actions of a loss.
    """

    params_per_action = 1
    encoder = EncoderWithMask

    def __init__(self, spec: EnvSpec, config: SACConfig) -> None:
        """Build it; raise UsageError for a target entropy that no policy has."""
        super().__init__(spec, config)
        given, most = config.target_entropy, math.log(self.num_actions)
        rule = f"must be between 0 and {most:.3g}, the entropy of {self.num_actions} random actions"
        require(given is None or 0 < given < most, "target_entropy", given, rule, "use None")

    def new_squashing(self, space: gymnasium.Space, config: SACConfig) -> OneHot:
        self.distribution = discrete_actions(space, "SAC")
        self.num_actions = self.distribution.num_params
        return OneHot(self.distribution)

    def of_action(self, outputs: jax.Array, action: jax.Array) -> jax.Array:
        """Return the mean values ``[..., N]`` under probabilities ``action [N, A]``."""
        return jnp.sum(outputs * jnp.broadcast_to(action, outputs.shape), axis=-1)

    def policy(self, actor: PyTree, obs: Any) -> jax.Array:
        """Return the logits, ``[N, A]``."""
        logits = super().policy(actor, obs)
        return logits if obs.legal is None else jnp.where(obs.legal, logits, ILLEGAL)

    def unit_action(
        self, params: jax.Array, noise: jax.Array, step_state: StepState, *, explore: bool
    ) -> jax.Array:
        """Sample actions, or take the likeliest without ``explore``."""
        # The greatest of logits plus Gumbel noise is a sample; the Gaussian's quantiles give it.
        return self.squashing.unit(params - jnp.log(-log_ndtr(noise)) if explore else params)

    def at_random(self, key: jax.Array, params: jax.Array) -> jax.Array:
        """Draw any legal actions, all alike."""
        equal = jnp.where(params > 0.5 * ILLEGAL, 0.0, params)
        return self.squashing.unit(equal + jax.random.gumbel(key, params.shape))

    def sampled(self, actor: PyTree, obs: Encoded, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the probabilities ``[N, A]``, and the mean of their logarithms, ``[N]``."""
        params = self.policy(actor, obs)
        return jax.nn.softmax(params), -self.distribution.entropy(params)

    def target_entropy(self, obs: Any) -> jax.Array | float:
        """Return ``TARGET_SHARE`` of the mean entropy of actions at random."""
        number = self.num_actions if obs.legal is None else jnp.sum(obs.legal, axis=-1)
        return TARGET_SHARE * jnp.mean(jnp.log(number))
