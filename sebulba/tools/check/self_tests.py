"""Small programs that must run on this machine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from sebulba.agents.configs import ImpalaConfig, TorsoConfig
from sebulba.agents.impala import Impala
from sebulba.envs.factory import env_spec, make_env_factory
from sebulba.envs.gymnasium_adapter import GymnasiumAdapter
from sebulba.loops.devices import local_devices
from sebulba.loops.gymnasium_loop import GymnasiumLoop
from sebulba.support.trees import owned_copy
from sebulba.tools.check.checks import Finding, note, ok, problem

ALIGNMENT = 64
"""Bytes; JAX may read an array that begins at a multiple of this without copying it."""
TRIES = 8


class _Counts(gymnasium.Env):
    """Observes its step number."""

    observation_space = gymnasium.spaces.Box(0, 1e6, (1024,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        self._obs = np.zeros(1024, np.float32)
        return self._obs, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        self._obs += 1
        return self._obs, 0.0, False, False, {}


class _SharedBuffer(SyncVectorEnv):
    """Returns its buffer, aligned as the shared memory of worker processes is."""

    def __init__(self) -> None:
        super().__init__([_Counts] * 2, copy=False, autoreset_mode=AutoresetMode.NEXT_STEP)
        self._observations = _aligned((2, 1024))


def check_aliasing() -> Iterator[Finding]:
    """Yield whether JAX aliases NumPy arrays here, and whether our copies protect against it."""
    aliased = sum(_changes_afterwards() for _ in range(TRIES))
    how_often = f"{aliased} of {TRIES} arrays changed in JAX when NumPy wrote to them again"
    what = "reads aligned arrays in place" if aliased else "copies"
    yield ok(f"{how_often}: JAX {what} here", name="aliasing, bare")
    changed = _changed_observations()
    seen = f"{changed} of {TRIES} observations changed after they were handed out"
    remedy = "report it: training on Gymnasium environments would be wrong here"
    name = "aliasing, ours"
    yield problem(seen, remedy, name) if changed else ok(seen, name=name)


def _changes_afterwards() -> bool:
    array = _aligned((4096,))
    in_jax = jax.block_until_ready(jax.device_put(array))
    array += 1
    return bool(np.asarray(in_jax).any())


def _changed_observations() -> int:
    adapter = GymnasiumAdapter(_SharedBuffer(), [0, 1])
    no_action = np.zeros(2, np.int32)
    in_jax = [jax.device_put(adapter.reset().obs)]
    in_jax += [jax.device_put(adapter.step(no_action).obs) for _ in range(TRIES - 1)]
    adapter.close()
    return sum(bool((np.asarray(obs) != step).any()) for step, obs in enumerate(in_jax))


def check_donation() -> Finding:
    """Yield whether published networks survive that the update donates its own."""
    device = local_devices()[0]
    networks = jax.device_put(jnp.arange(1024.0), device)
    published = owned_copy(networks, device)
    jax.block_until_ready(jax.jit(lambda x: x + 1, donate_argnums=0)(networks))
    donated = "gives memory back" if networks.is_deleted() else "is ignored"
    if (np.asarray(published) == np.arange(1024.0)).all():
        return ok(f"donation {donated} on {device.platform}; published networks survive it")
    return problem(
        "published networks changed when the update donated its own",
        "report it: acting would be wrong here",
    )


def check_gradient() -> Finding:
    """Yield whether a jitted gradient is right, on every device."""

    def loss(w: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(w) ** 2)

    w = np.linspace(-2, 2, 64, dtype=np.float32)
    expected = 2 * np.tanh(w) * (1 - np.tanh(w) ** 2)
    for device in local_devices():
        began = time.monotonic()
        gradient = np.asarray(jax.jit(jax.grad(loss))(jax.device_put(w.copy(), device)))
        took = time.monotonic() - began
        error = float(np.abs(gradient - expected).max())
        if not error < 1e-3:
            remedy = f"reinstall jaxlib and the driver, or train without {device}"
            return problem(f"of {device} is off by {error:.2g}", remedy)
    return ok(f"right on {len(local_devices())} of them; {took:.2f} s with compiling")


def check_training() -> Finding:
    """Yield whether a loop trains: Inferencers, queue, update and publishing."""
    env = make_env_factory("CartPole-v1")
    torso = TorsoConfig(hidden_sizes=(8,))
    agent = Impala(env_spec(env), ImpalaConfig(torso=torso))
    num_envs = 4 * len(local_devices())
    began = time.monotonic()
    with GymnasiumLoop(env, agent, num_envs) as loop:
        result = loop.run(loop.new_state(0, steps_per_cycle=8), num_cycles=4, steps_per_cycle=8)
    took = time.monotonic() - began
    loss = result.metrics.get("loss")
    seen = (
        f"CartPole-v1, {result.counters.env_steps} env steps and {result.counters.updates} "
        f"updates in {took:.1f} s with compiling"
    )
    if loss is None or not np.isfinite(loss):
        return note(f"{seen}; loss={loss}", "train longer and look at the loss")
    return ok(seen)


def _aligned(shape: tuple[int, ...]) -> np.ndarray:
    """Return zeros, float32, that begin at a multiple of ``ALIGNMENT``."""
    size = 4 * int(np.prod(shape))
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(np.float32).reshape(shape)
