"""``external:dm_env_rpc``: simulators that are servers of dm_env_rpc, as Gymnasium environments."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium import spaces

from sebulba.errors import EnvError, UsageError

if TYPE_CHECKING:
    import dm_env
    from dm_env import specs


class DmEnvRpc(gymnasium.Env):
    """A world of a server of dm_env_rpc (https://github.com/google-deepmind/dm_env_rpc).

    It makes a world of its own, and leaves and destroys it in the end. Observations that are text
    are left out. ``discount`` 0 at the end of an episode terminates it; anything else cuts it
    short.
    """

    def __init__(
        self,
        address: str,
        settings: str = "{}",
        seed_setting: str = "",
        timeout_s: float = 60.0,
    ) -> None:
        """Connect, create a world and join it.

        Args:
          address: ``HOST:PORT`` of this machine, perhaps after ``dm_env_rpc://``.
          settings: Of the world, a JSON object.
          seed_setting: The setting of the world that is its seed; the first reset with a seed makes
            another world. "" does not pass seeds on.
          timeout_s: Longest wait for a connection.

        Raises:
          UsageError: The package is missing, nobody listens, the server refuses, or its actions are
            of several kinds.
        """
        self._address = address.removeprefix("dm_env_rpc://")
        self._seed_setting = seed_setting
        try:
            self._settings = json.loads(settings)
        except ValueError as error:
            raise UsageError(f"settings={settings!r} must be a JSON object: {error}") from None
        if not isinstance(self._settings, dict):
            raise UsageError(f"settings={settings!r} must be a JSON object, such as '{{}}'")
        self._world = ""
        self._connect(timeout_s)
        self._join()
        self.observation_space, self._seen = _observation_space(self._env.observation_spec())
        self._actions = dict(self._env.action_spec())
        self.action_space = _action_space(self._actions)

    def _connect(self, timeout_s: float) -> None:
        try:
            import grpc
            from dm_env_rpc.v1 import connection
        except ModuleNotFoundError as error:
            raise UsageError(
                f"external:dm_env_rpc needs {error.name}, which is not installed; "
                "pip install 'sebulba-external[dm-env-rpc]'"
            ) from error
        try:
            self._connection = connection.create_secure_channel_and_connect(
                self._address, timeout=timeout_s
            )
        except grpc.FutureTimeoutError:
            raise UsageError(
                f"nobody answered at address={self._address} within {timeout_s:g} s; start the "
                "server of dm_env_rpc first"
            ) from None

    def _join(self) -> None:
        from dm_env_rpc.v1 import dm_env_adaptor, error

        try:
            self._env, self._world = dm_env_adaptor.create_and_join_world(
                self._connection, self._settings, {}, nested_tensors=False
            )
        except error.DmEnvRpcError as refused:
            raise UsageError(
                f"{self._address} refused a world with settings={self._settings}: {refused.message}"
            ) from None

    def _leave(self) -> None:
        from dm_env_rpc.v1 import dm_env_rpc_pb2

        self._env.close()
        self._connection.send(dm_env_rpc_pb2.DestroyWorldRequest(world_name=self._world))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        if seed is not None and self._seed_setting:
            self._leave()
            self._settings[self._seed_setting] = seed
            self._join()
        return self._observed(self._env.reset()), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Act."""
        step = self._env.step(_by_name(action, self._actions))
        reward = np.asarray(0.0 if step.reward is None else step.reward)
        if reward.size != 1:
            raise EnvError(f"{self._address} gave a reward of shape {reward.shape}; one is needed")
        terminated = step.last() and not np.any(step.discount)
        cut = step.last() and not terminated
        return self._observed(step), float(reward.reshape(())), bool(terminated), bool(cut), {}

    def _observed(self, step: dm_env.TimeStep) -> Any:
        parts = {
            name: np.asarray(step.observation[name], space.dtype).reshape(space.shape or ())
            for name, space in self._seen.items()
        }
        return parts if isinstance(self.observation_space, spaces.Dict) else parts.popitem()[1]

    def close(self) -> None:
        """Leave the world and destroy it."""
        if self._world:
            self._leave()
            self._connection.close()
            self._world = ""


def _observation_space(
    given: Mapping[str, specs.Array],
) -> tuple[spaces.Space, dict[str, spaces.Space]]:
    """Return the space, and its parts by name."""
    parts = {
        name: _space(spec) for name, spec in given.items() if np.dtype(spec.dtype).kind in "fiub"
    }
    if not parts:
        raise UsageError(f"the world has no observations that are numbers, but {sorted(given)}")
    return (next(iter(parts.values())) if len(parts) == 1 else spaces.Dict(parts)), parts


def _space(spec: specs.Array) -> spaces.Space:
    dtype = np.dtype(spec.dtype)
    if any(size < 0 for size in spec.shape):
        raise UsageError(f"{spec.name!r} has the shape {spec.shape}; its size must be known")
    if hasattr(spec, "num_values"):
        return spaces.Discrete(int(spec.num_values), dtype=np.int64)
    if dtype.kind == "b":
        return spaces.MultiBinary(spec.shape or (1,))
    low, high = getattr(spec, "minimum", None), getattr(spec, "maximum", None)
    if low is None or high is None:
        info = np.iinfo(dtype) if dtype.kind in "iu" else None
        low, high = (-np.inf, np.inf) if info is None else (info.min, info.max)
    low, high = (np.broadcast_to(x, spec.shape).astype(dtype) for x in (low, high))
    return spaces.Box(low, high, dtype=dtype.type)  # type: ignore[call-overload]


def _action_space(given: Mapping[str, specs.Array]) -> spaces.Space:
    """Return one space of all actions: all whole numbers of one each, or all fractions."""
    each = [_space(spec) for spec in given.values()]
    if each and all(isinstance(one, spaces.Discrete) for one in each):
        sizes = [int(one.n) for one in each]  # type: ignore[attr-defined]
        return spaces.Discrete(sizes[0]) if len(sizes) == 1 else spaces.MultiDiscrete(sizes)
    if each and all(isinstance(one, spaces.Box) and one.dtype.kind == "f" for one in each):
        low, high = (
            np.concatenate([np.ravel(getattr(one, name)) for one in each]).astype(np.float32)
            for name in ("low", "high")
        )
        return spaces.Box(low, high, dtype=np.float32)
    raise UsageError(
        f"the world has the actions {', '.join(map(repr, given.values())) or 'none'}; all must be "
        "choices (whole numbers from 0), or all fractions"
    )


def _by_name(action: Any, given: Mapping[str, specs.Array]) -> dict[str, Any]:
    flat = np.asarray(action).reshape(-1)
    sizes = [int(np.prod(spec.shape, dtype=np.int64)) for spec in given.values()]
    pieces = np.split(flat, np.cumsum(sizes)[:-1])
    return {
        name: piece.astype(spec.dtype).reshape(spec.shape)
        for (name, spec), piece in zip(given.items(), pieces, strict=True)
    }
