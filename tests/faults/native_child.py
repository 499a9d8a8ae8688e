"""Gives bad input to envpool through its adapter; run as a process of its own.

``python -m tests.faults.native_child FILE`` writes what it is about to try to FILE, and at the end
prints how much it has tried. An abort of native code ends it with a signal.
"""

from __future__ import annotations

import collections
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from sebulba.envs import make_env_factory
from sebulba.errors import ActionError, UsageError, shown
from tests.faults.bad_values import ODD, examples
from tests.faults.test_bad_input import ACTIONS, LAYOUTS, is_valid, laid_out

NUM_ENVS = 2
TRIED: collections.Counter[str] = collections.Counter()
IDS = ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1"]
OPTIONS = {
    "Pong-v5": ["stack_num", "img_height", "img_width", "noop_max", "frame_skip", "reward_clip"]
    + ["episodic_life", "repeat_action_probability", "max_episode_steps", "num_threads"],
    "CartPole-v1": ["max_episode_steps", "num_threads", "num_envs", "seed", "batch_size"],
    "FrozenLake-v1": ["size", "max_episode_steps", "num_threads"],
}
SIZES = ("stack_num", "img_height", "img_width", "num_threads", "size")
"""A number that is right makes as large an array."""


def try_(what: Any) -> None:
    Path(sys.argv[1]).write_text(shown(what))


@examples(40, 2000)
@given(
    env=st.sampled_from(IDS),
    actions=st.lists(st.tuples(ACTIONS, LAYOUTS), min_size=1, max_size=4),
)
@example(env="CartPole-v1", actions=[(np.zeros(2, np.int32), "as it is")])  # a valid one
def bad_actions(env: str, actions: list) -> None:
    adapter = ADAPTERS[env]
    for action, layout in actions:
        action = laid_out(action, layout)
        try_((env, layout, action))
        TRIED["actions"] += 1
        try:
            adapter.step(action)
        except ActionError as error:
            assert "action" in str(error)
            assert not is_valid(action, adapter.spec.action_space, NUM_ENVS)
        else:
            TRIED["valid"] += 1
            assert is_valid(action, adapter.spec.action_space, NUM_ENVS)


@examples(20, 800)
@given(st.data())
def bad_pools(data: Any) -> None:
    env = data.draw(st.sampled_from(sorted(OPTIONS)))
    odd = data.draw(st.dictionaries(st.sampled_from(OPTIONS[env]), ODD, min_size=1, max_size=2))
    for name, value in odd.items():
        if name in SIZES and isinstance(value, int | np.integer) and 16 < value < 2**31:
            return
    seeds = data.draw(st.one_of(st.just([1, 2]), st.lists(ODD, max_size=3)))
    try_((env, odd, seeds))
    TRIED["pools"] += 1
    try:
        adapter = make_env_factory(env, **odd)(NUM_ENVS, seeds)
    except UsageError as error:
        assert any(name in str(error) for name in [*odd, "seeds"]), error
        return
    TRIED["made"] += 1
    adapter.reset()
    action = np.stack([np.asarray(adapter.spec.action_space.sample())] * NUM_ENVS)
    adapter.step(action)
    adapter.close()


if __name__ == "__main__":
    ADAPTERS = {env: make_env_factory(env)(NUM_ENVS, [1, 2]) for env in IDS}
    for one in ADAPTERS.values():
        one.reset()
    bad_actions()
    bad_pools()
    print(json.dumps(TRIED))
