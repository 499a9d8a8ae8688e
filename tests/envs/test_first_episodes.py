"""What the first episodes show: broken promises, and changes that are lost beside an offset."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from sebulba.envs import make_env_factory
from sebulba.envs.first_episodes import WATCHED_ROWS, Offsets
from sebulba.envs.gymnasium_adapter import GymnasiumAdapter
from tests.support.tiny import CountingEnv


class Liar(SyncVectorEnv):
    """Does ``does`` and says ``says``; ends in the array of the observations, if told so."""

    def __init__(self, says, does, *, shares=False, restarts_all=False):
        super().__init__([lambda n=n: CountingEnv(length=3 + n) for n in range(2)], copy=False)
        self.metadata = {**self.metadata, "autoreset_mode": says}
        self.autoreset_mode = does
        self.shares, self.restarts_all = shares, restarts_all

    def step(self, actions):
        obs, reward, terminated, truncated, infos = super().step(actions)
        if self.shares:
            infos["final_obs"] = obs
        return obs, reward, terminated, truncated, infos

    def reset(self, *, seed=None, options=None):
        if self.restarts_all:
            options = None
        return super().reset(seed=seed, options=options)


NEXT, SAME, DISABLED = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED


def played(env):
    adapter = GymnasiumAdapter(env, [0, 1], name="x:liar")
    adapter.reset()
    for _ in range(12):
        adapter.step(np.zeros(2, np.int32))
    adapter.close()


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (lambda: Liar(NEXT, SAME), r"'autoreset_mode'\] NEXT_STEP.*environment 0 had reward 1"),
        (lambda: Liar(SAME, SAME, shares=True), r"info\['final_obs'\] in the array of the obs"),
        (
            lambda: Liar(DISABLED, DISABLED, restarts_all=True),
            "other observations .*reset_mask.*no others",
        ),
    ],
)
def test_a_broken_promise_is_told_once(env, said):
    with pytest.warns(UserWarning, match=said) as told:
        played(env())
    assert len(told) == 1 and "sebulba check-env" in str(told[0].message)


@pytest.mark.parametrize("mode", [NEXT, SAME, DISABLED])
def test_of_kept_promises_nothing_is_told(mode):
    played(Liar(mode, mode))
    played(gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="vector_entry_point"))


# Offsets.


class Clock(gymnasium.Env):
    """Observes a half and a time that begins at ``begins`` and goes on by ``by``."""

    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, begins=0.0, by=1.0, dtype="float64"):
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.dtype(dtype))
        self.time, self.by = begins, by

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observe(), {}

    def step(self, action):
        self.time += self.by
        return self.observe(), 0.0, False, False, {}

    def observe(self):
        return np.array([0.5, self.time], self.observation_space.dtype)


def watch(**options):
    adapter = make_env_factory(Clock, **options)(2, [0, 1])
    adapter.reset()
    for _ in range(300):
        adapter.step(np.zeros(2, np.int32))
    adapter.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"begins": 1.7e9}, "number 1 .* near 1700000001 .* tells 3 of its 256 values apart"),
        ({"begins": 1e6, "by": 0.125}, "near 1000000.125 .* use --agent.normalize-observations"),
        ({"begins": 1e6, "by": 0.125, "dtype": "float32"}, "--agent.normalize-observations"),
    ],
)
def test_changes_that_are_lost_beside_an_offset_are_told_once(options, said):
    with pytest.warns(UserWarning, match=said) as told:
        watch(**options)
    assert len(told) == 1


@pytest.mark.parametrize(
    "options", [{}, {"begins": 1.0, "by": 1e-9}, {"begins": 1e6, "by": 0.0}, {"by": 1e5}]
)
def test_of_other_changes_and_of_none_nothing_is_told(options):
    watch(**options)


def test_observations_that_are_no_numbers_are_not_watched():
    offsets = Offsets("x", watches=True)
    offsets.look({"a": np.zeros(2), "b": "text"})
    assert not offsets.is_looking
    offsets = Offsets("x", watches=True)
    for size in [2] * (WATCHED_ROWS - 1) + [3]:
        offsets.look(np.full(size, 1.7e9))
    assert not offsets.is_looking
