"""The agent contract: pure functions, and a state split by who writes it."""

from __future__ import annotations

import abc
import functools
import typing
from collections.abc import Collection
from typing import Any, Generic, NamedTuple, Self, TypeAlias, TypeVar, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sebulba.errors import UsageError, shown
from sebulba.types import (
    ActionOutput,
    EnvAdapter,
    EnvSpec,
    EnvStep,
    FinalObs,
    PyTree,
    RunSpec,
    Trajectory,
    empty_env_step,
    policy_row,
)

LEARNER_AXIS = "learner"
"""Name of the mesh axis over the update devices."""

TRAJECTORY_SPEC = Trajectory(
    env_step=P(None, LEARNER_AXIS),  # type: ignore[arg-type]
    action=P(None, LEARNER_AXIS),  # type: ignore[arg-type]
    extras=P(None, LEARNER_AXIS),
    policy_version=P(),  # type: ignore[arg-type]
    inferencer=P(),  # type: ignore[arg-type]
    cycle=P(),  # type: ignore[arg-type]
)
"""Prefix tree of PartitionSpecs of a trajectory on the update devices: environments are split."""

ConfigT = TypeVar("ConfigT")
Loss: TypeAlias = tuple[jax.Array, tuple[PyTree, dict[str, jax.Array]]]
"""``(scalar loss, (experience, scalar metrics))``."""


def is_spec(x: PyTree) -> bool:
    """Tell whether ``x`` is a PartitionSpec: a leaf of a tree of them."""
    return isinstance(x, P)


def spec_of_each_leaf(specs: PyTree, tree: PyTree) -> PyTree:
    """Return ``tree`` with its PartitionSpecs as leaves, given a prefix tree of them."""
    return jax.tree.broadcast(specs, tree, is_leaf=is_spec)


class AgentState(NamedTuple):
    """Everything an agent is, split by who writes it."""

    networks: PyTree
    """Parameters that gradient descent trains; float leaves, each receives a gradient."""
    opt: PyTree
    """Optimizer state, target networks, schedules; written by ``optimize``."""
    experience: PyTree
    """What the learner keeps from trajectories; written by ``update_experience`` and ``loss``."""
    step: tuple[PyTree, ...]
    """One step state per Inferencer; each written by its Inferencer only."""


class WithBank(NamedTuple):
    """What Inferencers act with where an agent has a bank."""

    networks: PyTree
    """Acting networks."""
    bank: PyTree
    """What ``Agent.bank`` returned."""


def with_bank(networks: PyTree, bank: PyTree) -> PyTree:
    """Return what Inferencers act with: acting networks, and the bank where there is one."""
    return WithBank(networks, bank) if jax.tree.leaves(bank) else networks


def without_bank(staged: PyTree) -> PyTree:
    """Return the acting networks of what Inferencers act with."""
    return staged.networks if isinstance(staged, WithBank) else staged


class Learner(abc.ABC, Generic[ConfigT]):
    """What is learned, and how; inside ``loss`` and ``optimize`` the axis ``"learner"`` is bound.

    Arrays there are this device's shard.
    """

    @abc.abstractmethod
    def new_networks(self, key: jax.Array) -> PyTree:
        """Return initial networks."""

    @abc.abstractmethod
    def new_opt(self, networks: PyTree) -> PyTree:
        """Return the initial optimizer state for ``networks``."""

    @abc.abstractmethod
    def loss(self, networks: PyTree, opt: PyTree, experience: PyTree, key: jax.Array) -> Loss:
        """Return ``(scalar loss, (experience, scalar metrics))`` of this device's shard.

        The loop takes the mean of gradients and metrics over the devices; a masked mean must
        therefore divide by ``lax.pmean`` of its count, as
        :func:`sebulba.agents.kernels.optimizer.masked_mean` does.

        Args:
          networks: Parameters; the gradient is with respect to these.
          opt: Read only.
          experience: As ``update_experience`` or the last ``loss`` returned it.
          key: Differs by update and device.
        """

    @abc.abstractmethod
    def optimize(self, networks: PyTree, opt: PyTree, grads: PyTree) -> tuple[PyTree, PyTree]:
        """Return ``(networks, opt)`` after one update with the mean gradient; both are donated."""

    def num_off_policy_optims_per_cycle(self, cycle: int) -> int:
        """Return how many updates are due after the ``cycle``-th (from 1) consumed trajectory.

        Host-side and pure. 0 while warming up or gathering; at most one other value in a run, but
        for the first that is not 0.
        """
        return 1

    @abc.abstractmethod
    def experience_spec(self) -> PyTree:
        """Return a prefix tree of ``PartitionSpec`` over ``"learner"`` for the experience.

        A leaf whose spec is ``P()`` must come out of every function equal on all devices.
        """

    @property
    def zero_if_unsaved(self) -> Collection[str]:
        """Return the fields of the experience that are zeros if an older checkpoint lacks them."""
        return ()

    def refit_experience(self, new: PyTree, saved: PyTree) -> PyTree | None:
        """Return ``new`` with everything of ``saved`` that is still valid at other sizes.

        Called when a run is resumed with another number of Inferencers or environments. The
        default returns None, which says that nothing can be kept although it would be missed, as
        with a replay: the run is then refused, unless it may begin with ``new`` as it is.

        Args:
          new: A new experience, or its shapes.
          saved: What was saved, or its shapes.
        """
        return None


def _check_made_of(cls: type, spec: Any, config: Any) -> None:
    """Raise UsageError if an agent of this package cannot be made of these."""
    if isinstance(spec, str | type):
        raise UsageError(
            f"{cls.__name__} is made of the spec of an environment, not of {shown(spec)}; use "
            f"sebulba.env_spec({shown(spec)})"
        )
    bases: Any = getattr(cls, "__orig_bases__")  # noqa: B009
    takes = typing.get_args(bases[0])[0]
    if config is not None and isinstance(takes, type) and not isinstance(config, takes):
        raise UsageError(
            f"{cls.__name__} is made of a {takes.__name__}, not of a {type(config).__name__}; use "
            "sebulba.agents.configs.make_agent(spec, config)"
        )


class Agent(Learner[ConfigT]):
    """A reinforcement-learning algorithm as pure functions of arrays.

    The loop jits, donates, places and maps these functions, so an agent holds no thread, device
    or environment code, and must not keep arrays on ``self``. Inside ``update_experience``,
    ``loss`` and ``optimize`` the axis ``"learner"`` is bound and arrays are this device's shard.
    """

    uses_final_obs: bool = False
    """Whether the loss bootstraps from ``EnvStep.final``, which is there in runs whose environments
    reset in the step that ends an episode. Otherwise the last step before a truncation is masked in
    such runs."""
    updates_in_one_program: bool = False
    """Whether the updates after a trajectory run as a loop in one program on a CPU; accelerators
    always do it. Python and the launch of a program then cost once a trajectory, and XLA computes
    once what no update changes. Networks may differ in rounding from those of one program an
    update. Not for convolutions: in a loop, XLA's are 20 times slower on a CPU."""

    def __new__(cls, *arguments: Any, **keywords: Any) -> Self:
        """Refuse a class that lacks methods, and what is not made of these arguments.

        Raises:
          UsageError: It lacks some. An agent of this package is given an id or a class in place of
            a spec, or the configuration of another agent.
        """
        if lacks := sorted(cls.__abstractmethods__):
            raise UsageError(
                f"{cls.__name__} lacks {', '.join(lacks)}; define it as sebulba.Agent describes"
            )
        if cls.__module__.startswith("sebulba."):
            given = dict(zip(("spec", "config"), arguments, strict=False)) | keywords
            _check_made_of(cls, given.get("spec"), given.get("config"))
        return super().__new__(cls)

    def __init__(self, spec: EnvSpec, config: ConfigT) -> None:
        """Keep the single-environment spaces and the hyper-parameters.

        Raises:
          UsageError: Parts of observations are ``eval_only``, and the agent does not use them.
        """
        hidden = getattr(spec, "eval_only", ())
        if hidden and not self.uses_eval_only(config):
            raise UsageError(
                f"{type(self).__name__} does not use the parts of observations that are eval_only "
                f"({', '.join(hidden)}); set central_critic=True, which PPO and Impala have, or "
                "build it of spec.policy_spec, as make_agent does"
            )
        self.spec = spec
        self.config = config

    @classmethod
    def uses_eval_only(cls, config: Any) -> bool:
        """Return whether the learner looks at parts of observations that are ``eval_only``.

        An agent for which this is false, as by default, is made of ``EnvSpec.policy_spec``, and its
        trajectories lack them. One for which it is true has them in its trajectories; ``step``
        never sees them.
        """
        return False

    # What is made once, on the host.

    @final
    def new_state(self, key: jax.Array, run: RunSpec) -> AgentState:
        """Make a whole new state; the loop compiles this as one program.

        Args:
          key: Typed PRNG key.
          run: Sizes that only the loop knows.

        Raises:
          UsageError: A hyper-parameter does not fit ``run``.
        """
        agent = self.for_run(run)
        agent.check_run(run)
        networks_key, experience_key, step_key = jax.random.split(key, 3)
        networks = agent.new_networks(networks_key)
        return AgentState(
            networks=networks,
            opt=agent.new_opt(networks),
            experience=agent.new_experience(experience_key, networks, run),
            step=tuple(
                agent.new_step_state(jax.random.fold_in(step_key, j), run, j)
                for j in range(run.num_inferencers)
            ),
        )

    def check_run(self, run: RunSpec) -> None:
        """Raise UsageError if the hyper-parameters do not fit ``run``; most fit any."""

    def for_run(self, run: RunSpec) -> Self:
        """Return this agent with the sizes of a run, where its updates follow from them."""
        return self

    @abc.abstractmethod
    def new_experience(self, key: jax.Array, networks: PyTree, run: RunSpec) -> PyTree:
        """Return the initial experience with the shapes of all update devices together."""

    @abc.abstractmethod
    def new_step_state(self, key: jax.Array, run: RunSpec, inferencer: int) -> PyTree:
        """Return what Inferencer ``inferencer`` carries from step to step.

        Its environment i has the global index ``inferencer * run.num_envs + i``.
        """

    # What an Inferencer runs.

    def make_cycle(self, env: EnvAdapter, programs: Any, device: jax.Device, timer: Any) -> Any:
        """Return a cycle of the agent's own for an Inferencer; by default None, any other one.

        For an agent that brings its trajectories, such as from a data set. Arguments and result
        are those of ``sebulba.inference.places.MakeCycle``.
        """
        return None

    @abc.abstractmethod
    def step(
        self, networks: PyTree, step_state: PyTree, env_step: EnvStep, *, explore: bool = True
    ) -> tuple[ActionOutput, PyTree]:
        """Choose actions for B environments.

        Args:
          networks: Acting networks (what ``acting_networks`` returned); ``WithBank`` of an agent
            that has a bank.
          step_state: Donated. State before ``env_step.obs`` is consumed; the agent resets it
            where ``env_step.is_first``.
          env_step: ``[B, ...]``.
          explore: Static. False is the evaluation policy.

        Returns:
          Actions with extras, and the next step state.
        """

    @final
    def act(
        self, networks: PyTree, step_state: PyTree, env_step: EnvStep, *, explore: bool = True
    ) -> tuple[ActionOutput, PyTree]:
        """Call ``step`` on what a policy may see: without parts that are ``eval_only``."""
        env_step = policy_row(self.spec, env_step)
        return self.step(networks, step_state, env_step, explore=explore)

    def step_state_spec(self) -> PyTree:
        """Return a prefix tree of ``PartitionSpec`` over ``"learner"`` for a step state.

        ``P("learner")`` says that a leaf is ``[B, ...]``, a row for each environment, and ``P()``
        that it is anything else (a PRNG key, a scalar). The default finds out by tracing
        ``new_step_state`` for 2 and for 3 environments: a leaf is ``[B, ...]`` if its first
        dimension is 2 and 3.
        """

        def shapes(num_envs: int) -> PyTree:
            run = RunSpec(num_envs, num_inferencers=1, steps_per_cycle=1, num_update_devices=1)
            return jax.eval_shape(
                lambda key: self.new_step_state(key, run, 0), jax.eval_shape(jax.random.key, 0)
            )

        def spec(two: jax.ShapeDtypeStruct, three: jax.ShapeDtypeStruct) -> P:
            return P(LEARNER_AXIS) if (two.shape[:1], three.shape[:1]) == ((2,), (3,)) else P()

        return jax.tree.map(spec, shapes(2), shapes(3))

    @functools.cached_property
    def _step_state_spec(self) -> PyTree:
        return self.step_state_spec()

    def shard_step_state(self, step_state: PyTree, sharding: NamedSharding) -> PyTree:
        """Place a step state on the update devices.

        The default places each leaf as ``step_state_spec`` says. On a single device, leaves that
        are there already are not copied.

        Args:
          step_state: On the inference device.
          sharding: ``NamedSharding(mesh, P("learner"))``.
        """
        mesh = sharding.mesh
        if mesh.size == 1:
            only = mesh.devices.flat[0]
            return jax.tree.map(
                lambda x: x if x.devices() == {only} else jax.device_put(x, only), step_state
            )
        try:
            specs = spec_of_each_leaf(self._step_state_spec, step_state)
        except ValueError as error:
            raise UsageError(
                f"{type(self).__name__}.step_state_spec() does not fit its step state ({error}); "
                "return a prefix tree of PartitionSpec for the result of new_step_state"
            ) from error
        return jax.tree.map(
            lambda spec, leaf: jax.device_put(leaf, NamedSharding(mesh, spec)),
            specs,
            step_state,
            is_leaf=is_spec,
        )

    def advance_step_state(self, step_state: PyTree, num_steps: int) -> PyTree:
        """Return a new step state whose exploration is where a run in progress has come.

        For an Inferencer that takes the place of one that failed, and for a run that is resumed
        where step states begin anew. The default, for exploration that does not change over the
        run, returns ``step_state``.

        Args:
          step_state: From ``new_step_state``.
          num_steps: Steps of its vector environment since the beginning of the run.
        """
        return step_state

    # What a trained policy says of an observation.

    def value_networks(self, networks: PyTree, experience: PyTree) -> PyTree:
        """Return what ``acting_value`` needs beside the acting networks; by default nothing.

        It is saved with the policy of the end of a run, and not staged for Inferencers.
        """
        return ()

    def acting_value(
        self, networks: PyTree, value_networks: PyTree, step_state: PyTree, env_step: EnvStep
    ) -> jax.Array:
        """Return what B observations are worth, ``[B]``, as sums of discounted rewards.

        Rewards are in the units of the environment: what the agent scaled is scaled back.
        ``sebulba.Policy.value`` calls this.

        Args:
          networks: Acting networks.
          value_networks: What ``value_networks`` returned.
          step_state: As for ``step``; not donated.
          env_step: ``[B, ...]``.

        Raises:
          UsageError: The agent has no values; that is the default.
        """
        name = type(self).__name__
        raise UsageError(
            f"{name} does not define the value of observations; define {name}.acting_value("
            "networks, value_networks, step_state, env_step)"
        )

    def acting_distribution(
        self, networks: PyTree, step_state: PyTree, env_step: EnvStep
    ) -> PyTree:
        """Return the distribution of the actions for B observations.

        Probabilities ``[B, n]`` for a Discrete, a tuple of those for the entries of a
        MultiDiscrete, and ``sebulba.types.ActionMoments`` for a Box.
        ``sebulba.Policy.distribution`` calls this.

        Args:
          networks: Acting networks.
          step_state: As for ``step``; not donated.
          env_step: ``[B, ...]``.

        Raises:
          UsageError: The agent does not say it; that is the default.
        """
        name = type(self).__name__
        raise UsageError(
            f"{name} does not define the distribution of its actions; define "
            f"{name}.acting_distribution(networks, step_state, env_step)"
        )

    # What the update loop runs.

    def acting_networks(self, networks: PyTree, experience: PyTree) -> PyTree:
        """Return what is staged for Inferencers and saved as the trained policy.

        Where these differ it is ``WithBank``, of which ``networks`` is the policy.
        """
        return networks

    @property
    def player(self) -> Agent:
        """The agent that acts with acting networks alone: in evaluations and as a saved policy."""
        return self

    def bank(self, experience: PyTree) -> PyTree:
        """Return what Inferencers act with beside acting networks, such as opponents.

        It is staged when ``edit`` has changed the state. By default there is none.
        """
        return ()

    @final
    def staged(self, networks: PyTree, experience: PyTree) -> PyTree:
        """Return what Inferencers act with."""
        return with_bank(self.acting_networks(networks, experience), self.bank(experience))

    def edit_due(self, before: int, now: int) -> bool:
        """Tell whether ``edit`` is due, as env steps rose from ``before`` to ``now``; pure."""
        return False

    def edit(
        self, state: AgentState, before: int, now: int, rng: np.random.Generator
    ) -> AgentState:
        """Return the state as the host changes it between two trajectories, or rounds in lockstep.

        Args:
          state: On the update devices, without step states; arrays that change may be donated.
          before: As in ``edit_due``.
          now: As in ``edit_due``.
          rng: Chance that depends on the seed of the run and on ``now`` alone.
        """
        return state

    @abc.abstractmethod
    def update_experience(
        self,
        experience: PyTree,
        initial_step_state: PyTree,
        final_step_state: PyTree,
        trajectory: Trajectory,
        networks: PyTree,
    ) -> PyTree:
        """Take one trajectory in.

        Args:
          experience: Donated.
          initial_step_state: Donated. Step state before row 0 was acted on.
          final_step_state: Donated. Step state after row T-1, before row T.
          trajectory: Donated. ``[T+1, B / devices, ...]``.
          networks: Read only.
        """

    def reported_metrics(self, means: dict[str, float]) -> dict[str, float]:
        """Return what is written of the means of the metrics over some updates; by default all."""
        return means

    def lasting_experience(self, experience: PyTree) -> PyTree:
        """Return the parts of an experience without which networks are worth less.

        Such as the statistics with which observations are normalised. They are kept where the rest,
        a replay, is dropped on resume. By default there are none.
        """
        return ()

    def with_lasting(self, experience: PyTree, lasting: PyTree) -> PyTree:
        """Return ``experience`` with what ``lasting_experience`` returned of another one."""
        return experience

    # Helpers.

    @property
    def sees_final_obs(self) -> bool:
        """Whether environment steps have ``EnvStep.final``."""
        return self.uses_final_obs and self.spec.final_obs

    @final
    def empty_env_step(self, num_envs: int) -> EnvStep:
        """Return an environment step of zeros, ``[B, ...]``, with all leaves of this run."""
        row = empty_env_step(self.spec, num_envs)
        return row._replace(final=FinalObs.none(row.obs)) if self.sees_final_obs else row

    @final
    def empty_trajectory(self, acting_networks: PyTree, run: RunSpec) -> Trajectory:
        """Return a trajectory of zeros with the shapes and dtypes that this run will have."""
        env_step = self.empty_env_step(run.num_envs)
        step_state = jax.eval_shape(lambda key: self.new_step_state(key, run, 0), jax.random.key(0))
        output, _ = jax.eval_shape(self.act, acting_networks, step_state, env_step)

        def rows(num_rows: int, tree: PyTree) -> PyTree:
            def zeros(leaf: PyTree) -> jax.Array:
                dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)  # 64 bits are 32 on a device
                return jnp.zeros((num_rows, *leaf.shape), dtype)

            return jax.tree.map(zeros, tree)

        return Trajectory(
            env_step=rows(run.steps_per_cycle + 1, env_step),
            action=rows(run.steps_per_cycle, output.action),
            extras=rows(run.steps_per_cycle, output.extras),
            policy_version=jnp.int32(0),
            inferencer=jnp.int32(0),
            cycle=jnp.int32(0),
        )
