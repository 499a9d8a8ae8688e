"""Random orders of rows: permutations, all places alike, neighbours independent."""

import functools

import jax
import numpy as np
import pytest

from sebulba.agents.kernels.shuffle import shuffled

DRAWS = 20_000


@functools.cache
def draws(num_rows: int) -> np.ndarray:
    keys = jax.random.split(jax.random.key(7), DRAWS)
    return np.asarray(jax.jit(jax.vmap(lambda key: shuffled(key, num_rows)))(keys))


def chi_square(counts: np.ndarray) -> float:
    """Return how many standard deviations the statistic of equal counts is above its mean."""
    expected, free = counts.mean(), counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - free) / np.sqrt(2 * free))


@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 64, 1000, 8192])
def test_every_row_comes_once(num_rows):
    order = np.asarray(jax.jit(shuffled, static_argnums=1)(jax.random.key(num_rows), num_rows))
    assert order.dtype == np.int32
    assert sorted(order) == list(range(num_rows))


@pytest.mark.parametrize("num_rows", [2, 3, 4, 12])
def test_each_row_comes_to_each_place_equally_often(num_rows):
    counts = np.stack([np.bincount(place, minlength=num_rows) for place in draws(num_rows).T])
    assert abs(chi_square(counts)) < 5


@pytest.mark.parametrize("num_rows", [3, 4])
def test_all_orders_come_equally_often(num_rows):
    found, counts = np.unique(draws(num_rows), axis=0, return_counts=True)
    assert len(found) == {3: 6, 4: 24}[num_rows]
    assert abs(chi_square(counts)) < 5


@pytest.mark.parametrize("num_rows", [12, 64])
def test_pairs_of_places_have_all_pairs_of_rows_equally_often(num_rows):
    places = draws(num_rows)
    for first, second in ((0, 1), (0, num_rows // 2), (3, num_rows - 1)):
        pairs = places[:, first] * num_rows + places[:, second]
        counts = np.bincount(pairs, minlength=num_rows**2)
        assert counts.reshape(num_rows, -1).trace() == 0
        assert abs(chi_square(counts[~np.eye(num_rows, dtype=bool).ravel()])) < 5


def test_keys_give_different_orders_and_the_same_key_the_same():
    order = [np.asarray(shuffled(jax.random.key(seed), 100)) for seed in (0, 0, 1)]
    assert (order[0] == order[1]).all()
    assert (order[0] != order[2]).mean() > 0.9
