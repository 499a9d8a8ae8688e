"""The agent of a population: members that train side by side (Jaderberg et al. 2017)."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from sebulba.agent import LEARNER_AXIS, Agent, AgentState, Loss, WithBank
from sebulba.agents.configs import AgentConfig, make_agent
from sebulba.agents.configs.agent_config import agent_class_of
from sebulba.errors import UsageError
from sebulba.support.checks import require
from sebulba.types import ActionOutput, EnvStep, MultiAgentSpec, PyTree, RunSpec, Trajectory
from sebulba_league.agent import LeagueAgent
from sebulba_league.matchmakers import win_rates
from sebulba_league.population_config import (
    LeaguePopulationConfig,
    PopulationConfig,
    with_values,
)


class PopulationStep(NamedTuple):
    """The step state."""

    members: tuple[PyTree, ...]
    """Those of the N members."""
    score: jax.Array
    """``[B]`` float32: sum of rewards in the episode so far, the mean over the agents."""
    running: jax.Array
    """``[B]`` bool: an episode goes on, or ended without a row in which all agents were told."""


class PopulationExtras(NamedTuple):
    """Extras of a trajectory."""

    members: PyTree
    """``[T, B, ...]``: those of the members, each in its rows."""
    score: jax.Array
    """``[T, B]``: sum of rewards in the episode that goes on, or that ``over`` counts."""
    over: jax.Array
    """``[T, B]`` bool: an episode ended in this row, or was seen to be over when the next began."""


class PopulationOpt(NamedTuple):
    """The optimizer state."""

    members: tuple[PyTree, ...]
    """Those of the members."""
    varied: dict[str, jax.Array]
    """``[N]`` float32: hyper-parameters of the members, by name."""


class PopulationExperience(NamedTuple):
    """The experience."""

    members: tuple[PyTree, ...]
    """Those of the members."""
    varied: dict[str, jax.Array]
    """As in ``PopulationOpt``."""
    returns: jax.Array
    """``[N]`` float32: sum of the returns of each member's episodes; old ones count less."""
    episodes: jax.Array
    """``[N]`` float32: number of these episodes, counted alike."""


class _Varied:
    """A positive hyper-parameter that is being traced; JAX takes it for its value.

    It is true, as positive numbers are, so that agents may ask whether there is a coefficient.
    """

    def __init__(self, value: jax.Array) -> None:
        self._value = value

    def __jax_array__(self) -> jax.Array:
        return self._value

    def __mul__(self, other: Any) -> jax.Array:
        return self._value * other

    def __add__(self, other: Any) -> jax.Array:
        return self._value + other

    def __sub__(self, other: Any) -> jax.Array:
        return self._value - other

    def __rsub__(self, other: Any) -> jax.Array:
        return other - self._value

    def __neg__(self) -> jax.Array:
        return -self._value

    __rmul__, __radd__ = __mul__, __add__


class PopulationAgent(Agent[PopulationConfig | LeaguePopulationConfig]):
    """Environment b is of member ``b mod N``, which learns from its rows as if it were alone.

    After ``exploit_every`` env steps the worst members take over networks, optimizer state and
    hyper-parameters from some of the best (truncation selection), and perturb the latter. The best
    member is the trained policy.
    """

    def __init__(self, spec: Any, config: PopulationConfig | LeaguePopulationConfig) -> None:
        """Make the agent that every member is.

        Raises:
          UsageError: It cannot take the spaces, or there is no fitness.
        """
        super().__init__(spec, config)  # type: ignore[arg-type]
        self._inner_config = _inner_of(config, spec)
        self._inner = make_agent(spec, self._inner_config)
        self._run: RunSpec | None = None
        self._size = config.size
        self.uses_final_obs = self._inner.uses_final_obs
        self.updates_in_one_program = self._inner.updates_in_one_program
        is_zero_sum = isinstance(spec, MultiAgentSpec) and any(
            team.payoff == "zero_sum" for team in spec.teams[:1]
        )
        require(
            not isinstance(self._inner, LeagueAgent) or bool(self._inner.anchors),
            "agent.anchors",
            {},
            "must have an opponent against which all members of a population can be compared",
            "use {'random': 'legal-random'} (--agent.anchors random legal-random)",
        )
        if is_zero_sum and not isinstance(self._inner, LeagueAgent):
            raise UsageError(
                "returns of a zero-sum game say nothing of a member that plays itself; use "
                "Population(League(SelfPlay(...), anchors={'random': 'legal-random'})), or "
                "--trainer population league --agent.anchors random legal-random"
            )

    @classmethod
    def uses_eval_only(cls, config: Any) -> bool:
        inner = config.inner(many=False)
        return agent_class_of(inner).uses_eval_only(inner)

    @property
    def player(self) -> Agent:
        return self._inner.player

    # What is made once.

    def _part(self, run: RunSpec) -> RunSpec:
        return dataclasses.replace(run, num_envs=run.num_envs // self._size)

    def check_run(self, run: RunSpec) -> None:
        if run.num_hosts > 1:
            raise UsageError(
                f"a population learns on one host, and there are {run.num_hosts}; leave out "
                "distributed.hosts"
            )
        unit = self._size * run.num_update_devices
        if run.num_envs % unit:
            below = run.num_envs // unit * unit
            raise UsageError(
                f"num_envs={run.num_envs} must be divisible by {unit}: {self._size} members x "
                f"{run.num_update_devices} update devices; use "
                f"{f'{below} or ' if below else ''}{below + unit}, or another size"
            )
        try:
            self._inner.check_run(self._part(run))
        except UsageError as error:
            raise UsageError(f"each of the {self._size} members: {error}") from error

    def for_run(self, run: RunSpec) -> Self:
        there = copy.copy(self)
        there._run = self._part(run)
        there._inner = self._inner.for_run(there._run)
        return there

    def _each(self, make: Callable[[int], PyTree]) -> tuple[PyTree, ...]:
        return tuple(make(member) for member in range(self._size))

    def new_networks(self, key: jax.Array) -> PyTree:
        return self._each(lambda m: self._inner.new_networks(jax.random.fold_in(key, m)))

    def new_opt(self, networks: PyTree) -> PyTree:
        opt = tuple(self._inner.new_opt(one) for one in networks)
        return PopulationOpt(opt, self._first_values())

    def _first_values(self) -> dict[str, jax.Array]:
        """Return the hyper-parameters with which the members begin."""
        exponents, values = np.linspace(-1, 1, self._size), {}
        for number, name in enumerate(self.config.vary):
            order = np.random.default_rng(number).permutation(self._size)
            base = getattr(next(iter(self.config.agents.values())), name)
            own = [base * self.config.spread ** float(exponents[i]) for i in order]
            values[name] = jnp.array([x if self._takes(name, x) else base for x in own])
        return values

    def _takes(self, name: str, value: float) -> bool:
        """Tell whether agents allow a hyper-parameter to have a value."""
        try:
            for agent in self.config.agents.values():
                dataclasses.replace(agent, **{name: value})  # type: ignore[arg-type]
        except UsageError:
            return False
        return True

    def new_experience(self, key: jax.Array, networks: PyTree, run: RunSpec) -> PyTree:
        part, keys = self._part(run), jax.random.split(key, self._size)
        members = self._each(lambda m: self._inner.new_experience(keys[m], networks[m], part))
        none = jnp.zeros(self._size, jnp.float32)
        return PopulationExperience(members, self._first_values(), none, none)

    def new_step_state(self, key: jax.Array, run: RunSpec, inferencer: int) -> PyTree:
        part, keys = self._part(run), jax.random.split(key, self._size)
        members = self._each(lambda m: self._inner.new_step_state(keys[m], part, inferencer))
        score, running = (jnp.zeros(run.num_envs, dtype) for dtype in (jnp.float32, jnp.bool_))
        return PopulationStep(members, score, running)

    def step_state_spec(self) -> PyTree:
        rows: Any = P(LEARNER_AXIS)
        return PopulationStep((self._inner.step_state_spec(),) * self._size, rows, rows)

    def experience_spec(self) -> PyTree:
        same: Any = P()
        return PopulationExperience((self._inner.experience_spec(),) * self._size, same, same, same)

    def advance_step_state(self, step_state: PyTree, num_steps: int) -> PyTree:
        own = (self._inner.advance_step_state(one, num_steps) for one in step_state.members)
        return step_state._replace(members=tuple(own))

    # Acting.

    def acting_networks(self, networks: PyTree, experience: PyTree) -> PyTree:
        """Return those of the best member as the policy, and what all of them act with."""
        members = [*zip(networks, experience.members, strict=True)]
        best = self._of_best(experience, [self._inner.acting_networks(*one) for one in members])
        return WithBank(best, tuple(self._inner.staged(*one) for one in members))

    def value_networks(self, networks: PyTree, experience: PyTree) -> PyTree:
        members = zip(networks, experience.members, strict=True)
        return self._of_best(experience, [self._inner.value_networks(*one) for one in members])

    def _of_best(self, experience: PopulationExperience, trees: list[PyTree]) -> PyTree:
        best = jnp.argmax(self._fitness(experience))
        return jax.lax.switch(best, [lambda tree=tree: tree for tree in trees])

    def _fitness(self, experience: PopulationExperience) -> jax.Array:
        """Return how good each member is, ``[N]``; of one that is not known, minus infinity."""
        if isinstance(self._inner, LeagueAgent):
            results = jnp.stack([one.results for one in experience.members])
            of_anchors: Any = results[:, self._inner.config.history :]
            return win_rates(of_anchors).mean(axis=(1, 2))  # type: ignore[return-value]
        mean = experience.returns / jnp.maximum(experience.episodes, 1e-8)
        return jnp.where(experience.episodes > 0, mean, -jnp.inf)

    def step(
        self, networks: PyTree, step_state: PyTree, env_step: EnvStep, *, explore: bool = True
    ) -> tuple[ActionOutput, PyTree]:
        """Have every member choose the actions of its rows."""
        states, outputs = [], []
        for number, state in enumerate(step_state.members):
            own = networks.bank[number], state, self._rows(env_step, number, 0)
            output, state = self._inner.act(*own, explore=explore)
            outputs.append(output)
            states.append(state)
        together = jax.tree.map(lambda *x: jnp.stack(x, 1).reshape(-1, *x[0].shape[1:]), *outputs)
        reward = jnp.mean(_of_envs(env_step.reward), axis=1)
        over = jnp.all(_of_envs(env_step.terminated) | _of_envs(env_step.truncated), axis=1)
        began = jnp.all(_of_envs(env_step.is_first), axis=1) & ~over
        # Agents that leave early are told before the last row, which then ends nobody else.
        late = began & step_state.running
        score = jnp.where(began, 0.0, step_state.score) + reward
        counted = jnp.where(late, step_state.score, score)
        extras = PopulationExtras(together.extras, counted, over | late)
        after = PopulationStep(tuple(states), jnp.where(over, 0.0, score), ~over)
        return ActionOutput(together.action, extras), after

    def _rows(self, tree: PyTree, member: int, axis: int) -> PyTree:
        """Return the rows of a member, every N-th along ``axis``."""
        at = (slice(None),) * axis + (slice(member, None, self._size),)
        return jax.tree.map(lambda x: jnp.asarray(x)[at], tree)

    # Learning.

    def _with(self, varied: Mapping[str, jax.Array], member: int) -> Agent:
        """Return the agent of a member, with its own hyper-parameters."""
        if not varied:
            return self._inner
        values = {name: _Varied(value[member]) for name, value in varied.items()}
        agent = make_agent(self.spec, with_values(self._inner_config, values))
        return agent if self._run is None else agent.for_run(self._run)

    def update_experience(
        self,
        experience: PyTree,
        initial_step_state: PyTree,
        final_step_state: PyTree,
        trajectory: Trajectory,
        networks: PyTree,
    ) -> PyTree:
        """Give every member its rows, and add the returns of episodes that ended."""
        extras: PopulationExtras = trajectory.extras

        def member(m: int) -> PyTree:
            rows = trajectory._replace(
                env_step=self._rows(trajectory.env_step, m, 1),
                action=self._rows(trajectory.action, m, 1),
                extras=self._rows(extras.members, m, 1),
            )
            states = initial_step_state.members[m], final_step_state.members[m]
            agent = self._with(experience.varied, m)
            return agent.update_experience(experience.members[m], *states, rows, networks[m])

        over = extras.over.reshape(-1, self._size).astype(jnp.float32)
        ended = jax.lax.psum(jnp.sum(over, axis=0), LEARNER_AXIS)
        score = jnp.sum(extras.score.reshape(over.shape) * over, axis=0)
        kept = (1 - 1 / self.config.fitness_episodes) ** ended
        return experience._replace(
            members=self._each(member),
            returns=experience.returns * kept + jax.lax.psum(score, LEARNER_AXIS),
            episodes=experience.episodes * kept + ended,
        )

    def loss(self, networks: PyTree, opt: PyTree, experience: PyTree, key: jax.Array) -> Loss:
        """Return the sum of the losses of all members, which have no networks in common."""
        keys, total = jax.random.split(key, self._size), jnp.float32(0)
        members, metrics = [], []
        for number, own in enumerate(experience.members):
            agent = self._with(opt.varied, number)
            given = networks[number], opt.members[number], own, keys[number]
            loss, (own, ours) = agent.loss(*given)
            total += loss
            members.append(own)
            metrics.append(ours)
        means = jax.tree.map(lambda *x: jnp.mean(jnp.stack(x)), *metrics)
        fitness = self._fitness(experience)
        of_each = {"fitness": jnp.where(jnp.isfinite(fitness), fitness, 0.0), **opt.varied}
        for name, values in of_each.items():
            means |= {f"{name}/{number}": values[number] for number in range(self._size)}
        means["best_member"] = jnp.argmax(fitness).astype(jnp.float32)
        # A run that begins with the networks of another one has the values of that one here.
        after = experience._replace(members=tuple(members), varied=opt.varied)
        return total, (after, means)

    def optimize(self, networks: PyTree, opt: PyTree, grads: PyTree) -> tuple[PyTree, PyTree]:
        done = [
            self._with(opt.varied, m).optimize(networks[m], opt.members[m], grads[m])
            for m in range(self._size)
        ]
        learned, members = zip(*done, strict=True)
        return learned, opt._replace(members=members)

    def num_off_policy_optims_per_cycle(self, cycle: int) -> int:
        return self._inner.num_off_policy_optims_per_cycle(cycle)

    def reported_metrics(self, means: dict[str, float]) -> dict[str, float]:
        return self._inner.reported_metrics(means)

    def lasting_experience(self, experience: PyTree) -> PyTree:
        own = tuple(self._inner.lasting_experience(one) for one in experience.members)
        return experience._replace(members=own)

    def with_lasting(self, experience: PyTree, lasting: PyTree) -> PyTree:
        both = zip(experience.members, lasting.members, strict=True)
        return lasting._replace(members=tuple(self._inner.with_lasting(*one) for one in both))

    def refit_experience(self, new: PyTree, saved: PyTree) -> PyTree | None:
        """Keep everything of the population, if the members can keep theirs."""
        both = zip(new.members, saved.members, strict=True)
        members = tuple(self._inner.refit_experience(*one) for one in both)
        return None if None in members else saved._replace(members=members)

    # Between two trajectories.

    def edit_due(self, before: int, now: int) -> bool:
        return self._exploits(before, now) or self._inner.edit_due(before, now)

    def _exploits(self, before: int, now: int) -> bool:
        return now // self.config.exploit_every > before // self.config.exploit_every

    def edit(
        self, state: AgentState, before: int, now: int, rng: np.random.Generator
    ) -> AgentState:
        """Let members change what is theirs, and the worst take over from the best."""
        if self._inner.edit_due(before, now):
            state = self._edited(state, before, now, rng)
        return self._exploited(state, rng) if self._exploits(before, now) else state

    def _edited(
        self, state: AgentState, before: int, now: int, rng: np.random.Generator
    ) -> AgentState:
        parts = zip(state.networks, state.opt.members, state.experience.members, strict=True)
        done = [
            self._inner.edit(AgentState(*part, ()), before, now, own)
            for part, own in zip(parts, rng.spawn(self._size), strict=True)
        ]
        return AgentState(
            tuple(one.networks for one in done),
            state.opt._replace(members=tuple(one.opt for one in done)),
            state.experience._replace(members=tuple(one.experience for one in done)),
            state.step,
        )

    def _exploited(self, state: AgentState, rng: np.random.Generator) -> AgentState:
        """Return the state in which the worst members took over from some of the best.

        Jaderberg et al. 2017, section 4: truncation selection; a factor is ``perturbed_by`` or its
        inverse, where theirs is 1.2 or 0.8. Members without an episode are neither, but in leagues
        they have a fitness of 0.5.
        """
        experience: PopulationExperience = state.experience
        fitness = np.asarray(self._fitness(experience))
        order = [m for m in np.argsort(fitness, kind="stable") if np.isfinite(fitness[m])]
        count = min(math.ceil(self.config.replaced * self._size), len(order) // 2)
        if not count:
            return state
        networks, opt, members = (
            [*x] for x in (state.networks, state.opt.members, experience.members)
        )
        varied = {name: np.array(x) for name, x in state.opt.varied.items()}
        returns, episodes = np.array(experience.returns), np.array(experience.episodes)
        for worst in order[:count]:
            best = int(rng.choice(order[-count:]))
            networks[worst], opt[worst] = jax.tree.map(jnp.copy, (networks[best], opt[best]))
            members[worst] = self._taken_over(members[worst], members[best])
            returns[worst], episodes[worst] = returns[best], episodes[best]
            for name, values in varied.items():
                factor = self.config.perturbed_by ** float(rng.choice((-1, 1)))
                value = float(values[best]) * factor
                values[worst] = value if self._takes(name, value) else values[best]
        # Copies: the next update may take every array, so none may be there twice.
        values_of_opt = {name: x.copy() for name, x in varied.items()}
        return AgentState(
            tuple(networks),
            PopulationOpt(tuple(opt), values_of_opt),  # type: ignore[arg-type]
            PopulationExperience(tuple(members), varied, returns, episodes),  # type: ignore[arg-type]
            state.step,
        )

    def _taken_over(self, worst: PyTree, best: PyTree) -> PyTree:
        """Return the experience of a member with what lasts of another one's, such as statistics.

        A league keeps its own history, of which the new networks have no results yet; those
        against anchors come with the networks.
        """
        inner: Any = self._inner
        if isinstance(inner, LeagueAgent):
            results = np.array(best.results)
            results[: inner.config.history] = 0.0
            worst = worst._replace(results=results, fresh=np.zeros_like(best.fresh))
            learner = inner.learner.lasting_experience(best.learner)
            copied = jax.tree.map(jnp.copy, learner)
            return worst._replace(learner=inner.learner.with_lasting(worst.learner, copied))
        return inner.with_lasting(worst, jax.tree.map(jnp.copy, inner.lasting_experience(best)))


def _inner_of(config: PopulationConfig | LeaguePopulationConfig, spec: Any) -> AgentConfig:
    return config.inner(many=isinstance(spec, MultiAgentSpec))


def _of_envs(field: Any) -> jax.Array:
    """Return ``[B, all agents]`` of a field of an ``EnvStep``."""
    if not isinstance(field, Mapping):
        return jnp.asarray(field)[:, None]
    return jnp.concatenate([jnp.asarray(x) for x in field.values()], axis=1)
