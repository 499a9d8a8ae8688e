"""GymnasiumLoop: Inferencer threads on one side of a queue, the pmapped update on the other.

Pmapped: one program on each update device with ``lax.pmean`` between them, written as
``jax.jit(jax.shard_map(...))``, which is what ``jax.pmap`` lowers to (``learning/update.py``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from sebulba.agent import Agent, AgentState
from sebulba.agents.bases.off_policy import OffPolicyAgent
from sebulba.checkpoints.checkpointer import Checkpoint, Checkpointer
from sebulba.cluster.hosts.hosts import Hosts
from sebulba.cluster.hosts.join import join_hosts
from sebulba.cluster.hosts.mesh import HostMesh, devices_of_hosts
from sebulba.cluster.hosts.rounds import Rounds
from sebulba.cluster.inferencers.inferencer_server import Given
from sebulba.cluster.inferencers.node_figures import node_lines
from sebulba.cluster.inferencers.remote_inferencer import RemoteCycle, RemoteEnv
from sebulba.cluster.inferencers.start import new_workers
from sebulba.cluster.inferencers.starting import Starting
from sebulba.cluster.inferencers.workers import Workers
from sebulba.cluster.replay.managed_update import ManagedUpdater
from sebulba.cluster.replay.sharded_replay import ShardedReplay, check_managers
from sebulba.cluster.replay.start import start_managers
from sebulba.envs import make_env_factory
from sebulba.envs.seeds import ENVS_A_GENERATION, check_seed
from sebulba.errors import ActionError, EnvHangError, UsageError, is_env_failure, shown
from sebulba.inference.choose_cycle import MakeCycle, make_cycle
from sebulba.inference.cycle import Cycle, CyclePrograms
from sebulba.inference.hangs import AnyThread
from sebulba.inference.inferencer import INFERENCER_PHASES, Inferencer
from sebulba.inference.loop_envs import LoopEnvs, cores_of_inferencers
from sebulba.learning.update import Updater
from sebulba.loops.agent_contract import check_contract, check_is_agent
from sebulba.loops.devices import choose_devices, learner_mesh, what_fits
from sebulba.loops.evaluation_thread import Evaluator
from sebulba.loops.interrupt import KeptInterrupt
from sebulba.loops.jax_settings import check_jax_settings
from sebulba.loops.resuming import Resumed, put_session_back, read_state
from sebulba.loops.run import Run
from sebulba.loops.session import Attached, ObserveCycle, OnHang, Session
from sebulba.loops.snapshot_trees import SnapshotReader
from sebulba.loops.state_check import check_state
from sebulba.metrics.counters import Counters
from sebulba.metrics.timer import PhaseTimer
from sebulba.metrics.window import RecentEpisodes, teams_of
from sebulba.options import CycleKind, LoopKeywords, LoopOptions
from sebulba.support.checks import check_count, check_divisible
from sebulba.support.key_streams import DROPPED_STREAM, HOST_STREAM, UPDATE_STREAM
from sebulba.support.trees import fold_in_count, owned_copy
from sebulba.transport.hand_off import HandOffToHost, HandOffToHosts, HandOffToMesh
from sebulba.transport.item import HandOff
from sebulba.transport.staging import Staging
from sebulba.types import Callback, EnvFactory, MetricWriter, PyTree, RunSpec

STEPS_PER_CYCLE = 32
"""Unroll length of a new run where none is given."""
COUNTED_BY_ALL = ("cycles", "env_steps", "updates", "policy_version", "warm_up_from")
"""Counters that are the same on all hosts: on some of them depends when updates are due."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What ``run()`` returns."""

    state: AgentState
    """The final state, on the update devices; give it to the next ``run()`` to go on."""
    counters: Counters
    """Counts since the state was new."""
    metrics: dict[str, Any]
    """The last window's record."""
    acting_networks: PyTree
    """The trained policy: what Inferencers would act with next."""
    stopped: bool = False
    """``stop()`` or a callback ended the run before ``num_cycles``."""
    stop_reason: str | None = None
    """What a callback said that ended it."""
    folder: Path | None = None
    """Folder of the run; None where the loop was used by itself."""


class GymnasiumLoop:
    """Trains an agent on environments that are not JAX.

    A context manager; ``close()`` frees the environments. ``run()`` may be called again: with the
    state that the last ``run()`` or ``restore()`` returned it goes on where that was (environments,
    episodes and counters included); with any other it begins anew in fresh episodes.

    With ``distributed`` this is one host of several that learn together, each of which makes and
    runs such a loop with the same arguments. ``num_envs``, devices, Inferencers and states are then
    those of this host, and so is the experience in a state; ``num_cycles`` counts trajectories of
    which every host has its part, and ``Counters`` count over all hosts.

    Args:
      env_factory: An id, a callable that returns a ``gymnasium.Env``, a callable with
        parameters ``num_envs`` and ``seeds`` that returns a vector environment, or what
        ``sebulba.make_env_factory`` returned.
      agent: The algorithm.
      num_envs: B, environments per Inferencer; a multiple of the number of update devices.
      options: How the loop runs; None is ``LoopOptions()``.
      inference_devices: Devices, their names (``"cpu:0"``) or their indices, instead of those of
        ``options``.
      update_devices: Likewise.
      cycle: A kind instead of that of ``options``; or a function of (environment, programs,
        device, timer) that makes a cycle of your own.
      inference_only: Act and never update.
      metric_writer: Gets a record a window; what it raises is a warning.
      callbacks: Called with every record after that; what one returns ends the run and says why
        (``sebulba.loops.callbacks`` has the usual ones).
      observe_cycle: Called in the calling thread of ``run()`` with every trajectory, on the
        update devices, before it is donated (do not keep it), and its episode bookkeeping;
        returns more metrics, or None.
      evaluator: What plays the acting networks now and then while they are trained, and at
        the end of a run that was not stopped; whoever made it closes it. Of several hosts, host
        0 has it played, and the others leave it alone.
      checkpointer: Saves where the loop stands at its intervals and at the end of every run,
        for ``restore``; whoever made it closes it.
      on_hang: Called, in another thread, where the update itself hangs, so that ``run()``
        cannot raise; None prints where it hangs and no more.
      **changes: Any field of ``LoopOptions`` or ``FaultOptions``, such as
        ``schedule="lockstep"`` or ``on_env_failure="restart"``, instead of that in
        ``options``.
    """

    def __init__(
        self,
        env_factory: str | Callable | EnvFactory,
        agent: Agent,
        num_envs: int,
        *,
        options: LoopOptions | None = None,
        inference_devices: Sequence[int | str | jax.Device] | None = None,
        update_devices: Sequence[int | str | jax.Device] | None = None,
        cycle: CycleKind | MakeCycle | None = None,
        inference_only: bool = False,
        metric_writer: MetricWriter | None = None,
        callbacks: Sequence[Callback] = (),
        observe_cycle: ObserveCycle | None = None,
        evaluator: Evaluator | None = None,
        checkpointer: Checkpointer | None = None,
        on_hang: OnHang | None = None,
        **changes: Unpack[LoopKeywords],
    ) -> None:
        """Make the environments and choose the devices; nothing runs yet.

        Raises:
          UsageError: An argument breaks a rule.
        """
        check_is_agent(agent)
        check_jax_settings()
        check_count("num_envs", num_envs, ENVS_A_GENERATION)
        if not isinstance(inference_only, bool):
            raise UsageError(f"inference_only={shown(inference_only)} must be True or False")
        kind = None if callable(cycle) else cycle
        self._options = options = _changed(options, changes, kind)
        self._cycle_kind: CycleKind | MakeCycle = cycle if callable(cycle) else options.cycle
        self._hosts = self._join(options, inference_only)
        if self._hosts is not None and not self._hosts.is_first:
            evaluator = None  # what host 0 plays is the policy of all
        self.inference_devices, self.update_devices = choose_devices(
            options.inference_devices if inference_devices is None else inference_devices,
            options.update_devices if update_devices is None else update_devices,
            what_fits(
                agent,
                num_envs,
                options.num_inferencers_per_device,
                # A configuration of the command line knows it.
                getattr(options, "steps_per_cycle", None),
            ),
        )
        devices = len(self.update_devices)
        check_divisible("num_envs", num_envs, devices, f"the {devices} update devices")
        self.num_envs = num_envs
        self._managed_agent: OffPolicyAgent | None = None
        """The agent whose replay is in trajectory managers; None where they are none."""
        self._managers: ShardedReplay | None = None
        if (number := options.cluster.trajectory_managers) and not inference_only:
            check_managers(agent, number, self.num_inferencers)
            assert isinstance(agent, OffPolicyAgent)
            self._managed_agent = agent
            agent = agent.with_managers()
        self.agent = agent
        self._session = Session(
            options,
            agent,
            Attached(
                metric_writer, tuple(callbacks), observe_cycle, evaluator, checkpointer, on_hang
            ),
            {device: Staging() for device in self.inference_devices},
            inference_only,
            1 if self._hosts is None else self._hosts.number,
            episodes=RecentEpisodes(teams_of(agent.spec)),
        )
        self._host_mesh: HostMesh | None = None
        """The update devices of all hosts; None where this one learns alone."""
        self._rounds: Rounds | None = None
        if self._hosts is not None:
            everywhere = devices_of_hosts(self.update_devices, self._hosts.number)
            self._host_mesh = HostMesh(self.update_devices, everywhere)
            self._rounds = Rounds(self._hosts, self._host_mesh)
            self._mesh = self._host_mesh.whole
        else:
            self._mesh = learner_mesh(self.update_devices)
        self._hand_off = self._make_hand_off()
        self._running = threading.Lock()
        self._closed = self._hangs = False
        self._threads: list[AnyThread] = []
        """Threads of the last run: those of the Inferencers in their order, then others."""
        self._checked: RunSpec | None = None
        """Sizes for which the agent keeps its contract."""
        self._updater: Updater | None = None
        self._last_state: AgentState | None = None
        self._cycle_reasons: set[str] = set()
        self.resume_notes: list[str] = []
        """What ``restore`` could not put back, for people."""
        self._workers: Workers | None = None
        """Makes the environments elsewhere; None makes them here."""
        self._starting = Starting(options.env_restarts_allowed)
        self._envs = self._session.envs = self._make_envs(make_env_factory(env_factory))
        if self._envs[0].spec.final_obs and not (agent.sees_final_obs or inference_only):
            _warn_of_lost_steps(agent)

    # Set-up.

    @staticmethod
    def _join(options: LoopOptions, inference_only: bool) -> Hosts | None:
        """Return the hosts that learn together, joined; None if this one learns alone."""
        if not options.distributed.is_on:
            return None
        where = f"distributed.coordinator={shown(options.distributed.coordinator)}"
        if inference_only:
            raise UsageError(f"inference_only=True does not go with {where}; leave one out")
        return join_hosts(options.distributed)

    def _make_hand_off(self) -> HandOff:
        if self._host_mesh is not None:
            return HandOffToHosts(self.agent, self._host_mesh)
        if self._managed_agent:
            return HandOffToHost()
        return HandOffToMesh(self.agent, self._mesh)

    def _make_envs(self, factory: EnvFactory) -> LoopEnvs:
        seed, inline = self._options.seed, self._options.inline
        is_here = self._options.cluster.address == "threads"
        # A process that is started in the place of one that was lost would have its cores, too.
        pin = self._options.pin_inferencers and not inline and is_here
        cores = cores_of_inferencers(factory, self.num_inferencers, pin=pin)
        with contextlib.ExitStack() as stack:
            cluster = self._options.cluster
            host = 0 if self._hosts is None else self._hosts.index
            given = Given(factory, self.agent, self._cycle_kind, self._options.schedule)
            self._workers = new_workers(given, cluster, self.num_inferencers)
            if self._workers is not None:
                factory = self._workers
                stack.callback(self._workers.close)
            envs = LoopEnvs(
                factory,
                self.agent.spec,
                seed,
                self.num_envs,
                cores,
                inline=inline,
                host=host,
                starting=self._starting,
            )
            stack.callback(envs.close)
            if self._managed_agent:
                self._managers = start_managers(self._managed_agent, cluster)
            stack.pop_all()
        return envs

    @property
    def num_inferencers(self) -> int:
        """Inferencers over all inference devices."""
        return self._num_per_device * len(self.inference_devices)

    @property
    def _num_per_device(self) -> int:
        return max(1, self._options.num_inferencers_per_device)

    def new_state(self, key: int | jax.Array, steps_per_cycle: int) -> AgentState:
        """Return a new agent state for this loop.

        Args:
          key: Typed PRNG key, or the integer seed of one.
          steps_per_cycle: T, as it will be given to ``run()``.

        Raises:
          UsageError: ``steps_per_cycle`` does not fit, or a method of the agent breaks its
            contract.
        """
        key = jax.random.key(key) if isinstance(key, int) else key
        run_spec = self._new_run_spec(steps_per_cycle)
        # As one program: initializers run operation by operation take twice as long to compile.
        return jax.jit(lambda key: self._new_state(key, run_spec))(key)

    def _new_state(self, key: jax.Array, run_spec: RunSpec) -> AgentState:
        """Return a new state; each host has step states of its own, and all else alike."""
        state = self.agent.new_state(key, run_spec)
        if self._hosts is None or self._hosts.is_first:
            return state
        of_hosts = jax.random.fold_in(key, HOST_STREAM)
        key = jax.random.fold_in(of_hosts, self._hosts.index)
        step = (
            self.agent.new_step_state(jax.random.fold_in(key, j), run_spec, j)
            for j in range(run_spec.num_inferencers)
        )
        return state._replace(step=tuple(step))

    def _new_run_spec(self, steps_per_cycle: int) -> RunSpec:
        check_count("steps_per_cycle", steps_per_cycle)
        run_spec = RunSpec(
            self.num_envs,
            self.num_inferencers,
            steps_per_cycle,
            len(self.update_devices),
            self._session.num_hosts,
        )
        if run_spec != self._checked:
            check_contract(self.agent, run_spec, learns=not self._session.inference_only)
            self._checked = run_spec
        return run_spec

    def describe(self) -> str:
        """Say in a line which devices do what and, once run, how cycles run and why."""

        def names(devices: Sequence[jax.Device]) -> str:
            return ", ".join(f"{d.platform}:{d.id}" for d in devices)

        kinds = {inferencer.run_cycle.kind for inferencer in self._session.inferencers}
        how = f"; {'/'.join(sorted(kinds))} cycles ({'; '.join(sorted(self._cycle_reasons))})"
        return (
            f"{self.num_inferencers} Inferencer{'s' * (self.num_inferencers > 1)} x "
            f"{self.num_envs} environment{'s' * (self.num_envs > 1)} on "
            f"{names(self.inference_devices)}; updates on {names(self.update_devices)}; "
            f"{self._options.schedule}{how if kinds else ''}"
            f"{'' if self._hosts is None else f'; {self._hosts}, alike on each'}"
        )

    def describe_nodes(self) -> list[str]:
        """Say in a line each what the nodes with Inferencers do, if there are any."""
        if self._workers is None:
            return []
        return node_lines(self._workers, self._session.inferencers)

    @property
    def cpu_elsewhere_s(self) -> float:
        """CPU seconds of the nodes with Inferencers, as of the last cycle of each."""
        return 0.0 if self._workers is None else self._workers.cpu_s

    @property
    def counters(self) -> Counters:
        """Counts since the state was new, as of the last ``run()`` or ``restore()``."""
        return dataclasses.replace(self._session.counters)

    # Running.

    def train(
        self, *, total_env_steps: int, steps_per_cycle: int | None = None, seed: int | None = None
    ) -> Result:
        """Train until ``total_env_steps`` are done, counted from the beginning, in whole cycles.

        The first call restores the newest checkpoint of the loop's checkpointer, or begins if there
        is none. A later call trains on from the last one. ``run()`` counts cycles in addition.

        Args:
          total_env_steps: Environment steps, those of earlier calls and processes included.
          steps_per_cycle: T, the unroll length; None takes that of the run, and 32 for a new one.
          seed: Of the networks and of exploration, for a new run; None takes the loop's.

        Returns:
          As ``run()``; without metrics if nothing was left to do.

        Raises:
          UsageError: An argument breaks a rule, or the last run of this loop failed.
          Exception: As ``run()``.
        """
        check_count("total_env_steps", total_env_steps)
        if steps_per_cycle is not None:
            check_count("steps_per_cycle", steps_per_cycle)
        seed = check_seed(self._options.seed if seed is None else seed)
        state = self._newest_state(steps_per_cycle or STEPS_PER_CYCLE, seed)
        if self._session.programs is not None:
            of_run = self._session.programs.run.steps_per_cycle
            if steps_per_cycle not in (None, of_run):
                raise UsageError(
                    f"steps_per_cycle={steps_per_cycle}, and this run has {of_run}; leave it out, "
                    "or begin a new run in a new GymnasiumLoop"
                )
            steps_per_cycle = of_run
        steps_per_cycle = steps_per_cycle or STEPS_PER_CYCLE
        left = max(0, total_env_steps - self._session.counters.env_steps)
        cycles = self._options.whole_cycles(
            left, self.num_envs * steps_per_cycle, self.num_inferencers
        )
        if not cycles:
            networks = self.agent.acting_networks(state.networks, state.experience)
            return Result(state, self.counters, {}, networks)
        given = [state]
        del state  # so that a large replay is in memory once
        return self.run(given.pop(), cycles, steps_per_cycle)

    def _newest_state(self, steps_per_cycle: int, seed: int) -> AgentState:
        """Return the state of the last run, of the newest checkpoint, or a new one."""
        if self._last_state is not None:
            return self._last_state
        if self._session.inferencers:
            raise UsageError(
                "the last run of this loop failed; make a new GymnasiumLoop, with a checkpointer "
                "to train on from where that run was saved"
            )
        checkpointer = self._session.attached.checkpointer
        checkpoint = None if checkpointer is None else checkpointer.load_newest()
        if checkpoint is not None:
            return self.restore(checkpoint)
        return self.new_state(seed, steps_per_cycle)

    def run(self, state: AgentState, num_cycles: int, steps_per_cycle: int) -> Result:
        """Consume ``num_cycles`` trajectories of ``steps_per_cycle`` steps.

        Args:
          state: From ``new_state``, ``restore`` or the last ``Result``; copied, so it stays valid.
          num_cycles: Over all Inferencers; in lockstep a multiple of their number.
          steps_per_cycle: T, the unroll length.

        Returns:
          Final state, counters and metrics.

        Raises:
          UsageError: An argument breaks a rule, the loop is closed or running, a thread of an
            earlier run hangs, or a new run has a checkpointer whose folder holds checkpoints of
            another run.
          NotFiniteError: The loss, the gradient or another metric is NaN or infinite.
          HangError: A thread was silent or did not end; this loop cannot run again.
          CheckpointError: The checkpoint at the end could not be written.
          KeyboardInterrupt: Ctrl-C stopped the run, which is saved, or came twice; not in a program
            with a handler of its own for Ctrl-C.
          BaseException: Whatever an environment, the agent, a callback or ``observe_cycle`` raised,
            with its own traceback; all threads that end are joined first, others named in a note.
        """
        if not self._running.acquire(blocking=False):
            raise UsageError(
                "this loop is running: run() can be called neither in another thread nor in "
                "observe_cycle; let it return first, or make a second GymnasiumLoop"
            )
        # No frame may keep the state, or a large replay would be in memory twice for the whole run.
        given = [state]
        del state
        interrupt = KeptInterrupt(self.stop)
        try:
            with interrupt:
                if self._hosts is None:
                    return self._run(given, num_cycles, steps_per_cycle)
                return self._run_with_others(self._hosts, given, num_cycles, steps_per_cycle)
        finally:
            interrupt.restore()
            if interrupt.came:
                self._session.stop_requested = threading.Event()  # for the next run
            self._running.release()

    def _run_with_others(
        self, hosts: Hosts, given: list[AgentState], num_cycles: int, steps_per_cycle: int
    ) -> Result:
        """Run as one host of several.

        Raises:
          HostError: Another host is gone or has failed.
          BaseException: As ``run``.
        """
        hosts.watch.on_lost = self._session.attached.on_hang
        try:
            result = self._run(given, num_cycles, steps_per_cycle)
            # The checkpoint is whole once all have saved. Host 0 may still evaluate, and JAX would
            # end all if a host left before it.
            hosts.meet("the end", math.inf)
            return result
        except BaseException as error:
            hosts.watch.on_lost = None  # this thread is not stuck
            explained = hosts.explained(error)
            hosts.end_after(explained)
            if explained is error:
                raise
            raise explained from error
        finally:
            hosts.watch.on_lost = None

    def _check_hosts(self, num_cycles: int, run_spec: RunSpec) -> None:
        """Raise UsageError unless all hosts are to do the same."""
        if self._hosts is None:
            return
        options = self._options
        self._hosts.check_same(
            {
                **dataclasses.asdict(run_spec),
                "num_cycles": num_cycles,
                "seed": options.seed,
                "schedule": options.schedule,
                "faults.on_not_finite": options.faults.on_not_finite,
                "max_policy_lag": options.max_policy_lag,
                "agent": type(self.agent).__name__,
                "agent.config": re.sub(r" at 0x[0-9a-f]+", "", repr(self.agent.config)),
                **{name: getattr(self._session.counters, name) for name in COUNTED_BY_ALL},
                "jax": jax.__version__,
                "checkpointer": self._session.attached.checkpointer is not None,
            }
        )

    def _run(self, given: list[AgentState], num_cycles: int, steps_per_cycle: int) -> Result:
        """Run from the state in ``given``, which is taken out of it."""
        state, session = given.pop(), self._session
        session.began = time.perf_counter() - session.seconds_before
        run_spec = self._new_run_spec(steps_per_cycle)
        self._check_run(state, num_cycles, run_spec)
        self._check_hosts(num_cycles, run_spec)
        if self._workers:
            self._workers.stopping.clear()
        updater = self._prepare(state, run_spec)
        updater.place(state)
        self._last_state = None  # until this run has ended well
        del state  # so that a large replay is in memory once, unless the caller keeps the state
        session.target, session.stop_reason = session.counters.cycles + num_cycles, None
        run = Run(
            session,
            updater,
            self._hand_off,
            self._replace_inferencer,
            workers=self._workers,
            rounds=self._rounds,
        )
        try:
            metrics = run()
        finally:
            self._threads = run.threads
            self._hangs = any(thread.is_alive() for thread in self._threads)
            session.stop_requested = threading.Event()
        step = [owned_copy(i.step_state, i.device) for i in session.inferencers]
        self._last_state = updater.state(step)
        return Result(
            self._last_state,
            self.counters,
            metrics,
            updater.acting_networks(),
            stopped=session.has_cycles_left,
            stop_reason=session.stop_reason if session.has_cycles_left else None,
        )

    def _check_run(self, state: AgentState, num_cycles: int, run_spec: RunSpec) -> None:
        if self._closed:
            raise UsageError("this loop is closed; make a new GymnasiumLoop")
        if self._hangs:
            raise UsageError("a thread of this loop still hangs; make a new GymnasiumLoop")
        check_count("num_cycles", num_cycles)
        if self._options.schedule == "lockstep" and num_cycles % self.num_inferencers:
            raise UsageError(
                f"num_cycles={num_cycles} must be divisible by the {self.num_inferencers} "
                "Inferencers in lockstep, whose rounds have one trajectory of each; use "
                f"{-(-num_cycles // self.num_inferencers) * self.num_inferencers}"
            )
        if self._session.attached.checkpointer is not None and state is not self._last_state:
            self._session.attached.checkpointer.check_new()
        programs = self._session.programs
        if state is self._last_state and programs is not None and programs.run == run_spec:
            return  # it is this loop's own
        check_state(
            state,
            jax.eval_shape(lambda key: self._new_state(key, run_spec), jax.random.key(0)),
        )

    def _prepare(self, state: AgentState, run_spec: RunSpec) -> Updater:
        """Build what no earlier run has left, and put state and Inferencers in place."""
        session = self._session
        updater, programs = self._updater, session.programs
        if (
            updater is None
            or programs is None
            or programs.run != run_spec
            or not programs.keys.fits(state.step[0])
        ):
            acting = jax.eval_shape(self.agent.acting_networks, state.networks, state.experience)
            programs = CyclePrograms(self.agent, acting, state.step[0], run_spec)
            for inferencer in session.inferencers:
                inferencer.run_cycle.use(programs)
            if not session.inferencers:
                new = (self._first_inferencer(j, programs) for j in range(self.num_inferencers))
                session.inferencers = list(new)
            session.programs = programs
            # A round that was kept has the length of the run before.
            session.counters.dropped_stop_cycles += len(session.kept_round)
            session.kept_round = []
            update_key = jax.random.fold_in(jax.random.key(self._options.seed), UPDATE_STREAM)
            skips = self._options.faults.on_not_finite == "skip"
            given = self.agent, self._mesh, update_key
            if self._managers:
                self._managers.make(run_spec)
                updater = ManagedUpdater(*given, self._managers, skip_not_finite=skips)
            else:
                updater = Updater(*given, skip_not_finite=skips, hosts=self._host_mesh)
            self._updater = updater
        if state is not self._last_state:
            self._begin_anew(state)
        return updater

    def _first_inferencer(self, index: int, programs: CyclePrograms) -> Inferencer:
        """Return an Inferencer for a run that has not begun; nodes that are lost are replaced."""

        def again() -> Inferencer:
            self._envs.make_again(index)
            return self._new_inferencer(index, programs)

        return self._starting(lambda: self._new_inferencer(index, programs), again)

    def _new_inferencer(self, index: int, programs: CyclePrograms) -> Inferencer:
        device = self.inference_devices[index // self._num_per_device]
        timer = PhaseTimer(*INFERENCER_PHASES)
        env = self._envs[index]
        schedule = self._options.schedule
        if isinstance(env, RemoteEnv):
            there = RemoteCycle(env, programs, device, timer)
            cycle: Cycle = there
            why = there.why
        else:
            kind = self._cycle_kind
            cycle, why = make_cycle(kind, env, programs, device, timer, schedule=schedule)
        self._cycle_reasons.add(why)
        staging = self._session.staging[device]
        return Inferencer(index, device, env, cycle, staging, timer, self._envs.thread_of(index))

    def _begin_anew(self, state: AgentState) -> None:
        session = self._session
        session.counters = Counters(env_restarts=self._starting.num_restarts)
        session.episodes = RecentEpisodes(session.episodes.teams)
        session.kept_round = []
        session.seconds_before = 0.0
        if self._managers:
            self._managers.clear()
        for inferencer, step_state in zip(session.inferencers, state.step, strict=True):
            inferencer.needs_reset = True
            inferencer.cycle = 0
            inferencer.dropped_cycles = 0
            inferencer.step_state = owned_copy(step_state, inferencer.device)

    # Going on where another process ended.

    def restore(self, checkpoint: Checkpoint, *, drop_replay: bool = False) -> AgentState:
        """Put this loop where a checkpoint was saved, and return the state to give to ``run()``.

        In lockstep the next ``run()`` goes on bit for bit, where the environments can be put back;
        ``resume_notes`` then says nothing. Other numbers of update devices, of Inferencers and of
        environments will do, where the experience fits or may be dropped; if the total of
        environments differs, step states begin anew.

        Args:
          checkpoint: From ``Checkpointer.load_newest()``.
          drop_replay: Begin with an empty replay where that of the checkpoint does not fit.

        Raises:
          UsageError: The checkpoint is of another agent or another environment, its experience
            does not fit, or this loop is closed or has run.
        """
        if self._closed or self._session.inferencers:
            raise UsageError(
                f"this loop {'is closed' if self._closed else 'has run'}; "
                "restore in a new GymnasiumLoop"
            )
        reader = SnapshotReader(checkpoint.snapshot)
        saved = reader.run_spec()
        run_spec = self._new_run_spec(saved.steps_per_cycle)
        self._envs.num_generations = reader.record["generations"]
        generation = self._envs.begin_generation()
        key = fold_in_count(self._envs.fresh_key(generation), checkpoint.env_steps)
        # An experience in the place of one that is dropped is alike on all hosts.
        dropped = jax.random.fold_in(jax.random.key(self._options.seed), DROPPED_STREAM)
        keys = key, fold_in_count(dropped, checkpoint.env_steps)
        resumed, replay = self._read(reader, run_spec, keys, drop_replay)
        self._make_envs_anew(resumed, reader, generation)
        self._prepare(resumed.state, run_spec)
        if self._managers:
            self._managers.put_back(replay)
            del replay
        self.resume_notes = [
            *resumed.notes,
            *put_session_back(
                self._session,
                reader,
                resumed,
                self._hand_off,
                lambda old: self._starting(lambda: self._replace_inferencer(old)),
            ),
        ]
        self._session.counters.env_restarts += self._starting.num_restarts
        if checkpoint.experience_env_steps < checkpoint.env_steps:
            self.resume_notes.append(
                f"the replay is that of {checkpoint.experience_env_steps:,} env steps"
            )
        if self._session.attached.checkpointer is not None:
            self._session.attached.checkpointer.resume_at(self._session.counters.updates)
            if resumed.replay_is_new:
                self._session.attached.checkpointer.begin_experience_anew()
        self._last_state = resumed.state
        return resumed.state

    def _read(
        self,
        reader: SnapshotReader,
        run_spec: RunSpec,
        keys: tuple[jax.Array, jax.Array],
        drop_replay: bool,
    ) -> tuple[Resumed, PyTree]:
        """Return what was saved, and the replay for trajectory managers, if there are any."""
        if self._managed_agent is None:
            return read_state(self.agent, reader, run_spec, keys, drop_replay), ()
        # The replay need not fit on an update device.
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            resumed = read_state(self._managed_agent, reader, run_spec, keys, drop_replay)
            drawn = jax.eval_shape(lambda: self.agent.new_state(keys[1], run_spec).experience)
            drawn = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), drawn)
            lasting = self._managed_agent.lasting_experience(resumed.state.experience)
            drawn = self.agent.with_lasting(drawn, lasting)
        state = resumed.state
        return resumed._replace(state=state._replace(experience=drawn)), state.experience

    def _make_envs_anew(self, resumed: Resumed, reader: SnapshotReader, generation: int) -> None:
        """Replace the environments that cannot be put back: they have the seeds with which the run
        began, and would play the same episodes again."""
        lost = [
            index
            for index in range(self.num_inferencers)
            if not (resumed.layout_fits and isinstance(reader.env(index), bytes))
        ]
        for index in lost:
            self._envs.close_of(index)
            self._starting(functools.partial(self._envs.make_anew, [index], generation))

    def _replace_inferencer(self, old: Inferencer) -> Inferencer:
        """Return an Inferencer with new environments and a new step state in the place of one."""
        programs = self._session.programs
        assert programs is not None
        index = old.index
        if not isinstance(old.failure, EnvHangError):
            with contextlib.suppress(Exception):  # it has failed already
                self._envs.close_of(index)
        else:  # its thread closes it, if it comes back
            if isinstance(env := self._envs[index], RemoteEnv):
                env.kill()
            self._envs.leave_thread(index)
        generation = self._envs.begin_generation()
        key = self._envs.fresh_key(generation)
        self._envs.make_anew([index], generation)
        new, run = self._new_inferencer(index, programs), programs.run
        all_envs = run.num_envs * run.num_inferencers * run.num_hosts
        step_state = self.agent.advance_step_state(
            self.agent.new_step_state(jax.random.fold_in(key, index), run, index),
            self._session.counters.env_steps // all_envs,
        )
        new.step_state = owned_copy(step_state, new.device)
        new.cycle = old.cycle + 2  # a gap: what it makes continues nothing
        new.dropped_cycles = old.dropped_cycles
        if old.position_wanted.is_set():
            new.position_wanted.set()
        new.left_position = old.left_position
        return new

    def last_transition(self) -> dict[str, np.ndarray]:
        """Return what the environments that failed were given last: ``obs`` and ``action`` by name.

        Empty where none failed in a step, or its cycle keeps nothing.
        """
        for inferencer in self._session.inferencers:
            of_env = isinstance(inferencer.failure, ActionError) or (
                inferencer.failure is not None and is_env_failure(inferencer.failure)
            )
            if of_env and hasattr(inferencer.run_cycle, "last_transition"):
                return inferencer.run_cycle.last_transition()
        return {}

    def newest_networks(self) -> PyTree | None:
        """Return the acting networks that were published last, also after a run that failed.

        None while nothing has been learned.
        """
        staged = self._session.staging[self.inference_devices[0]].newest()
        return staged.networks if staged is not None and staged.policy_version else None

    def stop(self) -> None:
        """End ``run()`` cleanly, as if it had reached ``num_cycles``; from any thread.

        Evaluations that are left are played when the run goes on. Called before
        ``run()``, it makes the next run end at once.
        """
        self._session.stop_requested.set()

    def close(self) -> None:
        """Free the environments; may be called twice.

        Environments in which a thread hangs are left open: native code that two threads use aborts.
        """
        if self._closed:
            return
        self._closed = True
        if self._workers:
            self._workers.stopping.set()
        hanging = [index for index, thread in enumerate(self._threads) if thread.is_alive()]
        for index in hanging:
            if index < self.num_inferencers and isinstance(env := self._envs[index], RemoteEnv):
                env.kill()
        try:
            self._envs.close(but=hanging)
        finally:
            if self._managers:
                self._managers.close()
            if self._workers:
                self._workers.close()

    def __enter__(self) -> GymnasiumLoop:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _changed(
    options: LoopOptions | None, changes: LoopKeywords, cycle: CycleKind | None
) -> LoopOptions:
    """Return ``options`` with the keywords of a loop in the place of their fields."""
    given: dict[str, Any] = dict(changes)
    if cycle is not None:
        given["cycle"] = cycle
    if "seed" in given:
        given["seed"] = check_seed(given["seed"])
    if not isinstance(options, LoopOptions | None):
        raise UsageError(f"options={shown(options)} must be a LoopOptions; or use keywords")
    others = {field.name for field in dataclasses.fields(Attached)} | {"inference_only"}
    return (options or LoopOptions()).changed(given, others)


def _warn_of_lost_steps(agent: Agent) -> None:
    warnings.warn(
        f"the last step before each truncation is not learned from: {type(agent).__name__} does "
        "not use the last observation of an episode, and this environment resets in the same step; "
        "use AutoresetMode.NEXT_STEP, or an agent with uses_final_obs=True and "
        "spec=sebulba.env_spec(env_factory) of the same factory",
        stacklevel=3,
    )
