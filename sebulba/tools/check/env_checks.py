"""The checks of ``check-env``, each of which looks at one thing and says what it saw."""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from sebulba.agents.nets.encoder import is_image
from sebulba.envs.first_episodes import BrokenPromiseWarning
from sebulba.envs.flat_parts import LEFT_OUT
from sebulba.envs.observation_parts import MASK
from sebulba.envs.seeds import seed_block
from sebulba.envs.spaces import WRAP
from sebulba.envs.tree import describe
from sebulba.errors import UsageError, describe_error
from sebulba.tools.check.checks import Check, Finding, checks_of, note, ok, problem
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
from sebulba.types import MultiAgentSpec

HUGE_REWARD = 100.0
ZERO_SUM = 1e-3
"""Sum of all rewards up to which a payoff counts as zero_sum."""
MASKS = frozenset({"action_mask", "action_masks", "avail_actions", "legal_actions"})
"""Names of infos that say which actions are allowed."""
ASYNC_PAYS_S = 0.3e-3
"""Seconds of a step from which on worker processes pay."""
MEASURED_S = 0.5
"""Seconds of a measurement of speed."""
ATARI_PIXELS = 84 * 84
BEGINS_ANEW = "nothing, or offer it: a resumed run begins new episodes"
NUM_SAVED = 20
"""Steps before an environment is saved, and after it is put back."""
NUM_WORKERS = 2
NUM_WORKER_STEPS = 8
CONTRACT = ("steps", "observations", "rewards")
"""Checks without whose success the others cannot run."""


def checks(env: Any, arguments: dict[str, Any]) -> list[Check]:
    """Return the checks of an environment; the arguments are those of ``Subject``."""
    return suite(Subject(env, **arguments))


def suite(subject: Subject) -> list[Check]:
    """Return the checks of ``subject``, each after those that it needs."""
    # A finding says it here, and the process of the checks does nothing else.
    warnings.simplefilter("ignore", BrokenPromiseWarning)

    sound = (*CONTRACT, "close")
    alone = [
        ("infos", check_infos, *CONTRACT),
        ("vector", check_vector, *sound),
        ("workers", check_workers, "vector"),
    ]
    used = ("vector",) if subject.make_one else sound
    return checks_of(
        subject,
        ("making", check_making),
        ("spaces", check_spaces, "making"),
        ("steps", check_steps, "making"),
        ("observations", check_observations, "steps"),
        ("rewards", check_rewards, "observations"),
        ("episodes", check_episodes, *CONTRACT),
        ("agents", check_agents, *CONTRACT),
        ("close", check_close, *CONTRACT),
        ("buffers", check_buffers, *CONTRACT),
        ("determinism", check_determinism, *sound),
        ("seeds", check_seeds, "determinism"),
        ("shared state", check_shared_state, "determinism"),
        *(alone if subject.make_one else []),
        ("resume", check_resume, *used),
        ("cycle", check_cycle, *used),
        ("speed", check_speed, *used),
    )


def check_making(subject: Subject) -> Finding:
    """Make two environments: different ones, of the right type, with supported spaces."""
    try:
        with subject.playing() as one, subject.playing(1) as another:
            first, second = _made(one), _made(another)
    except UsageError as error:
        seen, wrap, how = str(error).partition(WRAP)
        return problem(seen, wrap[2:] + how if wrap else "correct the environment accordingly")
    if first is second:
        return problem(
            "the environment factory returned the same environment twice",
            "make a new one at each call",
        )
    kind = "one environment at a time" if subject.plays_one else f"{subject.num_envs} at a time"
    return ok(f"{type(first).__name__}, {kind}")


def _made(player: Any) -> Any:
    return player.made if isinstance(player, SinglePlayer) else player


def check_spaces(subject: Subject) -> Iterator[Finding]:
    """Show the spaces, and say what is unusual about them."""
    with subject.playing() as player:
        spec, metadata = player.spec, getattr(_made(player), "metadata", None) or {}
    if isinstance(spec, MultiAgentSpec):
        yield ok(describe(spec))
        return
    if text := metadata.get(LEFT_OUT):
        yield note(
            f"{', '.join(text)}: text, which is left out",
            "wrap the environment to encode it as numbers, if the task needs it",
        )
    declared, action = spec.observation_space, spec.action_space
    yield ok(f"{_short(declared)} -> {_short(action)}")
    leaves = declared.spaces if isinstance(declared, spaces.Dict) else {"obs": declared}
    wide = [key for key, leaf in leaves.items() if np.dtype(leaf.dtype).itemsize == 8]
    is_wide_box = any(isinstance(leaves[key], spaces.Box) for key in wide)
    if is_wide_box:
        yield note(f"{', '.join(wide)}: 64 bits, of which 32 reach JAX", "declare float32")
    for key, leaf in leaves.items():
        pixels = math.prod(sorted(leaf.shape or ())[1:])
        if is_image(leaf) and pixels > 2 * ATARI_PIXELS:
            times = f"{key}: {pixels / ATARI_PIXELS:.0f} times the pixels of an Atari frame"
            yield note(
                f"{times}, and about as much work for a network",
                "shrink images, as by gymnasium.wrappers.ResizeObservation",
            )
    if isinstance(action, spaces.Box) and not action.is_bounded():
        yield note(
            "the action space has no bounds, so actions are not squashed into any",
            "declare bounds if there are any",
        )


def _short(space: gymnasium.Space) -> str:
    if isinstance(space, spaces.Dict):
        return f"Dict({', '.join(f'{key}: {_short(leaf)}' for key, leaf in space.items())})"
    if not isinstance(space, spaces.Box):
        return str(space)
    bounds = f"{space.low.min():g} to {space.high.max():g}"
    return f"Box{space.shape} {space.dtype}, {bounds}"


def check_steps(subject: Subject) -> Finding:
    """Walk, and look at what reset and step return."""
    seen = subject.walk
    if "steps" in seen.broken:
        return problem(seen.broken["steps"], "correct reset or step")
    times = "" if subject.plays_one else f" of {subject.num_envs} environments"
    return ok(f"{seen.steps} random steps{times} without an error")


def check_observations(subject: Subject) -> Iterator[Finding]:
    """Look at shape, dtype, range and NaN."""
    seen = subject.walk
    if "observations" in seen.broken:
        yield problem(seen.broken["observations"], "return what the observation space says")
        return
    if seen.outside:
        finding = problem if seen.is_far_outside else note
        remedy = "widen the bounds: networks scale observations by them"
        yield finding(seen.outside, remedy)
    if seen.cast:
        yield note(f"{seen.cast}: cast at every step", "return the dtype of the space")
    if seen.lost:
        yield note(*seen.lost.split("; ", 1))
    if not seen.outside and not seen.cast and not seen.lost:
        yield ok("shape, dtype and range are those of the space")


def check_rewards(subject: Subject) -> Finding:
    """Look at NaN and at the scale."""
    seen = subject.walk
    if "rewards" in seen.broken:
        return problem(seen.broken["rewards"], "return a finite number")
    rewards = np.concatenate(seen.rewards)
    low, high = float(rewards.min()), float(rewards.max())
    shown = f"{low:g} to {high:g}, mean {float(rewards.mean()):.3g}"
    largest = max(abs(low), abs(high))
    if largest > HUGE_REWARD:
        return note(shown, f"scale them: --agent.reward-scale {1 / largest:.0e}")
    if largest == 0:
        return note(f"no reward but 0 in {seen.steps} random steps", "nothing can be learned yet")
    return ok(shown)


def check_episodes(subject: Subject) -> Finding:
    """Look at what happens at the end of an episode."""
    seen = subject.walk
    if not seen.ends:
        return note(
            f"none ended in {seen.steps} steps",
            "pass a larger --steps, or end them: returns are counted at the end of an episode",
        )
    shown = f"{seen.ends} ended: {seen.terminated} terminated, {seen.truncated} truncated"
    if seen.both:
        shown += f" ({seen.both} both, which counts as terminated)"
    if seen.after_end:
        return problem(
            seen.after_end,
            "set metadata['autoreset_mode'] to what the vector environment does",
        )
    if seen.plain_ends:
        return ok(f"{shown}; the step after an end resets")
    if seen.masked:
        return note(
            f"{shown}; the step that ends an episode resets, and the last observation of "
            f"{seen.masked} truncated ones is missing: their last steps are not learned from",
            "give it in info['final_obs'], or use AutoresetMode.NEXT_STEP",
        )
    return ok(f"{shown}; the step that ends an episode resets")


def check_agents(subject: Subject) -> Iterator[Finding]:
    """Look at who acts, and at rewards that nobody is credited with."""
    with subject.playing() as player:
        spec = player.spec
    if not isinstance(spec, MultiAgentSpec):
        return
    seen = subject.walk
    for group, acting in seen.acting.items():
        slots, names = np.concatenate(acting).mean(axis=0), spec.groups[group].slots
        if idle := [name for name, share in zip(names, slots, strict=True) if share == 0]:
            yield note(
                f"{', '.join(idle)} never acted in {seen.steps} steps",
                "pass a larger --steps, or leave them out of the tree: they cannot learn",
            )
        else:
            shown = ", ".join(
                f"{name} {share:.0%}" for name, share in zip(names, slots, strict=True)
            )
            yield ok(f"acting in a share of steps: {shown}")
    if not seen.acting:
        yield ok("all act in every step")
    whole, total = spec.teams[0] if spec.teams else None, float(np.sum(seen.rewards))
    if whole and whole.payoff == "zero_sum" and abs(total) > ZERO_SUM:
        yield note(
            f"the payoff is zero_sum, and rewards add up to {total:g}",
            "use payoff='general', or correct the rewards",
        )


def check_close(subject: Subject) -> Finding:
    """Close twice."""
    player = subject.make_player()
    player.reset()
    try:
        player.close()
    except Exception as error:
        return problem(describe_error(error), "correct close")
    try:
        player.close()
    except Exception as error:
        return note(f"the second time: {describe_error(error)}", "let close be called twice")
    return ok("twice, without an error")


def check_infos(subject: Subject) -> Iterator[Finding]:
    """Look at infos, which a run drops."""
    if not subject.plays_one:
        return  # those of many agents are not seen here
    keys = subject.walk.info_keys
    masks = sorted(MASKS & frozenset().union(*keys))
    if masks and subject.action_mask is None:
        how = "" if masks == [MASK] else f" once it is called {MASK}"
        yield note(
            f"{masks[0]} is dropped, as all infos are, so agents take masked actions, too",
            f"--env.action-mask info heeds it{how}; or let step take every action",
        )
    if len(keys) > 1:
        varying = sorted(frozenset.union(*keys) - frozenset.intersection(*keys))
        yield note(
            f"keys vary ({', '.join(varying[:5])}); infos are dropped here",
            "what the agent needs belongs into the observation",
        )
    elif keys and (names := sorted(next(iter(keys)))):
        yield ok(f"dropped: {', '.join(names[:5])}")
    else:
        yield ok("none")


def check_buffers(subject: Subject) -> Finding:
    """Look whether returned observations are overwritten later."""
    if not (times := subject.walk.rewritten):
        return ok("observations stay as they were returned")
    if subject.plays_one:
        return note(
            f"observations changed after they were returned, at {times} steps; the adapter copies",
            "return a copy if others use the environment, too",
        )
    return problem(
        f"observations changed after they were returned, at {times} steps, and JAX may still "
        "be reading them",
        "return arrays that are not written again",
    )


def check_determinism(subject: Subject) -> Finding:
    """Play twice with the same seeds and actions."""
    if difference := first_difference(subject.play(), subject.play()):
        return problem(
            f"same seed and actions, but other {difference}",
            "draw all chance from self.np_random, after super().reset(seed=seed)",
        )
    return ok(f"same seed and actions, same {subject.num_compared} steps")


def check_seeds(subject: Subject) -> Finding:
    """Play with other seeds."""
    shown = subject.play()
    if first_difference(shown, subject.play(1)) is None:
        return note(
            f"another seed, same {subject.num_compared} steps",
            "use the seed of reset, unless nothing is left to chance",
        )
    return ok("another seed, another course")


def check_shared_state(subject: Subject) -> Finding:
    """Play alone, and with another environment stepped in between."""
    if difference := first_difference(subject.play(), subject.play(company=True)):
        return problem(
            f"other {difference} when another one is stepped in between",
            "keep state in self, not in the class or the module",
        )
    return ok("none: another one in between changes nothing")


# What a run does with it.


def check_vector(subject: Subject) -> Finding | None:
    """Walk through the vector environment of a run."""
    if not subject.plays_one:
        return None  # all the other checks did
    with contextlib.closing(subject.make_vector()) as player:
        seen = Walk(player, subject.num_envs).run(subject.num_compared, 0, subject.longest_s)
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
        with contextlib.closing(subject.async_factory()(NUM_WORKERS, seeds)) as env:
            output = env.reset()
            choose = RandomActions(env.spec, NUM_WORKERS, 0)
            for _ in range(NUM_WORKER_STEPS):
                output = env.step(choose(output))
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
    with contextlib.closing(subject.make_vector()) as env:
        env.reset()
        fused = env.fused()
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
    with contextlib.closing(player):
        output = player.step(choose(player.reset()))
        steps, took = 0, 0.0
        while took < MEASURED_S:
            action = choose(output)
            began = time.perf_counter()
            output = player.step(action)
            took += time.perf_counter() - began
            steps += 1
        return took / steps
