"""The small Pong: what it pays, and how it ends."""

from __future__ import annotations

import numpy as np
import pytest

import sebulba
from benchmarks.studies.learning_goals import GOALS, GROUPS
from benchmarks.studies.small_pong import MOST_STEPS, POINTS, SIZE, small_pong
from sebulba.configs.presets import ATARI


def follow(obs: np.ndarray) -> np.ndarray:
    """Return the actions of a player who keeps the paddle at the row of the ball."""
    paddle = (obs[:, :, SIZE - 1, 0] > 0) @ np.arange(SIZE) / 3
    ball = (obs[:, :, :, 1] > 0).any(2) @ np.arange(SIZE)
    return np.where(ball < paddle, 1, np.where(ball > paddle, 2, 0)).astype(np.int32)


@pytest.mark.parametrize(("play", "sign"), [(follow, 1), (lambda obs: np.zeros(8, np.int32), -1)])
def test_who_follows_the_ball_wins_and_who_stands_still_loses(play, sign):
    env = sebulba.make_env_factory(small_pong)(8, list(range(8)))
    obs, total, points = env.reset().obs, np.zeros(8), np.zeros((2, 8))
    playing = np.ones(8, bool)
    for step in range(1, MOST_STEPS + 1):
        output = env.step(play(obs))
        obs, reward = output.obs, np.where(playing, output.reward, 0)
        assert env.spec.observation_space.contains(obs[0]) and (obs[:, :, :, 1] > 0).sum() == 8
        total += reward
        points += [reward > 0, reward < 0]
        over = output.terminated | output.truncated
        np.testing.assert_array_equal(
            output.terminated & playing, (points.max(axis=0) == POINTS) & playing
        )
        assert step == MOST_STEPS or not output.truncated[playing].any()
        playing &= ~over
        if not playing.any():
            break
    assert not playing.any() and (total * sign > 5).all()


def test_every_preset_for_atari_has_a_goal_in_it():
    named = {GOALS[name].preset for name in GROUPS["small-pong"]}
    assert named == {f"atari-{agent}" for agent in ATARI}
    assert all(
        "benchmarks.studies.small_pong:small_pong" in GOALS[n].options for n in GROUPS["small-pong"]
    )
