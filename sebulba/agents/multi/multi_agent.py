"""Many agents as one: each member learns as if it were alone."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from sebulba.agent import LEARNER_AXIS, Agent, Loss, is_spec, spec_of_each_leaf
from sebulba.agents.bases.off_policy import OffPolicyAgent
from sebulba.agents.configs.agent_config import AgentConfig, agent_class_of, make_agent
from sebulba.agents.configs.frozen import FrozenConfig
from sebulba.agents.configs.multi_agent import MultiAgentConfig, assigned
from sebulba.agents.configs.replay import Schedule
from sebulba.agents.multi import update_rates, waiting_agents
from sebulba.agents.multi.auxiliary import Auxiliary, Seen
from sebulba.agents.multi.central_critic import critic_spec, policy_part, with_others
from sebulba.agents.multi.update_rates import MARKS, PacedExperience, PacedOpt
from sebulba.agents.multi.waiting_agents import TurnState
from sebulba.agents.nets.torso import has_convolutions
from sebulba.errors import UsageError, shown
from sebulba.types import (
    COMMON,
    ActionOutput,
    EnvSpec,
    EnvStep,
    MultiAgentSpec,
    PyTree,
    RunSpec,
    Trajectory,
    empty_env_step,
    without_parts,
)

_OF_AUXILIARY = "auxiliary", "RandomNetworkDistillationConfig()"
DUE = "due"
"""Metric of a member: its share of the updates."""


class Member(NamedTuple):
    """An agent, and whom it plays."""

    agent: Agent
    """It learns from the slots of an environment as if they were environments."""
    group: str
    """Their group."""
    slots: tuple[int, ...]
    """Their numbers in it."""
    waits: bool
    """Its slots do not act in every row."""
    sees_all: bool = False
    """It learns with what all others observe and what is ``eval_only``; it acts without."""
    trains: bool = True
    """It learns; otherwise it is frozen."""


class WaitingStep(NamedTuple):
    """The step state of a member whose slots do not act in every row."""

    agent: PyTree
    """That of its agent."""
    turns: TurnState
    """``[B * A, ...]``."""


class WaitingExperience(NamedTuple):
    """The experience of such a member."""

    agent: PyTree
    """That of its agent."""
    uncredited: jax.Array
    """Scalar: sum of the sizes of the rewards before the first action of an episode."""


class MultiAgent(Agent[MultiAgentConfig]):
    """A member for each policy; ``networks``, ``opt`` and so on are dicts by member.

    ``[B, A]`` of a group are ``B * A`` rows to a member, the slots of an environment side by side.
    What is ``eval_only`` in an observation is removed before a member acts, and before it learns,
    unless it has a central critic.
    Auxiliaries are in the same dicts, but for the step state.
    """

    def __init__(self, spec: MultiAgentSpec, config: MultiAgentConfig) -> None:
        """Make the agent of every member.

        Raises:
          UsageError: A member's agent cannot take the spaces of its group, a name is of no group,
            or a slot has no agent.
        """
        if not isinstance(spec, MultiAgentSpec):
            raise UsageError(
                f"{type(config).__name__} needs an environment of many agents, and this one has a "
                f"single agent, {shown(spec)}; leave out --trainer, or use the configuration of a "
                "single agent, such as PPOConfig() or ppo"
            )
        super().__init__(spec, config)  # type: ignore[arg-type]
        self.population = spec
        self.groups = spec.groups
        self.members: dict[str, Member] = {}
        slots = {name: group.slots for name, group in spec.groups.items()}
        for name, (group, indices, one) in assigned(slots, config.players()).items():
            sees_all = agent_class_of(one).uses_eval_only(one)
            seen = critic_spec(spec, group) if sees_all else spec.groups[group].spec
            waits, trains = spec.groups[group].waits, not isinstance(one, FrozenConfig)
            member = Member(_agent_of(name, seen, one), group, indices, waits, sees_all, trains)
            _check_can_wait(name, member)
            self.members[name] = _sharing_common(member)
        self.auxiliaries: dict[str, Auxiliary] = {
            name: agent_class_of(one, *_OF_AUXILIARY)(spec, one)
            for name, one in config.auxiliary.items()
        }
        if twice := sorted(self.members.keys() & self.auxiliaries.keys()):
            raise UsageError(f"auxiliary {twice[0]!r} has the name of a member; give it another")
        key = jax.eval_shape(jax.random.key, 0)
        shapes = [jax.eval_shape(one.new_networks, key) for one in self.auxiliaries.values()]
        in_one = all(m.agent.updates_in_one_program for m in self.members.values() if m.trains)
        self.updates_in_one_program = in_one and not has_convolutions(shapes)

    # What is made once.

    def _keys(self, key: jax.Array) -> dict[str, jax.Array]:
        """Return a key for each member; one that is alone gets what a single agent would."""
        if len(self.members) + len(self.auxiliaries) == 1:
            return dict.fromkeys(self.members, key)
        names = (*self.members, *self.auxiliaries)
        return {name: jax.random.fold_in(key, i) for i, name in enumerate(names)}

    def check_run(self, run: RunSpec) -> None:
        if not any(member.trains for member in self.members.values()):
            raise UsageError(
                "all members are frozen, so nothing can learn; leave one out of frozen, or play "
                "them with sebulba.evaluate"
            )
        for name, member in self.members.items():
            try:
                member.agent.check_run(_run_of(member, run))
            except UsageError as error:
                raise UsageError(f"member {name!r}: {error}") from error

    def for_run(self, run: RunSpec) -> Self:
        there = copy.copy(self)
        there.members = {
            name: member._replace(agent=member.agent.for_run(run))
            for name, member in self.members.items()
        }
        there.__dict__.pop("_schedules", None)
        return there

    @property
    def _learners(self) -> dict[str, Any]:
        trained = {name: member.agent for name, member in self.members.items() if member.trains}
        return {**trained, **self.auxiliaries}

    def _all(self) -> dict[str, Any]:
        return {**{name: m.agent for name, m in self.members.items()}, **self.auxiliaries}

    def new_networks(self, key: jax.Array) -> PyTree:
        keys = self._keys(key)
        networks = {name: one.new_networks(keys[name]) for name, one in self._all().items()}
        if self._schedules:
            networks[MARKS] = {name: jnp.float32(0) for name in self._schedules}
        return networks

    def new_opt(self, networks: PyTree) -> PyTree:
        opt = {name: one.new_opt(networks[name]) for name, one in self._all().items()}
        if self._schedules:
            return PacedOpt(opt, {name: jnp.int32(0) for name in self._schedules})
        return opt

    def new_experience(self, key: jax.Array, networks: PyTree, run: RunSpec) -> PyTree:
        keys = self._keys(key)

        def new(name: str, member: Member) -> PyTree:
            own = member.agent.new_experience(keys[name], networks[name], _run_of(member, run))
            return WaitingExperience(own, jnp.float32(0)) if member.waits else own

        experience = {name: new(name, member) for name, member in self.members.items()}
        if self.auxiliaries:
            row = empty_env_step(self.population, run.num_envs)
            size = run.steps_per_cycle + 1
            seen = self._seen(jax.tree.map(lambda x: jnp.zeros((size, *x.shape), x.dtype), row))
            for name, one in self.auxiliaries.items():
                experience[name] = one.new_experience(keys[name], networks[name], seen)
        if self._schedules:
            return PacedExperience(experience, jnp.int32(0), jnp.int32(0))
        return experience

    def new_step_state(self, key: jax.Array, run: RunSpec, inferencer: int) -> PyTree:
        keys = self._keys(key)
        return {
            name: self._new_member_step(member, keys[name], run, inferencer)
            for name, member in self.members.items()
        }

    def _new_member_step(
        self, member: Member, key: jax.Array, run: RunSpec, inferencer: int
    ) -> PyTree:
        run = _run_of(member, run)
        own = member.agent.new_step_state(key, run, inferencer)
        if not member.waits:
            return own
        agent = member.agent
        row = jax.tree.map(jnp.asarray, empty_env_step(agent.spec, run.num_envs))

        def extras(key: jax.Array) -> PyTree:
            networks = agent.new_networks(key)
            state = agent.new_experience(key, networks, run)
            return agent.act(agent.acting_networks(networks, state), own, row)[0].extras

        shapes = jax.eval_shape(extras, jax.random.key(0))
        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        rows = _rows_of_step_state(agent, own)
        return WaitingStep(own, waiting_agents.new_turns(row, row.prev_action, empty, rows))  # type: ignore[arg-type]

    def step_state_spec(self) -> PyTree:
        def spec(member: Member) -> PyTree:
            own = member.agent.step_state_spec()
            return WaitingStep(own, P(LEARNER_AXIS)) if member.waits else own  # type: ignore[arg-type]

        return {name: spec(member) for name, member in self.members.items()}

    def advance_step_state(self, step_state: PyTree, num_steps: int) -> PyTree:
        states = dict(step_state)
        for name, member in self.members.items():
            own = member.agent.advance_step_state(self._inner(name, states[name]), num_steps)
            states[name] = self._with_inner(name, states[name], own)
        return states

    # Acting.

    def step(
        self, networks: PyTree, step_state: PyTree, env_step: EnvStep, *, explore: bool = True
    ) -> tuple[ActionOutput, PyTree]:
        """Choose the actions of every slot, ``{group: [B, A, ...]}``."""
        states, actions, extras = {}, {}, {}
        num_envs = jax.tree.leaves(env_step.reward)[0].shape[0]
        for name, member in self.members.items():
            row, given = self._view(member, env_step, 0), (networks[name], step_state[name])
            if member.waits:
                acting = self._acting(member, env_step, 0)
                output, states[name] = _step_waiting(member.agent, *given, row, acting, explore)
            else:
                output, states[name] = member.agent.act(*given, row, explore=explore)
            apart = (num_envs, len(member.slots))
            actions[name], extras[name] = jax.tree.map(
                lambda x, apart=apart: x.reshape(*apart, *x.shape[1:]),
                (output.action, output.extras),
            )
        return ActionOutput(self._by_group(actions), extras), states  # type: ignore[arg-type]

    def _by_group(self, actions: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Return ``{group: [B, A, ...]}`` of the members' actions ``[B, n, ...]``."""
        by_group = {}
        for group in self.groups:
            mine = [
                (m.slots, actions[name]) for name, m in self.members.items() if m.group == group
            ]
            order = np.argsort([slot for slots, _ in mine for slot in slots])
            joined = mine[0][1]
            if len(mine) > 1:
                joined = jnp.concatenate([action for _, action in mine], axis=1)[:, order]
            by_group[group] = joined
        return by_group

    def acting_networks(self, networks: PyTree, experience: PyTree) -> PyTree:
        own = self._inner_of_each(experience)
        return {n: m.agent.acting_networks(networks[n], own[n]) for n, m in self.members.items()}

    def value_networks(self, networks: PyTree, experience: PyTree) -> PyTree:
        own = self._inner_of_each(experience)
        return {n: m.agent.value_networks(networks[n], own[n]) for n, m in self.members.items()}

    # Rows of a member.

    def _view(self, member: Member, env_step: EnvStep, num_leading: int) -> EnvStep:
        """Return ``[*, B * A, ...]`` of a member's slots, with what its learner sees.

        Args:
          member: Whose rows.
          env_step: ``[*, B, A, ...]`` by group.
          num_leading: Dimensions before B.
        """
        group = self.groups[member.group]
        own = EnvStep(*(field[member.group] for field in env_step[:6]))  # type: ignore[arg-type]
        rows = jax.tree.map(lambda x: self._flat(member, x, num_leading), own)
        obs = rows.obs
        if COMMON in env_step.obs:
            shared = jax.tree.map(
                lambda x: jnp.repeat(jnp.asarray(x), len(member.slots), num_leading),
                env_step.obs[COMMON],
            )
            obs = {**obs, COMMON: shared}
        if member.sees_all:
            slots = member.slots
            obs = with_others(self.population, member.group, slots, obs, env_step, num_leading)
        elif group.spec.eval_only:
            obs = without_parts(obs, group.spec.eval_only)
        return rows._replace(obs=obs)

    def _acting(self, member: Member, env_step: EnvStep, num_leading: int) -> jax.Array:
        return self._flat(member, env_step.acting[member.group], num_leading)

    def _flat(self, member: Member, x: Any, num_leading: int) -> jax.Array:
        """Return ``[*, B * n, ...]`` of the member's n slots, given ``[*, B, A, ...]``."""
        x = jnp.asarray(x)
        if len(member.slots) < len(self.groups[member.group].slots):
            x = jnp.take(x, np.array(member.slots), axis=num_leading + 1)
        return jax.lax.collapse(x, num_leading, num_leading + 2)

    # Learning.

    def update_experience(
        self,
        experience: PyTree,
        initial_step_state: PyTree,
        final_step_state: PyTree,
        trajectory: Trajectory,
        networks: PyTree,
    ) -> PyTree:
        """Give every member its rows of the trajectory, with the rewards of the auxiliaries."""
        new = dict(self._of_each(experience))
        seen = self._seen(trajectory.env_step) if self.auxiliaries else {}
        for name, auxiliary in self.auxiliaries.items():
            new[name] = auxiliary.update_experience(new[name], seen, trajectory, networks[name])
        for name, member in self.members.items():
            if member.trains:
                states = initial_step_state[name], final_step_state[name]
                new[name] = self._member_experience(name, new, states, trajectory, networks)
        if self._schedules:
            return PacedExperience(new, experience.cycle + 1, jnp.int32(0))
        return new

    def _member_experience(
        self,
        name: str,
        experience: dict[str, PyTree],
        states: tuple[PyTree, PyTree],
        trajectory: Trajectory,
        networks: PyTree,
    ) -> PyTree:
        """Return the experience of a member with its rows of the trajectory."""
        member, own, (initial, final) = self.members[name], experience[name], states
        rows = self._rows(name, member, trajectory)
        if member.waits:
            acting = self._acting(member, trajectory.env_step, 1)
            joins = isinstance(member.agent, OffPolicyAgent)
            rows, before = waiting_agents.pack(initial.turns, rows, acting, joins=joins)
            lost = jnp.sum(final.turns.uncredited - initial.turns.uncredited)
            own = own._replace(uncredited=own.uncredited + jax.lax.psum(lost, LEARNER_AXIS))
            initial, final = _with_rows(member.agent, initial.agent, before), final.agent
        rows = self._with_bonuses(networks, experience, member, rows)
        inner = self._inner(name, own)
        new = member.agent.update_experience(inner, initial, final, rows, networks[name])
        return self._with_inner(name, own, new)

    def _with_bonuses(
        self, networks: PyTree, experience: PyTree, member: Member, rows: Trajectory
    ) -> Trajectory:
        """Return a member's rows with the rewards that the auxiliaries add to valid transitions."""
        step, reward = rows.env_step, rows.env_step.reward
        if self.auxiliaries and member.sees_all:
            step = step._replace(obs=policy_part(self.groups[member.group].spec, step.obs))
        for name, auxiliary in self.auxiliaries.items():
            bonus = auxiliary.reward(networks[name], experience[name], member.group, step)
            if bonus is not None:
                reward = reward + jnp.where(step.valid, bonus, 0.0)
        return rows._replace(env_step=rows.env_step._replace(reward=reward))

    def _seen(self, env_step: EnvStep) -> dict[str, Seen]:
        """Return what every group sees of rows ``[T+1, B, A, ...]``."""
        seen = {}
        for name, group in self.groups.items():
            whole = Member(None, name, tuple(range(len(group.slots))), group.waits)  # type: ignore[arg-type]
            rows = self._view(whole, env_step, 1)
            everybody = jnp.ones(rows.reward.shape, jnp.bool_)
            acting = self._acting(whole, env_step, 1) if group.waits else everybody
            seen[name] = Seen(rows, acting)
        return seen

    def _rows(self, name: str, member: Member, trajectory: Trajectory) -> Trajectory:
        return trajectory._replace(
            env_step=self._view(member, trajectory.env_step, 1),
            action=self._flat(member, trajectory.action[member.group], 1),  # type: ignore[call-overload]
            extras=jax.tree.map(lambda x: jax.lax.collapse(x, 1, 3), trajectory.extras[name]),
        )

    def loss(self, networks: PyTree, opt: PyTree, experience: PyTree, key: jax.Array) -> Loss:
        """Return the sum of the losses of all learners, whose networks have nothing in common."""
        keys, own, total = self._keys(key), self._of_each(experience), jnp.float32(0)
        new = dict(own)
        metrics: dict[str, jax.Array] = {}
        for number, name in enumerate(self._learners):
            loss, (new[name], ours) = self._loss_of(name, networks, opt, experience, keys[name])
            total = total + loss if number else loss
            prefix = f"{name}/" if len(own) > 1 else ""
            metrics |= {f"{prefix}{metric}": value for metric, value in ours.items()}
        if self._schedules:
            return total, (experience._replace(of_each=new, update=experience.update + 1), metrics)
        return total, (new, metrics)

    def _loss_of(
        self, name: str, networks: PyTree, opt: PyTree, experience: PyTree, key: jax.Array
    ) -> Loss:
        """Return what the loss of a learner does; where it is not due, what leaves all as it is."""
        own_opt, own = (self._of_each(tree)[name] for tree in (opt, experience))

        def loss(networks: PyTree, inner: PyTree) -> Any:
            return self._learners[name].loss(networks, own_opt, inner, key)

        if self._schedules:
            due = experience.update < self._schedules[name].due(experience.cycle)
            given = loss, networks[name], self._inner(name, own)
            value, (inner, metrics) = update_rates.loss_if(due, *given)
            value = value + due * networks[MARKS][name]
            metrics = {**metrics, "updates": opt.updates[name], DUE: jnp.float32(1)}
        else:
            value, (inner, metrics) = loss(networks[name], self._inner(name, own))
        if self._waits(name):
            metrics = {**metrics, "uncredited_reward": own.uncredited}
            inner = own._replace(agent=inner)
        if self._schedules:
            metrics = {metric: jnp.float32(x * due) for metric, x in metrics.items()}
        return value, (inner, metrics)

    def reported_metrics(self, means: dict[str, float]) -> dict[str, float]:
        """Return the means of the metrics of each learner over the updates that it had."""
        if not self._schedules:
            return means
        shares = {name: means[f"{name}/{DUE}"] for name in self._learners}
        own = update_rates.means_when_due(means, shares)
        return own | {f"{name}/{DUE}": share for name, share in shares.items()}

    def optimize(self, networks: PyTree, opt: PyTree, grads: PyTree) -> tuple[PyTree, PyTree]:
        """Take an optimizer step for every learner that is due."""
        own_opt = self._of_each(opt)
        trained, new_opt = dict(networks), dict(own_opt)
        for name, learner in self._learners.items():
            step: Callable[..., tuple] = learner.optimize
            if self._schedules:
                due = grads[MARKS][name] > 0
                step = functools.partial(jax.lax.cond, due, step, lambda *old: old[:2])
            trained[name], new_opt[name] = step(networks[name], own_opt[name], grads[name])
        if not self._schedules:
            return trained, new_opt
        updates = {name: n + (grads[MARKS][name] > 0) for name, n in opt.updates.items()}
        return trained, PacedOpt(new_opt, updates)

    @functools.cached_property
    def _schedules(self) -> dict[str, Schedule]:
        """After which trajectories every learner has updates; empty where all agree."""
        if len(self._learners) == 1:
            return {}
        found = {
            name: update_rates.schedule_of(name, learner.num_off_policy_optims_per_cycle)
            for name, learner in self._learners.items()
        }
        return found if len(set(found.values())) > 1 else {}

    def _of_each(self, tree: PyTree) -> dict[str, PyTree]:
        """Return the experiences or the optimizer states of all, by name."""
        return tree.of_each if self._schedules else tree

    def _waits(self, name: str) -> bool:
        return name in self.members and self.members[name].waits

    def _inner(self, name: str, tree: PyTree) -> PyTree:
        """Return what the agent of a member, or an auxiliary, has of its state or experience."""
        return tree.agent if self._waits(name) else tree

    def _with_inner(self, name: str, tree: PyTree, own: PyTree) -> PyTree:
        return tree._replace(agent=own) if self._waits(name) else own

    def _inner_of_each(self, experience: PyTree) -> dict[str, PyTree]:
        """Return the experiences of the agents of all members, and of the auxiliaries, by name."""
        return {name: self._inner(name, own) for name, own in self._of_each(experience).items()}

    def num_off_policy_optims_per_cycle(self, cycle: int) -> int:
        """Return the number of updates of the learner that has most.

        It may take several values in a run, each of which may take a program of its own.

        Raises:
          UsageError: A learner has not as many as its first trajectories let expect.
        """
        due = {
            name: learner.num_off_policy_optims_per_cycle(cycle)
            for name, learner in self._learners.items()
        }
        most = max(due.values())
        planned = {name: one.due(cycle) for name, one in self._schedules.items()}
        if due != (planned or dict.fromkeys(due, most)):
            raise UsageError(
                f"members have different numbers of updates after trajectory {cycle} ({due}) than "
                "their first trajectories imply; num_off_policy_optims_per_cycle of each must be "
                "0 before some trajectory and, but for that one, equal after every k-th"
            )
        return most

    def experience_spec(self) -> PyTree:

        def spec(name: str, one: Any) -> PyTree:
            own = one.experience_spec()
            return WaitingExperience(own, P()) if self._waits(name) else own  # type: ignore[arg-type]

        specs = {name: spec(name, one) for name, one in self._all().items()}
        return PacedExperience(specs, P(), P()) if self._schedules else specs  # type: ignore[arg-type]

    def lasting_experience(self, experience: PyTree) -> PyTree:
        own = self._inner_of_each(experience)
        return {name: m.agent.lasting_experience(own[name]) for name, m in self.members.items()}

    def with_lasting(self, experience: PyTree, lasting: PyTree) -> PyTree:
        own = dict(self._of_each(experience))
        for name, member in self.members.items():
            kept = member.agent.with_lasting(self._inner(name, own[name]), lasting[name])
            own[name] = self._with_inner(name, own[name], kept)
        return experience._replace(of_each=own) if self._schedules else own

    def refit_experience(self, new: PyTree, saved: PyTree) -> PyTree | None:
        """Keep what every member can keep; None if one cannot."""
        kept, before = dict(self._of_each(saved)), self._inner_of_each(saved)
        for name, fresh in self._inner_of_each(new).items():
            own = self._all()[name].refit_experience(fresh, before[name])
            if own is None:
                return None
            kept[name] = self._with_inner(name, kept[name], own)
        return saved._replace(of_each=kept) if self._schedules else kept


def _agent_of(name: str, spec: EnvSpec, config: AgentConfig | FrozenConfig) -> Agent:
    """Return the agent of a member; an error of a frozen one names it."""
    try:
        return make_agent(spec, config)
    except UsageError as error:
        if not isinstance(config, FrozenConfig):
            raise
        raise UsageError(f"frozen member {name!r}: {error}") from error


def _sharing_common(member: Member) -> Member:
    """Let a replay keep once what the slots of an environment all observe, if they do it at once.

    Where slots wait, the rows that are side by side are of different times.
    """
    agent, space = member.agent, member.agent.spec.observation_space
    has_common = isinstance(space, gymnasium.spaces.Dict) and COMMON in space.spaces
    if isinstance(agent, OffPolicyAgent) and has_common and not member.waits:
        agent.replay = dataclasses.replace(agent.replay, slots=len(member.slots))
    return member


def _check_can_wait(name: str, member: Member) -> None:
    if not (member.waits and isinstance(member.agent, OffPolicyAgent)):
        return
    if getattr(member.agent.config, "lstm_size", 0):
        raise UsageError(
            f"member {name!r} is {type(member.agent).__name__} with an LSTM, whose sequences span "
            f"trajectories, and agents of group {member.group!r} may have to wait, so trajectories "
            "have gaps; use Impala or PPO with an LSTM, or lstm_size=0"
        )


def _run_of(member: Member, run: RunSpec) -> RunSpec:
    return dataclasses.replace(run, num_envs=run.num_envs * len(member.slots))


def _step_waiting(
    agent: Agent,
    networks: PyTree,
    state: WaitingStep,
    row: EnvStep,
    acting: jax.Array,
    explore: bool,
) -> tuple[ActionOutput, WaitingStep]:
    """Act on what each slot is shown, and change nothing of those that wait."""
    shown = waiting_agents.show(state.turns, row, acting)
    output, new = agent.act(networks, state.agent, shown.row, explore=explore)
    before = _rows_of_step_state(agent, state.agent)
    rows = waiting_agents.chosen(shown.keep, _rows_of_step_state(agent, new), before)
    pending = waiting_agents.Pending(shown.row, output.action, output.extras, before)
    turns = waiting_agents.advance(state.turns, row, shown, pending)
    return output, WaitingStep(_with_rows(agent, new, rows), turns)


def _rows_of_step_state(agent: Agent, step_state: PyTree) -> list[jax.Array]:
    """Return the leaves of a step state that are ``[N, ...]``."""
    return [leaf for leaf, is_rows in _leaves(agent, step_state) if is_rows]


def _with_rows(agent: Agent, step_state: PyTree, rows: list[jax.Array]) -> PyTree:
    """Return a step state with other rows."""
    new = iter(rows)
    merged = [next(new) if is_rows else leaf for leaf, is_rows in _leaves(agent, step_state)]
    return jax.tree.unflatten(jax.tree.structure(step_state), merged)


def _leaves(agent: Agent, step_state: PyTree) -> list[tuple[jax.Array, bool]]:
    """Return the leaves of a step state, and whether they are ``[N, ...]``."""
    specs = jax.tree.leaves(spec_of_each_leaf(agent.step_state_spec(), step_state), is_leaf=is_spec)
    return list(zip(jax.tree.leaves(step_state), map(any, specs), strict=True))
