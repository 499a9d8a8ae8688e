"""``bench inference``: how near the loop's acting is to a bare loop, and what its parts are worth.

SimplePolicyGradient with 5 hidden layers of 200 on CartPole-v1, 16 environments an Inferencer,
inference only, 20 cycles of 100 steps.
"""

from __future__ import annotations

import concurrent.futures
import functools
import statistics
import time
import warnings
from collections.abc import Callable

import jax

from sebulba.agent import Agent
from sebulba.agents.configs import SimplePolicyGradientConfig, make_agent
from sebulba.benchmarks import harness
from sebulba.benchmarks.bare import bare_loop
from sebulba.benchmarks.plain_cycle import PlainCycle
from sebulba.commands.experiment import configure_jax
from sebulba.envs import env_spec, seed_block
from sebulba.inference.choose_cycle import CycleKind, MakeCycle
from sebulba.loops.gymnasium_loop import GymnasiumLoop
from sebulba.types import RunSpec

ENV, NUM_ENVS, NUM_CYCLES, STEPS_PER_CYCLE, NUM_INFERENCERS = "CartPole-v1", 16, 20, 100, 2


def loop_case(
    agent: Agent, cycle: CycleKind | MakeCycle, num_cycles: int
) -> tuple[GymnasiumLoop, Callable[[], float]]:
    """Return a loop and what measures it, in environment steps per second."""
    loop = GymnasiumLoop(
        ENV,
        agent,
        NUM_ENVS,
        cycle=cycle,
        inference_only=True,
        num_inferencers_per_device=NUM_INFERENCERS,
        inference_devices=[0],
        update_devices=[0],
        metrics_interval_s=3600.0,
    )
    state = loop.new_state(0, STEPS_PER_CYCLE)

    def measure() -> float:
        nonlocal state
        began = time.perf_counter()
        state = loop.run(state, num_cycles, STEPS_PER_CYCLE).state
        return num_cycles * STEPS_PER_CYCLE * NUM_ENVS / (time.perf_counter() - began)

    return loop, measure


def bare_case(agent: Agent, num_cycles: int) -> Callable[[], float]:
    """Return what measures the bare loop, in as many threads, in environment steps per second."""
    import envpool

    run = RunSpec(NUM_ENVS, NUM_INFERENCERS, STEPS_PER_CYCLE, 1)
    state = agent.new_state(jax.random.key(0), run)
    states = list(state.step)
    step = jax.jit(agent.step, donate_argnums=1)
    pools = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # spaces warn about precision when they are first read
        for i in range(NUM_INFERENCERS):
            seeds = seed_block(0, inferencer=i, num_inferencers=NUM_INFERENCERS, num_envs=NUM_ENVS)
            pools.append(
                envpool.make(
                    ENV, env_type="gymnasium", num_envs=NUM_ENVS, num_threads=1, seed=seeds
                )
            )
            assert pools[i].observation_space and pools[i].action_space
    num_steps = num_cycles * STEPS_PER_CYCLE // NUM_INFERENCERS

    def one(i: int) -> None:
        states[i] = bare_loop(step, state.networks, states[i], pools[i], num_steps)

    def measure() -> float:
        began = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(NUM_INFERENCERS) as threads:
            list(threads.map(one, range(NUM_INFERENCERS)))  # raises what a thread raised
        return num_steps * NUM_INFERENCERS * NUM_ENVS / (time.perf_counter() - began)

    return measure


def run(*, repeats: int, num_cycles: int = NUM_CYCLES, json_file: str | None = None) -> dict:
    """Measure, print a table, write JSON.

    Args:
      repeats: Interleaved rounds.
      num_cycles: Cycles a round, over all Inferencers.
      json_file: Where to write, or None.

    Returns:
      The record that was written.
    """
    configure_jax(compile_cache="off")  # and otherwise as sebulba train does
    config = SimplePolicyGradientConfig()
    agent = make_agent(env_spec(ENV), config)
    make = functools.partial(loop_case, agent, num_cycles=num_cycles)
    loops = {"fused": make("fused"), "stepped": make("stepped"), "plain": make(PlainCycle)}
    cases = {name: measure for name, (_, measure) in loops.items()}
    cases["bare"] = bare_case(agent, num_cycles)
    try:
        figures = harness.interleave(cases, repeats)
    finally:
        for loop, _ in loops.values():
            loop.close()
    keys = keys_of(figures)
    harness.print_table(
        f"bench inference: {ENV}, {NUM_INFERENCERS} x {NUM_ENVS} environments, 5 x 200 units",
        "env steps/s",
        figures,
        [
            f"{name}: {keys[name]:.2f}"
            for name in ("fused_over_bare", "stepped_over_bare", "jit_gain")
        ],
    )
    result = harness.record(
        keys,
        figures,
        {
            "env": ENV,
            "num_envs": NUM_ENVS,
            "num_inferencers": NUM_INFERENCERS,
            "num_cycles": num_cycles,
            "steps_per_cycle": STEPS_PER_CYCLE,
            "hidden_sizes": config.torso.hidden_sizes,
            "repeats": repeats,
        },
    )
    harness.write_json(json_file, result)
    return result


def keys_of(figures: dict[str, list[float]]) -> dict[str, float]:
    """Return the promised keys: medians of speeds, and of ratios within a round."""
    return {
        "fused_env_steps_per_s": statistics.median(figures["fused"]),
        "stepped_env_steps_per_s": statistics.median(figures["stepped"]),
        "plain_bookkeeping_env_steps_per_s": statistics.median(figures["plain"]),
        "bare_env_steps_per_s": statistics.median(figures["bare"]),
        "fused_over_bare": harness.ratio(figures, "fused", "bare"),
        "stepped_over_bare": harness.ratio(figures, "stepped", "bare"),
        "jit_gain": harness.ratio(figures, "stepped", "plain"),
    }
