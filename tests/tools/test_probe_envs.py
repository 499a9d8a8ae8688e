"""The questions of the shared suite: their answers are right, and each points at one thing."""

from __future__ import annotations

import numpy as np
import pytest

from sebulba.tools.check.probe_envs import (
    ANSWERS,
    DISCOUNT,
    MEMORY,
    STATES,
    DiscretePool,
    Questions,
)


def answers(
    discount: float = DISCOUNT, *, through_cut: bool = True, through_end: bool = False
) -> dict[str, int]:
    """Return the best actions under an agent's idea of returns, by value iteration."""
    value = dict.fromkeys([*STATES, ""], 0.0)
    best = {}
    for _ in range(4):
        for name, (_, *outcomes) in STATES.items():
            worth = []
            for reward, state in outcomes:
                goes_on = {"~": through_cut, "*": through_end}.get(state[0], True)
                worth.append(reward + discount * goes_on * value[state.lstrip("*~")])
            value[name], best[name] = max(worth), int(np.argmax(worth))
    return best


def wrong(**ideas: float) -> set[str]:
    found = answers(**ideas)
    return {name for name, right in ANSWERS.items() if found[name] != right}


def test_the_answers_are_right_for_the_discount() -> None:
    assert not wrong()
    found = answers()
    assert all(found[f"recall {name[-1]}"] == right for name, right in MEMORY.items())


@pytest.mark.parametrize(
    ("idea", "questions"),
    [
        ({"discount": 0.99}, {"sooner"}),
        ({"discount": 0.0}, {"later", "cut"}),
        ({"through_cut": False}, {"cut"}),
        ({"through_end": True}, {"over"}),
    ],
)
def test_a_wrong_idea_of_returns_gives_a_wrong_answer(idea: dict, questions: set) -> None:
    assert wrong(**idea) == questions


def test_what_is_recalled_is_not_observed() -> None:
    pool = DiscretePool([3, 4, 5, 6, 7, 8], ["asked 0", "asked 1"])
    first, _ = pool.reset()
    assert len(np.unique(first, axis=0)) == 2
    then, *_ = pool.step(np.zeros(6, np.int32))
    assert len(np.unique(then, axis=0)) == 1


@pytest.mark.parametrize("first_states", [list(ANSWERS), []])
def test_ends_are_followed_by_an_inserted_reset(first_states: list[str]) -> None:
    env, rng = Questions(first_states)(5, list(range(5))), np.random.default_rng(0)
    output = env.reset()
    ended = np.zeros(5, bool)
    for _ in range(40):
        if first_states:
            action = rng.integers(2, size=5).astype(np.int32)
        else:
            action = rng.uniform(-1, 1, (5, 1)).astype(np.float32)
        output = env.step(action)
        np.testing.assert_array_equal(output.is_first, ended)
        assert not output.reward[ended].any()
        ended = output.terminated | output.truncated
    assert ended.shape == (5,)
