"""Vector environments that do not do what they say."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from sebulba.envs.gymnasium_adapter import GymnasiumAdapter
from tests.tiny import CountingEnv


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
        (lambda: Liar(DISABLED, DISABLED, restarts_all=True), "reset_mask.*and no others"),
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
