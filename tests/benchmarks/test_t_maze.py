"""The T-maze: what it pays, and that only a memory gets all of it."""

from __future__ import annotations

import numpy as np
import pytest

import sebulba
from benchmarks.studies.t_maze import TMaze

LENGTH, ENVS = 6, 64


@pytest.mark.parametrize("play", ["remembers", "turns 0", "waits once", "stands"])
def test_only_who_remembers_gets_all(play):
    env = sebulba.make_env_factory(TMaze, length=LENGTH)(ENVS, list(range(ENVS)))
    obs = env.reset().obs
    goals, total = (obs[:, 0] > 0).astype(np.int32), np.zeros(ENVS)
    assert 0 < goals.mean() < 1 and (obs[:, 1] == 1).all()
    for time in range(LENGTH + 1):
        forward = np.full(ENVS, 0 if play == "stands" or (play == "waits once" and not time) else 2)
        at_junction = obs[:, 2] == 1
        assert (at_junction == (time == LENGTH)).all() or play in ("stands", "waits once")
        turn = goals if play == "remembers" else np.zeros(ENVS)
        output = env.step(np.where(at_junction, turn, forward).astype(np.int32))
        obs, total = output.obs, total + output.reward
        assert (output.terminated == (time == LENGTH)).all() and not output.truncated.any()
    # Who is late by a step stays behind, and is not at the junction in the last step.
    expected = {"remembers": 1.0, "turns 0": (goals == 0).mean()}.get(play, -1.0)
    np.testing.assert_allclose(total.mean(), expected, atol=1e-6)
