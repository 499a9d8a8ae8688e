"""An agent that acts by a fixed strategy and learns nothing: a saved policy, or a function."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from sebulba.agent import Agent
from sebulba.agents.configs.frozen import FrozenConfig
from sebulba.agents.multi.multi_agent import MultiAgent
from sebulba.errors import UsageError, text_of
from sebulba.policies.policy import Policy, load_policy
from sebulba.types import (
    ActionOutput,
    EnvSpec,
    EnvStep,
    PyTree,
    RunSpec,
    Trajectory,
    empty_env_step,
)


class FunctionStep(NamedTuple):
    """The step state of a strategy that is a function."""

    key: jax.Array
    """Typed PRNG key."""


class Frozen(Agent[FrozenConfig]):
    """It acts, ignores data and is not trained.

    The arrays of a policy are its experience, which checkpoints keep, so that a run goes on with
    the same strategy. ``networks`` and ``opt`` are empty.
    """

    def __init__(self, spec: EnvSpec, config: FrozenConfig) -> None:
        """Read the policy, if it is in a folder, and check that it is for such spaces.

        Raises:
          UsageError: It cannot be read, is not to be trusted, or is for other spaces.
        """
        super().__init__(spec, config)
        strategy = config.strategy
        if isinstance(strategy, Path):
            strategy = load_policy(strategy)
        self.policy: Policy | None = strategy if isinstance(strategy, Policy) else None
        if self.policy is None:
            self._check_function()
        else:
            _check_spaces(self.policy, spec)

    def _check_function(self) -> None:
        row = empty_env_step(self.spec, 2)
        wanted = jax.eval_shape(jnp.asarray, row.prev_action)
        try:
            got = jax.eval_shape(self.config.strategy, row.obs, jax.random.key(0))
        except Exception as error:
            raise UsageError(
                f"the frozen function {self.config.strategy} raises {type(error).__name__} "
                f"({text_of(error)}); it must be a function of JAX arrays, (obs, key) -> action"
            ) from error
        if getattr(got, "shape", None) != wanted.shape:
            raise UsageError(
                f"the frozen function {self.config.strategy} returns {got} for 2 observations; it "
                f"must return actions of {self.spec.action_space}, {wanted}"
            )

    def new_networks(self, key: jax.Array) -> PyTree:
        return ()

    def new_opt(self, networks: PyTree) -> PyTree:
        return networks

    def new_experience(self, key: jax.Array, networks: PyTree, run: RunSpec) -> PyTree:
        return () if self.policy is None else jax.tree.map(jnp.asarray, self.policy.acting_networks)

    def new_step_state(self, key: jax.Array, run: RunSpec, inferencer: int) -> PyTree:
        """Return the step state of the policy's agent, in the sizes of the run that trained it."""
        if self.policy is None:
            return FunctionStep(key)
        one = {"num_inferencers": 1, "num_hosts": 1}
        trained = dataclasses.replace(self.policy.run, num_envs=run.num_envs, **one)
        return self.policy.agent.new_step_state(key, trained, 0)

    def step_state_spec(self) -> PyTree:
        return FunctionStep(P()) if self.policy is None else self.policy.agent.step_state_spec()  # type: ignore[arg-type]

    def step(
        self, networks: PyTree, step_state: PyTree, env_step: EnvStep, *, explore: bool = True
    ) -> tuple[ActionOutput, PyTree]:
        """Act as the policy does, by chance only if it was loaded to ``explore``."""
        if self.policy is None:
            key, own = jax.random.split(step_state.key)
            action = jnp.asarray(self.config.strategy(env_step.obs, own))
            return ActionOutput(action.astype(self.spec.action_space.dtype)), FunctionStep(key)
        explore = explore and self.policy.explore
        output, step_state = self.policy.agent.step(networks, step_state, env_step, explore=explore)
        return ActionOutput(output.action), step_state

    def acting_networks(self, networks: PyTree, experience: PyTree) -> PyTree:
        return experience

    def update_experience(
        self,
        experience: PyTree,
        initial_step_state: PyTree,
        final_step_state: PyTree,
        trajectory: Trajectory,
        networks: PyTree,
    ) -> PyTree:
        return experience

    def loss(self, networks: PyTree, opt: PyTree, experience: PyTree, key: jax.Array) -> Any:
        return jnp.float32(0), (experience, {})

    def optimize(self, networks: PyTree, opt: PyTree, grads: PyTree) -> tuple[PyTree, PyTree]:
        return networks, opt

    def num_off_policy_optims_per_cycle(self, cycle: int) -> int:
        return 0

    def experience_spec(self) -> PyTree:
        """Return that the arrays are the same on all devices."""
        return P()

    def refit_experience(self, new: PyTree, saved: PyTree) -> PyTree:
        return saved


def _check_spaces(policy: Policy, spec: EnvSpec) -> None:
    """Raise UsageError unless a policy is for the observations and actions of ``spec``."""
    if isinstance(policy.agent, MultiAgent):
        raise UsageError(
            f"the policy is of the members {', '.join(policy.agent.members)}; give that of one, "
            "which is in the folder of its name"
        )
    theirs, ours = (
        {
            "observes": one.observation_space,
            "does": one.action_space,
            "legal_actions": one.legal_actions,
            "channels_first": one.channels_first,
        }
        for one in (policy.spec, spec)
    )
    if theirs != ours:
        different = [name for name in ours if theirs[name] != ours[name]]
        shown = ["; ".join(f"{name} {one[name]}" for name in different) for one in (theirs, ours)]
        raise UsageError(
            f"the policy was trained for another agent: {shown[0]}; the member {shown[1]}; give "
            "the policy of an agent with equal spaces"
        )
