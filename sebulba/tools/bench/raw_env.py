"""The environment of a run by itself, as its own library steps it, with random actions.

It is the ceiling of a run: neither adapter, agent nor Inferencer takes part.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import gymnasium
import numpy as np

from sebulba.configs.experiment import EnvConfig
from sebulba.envs import env_source
from sebulba.envs.envpool_adapter import envpool_id, import_envpool
from sebulba.envs.observation_parts import tags_of
from sebulba.support.machine import num_cores
from sebulba.tools.bench.ceiling import Cost
from sebulba.types import EnvFactory

NUM_ACTIONS = 8
"""Random actions that are drawn before the clock starts."""
OF_ADAPTERS = (
    *("backend", "num_threads", "vectorization", "channels_first", "action_mask", "privileged"),
)
"""Options of an environment that its library does not know."""


class Raw(NamedTuple):
    """Environments without anything around them."""

    name: str
    """Says how they are stepped."""
    steps: Iterator[int]
    """Yields, each time, how many environments took a step."""
    close: Any
    """Frees them."""


def raw_envs(env: EnvConfig, factory: EnvFactory, num_envs: int) -> list[Raw]:
    """Return every way to step the environment that its library has; none for JAX or with masks.

    Args:
      env: The environment.
      factory: Makes it.
      num_envs: Environments of the whole run.
    """
    if env_source(env.id, env.backend).backend == "envpool":
        half = max(1, num_envs // 2)
        threads = getattr(factory, "num_threads", None) or num_cores()
        return [_pool(env, num_envs, num_envs, threads), _pool(env, num_envs, half, num_cores())]
    make_one = getattr(factory, "make_one", None)
    one = None if make_one is None else make_one()
    has_mask = env.action_mask or tags_of(one).get("legal_actions")
    return [_single(one)] if isinstance(one, gymnasium.Env) and not has_mask else []


def _pool(env: EnvConfig, num_envs: int, batch: int, num_threads: int) -> Raw:
    options = {k: v for k, v in env.factory_arguments().items() if k not in OF_ADAPTERS}
    options |= {"num_envs": num_envs, "batch_size": batch, "num_threads": num_threads}
    # Spaces warn of lost precision when they are made.
    with warnings.catch_warnings(action="ignore"):
        pool = import_envpool().make_gymnasium(envpool_id(env.id), **options)
        space, _ = pool.action_space, pool.observation_space  # made when they are asked for
    actions = [np.stack([space.sample() for _ in range(batch)]) for _ in range(NUM_ACTIONS)]
    if isinstance(space, gymnasium.spaces.Discrete):
        actions = [action.astype(np.int32) for action in actions]

    def steps() -> Iterator[int]:
        pool.async_reset()
        while True:
            for action in actions:
                *_, info = pool.recv()
                pool.send(action, info["env_id"])
                yield batch

    how = "in step" if batch == num_envs else f"in batches of {batch}"
    return Raw(
        f"envpool, {num_envs} environments {how}, {num_threads} threads", steps(), pool.close
    )


def _single(env: gymnasium.Env) -> Raw:
    def steps() -> Iterator[int]:
        env.reset(seed=0)
        while True:
            *_, terminated, truncated, _ = env.step(env.action_space.sample())
            if terminated or truncated:
                env.reset()
            yield 1

    return Raw("gymnasium, one environment in one thread", steps(), env.close)


def cost_of(raw: Raw, seconds: float) -> Cost:
    """Measure environments for so long, after one step."""
    next(raw.steps)
    began, cpu_began, done = time.perf_counter(), time.process_time(), 0
    while (took := time.perf_counter() - began) < seconds or not done:
        done += next(raw.steps)
    return Cost(1e6 * took / done, 1e6 * (time.process_time() - cpu_began) / done)
