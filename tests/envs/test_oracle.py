"""Not one cell out of place between an environment and what its adapter returns."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from sebulba.envs import env_spec, make_env_factory, seed_block
from sebulba.types import EnvStep
from tests.support.oracle import (
    NUM_ACTIONS,
    ORACLES,
    OracleEnv,
    cartpole_violations,
    env_step_of,
    misplaced_cells,
    pool_adapter,
    rollout,
)

NUM_ENVS = 5


def make(env, **options):
    seeds = seed_block(3, inferencer=1, num_inferencers=2, num_envs=NUM_ENVS)
    return make_env_factory(env, **options)(NUM_ENVS, seeds)


def actions_of(num_steps: int, num_envs: int = NUM_ENVS, num_actions: int = NUM_ACTIONS):
    rng = np.random.default_rng(num_steps)
    return rng.integers(num_actions, size=(num_steps, num_envs), dtype=np.int32)


@pytest.mark.slow
@pytest.mark.parametrize("name", ORACLES)
def test_no_cell_is_out_of_place(name):
    env, options, mode = ORACLES[name]
    num_steps = 400 if "async" in name else 4000
    action = actions_of(num_steps)
    adapter = make(env, **options)
    try:
        chunks = np.split(action, 4)
        first = None
        for chunk in chunks:  # the later ones begin in mid-episode
            env_step = rollout(adapter, chunk, first)
            assert misplaced_cells(env_step, chunk, mode=mode) == 0
            first = jax.tree.map(lambda x: x[-1], env_step)
    finally:
        adapter.close()


@pytest.mark.parametrize("name", ["single", "vector_same_step", "vector_disabled", "pool"])
def test_reset_in_mid_run_begins_new_episodes(name):
    env, options, mode = ORACLES[name]
    adapter = make(env, **options)
    for num_steps in (7, 31):  # the second follows the first, whose seeds are used up
        action = actions_of(num_steps)
        env_step = rollout(adapter, action)
        assert env_step.is_first[0].all()
        assert not env_step.reward[0].any()
        assert misplaced_cells(env_step, action, mode=mode) == 0
    adapter.close()


def test_fused_oracle_pool_has_no_cell_out_of_place_and_equals_the_stepped_one():
    action = actions_of(3000)
    fused, stepped = (pool_adapter(NUM_ENVS, [7, 1, 2**31 - 1, 90_000, 5]) for _ in range(2))
    first = env_step_of(fused.reset(), np.zeros_like(action[0]))
    state, step, *_ = fused.fused()

    def body(state, action):
        state, output, num_invalid = step(state, action)
        return state, (output, num_invalid)

    state, (outputs, num_invalid) = jax.jit(lambda s, a: jax.lax.scan(body, s, a))(state, action)
    outputs = jax.device_get(outputs)
    rows = env_step_of(outputs, action)
    env_step = jax.tree.map(lambda x, y: np.concatenate([x[None], y]), first, rows)
    assert num_invalid.sum() == 0
    assert misplaced_cells(env_step, action, mode="next_step") == 0
    jax.tree.map(np.testing.assert_array_equal, env_step, rollout(stepped, action))


def shifted(leaf):
    return np.roll(leaf, 1, axis=0)


def swapped(leaf):
    leaf = leaf.copy()
    leaf[:, [0, 1]] = leaf[:, [1, 0]]
    return leaf


@pytest.mark.parametrize("name", ["single", "single_dict", "vector_same_step"])
@pytest.mark.parametrize("plant", [shifted, swapped])
@pytest.mark.parametrize("field", [*EnvStep._fields, "action"])
def test_a_planted_error_is_found(name, plant, field):
    env, options, mode = ORACLES[name]
    if field == "acting" or (field == "final" and mode == "next_step"):
        pytest.skip("these rows have none")
    adapter = make(env, **options)
    action = actions_of(60)
    env_step = rollout(adapter, action)
    adapter.close()
    assert misplaced_cells(env_step, action, mode=mode) == 0
    if field == "action":
        action = plant(action)
    else:
        wrong = jax.tree.map(plant, getattr(env_step, field))
        env_step = env_step._replace(**{field: wrong})
    assert misplaced_cells(env_step, action, mode=mode) > 0


def test_ends_that_are_delivered_in_the_other_mode_are_found():
    env, options, mode = ORACLES["vector_same_step"]
    action = actions_of(60)
    adapter = make(env, **options)
    env_step = rollout(adapter, action)
    adapter.close()
    assert mode == "same_step"
    assert misplaced_cells(env_step, action, mode="next_step") > 0


def test_the_oracle_has_every_kind_of_end():
    adapter = make(OracleEnv)
    env_step = rollout(adapter, actions_of(500))
    adapter.close()
    for terminated, truncated in ((True, False), (False, True), (True, True)):
        assert ((env_step.terminated == terminated) & (env_step.truncated == truncated)).any()


def cartpole_rollout(num_steps: int):
    env = make_env_factory("CartPole-v1")(7, list(range(10, 17)))
    # Push towards where the pole falls, at random more or less often: episodes of all lengths.
    rng = np.random.default_rng(0)
    randomness = np.linspace(0.05, 1, 7)
    row = env_step_of(env.reset(), np.zeros(7, np.int32))
    rows, actions = [row], []
    for _ in range(num_steps):
        lean = row.obs @ np.array([0.1, 0.3, 1.0, 1.0], np.float32)
        action = np.where(rng.random(7) < randomness, rng.integers(2, size=7), lean > 0).astype(
            np.int32
        )
        row = env_step_of(env.step(action), action)
        rows.append(row)
        actions.append(action)
    env.close()
    return jax.tree.map(lambda *x: np.stack(x), *rows), np.stack(actions)


def test_every_transition_of_real_cartpole_follows_from_its_equations():
    env_step, action = cartpole_rollout(4000)
    assert env_step.truncated.any() and env_step.terminated.any()
    assert cartpole_violations(env_step, action) == 0
    half = jax.tree.map(lambda x: x[1234:], env_step)
    assert cartpole_violations(half, action[1234:]) == 0


@pytest.mark.parametrize("field", [*EnvStep._fields[:6], "action"])  # the others are ()
def test_a_planted_error_in_cartpole_is_found(field):
    env_step, action = cartpole_rollout(700)
    if field == "action":
        action = shifted(action)
    else:
        env_step = env_step._replace(**{field: shifted(getattr(env_step, field))})
    assert cartpole_violations(env_step, action) > 0


def test_oracle_spec_is_canonical():
    space = env_spec(ORACLES["single_dict"][0]).observation_space
    assert space["last"].dtype == np.int32
    assert list(space.spaces) == ["last", "where"]
