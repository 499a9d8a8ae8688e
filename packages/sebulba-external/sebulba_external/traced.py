"""Traces what an agent does in a step, for clients that run it by NumPy (``program.Program``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.interpreters.partial_eval import dce_jaxpr

from sebulba.agent import Agent
from sebulba.errors import UsageError
from sebulba.support.one_kernel import left_alone
from sebulba.support.trees import is_key
from sebulba.types import EnvStep, PyTree
from sebulba_external.program import KNOWN, encode

INLINED = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call")
REMEDY = "use actors that the trainer serves (local=False)"


def traced(
    agent: Agent, networks: PyTree, step_state: PyTree, row: EnvStep, *, explore: bool
) -> dict[str, Any]:
    """Return ``Agent.act`` as a description for ``program.Program``.

    Its inputs are the leaves of the networks, the step state and the row, in this order; its
    outputs the action, and the leaves of the extras and the next step state.

    Args:
      agent: The algorithm.
      networks: Acting networks; only shapes matter, as of the other two.
      step_state: Of B environments, with typed keys.
      row: ``[B, ...]``.
      explore: Act as in training.

    Raises:
      UsageError: NumPy clients lack one of its operations.
    """
    leaves, tree = jax.tree.flatten((networks, step_state, row))

    def act(*given: Any) -> list[Any]:
        output, after = agent.act(*jax.tree.unflatten(tree, given), explore=explore)
        assert jax.tree.structure(after) == jax.tree.structure(step_state)  # type: ignore[operator]
        return [output.action, *jax.tree.leaves(output.extras), *jax.tree.leaves(after)]

    with left_alone():
        closed = jax.make_jaxpr(act)(*leaves)
    jaxpr, used = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    flat = _Flat(type(agent).__name__)
    given = iter(jaxpr.invars)
    inputs = [flat.new(next(given)) if is_used else -1 for is_used in used]
    flat.inline(jaxpr, closed.consts, inputs=None)
    return {
        "inputs": inputs,
        "dtypes": [None if is_key(x) else _dtype(x) for x in leaves],
        "outputs": [flat.number(x) for x in jaxpr.outvars],
        "constants": flat.constants,
        "equations": flat.equations,
        "size": flat.size,
    }


def _dtype(leaf: Any) -> str:
    return np.dtype(jax.dtypes.canonicalize_dtype(leaf.dtype)).str


class _Flat:
    """Equations without functions within functions, and values by numbers."""

    def __init__(self, agent: str) -> None:
        self._agent = agent
        self._numbers: dict[Any, int] = {}
        self.size = 0
        self.constants: list[list] = []
        self.equations: list[list] = []

    def new(self, variable: Any = None) -> int:
        """Return the number of a new value."""
        self.size += 1
        if variable is not None:
            self._numbers[variable] = self.size - 1
        return self.size - 1

    def number(self, variable: Any) -> int:
        """Return the number of a known value."""
        return self._constant(variable.val) if _is_literal(variable) else self._numbers[variable]

    def _constant(self, value: Any) -> int:
        at = self.new()
        self.constants.append([at, encode(np.asarray(value))])
        return at

    def inline(self, jaxpr: Jaxpr, consts: Any, inputs: list[int] | None) -> list[int]:
        """Append the equations of a function; return the numbers of its outputs."""
        for variable, value in zip(jaxpr.constvars, consts, strict=True):
            self._numbers[variable] = self._constant(value)
        if inputs is not None:
            self._numbers |= zip(jaxpr.invars, inputs, strict=True)
        for equation in jaxpr.eqns:
            given = [self.number(x) for x in equation.invars]
            for variable, at in zip(equation.outvars, self._of(equation, given), strict=True):
                self._numbers[variable] = at
        return [self.number(x) for x in jaxpr.outvars]

    def _of(self, equation: Any, given: list[int]) -> list[int]:
        name, parameters = equation.primitive.name, equation.params
        if name in INLINED:
            inner = parameters.get("jaxpr") or parameters["call_jaxpr"]
            if isinstance(inner, ClosedJaxpr):
                return self.inline(inner.jaxpr, inner.consts, given)
            return self.inline(inner, [], given)
        if name == "scan" and parameters["length"] == 1:
            return self._one_step(equation, given)
        if name in ("optimization_barrier", "stop_gradient"):
            return given
        if name == "split":
            return self._split(equation, parameters["sizes"], given[0])
        if name == "unstack":
            axis, ones = parameters["axis"], [1] * len(equation.outvars)
            where = {"dimensions": [axis]}
            pieces = self._split(equation, ones, given[0])
            return [self._append("squeeze", where, [piece]) for piece in pieces]
        if name not in KNOWN:
            raise UsageError(
                f"{self._agent} acts with the operation {name!r}, which clients without JAX "
                f"lack; {REMEDY}"
            )
        plain = {key: _plain(value) for key, value in parameters.items()}
        plain = {key: value for key, value in plain.items() if value is not NotImplemented}
        return [self._append(name, plain, given)]

    def _append(self, name: str, parameters: dict[str, Any], given: list[int]) -> int:
        at = self.new()
        self.equations.append([name, parameters, given, at])
        return at

    def _split(self, equation: Any, sizes: Sequence[int], given: int) -> list[int]:
        """Return the pieces of an array."""
        shape, axis = equation.invars[0].aval.shape, equation.params["axis"]
        begin, pieces = 0, []
        for size in map(int, sizes):
            low, high = [0] * len(shape), [*shape]
            low[axis], high[axis] = begin, begin + size
            where = {"start_indices": low, "limit_indices": high}
            pieces.append(self._append("slice", where, [given]))
            begin += size
        return pieces

    def _one_step(self, equation: Any, given: list[int]) -> list[int]:
        """Return the outputs of a loop of length 1, as what is done in it.

        What the loop goes over, and what it gathers, has a dimension more than within it.
        """
        body = equation.params["jaxpr"]  # closed before JAX 0.12
        inner, consts = getattr(body, "jaxpr", body), getattr(body, "consts", [])
        within = self._resized(given, equation.invars, inner.invars)
        return self._resized(self.inline(inner, consts, within), inner.outvars, equation.outvars)

    def _resized(self, given: list[int], before: Any, after: Any) -> list[int]:
        """Return values whose first dimension, of 1, is taken away or added where shapes ask."""
        found = []
        for at, old, new in zip(given, before, after, strict=True):
            more = len(new.aval.shape) - len(old.aval.shape)
            name = {-1: "squeeze", 1: "expand_dims"}.get(more)
            found.append(at if name is None else self._append(name, {"dimensions": [0]}, [at]))
        return found


def _is_literal(variable: Any) -> bool:
    return isinstance(variable, Literal)


def _plain(value: Any) -> Any:
    """Return a parameter as msgpack takes it; NotImplemented for what clients do not need."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, tuple | list):
        parts = [_plain(part) for part in value]
        return NotImplemented if NotImplemented in parts else parts
    is_type = isinstance(value, type) and issubclass(value, np.generic)
    if not is_type and not isinstance(value, np.dtype):
        return NotImplemented
    dtype = np.dtype(value)
    if dtype.kind not in "biuf":
        raise UsageError(f"a policy computes in {dtype.name}, which NumPy lacks; {REMEDY}")
    return dtype.str
