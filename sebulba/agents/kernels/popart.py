"""PopArt: a value head that learns normalised targets, whose values stay in the units of rewards.

Source: van Hasselt et al. 2016 (arXiv 1602.07714), algorithm 1. Step size, bounds and advantages in
units of the deviation: Hessel et al. 2018 (arXiv 1809.04474), for one task. Statistics are among
the parameters; their gradients tell ``rescaled`` how a loss has changed them, in relative numbers,
which stay small beside other gradients.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sebulba.agent import LEARNER_AXIS
from sebulba.agents.kernels.optimizer import masked_mean
from sebulba.types import PyTree

HEAD, SCALE = "value", "value_scale"
"""Names, in the parameters of a network, of the value head and of its statistics."""
RATE = 3e-4
"""Step size of the statistics; the first steps are larger, so that they have no bias to zero."""
BOUNDS = 1e-4, 1e6
"""Of the deviation."""
TOLD = 2.0**-20
"""What ``telling`` multiplies changes by, so that they do not show in the norm of gradients."""

Statistics = dict[str, jax.Array]


def new_statistics() -> Statistics:
    """Return mean 0 and deviation 1 of targets, and the weight of all targets so far, 0."""
    return {"mean": jnp.float32(0), "deviation": jnp.float32(1), "weight": jnp.float32(0)}


def in_units_of_rewards(scale: Statistics, x: jax.Array) -> jax.Array:
    """Return the values of normalised ones."""
    scale = jax.lax.stop_gradient(scale)
    return scale["deviation"] * x + scale["mean"]


def updated(scale: Statistics, target: jax.Array, valid: jax.Array) -> Statistics:
    """Return the statistics after the targets ``[T, B]`` of all devices.

    They are moving averages of first and second moment, written as mean and deviation, since
    moments of large targets that vary little would cancel in float32.
    """
    scale = jax.lax.stop_gradient(scale)

    def mean_of(x: jax.Array) -> jax.Array:
        return jax.lax.pmean(masked_mean(x, valid), LEARNER_AXIS)

    mean, deviation = scale["mean"], scale["deviation"]
    rate = jnp.where(mean_of(jnp.ones_like(target)) > 0, RATE, 0.0)
    weight = scale["weight"] + rate * (1.0 - scale["weight"])
    rate /= jnp.maximum(weight, RATE)
    z = (jax.lax.stop_gradient(target) - mean) / deviation
    step = mean_of(z)
    spread = mean_of(jnp.square(z - step))
    variance = 1.0 - rate + rate * spread + rate * (1.0 - rate) * jnp.square(step)
    deviation = jnp.clip(deviation * jnp.sqrt(variance), *BOUNDS)
    mean += rate * step * scale["deviation"]
    return {"mean": mean, "deviation": deviation, "weight": weight}


def telling(scale: Statistics, new: Statistics) -> jax.Array:
    """Return 0, a term of a loss, whose gradient tells ``rescaled`` of new statistics."""
    old = jax.lax.stop_gradient(scale)
    changes = {
        "mean": (new["mean"] - old["mean"]) / old["deviation"],
        "deviation": new["deviation"] / old["deviation"] - 1.0,
        "weight": new["weight"] - old["weight"],
    }
    return TOLD * sum((changes[name] * (scale[name] - old[name]) for name in scale), jnp.float32(0))


def rescaled(networks: PyTree, grads: PyTree) -> tuple[PyTree, PyTree]:
    """Return networks with new statistics that say what they did, and their gradients."""
    scale, head = networks[SCALE], networks[HEAD]
    changes = jax.tree.map(lambda x: x / TOLD, grads[SCALE])
    growth, shift = 1.0 + changes["deviation"], changes["mean"]
    new = {
        "mean": scale["mean"] + shift * scale["deviation"],
        "deviation": growth * scale["deviation"],
        "weight": scale["weight"] + changes["weight"],
    }
    head = {"kernel": head["kernel"] / growth, "bias": (head["bias"] - shift) / growth}
    grads_of_head = jax.tree.map(lambda x: growth * x, grads[HEAD])
    still = jax.tree.map(jnp.zeros_like, scale)
    networks = {**networks, SCALE: new, HEAD: head}
    return networks, {**grads, SCALE: still, HEAD: grads_of_head}
