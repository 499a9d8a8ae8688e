"""The update: experience in, gradients averaged over the update devices, networks out."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from sebulba.agent import LEARNER_AXIS, TRAJECTORY_SPEC, Agent, AgentState, is_spec
from sebulba.support.trees import copy_tree, is_finite, num_bytes
from sebulba.transport.item import Item
from sebulba.transport.mesh import UpdateMesh
from sebulba.types import PyTree, RunSpec

DEBUGGING = ("jax_debug_nans", "jax_debug_infs", "jax_disable_jit")
"""Debugging options of JAX, which take effect only if a program is called through ``jax.jit``."""
SKIPPED = "skipped"
"""Name, in the sums of metrics, of the number of updates that were skipped."""


class Updater:
    """Owns networks, optimizer state and experience on the update devices, and their programs.

    Only one thread may use it: collectives that two threads launch can deadlock.
    """

    def __init__(
        self,
        agent: Agent,
        mesh: UpdateMesh,
        update_key: jax.Array,
        skip_not_finite: bool = False,
    ) -> None:
        """Prepare the programs; call ``place`` before any other method.

        Args:
          update_key: Typed key from which the key of every loss is folded.
          skip_not_finite: Leave networks and optimizer state as they are if an update's gradient or
            one of its metrics is NaN or infinite.
        """
        self._skip_not_finite = skip_not_finite
        self._agent = agent
        self._hosts, self._mesh = mesh, mesh.whole
        self._replicated = NamedSharding(self._mesh, P())
        self._key_data = self._hosts.replicate(jax.random.key_data(update_key))
        self._key_impl = jax.random.key_impl(update_key)
        self._networks: PyTree = None
        self._opt: PyTree = None
        self._experience: PyTree = None
        first, is_one = self._mesh.devices.flat[0], self._mesh.size == 1
        self._acting_sharding = SingleDeviceSharding(first) if is_one else self._replicated
        self._take: DonatingProgram | None = None
        self._programs: dict[tuple[bool, int], DonatingProgram] = {}
        """By whether the program begins with a trajectory, and the number of its updates."""
        self._metric_sums: dict[str, jax.Array] | None = None
        self._updates_summed = 0
        self._on_cpu = first.platform == "cpu"
        self.sign_of_life: Callable[[], None] = lambda: None
        """Called between the programs of a trajectory: many that are slow are no hang."""

    def begin(self, run: RunSpec) -> None:
        """Prepare for runs of these sizes; programs are compiled again."""
        self._agent = self._agent.for_run(run)
        self._take, self._programs = None, {}
        spec = self._agent.experience_spec()
        # Outputs are placed explicitly: on a mesh of one device JAX would otherwise simplify their
        # specs, and the next call with them would be compiled again.
        self._shardings = jax.tree.map(
            lambda leaf: NamedSharding(self._mesh, leaf), spec, is_leaf=is_spec
        )
        acting = self._map(self._acting_shard, (P(), spec), P())
        self._acting = jax.jit(acting, out_shardings=self._acting_sharding)

    def clear(self) -> None:
        """Forget an experience that is kept elsewhere: a new run begins."""

    def read(self, read: Callable[[Agent], Any], run: RunSpec) -> Any:
        """Return what ``read`` returns of a checkpoint, for ``place``."""
        return read(self._agent)

    def published(self, version: int) -> None:
        """Hear under which policy version the acting networks of now are published."""

    def put_back(self) -> None:
        """Put an experience back that was read and is kept elsewhere."""

    def close(self) -> None:
        """End what keeps an experience elsewhere; may be called twice."""

    def _map(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
        # With check_vma=True JAX itself sums the gradient of replicated networks over the axis; the
        # pmean below then changes nothing, and the gradient is too large.
        return jax.shard_map(
            function, mesh=self._mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def place(self, state: AgentState) -> None:
        """Copy networks, optimizer state and experience; the caller's arrays stay valid.

        With several hosts the experience is this host's part.
        """
        self._metric_sums, self._updates_summed = None, 0  # a failed run may have left some
        self._num_skipped = 0
        # One program copies both. The experience can be large, so it is copied field by field.
        self._networks, self._opt = self._hosts.put((state.networks, state.opt), P())
        self._experience = self._hosts.put(state.experience, self._agent.experience_spec())

    def edit(self, edit: Callable[[AgentState], AgentState]) -> None:
        """Have the agent change its state between two updates (``Agent.edit``)."""
        self.wait()
        state = edit(self.state(()))
        self._networks, self._opt = jax.device_put(state[:2], self._replicated)
        self._experience = jax.device_put(state.experience, self._shardings)

    def bank(self) -> PyTree:
        """Return a copy of the agent's bank, replicated over the update devices."""
        return () if type(self._agent).bank is Agent.bank else self._copy_bank(self._experience)

    @functools.cached_property
    def _copy_bank(self) -> Callable:
        def bank(experience: PyTree) -> PyTree:
            return copy_tree(self._agent.bank(experience))

        mapped = self._map(bank, (self._agent.experience_spec(),), P())
        return jax.jit(mapped, out_shardings=self._acting_sharding)

    def learned(self) -> tuple[PyTree, PyTree]:
        """Return networks and optimizer state, which the next update donates."""
        self.wait()
        return self._networks, self._opt

    def experience(self) -> PyTree:
        """Return what a checkpoint keeps of the experience; the next update donates it.

        With several hosts it is this host's part.
        """
        self.wait()
        return self.of_this_host(self._experience)

    def of_this_host(self, tree: PyTree) -> PyTree:
        """Return this host's parts of arrays that an update gets; all of them if it is alone."""
        return self._hosts.parts(tree)

    def experience_bytes(self) -> int:
        """Return the size of ``experience()``."""
        return num_bytes(self.of_this_host(self._experience))

    def lasting_experience(self) -> PyTree:
        """Return the part of the experience that a checkpoint keeps even without the rest."""
        self.wait()
        return self._agent.lasting_experience(self._experience)

    def is_whole(self) -> bool:
        """Tell whether no part has been deleted, as by a failed update, and networks are finite."""
        leaves = jax.tree.leaves((self._networks, self._opt, self._experience))
        if any(leaf.is_deleted() for leaf in leaves):
            return False
        return is_finite(self._networks)

    def state(self, step: Sequence[PyTree]) -> AgentState:
        """Return the agent state with these step states; from now on the caller owns it."""
        return AgentState(self._networks, self._opt, self._experience, tuple(step))

    def consume(self, item: Item, *, updates: int, due: int) -> PyTree | None:
        """Give one trajectory to the agent and take the optimizer steps that are then due.

        A single update is one program with what comes before and after it, so that the device does
        not wait for Python in between. So are several updates on an accelerator, and on a CPU
        those of an agent that allows it (``Agent.updates_in_one_program``); of any other agent they
        are one program each.

        Args:
          item: On the update devices, split over B; its trajectory and step states are donated.
          updates: Optimizer steps taken before these, over all runs; folded into their keys.
          due: Number of optimizer steps to take.

        Returns:
          What ``acting_networks`` returns afterwards; None if nothing was due.
        """
        self.wait()
        given = item[:3]
        if due:
            self._find_metrics(given)
        if self._in_one_program(due):
            return self._learn(given, updates, due)
        donated = *given, self._experience
        if self._take is None:
            specs = self._specs_of(given)
            mapped = self._map(self._take_shard, (*specs, P()), specs[-1])
            self._take = DonatingProgram(
                mapped, self._shardings, *donated, self._networks, donated=len(donated)
            )
        self._experience = self._take(*donated, self._networks)
        for number in range(updates, updates + due):
            self.sign_of_life()
            if self._on_cpu:
                self.wait()
            self._learn((), number, 1)
        return self.acting_networks() if due else None

    def prepare(self, item: Item, *, due: int) -> None:
        """Do ahead of ``consume`` what can be done before there is a trajectory.

        The names of the metrics are found. If the updates will be one program, it is compiled too.
        Not with several update devices: only the agent's own code knows how it splits a step state.

        Args:
          item: Shapes of what ``consume`` will get, of one device.
          due: Number of updates that will be due after the next trajectory.
        """
        if self._mesh.size > 1:
            return
        given = item[:3]
        self._find_metrics(given)
        if self._in_one_program(due) and (True, due) not in self._programs:
            self._program(given, due)

    def _in_one_program(self, due: int) -> bool:
        # XLA computes a convolution in a loop in one thread of a CPU; an accelerator does not mind.
        several = self._agent.updates_in_one_program or not self._on_cpu
        return due == 1 or (due > 1 and several)

    def _find_metrics(self, given: tuple) -> None:
        """Begin the sums of the metrics; an update is traced to learn their names and shapes."""
        if self._metric_sums is None:
            self._metric_sums = self._zeros(self._metric_shapes(given))

    def _owned(self, given: tuple) -> tuple:
        # Networks come first, so that their own buffers are used again; the trajectory comes before
        # the experience, of which it becomes a part without a copy.
        return (self._networks, self._opt, self._metric_sums, *given, self._experience)

    def _learn(self, given: tuple, updates: int, due: int) -> PyTree:
        """Take ``given``, if it is not empty, and ``due`` updates; return the acting networks.

        There are none where nothing is given.
        """
        program, owned = self._program(given, due), self._owned(given)
        self._networks, self._opt, self._experience, self._metric_sums, acting = program(
            *owned, self._key_data, np.uint32(updates)
        )
        self._updates_summed += due
        return acting

    def _program(self, given: tuple, due: int) -> DonatingProgram:
        """Return the program of ``_learn``, compiled when it is first asked for."""
        key = bool(given), due
        if key not in self._programs:
            specs, state = self._specs_of(given), (P(), P(), self._agent.experience_spec(), P())
            mapped = self._map(
                functools.partial(self._learn_shard, due),
                (P(), P(), P(), *specs, P(), P()),
                (*state, P()),
            )
            same = self._replicated
            out = (same, same, self._shardings, same, self._acting_sharding)
            owned, others = self._owned(given), (self._key_data, np.uint32(0))
            program = DonatingProgram(mapped, out, *owned, *others, donated=len(owned))
            self._programs[key] = program
        return self._programs[key]

    def _specs_of(self, given: tuple) -> tuple:
        """Return specs of ``given`` and of the experience: step states stay as placed."""
        experience = self._agent.experience_spec()
        if not given:
            return (experience,)
        step_states = jax.tree.map(lambda leaf: getattr(leaf.sharding, "spec", P()), given[1:])
        return TRAJECTORY_SPEC, *step_states, experience

    def _metric_shapes(self, given: tuple) -> PyTree:
        """Return the shapes of the metrics, without running anything."""

        def metrics(networks: PyTree, opt: PyTree, *rest: PyTree) -> PyTree:
            *owned, key_data, updates = rest
            experience = self._take_shard(*owned, networks)
            return self._metrics_shard(networks, opt, experience, key_data, updates)[3]

        mapped = self._map(metrics, (P(), P(), *self._specs_of(given), P(), P()), P())
        state = self._networks, self._opt, *given, self._experience
        return jax.eval_shape(mapped, *state, self._key_data, np.uint32(0))

    def _zeros(self, metrics: PyTree) -> dict[str, jax.Array]:
        return self._hosts.replicate(jax.tree.map(lambda m: np.zeros(m.shape, m.dtype), metrics))

    def take_metrics(self) -> dict[str, float]:
        """Return means of the metrics of the updates since the last call, without skipped ones.

        The result is empty if no update was taken.
        """
        if self._metric_sums is None or not self._updates_summed:
            return {}
        sums = jax.device_get(self._metric_sums)
        self._metric_sums = self._zeros(sums)
        skipped = int(sums.pop(SKIPPED, 0))
        taken, self._updates_summed = self._updates_summed - skipped, 0
        self._num_skipped += skipped
        if not taken:
            return {}
        means = {name: float(total) / taken for name, total in sums.items()}
        return self._agent.reported_metrics(means)

    def pop_skipped(self) -> int:
        """Return the skipped updates that ``take_metrics`` has counted since the last call."""
        skipped, self._num_skipped = self._num_skipped, 0
        return skipped

    def wait(self) -> None:
        """Wait for the programs in flight.

        On a CPU this is called before every update: collectives of two programs in flight can
        starve each other of threads and abort the process. Elsewhere, before every trajectory.
        """
        jax.block_until_ready((self._networks, self._experience, self._metric_sums))

    def _take_shard(self, *owned: PyTree) -> PyTree:
        """Return the experience with what is given, if anything is; the networks come last."""
        *given, experience, networks = owned
        if not given:
            return experience
        trajectory, initial, final = given
        return self._agent.update_experience(experience, initial, final, trajectory, networks)

    def _learn_shard(
        self, due: int, networks: PyTree, opt: PyTree, sums: PyTree, *rest: PyTree
    ) -> tuple[PyTree, PyTree, PyTree, PyTree, PyTree]:
        *owned, key_data, first = rest

        def update(number: Any, state: tuple) -> tuple:
            networks, opt, experience, sums = state
            key = key_data, first + number
            *learned, metrics = self._metrics_shard(networks, opt, experience, *key)
            return *learned, jax.tree.map(jnp.add, sums, metrics)  # which are fetched rarely

        state: tuple = networks, opt, self._take_shard(*owned, networks), sums
        if due == 1:
            state = update(np.uint32(0), state)
        else:
            state = jax.lax.fori_loop(np.uint32(0), np.uint32(due), update, state)
        has_acting = len(owned) > 1
        return *state, self._acting_shard(state[0], state[2]) if has_acting else ()

    def _metrics_shard(
        self,
        networks: PyTree,
        opt: PyTree,
        experience: PyTree,
        key_data: jax.Array,
        updates: jax.Array,
    ) -> tuple[PyTree, PyTree, PyTree, dict[str, jax.Array]]:
        # The key comes as plain data, since JAX dispatches a program with a typed key in Python.
        key = jax.random.wrap_key_data(key_data, impl=self._key_impl)
        key = jax.random.fold_in(key, updates)
        key = jax.random.fold_in(key, jax.lax.axis_index(LEARNER_AXIS))
        (loss, (experience, metrics)), grads = jax.value_and_grad(self._agent.loss, has_aux=True)(
            networks, opt, experience, key
        )
        grads, said = jax.lax.pmean((grads, {**metrics, "loss": loss}), LEARNER_AXIS)
        # Before they are clipped. A norm that is too large for float32 is no fault of the update.
        norm = jnp.minimum(optax.tree.norm(grads), jnp.finfo(jnp.float32).max)
        metrics = {"grad_norm": norm, **said}
        before = networks, opt
        networks, opt = self._agent.optimize(networks, opt, grads)
        if self._skip_not_finite:
            # The means are equal on all devices, so all devices decide alike.
            finite = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves((grads, said))]
            taken = jnp.stack(finite).all()
            networks, opt = jax.tree.map(
                lambda new, old: jnp.where(taken, new, old), (networks, opt), before
            )
            metrics = jax.tree.map(lambda x: jnp.where(taken, x, jnp.zeros_like(x)), metrics)
            metrics[SKIPPED] = 1.0 - taken
        return networks, opt, experience, metrics

    def acting_networks(self) -> PyTree:
        """Return the acting networks, replicated over the update devices.

        They are copies, because the next update donates the originals.
        """
        return self._acting(self._networks, self._experience)

    def _acting_shard(self, networks: PyTree, experience: PyTree) -> PyTree:
        return copy_tree(self._agent.acting_networks(networks, experience))


class DonatingProgram:
    """A program, compiled at once, whose outputs may take the buffers of its first arguments."""

    def __init__(self, function: Callable, out: PyTree, *example: PyTree, donated: int) -> None:
        """Compile it for such arguments as ``example``, arrays or shapes.

        Args:
          out: Shardings of what it returns, a prefix tree; None lets JAX choose.
          donated: How many of the first to donate. Leaves that no output can take stay.
        """
        self._jitted = jax.jit(function, donate_argnums=tuple(range(donated)), out_shardings=out)
        self._compiled: Callable | None = None
        # For good: to put filters back would undo what other threads do to them meanwhile.
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        if not any(getattr(jax.config, name) for name in DEBUGGING):
            self._compiled = self._jitted.lower(*example).compile()

    def __call__(self, *arguments: PyTree) -> PyTree:
        """Run it; for other shapes or devices than those of the example it is compiled again."""
        if self._compiled is not None:
            try:
                return self._compiled(*arguments)
            except (TypeError, ValueError):
                leaves = jax.tree.leaves(arguments)
                if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves):
                    raise
                self._compiled = None  # it was compiled for others and has not run
        return self._jitted(*arguments)
