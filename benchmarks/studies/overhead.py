"""``benchmarks overhead``: microseconds of our own code per vector step of one Inferencer.

This is the time of the stepped loop minus that of the bare loop, both with the same environment
that does nothing and the same policy that does nearly nothing. All that the loop adds counts, the
recording of the trajectory included. The environment has envpool's public interface, not its native
calls: the adapter calls its ``step``, while it steps a real pool by calls that cost less Python.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from gymnasium.vector import VectorEnv

from benchmarks.studies.bare import bare_loop
from benchmarks.studies.inference import acting_loop
from benchmarks.studies.null import NullAgent, NullConfig, NullPool, NullVectorEnv
from benchmarks.studies.tables import differences
from sebulba.envs import env_spec, make_env_factory
from sebulba.inference.episodes import EpisodeStatistics
from sebulba.inference.inferencer import INFERENCER_PHASES
from sebulba.metrics.timer import PhaseTimer
from sebulba.runs.jax_setup import configure_jax
from sebulba.tools.bench import harness
from sebulba.types import EnvStep, RunSpec

NUM_ENVS, NUM_CYCLES, STEPS_PER_CYCLE = 16, 10, 1000
ENVS: dict[str, type[NullVectorEnv]] = {"envpool": NullPool, "gymnasium": NullVectorEnv}
"""Environments by the adapter in front of them. The key of the JSON is that of the first, which is
the default and the faster one."""


class LoopCase:
    """The stepped loop on one null environment."""

    def __init__(self, make_env: type[NullVectorEnv], num_cycles: int, steps_per_cycle: int):
        """Make the loop."""
        factory = make_env_factory(make_env)
        agent = NullAgent(env_spec(factory), NullConfig())
        self._num_cycles, self._steps_per_cycle = num_cycles, steps_per_cycle
        self._consumed: list[float] = []
        self.loop = acting_loop(
            factory,
            agent,
            NUM_ENVS,
            1,
            "stepped",
            observe_cycle=lambda trajectory, infos: self._consumed.append(time.perf_counter()),
        )
        self._state = self.loop.new_state(0, steps_per_cycle)
        self.phases_us: dict[str, float] = {}
        """Microseconds per vector step in each phase of the Inferencer, in the last run."""

    def measure(self) -> float:
        """Return microseconds per vector step, from the first trajectory's arrival to the last's.

        The start and the end of a run, which cost time of their own, do not count.
        """
        self._consumed.clear()
        result = self.loop.run(self._state, self._num_cycles, self._steps_per_cycle)
        self._state = result.state
        steps_per_s = result.metrics["env_steps_per_s"] / NUM_ENVS
        self.phases_us = {
            phase: 1e6 * result.metrics[f"time/inferencer/{phase}"] / steps_per_s
            for phase in INFERENCER_PHASES
        }
        steps = (self._num_cycles - 1) * self._steps_per_cycle
        return 1e6 * (self._consumed[-1] - self._consumed[0]) / steps


def bare_case(make_env: type[NullVectorEnv], num_steps: int) -> Callable[[], float]:
    """Return what measures the bare loop, in microseconds per vector step."""
    env, agent, networks, step_state = _bare_parts(make_env)
    step = jax.jit(agent.act, donate_argnums=1)

    def measure() -> float:
        nonlocal step_state
        began = time.perf_counter()
        step_state = bare_loop(step, networks, step_state, env, num_steps)
        return 1e6 * (time.perf_counter() - began) / num_steps

    return measure


def _bare_parts(make_env: type[NullVectorEnv]) -> tuple[VectorEnv, NullAgent, Any, Any]:
    env = make_env(NUM_ENVS, range(NUM_ENVS))
    agent = NullAgent(env_spec(env), NullConfig())
    state = agent.new_state(jax.random.key(0), RunSpec(NUM_ENVS, 1, STEPS_PER_CYCLE, 1))
    return env, agent, state.networks, state.step[0]


def pieces_us(make_env: type[NullVectorEnv], num_calls: int) -> dict[str, float]:
    """Call each part of a step alone; return its microseconds per vector step.

    Args:
      make_env: Makes the environment.
      num_calls: Number of calls of each part.
    """
    env, agent, networks, step_state = _bare_parts(make_env)
    adapter = make_env_factory(make_env)(NUM_ENVS, list(range(NUM_ENVS)))
    step = jax.jit(agent.act, donate_argnums=1)
    action = np.zeros(NUM_ENVS, np.int32)
    row = adapter.reset()
    env_step = EnvStep(row.obs, action, row.reward, row.terminated, row.truncated, row.is_first)
    env.reset()
    flags = np.zeros((STEPS_PER_CYCLE, NUM_ENVS), np.bool_)
    cycle_statistics, timer = EpisodeStatistics(NUM_ENVS), PhaseTimer("act", "env_step")

    def policy() -> None:
        nonlocal step_state
        output, step_state = step(networks, step_state, env_step)
        np.asarray(output.action)

    def statistics_of_a_cycle() -> None:
        cycle_statistics.add(flags.astype(np.float32), flags, flags, flags)

    def two_phases() -> None:
        with timer.phase("act"):
            pass
        with timer.phase("env_step"):
            pass

    bare_env_us = _each_us(lambda: env.step(action), num_calls)
    return {
        "policy program": _each_us(policy, num_calls),
        "environment": bare_env_us,
        "adapter": _each_us(lambda: adapter.step(action), num_calls) - bare_env_us,
        "timer": _each_us(two_phases, num_calls),
        "statistics": _each_us(statistics_of_a_cycle, max(1, num_calls // STEPS_PER_CYCLE))
        / STEPS_PER_CYCLE,
    }


def _each_us(call: Callable[[], Any], num_calls: int) -> float:
    """Return the microseconds of a call: the best of five times ``num_calls``."""
    times = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(num_calls):
            call()
        times.append(time.perf_counter() - began)
    return 1e6 * min(times) / num_calls


def run(
    *,
    repeats: int = 5,
    num_cycles: int = NUM_CYCLES,
    steps_per_cycle: int = STEPS_PER_CYCLE,
    json_file: str | None = None,
) -> dict:
    """Measure, print tables, write JSON.

    The command has options for ``repeats`` and ``json_file``; a round needs 2 cycles at least.
    """
    configure_jax(compile_cache="off", preallocate=True)  # and otherwise as sebulba train does
    loops = {name: LoopCase(env, num_cycles, steps_per_cycle) for name, env in ENVS.items()}
    cases: dict[str, Callable[[], float]] = {}
    for name, env in ENVS.items():
        cases[f"{name} loop"] = loops[name].measure
        cases[f"{name} bare"] = bare_case(env, num_cycles * steps_per_cycle)
    try:
        figures = harness.interleave(cases, repeats)
    finally:
        for case in loops.values():
            case.loop.close()
    for name in ENVS:
        figures[f"{name} overhead"] = differences(figures, f"{name} loop", f"{name} bare")
    keys = keys_of(figures)
    pieces = {name: pieces_us(env, 10 * steps_per_cycle) for name, env in ENVS.items()}
    phases = {name: case.phases_us for name, case in loops.items()}
    harness.print_table(
        f"benchmarks overhead: environment and policy do nothing, 1 Inferencer x {NUM_ENVS} "
        "environments, stepped",
        "us per vector step",
        figures,
        [f"overhead_us_per_step: {keys['overhead_us_per_step']:.1f} (that of the fast default)"],
    )
    for name in ENVS:
        harness.print_rows(
            f"where the microseconds of the last round's loop went, {name} adapter",
            ["in the loop, us", "of these alone, us"],
            breakdown(figures[f"{name} loop"][-1], phases[name], pieces[name]),
        )
    sizes = {"num_envs": NUM_ENVS, "num_cycles": num_cycles, "steps_per_cycle": steps_per_cycle}
    keys_and_parts = {**keys, "phases_us": phases, "pieces_us": pieces}
    result = harness.record(keys_and_parts, figures, {**sizes, "repeats": repeats})
    harness.write_json(json_file, result)
    return result


def keys_of(figures: Mapping[str, list[float]]) -> dict[str, float]:
    """Return the keys of the JSON: median and spread, and the median with Gymnasium's adapter."""
    fast = figures["envpool overhead"]
    return {
        "overhead_us_per_step": statistics.median(fast),
        "overhead_us_per_step_lowest": min(fast),
        "overhead_us_per_step_highest": max(fast),
        "gymnasium_overhead_us_per_step": statistics.median(figures["gymnasium overhead"]),
    }


def breakdown(
    total_us: float, phases_us: Mapping[str, float], pieces_us: Mapping[str, float]
) -> dict[str, list[str]]:
    """Return, by phase, its microseconds in the loop and those of its parts when called alone.

    Args:
      total_us: Microseconds per vector step of the loop.
      phases_us: Microseconds in each phase of its Inferencer; the rest is spent between them.
      pieces_us: Return value of the function of that name.
    """
    alone = {
        "act": ["policy program"],
        "env_step": ["environment", "adapter"],
        "finish": ["statistics"],
    }
    between = {"between the phases": total_us - sum(phases_us.values())}
    rows = {}
    for phase, in_loop_us in {**phases_us, **between}.items():
        names = ["timer"] if phase in between else alone.get(phase, [])
        known = " + ".join(f"{name} {pieces_us[name]:.1f}" for name in names)
        rows[phase] = [f"{in_loop_us:.1f}", known]
    return rows
