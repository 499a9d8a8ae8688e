"""Ready experiments with Impala."""

from __future__ import annotations

import dataclasses

from sebulba.agents.configs import ImpalaConfig, OptimizerConfig, TorsoConfig
from sebulba.configs.experiment import EnvConfig, ExperimentConfig
from sebulba.configs.preset import ATARI as ATARI_ENV
from sebulba.configs.preset import Presets

PRESETS = Presets()


@PRESETS.add("impala", "Impala for any task")
def neutral() -> ExperimentConfig:
    """Return Impala for any task: a vector or an image, discrete or continuous actions.

    What a task would have to choose is normalised: observations, rewards (so that values are near
    1, whatever rewards are) and advantages (so that the gradient of the policy and the entropy
    bonus keep their proportion). Value and policy have a torso each, since the value's gradient
    would take most of the gradient norm of a shared one. A trajectory of 2048 transitions is
    learned from eight times, with PPO's limit to the probability ratio (as in Luo et al. 2020,
    arXiv 1912.00167): one update on each small trajectory learned too little, or stayed in a poor
    optimum, and several without the limit collapsed (docs/measurements).
    """
    return ExperimentConfig(
        env=EnvConfig("CartPole-v1"),
        agent=ImpalaConfig(
            learning_rate=5e-4,
            trace_decay=0.95,
            epochs=8,
            minibatches=4,
            ratio_clip=0.2,
            normalize_observations=True,
            normalize_rewards=True,
            normalize_advantages=True,
            initial_std=1.0,
            separate_value_torso=True,
        ),
        total_env_steps=3_000_000,
        anneal_learning_rate=True,
        num_envs=16,
        steps_per_cycle=128,
    )


@PRESETS.add("cartpole", "Impala, small MLP, envpool CartPole-v1", goal=475)
def cartpole() -> ExperimentConfig:
    """Return Impala with a small MLP on envpool's CartPole-v1.

    Its rewards of 1 add up to values near 100, whose loss would drown the policy's in a shared
    torso; scaled rewards keep values near 10. Adam's epsilon is large because a solved CartPole has
    almost no gradient: with a small one the first failure after a long perfect stretch takes a step
    so large that the policy collapses for good (docs/measurements has the seeds).
    """
    return ExperimentConfig(
        env=EnvConfig("CartPole-v1"),
        agent=ImpalaConfig(
            learning_rate=5e-3,
            entropy_coefficient=0.002,
            reward_scale=0.1,
            optimizer=OptimizerConfig(epsilon=5e-3),
        ),
        total_env_steps=1_000_000,
        anneal_learning_rate=True,
        num_envs=32,
    )


@PRESETS.add("pendulum", "Impala, Gaussian policy, envpool Pendulum-v1", goal=-400)
def pendulum() -> ExperimentConfig:
    """Return Impala with a Gaussian policy on Pendulum-v1.

    Rewards lie between -16 and 0; the short horizon and the scale bring values near -1. Without
    the entropy bonus the noise dies out before the policy has learned to swing up.
    """
    return ExperimentConfig(
        env=EnvConfig("Pendulum-v1"),
        agent=ImpalaConfig(
            learning_rate=3e-4,
            discount=0.9,
            trace_decay=0.95,
            entropy_coefficient=0.003,
            reward_scale=0.1,
            initial_std=1.0,
        ),
        total_env_steps=3_000_000,
        num_envs=32,
        steps_per_cycle=16,
    )


@PRESETS.add("atari-impala", "Impala, Nature CNN, any Atari game")
@PRESETS.add("pong", "Impala, Nature CNN, envpool Pong-v5")
def atari() -> ExperimentConfig:
    """Return Impala on Pong, or with ``--env.id`` on any other game of Atari.

    Environment: Mnih et al. 2015 (doi 10.1038/nature14236), methods: frame skip 4, stack of 4,
    up to 30 no-ops, clipped rewards. Agent: Espeholt et al. 2018 (arXiv 1802.01561), table G.1:
    unroll length 20, RMSProp with decay 0.99 and epsilon 0.01, learning rate 6e-4 that falls
    linearly to 0, gradient norm 40, entropy 0.01, value loss 0.5, discount 0.99. The losses there
    are sums over a batch of 32 unrolls of 20 steps and ours are means over valid transitions. So
    the gradient norm and RMSProp's epsilon are divided by 640 here. The epsilon is added to the
    root of the mean of squared gradients, as in TorchBeast (Küttler et al. 2019, arXiv 1910.03552)
    and cleanba (Huang et al. 2023, arXiv 2310.00036). A lost life ends an episode of the learner,
    as that table has it; games without lives have none to lose.

    A trajectory of 64 environments is learned from twice, in four parts of 16 unrolls, with PPO's
    limit to the probability ratio, lambda 0.95 and normalised advantages, as in ``neutral``. After
    600,000 env steps of a small Pong this won 14 points more than it lost. The paper's single
    update of 32 unrolls, without these, won one more (docs/measurements).
    """
    return ExperimentConfig(
        env=ATARI_ENV,
        agent=ImpalaConfig(
            learning_rate=6e-4,
            trace_decay=0.95,
            epochs=2,
            minibatches=4,
            ratio_clip=0.2,
            normalize_advantages=True,
            torso=TorsoConfig(kind="nature_cnn"),
            optimizer=OptimizerConfig(
                "rmsprop", epsilon=0.01 / 640, epsilon_in_root=False, max_grad_norm=40 / 640
            ),
        ),
        anneal_learning_rate=True,
        total_env_steps=10_000_000,
        num_envs=64,
        steps_per_cycle=20,
    )


@PRESETS.add("breakout", "Impala, Nature CNN, envpool Breakout-v5")
def breakout() -> ExperimentConfig:
    """Return Impala on Breakout, as ``atari-impala`` has it."""
    return dataclasses.replace(atari(), env=dataclasses.replace(ATARI_ENV, id="Breakout-v5"))


@PRESETS.add("halfcheetah", "Impala, Gaussian policy, envpool HalfCheetah-v4")
def halfcheetah() -> ExperimentConfig:
    """Return Impala with a Gaussian policy on MuJoCo's HalfCheetah-v4.

    The torso is that of PPO in Schulman et al. 2017 (arXiv 1707.06347), section 6.1. One update on
    each trajectory instead of ten bears a larger learning rate.
    """
    return ExperimentConfig(
        env=EnvConfig("HalfCheetah-v4"),
        agent=ImpalaConfig(
            trace_decay=0.95,
            entropy_coefficient=0.0,
            reward_scale=0.1,
            separate_value_torso=True,
        ),
        total_env_steps=10_000_000,
        num_envs=16,
        steps_per_cycle=16,
    )
