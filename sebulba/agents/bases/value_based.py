"""What agents that learn the values of discrete actions share: network, memory, exploration."""

from __future__ import annotations

import abc
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from sebulba.agents.bases.off_policy import OffPolicyAgent, ReplayT
from sebulba.agents.configs.off_policy import ValueBasedConfig
from sebulba.agents.kernels.exploration import HeldActions, epsilon_greedy, held_epsilon_greedy
from sebulba.agents.kernels.legal_actions import legal_mask, only_legal
from sebulba.agents.kernels.optimizer import make_optimizer
from sebulba.agents.nets.encoder import Encoded, ObservationEncoder
from sebulba.agents.nets.q_networks import NOISE, QNetwork, QOutput, discrete_actions
from sebulba.agents.nets.torso import zero_core
from sebulba.support.key_streams import LAYER_NOISE_STREAM
from sebulba.support.one_kernel import after
from sebulba.types import ActionOutput, EnvSpec, EnvStep, FinalObs, PyTree, RunSpec, empty_env_step

ConfigT = TypeVar("ConfigT", bound=ValueBasedConfig)


class StepState(NamedTuple):
    """What a value-based agent carries from step to step."""

    key: jax.Array
    """Typed PRNG key of exploration."""
    epsilon: PyTree
    """How much each environment explores, as ``ValueBasedAgent.new_epsilon`` returns it."""
    core: PyTree
    """Recurrent state before the next observation, ``[B, ...]``; ``()`` where there is none."""
    held: PyTree = ()
    """``HeldActions``; ``()`` where random actions last one step."""


class ValueBasedAgent(OffPolicyAgent[ConfigT, ReplayT], Generic[ConfigT, ReplayT]):
    """An agent that takes the action of the greatest value; a subclass adds ``loss``."""

    def __init__(self, spec: EnvSpec, config: ConfigT, replay: ReplayT) -> None:
        """Build the network's description; no arrays are made.

        Raises:
          UsageError: A space that the agent cannot take.
        """
        self.actions = discrete_actions(spec.action_space, type(self).__name__)
        self.encode = ObservationEncoder(spec, config.torso)
        self.network = QNetwork(
            self.actions.num_params, config, config.support, config.quantiles or 0, config.noisy
        )
        super().__init__(
            spec, config, replay, make_optimizer(config.learning_rate, config.optimizer)
        )

    # Exploration, which a subclass decides.

    @abc.abstractmethod
    def new_epsilon(self, run: RunSpec, inferencer: int) -> PyTree:
        """Return the initial state of exploration of an Inferencer's environments."""

    def stepped_epsilon(self, epsilon: PyTree) -> tuple[jax.Array, PyTree]:
        """Return the probability of a random action now, ``[B]``, and the state for the next step.

        The default is for a state that is the probability itself and stays constant.
        """
        return epsilon, epsilon

    # Networks.

    def evaluate(self, networks: PyTree, rows: EnvStep, core: PyTree, **rngs: jax.Array) -> QOutput:
        """Evaluate the network on rows ``[T, B, ...]`` from recurrent state ``core [B, ...]``.

        ``rngs`` are typed keys by stream: that of noisy layers, which have no noise without it.
        """
        output = self.network.apply({"params": networks}, *self._inputs(rows, core), rngs=rngs)
        values: jax.Array = only_legal(self.spec, rows.obs, output.values)  # type: ignore[union-attr]
        final = output.final_values  # type: ignore[union-attr]
        if isinstance(rows.final, FinalObs):
            final = only_legal(self.spec, rows.final.obs, final)
        return output._replace(values=values, final_values=final)  # type: ignore[union-attr]

    def _inputs(self, rows: EnvStep, core: PyTree) -> tuple:
        """Return the arguments of the network.

        Where an episode begins, the network sees nothing of the one before: the recurrent state is
        reset, and the last action and reward are zeros.
        """
        encoded = self.encode(rows.obs, num_leading=2)
        is_first = jnp.asarray(rows.is_first)
        final: Encoded | None = None
        if isinstance(rows.final, FinalObs):
            final = self.encode(rows.final.obs, num_leading=2)
        if not self.config.lstm_size:
            return encoded, core, is_first, final
        index = self.actions.index(jnp.asarray(rows.prev_action))
        reward = self.config.reward_scale * jnp.asarray(rows.reward)
        if self.config.seen_reward == "tanh":
            reward = jnp.tanh(reward)
        one_hot = jax.nn.one_hot(index, self.actions.num_params)
        led_here = jnp.concatenate([one_hot, reward[..., None]], axis=-1)
        past = jnp.where(is_first[..., None], 0.0, led_here).reshape(is_first.size, -1)
        final_past = None if final is None else led_here.reshape(is_first.size, -1)
        return encoded, core, is_first, final, past, final_past

    def new_networks(self, key: jax.Array) -> PyTree:
        row = jax.tree.map(lambda x: jnp.asarray(x)[None], empty_env_step(self.spec, 1))
        return self.network.init(key, *self._inputs(row, zero_core(self.config, 1)))["params"]

    # Acting.

    def new_step_state(self, key: jax.Array, run: RunSpec, inferencer: int) -> StepState:
        core = zero_core(self.config, run.num_envs)
        held = HeldActions.new(run.num_envs) if self.config.most_held_steps > 1 else ()
        return StepState(key, self.new_epsilon(run, inferencer), core, held)

    def step(
        self, networks: PyTree, step_state: StepState, env_step: EnvStep, *, explore: bool = True
    ) -> tuple[ActionOutput, StepState]:
        """Take the best action, or a random one with the probability of the environment."""
        rngs = {}
        if explore and self.config.noisy:
            rngs[NOISE] = jax.random.fold_in(step_state.key, LAYER_NOISE_STREAM)
        values, core, *_ = self._evaluate_step(networks, step_state, env_step, **rngs)
        key, explore_key = jax.random.split(after(step_state.key, values))
        index = self.actions.mode(values[0])
        probability, epsilon = self.stepped_epsilon(step_state.epsilon)
        held = step_state.held
        if explore:
            index, held = self._explored(explore_key, index, probability, held, env_step)
        return ActionOutput(self.actions.action(index)), StepState(key, epsilon, core, held)

    def _explored(
        self, key: jax.Array, greedy: jax.Array, epsilon: jax.Array, held: PyTree, row: EnvStep
    ) -> tuple[jax.Array, PyTree]:
        """Return what is taken instead of ``greedy [B]``, and the random actions that last."""
        legal, number = legal_mask(self.spec, row.obs), self.actions.num_params
        if not isinstance(held, HeldActions):
            return epsilon_greedy(key, greedy, number, epsilon, legal), held
        most, is_first = self.config.most_held_steps, jnp.asarray(row.is_first)
        return held_epsilon_greedy(key, greedy, number, epsilon, held, most, is_first, legal)

    def _evaluate_step(
        self, networks: PyTree, step_state: StepState, env_step: EnvStep, **rngs: jax.Array
    ) -> QOutput:
        """Evaluate acting networks on one row, ``[1, B, ...]``."""
        networks, env_step = self.as_seen(networks, env_step)
        row = jax.tree.map(lambda x: jnp.asarray(x)[None], env_step._replace(final=()))
        return self.evaluate(networks, row, step_state.core, **rngs)

    def restored(self, values: jax.Array) -> jax.Array:
        """Return values of the network as sums of scaled rewards, which most are already."""
        return values

    def acting_value(
        self, networks: PyTree, value_networks: PyTree, step_state: StepState, env_step: EnvStep
    ) -> jax.Array:
        """Return the greatest value of an action, ``[B]``, in units of the environment."""
        best = jnp.max(self._evaluate_step(networks, step_state, env_step).values[0], axis=-1)
        return self.restored(best) / self.config.reward_scale

    def acting_distribution(
        self, networks: PyTree, step_state: StepState, env_step: EnvStep
    ) -> jax.Array:
        """Return 1 for the best action, which the evaluation policy takes, and 0 for others."""
        values = self._evaluate_step(networks, step_state, env_step).values[0]
        return jax.nn.one_hot(self.actions.mode(values), self.actions.num_params)

    def recurrent_state(self, step_state: StepState) -> PyTree:
        """Return the recurrent state, which is stored with the first row of a trajectory."""
        return step_state.core
