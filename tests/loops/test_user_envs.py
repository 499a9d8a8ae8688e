"""A user's own environments train: a class with Dict observations, make_vec, worker processes."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv

import sebulba
from sebulba.agents.configs import ImpalaConfig, TorsoConfig, make_agent

CONFIG = ImpalaConfig(
    learning_rate=1e-2,
    discount=0.1,
    entropy_coefficient=0.0,
    torso=TorsoConfig(hidden_sizes=(16,)),
)


class FollowTheCue(gymnasium.Env):
    """Pays 1 for the action that the observation names; 8 steps."""

    observation_space = gymnasium.spaces.Dict(
        cue=gymnasium.spaces.Discrete(3),
        noise=gymnasium.spaces.Box(-1, 1, (2,), np.float64),
        flags=gymnasium.spaces.MultiBinary(2),
    )
    action_space = gymnasium.spaces.Discrete(3)

    def _observe(self):
        self._cue = int(self.np_random.integers(3))
        return {
            "cue": self._cue,
            "noise": self.np_random.uniform(-1, 1, 2),
            "flags": np.zeros(2, np.int8),
        }

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._t = 0
        return self._observe(), {}

    def step(self, action):
        reward = float(action == self._cue)
        self._t += 1
        return self._observe(), reward, False, self._t == 8, {}


def train(env, num_cycles, **options):
    agent = make_agent(sebulba.env_spec(env), CONFIG)
    with sebulba.GymnasiumLoop(
        env, agent, 8, inference_devices=[0], update_devices=[0], **options
    ) as loop:
        return loop.run(loop.new_state(0, 8), num_cycles, 8)


@pytest.mark.slow
def test_a_class_with_dict_observations_learns():
    result = train(FollowTheCue, 400, schedule="lockstep")
    assert result.metrics["episode_length_mean"] == 8
    assert result.metrics["episode_return_mean"] > 7, "2.7 by chance, 8 at best"


def make_vec(num_envs, seeds):
    return gymnasium.make_vec("CartPole-v1", num_envs=num_envs, vectorization_mode="sync")


def make_native_vec(num_envs, seeds):
    return gymnasium.make_vec("CartPole-v1", num_envs=num_envs)


def make_async(num_envs, seeds):
    return AsyncVectorEnv([FollowTheCue] * num_envs, context="forkserver")


@pytest.mark.slow
@pytest.mark.parametrize(
    "env",
    [
        make_vec,
        make_native_vec,
        make_async,
        lambda: gymnasium.make("Pendulum-v1"),
        lambda: FollowTheCue(),
    ],
    ids=["make_vec sync", "make_vec native", "AsyncVectorEnv", "gymnasium.make", "lambda"],
)
def test_environments_of_every_form_train(env):
    result = train(env, 20, num_inferencers_per_device=1)
    assert result.counters.updates == 20
    assert np.isfinite(result.metrics["loss"])
