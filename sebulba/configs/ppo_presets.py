"""Ready experiments with PPO."""

from __future__ import annotations

import dataclasses
from typing import Any

from sebulba.agents.configs import (
    MultiAgentConfig,
    OptimizerConfig,
    PPOConfig,
    RandomNetworkDistillationConfig,
    TorsoConfig,
)
from sebulba.configs.experiment import EnvConfig, ExperimentConfig
from sebulba.configs.preset import ATARI as ATARI_ENV
from sebulba.configs.preset import Presets, for_task
from sebulba.options import FaultOptions

PRESETS = Presets()

_NOT_NORMALIZED = {"normalize_observations": False, "normalize_rewards": False}


@PRESETS.add("ppo", "PPO for any task")
def neutral() -> ExperimentConfig:
    """Return PPO for any task: a vector or an image, discrete or continuous actions.

    Schulman et al. 2017 (arXiv 1707.06347), table 3: 2048 steps, learning rate 3e-4, 10 epochs of
    minibatches of 64, discount 0.99, lambda 0.95; section 6.1: two hidden layers of 64, policy and
    value apart. The falling learning rate, Adam's epsilon, the gradient norm, and observations and
    rewards normalised are those of the reference implementation (Huang et al. 2022, "The 37
    Implementation Details of PPO"). The 2048 steps are 16 environments x 128.
    """
    return ExperimentConfig(
        env=EnvConfig("CartPole-v1"),
        agent=PPOConfig(
            minibatches=32,
            normalize_observations=True,
            normalize_rewards=True,
            separate_value_torso=True,
        ),
        total_env_steps=1_000_000,
        anneal_learning_rate=True,
        num_envs=16,
        num_inferencers_per_device=1,
        steps_per_cycle=128,
        schedule="lockstep",
    )


@PRESETS.add("cartpole-ppo", "PPO, small MLP, envpool CartPole-v1", goal=475)
def cartpole() -> ExperimentConfig:
    """Return PPO with a small MLP on envpool's CartPole-v1.

    Discount, lambda, clip and a learning rate that falls to 0 are those of Stable-Baselines3's zoo
    (rl-baselines3-zoo, hyperparams/ppo.yml, CartPole-v1), which takes 20 epochs of one minibatch on
    8 environments x 32 steps; trajectories twice as large with 24 smaller updates of a larger rate
    reach as far with half of the updates a step. One Inferencer in lockstep: with two and a queue,
    actions are four trajectories old when they are learned from, and learning is slower and less
    sure.
    """
    agent = {
        "learning_rate": 1.5e-3,
        "discount": 0.98,
        "trace_decay": 0.8,
        "epochs": 6,
        "minibatches": 4,
    }
    agent |= _NOT_NORMALIZED
    run = {"total_env_steps": 100_000, "steps_per_cycle": 32, "metrics_interval_s": 0.1}
    return for_task(neutral(), "CartPole-v1", agent, **run)


@PRESETS.add("pendulum-ppo", "PPO, Gaussian policy, envpool Pendulum-v1")
def pendulum() -> ExperimentConfig:
    """Return PPO with a Gaussian policy on Pendulum-v1.

    Stable-Baselines3's zoo (rl-baselines3-zoo, hyperparams/ppo.yml, Pendulum-v1): 4 environments x
    1024 steps, discount 0.9, lambda 0.95, 10 epochs of minibatches of 64, learning rate 1e-3; here
    16 environments x 256 steps.
    """
    agent = {
        "learning_rate": 1e-3,
        "discount": 0.9,
        "minibatches": 64,
        "normalize_observations": False,
    }
    return for_task(neutral(), "Pendulum-v1", agent, total_env_steps=200_000, steps_per_cycle=256)


@PRESETS.add("halfcheetah-ppo", "PPO, Gaussian policy, envpool HalfCheetah-v4", goal=1400)
def halfcheetah() -> ExperimentConfig:
    """Return PPO with a Gaussian policy on MuJoCo's HalfCheetah-v4.

    The neutral preset with the clipped value loss of the reference implementation (CleanRL's
    ppo_continuous_action.py).
    """
    return for_task(neutral(), "HalfCheetah-v4", {"value_clip": 0.2})


@PRESETS.add("atari-ppo", "PPO, Nature CNN, any Atari game")
def atari() -> ExperimentConfig:
    """Return PPO on Pong, or with ``--env.id`` on any other game of Atari.

    Environment: Mnih et al. 2015 (doi 10.1038/nature14236), methods. Agent: Schulman et al. 2017
    (arXiv 1707.06347), table 5: 8 environments x 128 steps, learning rate 2.5e-4 that falls to 0,
    3 epochs of minibatches of 256, discount 0.99, lambda 0.95, clip 0.1, value loss 1 (of the
    mean square; ours is of half of it, as in the reference implementation, which has 0.5),
    entropy 0.01. The paper lets the clip fall to 0 with the learning rate; here it stays, as in
    CleanRL's ppo_atari.py, from which 4 epochs, Adam's epsilon, the gradient norm and lives that
    end episodes are.
    """
    agent = {
        "learning_rate": 2.5e-4,
        "epochs": 4,
        "minibatches": 4,
        "ratio_clip": 0.1,
        "value_clip": 0.1,
        "entropy_coefficient": 0.01,
        "torso": TorsoConfig(kind="nature_cnn"),
        "separate_value_torso": False,
    }
    agent |= _NOT_NORMALIZED
    return for_task(neutral(), ATARI_ENV, agent, total_env_steps=10_000_000, num_envs=8)


@PRESETS.add("breakout-minatar", "PPO, small MLP, gymnax Breakout-MinAtar", goal=28)
def breakout_minatar() -> ExperimentConfig:
    """Return PPO on gymnax's MinAtar Breakout, which needs the extra ``gymnax``.

    PureJaxRL (Lu et al. 2022; examples/brax_minatar.ipynb, "PPO Gymnax MinAtar"): 64 environments x
    128 steps, 4 epochs of 8 minibatches, discount 0.99, lambda 0.95, clip 0.2 of ratio and value,
    entropy 0.01, value 0.5, gradient norm 0.5, two hidden layers of 64 with relu on the flat
    observation, policy and value apart. The learning rate, which falls to 0, is half of theirs, at
    which one seed of three stayed at a quarter of the others' return. One Inferencer in lockstep,
    so that actions are one trajectory old when they are learned from.
    """
    agent = {
        "learning_rate": 2.5e-3,
        "epochs": 4,
        "minibatches": 8,
        "value_clip": 0.2,
        "entropy_coefficient": 0.01,
        "torso": TorsoConfig(kind="mlp", activation="relu"),
    }
    agent |= _NOT_NORMALIZED
    env = "gymnax:Breakout-MinAtar"
    return for_task(neutral(), env, agent, total_env_steps=10_000_000, num_envs=64)


@PRESETS.add("hopper-brax", "PPO, Gaussian policy, brax hopper")
def hopper_brax() -> ExperimentConfig:
    """Return PPO with a Gaussian policy on brax's hopper, which needs the extra ``brax``.

    PureJaxRL (Lu et al. 2022; purejaxrl/ppo_continuous_action.py): 2048 environments x
    10 steps, learning rate 3e-4, 4 epochs of 32 minibatches, discount 0.99, lambda 0.95, clip 0.2
    of ratio and value, value 0.5, gradient norm 0.5, two hidden layers of 256 with tanh, policy and
    value apart, observations and rewards normalised, a standard deviation of 1 at first, and
    brax's positional physics. It is meant for an accelerator; its program takes minutes to compile
    where the cores are busy, so a silent thread is taken for a hang later than elsewhere.
    """
    return for_task(
        neutral(),
        EnvConfig("brax:hopper", options={"physics": "positional"}),
        {"epochs": 4, "value_clip": 0.2, "torso": TorsoConfig(hidden_sizes=(256, 256))},
        total_env_steps=50_000_000,
        anneal_learning_rate=False,
        num_envs=2048,
        steps_per_cycle=10,
        faults=FaultOptions(hang_timeout_s=1800.0),
    )


def _self_play(env: str | EnvConfig, env_steps: int = 2_000_000, **agent: Any) -> ExperimentConfig:
    """Return PPO that plays all seats of a game of envpool with one policy, its latest.

    No published settings were found for these. Games are short, so advantages are those of the
    whole game (lambda 1), and nothing is discounted. The entropy bonus keeps self-play in games of
    chance and hidden cards from going in circles.
    """
    fields = {
        "learning_rate": 1e-3,
        "discount": 1.0,
        "trace_decay": 1.0,
        "epochs": 2,
        "minibatches": 4,
        "entropy_coefficient": 0.05,
    }
    fields |= _NOT_NORMALIZED | agent
    run = {"total_env_steps": env_steps, "num_envs": 128, "steps_per_cycle": 32}
    return for_task(neutral(), env, fields, **run)


_MIRROR_DESCENT = {
    "learning_rate": 2e-3,
    "kl_coefficient": 5.0,
    "entropy_coefficient": 0.4,
    "magnet_rate": 0.002,
    "normalize_advantages": False,
}
"""Magnetic mirror descent (Sokota et al. 2023, arXiv 2206.05825) with a magnet that moves; the
numbers are of ``benchmarks/studies/self_play.py``."""


@PRESETS.add("kuhn", "PPO, self-play, envpool KuhnPoker-v1")
def kuhn() -> ExperimentConfig:
    """Return self-play in Kuhn poker, by magnetic mirror descent.

    Players see who began: without it, no policy without memory has a NashConv below 0.06.
    """
    env = EnvConfig("KuhnPoker-v1", options={"show_beginner": True})
    return _self_play(env, 2_000_000, **_MIRROR_DESCENT)


@PRESETS.add("leduc", "PPO, self-play, envpool LeducHoldem-v1")
def leduc() -> ExperimentConfig:
    """Return self-play in Leduc hold'em: chance decides more, so batches are larger."""
    env = EnvConfig("LeducHoldem-v1", options={"show_beginner": True, "show_moves": 8})
    agent = _MIRROR_DESCENT | {
        "kl_coefficient": 10.0,
        "entropy_coefficient": 1.0,
        "final_entropy_coefficient": 0.1,
        "magnet_rate": 0.0,
        "ratio_clip": 10.0,
        "minibatches": 16,
        "torso": TorsoConfig(hidden_sizes=(128, 128), activation="relu"),
        "optimizer": OptimizerConfig(max_grad_norm=0.0),
    }
    return dataclasses.replace(_self_play(env, 10_000_000, **agent), num_envs=512)


@PRESETS.add("tic-tac-toe", "PPO, self-play, envpool TicTacToe-v1")
def tic_tac_toe() -> ExperimentConfig:
    """Return self-play in TicTacToe.

    The policy has to know what to do after moves that it would not make itself, so it has to go on
    making some. Advantages therefore keep their size: normalised ones grow beside the entropy bonus
    as games become draws, until mistakes no longer happen. That left 129 positions in which the
    greedy policy loses; of bonuses of 0.1, 0.15 and 0.2, with a learning rate that falls, 17, 1, 0.
    """
    config = _self_play(
        "TicTacToe-v1",
        1_000_000,
        entropy_coefficient=0.2,
        normalize_advantages=False,
        torso=TorsoConfig(hidden_sizes=(256, 256)),
    )
    return dataclasses.replace(config, anneal_learning_rate=True)


@PRESETS.add("connect-four", "PPO, self-play, envpool ConnectFour-v1")
def connect_four() -> ExperimentConfig:
    """Return self-play in ConnectFour, by windows of four by four cells.

    As in TicTacToe, advantages keep their size, so that the policy goes on making moves that are
    not its best: with normalised ones it lost every eleventh game to random play.
    """
    config = _self_play(
        "ConnectFour-v1",
        20_000_000,
        entropy_coefficient=0.1,
        normalize_advantages=False,
        epochs=4,
        minibatches=8,
        torso=TorsoConfig("board_cnn", hidden_sizes=(16,)),
        separate_value_torso=False,
    )
    return dataclasses.replace(config, anneal_learning_rate=True)


@PRESETS.add("lbf", "PPO, a policy for all, envpool LevelBasedForaging-v0", goal=0.55)
def level_based_foraging() -> ExperimentConfig:
    """Return PPO for two agents who have to fetch food together, which share a policy.

    IPPO (de Witt et al. 2020, arXiv 2011.09533): the neutral preset with trajectories of 64
    environments, an entropy bonus, and rewards for what was seldom observed (random network
    distillation). All food of an episode together is worth 1, which both agents are paid; random
    actions get 0.055. Half of the food is beside the agents and half in the far corner, where they
    have to meet: without the rewards for novelty 1 of 10 trainings found it, with entropy bonuses
    from 0 to 0.3.
    """
    config = for_task(
        neutral(),
        "LevelBasedForaging-v0",
        {"entropy_coefficient": 0.01},
        total_env_steps=1_500_000,
        num_envs=64,
    )
    novelty = RandomNetworkDistillationConfig(
        bonus_scale=0.01, learning_rate=1e-3, updates_per_cycle=4
    )
    members = MultiAgentConfig({"agent": config.agent}, auxiliary={"novelty": novelty})
    return dataclasses.replace(config, agent=members, anneal_learning_rate=False)


@PRESETS.add("rware", "PPO, a policy for all, envpool RobotWarehouse-v0")
def robot_warehouse() -> ExperimentConfig:
    """Return PPO for the robots of a warehouse, which share a policy.

    The neutral preset with trajectories of 64 environments and an entropy bonus. A shelf that was
    asked for pays 1 when it is delivered; a collision costs 1 and ends the episode. So random
    actions get -1, after 12 steps, and standing still gets 0.
    """
    agent = {"entropy_coefficient": 0.01}
    return for_task(neutral(), "RobotWarehouse-v0", agent, total_env_steps=2_000_000, num_envs=64)
