"""DQN with double, dueling, n-step, prioritized, distributional and noisy variants.

Sources: Mnih et al. 2015 (doi 10.1038/nature14236); double: van Hasselt et al. 2016 (arXiv
1509.06461); dueling: Wang et al. 2016 (arXiv 1511.06581); prioritized: Schaul et al. 2016 (arXiv
1511.05952); n-step, and a ladder of exploration: Horgan et al. 2018 (arXiv 1803.00933);
distributional: Bellemare et al. 2017 (C51, arXiv 1707.06887) and Dabney et al. 2018 (QR-DQN, arXiv
1710.10044); noisy: Fortunato et al. 2018 (arXiv 1706.10295).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from sebulba.agent import Loss
from sebulba.agents.bases.off_policy import Opt
from sebulba.agents.bases.value_based import StepState, ValueBasedAgent
from sebulba.agents.configs import DQNConfig
from sebulba.agents.kernels.exploration import FallingEpsilon, exploration_ladder
from sebulba.agents.kernels.legal_actions import only_legal
from sebulba.agents.kernels.returns import double_q_values, value_of
from sebulba.agents.kernels.value_distributions import categorical_td, logits_of, quantile_td
from sebulba.agents.nets.q_networks import NOISE
from sebulba.agents.replay.transitions_and_sequences import Replay, TransitionReplay
from sebulba.support.key_streams import LAYER_NOISE_STREAM
from sebulba.types import EnvSpec, PyTree, RunSpec


class DQN(ValueBasedAgent[DQNConfig, TransitionReplay]):
    """Q-learning on transitions drawn from a replay, towards a target network."""

    uses_final_obs = True

    def __init__(self, spec: EnvSpec, config: DQNConfig) -> None:
        replay = TransitionReplay.of(spec, config.replay, num_steps=config.num_steps)
        super().__init__(spec, config, replay)

    def new_epsilon(self, run: RunSpec, inferencer: int) -> FallingEpsilon:
        config = self.config
        first, last = config.initial_epsilon, config.final_epsilon
        if config.noisy:
            first = last = 0.0
        final = exploration_ladder(run, inferencer, base=last, exponent=config.epsilon_exponent)
        return FallingEpsilon.new(first, final, config.exploration_env_steps, run)

    def stepped_epsilon(self, epsilon: FallingEpsilon) -> tuple[jax.Array, FallingEpsilon]:
        return epsilon.value, epsilon.advanced()

    def advance_step_state(self, step_state: StepState, num_steps: int) -> StepState:
        return step_state._replace(epsilon=step_state.epsilon.advanced(num_steps))

    def values(self, networks: PyTree, obs: PyTree) -> jax.Array:
        """Return the values of all actions, ``[N, A]``, of observations ``[N, ...]``."""
        return self._values_and_logits(networks, obs)[0]

    def _values_and_logits(
        self, networks: PyTree, obs: PyTree, **rngs: jax.Array
    ) -> tuple[jax.Array, Any]:
        """Return ``values``, and of distributions the logits or quantiles ``[N, A, atoms]``."""
        encoded = self.encode(obs, num_leading=1)
        is_first = jnp.zeros((1, encoded.vector.shape[0]), jnp.bool_)
        output: Any = self.network.apply({"params": networks}, encoded, (), is_first, rngs=rngs)
        logits = jax.tree.map(lambda x: x[0], output.logits)
        return only_legal(self.spec, obs, output.values[0]), logits

    def loss(self, networks: PyTree, opt: Opt, experience: Replay, key: jax.Array) -> Loss:
        """Return the mean loss of a batch, and set the priorities of its transitions.

        These are the sizes of temporal differences; with atoms, the divergences from the targets.
        """
        config = self.config
        draw, weight = self.draw(experience, key)
        batch = self.gathered(experience, draw)
        index = self.actions.index(batch.action)
        noise_keys = jax.random.split(jax.random.fold_in(key, LAYER_NOISE_STREAM), 3)
        rngs, of_target, of_choice = ({NOISE: k} if config.noisy else {} for k in noise_keys)
        of = self._values_and_logits
        values, logits = of(networks, batch.obs, **rngs)
        value = value_of(values, index)
        target_values, target_logits = of(opt.target, batch.next_obs, **of_target)
        chosen_by = target_values
        if config.double:
            chosen_by, _ = of(networks, batch.next_obs, **of_choice)
        next_value = double_q_values(target_values, chosen_by)
        reward = config.reward_scale * batch.reward
        error = reward + batch.discount * next_value - value
        priority = jnp.abs(error)
        if not (config.atoms or config.quantiles):
            losses = (optax.huber_loss if config.loss == "huber" else optax.l2_loss)(error)
        else:
            next_logits = logits_of(target_logits, jnp.argmax(chosen_by, axis=-1))
            given = logits_of(logits, index), next_logits, reward, batch.discount
            if config.quantiles:
                losses = jax.vmap(quantile_td)(*given)
            else:
                kernel = functools.partial(categorical_td, support=jnp.asarray(config.support))
                losses, priority = jax.vmap(kernel)(*given)
        loss = jnp.mean(weight * losses)
        metrics = {
            "value": jnp.mean(value),
            "td_error": jnp.mean(jnp.abs(error)),
            **self.replay_metrics(experience, opt),
        }
        experience = self.set_priority(experience, draw, priority)
        return loss, (experience, metrics)
