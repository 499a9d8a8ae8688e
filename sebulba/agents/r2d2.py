"""R2D2: Q-learning on sequences, with a recurrent state that is stored with them.

Source: Kapturowski et al. 2019, Recurrent experience replay in distributed reinforcement learning
(openreview.net/forum?id=r1lyTjAqYX).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sebulba.agents.bases.off_policy import OffPolicyAgent, Opt, replay_options
from sebulba.agents.configs import R2D2Config
from sebulba.agents.kernels.exploration import epsilon_greedy, exploration_ladder
from sebulba.agents.kernels.optimizer import masked_mean
from sebulba.agents.kernels.returns import (
    Transitions,
    double_q_values,
    n_step_returns,
    rescale_value,
    restore_value,
    transitions,
)
from sebulba.agents.nets.q_networks import QNetwork, QOutput, discrete_actions, value_of
from sebulba.agents.replay.layouts import Replay, SequenceReplay
from sebulba.errors import UsageError
from sebulba.one_kernel import after
from sebulba.types import (
    ActionOutput,
    EnvSpec,
    EnvStep,
    PyTree,
    RunSpec,
    empty_env_step,
)


class StepState(NamedTuple):
    """What R2D2 carries from step to step."""

    key: jax.Array
    """Typed PRNG key of exploration."""
    epsilon: jax.Array
    """Probability of a random action, ``[B]``."""
    core: PyTree
    """Recurrent state before the next observation, ``[B, ...]``; ``()`` where there is none."""


class R2D2(OffPolicyAgent[R2D2Config]):
    """Double Q-learning of n steps on prioritized sequences that overlap."""

    replay: SequenceReplay
    """Where batches are drawn."""

    def __init__(self, spec: EnvSpec, config: R2D2Config) -> None:
        """Build the network's description; no arrays are made.

        Raises:
          UsageError: A space that the agent cannot take.
        """
        self.actions = discrete_actions(spec.action_space, "R2D2")
        self._first_action = int(spec.action_space.start)  # type: ignore[attr-defined]
        options = replay_options(spec, config.replay)
        replay = SequenceReplay(length=config.burn_in + config.sequence_length, **options)
        super().__init__(spec, config, replay)
        self.network = QNetwork(
            num_actions=self.actions.num_params,
            torso=config.torso,
            head_hidden_sizes=config.head_hidden_sizes,
            dueling=config.dueling,
            lstm_size=config.lstm_size,
        )
        # Refuses an observation space here rather than in a thread.
        jax.eval_shape(self.new_networks, jax.eval_shape(jax.random.key, 0))

    def check_run(self, run: RunSpec) -> None:
        """Check that sequences begin and end where trajectories do.

        Raises:
          UsageError: A hyper-parameter does not fit ``run``.
        """
        period, num_rows = run.steps_per_cycle, self.replay.length
        if num_rows % period:
            less = num_rows // period * period
            nearest = [n - self.config.burn_in for n in (less, less + period)]
            fits = " or ".join(str(n) for n in nearest if n > 0)
            raise UsageError(
                f"sequence_length={self.config.sequence_length} after burn_in="
                f"{self.config.burn_in} makes {num_rows} rows, which must be a multiple of "
                f"steps_per_cycle={period}, at which sequences begin; use sequence_length={fits}"
            )
        super().check_run(run)

    # Networks and acting.

    def evaluate(self, networks: PyTree, rows: EnvStep, core: PyTree) -> QOutput:
        """Evaluate the network on rows ``[T, B, ...]`` from recurrent state ``core [B, ...]``."""
        return self.network.apply({"params": networks}, *self._inputs(rows, core))  # type: ignore[return-value]

    def _inputs(self, rows: EnvStep, core: PyTree) -> tuple:
        """Return the arguments of the network.

        Where an episode begins nothing is seen of the one before, neither its recurrent state nor
        its last action and reward.
        """
        encoded = self.encode(rows.obs, num_leading=2)
        is_first = jnp.asarray(rows.is_first)
        if not self.config.lstm_size:
            return encoded, core, is_first, None
        action = jnp.asarray(rows.prev_action) - self._first_action
        reward = self.config.reward_scale * jnp.asarray(rows.reward)
        one_hot = jax.nn.one_hot(action, self.actions.num_params)
        past = jnp.concatenate([one_hot, reward[..., None]], axis=-1)
        past = jnp.where(is_first[..., None], 0.0, past)
        return encoded, core, is_first, past.reshape(is_first.size, -1)

    def new_networks(self, key: jax.Array) -> PyTree:
        """Return initial parameters."""
        row = jax.tree.map(lambda x: jnp.asarray(x)[None], empty_env_step(self.spec, 1))
        return self.network.init(key, *self._inputs(row, self._new_core(1)))["params"]

    def new_step_state(self, key: jax.Array, run: RunSpec, inferencer: int) -> StepState:
        """Return a key, this Inferencer's part of the ladder, and a recurrent state of zeros."""
        config = self.config
        epsilon = exploration_ladder(
            run, inferencer, base=config.epsilon, exponent=config.epsilon_exponent
        )
        return StepState(key, epsilon, self._new_core(run.num_envs))

    def _new_core(self, num_envs: int) -> PyTree:
        size = self.config.lstm_size
        return tuple(jnp.zeros((num_envs, size)) for _ in range(2)) if size else ()

    def step(
        self, networks: PyTree, step_state: StepState, env_step: EnvStep, *, explore: bool = True
    ) -> tuple[ActionOutput, StepState]:
        """Take the best action, or a random one with the probability of the environment."""
        row = jax.tree.map(lambda x: jnp.asarray(x)[None], env_step)
        values, core = self.evaluate(networks, row, step_state.core)
        key, explore_key = jax.random.split(after(step_state.key, values))
        index = self.actions.mode(values[0])
        if explore:
            num_actions = self.actions.num_params
            index = epsilon_greedy(explore_key, index, num_actions, step_state.epsilon)
        return ActionOutput(self.actions.action(index)), step_state._replace(key=key, core=core)

    # Learning.

    def recurrent_state(self, step_state: StepState) -> PyTree:
        """Return the recurrent state, which is stored with the first row of a trajectory."""
        return step_state.core

    def loss(
        self, networks: PyTree, opt: Opt, experience: Replay, key: jax.Array
    ) -> tuple[jax.Array, tuple[Replay, dict[str, jax.Array]]]:
        """Return the mean squared error of a batch of sequences, and set their priorities."""
        config = self.config
        draw, weight = self.draw(experience, key)
        sequence = self.replay.sequences(experience, draw)
        core = sequence.core
        if not config.stored_state:
            core = jax.tree.map(jnp.zeros_like, core)
        values = self._unroll(networks, sequence.env_step, core)
        target_values = self._unroll(opt.target, sequence.env_step, core)
        learned = jax.tree.map(lambda x: x[config.burn_in :], sequence._replace(core=()))
        step = transitions(learned, config.discount, config.reward_scale)
        target = self._targets(values, target_values, step)
        error = target - value_of(values[:-1], learned.action - self._first_action)
        error = jnp.where(step.valid, error, 0.0)
        loss = 0.5 * masked_mean(weight[None] * jnp.square(error), step.valid)
        size = jnp.abs(error)
        metrics = {
            "value": masked_mean(jnp.max(values[:-1], axis=-1), step.valid),
            "td_error": masked_mean(size, step.valid),
            **self.replay_metrics(experience, opt, config.sequence_length),
        }
        priority = sequence_priority(size, step.valid, config.priority_max_share)
        experience = self.set_priority(experience, draw, priority)
        return loss, (experience, metrics)

    def _unroll(self, networks: PyTree, rows: EnvStep, core: PyTree) -> jax.Array:
        """Return the values of the rows after burn-in, through which no gradient goes."""
        burn_in = self.config.burn_in
        if burn_in:
            before = jax.tree.map(lambda x: x[:burn_in], rows)
            core = jax.lax.stop_gradient(self.evaluate(networks, before, core).core)
        rest = jax.tree.map(lambda x: x[burn_in:], rows)
        return self.evaluate(networks, rest, core).values

    def _targets(self, values: jax.Array, target_values: jax.Array, step: Transitions) -> jax.Array:
        """Return n-step double-Q targets, ``[T, B]``, of values ``[T+1, B, A]``."""
        bootstrap = double_q_values(target_values, values)
        rescale = self.config.rescale_values
        bootstrap = restore_value(bootstrap) if rescale else bootstrap
        kernel = functools.partial(n_step_returns, num_steps=self.config.num_steps)
        returns = jax.vmap(kernel, in_axes=1, out_axes=1)(bootstrap, step)
        return rescale_value(returns) if rescale else returns


def sequence_priority(size: jax.Array, valid: jax.Array, max_share: float) -> jax.Array:
    """Return ``eta max |delta| + (1 - eta) mean |delta|`` of each sequence, ``[B]``.

    Source: Kapturowski et al. 2019, section 2.3, with eta of 0.9.

    Args:
      size: Absolute temporal differences, ``[T, B]``, 0 where not valid.
      valid: ``[T, B]`` bool.
      max_share: Eta.
    """
    mean = jnp.sum(size, axis=0) / jnp.maximum(jnp.sum(valid, axis=0), 1)
    return max_share * jnp.max(size, axis=0) + (1.0 - max_share) * mean
