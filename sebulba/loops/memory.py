"""Says in words what a run holds on its devices where their memory was not enough."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from sebulba.agent import Agent
from sebulba.errors import OutOfMemoryError, is_out_of_memory
from sebulba.support.trees import is_key
from sebulba.types import PyTree, RunSpec

MOST_SHOWN = 160
"""Characters of what JAX says."""


@contextlib.contextmanager
def memory_in_words(agent: Agent, run: RunSpec, queue_size: int) -> Iterator[None]:
    """Raise ``OutOfMemoryError`` where JAX could not allocate; other errors as they are.

    Args:
      agent: The agent of the run.
      run: Its sizes.
      queue_size: Trajectories that may wait for the update.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(_said(error, agent, run, queue_size)) from error


def _said(error: Exception, agent: Agent, run: RunSpec, queue_size: int) -> str:
    """Return what was asked for, what is held, and the option that makes the largest smaller."""
    state = jax.eval_shape(lambda: agent.new_state(jax.random.key(0), run))
    acting = jax.eval_shape(agent.staged, state.networks, state.experience)
    trajectory = jax.eval_shape(lambda acting: agent.empty_trajectory(acting, run), acting)
    devices, in_flight = run.num_update_devices, queue_size + 2 * run.num_inferencers
    config: Any = agent.config
    batch = f"num_envs={run.num_envs}"
    has_replay = hasattr(getattr(config, "replay", None), "capacity")
    learns_from = f"agent.replay.capacity={config.replay.capacity}" if has_replay else batch
    held = {
        "the replay" if has_replay else "experience": (
            _num_bytes(state.experience) // devices,
            learns_from,
        ),
        "networks and optimizer": (
            _num_bytes((state.networks, state.opt)),
            "agent.torso" if hasattr(config, "torso") else "network",
        ),
        f"{in_flight} trajectories of {run.num_envs} environments x {run.steps_per_cycle} steps": (
            in_flight * _num_bytes(trajectory) // devices,
            f"{batch} or queue_size={queue_size}",
        ),
    }
    sizes = ", ".join(f"{name} {_shown(size)}" for name, (size, _) in held.items())
    largest = max(held.values())[1]
    update = "agent.replay.batch_size" if has_replay else "num_envs"
    if hasattr(config, "minibatches"):
        update += ", or with more agent.minibatches"
    return (
        f"the memory of a device is not enough: {str(error).splitlines()[0][:MOST_SHOWN]}. An "
        f"update device holds {sizes}; the intermediate results of an update come on top. Use a "
        f"smaller {largest}; if an update is too large, a smaller {update}"
    )


def _num_bytes(tree: PyTree) -> int:
    leaves = [leaf for leaf in jax.tree.leaves(tree) if not is_key(leaf)]
    return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def _shown(num_bytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes / 1e3:,.1f} kB"
