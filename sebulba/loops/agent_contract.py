"""Whether an agent keeps its contract, seen by tracing its methods before anything starts.

A loop asks this of every agent whose class is not Sebulba's own; those are held to it by tests, so
a start with one of them costs nothing here. ``sebulba check-agent`` asks it of any.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from sebulba.agent import LEARNER_AXIS, TRAJECTORY_SPEC, Agent, is_spec, spec_of_each_leaf
from sebulba.errors import UsageError, describe_error, is_installed, shown
from sebulba.trees import named_leaves
from sebulba.types import PyTree, RunSpec, Trajectory, empty_env_step

HAS_NO_VALUES = (
    "a compiled method runs in Python once, with arrays that have no values: use jnp.where or "
    "jax.lax.cond for `if`, jnp for np, and no float(), int() or .item()"
)
KEEP_NOTHING = "return it as a part of the state: self is no place for arrays"
REMEDIES = {
    jax.errors.ConcretizationTypeError: HAS_NO_VALUES,
    jax.errors.TracerArrayConversionError: HAS_NO_VALUES,
    jax.errors.TracerIntegerConversionError: HAS_NO_VALUES,
    jax.errors.NonConcreteBooleanIndexError: HAS_NO_VALUES,
    jax.errors.UnexpectedTracerError: KEEP_NOTHING,
}
ON_UPDATE_DEVICES = ("update_experience", "loss", "optimize")
"""Methods in which arrays are one device's shard and the axis ``"learner"`` is bound."""


def check_contract(agent: Agent, run: RunSpec, *, learns: bool = True) -> None:
    """Trace every method of an agent whose class is not Sebulba's own.

    Args:
      agent: The agent.
      run: The sizes of the run.
      learns: Also look at the methods of the update.

    Raises:
      UsageError: A method returns something else than the contract says, or raises a JAX error.
    """
    check_is_agent(agent)
    if type(agent).__module__.startswith("sebulba."):
        return
    contract = Contract(agent, run)
    contract.check_acting()
    if learns:
        contract.check_learning()


def check_is_agent(agent: Any) -> None:
    """Raise UsageError unless ``agent`` is an agent that was made whole."""
    if not isinstance(agent, Agent):
        what = f"the class {agent.__name__}" if isinstance(agent, type) else shown(agent)
        raise UsageError(
            f"agent={what} is not an agent; make one of a subclass of sebulba.Agent, such as "
            "MyAgent(sebulba.env_spec(env), MyConfig())"
        )
    if not (hasattr(agent, "spec") and hasattr(agent, "config")):
        raise UsageError(
            f"{type(agent).__name__}.__init__ leaves the agent without spec and config; call "
            "super().__init__(spec, config) first"
        )


class Contract:
    """What the methods of an agent return, as shapes, each found when it is first asked for.

    A property raises UsageError where its method breaks the contract.
    """

    def __init__(self, agent: Agent, run: RunSpec) -> None:
        """Nothing is traced yet; ``run`` are the sizes, and no device of it need exist."""
        self.agent = agent
        self.run = run
        self.mesh = AbstractMesh(
            (run.num_update_devices,), (LEARNER_AXIS,), axis_types=(AxisType.Auto,)
        )
        self.key = jax.eval_shape(jax.random.key, 0)
        self.env_step = empty_env_step(agent.spec, run.num_envs)
        self.programs: dict[str, Any] = {}
        """What was traced, by method; the gradient stands for ``loss``."""

    def check_acting(self) -> None:
        """Check what is made at the start, and ``step``."""
        self.agent.check_run(self.run)
        _ = self.networks, self.opt, self.step_state, self.step, self.exploit

    def check_learning(self) -> None:
        """Check the specs and the methods of an update."""
        _ = self.updated_experience, self.grads
        self.check_optimize()
        self.check_due(1)

    # What is made at the start.

    @functools.cached_property
    def networks(self) -> PyTree:
        """What ``new_networks`` returns."""
        networks = self.trace("new_networks", self.key)
        for name, leaf in zip(*named_leaves(networks), strict=True):
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                self._fail(
                    "new_networks",
                    f"returns {name} as {_of(leaf)}; every leaf must be of floats, since each "
                    "receives a gradient",
                    "keep counts in new_opt, statistics in new_experience, keys in new_step_state",
                )
        return networks

    @functools.cached_property
    def opt(self) -> PyTree:
        """What ``new_opt`` returns."""
        return self.trace("new_opt", self.networks)

    @functools.cached_property
    def step_state(self) -> PyTree:
        """What ``new_step_state`` returns."""
        return self.trace("new_step_state", self.key, static=(self.run, 0))

    @functools.cached_property
    def experience(self) -> PyTree:
        """What ``new_experience`` returns, with the sizes of all devices together."""
        return self.trace("new_experience", self.key, self.networks, static=(self.run,))

    @functools.cached_property
    def acting_networks(self) -> PyTree:
        """What ``acting_networks`` returns."""
        if type(self.agent).acting_networks is Agent.acting_networks:
            return self.networks  # so that a wrong step is not met in new_experience first
        return self.trace("acting_networks", self.networks, self.experience)

    # Acting.

    @functools.cached_property
    def step(self) -> PyTree:
        """What ``step`` returns with exploration: (ActionOutput, step state)."""
        return self._step(explore=True)

    @functools.cached_property
    def exploit(self) -> PyTree:
        """What ``step`` returns without exploration."""
        return self._step(explore=False)

    def _step(self, *, explore: bool) -> PyTree:
        given = (self.acting_networks, self.step_state, self.env_step)
        call = f"step(explore={explore})"
        output, step_state = self.trace(
            "step", *given, check=self._check_step, as_=call, explore=explore
        )
        space, num_envs = self.agent.spec.action_space, self.run.num_envs
        expected = jax.ShapeDtypeStruct((num_envs, *(space.shape or ())), space.dtype)
        if (output.action.shape, output.action.dtype) != (expected.shape, expected.dtype):
            self._fail(
                call,
                f"returns actions {_of(output.action)}; expected {_of(expected)}, a row for each "
                f"of {num_envs} environments with actions {space}",
                _action_remedy(output.action, expected),
            )
        for name, leaf in zip(*named_leaves(output.extras), strict=True):
            if leaf.shape[:1] != (num_envs,):
                self._fail(
                    call,
                    f"returns extras {name} {_of(leaf)}; expected a row for each of {num_envs} "
                    "environments",
                    "broadcast it to [B, ...], or leave it out",
                )
        remedy = "return a step state laid out as new_step_state makes it"
        self._check_same(call, "the step state", step_state, self.step_state, remedy)
        return output, step_state

    def _check_step(self, result: Any) -> None:
        expected = "(sebulba.ActionOutput(action, extras), step_state)"
        output, _ = self._pair("step", result, expected)
        if not (hasattr(output, "action") and hasattr(output, "extras")):
            self._fail(
                "step",
                f"returns {_what(output)} for the actions; expected {expected}",
                "return sebulba.ActionOutput(action), step_state",
            )
        if isinstance(output.action, tuple | list | dict):
            self._fail(
                "step",
                f"returns {_what(output.action)} as actions; expected one array",
                "stack them into an array [B, ...]",
            )

    # Learning, in the shapes of one update device.

    @functools.cached_property
    def trajectory(self) -> Trajectory:
        """A trajectory, with the sizes of all devices together."""
        return jax.eval_shape(
            lambda networks: self.agent.empty_trajectory(networks, self.run), self.acting_networks
        )

    @functools.cached_property
    def local_experience(self) -> PyTree:
        """The experience of one device."""
        return self.local("experience_spec", self.agent.experience_spec(), self.experience)

    @functools.cached_property
    def local_step_state(self) -> PyTree:
        """The step state that one device is given."""
        if type(self.agent).shard_step_state is not Agent.shard_step_state:
            return self.step_state  # its own code knows how it is split
        specs = self.trace_host("step_state_spec")
        return self.local("step_state_spec", specs, self.step_state)

    @functools.cached_property
    def updated_experience(self) -> PyTree:
        """What ``update_experience`` returns."""
        result = self.trace(
            "update_experience",
            self.local_experience,
            self.local_step_state,
            self.local_step_state,
            self.local("", TRAJECTORY_SPEC, self.trajectory),
            self.networks,
        )
        self._check_experience("update_experience", result)
        return result

    @functools.cached_property
    def grads(self) -> PyTree:
        """The gradient of ``loss``."""
        given = (self.networks, self.opt, self.local_experience, self.key)

        def differentiated(*given: PyTree) -> PyTree:
            loss = functools.partial(self._call, "loss", self._check_loss)
            with self.named("loss"):  # what cannot be differentiated is found outside of it
                return jax.value_and_grad(loss, has_aux=True)(*given)

        result = self._shapes("loss", self.mapped(differentiated), given)
        (_, (experience, _)), grads = result
        self._check_experience("loss", experience)
        return grads

    def check_optimize(self) -> None:
        """Check what ``optimize`` returns."""
        expected = "(networks, opt)"
        networks, opt = self.trace(
            "optimize",
            *(self.networks, self.opt, self.grads),
            check=lambda result: self._pair("optimize", result, expected),
        )
        remedy = "return them laid out as they came in"
        self._check_same("optimize", "networks", networks, self.networks, remedy)
        self._check_same("optimize", "opt", opt, self.opt, remedy)

    def check_due(self, cycle: int) -> int:
        """Return ``num_off_policy_optims_per_cycle(cycle)`` if it is a count."""
        method = "num_off_policy_optims_per_cycle"
        due = getattr(self.agent, method)(cycle)
        if isinstance(due, bool) or not isinstance(due, int | np.integer) or due < 0:
            self._fail(
                f"{method}({cycle})",
                f"returns {shown(due)}; expected a number of updates, an int of 0 or more",
                "return 0 while no update is due",
            )
        return int(due)

    def _check_loss(self, result: Any) -> None:
        expected = "(loss, (experience, metrics))"
        loss, aux = self._pair("loss", result, expected)
        if jnp.shape(loss) != () or not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
            self._fail(
                "loss",
                f"returns {_of(loss)} as the loss; expected a scalar of floats",
                "take the mean: sebulba.agents.kernels.optimizer.masked_mean(x, valid)",
            )
        _, metrics = self._pair("loss", aux, expected, "its second part")
        if not isinstance(metrics, Mapping):
            self._fail(
                "loss",
                f"returns {_what(metrics)} as metrics; expected a dict of scalars by name",
                "return {} where there are none",
            )
        for name, value in metrics.items():
            is_number = jnp.issubdtype(jnp.result_type(value), jnp.number)
            if not isinstance(name, str) or jnp.shape(value) != () or not is_number:
                self._fail(
                    "loss",
                    f"returns the metric {name!r} {_of(value)}; expected a scalar number by name",
                    "take its mean, as float32",
                )

    def _check_experience(self, method: str, experience: PyTree) -> None:
        remedy = "return it laid out as new_experience makes it and experience_spec splits it"
        specs = spec_of_each_leaf(self.agent.experience_spec(), self.experience)
        names, _ = named_leaves(self.experience)
        whole = {
            name
            for name, spec in zip(names, jax.tree.leaves(specs, is_leaf=is_spec), strict=True)
            if not any(spec)
        }

        def mended(name: str) -> str:
            if name in whole and self.run.num_update_devices > 1:
                return (
                    f"{remedy}: experience_spec says P() for it, the same whole on each of "
                    f"{self.run.num_update_devices} devices, which have a share of the "
                    "environments each; use P('learner') for [B, ...], P(None, 'learner') for "
                    "[T, B, ...]"
                )
            return remedy

        self._check_same(method, "the experience", experience, self.local_experience, mended)

    # Tracing.

    def trace(
        self,
        method: str,
        *given: PyTree,
        static: tuple = (),
        check: Callable[[Any], Any] = lambda result: None,
        as_: str = "",
        **options: Any,
    ) -> PyTree:
        """Return the shapes of what a method returns, given shapes.

        Args:
          method: Its name.
          *given: Shapes, or arrays, of its first arguments.
          static: Further arguments.
          check: Is given what it returns, while it is traced.
          as_: Its name in ``programs``, if not ``method``.
          **options: Keyword arguments.
        """

        def call(*arrays: PyTree) -> PyTree:
            return self._call(method, check, *arrays, *static, **options)

        mapped = self.mapped(call) if method in ON_UPDATE_DEVICES else call
        return self._shapes(as_ or method, mapped, given)

    def _shapes(self, name: str, call: Callable, given: tuple) -> PyTree:
        self.programs[name], shapes = jax.make_jaxpr(call, return_shape=True)(*given)
        return shapes

    def trace_host(self, method: str) -> Any:
        """Return what a method without arguments returns."""
        with self.named(method):
            return getattr(self.agent, method)()

    def mapped(self, call: Callable) -> Callable:
        """Return ``call`` with the axis ``"learner"`` bound."""
        return jax.shard_map(call, mesh=self.mesh, in_specs=P(), out_specs=P(), check_vma=False)

    def _call(
        self, method: str, check: Callable[[Any], Any], *given: Any, **options: Any
    ) -> PyTree:
        with self.named(method):
            result = getattr(self.agent, method)(*given, **options)
        if result is None:
            self._fail(method, "returns None", "end it with a return statement")
        check(result)
        for name, leaf in zip(*named_leaves(result), strict=True):
            if not _is_array(leaf):
                self._fail(
                    method,
                    f"returns {shown(leaf)}, a {type(leaf).__name__}, at {name}; expected arrays "
                    "and numbers only",
                    "keep other things on self, made in __init__",
                )
        for name, value in vars(self.agent).items():
            if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value)):
                self._fail(method, f"keeps an array on self.{name}", KEEP_NOTHING)
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
                error.add_note(f"in {type(self.agent).__name__}.{method}, while it was traced")
                raise
            kinds = (REMEDIES[kind] for kind in type(error).__mro__ if kind in REMEDIES)
            remedy = next(kinds, _remedy(method, str(error)))
            self._fail(method, f"raises {describe_error(error)}", remedy, error)

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
            self._fail(
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
        where = f"says {_spec(spec)} for {name}, which is {_of(leaf)}"
        if not isinstance(spec, P) or {axis for axis in spec if axis} - {LEARNER_AXIS}:
            self._fail(method, where, "use P() and P('learner'), P(None, 'learner') and so on")
        if len(spec) > len(shape):
            self._fail(
                method,
                f"{where} and has {len(shape)} dimensions",
                "use P() for keys, counts and statistics",
            )
        for axis, word in enumerate(spec):
            if word and shape[axis] % devices:
                self._fail(
                    method,
                    f"{where}: {shape[axis]} cannot be split over {devices} devices",
                    "split the dimension of the environments, and use P() for what has none",
                )
            shape[axis] //= devices if word else 1
        return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)

    # Comparing and saying.

    def _pair(self, method: str, result: Any, expected: str, what: str = "") -> tuple:
        if not isinstance(result, tuple) or len(result) != 2:
            self._fail(
                method,
                f"returns {_what(result)}{f' as {what}' if what else ''}; expected {expected}",
                f"return {expected}",
            )
        return result

    def _check_same(
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
            self._fail(
                method, f"returns {what} {' and '.join(with_ + without)}", mended((left + came)[0])
            )
        if jax.tree.structure(got) != jax.tree.structure(expected):  # type: ignore[operator]
            structures = (str(jax.tree.structure(x))[:100] for x in (got, expected))
            self._fail(
                method,
                "returns {} in other containers, {}; expected {}".format(what, *structures),
                mended(""),
            )
        for name, leaf, shape in zip(names, leaves, shapes, strict=True):
            if (leaf.shape, leaf.dtype) != (shape.shape, shape.dtype):
                part = what if name == "0" and len(names) == 1 else f"{what} with {name}"
                self._fail(
                    method, f"returns {part} {_of(leaf)}; expected {_of(shape)}", mended(name)
                )

    def _fail(
        self, method: str, what: str, remedy: str, cause: BaseException | None = None
    ) -> None:
        raise UsageError(f"{type(self.agent).__name__}.{method} {what}; {remedy}") from cause


def _is_array(leaf: Any) -> bool:
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.dtype.kind in "biufcV"
    return isinstance(leaf, jax.Array | bool | int | float)


def _of(x: Any) -> str:
    """Return ``float32[8,3]``, or the type of what is no array."""
    if not hasattr(x, "shape") and not isinstance(x, bool | int | float):
        return f"a {type(x).__name__}"
    dtype = x.dtype if hasattr(x, "dtype") else jnp.result_type(x)
    return f"{dtype}{list(jnp.shape(x))}"


def _what(x: Any) -> str:
    """Say what an object is, for one that is of the wrong kind."""
    if isinstance(x, tuple | list):
        return f"a {type(x).__name__} of {len(x)}"
    return "None" if x is None else _of(x)


def _spec(spec: Any) -> str:
    return f"P({', '.join(map(repr, spec))})" if isinstance(spec, P) else shown(spec)


def _made_by(method: str) -> str:
    return "new_step_state" if method == "step_state_spec" else "new_experience"


def _action_remedy(action: Any, expected: Any) -> str:
    if action.shape != expected.shape:
        if action.shape == (*expected.shape, 1):
            return "drop the last dimension: action[:, 0]"
        return "choose an action for each row of env_step.obs"
    if jnp.issubdtype(expected.dtype, jnp.integer) != jnp.issubdtype(action.dtype, jnp.integer):
        return "return indices of actions for Discrete, floats for Box"
    return "add action.astype(self.spec.action_space.dtype)"


def _remedy(method: str, error: str) -> str:
    if "unbound axis" in error:
        return f"the axis 'learner' is bound in {', '.join(ON_UPDATE_DEVICES)} only"
    if "argument" in error and f"{method}()" in error:
        return "take the arguments that sebulba.Agent has for it"
    return "look at the shapes in its docstring in sebulba.Agent"
