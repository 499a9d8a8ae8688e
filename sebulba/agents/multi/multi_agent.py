"""Many agents as one: each member learns as if it were alone."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from sebulba.agent import LEARNER_AXIS, Agent, is_spec, spec_of_each_leaf
from sebulba.agents.bases.off_policy import OffPolicyAgent
from sebulba.agents.configs.agent_config import agent_class_of, make_agent
from sebulba.agents.configs.multi_agent import MultiAgentConfig, assigned
from sebulba.agents.multi import turns
from sebulba.agents.multi.central import critic_spec, with_others
from sebulba.agents.multi.turns import TurnState
from sebulba.errors import UsageError, shown
from sebulba.types import (
    COMMON,
    ActionOutput,
    EnvStep,
    MultiAgentSpec,
    PyTree,
    RunSpec,
    Trajectory,
    empty_env_step,
    without_parts,
)


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
    """

    def __init__(self, spec: MultiAgentSpec, config: MultiAgentConfig) -> None:
        """Make the agent of every member.

        Raises:
          UsageError: A member's agent cannot take the spaces of its group, a name is of no group,
            or a slot has no agent.
        """
        if not isinstance(spec, MultiAgentSpec):
            raise UsageError(
                f"MultiAgent needs an environment of many agents; {shown(spec)} has one: give its "
                "agent the configuration of one, such as PPOConfig()"
            )
        super().__init__(spec, config)  # type: ignore[arg-type]
        self.population = spec
        self.groups = spec.groups
        self.members: dict[str, Member] = {}
        slots = {name: group.slots for name, group in spec.groups.items()}
        for name, (group, indices, one) in assigned(slots, config.agents).items():
            sees_all = agent_class_of(one).uses_eval_only(one)
            seen = critic_spec(spec, group) if sees_all else spec.groups[group].spec
            waits = spec.groups[group].waits
            member = Member(make_agent(seen, one), group, indices, waits, sees_all)
            _check_can_wait(name, member)
            self.members[name] = member

    # What is made once.

    def _keys(self, key: jax.Array) -> dict[str, jax.Array]:
        """Return a key for each member; one that is alone gets what a single agent would."""
        if len(self.members) == 1:
            return dict.fromkeys(self.members, key)
        return {name: jax.random.fold_in(key, i) for i, name in enumerate(self.members)}

    def check_run(self, run: RunSpec) -> None:
        """Check that the hyper-parameters of every member fit, and that updates come together.

        Raises:
          UsageError: They do not.
        """
        for name, member in self.members.items():
            try:
                member.agent.check_run(_run_of(member, run))
            except UsageError as error:
                raise UsageError(f"member {name!r}: {error}") from error

    def new_networks(self, key: jax.Array) -> PyTree:
        """Return the initial networks of every member."""
        keys = self._keys(key)
        return {name: m.agent.new_networks(keys[name]) for name, m in self.members.items()}

    def new_opt(self, networks: PyTree) -> PyTree:
        """Return the initial optimizer state of every member."""
        return {name: m.agent.new_opt(networks[name]) for name, m in self.members.items()}

    def new_experience(self, key: jax.Array, networks: PyTree, run: RunSpec) -> PyTree:
        """Return the initial experience of every member."""
        keys = self._keys(key)

        def new(name: str, member: Member) -> PyTree:
            own = member.agent.new_experience(keys[name], networks[name], _run_of(member, run))
            return WaitingExperience(own, jnp.float32(0)) if member.waits else own

        return {name: new(name, member) for name, member in self.members.items()}

    def new_step_state(self, key: jax.Array, run: RunSpec, inferencer: int) -> PyTree:
        """Return the initial step state of every member."""
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
        return WaitingStep(own, turns.new_turns(row, row.prev_action, empty, rows))  # type: ignore[arg-type]

    def step_state_spec(self) -> PyTree:
        """Split what has a row for each environment."""

        def spec(member: Member) -> PyTree:
            own = member.agent.step_state_spec()
            return WaitingStep(own, P(LEARNER_AXIS)) if member.waits else own  # type: ignore[arg-type]

        return {name: spec(member) for name, member in self.members.items()}

    def advance_step_state(self, step_state: PyTree, num_steps: int) -> PyTree:
        """Let the exploration of every member be where it has come."""

        def advanced(member: Member, state: PyTree) -> PyTree:
            if member.waits:
                own = member.agent.advance_step_state(state.agent, num_steps)
                return state._replace(agent=own)
            return member.agent.advance_step_state(state, num_steps)

        return {name: advanced(m, step_state[name]) for name, m in self.members.items()}

    # Acting.

    def step(
        self, networks: PyTree, step_state: PyTree, env_step: EnvStep, *, explore: bool = True
    ) -> tuple[ActionOutput, PyTree]:
        """Choose the actions of every slot, ``{group: [B, A, ...]}``."""
        states, actions, extras = {}, {}, {}
        num_envs = jax.tree.leaves(env_step.reward)[0].shape[0]
        for name, member in self.members.items():
            act = self._step_waiting if member.waits else self._step_always
            output, states[name] = act(
                member, networks[name], step_state[name], env_step, explore=explore
            )
            apart = (num_envs, len(member.slots))
            actions[name], extras[name] = jax.tree.map(
                lambda x, apart=apart: x.reshape(*apart, *x.shape[1:]),
                (output.action, output.extras),
            )
        return ActionOutput(self._by_group(actions), extras), states  # type: ignore[arg-type]

    def _step_always(
        self, member: Member, networks: PyTree, state: PyTree, env_step: EnvStep, *, explore: bool
    ) -> tuple[ActionOutput, PyTree]:
        return member.agent.act(networks, state, self._view(member, env_step, 0), explore=explore)

    def _step_waiting(
        self,
        member: Member,
        networks: PyTree,
        state: WaitingStep,
        env_step: EnvStep,
        *,
        explore: bool,
    ) -> tuple[ActionOutput, WaitingStep]:
        """Act on what each slot is shown, and change nothing of those that wait."""
        agent, row = member.agent, self._view(member, env_step, 0)
        shown = turns.show(state.turns, row, self._acting(member, env_step, 0))
        output, new = agent.act(networks, state.agent, shown.row, explore=explore)
        before = _rows_of_step_state(agent, state.agent)
        new = _with_rows(
            agent, new, turns.chosen(shown.keep, _rows_of_step_state(agent, new), before)
        )
        pending = turns.Pending(shown.row, output.action, output.extras, before)
        return output, WaitingStep(new, turns.advance(state.turns, row, shown, pending))

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
        """Return the acting networks of every member."""
        return {
            name: m.agent.acting_networks(networks[name], _own(m, experience[name]))
            for name, m in self.members.items()
        }

    def value_networks(self, networks: PyTree, experience: PyTree) -> PyTree:
        """Return what the values of every member need."""
        return {
            name: m.agent.value_networks(networks[name], _own(m, experience[name]))
            for name, m in self.members.items()
        }

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
                lambda x: _repeated(x, len(member.slots), num_leading), env_step.obs[COMMON]
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
        begin, rest = x.shape[:num_leading], x.shape[num_leading + 2 :]
        return x.reshape(*begin, x.shape[num_leading] * x.shape[num_leading + 1], *rest)

    # Learning.

    def update_experience(
        self,
        experience: PyTree,
        initial_step_state: PyTree,
        final_step_state: PyTree,
        trajectory: Trajectory,
        networks: PyTree,
    ) -> PyTree:
        """Give every member its rows of the trajectory."""
        new = {}
        for name, member in self.members.items():
            rows = self._rows(name, member, trajectory)
            initial, final = initial_step_state[name], final_step_state[name]
            own = _own(member, experience[name])
            if member.waits:
                rows, before = turns.pack(
                    initial.turns,
                    rows,
                    self._acting(member, trajectory.env_step, 1),
                    joins=isinstance(member.agent, OffPolicyAgent),
                )
                lost = jnp.sum(final.turns.uncredited - initial.turns.uncredited)
                initial, final = _with_rows(member.agent, initial.agent, before), final.agent
            own = member.agent.update_experience(own, initial, final, rows, networks[name])
            if member.waits:
                total = experience[name].uncredited + jax.lax.psum(lost, LEARNER_AXIS)
                own = WaitingExperience(own, total)
            new[name] = own
        return new

    def _rows(self, name: str, member: Member, trajectory: Trajectory) -> Trajectory:
        return trajectory._replace(
            env_step=self._view(member, trajectory.env_step, 1),
            action=self._flat(member, trajectory.action[member.group], 1),  # type: ignore[call-overload]
            extras=jax.tree.map(
                lambda x: x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:]),
                trajectory.extras[name],
            ),
        )

    def loss(
        self, networks: PyTree, opt: PyTree, experience: PyTree, key: jax.Array
    ) -> tuple[jax.Array, tuple[PyTree, dict[str, jax.Array]]]:
        """Return the sum of the members' losses, whose networks have nothing in common."""
        keys, total = self._keys(key), jnp.float32(0)
        new: dict[str, PyTree] = {}
        metrics: dict[str, jax.Array] = {}
        for name, member in self.members.items():
            own = _own(member, experience[name])
            loss, (own, ours) = member.agent.loss(networks[name], opt[name], own, keys[name])
            total = total + loss if new else loss
            if member.waits:
                ours = {**ours, "uncredited_reward": experience[name].uncredited}
                own = experience[name]._replace(agent=own)
            new[name] = own
            prefix = f"{name}/" if len(self.members) > 1 else ""
            metrics |= {f"{prefix}{metric}": value for metric, value in ours.items()}
        return total, (new, metrics)

    def optimize(self, networks: PyTree, opt: PyTree, grads: PyTree) -> tuple[PyTree, PyTree]:
        """Take an optimizer step for every member."""
        done = {
            name: m.agent.optimize(networks[name], opt[name], grads[name])
            for name, m in self.members.items()
        }
        return {n: one[0] for n, one in done.items()}, {n: one[1] for n, one in done.items()}

    def num_off_policy_optims_per_cycle(self, cycle: int) -> int:
        """Return the number of updates, on which all members agree.

        Raises:
          UsageError: They do not.
        """
        due = {
            name: m.agent.num_off_policy_optims_per_cycle(cycle) for name, m in self.members.items()
        }
        if len(set(due.values())) > 1:
            raise UsageError(
                f"members have different numbers of updates after trajectory {cycle}: {due}; give "
                "them equal epochs and minibatches, or equal replays"
            )
        return next(iter(due.values()))

    def experience_spec(self) -> PyTree:
        """Return what the members' agents say."""

        def spec(member: Member) -> PyTree:
            own = member.agent.experience_spec()
            return WaitingExperience(own, P()) if member.waits else own  # type: ignore[arg-type]

        return {name: spec(member) for name, member in self.members.items()}

    def refit_experience(self, new: PyTree, saved: PyTree) -> PyTree | None:
        """Keep what every member can keep; None if one cannot."""
        kept = {}
        for name, member in self.members.items():
            own = member.agent.refit_experience(_own(member, new[name]), _own(member, saved[name]))
            if own is None:
                return None
            kept[name] = saved[name]._replace(agent=own) if member.waits else own
        return kept


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


def _own(member: Member, experience: PyTree) -> PyTree:
    return experience.agent if member.waits else experience


def _repeated(x: Any, count: int, num_leading: int) -> jax.Array:
    """Return ``[*, B * count, ...]`` of ``[*, B, ...]``: the same for slots of an environment."""
    x = jnp.asarray(x)
    begin, size, rest = x.shape[:num_leading], x.shape[num_leading], x.shape[num_leading + 1 :]
    apart = jnp.expand_dims(x, num_leading + 1)
    return jnp.broadcast_to(apart, (*begin, size, count, *rest)).reshape(
        *begin, size * count, *rest
    )


def _rows_of_step_state(agent: Agent, step_state: PyTree) -> list[jax.Array]:
    """Return the leaves of a step state that are ``[N, ...]``."""
    specs = jax.tree.leaves(spec_of_each_leaf(agent.step_state_spec(), step_state), is_leaf=is_spec)
    leaves = jax.tree.leaves(step_state)
    return [leaf for leaf, spec in zip(leaves, specs, strict=True) if any(spec)]


def _with_rows(agent: Agent, step_state: PyTree, rows: list[jax.Array]) -> PyTree:
    """Return a step state with other rows."""
    specs = jax.tree.leaves(spec_of_each_leaf(agent.step_state_spec(), step_state), is_leaf=is_spec)
    leaves, structure = jax.tree.flatten(step_state)
    new = iter(rows)
    merged = [next(new) if any(spec) else leaf for leaf, spec in zip(leaves, specs, strict=True)]
    return jax.tree.unflatten(structure, merged)
