"""What the engine simulates, behind the EnvAdapter protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.spaces import Box, Discrete, Space

from sebulba.envs.seeds import check_seeds
from sebulba.envs.spaces import canonical_action_space, make_action_check
from sebulba.envs.tree import Act, AgentNode, Obs, Population, compile_tree
from sebulba.envs.valid_actions import clamp
from sebulba.errors import UsageError
from sebulba.support.one_kernel import one_kernel
from sebulba.types import EnvOutput, EnvSpec, FusedEnv, MultiAgentSpec, PyTree
from sebulba_networks import CART_POLE, CONGESTION_CONTROL, SHARED_BOTTLENECK
from sebulba_networks.native import NativePool, Rows
from sebulba_networks.options import (
    CartPoleOptions,
    NetworkOptions,
    SharedBottleneckOptions,
)
from sebulba_networks.pools import PoolAdapter, make_pool
from sebulba_networks.process_pool import STEP_TIMEOUT_S

LARGEST_EXPONENT = 2.0
"""An action multiplies the window by 2 to the power of at most this, and at least minus this."""

FLOW = "flow"
"""Name of the group of agents that share a bottleneck."""


class NetworkAdapter(PoolAdapter):
    """Environments of one agent or many, with next-step autoreset."""

    def __init__(
        self,
        options: NetworkOptions,
        seeds: Sequence[int],
        *,
        num_threads: int = 1,
        step_timeout_s: float = STEP_TIMEOUT_S,
    ) -> None:
        """Make an environment for each seed.

        Raises:
          UsageError: A seed is none, or the engine cannot be compiled.
        """
        spec = network_spec(options)
        pool = make_pool(
            options,
            check_seeds(seeds, len(seeds)),
            num_threads=num_threads,
            step_timeout_s=step_timeout_s,
        )
        super().__init__(pool, spec, options)
        self._is_shared = isinstance(options, SharedBottleneckOptions)
        num_slots = self.num_envs * options.num_agents
        self._action_space = agent_spaces(options)[1]
        self._check_action = make_action_check(self._action_space, num_slots)

    def reset(self) -> EnvOutput:
        """Begin new episodes in all environments."""
        return self._output(self._pool.reset())

    def step(self, action: PyTree) -> EnvOutput:
        """Act; raise ActionError before an invalid action reaches native code."""
        if self._is_shared:
            action = action[FLOW].reshape(-1, *action[FLOW].shape[2:])
        self._check_action(action)
        return self._output(self._pool.step(np.ascontiguousarray(action, np.float32)))

    def fused(self) -> FusedEnv | str:
        """Return the environment as JAX functions, or the reason why it has none."""
        if not isinstance(self._pool, NativePool):
            return "the engine of this network runs in processes of its own"
        try:
            call = self._pool.jax_call()
        except UsageError as error:
            return f"XLA cannot call the network engine ({error})"

        def step(handle: jax.Array, action: PyTree) -> tuple[jax.Array, EnvOutput, jax.Array]:
            action, num_invalid = one_kernel(self._inside_space)(action)
            handle, rows = call.step(handle, action)
            return handle, self._output(rows), num_invalid

        return FusedEnv(call.handle, step, saved_by_adapter=True)

    def _inside_space(self, action: PyTree) -> tuple[jax.Array, jax.Array]:
        """Return actions that the engine can take, ``[B, ...]`` float32, and how many were not so.

        ``[B * A, ...]`` of many agents.
        """
        if self._is_shared:
            action = action[FLOW].reshape(-1, *action[FLOW].shape[2:])
        inside, num_invalid = clamp(action, self._action_space)
        return inside.astype(jnp.float32), num_invalid

    def _output(self, rows: Rows) -> EnvOutput:
        def by_group(x: Any) -> PyTree:
            return {FLOW: x} if self._is_shared else x

        reward = by_group(rows.reward)
        return EnvOutput(
            obs=by_group(rows.obs),
            reward=reward,
            terminated=by_group(rows.terminated),
            truncated=by_group(rows.truncated),
            is_first=by_group(rows.is_first),
            unclipped_reward=reward,
            episode_end=rows.episode_end,
            acting=by_group(rows.acting) if self._is_shared else (),
        )


def network_spec(options: NetworkOptions) -> EnvSpec | MultiAgentSpec:
    """Return the spec of one environment, with an agent or many alike."""
    observation_space, action_space = agent_spaces(options)
    if not isinstance(options, SharedBottleneckOptions):
        name = CART_POLE if isinstance(options, CartPoleOptions) else CONGESTION_CONTROL
        return EnvSpec(observation_space, action_space, name=name)
    node = AgentNode(Obs(observation_space), Act(action_space))
    flows = {f"{FLOW}_{index}": node for index in range(options.num_agents)}
    tree = Population(flows, symmetric=True)
    return compile_tree(tree, name=SHARED_BOTTLENECK, waits=True)


def agent_spaces(options: NetworkOptions) -> tuple[Box, Space]:
    """Return the spaces of observations and actions."""
    if isinstance(options, CartPoleOptions):
        most = np.array([4.8, np.inf, np.deg2rad(24), np.inf], np.float32)
        return Box(-most, most), canonical_action_space(Discrete(2))
    low, high = (np.array(bounds, np.float32) for bounds in options.obs_bounds)
    return Box(low, high), Box(-LARGEST_EXPONENT, LARGEST_EXPONENT, (1,), np.float32)
