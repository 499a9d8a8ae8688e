"""Distributions over actions, one for each action space.

A distribution is a set of pure functions of ``params [..., num_params]``. Its samples are raw:
class indices, or Gaussian numbers before any squashing. ``action`` turns raw samples into what the
environment receives. Log-probability is that of the raw sample: ratios of probabilities between two
policies are the same for raw samples and for actions, because the map from one to the other does
not change. Entropy is that of the action that is played.

Networks compute ``num_params`` parameters from the observation. The last ``num_free_params`` are
the same for every observation.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from sebulba.agents.configs.on_policy import LOG_STD_RANGE
from sebulba.agents.kernels.squashing import Squashing
from sebulba.errors import UsageError
from sebulba.types import ActionMoments

_POINTS, _WEIGHTS = (x.astype(np.float32) for x in np.polynomial.hermite_e.hermegauss(32))
_WEIGHTS /= _WEIGHTS.sum()


def make_distribution(space: gymnasium.Space) -> Categorical | MultiCategorical | Gaussian:
    """Return the distribution for an action space.

    Raises:
      UsageError: Not a Discrete, a MultiDiscrete or a Box of floats.
    """
    if isinstance(space, gymnasium.spaces.Discrete):
        return Categorical(space)
    if isinstance(space, gymnasium.spaces.MultiDiscrete):
        return MultiCategorical(space)
    if isinstance(space, gymnasium.spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return Gaussian(space)
    raise UsageError(
        f"action_space={space} must be a Discrete, a MultiDiscrete or a Box of floats; "
        "use a wrapper that gives one"
    )


def _dtype(space: gymnasium.Space) -> np.dtype:
    """Return the dtype of a space as JAX has it (64 bits become 32 unless enabled)."""
    return np.dtype(jax.dtypes.canonicalize_dtype(space.dtype))


class Categorical:
    """A softmax over the n actions of a Discrete space; raw is an index from 0, int32."""

    num_free_params = 0

    def __init__(self, space: gymnasium.spaces.Discrete) -> None:
        """Take size and start from ``space``."""
        self.num_params = int(space.n)
        self._start = int(space.start)
        self._dtype = _dtype(space)

    def sample(self, params: jax.Array, key: jax.Array) -> jax.Array:
        """Draw an index, ``[...]``."""
        return jax.random.categorical(key, params).astype(jnp.int32)

    def mode(self, params: jax.Array) -> jax.Array:
        """Return the likeliest index, ``[...]``."""
        return jnp.argmax(params, axis=-1).astype(jnp.int32)

    def action(self, raw: jax.Array) -> jax.Array:
        """Return the index as an element of the space."""
        return (raw + self._start).astype(self._dtype)

    def index(self, action: jax.Array) -> jax.Array:
        """Return the index of an element of the space."""
        return action - self._start

    def log_prob(self, params: jax.Array, raw: jax.Array) -> jax.Array:
        """Return the log-probability of an index, ``[...]``."""
        # A one-hot product: gathers and their gradient (a scatter) are slow on CPU.
        chosen = jax.nn.one_hot(raw, self.num_params)
        return jnp.sum(chosen * jax.nn.log_softmax(params), axis=-1)

    def entropy(self, params: jax.Array) -> jax.Array:
        """Return the entropy, ``[...]``."""
        log_probs = jax.nn.log_softmax(params)
        return -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)

    def kl(self, params: jax.Array, other: jax.Array) -> jax.Array:
        """Return the divergence KL(params, other), ``[...]``; actions illegal in both add 0."""
        log_probs, others = jax.nn.log_softmax(params), jax.nn.log_softmax(other)
        return jnp.sum(jnp.exp(log_probs) * (log_probs - others), axis=-1)

    def of_actions(self, params: jax.Array) -> jax.Array:
        """Return the probability of each action, ``[..., n]``; the first is the space's start."""
        return jax.nn.softmax(params)


class MultiCategorical:
    """Independent softmaxes over the entries of a MultiDiscrete; raw is ``[..., K]`` int32."""

    num_free_params = 0

    def __init__(self, space: gymnasium.spaces.MultiDiscrete) -> None:
        """Take sizes and starts from ``space``; ``nvec`` may have any shape."""
        self._parts = [Categorical(gymnasium.spaces.Discrete(int(n))) for n in space.nvec.flat]
        self.num_params = int(space.nvec.sum())
        self._shape = space.shape
        self._start = np.asarray(space.start, np.int32)
        self._dtype = _dtype(space)

    def _split(self, params: jax.Array) -> list[tuple[Categorical, jax.Array]]:
        """Return each entry with its logits."""
        ends = np.cumsum([part.num_params for part in self._parts])[:-1]
        return list(zip(self._parts, jnp.split(params, ends, axis=-1), strict=True))

    def sample(self, params: jax.Array, key: jax.Array) -> jax.Array:
        """Draw indices, ``[..., K]``."""
        keys = jax.random.split(key, len(self._parts))
        pieces = zip(self._split(params), keys, strict=True)
        return jnp.stack([part.sample(logits, k) for (part, logits), k in pieces], axis=-1)

    def mode(self, params: jax.Array) -> jax.Array:
        """Return the likeliest indices, ``[..., K]``."""
        return jnp.stack([part.mode(logits) for part, logits in self._split(params)], axis=-1)

    def action(self, raw: jax.Array) -> jax.Array:
        """Return the indices as an element of the space."""
        shaped = raw.reshape(*raw.shape[:-1], *self._shape)
        start = self._start.reshape((1,) * (raw.ndim - 1) + self._shape)
        return (shaped + start).astype(self._dtype)

    def log_prob(self, params: jax.Array, raw: jax.Array) -> jax.Array:
        """Return the log-probability of all indices together, ``[...]``."""
        pieces = enumerate(self._split(params))
        parts = [part.log_prob(logits, raw[..., k]) for k, (part, logits) in pieces]
        return jnp.sum(jnp.stack(parts), axis=0)

    def entropy(self, params: jax.Array) -> jax.Array:
        """Return the entropy, ``[...]``: the sum over entries."""
        parts = [part.entropy(logits) for part, logits in self._split(params)]
        return jnp.sum(jnp.stack(parts), axis=0)

    def kl(self, params: jax.Array, other: jax.Array) -> jax.Array:
        """Return the divergence KL(params, other), ``[...]``: the sum over entries."""
        pairs = zip(self._split(params), self._split(other), strict=True)
        return jnp.sum(jnp.stack([part.kl(own, one) for (part, own), (_, one) in pairs]), axis=0)

    def of_actions(self, params: jax.Array) -> tuple[jax.Array, ...]:
        """Return the probabilities of each entry, in the order of ``nvec.flat``."""
        return tuple(jax.nn.softmax(logits) for _, logits in self._split(params))


Bound = Callable[[jax.Array], jax.Array]


def clipped(log_std: jax.Array) -> jax.Array:
    """Clip to ``LOG_STD_RANGE``; beyond, the gradient is 0."""
    return jnp.clip(log_std, *LOG_STD_RANGE)


@jax.custom_vjp
def _bounded(log_std: jax.Array) -> jax.Array:
    """Clip to ``LOG_STD_RANGE``; at and beyond a bound, gradients that lead back inside remain.

    With the gradient of a clip, which is 0 there, a parameter that has left would never come back.
    """
    return jnp.clip(log_std, *LOG_STD_RANGE)


def _bounded_forward(log_std: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _bounded(log_std), log_std


def _bounded_backward(log_std: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    low, high = LOG_STD_RANGE
    # A step of descent goes against the gradient.
    leads_out = ((log_std >= high) & (gradient < 0)) | ((log_std <= low) & (gradient > 0))
    return (jnp.where(leads_out, 0.0, gradient),)


_bounded.defvjp(_bounded_forward, _bounded_backward)


class Gaussian:
    """Independent Gaussians for a Box; raw is ``[..., K]`` float32, before squashing.

    ``Squashing`` squashes it. The free parameters, the last K of ``params``, are the logarithms of
    the standard deviations.
    """

    def __init__(
        self, squashing: gymnasium.spaces.Box | Squashing, bounded: Bound = _bounded
    ) -> None:
        """Take shape and bounds of the actions.

        Args:
          squashing: From raw numbers to actions, or the space of the actions.
          bounded: Brings the logarithm of a standard deviation into ``LOG_STD_RANGE``.
        """
        self.squashing = squashing if isinstance(squashing, Squashing) else Squashing(squashing)
        self._bounded = bounded
        self.num_params = self.num_free_params = self.squashing.size

    def sample(self, params: jax.Array, key: jax.Array) -> jax.Array:
        """Draw a Gaussian vector, ``[..., K]``."""
        mean, _ = self._mean_and_log_std(params)
        return self.at(params, jax.random.normal(key, mean.shape))

    def at(self, params: jax.Array, noise: jax.Array) -> jax.Array:
        """Return the vector that is ``noise [..., K]`` standard deviations from the mean."""
        mean, log_std = self._mean_and_log_std(params)
        return mean + jnp.exp(log_std) * noise

    def mode(self, params: jax.Array) -> jax.Array:
        """Return the mean, ``[..., K]``."""
        return self._mean_and_log_std(params)[0]

    def action(self, raw: jax.Array) -> jax.Array:
        """Squash where bounded, clip, and give the shape of the space."""
        return self.squashing.action(self.squashing.unit(raw))

    def log_prob(self, params: jax.Array, raw: jax.Array) -> jax.Array:
        """Return the log-density of raw, ``[...]``."""
        mean, log_std = self._mean_and_log_std(params)
        z = (raw - mean) * jnp.exp(-log_std)
        return jnp.sum(-0.5 * z**2 - log_std - 0.5 * math.log(2 * math.pi), axis=-1)

    def entropy(self, params: jax.Array) -> jax.Array:
        """Return the differential entropy of the unit action, ``[...]``.

        That of raw, which has a closed form, and the mean of ``log |d unit / d raw|``, which has
        none: by Gauss-Hermite quadrature. Squashed actions have most of it at a standard deviation
        of about 0.87; beyond, they gather at the bounds.
        """
        mean, log_std = self._mean_and_log_std(params)
        points, weights = (x.reshape(-1, *[1] * mean.ndim) for x in (_POINTS, _WEIGHTS))
        slope = self.squashing.log_slope(mean[None] + jnp.exp(log_std)[None] * points)
        of_raw = log_std + 0.5 * math.log(2 * math.pi * math.e)
        return jnp.sum(of_raw + jnp.sum(weights * slope, axis=0), axis=-1)

    def entropy_at(self, params: jax.Array, raw: jax.Array) -> jax.Array:
        """Return ``entropy``, by samples where there is no closed form: of a policy close to it."""
        of_raw = self._mean_and_log_std(params)[1] + 0.5 * math.log(2 * math.pi * math.e)
        return jnp.sum(of_raw + self.squashing.log_slope(raw), axis=-1)

    def kl(self, params: jax.Array, other: jax.Array) -> jax.Array:
        """Return the divergence KL(params, other), ``[...]``, the same for raw and squashed."""
        (mean, log_std), (middle, others) = map(self._mean_and_log_std, (params, other))
        square = jnp.exp(2 * (log_std - others)) + jnp.square((mean - middle) * jnp.exp(-others))
        return jnp.sum(others - log_std + 0.5 * square - 0.5, axis=-1)

    def of_actions(self, params: jax.Array) -> ActionMoments:
        """Return mean and standard deviation of actions, ``[..., *action_shape]``.

        By the trapezoidal rule over the Gaussian: squashed ones have no closed form.
        """
        mean, log_std = self._mean_and_log_std(params)
        z = np.linspace(-8.0, 8.0, 513)
        weight = np.exp(-0.5 * z**2)
        weight /= weight.sum()
        points, weights = (x.astype(np.float32).reshape(-1, *[1] * mean.ndim) for x in (z, weight))
        raw = mean[None] + jnp.exp(log_std)[None] * points
        action = self.action(raw).astype(jnp.float32)
        weights = weights.reshape(-1, *[1] * (action.ndim - 1))
        middle = jnp.sum(weights * action, axis=0)
        variance = jnp.sum(weights * jnp.square(action - middle[None]), axis=0)
        return ActionMoments(middle, jnp.sqrt(variance))

    def _mean_and_log_std(self, params: jax.Array) -> tuple[jax.Array, jax.Array]:
        mean, log_std = jnp.split(params, 2, axis=-1)
        return mean, self._bounded(log_std)


class SquashedGaussian(Gaussian):
    """Gaussians for a Box whose standard deviations depend on the observation too.

    As :class:`Gaussian`, but ``log_prob`` is the density of the unit action (in [-1, 1] where it
    is bounded). Source: Haarnoja et al. 2018 (arXiv 1801.01290), appendix C.
    """

    def __init__(self, squashing: gymnasium.spaces.Box | Squashing) -> None:
        """Take shape and bounds of the actions."""
        # The deviation depends on the observation: other observations bring it back.
        super().__init__(squashing, clipped)
        self.num_params, self.num_free_params = 2 * self.squashing.size, 0

    def log_prob(self, params: jax.Array, raw: jax.Array) -> jax.Array:
        """Return the log-density of the unit action that raw is squashed to, ``[...]``, in nats."""
        slope = jnp.sum(self.squashing.log_slope(raw), axis=-1)
        return super().log_prob(params, raw) - slope
