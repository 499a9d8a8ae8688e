"""Whether an agent keeps its contract, seen by tracing its methods before anything starts.

A loop asks this of every agent whose class is not Sebulba's own; those are held to it by tests, so
a start with one of them costs nothing here. ``sebulba check-agent`` asks it of any.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sebulba.agent import TRAJECTORY_SPEC, Agent, AgentState, is_spec, spec_of_each_leaf, with_bank
from sebulba.errors import UsageError, shown
from sebulba.loops.agent_tracing import TracedAgent, kind_of, shape_of
from sebulba.support.trees import named_leaves
from sebulba.types import MultiAgentSpec, PyTree, RunSpec, Trajectory, policy_row


def check_contract(agent: Agent, run: RunSpec, *, learns: bool = True) -> None:
    """Trace every method of an agent whose class is not Sebulba's own.

    Args:
      learns: Also look at the methods of the update.

    Raises:
      UsageError: A method returns something else than the contract says, or raises a JAX error.
    """
    check_is_agent(agent)
    if type(agent).__module__.startswith("sebulba."):
        return
    contract = Contract(agent, run)
    contract.check_acting()
    if learns:
        contract.check_learning()


def check_is_agent(agent: Any) -> None:
    """Raise UsageError unless ``agent`` is an agent that was made whole."""
    if not isinstance(agent, Agent):
        what = f"the class {agent.__name__}" if isinstance(agent, type) else shown(agent)
        raise UsageError(
            f"agent={what} is not an agent; use an instance of a subclass of sebulba.Agent, such "
            "as "
            "MyAgent(sebulba.env_spec(env), MyConfig())"
        )
    if not (hasattr(agent, "spec") and hasattr(agent, "config")):
        raise UsageError(
            f"{type(agent).__name__}.__init__ leaves the agent without spec and config; call "
            "super().__init__(spec, config) first"
        )


class Contract(TracedAgent):
    """What the methods of an agent return, as shapes, each found when it is first asked for.

    A property raises UsageError where its method breaks the contract.
    """

    def __init__(self, agent: Agent, run: RunSpec) -> None:
        """Nothing is traced yet; ``run`` are the sizes, and no device of it need exist."""
        super().__init__(agent.for_run(run), run)
        self.key = jax.eval_shape(jax.random.key, 0)
        self.env_step = agent.empty_env_step(run.num_envs)

    def check_acting(self) -> None:
        """Check what is made at the start, and ``step``."""
        self.agent.check_run(self.run)
        _ = self.networks, self.opt, self.step_state, self.step, self.exploit

    def check_learning(self) -> None:
        """Check the specs and the methods of an update."""
        _ = self.updated_experience, self.grads
        self.check_optimize()
        self.check_due(1)

    # What is made at the start.

    @functools.cached_property
    def networks(self) -> PyTree:
        """What ``new_networks`` returns."""
        networks = self.trace("new_networks", self.key)
        for name, leaf in zip(*named_leaves(networks), strict=True):
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                self.fail(
                    "new_networks",
                    f"returns {name} as {shape_of(leaf)}; every leaf must be of floats, since "
                    "each receives a gradient",
                    "keep counts in new_opt, statistics in new_experience, keys in new_step_state",
                )
        return networks

    @functools.cached_property
    def opt(self) -> PyTree:
        """What ``new_opt`` returns."""
        return self.trace("new_opt", self.networks)

    @functools.cached_property
    def step_state(self) -> PyTree:
        """What ``new_step_state`` returns."""
        return self.trace("new_step_state", self.key, static=(self.run, 0))

    @functools.cached_property
    def experience(self) -> PyTree:
        """What ``new_experience`` returns, with the sizes of all devices together."""
        return self.trace("new_experience", self.key, self.networks, static=(self.run,))

    @functools.cached_property
    def acting_networks(self) -> PyTree:
        """What ``acting_networks`` returns."""
        if type(self.agent).acting_networks is Agent.acting_networks:
            return self.networks  # so that a wrong step is not met in new_experience first
        return self.trace("acting_networks", self.networks, self.experience)

    @functools.cached_property
    def staged(self) -> PyTree:
        """What Inferencers act with: the acting networks, and the bank if the agent has one."""
        has_bank = type(self.agent).bank is not Agent.bank
        bank = self.trace("bank", self.experience) if has_bank else ()
        return with_bank(self.acting_networks, bank)

    # Acting.

    @functools.cached_property
    def step(self) -> PyTree:
        """What ``step`` returns with exploration: (ActionOutput, step state)."""
        return self._step(explore=True)

    @functools.cached_property
    def exploit(self) -> PyTree:
        """What ``step`` returns without exploration."""
        return self._step(explore=False)

    def _step(self, *, explore: bool) -> PyTree:
        env_step = policy_row(self.agent.spec, self.env_step)
        given = (self.staged, self.step_state, env_step)
        call = f"step(explore={explore})"
        output, step_state = self.trace(
            "step", *given, check=self._check_step, label=call, explore=explore
        )
        num_envs, expected = self.run.num_envs, self.env_step.prev_action
        if isinstance(self.agent.spec, MultiAgentSpec):
            remedy = "return {group: actions}, [B, A, ...] for the A agents of each group"
            self.check_same(call, "actions", output.action, expected, remedy)
        elif (output.action.shape, output.action.dtype) != (expected.shape, expected.dtype):
            self.fail(
                call,
                f"returns actions {shape_of(output.action)}; expected {shape_of(expected)}, a row "
                f"for each of {num_envs} environments with actions {self.agent.spec.action_space}",
                _action_remedy(output.action, expected),
            )
        for name, leaf in zip(*named_leaves(output.extras), strict=True):
            if leaf.shape[:1] != (num_envs,):
                self.fail(
                    call,
                    f"returns extras {name} {shape_of(leaf)}; expected a row for each of "
                    f"{num_envs} environments",
                    "broadcast it to [B, ...], or leave it out",
                )
        remedy = "return a step state laid out as new_step_state makes it"
        self.check_same(call, "the step state", step_state, self.step_state, remedy)
        return output, step_state

    def _check_step(self, result: Any) -> None:
        expected = "(sebulba.ActionOutput(action, extras), step_state)"
        output, _ = self.pair("step", result, expected)
        if not (hasattr(output, "action") and hasattr(output, "extras")):
            self.fail(
                "step",
                f"returns {kind_of(output)} for the actions; expected {expected}",
                "return sebulba.ActionOutput(action), step_state",
            )
        is_one = not isinstance(self.agent.spec, MultiAgentSpec)
        if is_one and isinstance(output.action, tuple | list | dict):
            self.fail(
                "step",
                f"returns {kind_of(output.action)} as actions; expected one array",
                "stack them into an array [B, ...]",
            )

    # Learning, in the shapes of one update device.

    @functools.cached_property
    def trajectory(self) -> Trajectory:
        """A trajectory, with the sizes of all devices together."""
        return jax.eval_shape(
            lambda networks: self.agent.empty_trajectory(networks, self.run), self.staged
        )

    @functools.cached_property
    def local_experience(self) -> PyTree:
        """The experience of one device."""
        return self.local("experience_spec", self.agent.experience_spec(), self.experience)

    @functools.cached_property
    def local_step_state(self) -> PyTree:
        """The step state that one device is given."""
        if type(self.agent).shard_step_state is not Agent.shard_step_state:
            return self.step_state  # its own code knows how it is split
        with self.named("step_state_spec"):
            specs = self.agent.step_state_spec()
        return self.local("step_state_spec", specs, self.step_state)

    @functools.cached_property
    def updated_experience(self) -> PyTree:
        """What ``update_experience`` returns."""
        result = self.trace(
            "update_experience",
            self.local_experience,
            self.local_step_state,
            self.local_step_state,
            self.local("", TRAJECTORY_SPEC, self.trajectory),
            self.networks,
        )
        self._check_experience("update_experience", result)
        return result

    @functools.cached_property
    def grads(self) -> PyTree:
        """The gradient of ``loss``."""
        given = (self.networks, self.opt, self.local_experience, self.key)

        def differentiated(*given: PyTree) -> PyTree:
            loss = functools.partial(self.call, "loss", self._check_loss)
            with self.named("loss"):  # what cannot be differentiated is found outside of it
                return jax.value_and_grad(loss, has_aux=True)(*given)

        result = self.shapes("loss", self.mapped(differentiated), given)
        (_, (experience, _)), grads = result
        self._check_experience("loss", experience)
        return grads

    def check_optimize(self) -> None:
        """Check what ``optimize`` returns."""
        expected = "(networks, opt)"
        networks, opt = self.trace(
            "optimize",
            *(self.networks, self.opt, self.grads),
            check=lambda result: self.pair("optimize", result, expected),
        )
        remedy = "return them laid out as they came in"
        self.check_same("optimize", "networks", networks, self.networks, remedy)
        self.check_same("optimize", "opt", opt, self.opt, remedy)

    def check_due(self, cycle: int) -> int:
        """Return ``num_off_policy_optims_per_cycle(cycle)`` if it is a count."""
        method = "num_off_policy_optims_per_cycle"
        due = getattr(self.agent, method)(cycle)
        if isinstance(due, bool) or not isinstance(due, int | np.integer) or due < 0:
            self.fail(
                f"{method}({cycle})",
                f"returns {shown(due)}; expected a number of updates, an int of 0 or more",
                "return 0 while no update is due",
            )
        return int(due)

    def _check_loss(self, result: Any) -> None:
        expected = "(loss, (experience, metrics))"
        loss, aux = self.pair("loss", result, expected)
        if jnp.shape(loss) != () or not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
            self.fail(
                "loss",
                f"returns {shape_of(loss)} as the loss; expected a scalar of floats",
                "take the mean: sebulba.agents.kernels.optimizer.masked_mean(x, valid)",
            )
        _, metrics = self.pair("loss", aux, expected, "its second part")
        if not isinstance(metrics, Mapping):
            self.fail(
                "loss",
                f"returns {kind_of(metrics)} as metrics; expected a dict of scalars by name",
                "return {} where there are none",
            )
        for name, value in metrics.items():
            is_number = jnp.issubdtype(jnp.result_type(value), jnp.number)
            if not isinstance(name, str) or jnp.shape(value) != () or not is_number:
                self.fail(
                    "loss",
                    f"returns the metric {name!r} {shape_of(value)}; expected a scalar number by "
                    "name",
                    "take its mean, as float32",
                )

    def _check_experience(self, method: str, experience: PyTree) -> None:
        remedy = "return it laid out as new_experience makes it and experience_spec splits it"
        specs = spec_of_each_leaf(self.agent.experience_spec(), self.experience)
        names, _ = named_leaves(self.experience)
        whole = {
            name
            for name, spec in zip(names, jax.tree.leaves(specs, is_leaf=is_spec), strict=True)
            if not any(spec)
        }

        def mended(name: str) -> str:
            if name in whole and self.run.num_update_devices > 1:
                return (
                    f"{remedy}: experience_spec says P() for it, the same whole on each of "
                    f"{self.run.num_update_devices} devices, which have a share of the "
                    "environments each; use P('learner') for [B, ...], P(None, 'learner') for "
                    "[T, B, ...]"
                )
            return remedy

        self.check_same(method, "the experience", experience, self.local_experience, mended)


def _action_remedy(action: Any, expected: Any) -> str:
    if action.shape != expected.shape:
        if action.shape == (*expected.shape, 1):
            return "drop the last dimension: action[:, 0]"
        return "choose an action for each row of env_step.obs"
    if jnp.issubdtype(expected.dtype, jnp.integer) != jnp.issubdtype(action.dtype, jnp.integer):
        return "return indices of actions for Discrete, floats for Box"
    return "add action.astype(self.spec.action_space.dtype)"


def check_state(state: AgentState, expected: AgentState) -> None:
    """Raise unless ``state`` has the structure and shapes that this run's agent makes."""
    remedy = (
        "use state = loop.new_state(key, steps_per_cycle) of this loop, with this steps_per_cycle"
    )
    if jax.tree.structure(state) != jax.tree.structure(expected):  # type: ignore[operator]
        raise UsageError(
            f"the agent state has another structure than this agent's in this loop "
            f"({len(state.step)} step states, {len(expected.step)} Inferencers); {remedy}"
        )
    for (path, leaf), other in zip(
        jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(expected), strict=True
    ):
        if jax.numpy.shape(leaf) != other.shape:
            raise UsageError(
                f"state{jax.tree_util.keystr(path)} has shape {jax.numpy.shape(leaf)}, but this "
                f"run makes {other.shape}; {remedy}"
            )
