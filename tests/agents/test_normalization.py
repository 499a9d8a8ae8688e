"""Running statistics: against NumPy on everything at once, over devices, trajectories and ends."""

from __future__ import annotations

from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sebulba.agents.bases.normalization import Normalization
from sebulba.agents.configs import PPOConfig, TorsoConfig
from sebulba.agents.kernels.normalization import (
    Moments,
    ObservationNormalizer,
    RewardStatistics,
    new_moments,
    normalized_rewards,
    updated_moments,
)
from sebulba.types import EnvSpec, EnvStep, RunSpec

spaces = gymnasium.spaces
DISCRETE = spaces.Discrete(2, dtype=np.int32)
FLATTENING = TorsoConfig(kind="mlp")


def over_devices(function: Any, *shards: Any) -> Any:
    """Map over the first dimension with the axis bound; return one device's result of all equal."""
    result = jax.vmap(function, axis_name="learner")(*shards)
    for leaf in jax.tree.leaves(result):
        np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[:1], leaf.shape))
    return jax.tree.map(lambda x: x[0], result)


def test_moments_are_those_of_all_samples_of_all_devices_and_batches() -> None:
    rng = np.random.default_rng(0)
    moments, kept = new_moments((3,)), []
    for batch in range(3):
        x = (5.0 + batch + 2.0 * rng.normal(size=(4, 6, 2, 3))).astype(np.float32)
        # Devices hold unequal numbers; the first none at all.
        weight = rng.random((4, 6, 2)) < np.array([0.0, 0.2, 0.9, 1.0])[:, None, None]
        kept.append(x[weight])
        moments = over_devices(lambda x, w, m=moments: updated_moments(m, x, w), x, weight)
    samples = np.concatenate(kept)
    assert moments.num_samples == pytest.approx(len(samples), abs=1e-3)
    np.testing.assert_allclose(moments.mean, samples.mean(0), rtol=1e-4)
    np.testing.assert_allclose(moments.variance, samples.var(0), rtol=1e-3)


@pytest.mark.parametrize("outlier", [1e20, -float(np.finfo(np.float32).max)])
@pytest.mark.parametrize("batch_of_outlier", [0, 3])
def test_one_outlier_does_not_ruin_the_statistics(outlier: float, batch_of_outlier: int) -> None:
    space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    normalizer = ObservationNormalizer(space, FLATTENING)
    rng, statistics = np.random.default_rng(0), normalizer.new()
    for batch in range(40):
        x = (5.0 + 2.0 * rng.normal(size=(1, 100, 5, 1))).astype(np.float32)
        if batch == batch_of_outlier:
            x[0, 50, 2] = outlier
        statistics = over_devices(lambda x, s=statistics: normalizer.update(s, x), x)
    (moments,) = statistics
    if batch_of_outlier:  # it counts as 100 deviations in 20,000 samples
        assert moments.mean[0] == pytest.approx(5.0, abs=0.1)
        assert moments.variance[0] == pytest.approx(4.0, abs=4.0)
    assert np.isfinite(moments.mean).all() and np.isfinite(moments.variance).all()


@pytest.mark.parametrize("grown", [3.0, 1e6])
def test_a_quantity_that_grows_is_followed_within_a_few_updates(grown: float) -> None:
    space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    normalizer = ObservationNormalizer(space, FLATTENING)
    statistics = normalizer.new()
    for value in [0.0] * 10 + [grown] * 20:
        x = np.full((1, 100, 5, 1), value, np.float32)
        statistics = over_devices(lambda x, s=statistics: normalizer.update(s, x), x)
    assert statistics[0].mean[0] > grown / 3


def test_moments_of_nothing_stay() -> None:
    before = Moments(jnp.float32(7.0), jnp.float32(2.0), jnp.float32(3.0))
    x, nothing = jnp.full((1, 4, 2), jnp.nan), jnp.zeros((1, 4, 2))
    after = over_devices(lambda x, w: updated_moments(before, x, w), x, nothing)
    np.testing.assert_array_equal(after, before)


@pytest.mark.slow
def test_normalizes_vectors_of_numbers_and_nothing_else() -> None:
    space = spaces.Dict(
        picture=spaces.Box(0, 255, (17, 20), np.uint8),
        image=spaces.Box(-1, 1, (2, 6, 7)),
        number=spaces.Discrete(3),
        inner=spaces.Dict(vector=spaces.Box(-np.inf, np.inf, (3,), np.float64)),
    )
    normalizer = ObservationNormalizer(space, TorsoConfig())
    rng = np.random.default_rng(1)
    obs = {
        "picture": rng.integers(0, 255, (9, 8, 17, 20), np.uint8),
        "image": rng.random((9, 8, 2, 6, 7), np.float32),
        "number": rng.integers(0, 3, (9, 8)),
        "inner": {"vector": 40.0 + 3.0 * rng.normal(size=(9, 8, 3))},
    }
    update = lambda obs: normalizer.update(normalizer.new(), obs)  # noqa: E731
    (moments,) = over_devices(update, jax.tree.map(lambda x: jnp.asarray(x)[None], obs))
    scaling = normalizer.scaling((moments,))
    vector = np.asarray(normalizer(scaling, obs)["inner"]["vector"])
    np.testing.assert_allclose(vector.mean((0, 1)), 0.0, atol=1e-3)
    np.testing.assert_allclose(vector.std((0, 1)), 1.0, atol=1e-3)
    for name in ("picture", "image", "number"):
        assert normalizer(scaling, obs)[name] is obs[name]
    far = {**obs, "inner": {"vector": np.array([-1e6, 40.0, 1e6])[None, None]}}
    np.testing.assert_allclose(
        normalizer(scaling, far)["inner"]["vector"][0, 0], [-10, 0, 10], atol=0.5
    )
    flattening = ObservationNormalizer(space, FLATTENING)
    assert [moments.mean.shape for moments in flattening.new()] == [(2, 6, 7), (3,)]


@pytest.mark.parametrize(
    ("shape", "is_small"), [((7, 7, 3), True), ((16, 16), True), ((4, 17, 16), False)]
)
def test_small_images_of_bytes_are_codes_and_normalized(
    shape: tuple[int, ...], is_small: bool
) -> None:
    space = spaces.Box(0, 255, shape, np.uint8)
    assert bool(ObservationNormalizer(space, TorsoConfig())) == is_small
    assert not ObservationNormalizer(space, TorsoConfig(normalize_small_images=False))
    assert not ObservationNormalizer(space, TorsoConfig(small_image_pixels=0))
    assert not ObservationNormalizer(spaces.Box(0, 255, (64,), np.uint8), TorsoConfig())
    if is_small:
        normalizer = ObservationNormalizer(space, TorsoConfig())
        codes = np.random.default_rng(2).integers(0, 3, (9, 8, *shape), np.uint8)
        (moments,) = over_devices(
            lambda obs: normalizer.update(normalizer.new(), obs), jnp.asarray(codes)[None]
        )
        seen = np.asarray(normalizer(normalizer.scaling((moments,)), codes))
        assert seen.dtype == np.float32
        assert 0.9 < seen.std() < 1.1


def test_pixels_and_discrete_observations_are_left_alone() -> None:
    pixels = spaces.Box(0, 255, (4, 36, 36), np.uint8)
    run = RunSpec(num_envs=2, steps_per_cycle=3, num_inferencers=1, num_update_devices=1)
    for space in (pixels, DISCRETE):
        normalization = Normalization(
            EnvSpec(space, DISCRETE), PPOConfig(normalize_observations=True)
        )
        assert not normalization.observations
        assert normalization.new(run).observations == ()
        obs = np.zeros((3, 2, *space.shape), space.dtype)
        assert normalization.observations((), obs) is obs


def test_rewards_by_hand_of_a_model_in_numpy() -> None:
    rng = np.random.default_rng(2)
    gamma, steps, envs = 0.8, 7, 2
    statistics = RewardStatistics(new_moments(), jnp.zeros((3, envs)))
    so_far, sums = np.zeros((3, envs)), []
    ended = np.zeros((3, envs), bool)
    for inferencer in (0, 2, 0, 1, 2, 0):
        last = ended[inferencer].copy()
        rows = [(np.zeros(envs), last, last, last)]
        for _ in range(steps):
            inserted = ended[inferencer].copy()
            end = (rng.random(envs) < 0.3) & ~inserted
            reward = np.where(inserted, 0.0, 3.0 + rng.normal(size=envs))
            terminates = rng.random(envs) < 0.5
            rows.append((reward, end & terminates, end & ~terminates, inserted))
            so_far[inferencer] = gamma * so_far[inferencer] * ~inserted + reward
            sums.extend(so_far[inferencer][~inserted])
            ended[inferencer] = end
        reward, terminated, truncated, is_first = (
            jnp.asarray(np.stack(column))[None] for column in zip(*rows, strict=True)
        )
        row = EnvStep((), (), reward, terminated, truncated, is_first)
        scaled, statistics = over_devices(
            lambda row, j=inferencer, s=statistics: normalized_rewards(s, row, jnp.int32(j), gamma),
            row,
        )
        expected = np.clip(reward[0] / np.std(sums), -10, 10)
        np.testing.assert_allclose(scaled, expected, rtol=1e-3)
    np.testing.assert_allclose(statistics.so_far, so_far, rtol=1e-5)
    assert statistics.moments.num_samples == pytest.approx(len(sums), abs=1e-3)


def test_the_share_of_clipped_numbers_is_counted() -> None:
    space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    normalizer = ObservationNormalizer(space, FLATTENING)
    scaling = normalizer.scaling((Moments(jnp.float32(9), jnp.zeros(2), jnp.ones(2)),))
    x = np.zeros((5, 4, 2), np.float32)
    assert normalizer.clipped(normalizer(scaling, x)) == 0
    x[1, 2, 0], x[3, 3, 1] = 1e20, np.finfo(np.float32).min
    assert normalizer.clipped(normalizer(scaling, x)) == pytest.approx(2 / 40)
    for normalizes in (False, True):
        config = PPOConfig(normalize_observations=normalizes)
        said = Normalization(EnvSpec(space, DISCRETE), config).metrics(jnp.asarray(x))
        assert list(said) == ["observations_clipped"] * normalizes
