"""Running averages among the parameters of networks.

The gradient of an average is its distance from what it follows, so that descent with a rate of its
own moves it. It is then saved, exported, and shared by devices as every other parameter is.
"""

from __future__ import annotations

import jax
import optax

from sebulba.types import PyTree

AVERAGES = "averages"
"""Name, in the parameters of a module, of a dict of averages."""


def following(averages: PyTree, newest: PyTree) -> jax.Array:
    """Return 0, a term of a loss, with the gradient ``averages - newest`` for the averages."""
    distance = jax.tree.map(lambda x, y: x - jax.lax.stop_gradient(y), averages, newest)
    loss = 0.5 * optax.tree.norm(distance, squared=True)
    return loss - jax.lax.stop_gradient(loss)


def with_averages(
    optimizer: optax.GradientTransformation, rate: float
) -> optax.GradientTransformation:
    """Return ``optimizer`` for all parameters but averages, which move by ``rate``."""

    def labels(networks: PyTree) -> PyTree:
        key = jax.tree_util.DictKey(AVERAGES)
        return jax.tree.map_with_path(lambda path, _: AVERAGES if key in path else "rest", networks)

    return optax.multi_transform({AVERAGES: optax.sgd(rate), "rest": optimizer}, labels)
