"""Running statistics of observations and of discounted returns, the same on all update devices.

Source: the reference implementations of PPO, whose paper does not mention it: ``VecNormalize`` of
OpenAI Baselines, kept in Stable-Baselines3 and as two wrappers in Gymnasium; details 1 to 4 for
continuous control in Huang et al. 2022, "The 37 Implementation Details of PPO" (ICLR blog track).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from sebulba.agent import LEARNER_AXIS
from sebulba.agents.configs import TorsoConfig
from sebulba.agents.kernels.returns import add_up
from sebulba.agents.nets.encoder import is_image
from sebulba.types import EnvStep, FinalObs, PyTree

LARGEST = 10.0
"""Normalised values are clipped to plus and minus this."""
OUTLIER = 100.0
"""Standard deviations from the mean beyond which a sample counts as this far."""
TRUSTED_SAMPLES = 1000.0
"""Samples from which on the moments tell what is far."""
LARGEST_SAMPLE = 1e15
"""Before that; the square of any more is near the largest float32."""
_EPSILON = 1e-8
_INITIAL_COUNT = 1e-4


class Moments(NamedTuple):
    """Running moments of a quantity; the same on all update devices (spec ``P()``)."""

    num_samples: jax.Array
    """Scalar float32, so that from 2^24 batches on, old samples lose weight."""
    mean: jax.Array
    """``[...]``."""
    variance: jax.Array
    """``[...]``."""


def new_moments(shape: tuple[int, ...] = ()) -> Moments:
    """Return mean 0 and variance 1 with almost no weight."""
    return Moments(jnp.float32(_INITIAL_COUNT), jnp.zeros(shape), jnp.ones(shape))


def updated_moments(moments: Moments, x: jax.Array, weight: jax.Array) -> Moments:
    """Return the moments after the samples of all devices.

    Source: Chan, Golub and LeVeque 1979, "Updating Formulae and a Pairwise Algorithm for Computing
    Sample Variances", equation 2.1.

    Args:
      moments: Before.
      x: ``[T, B, ...]``, this device's samples.
      weight: ``[T, B]``, 1 or 0.
    """
    weights = weight.astype(jnp.float32).reshape(*weight.shape, *(1,) * (x.ndim - 2))

    def total(x: jax.Array) -> jax.Array:
        return jax.lax.psum(jnp.sum(x, axis=(0, 1)), LEARNER_AXIS)

    def mean_of(x: jax.Array) -> jax.Array:
        return total(jnp.where(weights > 0, x, 0.0)) / jnp.maximum(count, 1.0)

    count = jax.lax.psum(jnp.sum(weight, dtype=jnp.float32), LEARNER_AXIS)
    mean = mean_of(x)
    variance = mean_of(jnp.square(x - mean[None, None]))
    share = count / (moments.num_samples + count)
    delta = mean - moments.mean
    between = share * (1.0 - share) * jnp.square(delta)
    return Moments(
        num_samples=moments.num_samples + count,
        mean=moments.mean + share * delta,
        variance=(1.0 - share) * moments.variance + share * variance + between,
    )


def without_outliers(moments: Moments, x: jax.Array) -> jax.Array:
    """Return samples ``[T, B, ...]``, none so far out that it alone would make the statistics.

    Once ``TRUSTED_SAMPLES`` are known, a sample counts as at most ``OUTLIER`` standard deviations
    from the mean; a component that has never changed takes its size for its deviation. What has
    really grown gets past that in a few updates, since the deviation grows with it.
    """
    deviation = jnp.sqrt(moments.variance)
    size = jnp.maximum(jnp.abs(moments.mean), 1.0)
    reach = OUTLIER * jnp.where(deviation > 0.0, deviation, size)
    is_known = moments.num_samples >= TRUSTED_SAMPLES
    low = jnp.where(is_known, moments.mean - reach, -LARGEST_SAMPLE)
    high = jnp.where(is_known, moments.mean + reach, LARGEST_SAMPLE)
    return jnp.clip(x, low[None, None], high[None, None])


class Scaling(NamedTuple):
    """How to normalise one array of an observation.

    The leading dimension of 1 is how checkpoints and trained policies have always stored it.
    """

    mean: jax.Array
    """``[1, ...]``."""
    factor: jax.Array
    """``[1, ...]``, one over the standard deviation."""


class ObservationNormalizer:
    """Normalises the numbers in an observation; large images and discrete parts are left alone.

    Statistics and scalings are tuples, one entry for each array that is normalised.
    """

    def __init__(self, space: gymnasium.Space, torso: TorsoConfig, *, is_on: bool = True) -> None:
        """Find the vectors of numbers in an observation space; there may be none.

        One that is not ``is_on`` has none, and returns observations as they are.
        """
        parts = _parts(space)
        self._chosen = [is_on and _is_numbers(part, torso) for part in parts]
        self._shapes = [
            part.shape or () for part, chosen in zip(parts, self._chosen, strict=True) if chosen
        ]

    def __bool__(self) -> bool:
        """Tell whether there is anything to normalise."""
        return bool(self._shapes)

    def new(self) -> tuple[Moments, ...]:
        """Return statistics without samples."""
        return tuple(new_moments(shape) for shape in self._shapes)

    def update(
        self, statistics: tuple[Moments, ...], obs: PyTree, counts: jax.Array | None = None
    ) -> tuple[Moments, ...]:
        """Return the statistics after observations ``[T, B, ...]``, including those of resets.

        Where ``counts [T, B]`` is False, an observation is left out.
        """
        leaves = zip(jax.tree.leaves(obs), self._chosen, strict=True)
        arrays = [jnp.asarray(leaf, jnp.float32) for leaf, chosen in leaves if chosen]
        return tuple(
            updated_moments(
                moments,
                without_outliers(moments, x),
                jnp.ones(x.shape[:2]) if counts is None else counts,
            )
            for moments, x in zip(statistics, arrays, strict=True)
        )

    def scaling(self, statistics: tuple[Moments, ...]) -> tuple[Scaling, ...]:
        """Return mean and factor with which policies normalise."""
        return tuple(
            Scaling(m.mean[None], jax.lax.rsqrt(m.variance + _EPSILON)[None]) for m in statistics
        )

    def __call__(self, scaling: tuple[Scaling, ...], obs: PyTree) -> PyTree:
        """Return ``obs [T, B, ...]``, or ``[N, ...]``, normalised and clipped, float32."""
        leaves, structure = jax.tree.flatten(obs)
        scalings = iter(scaling)
        normalized = [
            _scaled(next(scalings), leaf) if chosen else leaf
            for leaf, chosen in zip(leaves, self._chosen, strict=True)
        ]
        return jax.tree.unflatten(structure, normalized)

    def clipped(self, obs: PyTree) -> jax.Array:
        """Return the share of the numbers of normalised ``obs`` that were clipped, a scalar."""
        leaves = zip(jax.tree.leaves(obs), self._chosen, strict=True)
        clipped = [jnp.mean(jnp.abs(leaf) >= LARGEST) for leaf, chosen in leaves if chosen]
        return jnp.max(jnp.stack(clipped))


def new_observations(row: EnvStep) -> list[tuple[PyTree, jax.Array | None]]:
    """Return the observations that a trajectory adds to statistics, each ``[T, B, ...]``.

    Those of rows 0 to T-1, since row T is row 0 of the next trajectory, and last observations of
    episodes where they are in ``row.final``.

    Args:
      row: ``[T+1, B, ...]``.

    Returns:
      Observations, and which of them count, ``[T, B]``; None where all do.
    """
    found: list[tuple[PyTree, jax.Array | None]] = [(jax.tree.map(lambda x: x[:-1], row.obs), None)]
    if isinstance(row.final, FinalObs):
        final = jax.tree.map(lambda x: x[1:], row.final)
        found.append((final.obs, final.given))
    return found


def _parts(space: gymnasium.Space) -> list[gymnasium.Space]:
    """Return the spaces of the arrays of an observation, in the order of JAX."""
    if isinstance(space, gymnasium.spaces.Dict):
        return [part for name in sorted(space.spaces) for part in _parts(space[name])]
    return [space]


def _is_numbers(space: gymnasium.Space, torso: TorsoConfig) -> bool:
    if not isinstance(space, gymnasium.spaces.Box):
        return False
    if space.dtype == np.uint8:
        # Height and width, wherever the channels are, which are seldom more than either.
        height, width = sorted(space.shape)[-2:] if is_image(space) else (np.inf, 1)
        return torso.normalize_small_images and height * width <= torso.small_image_pixels
    return torso.kind == "mlp" or not is_image(space)


def _scaled(scaling: Scaling, x: Any) -> jax.Array:
    x = jnp.asarray(x, jnp.float32)
    before = range(x.ndim - scaling.mean.ndim)
    mean, factor = (jnp.expand_dims(of, before) for of in (scaling.mean, scaling.factor))
    return jnp.clip((x - mean) * factor, -LARGEST, LARGEST)


class RewardStatistics(NamedTuple):
    """Running statistics of the discounted sum of rewards so far in an episode."""

    moments: Moments
    """Moments of that sum, over all environments."""
    so_far: jax.Array
    """``[J, B]``, the sum now in each environment of each Inferencer."""


def normalized_rewards(
    statistics: RewardStatistics, env_step: EnvStep, inferencer: jax.Array, gamma: float
) -> tuple[jax.Array, RewardStatistics]:
    """Divide rewards by the standard deviation of the discounted sum of rewards so far.

    ``sum_t = gamma sum_{t-1} + reward_t``, from 0 in every episode. The sum lacks the rewards of a
    trajectory that was dropped, which hardly changes the statistics.

    Args:
      statistics: Before.
      env_step: ``[T+1, B, ...]``; row 0 was the last row of the trajectory before.
      inferencer: Scalar int32, index of the Inferencer.
      gamma: Discount per environment step.

    Returns:
      Rewards ``[T+1, B]``, clipped, and the statistics with these.
    """
    reward = jnp.asarray(env_step.reward, jnp.float32)
    ended = jnp.asarray(env_step.terminated | env_step.truncated)
    goes_on = gamma * (1.0 - ended[:-1].astype(jnp.float32))
    before = statistics.so_far[inferencer]
    last, sums = jax.lax.scan(add_up, before, (reward[1:], goes_on), unroll=8)
    moments = updated_moments(statistics.moments, sums, ~jnp.asarray(env_step.inserted[1:]))
    factor = jax.lax.rsqrt(moments.variance + _EPSILON)
    so_far = statistics.so_far.at[inferencer].set(last)
    scaled = jnp.clip(factor.astype(jnp.float32) * reward, -LARGEST, LARGEST)
    return scaled, RewardStatistics(moments, so_far)


def reward_deviation(statistics: RewardStatistics) -> jax.Array:
    """Return what ``normalized_rewards`` divided the newest rewards by, a scalar."""
    return jnp.sqrt(statistics.moments.variance + _EPSILON)
