"""Vector environments whose arrays are on an accelerator: an exchange by DLPack."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.vector import AutoresetMode

from sebulba.errors import EnvError, UsageError
from sebulba.types import EnvOutput, EnvSpec, FinalObs, PyTree, empty_env_step

HOST = (1, 0), (3, 0)
"""What ``__dlpack_device__`` returns for the memory of the host, and for pinned memory there."""


def are_on_device(obs: Any) -> bool:
    """Tell whether an observation, or a part of it, is an array outside the host's memory."""
    parts = obs.values() if isinstance(obs, dict) else [obs]
    return any(
        tuple(x.__dlpack_device__()) not in HOST for x in parts if hasattr(x, "__dlpack_device__")
    )


class DeviceArrays:
    """Takes arrays of a vector environment, and gives it actions, without a copy to the host.

    What it takes it copies on the device, since environments overwrite their buffers. An action
    follows from these copies, so whoever waits for it finds them made.
    """

    def __init__(self, spec: EnvSpec, num_envs: int, mode: AutoresetMode, obs: PyTree) -> None:
        """Exchange arrays as those of ``obs``, which ``reset`` returned.

        Raises:
          UsageError: The environment leaves resets to its caller.
        """
        if mode is AutoresetMode.DISABLED:
            raise UsageError(
                f"environment {spec.name!r} has its arrays on a device and does not reset "
                "itself; use an autoreset mode of NEXT_STEP or SAME_STEP"
            )
        example = next(filter(are_on_device, jax.tree.leaves(obs)))
        self._like = empty_env_step(spec, num_envs)
        self._resets_at_once = mode is AutoresetMode.SAME_STEP
        self._native = _from_dlpack_of(example)
        (self._device,) = jax.dlpack.from_dlpack(example).devices()
        self._own_obs = jax.jit(lambda obs: _copied("obs", obs, self._like.obs))
        self._own_step = jax.jit(self._step)
        self._ends: jax.Array
        none = FinalObs.none(self._like.obs) if spec.final_obs else ()
        self._no_final = jax.device_put(none, self._device)

    def action(self, action: PyTree) -> Any:
        """Return a copy of an action, which the environment may write, as its library's array."""
        return self._native(jnp.copy(jax.device_put(action, self._device)))

    def first(self, obs: PyTree) -> EnvOutput:
        """Return the row of a reset."""
        num_envs = len(self._like.reward)
        first = EnvOutput.first(self._own_obs(self._taken(obs)), num_envs, self._no_final)
        self._ends = jax.device_put(np.zeros(num_envs, np.bool_), self._device)
        return first

    def step(
        self, obs: PyTree, reward: Any, terminated: Any, truncated: Any, info: Any
    ) -> EnvOutput:
        """Return the row of a step."""
        final: PyTree = ()
        if self._no_final and isinstance(info, dict) and "final_obs" in info:
            mask = info.get("_final_obs")
            final = info["final_obs"], terminated | truncated if mask is None else mask
        given = self._taken((obs, reward, terminated, truncated, final))
        output = self._own_step(self._ends, self._no_final, *given)
        self._ends = output.episode_end
        return output

    def _taken(self, tree: PyTree) -> PyTree:
        def one(x: Any) -> jax.Array:
            if are_on_device(x):
                return jax.dlpack.from_dlpack(x)
            return jax.device_put(np.array(x), self._device)

        return jax.tree.map(one, tree)

    def _step(
        self, before: jax.Array, no_final: PyTree, obs: PyTree, reward: Any, *rest: Any
    ) -> EnvOutput:
        like, (*flags, final) = self._like, rest
        obs, reward = _copied("obs", obs, like.obs), _copied("reward", reward, like.reward)
        terminated, truncated = _copied("a flag", flags, [like.terminated, like.truncated])
        ends = terminated | truncated
        if final:
            last, given = _copied("info['final_obs']", final, (like.obs, like.terminated))
            no_final = FinalObs(last, given & ends)
        is_first = ends if self._resets_at_once else before
        return EnvOutput(obs, reward, terminated, truncated, is_first, reward, ends, no_final)


def _copied(name: str, tree: PyTree, like: PyTree) -> PyTree:
    """Return copies in the dtypes of ``like``; raise EnvError for other shapes or parts."""

    def one(x: jax.Array, like: Any) -> jax.Array:
        # A flag may come as a byte: not all of DLPack knows bools.
        fits = np.can_cast(x.dtype, like.dtype, "same_kind") or like.dtype == np.bool_
        if x.shape != like.shape or not fits:
            raise EnvError(
                f"{name} must have shape {like.shape} and dtype {like.dtype}; got {x.shape} and "
                f"{x.dtype}"
            )
        return jnp.copy(x.astype(like.dtype))

    try:
        return jax.tree.map(one, tree, like)
    except (ValueError, TypeError) as error:
        raise EnvError(f"{name} must be laid out as its space; {error}") from error


def _from_dlpack_of(array: Any) -> Callable[[jax.Array], Any]:
    """Return the ``from_dlpack`` of the library that an array is of; JAX's arrays need none."""
    name = type(array).__module__
    while name:
        if found := getattr(sys.modules.get(name), "from_dlpack", None):
            return found
        name = name.rpartition(".")[0]
    return lambda given: given
