"""GymnasiumLoop: Inferencer threads on one side of a queue, the pmapped update on the other.

Pmapped: one program on each update device with ``lax.pmean`` between them, written as
``jax.jit(jax.shard_map(...))``, which is what ``jax.pmap`` lowers to (``learning/update.py``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Unpack

import jax
import numpy as np

from sebulba.agent import Agent, AgentState, without_bank
from sebulba.checkpoints.checkpointer import Checkpoint, Checkpointer
from sebulba.cluster.parts import join, parts
from sebulba.envs import make_env_factory
from sebulba.envs.seeds import ENVS_A_GENERATION, check_seed
from sebulba.errors import ActionError, UsageError, is_env_failure, shown
from sebulba.inference.cycle import CyclePrograms
from sebulba.inference.hangs import AnyThread
from sebulba.inference.loop_envs import LoopEnvs
from sebulba.inference.places import Given, MakeCycle
from sebulba.loops.agent_contract import check_contract, check_is_agent, check_state
from sebulba.loops.devices import place
from sebulba.loops.evaluation_thread import Evaluator
from sebulba.loops.inferencer_maker import InferencerMaker
from sebulba.loops.interrupt import KeptInterrupt
from sebulba.loops.jax_settings import check_jax_settings
from sebulba.loops.memory import memory_in_words
from sebulba.loops.resuming import put_session_back, read_state
from sebulba.loops.run import Run
from sebulba.loops.session import Attached, ObserveCycle, OnHang, Session
from sebulba.loops.snapshot_trees import SnapshotReader
from sebulba.metrics.counters import Counters
from sebulba.metrics.window import RecentEpisodes, teams_of
from sebulba.options import CycleKind, LoopKeywords, LoopOptions
from sebulba.support.checks import check_count, check_divisible
from sebulba.support.key_streams import DROPPED_STREAM, HOST_STREAM
from sebulba.support.trees import fold_in_count, owned_copy
from sebulba.transport.staging import Staging
from sebulba.types import Callback, EnvFactory, MetricWriter, PyTree, RunSpec

STEPS_PER_CYCLE = 32
"""Unroll length of a new run where none is given."""
COUNTED_BY_ALL = ("cycles", "env_steps", "updates", "policy_version", "warm_up_from")
"""Counters that are the same on all hosts: on some of them depends when updates are due."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What ``run()`` returns."""

    state: AgentState = dataclasses.field(repr=False)
    """The final state, on the update devices; give it to the next ``run()`` to go on."""
    counters: Counters
    """Counts since the state was new."""
    metrics: dict[str, Any]
    """The last window's record."""
    acting_networks: PyTree = dataclasses.field(repr=False)
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
        self._options = options = _changed(options, changes, None if callable(cycle) else cycle)
        join(options.distributed, inference_only=inference_only)
        factory = make_env_factory(env_factory)
        self.placed = placed = place(
            options, factory, agent, num_envs, inference_devices, update_devices
        )
        options = placed.options
        self.inference_devices, self.update_devices = placed.inference, placed.update
        devices = placed.num_shares
        what = f"the {devices} update devices"
        if placed.by_member:
            what = f"{devices}, as each member splits them over devices of its own"
        check_divisible("num_envs", num_envs, devices, what)
        self.num_envs = num_envs
        kind = cycle if callable(cycle) else options.cycle
        self._parts = parts(
            Given(placed.factory, agent, kind, options.schedule),
            options,
            self.update_devices,
            self.num_inferencers,
            placed.by_member,
            inference_only=inference_only,
        )
        agent = self.agent = self._parts.agent
        if self._parts.peers.index:
            evaluator = None  # what host 0 plays is the policy of all
        self._session = Session(
            options,
            agent,
            Attached(
                metric_writer, tuple(callbacks), observe_cycle, evaluator, checkpointer, on_hang
            ),
            {device: Staging() for device in self.inference_devices},
            inference_only,
            self._parts.peers.number,
            episodes=RecentEpisodes(teams_of(agent.spec)),
        )
        self._running = threading.Lock()
        self._closed = self._hangs = False
        self._threads: list[AnyThread] = []
        """Threads of the last run: those of the Inferencers in their order, then others."""
        self._checked: RunSpec | None = None
        """Sizes for which the agent keeps its contract."""
        self._last_state: AgentState | None = None
        self._maker = InferencerMaker(self._session, self._parts.inferencers)
        self.resume_notes: list[str] = []
        """What ``restore`` could not put back, for people."""
        self._envs = self._session.envs = self._make_envs()
        if self._envs[0].spec.final_obs and not (agent.sees_final_obs or inference_only):
            warnings.warn(
                "the last step before each truncation is not learned from: "
                f"{type(agent).__name__} does not use the last observation of an episode, and this "
                "environment resets in the same step; use AutoresetMode.NEXT_STEP, or an agent "
                "with uses_final_obs=True and spec=sebulba.env_spec(env_factory) of the same "
                "factory",
                stacklevel=2,
            )

    # Set-up.

    def _make_envs(self) -> LoopEnvs:
        options, places = self._options, self._parts.inferencers
        pin = options.pin_inferencers and not options.inline and not self.placed.unpinned
        with contextlib.ExitStack() as stack:
            stack.callback(self._parts.close)
            envs = LoopEnvs(
                places.make,
                self.agent.spec,
                options.seed,
                self.num_envs,
                places.cores(self.num_inferencers, pin=pin),
                inline=options.inline,
                host=self._parts.peers.index,
                starting=places.start,
            )
            stack.pop_all()
        return envs

    @property
    def num_inferencers(self) -> int:
        """Inferencers over all inference devices."""
        per_device = self.placed.options.num_inferencers_per_device
        assert per_device is not None, "place has chosen"
        return max(1, per_device) * len(self.inference_devices)

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
        run_spec = self.run_spec(steps_per_cycle)
        # As one program: initializers run operation by operation take twice as long to compile.
        with self._memory_in_words(steps_per_cycle):
            return jax.jit(lambda key: self._new_state(key, run_spec))(key)

    def _memory_in_words(self, steps_per_cycle: int) -> contextlib.AbstractContextManager[None]:
        return memory_in_words(self.agent, self._sizes(steps_per_cycle), self._options.queue_size)

    def _sizes(self, steps: int) -> RunSpec:
        shares, hosts = self.placed.num_shares, self._session.num_hosts
        return RunSpec(self.num_envs, self.num_inferencers, steps, shares, hosts)

    def _new_state(self, key: jax.Array, run_spec: RunSpec) -> AgentState:
        """Return a new state; each host has step states of its own, and all else alike."""
        state = self.agent.new_state(key, run_spec)
        if not (host := self._parts.peers.index):
            return state
        key = jax.random.fold_in(jax.random.fold_in(key, HOST_STREAM), host)
        step = (
            self.agent.new_step_state(jax.random.fold_in(key, j), run_spec, j)
            for j in range(run_spec.num_inferencers)
        )
        return state._replace(step=tuple(step))

    def run_spec(self, steps_per_cycle: int) -> RunSpec:
        """Return the sizes of a run; UsageError if the agent breaks its contract at these."""
        check_count("steps_per_cycle", steps_per_cycle)
        run_spec = self._sizes(steps_per_cycle)
        if run_spec != self._checked:
            self.agent = self._session.agent = self.agent.for_run(run_spec)
            check_contract(self.agent, run_spec, learns=not self._session.inference_only)
            self._checked = run_spec
        return run_spec

    def describe(self) -> str:
        """Say in a line which devices do what and, once run, how cycles run and why."""

        def names(devices: Sequence[jax.Device]) -> str:
            return ", ".join(f"{d.platform}:{d.id}" for d in devices)

        of_members = (f"{n} on {names(own)}" for n, own in self.placed.by_member.items())
        updates = ", ".join(of_members) or f"on {names(self.update_devices)}"
        kinds = {inferencer.run_cycle.kind for inferencer in self._session.inferencers}
        how = f"; {'/'.join(sorted(kinds))} cycles ({'; '.join(sorted(self._maker.reasons))})"
        return (
            f"{self.num_inferencers} Inferencer{'s' * (self.num_inferencers > 1)} x "
            f"{self.num_envs} environment{'s' * (self.num_envs > 1)} on "
            f"{names(self.inference_devices)}; updates {updates}; "
            f"{self._options.schedule}{how if kinds else ''}{self._parts.peers}"
        )

    def describe_nodes(self) -> list[str]:
        """Say in a line each what the nodes with Inferencers do, if there are any."""
        return self._parts.inferencers.lines(self._session.inferencers)

    @property
    def cpu_elsewhere_s(self) -> float:
        """CPU seconds of the nodes with Inferencers, as of the last cycle of each."""
        return self._parts.inferencers.cpu_s

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
            return Result(state, self.counters, {}, without_bank(networks))
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
                "to resume from its newest checkpoint"
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
            with interrupt, contextlib.ExitStack() as stack:
                run = functools.partial(self._run, given, num_cycles, steps_per_cycle)
                stack.enter_context(self._memory_in_words(steps_per_cycle))
                return self._parts.peers.run(run, self._session.attached.on_hang)
        finally:
            interrupt.restore()
            if interrupt.came:
                self._session.stop_requested = threading.Event()  # for the next run
            self._running.release()

    def _check_hosts(self, num_cycles: int, run_spec: RunSpec) -> None:
        """Raise UsageError unless all hosts are to do the same."""
        options = self._options
        self._parts.peers.check_same(
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
        run_spec = self.run_spec(steps_per_cycle)
        self._check_run(state, num_cycles, run_spec)
        self._check_hosts(num_cycles, run_spec)
        self._parts.inferencers.begin()
        self._prepare(state, run_spec)
        updater = self._parts.updater
        updater.place(state)
        self._last_state = None  # until this run has ended well
        del state  # so that a large replay is in memory once, unless the caller keeps the state
        session.target, session.stop_reason = session.counters.cycles + num_cycles, None
        run = Run(session, self._parts, self._maker.replace)
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
            without_bank(updater.acting_networks()),
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

    def _prepare(self, state: AgentState, run_spec: RunSpec) -> None:
        """Build what no earlier run has left, and put state and Inferencers in place."""
        session = self._session
        programs = session.programs
        if programs is None or programs.run != run_spec or not programs.keys.fits(state.step[0]):
            acting = jax.eval_shape(self.agent.staged, state.networks, state.experience)
            programs = CyclePrograms(self.agent, acting, state.step[0], run_spec)
            for inferencer in session.inferencers:
                inferencer.run_cycle.use(programs)
            if not session.inferencers:
                new = (self._maker.first(j, programs) for j in range(self.num_inferencers))
                session.inferencers = list(new)
            session.programs = programs
            # A round that was kept has the length of the run before.
            session.counters.dropped_stop_cycles += len(session.kept_round)
            session.kept_round = []
            self._parts.updater.begin(run_spec)
        if state is not self._last_state:
            self._begin_anew(state)

    def _begin_anew(self, state: AgentState) -> None:
        session = self._session
        session.counters = Counters(env_restarts=self._parts.inferencers.num_restarts)
        session.episodes = RecentEpisodes(session.episodes.teams)
        session.kept_round = []
        session.seconds_before = 0.0
        self._parts.updater.clear()
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
        reader = SnapshotReader(checkpoint.snapshot, self.agent.zero_if_unsaved)
        saved = reader.run_spec()
        run_spec = self.run_spec(saved.steps_per_cycle)
        self._envs.num_generations = reader.record["generations"]
        generation = self._envs.begin_generation()
        key = fold_in_count(self._envs.fresh_key(generation), checkpoint.env_steps)
        # An experience in the place of one that is dropped is alike on all hosts.
        dropped = jax.random.fold_in(jax.random.key(self._options.seed), DROPPED_STREAM)
        keys = key, fold_in_count(dropped, checkpoint.env_steps)
        updater = self._parts.updater
        with self._memory_in_words(saved.steps_per_cycle):
            resumed = updater.read(
                lambda agent: read_state(agent, reader, run_spec, keys, drop_replay), run_spec
            )
        for index in range(self.num_inferencers):
            if not (resumed.layout_fits and isinstance(reader.env(index), bytes)):
                # It has the seeds with which the run began, and would play the same episodes again.
                self._maker.make_envs_anew(index, generation)
        self._prepare(resumed.state, run_spec)
        updater.put_back()
        self.resume_notes = [
            *resumed.notes,
            *put_session_back(
                self._session,
                reader,
                resumed,
                self._parts.hand_off,
                self._maker.replace_at_start,
            ),
        ]
        self._session.counters.env_restarts += self._parts.inferencers.num_restarts
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
        return without_bank(staged.networks) if staged and staged.policy_version else None

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
        self._parts.inferencers.stop()
        hanging = [index for index, thread in enumerate(self._threads) if thread.is_alive()]
        for index in hanging:
            if index < self.num_inferencers:
                self._parts.inferencers.kill(self._envs[index])
        try:
            self._envs.close(but=hanging)
        finally:
            self._parts.close()

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
