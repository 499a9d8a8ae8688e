"""The programs of a training run, each measured alone, warm and at full speed.

They are built from the same pieces and the same configuration as the run's programs, with
environments of their own.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from sebulba.agent import Agent, AgentState
from sebulba.cluster.parts import new_places
from sebulba.configs.experiment import ExperimentConfig
from sebulba.errors import EnvError, UsageError
from sebulba.inference.cores import Cores, threads_run_on
from sebulba.inference.cycle import Cycle, CyclePrograms
from sebulba.inference.inferencer import INFERENCER_PHASES
from sebulba.inference.loop_envs import LoopEnvs
from sebulba.inference.places import Given, Places
from sebulba.learning.update import Updater
from sebulba.loops.devices import place
from sebulba.metrics.timer import PhaseTimer
from sebulba.support.trees import on_device, owned_copy
from sebulba.tools.bench import ceiling, raw_env
from sebulba.tools.bench.ceiling import ALONE, RAW, RELAY, Cost
from sebulba.transport.hand_off import HandOffToMesh
from sebulba.transport.item import Item
from sebulba.transport.mesh import UpdateMesh
from sebulba.types import (
    EnvAdapter,
    EnvFactory,
    EnvOutput,
    EnvSpec,
    FusedEnv,
    MultiAgentSpec,
    PyTree,
    RunSpec,
)

SHARE_OF_PART = 0.25
"""Duration of the measurement of a part of inference, as a share of that of a stage."""
MOST_COPIES, MOST_COPIED_BYTES = 64, 2**28
"""Limits to the trajectories that are prepared for the update before the clock starts."""

Work = Callable[[float], int]
"""Works until ``time.perf_counter()`` passes its argument, at least once; returns env steps."""


def repeated(
    once: Callable[[], None], env_steps: int, finish: Callable[[], None] = lambda: None
) -> Work:
    """Return a work that repeats ``once``, of ``env_steps`` each, and then calls ``finish``."""

    def work(until: float) -> int:
        done = 0
        while True:
            once()
            done += env_steps
            if time.perf_counter() >= until:
                finish()
                return done

    return work


def measure_together(
    works: Sequence[Work],
    seconds: float,
    cores: Sequence[Cores | None] | None = None,
    cpu_clock: Callable[[], float] = time.process_time,
) -> Cost:
    """Measure works that run at the same time, each in a thread of its own.

    Each works once before the clock starts, so that caches are warm. The threads end up to one work
    apart, so the wall time of a step is taken from the sum of their speeds.
    """
    cpu_began_s = 0.0

    def begin() -> None:
        nonlocal cpu_began_s
        cpu_began_s = cpu_clock()

    start = threading.Barrier(len(works), action=begin)

    def one(work: Work, cores: Cores | None) -> tuple[int, float]:
        with threads_run_on(cores):
            start.wait()
            began_s = time.perf_counter()
            env_steps = work(began_s + seconds)
            return env_steps, env_steps / (time.perf_counter() - began_s)

    with concurrent.futures.ThreadPoolExecutor(len(works)) as threads:
        list(threads.map(lambda work: work(0.0), works))
        results = list(threads.map(one, works, cores or [None] * len(works)))
    cpu_s = cpu_clock() - cpu_began_s
    env_steps = sum(steps for steps, _ in results)
    speed = sum(per_s for _, per_s in results)
    return Cost(wall_us=1e6 / speed, cpu_us=1e6 * cpu_s / env_steps)


class Stages:
    """Cycle, hand-off and update of a run, and the environment and the inference of a cycle."""

    def __init__(
        self, config: ExperimentConfig, factory: EnvFactory, agent: Agent, seconds: float
    ) -> None:
        """Choose devices; the first ``use`` makes environments and programs."""
        self._placed = place(config, factory, agent, config.num_envs)
        assert isinstance(self._placed.options, ExperimentConfig)
        self._config = config = self._placed.options
        self._seconds = seconds
        update_devices, factory = self._placed.update, self._placed.factory
        if self._placed.by_member:
            raise UsageError("sebulba bench measures one update; give update_devices without names")
        self._mesh = UpdateMesh(update_devices)
        self.per_device = max(1, config.num_inferencers_per_device or 0)
        """Inferencers of an inference device."""
        self._devices = [
            device for device in self._placed.inference for _ in range(self.per_device)
        ]
        self._run = RunSpec(
            config.num_envs, len(self._devices), config.steps_per_cycle, len(update_devices)
        )
        self._agent = agent = agent.for_run(self._run)
        self._factory = factory
        self._given = Given(factory, agent, config.cycle, config.schedule)
        self._places = Places(self._given)
        """Where the environments of the cycles are."""
        self._cores: Sequence[Cores | None] = ()
        self._envs: list[LoopEnvs] = []
        self._raw: list[raw_env.Raw] = []
        self.raw_name = ""
        """How the fastest raw environment is stepped."""
        self._works: dict[str, list[Work]] = {}
        self._hand_off = HandOffToMesh(agent, self._mesh)
        self._updater = Updater(agent, self._mesh, jax.random.key(config.seed))
        self._updater.begin(self._run)
        self._consumed = self._updates = 0
        self.kind = ""
        """How a cycle runs: ``"stepped"`` or ``"fused"``; known after the first ``use``."""
        self.could_fuse = False
        """The cycle is stepped, and could be fused."""

    @property
    def num_inferencers(self) -> int:
        """Number of Inferencers on all inference devices."""
        return self._run.num_inferencers

    @property
    def env_steps_per_cycle(self) -> int:
        """Environment steps in one trajectory."""
        return self._run.num_envs * self._run.steps_per_cycle

    @property
    def shares_cores(self) -> bool:
        """Every stage runs on the CPU's cores."""
        devices = [*self._devices, *self._mesh.local.devices.flat]
        is_here = self._config.cluster.address in ("threads", "processes", "local")
        return is_here and all(device.platform == "cpu" for device in devices)

    def use(self, state: AgentState, cycles: int) -> None:
        """Measure from now on with this state, which is copied, after so many cycles."""
        self._updater.place(state)
        self._consumed = cycles
        acting = self._agent.staged(state.networks, state.experience)
        self._networks = {device: owned_copy(acting, device) for device in set(self._devices)}
        jax.block_until_ready(self._networks)
        if not self._works:
            self._build(state)

    def use_new_state(self) -> None:
        """Measure with a state that has not been trained."""
        state = jax.jit(lambda key: self._agent.new_state(key, self._run))(jax.random.key(0))
        self.use(state, cycles=0)

    def _build(self, state: AgentState) -> None:
        acting = jax.eval_shape(lambda x: x, self._networks[self._devices[0]])
        programs = CyclePrograms(self._agent, acting, state.step[0], self._run)
        config, number = self._config, self.num_inferencers
        self._places = new_places(self._given, config, number)
        pin = config.pin_inferencers and not config.inline and not self._placed.unpinned
        self._cores = self._places.cores(number, pin=pin)
        envs = self._make_envs(self._places)
        cycles = [
            self._places.make_cycle(env, programs, device, PhaseTimer(*INFERENCER_PHASES))[0]
            for env, device in zip(envs, self._devices, strict=True)
        ]
        self.kind = cycles[0].kind
        self.could_fuse = (
            self.kind == "stepped"
            and self._devices[0].platform == "cpu"
            and not self._places.nodes
            and not isinstance(envs[0].fused(), str)
        )
        self._kept: list[Any] = [None] * len(envs)
        self._works["cycle"] = [
            self._cycle_work(i, cycle, step_state, self._kept)
            for i, (cycle, step_state) in enumerate(zip(cycles, state.step, strict=True))
        ]
        for work in self._works["cycle"]:
            work(0.0)
        # What replaces the environment runs here, as the environment did.
        kind: Any = self.kind
        here: Any = Places(self._given._replace(kind=kind))
        self._works["inference"] = [
            self._cycle_work(
                i,
                here.make_cycle(
                    ReplayEnv(env.spec, kept),
                    programs,
                    self._devices[i],
                    PhaseTimer(*INFERENCER_PHASES),
                )[0],
                kept.final_step_state,
                [None] * len(envs),
            )
            for i, (env, kept) in enumerate(zip(envs, self._kept, strict=True))
        ]
        if self.kind == "stepped" and not self._places.nodes:
            self._works |= self._acting(programs)
        if isinstance(self._agent.spec, EnvSpec):
            num_envs = self._run.num_envs * self.num_inferencers
            self._raw = raw_env.raw_envs(config.env, self._factory, num_envs)
        self._works["environment"] = [
            env_work(env, jax.tree.map(np.array, kept.trajectory.action), self.kind, device)
            for env, kept, device in zip(
                self._make_envs(Places(self._given)), self._kept, self._devices, strict=True
            )
        ]

    def _acting(self, programs: CyclePrograms) -> dict[str, list[Work]]:
        """Return what uploads a row, acts in it and fetches actions, on the first device."""
        device, kept = self._devices[0], self._kept[0]
        host = [np.array(leaf[0]) for leaf in jax.tree.leaves(kept.trajectory.env_step)]
        row = jax.device_put(host, device)
        networks = jax.tree.leaves(self._networks[device])
        step_state = programs.keys.unwrap(owned_copy(kept.final_step_state, device))
        action, _, step_state = programs.act(networks, step_state, row)
        actions: list[Any] = []

        def upload() -> None:
            jax.block_until_ready(jax.device_put(host, device))

        def act() -> None:
            nonlocal step_state
            one, _, step_state = programs.act(networks, step_state, row)
            jax.block_until_ready(one)

        def fetch() -> None:
            if not actions:  # an array keeps what was fetched
                actions.extend(programs.copy([action] * MOST_COPIES))
                jax.block_until_ready(actions)
            jax.device_get(actions.pop())

        each = {"upload": upload, "act": act, "fetch": fetch}
        return {name: [repeated(work, self._run.num_envs)] for name, work in each.items()}

    def _make_envs(self, places: Places) -> list[EnvAdapter]:
        spec, config = self._agent.spec, self._config
        envs = LoopEnvs(places.make, spec, config.seed, config.num_envs, self._cores)
        self._envs.append(envs)
        return [envs[i] for i in range(self.num_inferencers)]

    def _cycle_work(self, i: int, cycle: Cycle, step_state: PyTree, kept: list[Any]) -> Work:
        """Return the cycles of Inferencer ``i``; ``kept[i]`` is the output of the last."""
        cycle.reset()
        device, never = self._devices[i], threading.Event()
        step_state = owned_copy(step_state, device)

        def once() -> None:
            nonlocal step_state
            kept[i], step_state = cycle.run(self._networks[device], step_state, never)

        def finish() -> None:
            jax.block_until_ready((kept[i].trajectory, kept[i].final_step_state))

        return repeated(once, self.env_steps_per_cycle, finish)

    def measure(self) -> dict[str, Cost]:
        """Measure every stage once, after a call of ``use``; and the way of what is elsewhere."""
        before, cpu_before_s = self._traffic(), time.process_time()
        costs = {"cycle": self.measure_cycle()}
        if self._places.nodes:
            costs[RELAY] = self._relay(before, time.process_time() - cpu_before_s)
        elif self.num_inferencers > 1 and self.kind == "stepped":
            costs[ALONE] = measure_together(self._works["environment"][:1], self._seconds / 2)
        for part in ceiling.ACTING:
            if part in self._works:
                costs[part] = measure_together(self._works[part], SHARE_OF_PART * self._seconds)
        if self._raw:
            found = [raw_env.cost_of(raw, self._seconds / len(self._raw)) for raw in self._raw]
            costs[RAW] = min(found, key=lambda cost: cost.wall_us)
            self.raw_name = self._raw[found.index(costs[RAW])].name
        return costs | {
            "hand-off": self._measure_hand_off(),
            "update": self._measure_update(),
            "environment": self._measure_part("environment"),
            "inference": self._measure_part("inference"),
        }

    def measure_cycle(self) -> Cost:
        """Measure the cycles of all Inferencers, after a call of ``use``."""

        def cpu_s() -> float:
            return time.process_time() + self._places.cpu_s

        return measure_together(self._works["cycle"], self._seconds, self._cores, cpu_s)

    def _measure_part(self, part: str) -> Cost:
        """Measure a part of a cycle, without what shares of it wait for each other elsewhere."""
        if not self._places.nodes:
            return measure_together(self._works[part], self._seconds, self._cores)
        # Here they would share one interpreter; elsewhere each process has its own.
        one = measure_together(self._works[part][:1], self._seconds)
        return Cost(one.wall_us / len(self._places.nodes), one.cpu_us)

    def _traffic(self) -> tuple[int, float]:
        """Return how many cycles have come from elsewhere, and the seconds of their way."""
        traffic = [node.traffic for node in self._places.nodes]
        return sum(one.items for one in traffic), sum(one.relay_s for one in traffic)

    def _relay(self, before: tuple[int, float], cpu_s: float) -> Cost:
        """Return what the way of items costs; its CPU time is that of this process."""
        items, relay_s = (now - was for now, was in zip(self._traffic(), before, strict=True))
        env_steps = max(1, items) * self.env_steps_per_cycle
        return Cost(1e6 * relay_s / env_steps / self.num_inferencers, 1e6 * cpu_s / env_steps)

    def _measure_hand_off(self) -> Cost:
        def once() -> None:
            # Without waiting, transfers to another device would pile up.
            jax.block_until_ready(self._hand_off(self._kept[0]))

        return measure_together([repeated(once, self.env_steps_per_cycle)], self._seconds / 2)

    def _measure_update(self) -> Cost:
        """Measure updates and publishing as the update loop does them.

        The update donates its trajectory, so copies are made before the clock starts.
        """
        placed = self._hand_off(self._kept[0])
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(placed) if isinstance(leaf, jax.Array))
        most_copies = max(1, min(MOST_COPIES, MOST_COPIED_BYTES // max(1, size)))
        warm_up_s, _ = self._time_updates(placed, 2)
        wanted = math.ceil(2 * self._seconds / max(warm_up_s, 1e-9))
        num_copies = min(most_copies, wanted)
        wall_s = cpu_s = 0.0
        env_steps = 0
        while wall_s < self._seconds:
            more_wall_s, more_cpu_s = self._time_updates(placed, num_copies)
            wall_s += more_wall_s
            cpu_s += more_cpu_s
            env_steps += num_copies * self.env_steps_per_cycle
        self._updater.take_metrics()
        return Cost(wall_us=1e6 * wall_s / env_steps, cpu_us=1e6 * cpu_s / env_steps)

    def _time_updates(self, placed: Item, num_copies: int) -> tuple[float, float]:
        """Return the wall and CPU seconds of learning from copies of one trajectory."""
        copies = [
            jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, placed)
            for _ in range(num_copies)
        ]
        jax.block_until_ready(copies)
        began_s, cpu_began_s = time.perf_counter(), time.process_time()
        for item in copies:
            self._consume(item)
        self._updater.wait()
        return time.perf_counter() - began_s, time.process_time() - cpu_began_s

    def _consume(self, item: Item) -> None:
        due = self._agent.num_off_policy_optims_per_cycle(self._consumed + 1)
        acting = self._updater.consume(item, updates=self._updates, due=due)
        self._consumed += 1
        self._updates += due
        if acting is None:
            return
        for device in set(self._devices):
            on_device(acting, device)

    def close(self) -> None:
        """Free the environments."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._places.close)
            for env in self._envs:
                stack.callback(env.close)
            for raw in self._raw:
                stack.callback(raw.close)


class ReplayEnv:
    """Returns the rows of a kept cycle, whatever the action, and so costs nothing."""

    def __init__(self, spec: EnvSpec | MultiAgentSpec, made: Item) -> None:
        """Keep a host copy of what a cycle made."""
        self.spec = spec
        steps, infos = made.trajectory.env_step, made.step_infos
        shown = (steps.obs, steps.reward, steps.terminated, steps.truncated, steps.is_first)
        later, beside = jax.tree.map(lambda x: x[1:], (shown, (steps.final, steps.acting)))
        rows = (*later, infos.unclipped_reward, infos.episode_end, *beside)
        self._rows = EnvOutput(*jax.tree.map(np.array, rows))
        self._num_rows, self.num_envs = infos.episode_end.shape
        self._outputs = [
            jax.tree.map(lambda x, t=t: x[t], self._rows) for t in range(self._num_rows)
        ]
        self._t = 0

    def reset(self) -> EnvOutput:
        """Return the first row as the beginning of an episode."""
        first = self._outputs[0]
        is_first = jax.tree.map(np.ones_like, first.is_first)
        nothing = jax.tree.map(np.zeros_like, first)
        return nothing._replace(obs=first.obs, is_first=is_first, acting=first.acting)

    def step(self, action: np.ndarray) -> EnvOutput:
        """Return the next row."""
        del action
        self._t = (self._t + 1) % self._num_rows
        return self._outputs[self._t]

    def fused(self) -> FusedEnv:
        """Return the same as JAX functions; the state is the rows and the index of the next."""

        def step(state: PyTree, action: jax.Array) -> tuple[PyTree, EnvOutput, jax.Array]:
            rows, t = state
            output = jax.tree.map(
                lambda x: jax.lax.dynamic_index_in_dim(x, t, keepdims=False), rows
            )
            del action
            return (rows, (t + 1) % self._num_rows), output, jax.numpy.int32(0)

        return FusedEnv((self._rows, np.int32(0)), step)

    def state(self) -> str:
        """Return why there is no state."""
        return "rows that are replayed have no state to save"

    def put_back(self, state: bytes) -> None:
        """Raise EnvError."""
        raise EnvError(self.state())

    def close(self) -> None:
        """Do nothing."""


def env_work(env: EnvAdapter, actions: PyTree, kind: str, device: jax.Device) -> Work:
    """Return a work that only steps ``env`` as a cycle of ``kind`` would, with valid ``actions [T,
    B, ...]`` that are taken again and again."""
    env.reset()
    num_steps, num_envs = jax.tree.leaves(actions)[0].shape[:2]
    fused = env.fused() if kind == "fused" else ""
    if isinstance(fused, str):
        each = [jax.tree.map(lambda x, t=t: x[t], actions) for t in range(num_steps)]

        def step_all() -> None:
            for action in each:
                env.step(action)

    else:
        run = jax.jit(lambda state, actions: _scan_env(fused, state, actions), donate_argnums=0)
        state = jax.device_put(jax.tree.map(lambda x: np.array(x), fused.state), device)
        actions_there = jax.device_put(jax.tree.map(np.array, actions), device)

        def step_all() -> None:
            nonlocal state
            state, ends = run(state, actions_there)
            ends.block_until_ready()

    return repeated(step_all, num_steps * num_envs)


def _scan_env(fused: FusedEnv, state: PyTree, actions: PyTree) -> tuple[PyTree, jax.Array]:
    def body(state: PyTree, action: jax.Array) -> tuple[PyTree, jax.Array]:
        state, output, _ = fused.step(state, action)
        return state, output.episode_end

    return jax.lax.scan(body, state, actions)
