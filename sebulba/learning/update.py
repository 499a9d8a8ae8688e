"""The update: experience in, gradients averaged over the update devices, networks out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from sebulba.agent import LEARNER_AXIS, TRAJECTORY_SPEC, Agent, AgentState
from sebulba.cluster.hosts.mesh import HostMesh
from sebulba.learning.donation import DonatingProgram
from sebulba.support.trees import copy_tree, is_finite, num_bytes, owned_copy
from sebulba.types import PyTree, Trajectory

SKIPPED = "skipped"
"""Name, in the sums of metrics, of the number of updates that were skipped."""


class Updater:
    """Owns networks, optimizer state and experience on the update devices, and their programs.

    Only one thread may use it: collectives that two threads launch can deadlock.
    """

    def __init__(
        self,
        agent: Agent,
        mesh: Mesh,
        update_key: jax.Array,
        *,
        skip_not_finite: bool = False,
        hosts: HostMesh | None = None,
    ) -> None:
        """Prepare the programs; call ``place`` before any other method.

        Args:
          agent: The agent whose ``update_experience``, ``loss`` and ``optimize`` run.
          mesh: The update devices, on the axis ``"learner"``.
          update_key: Typed key from which the key of every loss is folded.
          skip_not_finite: Leave networks and optimizer state as they are if an update's gradient or
            one of its metrics is NaN or infinite.
          hosts: The update devices of all hosts, whose ``whole`` is then ``mesh``; None if this
            host learns alone.
        """
        self._skip_not_finite = skip_not_finite
        self._agent = agent
        self._mesh = mesh
        self._hosts = hosts
        self._replicated = NamedSharding(mesh, P())
        self._key_data = self._replicate(jax.random.key_data(update_key))
        self._key_impl = jax.random.key_impl(update_key)
        self._networks: PyTree = None
        self._opt: PyTree = None
        self._experience: PyTree = None
        spec = agent.experience_spec()
        # Outputs are placed explicitly: on a mesh of one device JAX would otherwise simplify their
        # specs, and the next call with them would be compiled again.
        self._shardings = jax.tree.map(
            lambda leaf: NamedSharding(mesh, leaf), spec, is_leaf=lambda x: isinstance(x, P)
        )
        first = mesh.devices.flat[0]
        self._acting_sharding = SingleDeviceSharding(first) if mesh.size == 1 else self._replicated
        self._acting = jax.jit(
            self._map(self._acting_shard, (P(), spec), P()), out_shardings=self._acting_sharding
        )
        self._state_shardings = (
            self._replicated,
            self._replicated,
            self._shardings,
            self._replicated,
        )
        self._update = jax.jit(
            self._map(self._update_shard, (P(), P(), spec, P(), P(), P()), (P(), P(), spec, P())),
            donate_argnums=(0, 1, 2, 3),
            out_shardings=self._state_shardings,
        )
        self._take: DonatingProgram | None = None
        self._take_and_update: dict[int, DonatingProgram] = {}
        """By the number of updates that the program takes."""
        self._metric_sums: dict[str, jax.Array] | None = None
        self._updates_summed = 0
        self._one_in_flight = first.platform == "cpu"

    def _map(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
        # With check_vma=True JAX itself sums the gradient of replicated networks over the axis; the
        # pmean below then changes nothing, and the gradient is too large.
        return jax.shard_map(
            function, mesh=self._mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def _replicate(self, tree: PyTree) -> PyTree:
        """Place ``tree`` on every update device; on all hosts it is the same."""
        if self._hosts is None:
            return jax.device_put(tree, self._replicated)
        return self._hosts.put(tree, P())  # device_put would first compare the hosts' values

    def place(self, state: AgentState) -> None:
        """Copy networks, optimizer state and experience; the caller's arrays stay valid.

        With several hosts the experience is this host's part.
        """
        self._metric_sums, self._updates_summed = None, 0  # a failed run may have left some
        self._num_skipped = 0
        if self._hosts is not None:
            self._networks, self._opt = self._hosts.put((state.networks, state.opt), P())
            spec = self._agent.experience_spec()
            self._experience = self._hosts.put(state.experience, spec)
            return
        # One program copies both. The experience can be large, so it is copied field by field.
        self._networks, self._opt = owned_copy((state.networks, state.opt), self._replicated)
        self._experience = jax.tree.map(
            lambda sharding, subtree: owned_copy(subtree, sharding),
            self._shardings,
            state.experience,
        )

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
        return tree if self._hosts is None else self._hosts.parts(tree)

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

    def consume(
        self, trajectory: Trajectory, initial: PyTree, final: PyTree, *, updates: int, due: int
    ) -> PyTree | None:
        """Give one trajectory to the agent and take the optimizer steps that are then due.

        A single update is one program with what comes before and after it, so that the device does
        not wait for Python in between. So are several updates of an agent that allows it
        (``Agent.updates_in_one_program``); of any other they are one program each.

        Args:
          trajectory: On the update devices, split over B; donated, as are the step states.
          initial: Step state before its row 0.
          final: Step state before its row T.
          updates: Optimizer steps taken before these, over all runs; folded into their keys.
          due: Number of optimizer steps to take.

        Returns:
          What ``acting_networks`` returns afterwards; None if nothing was due.
        """
        self.wait()
        given = (trajectory, initial, final, self._experience)
        if due:
            self._find_metrics(given)
        if self._in_one_program(due):
            return self._learn(given, updates, due)
        if self._take is None:
            self._take = self._make_take(*given)
        self._experience = self._take(given, self._networks)
        for number in range(due):
            if self._one_in_flight:
                self.wait()
            state = (self._networks, self._opt, self._experience, self._metric_sums)
            self._networks, self._opt, self._experience, self._metric_sums = self._update(
                *state, self._key_data, np.uint32(updates + number)
            )
        self._updates_summed += due
        return self.acting_networks() if due else None

    def prepare(self, trajectory: Trajectory, initial: PyTree, final: PyTree, *, due: int) -> None:
        """Do ahead of ``consume`` what can be done before there is a trajectory.

        The names of the metrics are found. If the updates will be one program, it is compiled too.

        Args:
          trajectory: Shapes of the trajectory that ``consume`` will get.
          initial: Shapes of its initial step state.
          final: Shapes of its final step state.
          due: Number of updates that will be due after the next trajectory.
        """
        given = (trajectory, initial, final, self._experience)
        self._find_metrics(given)
        if self._in_one_program(due) and due not in self._take_and_update:
            owned = self._owned(given)
            program = self._take_and_update[due] = self._make_take_and_update(owned, due)
            program.compile(owned, self._key_data, np.uint32(0))

    def _in_one_program(self, due: int) -> bool:
        return due == 1 or (due > 1 and self._agent.updates_in_one_program)

    def _find_metrics(self, given: tuple) -> None:
        """Begin the sums of the metrics; an update is traced to learn their names and shapes."""
        if self._metric_sums is None:
            self._metric_sums = self._zeros(self._metric_shapes(given))

    def _owned(self, given: tuple) -> tuple:
        # Networks come first, so that their own buffers are used again; the trajectory comes before
        # the experience, of which it becomes a part without a copy.
        return (self._networks, self._opt, self._metric_sums, *given)

    def _learn(self, given: tuple, updates: int, due: int) -> PyTree:
        owned = self._owned(given)
        if due not in self._take_and_update:
            self._take_and_update[due] = self._make_take_and_update(owned, due)
        self._networks, self._opt, self._experience, self._metric_sums, acting = (
            self._take_and_update[due](owned, self._key_data, np.uint32(updates))
        )
        self._updates_summed += due
        return acting

    def _specs_of(self, initial: PyTree, final: PyTree) -> tuple:
        """Return specs of (trajectory, initial, final, experience): step states stay as placed."""

        def step_spec(step_state: PyTree) -> PyTree:
            return jax.tree.map(lambda leaf: getattr(leaf.sharding, "spec", P()), step_state)

        return TRAJECTORY_SPEC, step_spec(initial), step_spec(final), self._agent.experience_spec()

    def _make_take(
        self, trajectory: Trajectory, initial: PyTree, final: PyTree, experience: PyTree
    ) -> DonatingProgram:
        """Jit ``Agent.update_experience`` alone."""
        specs = self._specs_of(initial, final)
        mapped = self._map(self._take_shard, (*specs, P()), specs[-1])
        given = (trajectory, initial, final, experience)
        return DonatingProgram(mapped, given, experience, out=self._shardings)

    def _make_take_and_update(self, owned: tuple, due: int) -> DonatingProgram:
        """Jit ``Agent.update_experience``, the updates due and the copy that is published."""
        networks, opt, sums, _, initial, final, experience = owned
        specs = self._specs_of(initial, final)
        mapped = self._map(
            functools.partial(self._take_and_update_shard, due),
            (P(), P(), P(), *specs, P(), P()),
            (P(), P(), specs[-1], P(), P()),
        )
        acting = jax.eval_shape(self._agent.acting_networks, networks, experience)
        out = (*self._state_shardings, self._acting_sharding)
        return DonatingProgram(mapped, owned, (networks, opt, experience, sums, acting), out)

    def _metric_shapes(self, given: tuple) -> PyTree:
        """Return the shapes of the metrics, without running anything."""

        def metrics(given: tuple, networks: PyTree, opt: PyTree, *key: jax.Array) -> PyTree:
            experience = self._take_shard(*given, networks)  # type: ignore[call-arg]
            return self._metrics_shard(networks, opt, experience, *key)[3]

        mapped = self._map(metrics, (self._specs_of(*given[1:3]), P(), P(), P(), P()), P())
        return jax.eval_shape(
            mapped, given, self._networks, self._opt, self._key_data, np.uint32(0)
        )

    def _zeros(self, metrics: PyTree) -> dict[str, jax.Array]:
        return self._replicate(jax.tree.map(lambda m: np.zeros(m.shape, m.dtype), metrics))

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

    def _take_shard(
        self,
        trajectory: Trajectory,
        initial: PyTree,
        final: PyTree,
        experience: PyTree,
        networks: PyTree,
    ) -> PyTree:
        return self._agent.update_experience(experience, initial, final, trajectory, networks)

    def _update_shard(
        self,
        networks: PyTree,
        opt: PyTree,
        experience: PyTree,
        sums: PyTree,
        key_data: jax.Array,
        updates: jax.Array,
    ) -> tuple[PyTree, PyTree, PyTree, PyTree]:
        """Take one optimizer step and add its metrics to ``sums``, which are fetched rarely."""
        *state, metrics = self._metrics_shard(networks, opt, experience, key_data, updates)
        return *state, jax.tree.map(jnp.add, sums, metrics)  # type: ignore[return-value]

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
            taken = _all_finite((grads, said))
            networks, opt = jax.tree.map(
                lambda new, old: jnp.where(taken, new, old), (networks, opt), before
            )
            metrics = jax.tree.map(lambda x: jnp.where(taken, x, jnp.zeros_like(x)), metrics)
            metrics[SKIPPED] = 1.0 - taken
        return networks, opt, experience, metrics

    def _take_and_update_shard(
        self,
        due: int,
        networks: PyTree,
        opt: PyTree,
        sums: PyTree,
        trajectory: Trajectory,
        initial: PyTree,
        final: PyTree,
        experience: PyTree,
        key_data: jax.Array,
        updates: jax.Array,
    ) -> tuple[PyTree, PyTree, PyTree, PyTree, PyTree]:
        experience = self._take_shard(trajectory, initial, final, experience, networks)
        state = (networks, opt, experience, sums)
        if due == 1:
            state = self._update_shard(*state, key_data, updates)
        else:

            def update(number: jax.Array, state: PyTree) -> PyTree:
                networks, opt, experience, sums = state
                key = key_data, updates + number
                return self._update_shard(networks, opt, experience, sums, *key)

            state = jax.lax.fori_loop(np.uint32(0), np.uint32(due), update, state)
        networks, opt, experience, sums = state
        return networks, opt, experience, sums, self._acting_shard(networks, experience)

    def acting_networks(self) -> PyTree:
        """Return the acting networks, replicated over the update devices.

        They are copies, because the next update donates the originals.
        """
        return self._acting(self._networks, self._experience)

    def _acting_shard(self, networks: PyTree, experience: PyTree) -> PyTree:
        return copy_tree(self._agent.acting_networks(networks, experience))


def _all_finite(tree: PyTree) -> jax.Array:
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]).all()
