"""``benchmarks inference``: how near the loop's acting is to a bare loop, and what jitting brings.

SimplePolicyGradient with 5 hidden layers of 200 units acts in CartPole-v1 without learning:
20 cycles of 100 steps, 16 environments an Inferencer.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import statistics
import time
from collections.abc import Callable

import jax

from benchmarks.studies.bare import bare_loop
from benchmarks.studies.plain_cycle import PlainCycle
from benchmarks.studies.prototype import make_pool
from sebulba.agent import Agent
from sebulba.agents.configs import SimplePolicyGradientConfig, make_agent
from sebulba.envs import env_spec, seed_block
from sebulba.inference.places import MakeCycle
from sebulba.loops.gymnasium_loop import GymnasiumLoop
from sebulba.loops.session import ObserveCycle
from sebulba.options import CycleKind
from sebulba.runs.jax_setup import configure_jax
from sebulba.tools.bench import harness
from sebulba.types import EnvFactory, RunSpec

ENV, NUM_ENVS, NUM_CYCLES, STEPS_PER_CYCLE, NUM_INFERENCERS = "CartPole-v1", 16, 20, 100, 2


def acting_loop(
    env: str | EnvFactory,
    agent: Agent,
    num_envs: int,
    num_inferencers: int,
    cycle: CycleKind | MakeCycle,
    observe_cycle: ObserveCycle | None = None,
) -> GymnasiumLoop:
    """Return a loop that only acts, on one device."""
    return GymnasiumLoop(
        env,
        agent,
        num_envs,
        cycle=cycle,
        inference_only=True,
        num_inferencers_per_device=num_inferencers,
        inference_devices=[0],
        update_devices=[0],
        metrics_interval_s=3600.0,
        observe_cycle=observe_cycle,
    )


def loop_case(loop: GymnasiumLoop, num_cycles: int) -> Callable[[], float]:
    """Return what measures a loop, in environment steps per second."""
    state = loop.new_state(0, STEPS_PER_CYCLE)

    def measure() -> float:
        nonlocal state
        began = time.perf_counter()
        state = loop.run(state, num_cycles, STEPS_PER_CYCLE).state
        return num_cycles * STEPS_PER_CYCLE * NUM_ENVS / (time.perf_counter() - began)

    return measure


def bare_case(agent: Agent, num_cycles: int) -> Callable[[], float]:
    """Return what measures the bare loop in as many threads, in environment steps per second."""
    run = RunSpec(NUM_ENVS, NUM_INFERENCERS, STEPS_PER_CYCLE, 1)
    state = agent.new_state(jax.random.key(0), run)
    states = list(state.step)
    step = jax.jit(agent.act, donate_argnums=1)
    pools = [
        make_pool(
            ENV,
            num_envs=NUM_ENVS,
            num_threads=1,
            seed=seed_block(0, inferencer=i, num_inferencers=NUM_INFERENCERS, num_envs=NUM_ENVS),
        )
        for i in range(NUM_INFERENCERS)
    ]
    num_steps = num_cycles * STEPS_PER_CYCLE // NUM_INFERENCERS

    def one(i: int) -> None:
        states[i] = bare_loop(step, state.networks, states[i], pools[i], num_steps)

    def measure() -> float:
        began = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(NUM_INFERENCERS) as threads:
            list(threads.map(one, range(NUM_INFERENCERS)))  # list() raises what a thread raised
        return num_steps * NUM_INFERENCERS * NUM_ENVS / (time.perf_counter() - began)

    return measure


def run(*, repeats: int, num_cycles: int = NUM_CYCLES, json_file: str | None = None) -> dict:
    """Measure, print a table, write JSON.

    The command has options for ``repeats`` and ``json_file``; ``num_cycles`` are those of a round.
    """
    configure_jax(compile_cache="off", preallocate=True)  # and otherwise as sebulba train does
    config = SimplePolicyGradientConfig()
    agent = make_agent(env_spec(ENV), config)
    kinds: dict[str, CycleKind | MakeCycle]
    kinds = {"fused": "fused", "stepped": "stepped", "plain": PlainCycle}
    with contextlib.ExitStack() as stack:
        cases = {}
        for name, kind in kinds.items():
            loop = stack.enter_context(acting_loop(ENV, agent, NUM_ENVS, NUM_INFERENCERS, kind))
            cases[name] = loop_case(loop, num_cycles)
        cases["bare"] = bare_case(agent, num_cycles)
        figures = harness.interleave(cases, repeats)
    keys = keys_of(figures)
    ratios = ("fused_over_bare", "stepped_over_bare", "jit_gain")
    harness.print_table(
        f"benchmarks inference: {ENV}, {NUM_INFERENCERS} x {NUM_ENVS} environments, 5 x 200 units",
        "env steps/s",
        figures,
        [f"{name}: {keys[name]:.2f}" for name in ratios],
    )
    settings = {
        "env": ENV,
        "num_envs": NUM_ENVS,
        "num_inferencers": NUM_INFERENCERS,
        "num_cycles": num_cycles,
        "steps_per_cycle": STEPS_PER_CYCLE,
        "hidden_sizes": config.torso.hidden_sizes,
        "repeats": repeats,
    }
    result = harness.record(keys, figures, settings)
    harness.write_json(json_file, result)
    return result


def keys_of(figures: dict[str, list[float]]) -> dict[str, float]:
    """Return the keys of the JSON: medians of speeds, and of ratios within a round."""
    return {
        "fused_env_steps_per_s": statistics.median(figures["fused"]),
        "stepped_env_steps_per_s": statistics.median(figures["stepped"]),
        "plain_bookkeeping_env_steps_per_s": statistics.median(figures["plain"]),
        "bare_env_steps_per_s": statistics.median(figures["bare"]),
        "fused_over_bare": harness.ratio(figures, "fused", "bare"),
        "stepped_over_bare": harness.ratio(figures, "stepped", "bare"),
        "jit_gain": harness.ratio(figures, "stepped", "plain"),
    }
