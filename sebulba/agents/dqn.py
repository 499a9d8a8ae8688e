"""DQN with double, dueling, n-step and prioritized variants.

Sources: Mnih et al. 2015 (doi 10.1038/nature14236); double: van Hasselt et al. 2016 (arXiv
1509.06461); dueling: Wang et al. 2016 (arXiv 1511.06581); prioritized: Schaul et al. 2016 (arXiv
1511.05952); n-step, and a ladder of exploration: Horgan et al. 2018 (arXiv 1803.00933).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from sebulba.agents.bases.off_policy import OffPolicyAgent, Opt, replay_options
from sebulba.agents.configs import DQNConfig
from sebulba.agents.kernels.exploration import FallingEpsilon, epsilon_greedy, exploration_ladder
from sebulba.agents.kernels.returns import double_q_values
from sebulba.agents.nets.q_networks import QNetwork, discrete_actions, value_of
from sebulba.agents.replay.layouts import Replay, TransitionReplay
from sebulba.one_kernel import after
from sebulba.types import ActionOutput, EnvSpec, EnvStep, PyTree, RunSpec, empty_env_step


class StepState(NamedTuple):
    """What DQN carries from step to step."""

    key: jax.Array
    """Typed PRNG key of exploration."""
    epsilon: FallingEpsilon
    """Probability of a random action, ``[B]``."""


class DQN(OffPolicyAgent[DQNConfig]):
    """Q-learning on transitions drawn from a replay, towards a target network."""

    replay: TransitionReplay
    """Where batches are drawn."""

    def __init__(self, spec: EnvSpec, config: DQNConfig) -> None:
        """Build the network's description; no arrays are made.

        Raises:
          UsageError: A space that the agent cannot take.
        """
        self.actions = discrete_actions(spec.action_space, "DQN")
        self._first_action = int(spec.action_space.start)  # type: ignore[attr-defined]
        options = replay_options(spec, config.replay)
        replay = TransitionReplay(num_steps=config.num_steps, **options)
        super().__init__(spec, config, replay)
        self.network = QNetwork(
            num_actions=self.actions.num_params,
            torso=config.torso,
            head_hidden_sizes=config.head_hidden_sizes,
            dueling=config.dueling,
        )
        # Refuses an observation space here rather than in a thread.
        jax.eval_shape(self.new_networks, jax.eval_shape(jax.random.key, 0))

    def values(self, networks: PyTree, obs: PyTree) -> jax.Array:
        """Return the values of all actions, ``[N, A]``, of observations ``[N, ...]``."""
        encoded = self.encode(obs, num_leading=1)
        is_first = jnp.zeros((1, encoded.vector.shape[0]), jnp.bool_)
        output = self.network.apply({"params": networks}, encoded, (), is_first)
        return output.values[0]  # type: ignore[union-attr]

    def new_networks(self, key: jax.Array) -> PyTree:
        """Return initial parameters."""
        encoded = self.encode(empty_env_step(self.spec, 1).obs, num_leading=1)
        return self.network.init(key, encoded, (), jnp.zeros((1, 1), jnp.bool_))["params"]

    def new_step_state(self, key: jax.Array, run: RunSpec, inferencer: int) -> StepState:
        """Return a key and the exploration of this Inferencer's environments."""
        config = self.config
        final = exploration_ladder(
            run, inferencer, base=config.final_epsilon, exponent=config.epsilon_exponent
        )
        steps = config.exploration_env_steps
        return StepState(key, FallingEpsilon.new(config.initial_epsilon, final, steps, run))

    def step(
        self, networks: PyTree, step_state: StepState, env_step: EnvStep, *, explore: bool = True
    ) -> tuple[ActionOutput, StepState]:
        """Take the best action, or a random one with probability epsilon."""
        values = self.values(networks, env_step.obs)
        key, explore_key = jax.random.split(after(step_state.key, values))
        index = self.actions.mode(values)
        if explore:
            index = epsilon_greedy(
                explore_key, index, self.actions.num_params, step_state.epsilon.value
            )
        return ActionOutput(self.actions.action(index)), StepState(
            key, step_state.epsilon.stepped()
        )

    def loss(
        self, networks: PyTree, opt: Opt, experience: Replay, key: jax.Array
    ) -> tuple[jax.Array, tuple[Replay, dict[str, jax.Array]]]:
        """Return the mean loss of the temporal differences of a batch, and set their priorities."""
        config = self.config
        draw, weight = self.draw(experience, key)
        batch = self.replay.transitions(experience, draw, config.discount)
        index = batch.action - self._first_action
        value = value_of(self.values(networks, batch.obs), index)
        target_values = self.values(opt.target, batch.next_obs)
        chosen_by = self.values(networks, batch.next_obs) if config.double else target_values
        next_value = double_q_values(target_values, chosen_by)
        target = config.reward_scale * batch.reward + batch.discount * next_value
        error = target - value
        loss_of = optax.huber_loss if config.loss == "huber" else optax.l2_loss
        loss = jnp.mean(weight * loss_of(error))
        metrics = {
            "value": jnp.mean(value),
            "td_error": jnp.mean(jnp.abs(error)),
            **self.replay_metrics(experience, opt),
        }
        experience = self.set_priority(experience, draw, jnp.abs(error))
        return loss, (experience, metrics)
