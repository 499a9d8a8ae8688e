"""Settings of JAX with which nothing can be trained."""

from __future__ import annotations

import jax

from sebulba.errors import UsageError

WAYS = ("", "_host_to_device", "_device_to_device", "_device_to_host")
"""Endings of the names of JAX's transfer guards."""


def check_jax_settings() -> None:
    """Refuse settings of JAX with which no agent can be trained.

    Raises:
      UsageError: One is set; it names the setting and what to do.
    """
    if _value("jax_disable_jit"):
        raise _refused(
            "jax_disable_jit",
            "a run is made of compiled programs",
            "look into your own functions with jax.disable_jit() around them, or use "
            "jax.debug.print and jax.debug.breakpoint",
        )
    if _value("jax_numpy_dtype_promotion") == "strict":
        raise _refused(
            "jax_numpy_dtype_promotion",
            "Flax, Optax and the agents mix dtypes",
            "write with jax.numpy_dtype_promotion('strict') around your own functions",
        )
    for name in (f"jax_transfer_guard{way}" for way in WAYS):
        if str(_value(name)).startswith("disallow"):
            raise _refused(
                name,
                "a run moves actions, observations and networks between host and devices",
                "use log instead",
            )


def _value(name: str) -> object:
    return getattr(jax.config, name, None)


def _refused(name: str, why: str, instead: str) -> UsageError:
    return UsageError(
        f"{name}={_value(name)} of JAX cannot be used, since {why}; unset {name.upper()} in the "
        f"environment and jax.config, and {instead}"
    )
