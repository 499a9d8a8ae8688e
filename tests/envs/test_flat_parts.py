"""Observations of several levels, and text, as a Dict of one level."""

from __future__ import annotations

import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import sebulba
from sebulba.errors import EnvError, UsageError
from tests.support.own import MyEnv

BOX = spaces.Box(-1, 1, (2,))
DEEP = spaces.Dict(
    pair=spaces.Tuple([BOX, spaces.Dict(k=spaces.Discrete(3), say=spaces.Text(9))]), last=BOX
)


class Deep(MyEnv):
    """Shows the time everywhere, and ends after 4 steps."""

    observation_space: gymnasium.Space = DEEP

    def step(self, action):
        self.t += 1
        return self.observe(), 1.0, self.t == 4, False, {}

    def observe(self):
        x = np.full(2, self.t / 8, np.float32)
        return {"pair": (x, {"k": self.t % 3, "say": "hello"}), "last": -x}


class Bare(Deep):
    observation_space = spaces.Tuple([BOX, spaces.Discrete(3)])

    def observe(self):
        return np.full(2, self.t / 8, np.float32), self.t % 3


class Short(Bare):
    def observe(self):
        return super().observe()[:1]


class MaskOfTwo(Bare):
    action_space = spaces.MultiDiscrete([2, 2])
    observation_space = spaces.Dict(
        at=spaces.Tuple([BOX]), action_mask=spaces.Tuple([spaces.MultiBinary(2)] * 2)
    )

    def observe(self):
        ones = np.ones(2, np.int8)
        return {"at": (ones.astype(np.float32),), "action_mask": (ones, ones)}


def test_parts_are_named_by_their_path_and_text_is_left_out_with_a_warning():
    with pytest.warns(UserWarning, match=r"Deep' observes text.*: pair.1.say; it is left out"):
        spec = sebulba.env_spec(Deep)
    assert sorted(spec.observation_space.spaces) == ["last", "pair.0", "pair.1.k"]
    env = sebulba.make_env_factory(Deep)(2, [0, 1])
    try:
        env.reset()
        obs = env.step(np.zeros(2, np.int32)).obs
    finally:
        env.close()
    assert obs["pair.0"].tolist() == (-obs["last"]).tolist() == [[0.125, 0.125]] * 2
    assert obs["pair.1.k"].tolist() == [1, 1]


def test_a_tuple_has_parts_0_and_1():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for env in (Bare, Bare()):
            spec = sebulba.env_spec(env)
            assert spec.observation_space == spaces.Dict(
                {"0": BOX, "1": spaces.Discrete(3, dtype=np.int32)}
            )


def test_a_mask_of_legal_actions_may_be_beside_a_tuple():
    spec = sebulba.env_spec(MaskOfTwo, action_mask="observation")
    assert sorted(spec.observation_space.spaces) == ["action_mask", "at.0"]
    assert spec.legal_actions == "action_mask"


def test_a_part_that_is_missing_is_named():
    env = sebulba.make_env_factory(Short)(1, [0])
    try:
        with pytest.raises(EnvError, match="the observation must have the part '1'; got"):
            env.reset()
    finally:
        env.close()


def test_two_parts_of_one_name_are_refused():
    class Twice(Deep):
        observation_space = spaces.Dict({"a.0": BOX, "a": spaces.Tuple([BOX])})

    with pytest.raises(UsageError, match=r"two parts of one name among .*a\.0"):
        sebulba.env_spec(Twice)


def test_the_state_of_such_an_environment_is_put_back():
    factory = sebulba.make_env_factory(Bare)
    one, other = factory(1, [0]), factory(1, [5])
    try:
        one.reset()
        one.step(np.zeros(1, np.int32))
        state = one.state()
        assert isinstance(state, bytes), state
        other.put_back(state)
        nexts = [env.step(np.zeros(1, np.int32)).obs for env in (one, other)]
        assert nexts[0]["1"].tolist() == nexts[1]["1"].tolist() == [2]
    finally:
        one.close()
        other.close()
