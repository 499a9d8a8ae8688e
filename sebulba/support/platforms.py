"""What is computed in another way on an accelerator than on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from sebulba.types import PyTree


def cond_on_cpu(
    predicate: jax.Array, if_true: Callable[[], PyTree], if_false: Callable[[], PyTree]
) -> PyTree:
    """Return what ``if_true`` or ``if_false`` does, which return trees of the same shapes.

    On a CPU only one of them runs. A GPU reads the predicate of a condition back to the host, which
    costs more than small branches: there both run, and a select follows.
    """

    def both(predicate: jax.Array) -> PyTree:
        return jax.tree.map(lambda x, y: jnp.where(predicate, x, y), if_true(), if_false())

    def one(predicate: jax.Array) -> PyTree:
        return jax.lax.cond(predicate, if_true, if_false)

    return jax.lax.platform_dependent(predicate, cpu=one, default=both)
