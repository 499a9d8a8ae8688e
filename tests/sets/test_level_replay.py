"""Level replay: which levels are played, and that nothing but the environment's state knows it."""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sebulba_sets.level_replay import PRIOR, learnability

from sebulba import UsageError
from sebulba.envs import env_spec, make_env_factory
from sebulba.envs.jax_adapter import JaxAdapter
from sebulba.envs.policy_view import as_played
from tests.support.loop_helpers import make_tiny_loop

spaces = gymnasium.spaces
KINDS = 20


class Levels:
    """Level 0 of ``KINDS`` is solved by action 1 in half of the cases, 1 always, others never."""

    observation_space = spaces.Box(0, KINDS, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, key: jax.Array) -> Any:
        kind = jax.random.randint(key, (), 0, KINDS)
        number = jax.random.randint(jax.random.fold_in(key, 1), (), 0, KINDS)
        return self.seen(kind, 0), (kind, number, jnp.int32(0))

    def step(self, key: jax.Array, state: Any, action: jax.Array) -> Any:
        kind, number, t = state
        lucky = jax.random.bernoulli(key)
        paid = jnp.where(kind == 0, lucky & (action == 1), kind == 1)
        return self.seen(kind, t + 1), (kind, number, t + 1), paid * (t == 1), t == 1, False

    def seen(self, kind: Any, t: Any) -> jax.Array:
        return jnp.stack([jnp.float32(kind), jnp.float32(t)])


def made(num_envs: int = 16, **options: Any) -> Any:
    return make_env_factory("sets:levels", levels=Levels, **options)(num_envs, range(num_envs))


def shares(adapter: Any, num_steps: int = 600) -> np.ndarray:
    """Return the share of episodes of each kind in the last half of the steps."""
    output, counts = adapter.reset(), np.zeros(KINDS)
    for step in range(num_steps):
        output = adapter.step(np.ones(adapter.num_envs, np.int32))
        if 2 * step > num_steps:
            kinds = output.obs[output.episode_end, 0].astype(int)
            counts += np.bincount(kinds, minlength=KINDS)
    return counts / counts.sum()


def test_learnability_is_the_mean_of_p_times_1_minus_p():
    def beta(a: float, b: float) -> float:
        return math.gamma(a) * math.gamma(b) / math.gamma(a + b)

    for solved, failed in [(0, 0), (3, 0), (0.5, 7), (20, 20)]:
        a, b = solved + PRIOR, failed + PRIOR
        assert learnability(jnp.float32(solved), jnp.float32(failed)) == pytest.approx(
            beta(a + 1, b + 1) / beta(a, b), rel=1e-5
        )


def test_what_was_solved_and_failed_is_preferred():
    both, failed, new = (
        float(learnability(*map(jnp.float32, x))) for x in [(1, 1), (0, 1), (0, 0)]
    )
    assert both > 30 * failed and both > 30 * new


@pytest.mark.slow
def test_levels_that_are_solved_now_and_then_are_played_more_often():
    replayed, plain = shares(made(replay=0.8, buffer=256)), shares(made(replay=0.0, buffer=64))
    assert plain[0] == pytest.approx(1 / KINDS, abs=0.03)
    assert replayed[0] > 0.5  # new levels take a fifth; with a uniform prior it is 0.12


def test_where_policies_are_played_all_levels_are_new():
    played = as_played(made(replay=1.0))
    assert type(played) is JaxAdapter
    assert shares(played)[0] == pytest.approx(1 / KINDS, abs=0.03)


def test_a_saved_state_goes_on_with_the_same_levels():
    first = made(replay=0.8, buffer=16)
    shares(first, 100)
    second = made(replay=0.8, buffer=16)
    second.put_back(first.state())
    for _ in range(60):
        action = np.ones(16, np.int32)
        a, b = first.step(action), second.step(action)
        np.testing.assert_array_equal(a.obs, b.obs)
    jax.tree.map(np.testing.assert_array_equal, first._state, second._state)


def test_the_levels_of_a_buffer_are_those_that_were_played():
    """Every kept key resets to a level whose counts are those of its kind."""
    adapter = made(replay=0.8, buffer=32)
    shares(adapter, 400)
    levels = adapter._state.agents
    keys = jax.random.wrap_key_data(levels.key)
    kinds = np.asarray(jax.vmap(Levels().reset)(keys)[1][0])
    solved, failed = np.asarray(levels.solved), np.asarray(levels.failed)
    assert np.asarray(levels.is_used).all()
    assert not solved[kinds > 1].any() and not failed[kinds == 1].any()
    assert solved[kinds == 0].any() and failed[kinds == 0].any()
    assert (np.asarray(levels.place) <= 32).all()


def test_episodes_of_levels_have_a_limit():
    adapter = made(num_envs=2, max_episode_steps=1)
    adapter.reset()
    assert adapter.step(np.zeros(2, np.int32)).truncated.all()


def test_a_fused_loop_replays_levels():
    factory = make_env_factory("sets:levels", levels=Levels, replay=0.9)
    loop, _ = make_tiny_loop(factory, num_inferencers_per_device=1)
    with loop:
        assert loop.train(total_env_steps=128, steps_per_cycle=8).metrics["episodes"] > 0
    assert env_spec(factory) == factory(2, [0, 1]).spec


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "needs the option 'levels'"),
        ({"levels": "CartPole-v1"}, "written in JAX; use sets:split"),
        ({"levels": Levels, "replay": 2.0}, "replay=2.0 must be"),
        ({"levels": Levels, "bufer": 3}, "has no option 'bufer'.*buffer"),
    ],
)
def test_wrong_options_are_refused_in_words(options, words):
    with pytest.raises(UsageError, match=words):
        make_env_factory("sets:levels", **options)


def test_a_buffer_smaller_than_the_vector_is_refused():
    with pytest.raises(UsageError, match="buffer=8 must hold a level for each of the 16"):
        made(buffer=8)
