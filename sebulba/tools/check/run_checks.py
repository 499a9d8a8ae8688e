"""The checks of what a run does with an environment: vectors, workers, resuming, cycle, speed."""

from __future__ import annotations

import time
from typing import Any

from sebulba.envs.seeds import seed_block
from sebulba.errors import describe_error
from sebulba.tools.check.checks import Finding, note, ok, problem
from sebulba.tools.check.env_players import (
    Fingerprint,
    Player,
    RandomActions,
    SinglePlayer,
    close_quietly,
    fingerprint,
    first_difference,
)
from sebulba.tools.check.env_under_test import Subject
from sebulba.tools.check.env_walk import Walk

ASYNC_PAYS_S = 0.3e-3
"""Seconds of a step from which on worker processes pay."""
MEASURED_S = 0.5
"""Seconds of a measurement of speed."""
BEGINS_ANEW = "nothing, or offer it: a resumed run begins new episodes"
NUM_SAVED = 20
"""Steps before an environment is saved, and after it is put back."""
NUM_WORKERS = 2
NUM_WORKER_STEPS = 8


def check_vector(subject: Subject) -> Finding | None:
    """Walk through the vector environment of a run."""
    if not subject.plays_one:
        return None  # all the other checks did
    player = subject.make_vector()
    try:
        seen = Walk(player, subject.num_envs).run(subject.num_compared, 0, subject.longest_s)
    finally:
        player.close()
    if seen.broken:
        return problem("; ".join(seen.broken.values()), "correct it")
    if seen.after_end or seen.rewritten:
        what = seen.after_end or "observations changed after they were handed out"
        return problem(what, "report it, with the environment")
    return ok(f"{seen.steps} steps of {subject.num_envs} environments, {seen.ends} episodes")


def check_workers(subject: Subject) -> Finding:
    """Play in worker processes."""
    seeds = seed_block(0, inferencer=0, num_inferencers=1, num_envs=NUM_WORKERS)
    try:
        env = subject.async_factory()(NUM_WORKERS, seeds)
        try:
            output = env.reset()
            choose = RandomActions(env.spec, NUM_WORKERS, 0)
            for _ in range(NUM_WORKER_STEPS):
                output = env.step(choose(output))
        finally:
            env.close()
    except Exception as error:
        return note(
            f"vectorization='async' does not work: {describe_error(error)}",
            "only if steps are slow: correct it",
        )
    return ok(f"vectorization='async' works ({NUM_WORKERS} processes)")


def check_resume(subject: Subject) -> Finding:
    """Save the environment, put it back into another one, and play both."""
    # A user's own adapter may lack the methods state and put_back.
    env: Any = subject.make_vector()
    other: Any = subject.make_vector(1)
    try:
        if not hasattr(env, "state"):
            return note("not known: the adapter has no state()", BEGINS_ANEW)
        choose = RandomActions(env.spec, subject.num_envs, 0)
        output = env.reset()
        for _ in range(NUM_SAVED):
            output = env.step(choose(output))
        state = env.state()
        if isinstance(state, str):
            return note(f"cannot be put back: {state}", BEGINS_ANEW)
        other.put_back(state)
        shown: list[list[Fingerprint]] = [[], []]
        for _ in range(NUM_SAVED):
            action = choose(output)
            output, again = env.step(action), other.step(action)
            shown[0].append(fingerprint(output))
            shown[1].append(fingerprint(again))
    finally:
        close_quietly(env)
        close_quietly(other)
    if difference := first_difference(shown[0], shown[1]):
        return problem(
            f"once put back, it shows other {difference}",
            "save everything that a step depends on, its generators too (get_state, set_state)",
        )
    return ok(f"can be put back exactly ({len(state) / 1e3:,.1f} kB)")


def check_cycle(subject: Subject) -> Finding:
    """Say which cycle a run uses."""
    env = subject.make_vector()
    try:
        env.reset()
        fused = env.fused()
    finally:
        env.close()
    return ok(f"stepped: {fused}" if isinstance(fused, str) else "fused: it has JAX functions")


def check_speed(subject: Subject) -> Finding:
    """Measure the speed of a single environment and of a vector."""
    vector_s = _seconds_per_step(subject, subject.make_vector())
    env_s = vector_s / subject.num_envs
    shown = f"{1 / env_s:,.0f} env steps/s as a vector of {subject.num_envs}"
    if not subject.plays_one:
        return ok(shown)
    alone_s = _seconds_per_step(subject, subject.make_player())
    shown = f"{1 / alone_s:,.0f} env steps/s alone, {shown}, {env_s * 1e6:,.0f} us each"
    if env_s > ASYNC_PAYS_S:
        return note(shown, "a process for each pays above 300 us: --env.vectorization async")
    return ok(f"{shown}: faster in one process than in many")


def _seconds_per_step(subject: Subject, player: Player) -> float:
    """Return the mean seconds of a vector step, and close ``player``."""
    num_envs = 1 if isinstance(player, SinglePlayer) else subject.num_envs
    choose = RandomActions(player.spec, num_envs, 0)
    try:
        output = player.step(choose(player.reset()))
        steps, took = 0, 0.0
        while took < MEASURED_S:
            action = choose(output)
            began = time.perf_counter()
            output = player.step(action)
            took += time.perf_counter() - began
            steps += 1
        return took / steps
    finally:
        player.close()
