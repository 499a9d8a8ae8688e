"""PQN: Q-learning without a replay or a target network (Gallici et al. 2025, arXiv 2407.04811).

Its targets are lambda returns of the newest trajectory, and layer normalisation keeps its values
from diverging. Minibatches, epochs, statistics and memory are PPO's, and exploration is DQN's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sebulba.agents.bases.on_policy import Extras
from sebulba.agents.dqn import DQN
from sebulba.agents.kernels.exploration import FallingEpsilon, HeldActions
from sebulba.agents.kernels.legal_actions import only_legal
from sebulba.agents.kernels.optimizer import masked_mean
from sebulba.agents.kernels.returns import value_of
from sebulba.agents.nets.policy_value import ActorCriticOutput
from sebulba.agents.nets.q_networks import QNetwork, discrete_actions
from sebulba.agents.ppo import PPO, Batch, Metrics
from sebulba.support.one_kernel import after
from sebulba.types import ActionOutput, EnvSpec, EnvStep, PyTree, RunSpec
from sebulba_pqn.config import PQNConfig


class StepState(NamedTuple):
    """What PQN carries from step to step."""

    key: jax.Array
    """Typed PRNG key of exploration."""
    core: PyTree
    """Recurrent state before the next observation, ``[B, ...]``; ``()`` where there is none."""
    scaling: PyTree
    """What the last observation was normalised with; ``()`` where it was not."""
    epsilon: FallingEpsilon
    """How much each environment explores."""
    held: PyTree
    """``HeldActions``; ``()`` where random actions last one step."""


class PQN(PPO):
    """PPO with the values of actions in place of a policy: they are its network's ``params``."""

    config: Any

    def __init__(self, spec: EnvSpec, config: PQNConfig) -> None:
        """Take the actions, of which a value each is learned.

        Raises:
          UsageError: Actions that are not discrete, or a space that networks cannot take.
        """
        self.actions = discrete_actions(spec.action_space, type(self).__name__)
        super().__init__(spec, config)  # type: ignore[arg-type]

    def new_network(self) -> QNetwork:
        return QNetwork(self.actions.num_params, self.config)

    def _evaluate(self, networks: PyTree, obs: PyTree, *rest: Any) -> ActorCriticOutput:
        """Evaluate rows; the value of one is the greatest value of an action there."""
        output: Any = self.network.apply({"params": networks}, *self._inputs(obs, *rest))
        values = only_legal(self.spec, obs, output.values)
        final: Any = ()
        if not isinstance(output.final_values, tuple):
            final = jnp.max(only_legal(self.spec, rest[-1], output.final_values), axis=-1)
        return ActorCriticOutput(values, jnp.max(values, axis=-1), output.core, final)

    # Exploration.

    new_epsilon: Any = DQN.new_epsilon
    explored: Any = DQN._explored

    def new_step_state(self, key: jax.Array, run: RunSpec, inferencer: int) -> Any:
        held = HeldActions.new(run.num_envs) if self.config.most_held_steps > 1 else ()
        epsilon = self.new_epsilon(run, inferencer)
        return StepState(*super().new_step_state(key, run, inferencer), epsilon, held)

    def advance_step_state(self, step_state: StepState, num_steps: int) -> StepState:
        return step_state._replace(epsilon=step_state.epsilon.advanced(num_steps))

    def step(  # type: ignore[override]
        self, networks: PyTree, step_state: StepState, env_step: EnvStep, *, explore: bool = True
    ) -> tuple[ActionOutput, StepState]:
        """Take the best action, or a random one with the probability of the environment."""
        output, scaling = self._evaluate_step(networks, step_state, env_step)  # type: ignore[arg-type]
        values, epsilon, held = output.params[0], step_state.epsilon, step_state.held
        key, explore_key = jax.random.split(after(step_state.key, values))
        index = self.actions.mode(values)
        if explore:
            index, held = self.explored(explore_key, index, epsilon.value, held, env_step)
        extras = Extras(index, jnp.zeros(index.shape))
        next_state = StepState(key, output.core, scaling, epsilon.advanced(), held)
        return ActionOutput(self.actions.action(index), extras), next_state

    def acting_distribution(  # type: ignore[override]
        self, networks: PyTree, step_state: StepState, env_step: EnvStep
    ) -> jax.Array:
        """Return 1 for the best action, which the evaluation policy takes, and 0 for others."""
        output, _ = self._evaluate_step(networks, step_state, env_step)  # type: ignore[arg-type]
        return jax.nn.one_hot(self.actions.mode(output.params[0]), self.actions.num_params)

    def _loss(
        self, networks: PyTree, opt: PyTree, core: PyTree, batch: Batch
    ) -> tuple[jax.Array, Metrics]:
        """Return half the mean square of what actions lack to their lambda returns.

        A value plus its generalized advantage estimate is its lambda return.
        """
        values = self.evaluate(networks, batch.obs, core, batch.is_first).params
        value = value_of(values, batch.raw)
        error = batch.value + batch.advantage - value
        return 0.5 * masked_mean(jnp.square(error), batch.valid), {
            "value": masked_mean(value, batch.valid),
            "td_error": masked_mean(jnp.abs(error), batch.valid),
            **self.normalization.metrics(batch.obs),
        }
