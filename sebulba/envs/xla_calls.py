"""Calls of foreign functions (C++) inside JAX functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from sebulba.types import PyTree


def without_side_effects(function: Callable[..., PyTree], *example: PyTree) -> Callable[..., Any]:
    """Return ``function`` with its foreign calls declared to be free of side effects.

    JAX dispatches a program without side effects in C++, but one that has some in Python, where
    each call holds the interpreter's lock for half a millisecond if three threads want it.

    Use this only for calls that form a chain: each takes what the one before returned, and what the
    last one returns is used. Then no compiler can drop or reorder the calls. XLA repeats no foreign
    call.

    Args:
      function: A function of arrays. A reference to it keeps alive what its calls need. Arrays
        inside it may be 64 bits wide, whatever JAX is set to, but not its arguments and results.
      example: Arguments with the shapes and dtypes of later calls.
    """
    with jax.enable_x64(True):
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*example)
    equations = [
        equation.replace(params=equation.params | {"has_side_effect": False}, effects=set())
        if equation.primitive.name == "ffi_call"
        else equation
        for equation in closed.jaxpr.eqns
    ]
    pure = closed.replace(jaxpr=closed.jaxpr.replace(eqns=equations, effects=set()))
    flat = jaxpr_as_fun(pure)
    treedef = jax.tree.structure(shapes)

    def pure_function(*arguments: PyTree) -> PyTree:
        with jax.enable_x64(True):
            return jax.tree.unflatten(treedef, flat(*jax.tree.leaves(arguments)))

    return functools.wraps(function)(pure_function)  # wraps() refers to it by __wrapped__
