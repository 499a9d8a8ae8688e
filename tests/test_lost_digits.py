"""Observations whose differences float32 cannot hold."""

from __future__ import annotations

import warnings

import gymnasium
import numpy as np
import pytest

from sebulba.envs import make_env_factory


class Clock(gymnasium.Env):
    """Observes the time since ``begins`` in seconds, in float64."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, begins=0.0):
        self.time = begins

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observe(), {}

    def step(self, action):
        self.time += 1.0
        return self.observe(), 0.0, False, False, {}

    def observe(self):
        return np.array([0.5, self.time])


def play(begins):
    adapter = make_env_factory(Clock, begins=begins)(2, [0, 1])
    adapter.reset()
    for _ in range(300):
        adapter.step(np.zeros(2, np.int32))
    adapter.close()


def test_a_component_that_float32_cannot_tell_apart_is_told_once():
    with pytest.warns(
        UserWarning, match="component 1 .* 256 different values .* tell 3 of"
    ) as all_:
        play(1.7e9)
    assert len(all_) == 1


def test_nothing_is_told_of_what_it_can():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        play(0.0)
