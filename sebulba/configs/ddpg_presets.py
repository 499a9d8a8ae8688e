"""Ready experiments with DDPG."""

from __future__ import annotations

import dataclasses
from typing import Any

from sebulba.agents.configs import DDPGConfig
from sebulba.configs import sac_presets
from sebulba.configs.experiment import ExperimentConfig
from sebulba.configs.preset import PENDULUM_REPLAY, REPLAY, Presets, for_task

PRESETS = Presets()

_PLAIN: dict[str, Any] = {"num_critics": 1, "target_noise": 0.0}
"""DDPG without the refinements of TD3."""


@PRESETS.add("ddpg", "DDPG for any task with continuous actions")
def neutral() -> ExperimentConfig:
    """Return DDPG for any task with continuous actions, with two of the refinements of TD3.

    Fujimoto et al. 2018 (arXiv 1802.09477), table 3: the smaller value of two critics, noise of 0.2
    on the actions of targets, 0.1 on those that explore, target rate 0.005, no weight decay.
    Learning rates, batch, networks and 25 000 random env steps are those of the paper's code
    (github.com/sfujim/TD3). There the actor moves in every second update, here in each.
    """
    agent = DDPGConfig(
        critic_learning_rate=3e-4,
        num_critics=2,
        target_noise=0.2,
        random_env_steps=5_000,
        replay=REPLAY,
    )
    return dataclasses.replace(sac_presets.neutral(), agent=agent)


@PRESETS.add("pendulum-ddpg", "DDPG, MLP, envpool Pendulum-v1", goal=-200)
def pendulum() -> ExperimentConfig:
    """Return DDPG on envpool's Pendulum-v1.

    Learning rate, discount and noise are those of the Stable-Baselines3 zoo
    (github.com/DLR-RM/rl-baselines3-zoo, hyperparams/ddpg.yml); networks, batch, warm-up and one
    update an env step are those of SAC there, which learns sooner.
    """
    agent = _PLAIN | {
        "learning_rate": 1e-3,
        "critic_learning_rate": 1e-3,
        "discount": 0.98,
        "random_env_steps": 1_000,
        "replay": PENDULUM_REPLAY,
    }
    return for_task(
        neutral(), "Pendulum-v1", agent, total_env_steps=20_000, eval_every_env_steps=2_500
    )


@PRESETS.add("pendulum-ddpg-apex", "DDPG in its Ape-X form, MLP, envpool Pendulum-v1")
def pendulum_apex() -> ExperimentConfig:
    """Return DDPG in its Ape-X form on envpool's Pendulum-v1.

    Prioritized replay with exponents 0.6 and 0.4 and targets of several steps: Horgan et al. 2018
    (arXiv 1803.00933), section 4. Two Inferencers share a ladder of exploration from noise 0.5
    down to 0.06; 3 steps and not 5, since noise that large ages what is in the replay.
    """
    plain = pendulum()
    agent = {
        "num_steps": 3,
        "noise_scale": 0.5,
        "noise_exponent": 3.0,
        "replay": dataclasses.replace(PENDULUM_REPLAY, prioritized=True),
    }
    return for_task(plain, plain.env.id, agent, num_inferencers_per_device=2)


@PRESETS.add("halfcheetah-ddpg", "DDPG, MLP, envpool HalfCheetah-v4")
def halfcheetah() -> ExperimentConfig:
    """Return DDPG on MuJoCo's HalfCheetah-v4, with CleanRL's hyper-parameters.

    Source: github.com/vwxyzjn/cleanrl, ddpg_continuous_action.py: learning rates 3e-4, batch 256,
    noise 0.1, target rate 0.005, 25 000 random env steps, one update an env step. Actor and
    targets move there in every second update only, here in each.
    """
    agent = _PLAIN | {
        "random_env_steps": 25_000,
        "replay": dataclasses.replace(REPLAY, warm_up_env_steps=24_992),
    }
    return for_task(neutral(), "HalfCheetah-v4", agent, eval_every_env_steps=50_000)
