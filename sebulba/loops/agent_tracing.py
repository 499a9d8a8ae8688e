"""Traces the methods of an agent, and says in words what is wrong with what they return."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from sebulba.agent import LEARNER_AXIS, Agent, is_spec, spec_of_each_leaf
from sebulba.errors import UsageError, describe_error, is_installed, shown
from sebulba.support.trees import named_leaves
from sebulba.types import PyTree, RunSpec

HAS_NO_VALUES = (
    "a compiled method runs in Python once, with arrays that have no values: use jnp.where or "
    "jax.lax.cond for `if`, jnp for np, and no float(), int() or .item()"
)
REMEDIES = {
    jax.errors.ConcretizationTypeError: HAS_NO_VALUES,
    jax.errors.TracerArrayConversionError: HAS_NO_VALUES,
    jax.errors.TracerIntegerConversionError: HAS_NO_VALUES,
    jax.errors.NonConcreteBooleanIndexError: HAS_NO_VALUES,
}
ON_UPDATE_DEVICES = ("update_experience", "loss", "optimize")
"""Methods in which arrays are one device's shard and the axis ``"learner"`` is bound."""


class TracedAgent:
    """Traces methods of an agent; what is wrong is a UsageError that names the method."""

    def __init__(self, agent: Agent, run: RunSpec) -> None:
        """Nothing is traced yet; ``run`` are the sizes, and no device of it need exist."""
        self.agent = agent
        self.run = run
        self.mesh = AbstractMesh(
            (run.num_update_devices,), (LEARNER_AXIS,), axis_types=(AxisType.Auto,)
        )
        self.programs: dict[str, Any] = {}
        """What was traced, by method, as closed jaxprs; the gradient stands for ``loss``."""

    def trace(
        self,
        method: str,
        *given: PyTree,
        static: tuple = (),
        check: Callable[[Any], Any] = lambda result: None,
        label: str = "",
        **options: Any,
    ) -> PyTree:
        """Return the shapes of what a method returns, given shapes.

        Args:
          *given: Shapes, or arrays, of its first arguments.
          static: Further arguments.
          check: Is given what it returns, while it is traced.
          label: Its name in ``programs``, if not ``method``.
        """

        def call(*arrays: PyTree) -> PyTree:
            return self.call(method, check, *arrays, *static, **options)

        mapped = self.mapped(call) if method in ON_UPDATE_DEVICES else call
        return self.shapes(label or method, mapped, given)

    def shapes(self, name: str, call: Callable, given: tuple) -> PyTree:
        """Trace ``call``, keep its program under ``name``, and return the shapes of its result."""
        self.programs[name], shapes = jax.make_jaxpr(call, return_shape=True)(*given)
        return shapes

    def mapped(self, call: Callable) -> Callable:
        """Return ``call`` with the axis ``"learner"`` bound."""
        return jax.shard_map(call, mesh=self.mesh, in_specs=P(), out_specs=P(), check_vma=False)

    def call(self, method: str, check: Callable[[Any], Any], *given: Any, **options: Any) -> PyTree:
        """Call a method while it is traced, and check that it returns arrays."""
        with self.named(method):
            result = getattr(self.agent, method)(*given, **options)
        if result is None:
            self.fail(method, "returns None", "end it with a return statement")
        check(result)
        for name, leaf in zip(*named_leaves(result), strict=True):
            if not _is_array(leaf):
                self.fail(
                    method,
                    f"returns {shown(leaf)}, a {type(leaf).__name__}, at {name}; expected arrays "
                    "and numbers only",
                    "keep other things on self, made in __init__",
                )
        return result

    @contextlib.contextmanager
    def named(self, method: str) -> Iterator[None]:
        """Turn errors that a library raises within a method into a UsageError that names it.

        What the agent's own code raises keeps its type, with a note.
        """
        try:
            yield
        except UsageError:
            raise
        except Exception as error:
            innermost = traceback.extract_tb(error.__traceback__)[-1]
            if not is_installed(innermost.filename):
                note = f"in {type(self.agent).__name__}.{method}, while it was traced"
                if note not in getattr(error, "__notes__", ()):
                    error.add_note(note)
                raise
            kinds = (REMEDIES[kind] for kind in type(error).__mro__ if kind in REMEDIES)
            remedy = next(kinds, _remedy(method, str(error)))
            self.fail(method, f"raises {describe_error(error)}", remedy, error)

    def local(self, method: str, specs: PyTree, tree: PyTree) -> PyTree:
        """Return the shapes of one device's shard of ``tree``.

        Args:
          method: What returned ``specs``.
          specs: A prefix tree of PartitionSpecs.
          tree: Shapes for all devices together.
        """
        try:
            of_leaves = spec_of_each_leaf(specs, tree)
        except ValueError as error:
            words = " ".join(str(error).split())[:200]
            self.fail(
                method,
                f"does not fit what {_made_by(method)} returns ({words})",
                "return a prefix tree of PartitionSpecs of the same containers",
                error,
            )
        names, leaves = named_leaves(tree)
        flat = jax.tree.leaves(of_leaves, is_leaf=is_spec)
        shards = [self._shard(method, *one) for one in zip(names, flat, leaves, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(tree), shards)

    def _shard(self, method: str, name: str, spec: P, leaf: Any) -> jax.ShapeDtypeStruct:
        devices, shape = self.run.num_update_devices, list(leaf.shape)
        where = f"says {_spec(spec)} for {name}, which is {shape_of(leaf)}"
        if not isinstance(spec, P) or {axis for axis in spec if axis} - {LEARNER_AXIS}:
            self.fail(method, where, "use P() and P('learner'), P(None, 'learner') and so on")
        if len(spec) > len(shape):
            self.fail(
                method,
                f"{where} and has {len(shape)} dimensions",
                "use P() for keys, counts and statistics",
            )
        for axis, word in enumerate(spec):
            if word and shape[axis] % devices:
                self.fail(
                    method,
                    f"{where}: {shape[axis]} cannot be split over {devices} devices",
                    "split the dimension of the environments, and use P() for what has none",
                )
            shape[axis] //= devices if word else 1
        return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)

    # Comparing and saying.

    def pair(self, method: str, result: Any, expected: str, what: str = "") -> tuple:
        """Return ``result`` if it is a tuple of two."""
        if not isinstance(result, tuple) or len(result) != 2:
            self.fail(
                method,
                f"returns {kind_of(result)}{f' as {what}' if what else ''}; expected {expected}",
                f"return {expected}",
            )
        return result

    def check_same(
        self,
        method: str,
        what: str,
        got: PyTree,
        expected: PyTree,
        remedy: str | Callable[[str], str],
    ) -> None:
        """Raise UsageError unless two trees have the same structure, shapes and dtypes."""
        mended = remedy if callable(remedy) else lambda name: remedy
        (names, leaves), (others, shapes) = named_leaves(got), named_leaves(expected)
        came, left = sorted(set(names) - set(others)), sorted(set(others) - set(names))
        if came or left:
            with_ = [f"with {', '.join(came[:3])}"] * bool(came)
            without = [f"without {', '.join(left[:3])}"] * bool(left)
            self.fail(
                method, f"returns {what} {' and '.join(with_ + without)}", mended((left + came)[0])
            )
        if jax.tree.structure(got) != jax.tree.structure(expected):  # type: ignore[operator]
            structures = (str(jax.tree.structure(x))[:100] for x in (got, expected))
            self.fail(
                method,
                "returns {} in other containers, {}; expected {}".format(what, *structures),
                mended(""),
            )
        for name, leaf, shape in zip(names, leaves, shapes, strict=True):
            if (leaf.shape, leaf.dtype) != (shape.shape, shape.dtype):
                part = what if name == "0" and len(names) == 1 else f"{what} with {name}"
                self.fail(
                    method,
                    f"returns {part} {shape_of(leaf)}; expected {shape_of(shape)}",
                    mended(name),
                )

    def fail(
        self, method: str, what: str, remedy: str, cause: BaseException | None = None
    ) -> NoReturn:
        """Raise UsageError, ``MyAgent.method what; remedy``."""
        raise UsageError(f"{type(self.agent).__name__}.{method} {what}; {remedy}") from cause


def _is_array(leaf: Any) -> bool:
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.dtype.kind in "biufcV"
    return isinstance(leaf, jax.Array | bool | int | float)


def shape_of(x: Any) -> str:
    """Return ``float32[8,3]``, or the type of what is no array."""
    if not hasattr(x, "shape") and not isinstance(x, bool | int | float):
        return f"a {type(x).__name__}"
    dtype = x.dtype if hasattr(x, "dtype") else jnp.result_type(x)
    return f"{dtype}{list(jnp.shape(x))}"


def kind_of(x: Any) -> str:
    """Say what an object is, for one that is of the wrong kind."""
    if isinstance(x, tuple | list):
        return f"a {type(x).__name__} of {len(x)}"
    return "None" if x is None else shape_of(x)


def _spec(spec: Any) -> str:
    return f"P({', '.join(map(repr, spec))})" if isinstance(spec, P) else shown(spec)


def _made_by(method: str) -> str:
    return "new_step_state" if method == "step_state_spec" else "new_experience"


def _remedy(method: str, error: str) -> str:
    if "[Chex]" in error:
        return "a kernel takes one stream [T]: jax.vmap(kernel, in_axes=1, out_axes=1) for [T, B]"
    if "unbound axis" in error:
        return f"the axis 'learner' is bound in {', '.join(ON_UPDATE_DEVICES)} only"
    if "argument" in error and f"{method}()" in error:
        return "take the arguments that sebulba.Agent has for it"
    return "look at the shapes in its docstring in sebulba.Agent"
