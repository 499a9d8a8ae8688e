"""Seeds: inside 31 bits, and never the same twice in a run."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sebulba.envs import make_env_factory, seed_block
from sebulba.envs.seeds import ENVS_A_GENERATION, LAST_GENERATION
from sebulba.errors import UsageError
from sebulba.loops.evaluation import evaluation_seeds

INT32 = st.integers(-(2**31), 2**31 - 1)


@settings(max_examples=60, deadline=None)
@given(
    seed=INT32,
    num_hosts=st.integers(1, 4),
    num_inferencers=st.integers(1, 5),
    num_envs=st.integers(1, 70),
)
def test_blocks_of_all_hosts_and_inferencers_are_disjoint(
    seed, num_hosts, num_inferencers, num_envs
):
    seeds = [
        one
        for host in range(num_hosts)
        for inferencer in range(num_inferencers)
        for one in seed_block(
            seed,
            inferencer=inferencer,
            num_inferencers=num_inferencers,
            num_envs=num_envs,
            host=host,
        )
    ]
    assert len(set(seeds)) == num_hosts * num_inferencers * num_envs
    assert all(type(one) is int and 0 <= one < 2**31 for one in seeds)


@settings(max_examples=60, deadline=None)
@given(seed=INT32, other=INT32)
def test_another_run_seed_gives_other_seeds(seed, other):
    def block(seed):
        return seed_block(seed, inferencer=1, num_inferencers=3, num_envs=40)

    assert block(seed) == block(np.int32(seed))
    if seed != other:
        # Two draws of 40 out of 2^31: one in common is already rare.
        assert len(set(block(seed)) & set(block(other))) <= 1


@settings(max_examples=60, deadline=None)
@given(seed=INT32)
def test_neighbouring_environments_do_not_have_neighbouring_seeds(seed):
    block = np.array(seed_block(seed, inferencer=0, num_inferencers=1, num_envs=50))
    assert (np.abs(np.diff(np.sort(block))) > 1).all()


@pytest.mark.parametrize(
    "seed", [2**31, -(2**31) - 1, 1.0, True, np.True_, "1", None, np.float32(3)]
)
def test_seeds_that_are_not_int32_are_refused(seed):
    with pytest.raises(UsageError, match="seed="):
        seed_block(seed, inferencer=0, num_inferencers=1, num_envs=2)


@pytest.mark.parametrize(("inferencer", "num_envs", "host"), [(2, 1, 0), (-1, 1, 0), (0, 2**31, 1)])
def test_blocks_that_do_not_exist_are_refused(inferencer, num_envs, host):
    with pytest.raises(UsageError):
        seed_block(0, inferencer=inferencer, num_inferencers=2, num_envs=num_envs, host=host)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "options"),
    [
        ("CartPole-v1", {}),
        ("CartPole-v1", {"backend": "gymnasium"}),
        ("CartPole-v1", {"backend": "gymnasium", "vectorization": "async"}),
        ("tests.envs.test_adapters:make_vec_cartpole", {}),
    ],
)
def test_same_seeds_same_episodes_and_other_seeds_others(env, options):
    def first_obs(seeds):
        adapter = make_env_factory(env, **options)(3, seeds)
        obs = [adapter.reset().obs]
        action = np.array([0, 1, 1], np.int32)
        obs.extend(adapter.step(action).obs for _ in range(15))  # past the first reset
        adapter.close()
        return np.stack(obs)

    one, again, other = first_obs([5, 6, 7]), first_obs([5, 6, 7]), first_obs([8, 9, 10])
    np.testing.assert_array_equal(one, again)
    assert (one[0] != other[0]).all()
    assert len(np.unique(one[0], axis=0)) == 3


@settings(max_examples=60, deadline=None)
@given(
    seed=INT32,
    num_envs=st.integers(1, 70),
    generations=st.sets(st.integers(0, LAST_GENERATION), min_size=2, max_size=5),
)
def test_environments_made_anew_share_no_seed_with_any_others(seed, num_envs, generations):
    blocks = [
        seed_block(
            seed, inferencer=i, num_inferencers=2, num_envs=num_envs, host=h, generation=generation
        )
        for generation in generations
        for h in range(2)
        for i in range(2)
    ]
    blocks.append(evaluation_seeds(seed, num_envs))
    seeds = [one for block in blocks for one in block]
    assert len(set(seeds)) == len(seeds)


def test_generations_end_where_the_next_and_evaluations_begin():
    def block(first, num_envs, generation):
        return seed_block(
            5, inferencer=first, num_inferencers=2**31, num_envs=num_envs, generation=generation
        )

    last = block(ENVS_A_GENERATION - 1, 1, 1) + block(ENVS_A_GENERATION - 1, 1, LAST_GENERATION)
    first = block(0, 1, 2) + evaluation_seeds(5, 2**17)
    assert not set(last) & set(first)
    assert block(ENVS_A_GENERATION, 1, 0) == block(0, 1, 1)  # what the limit is there for
    with pytest.raises(UsageError, match="cannot be replaced"):
        block(ENVS_A_GENERATION, 1, 1)
    for generation in (-1, LAST_GENERATION + 1):
        with pytest.raises(UsageError, match=f"generation={generation} must be in 0 to 8190"):
            block(0, 1, generation)


def test_the_first_generation_has_the_seeds_that_it_always_had():
    block = seed_block(7, inferencer=1, num_inferencers=2, num_envs=3)
    assert block == [94590576, 2053238014, 1434467671]
