"""IMPALA in one file: importance-weighted actor-critic, trained on CartPole-v1.

    python examples/impala.py --seed 0 --env-steps 1000000

Read it from top to bottom; it follows the data. Two threads, the Inferencers, each act in B = 32
environments for T = 32 steps at a time. That is one cycle, and it makes one trajectory. The main
thread turns trajectories into updates and publishes the new networks to the Inferencers:

    environments --EnvStep [B]--> Agent.step --action [B]--> environments      T times, then
    trajectory [T+1, B] --> Agent.update_experience --> Agent.loss --> gradient --> Agent.optimize
        --> networks, published to the Inferencers for their next cycle

All arrays are time-major: axis 0 is time, axis 1 is the environment. ``GymnasiumLoop`` owns the
threads, the queue and the devices, and it compiles the functions of the agent. The agent is only
pure functions of arrays: this file is the whole algorithm, Espeholt et al. 2018, arXiv 1802.01561.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import time
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import sebulba
from sebulba import ActionOutput, EnvSpec, EnvStep, RunSpec, StepInfos, Trajectory
from sebulba.agent import TRAJECTORY_SPEC
from sebulba.agents.kernels.optimizer import masked_mean
from sebulba.agents.kernels.returns import transitions, vtrace

NUM_ENVS = 32
"""B: environments of each Inferencer."""
STEPS_PER_CYCLE = 32
"""T: environment steps in a trajectory."""


# 1. Hyper-parameters: a frozen dataclass, which the agent keeps as ``self.config``.


@dataclasses.dataclass(frozen=True)
class Config:
    """Hyper-parameters; the defaults are those of ``sebulba train cartpole``."""

    num_updates: int
    """Updates of the whole run, over which the learning rate falls linearly to 0."""
    learning_rate: float = 5e-3
    """Step size of Adam at the beginning."""
    adam_epsilon: float = 5e-3
    """Large, because a solved CartPole has almost no gradient and Adam divides by its size."""
    max_grad_norm: float = 0.5
    """Global norm to which gradients are clipped."""
    discount: float = 0.99
    """Discount per environment step."""
    reward_scale: float = 0.1
    """Multiplies rewards, so that values are near 10 and not near 100."""
    value_coefficient: float = 0.5
    """Weight of the value loss."""
    entropy_coefficient: float = 0.002
    """Weight of the entropy bonus."""
    hidden_sizes: tuple[int, ...] = (64, 64)
    """Units of the hidden layers."""


# 2. The network: any flax module. Dense layers act on the last axis, so the same module takes one
#    row of observations, [B, 4], when it acts, and a whole trajectory, [T+1, B, 4], in the loss.


class ActorCritic(nn.Module):
    """A policy and a value on one torso: ``[..., O] -> logits [..., A], value [...]``."""

    num_actions: int
    hidden_sizes: tuple[int, ...]

    @nn.compact
    def __call__(self, obs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the logits of all actions, and the value of each observation."""
        init = nn.initializers.orthogonal
        features = obs
        for size in self.hidden_sizes:
            features = nn.tanh(nn.Dense(size, kernel_init=init(2**0.5))(features))
        logits = nn.Dense(self.num_actions, kernel_init=init(0.01))(features)
        return logits, nn.Dense(1, kernel_init=init(1.0))(features)[..., 0]


# 3. The agent. The types of what travels are those of every agent: ``sebulba.EnvStep`` is what
#    environments show, ``sebulba.Trajectory`` is one cycle of an Inferencer.


class Impala(sebulba.Agent[Config]):
    """IMPALA for vectors of observations and discrete actions.

    Its state has four parts, split by who writes them: networks and the state of the optimizer
    (written by ``optimize``), experience (``update_experience``, here the newest trajectory), and
    for each Inferencer a step state (``step``, here the key of the random numbers that choose
    actions; a recurrent agent has its memory there).
    """

    def __init__(self, spec: EnvSpec, config: Config) -> None:
        """Describe network and optimizer; an agent holds no arrays."""
        super().__init__(spec, config)
        num_actions = int(spec.action_space.n)  # type: ignore[attr-defined]
        self.network: Any = ActorCritic(num_actions, config.hidden_sizes)
        rate = optax.linear_schedule(config.learning_rate, 0.0, config.num_updates)
        clip = optax.clip_by_global_norm(config.max_grad_norm)
        self.optimizer = optax.chain(clip, optax.adam(rate, eps=config.adam_epsilon))

    # 3a. Each part of the state when training begins.

    def new_networks(self, key: jax.Array) -> Any:
        """Return the initial parameters."""
        return self.network.init(key, jnp.zeros(self.spec.observation_space.shape))

    def new_opt(self, networks: Any) -> Any:
        """Return the state of a new optimizer; it counts the updates for the learning rate."""
        return self.optimizer.init(networks)

    def new_experience(self, key: jax.Array, networks: Any, run: RunSpec) -> Trajectory:
        """Return a trajectory of zeros, until the first one is there."""
        return self.empty_trajectory(networks, run)

    def new_step_state(self, key: jax.Array, run: RunSpec, inferencer: int) -> jax.Array:
        """Return the step state of one Inferencer; every one is given its own key."""
        return key

    # 3b. Acting, in the thread of an Inferencer: T times a cycle, on B environments at once.

    def step(
        self, networks: Any, step_state: jax.Array, env_step: EnvStep, *, explore: bool = True
    ) -> tuple[ActionOutput, jax.Array]:
        """Choose an action for each environment: obs [B, 4] -> logits [B, 2] -> action [B]."""
        logits, _ = self.network.apply(networks, env_step.obs)
        next_key, action_key = jax.random.split(step_state)
        action = jnp.argmax(logits, axis=-1)  # the evaluation policy does not explore
        if explore:
            action = jax.random.categorical(action_key, logits)
        # The environments receive the action. Extras are whatever the loss needs to know about
        # acting; they travel in the trajectory, beside the observation that was acted on.
        extras = log_prob_of(action, logits)  # [B]
        return ActionOutput(action.astype(self.spec.action_space.dtype), extras), next_key

    # 3c. Learning, in the main thread: once for every trajectory that the queue delivers. The
    #     trajectory was made by networks that are a few updates old, which V-trace allows for.
    #     With several update devices each sees its share of the B environments.

    def update_experience(
        self, experience, initial_step_state, final_step_state, trajectory: Trajectory, networks
    ) -> Trajectory:
        """Keep the new trajectory in place of the last one; an off-policy agent fills a replay."""
        return trajectory

    def loss(
        self, networks: Any, opt: Any, experience: Trajectory, key: jax.Array
    ) -> tuple[jax.Array, tuple[Trajectory, dict[str, jax.Array]]]:
        """Return the loss, the experience (an agent may change it here), and metrics."""
        config, trajectory = self.config, experience
        # A trajectory has T+1 rows of observations and T actions. Action t was taken in row t, and
        # its reward and flags are in row t+1. Row T is there for its value: nobody has acted on it.
        # obs [T+1, B, 4] -> logits [T+1, B, 2], value [T+1, B]
        logits, value = self.network.apply(networks, trajectory.env_step.obs)
        logits = logits[:-1]  # [T, B, 2]

        # Reward, discount (0 after a terminal state), `last` (an episode ended here) and `valid`,
        # each [T, B]. Environments insert a reset after the end of an episode; it is not a
        # transition, so it is not valid and counts for nothing.
        step = transitions(trajectory, config.discount, config.reward_scale)

        # How much likelier each action is now than when it was taken: 1 if the lag were 0. V-trace
        # clips it at 1 and corrects the targets of the older policy's data with it (section 4.1).
        log_prob = log_prob_of(trajectory.action, logits)  # [T, B]
        rho = jnp.exp(log_prob - trajectory.extras)  # [T, B]

        # The kernel takes the stream of a single environment, [T]; vmap gives it all B of them.
        targets = jax.vmap(vtrace, in_axes=1, out_axes=1)(value, step, rho)  # leaves [T, B]

        # The three parts of section 4.2, means over the valid transitions of all update devices.
        policy_loss = masked_mean(-targets.advantage * log_prob, step.valid)
        value_error = targets.value_target - value[:-1]
        value_loss = 0.5 * masked_mean(jnp.square(value_error), step.valid)
        entropy = masked_mean(entropy_of(logits), step.valid)
        loss = (
            policy_loss
            + config.value_coefficient * value_loss
            - config.entropy_coefficient * entropy
        )
        metrics = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
        return loss, (experience, metrics)

    def optimize(self, networks: Any, opt: Any, grads: Any) -> tuple[Any, Any]:
        """Take one step of Adam; ``grads`` is already the mean over the update devices.

        The loop publishes the networks that come out; an Inferencer takes the newest ones when it
        begins a cycle.
        """
        updates, opt = self.optimizer.update(grads, opt, networks)
        return optax.apply_updates(networks, updates), opt

    def experience_spec(self) -> Trajectory:
        """Say how several update devices share the experience: by environments."""
        return TRAJECTORY_SPEC


def log_prob_of(action: jax.typing.ArrayLike, logits: jax.Array) -> jax.Array:
    """Return the log-probability of ``action [...]`` under ``logits [..., A]``."""
    chosen = jax.nn.one_hot(action, logits.shape[-1])  # a gather would be slower on a CPU
    return jnp.sum(chosen * jax.nn.log_softmax(logits), axis=-1)


def entropy_of(logits: jax.Array) -> jax.Array:
    """Return the entropy of the policy in each row, ``[..., A] -> [...]``."""
    log_probs = jax.nn.log_softmax(logits)
    return -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)


# 4. Watching: the loop calls this with every trajectory that it has consumed.


class Progress:
    """The mean return of the last 100 episodes, over the environment steps consumed so far."""

    goal = 475.0
    """Mean return at which CartPole-v1 counts as solved."""

    def __init__(self) -> None:
        """Begin before the first trajectory."""
        self.returns: collections.deque[float] = collections.deque(maxlen=100)
        self.env_steps = 0
        self.solved_at: int | None = None
        self.times: list[float] = []  # when each trajectory was consumed, in seconds
        self._printed_at = 0.0

    def __call__(self, trajectory: Trajectory, infos: StepInfos) -> None:
        """Count a trajectory; ``infos`` has the returns of the episodes that ended in it."""
        self.returns.extend(infos.episode_returns)
        self.env_steps += infos.unclipped_reward.size  # [T, B]
        if self.solved_at is None and len(self.returns) == 100 and self.mean >= self.goal:
            self.solved_at = self.env_steps
        self.times.append(time.perf_counter())
        if self.times[-1] - self._printed_at > 0.5:
            self._printed_at = self.times[-1]
            print(f"{self.env_steps:>9,} env steps: mean return {self.mean:5.1f}", flush=True)

    @property
    def mean(self) -> float:
        """Mean return of the last 100 episodes; NaN while none has ended."""
        return float(np.mean(self.returns)) if self.returns else float("nan")

    @property
    def env_steps_per_s(self) -> float:
        """Speed from the second trajectory on; the first one waits for compiles."""
        share = 1 - 1 / len(self.times)
        return share * self.env_steps / max(self.times[-1] - self.times[0], 1e-9)


# 5. All of it together.


def train(seed: int, env_steps: int, **options: Any) -> Progress:
    """Train for about ``env_steps``; ``options`` are those of ``GymnasiumLoop``."""
    num_cycles = env_steps // (STEPS_PER_CYCLE * NUM_ENVS)  # each makes a trajectory and an update
    env = sebulba.make_env_factory("CartPole-v1")  # envpool's: compiled into the cycle on a CPU
    agent = Impala(sebulba.env_spec(env), Config(num_updates=num_cycles))
    progress = Progress()
    options = {"seed": seed, "observe_cycle": progress, **options}
    with sebulba.GymnasiumLoop(env, agent, NUM_ENVS, **options) as loop:
        state = loop.new_state(seed, STEPS_PER_CYCLE)
        loop.run(state, num_cycles, STEPS_PER_CYCLE)
    return progress


def main() -> Progress:
    """Train as the command line says, and say what came of it."""
    parser = argparse.ArgumentParser(description="Train IMPALA on CartPole-v1.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--env-steps", type=int, default=1_000_000)
    args = parser.parse_args()
    # On one CPU, programs run in the thread that calls them, and do not wait for each other.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    progress = train(args.seed, args.env_steps)
    solved = f"{progress.solved_at:,}" if progress.solved_at else "none"
    print(f"env steps until the mean return was {progress.goal:g}: {solved}")
    print(f"mean return of the last 100 episodes: {progress.mean:.1f}")
    print(f"env steps/s, compiles left out: {progress.env_steps_per_s:,.0f}")
    return progress


if __name__ == "__main__":
    main()
