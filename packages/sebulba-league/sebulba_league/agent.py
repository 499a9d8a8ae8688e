"""The agent of a league: one learner, and opponents that act beside it on the Inferencers."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from sebulba.agent import (
    LEARNER_AXIS,
    Agent,
    AgentState,
    Loss,
    WithBank,
    is_spec,
    spec_of_each_leaf,
)
from sebulba.agents.configs import MultiAgentConfig
from sebulba.agents.kernels.legal_actions import only_legal
from sebulba.agents.multi.multi_agent import MultiAgent
from sebulba.errors import UsageError, shown
from sebulba.loops.evaluation import DRAWN
from sebulba.support.one_kernel import left_alone
from sebulba.support.user_code import is_attribute, load_attribute
from sebulba.types import (
    COMMON,
    ActionOutput,
    EnvSpec,
    EnvStep,
    MultiAgentSpec,
    PyTree,
    RunSpec,
    Trajectory,
)
from sebulba_league.config import RANDOM, LeagueConfig
from sebulba_league.lanes import Lanes
from sebulba_league.matchmakers import DRAWN as DRAW
from sebulba_league.matchmakers import LOST, WON, Standings, matchmaker_of, win_rates
from sebulba_league.ratings import ratings_now

OWN, GAMES = "learner", "games"
"""Extras of a trajectory: those of the learner, and ``Games``."""
NOW, BEFORE = range(2)
"""The match of a lane, and the one before it, which some games still belong to."""
MOST_IN_ONE_KERNEL = 256
"""Rows of all snapshots together up to which actions may be drawn by a single kernel."""
HISTORY = "history"
"""Stands in metrics for all snapshots together."""


class Matches(NamedTuple):
    """Who plays in the K lanes with snapshots."""

    number: jax.Array
    """``[K]`` int32: the match of each lane, counted from 0."""
    row: jax.Array
    """``[2, K]`` int32: the row of the history that plays it, and the match before it."""
    generation: jax.Array
    """``[2, K]`` int32: the generations of these."""


class Bank(NamedTuple):
    """What Inferencers act with beside the learner."""

    matches: Matches
    """Who plays."""
    networks: PyTree
    """``[2, K, ...]``: acting networks of these."""
    anchors: dict[str, PyTree]
    """Acting networks of fixed opponents."""


class Playing(NamedTuple):
    """What an Inferencer knows of the games in its environments, ``[B]``."""

    match: jax.Array
    """int32: number of the match in its lane that the game belongs to; -1 before the first."""
    score: jax.Array
    """float32: what the learner's seat has been paid in it."""


class Games(NamedTuple):
    """What a trajectory says of games, ``[T, B]``."""

    match: jax.Array
    """``Playing.match``."""
    score: jax.Array
    """``Playing.score``."""
    opponent: jax.Array
    """int32: row of the history, or after all of these the number of the anchor; -1 in mirrors."""
    generation: jax.Array
    """int32: that of the snapshot; 0 of an anchor."""
    over: jax.Array
    """Bool: the game reached its end here; a truncated one has no result."""


class LeagueStep(NamedTuple):
    """The step state."""

    learner: PyTree
    """That of the learner, for its N rows."""
    opponents: PyTree
    """``[K, ...]``: those of the lanes with snapshots."""
    anchors: dict[str, PyTree]
    """Those of fixed opponents."""
    playing: Playing
    """The games."""


class LeagueExperience(NamedTuple):
    """The experience."""

    learner: PyTree
    """That of the learner."""
    history: PyTree
    """``[H, ...]``: acting networks of snapshots."""
    generation: jax.Array
    """``[H]`` int32: which snapshot each row has, counted from 0; -1 where none."""
    made: jax.Array
    """Scalar int32: how many were made."""
    matches: Matches
    """Who plays."""
    seen: jax.Array
    """``[J, K]`` int32: the oldest match that a game of an Inferencer belonged to, as of its newest
    trajectory."""
    results: jax.Array
    """``[H + anchors, A, 3]`` float32: games won, drawn and lost by the learner, by its seat. Old
    games count less."""
    payoff: jax.Array
    """``[H, H]`` float32: share of points of the snapshot in a row against that in a column, as the
    newer of them had when it was made."""
    anchors: dict[str, PyTree]
    """Experiences of fixed opponents."""
    record: jax.Array
    """``[H, H + anchors, 3]`` float32: ``fresh`` of the snapshot in a row when it was made."""
    fresh: jax.Array
    """``[H + anchors, 3]`` float32: games won, drawn and lost since the newest snapshot, from all
    seats. So no game is in the records of two snapshots."""
    ratings: jax.Array
    """``[H + anchors + 1, 2]`` float32: Elo ratings and half of their 95 % intervals as of the last
    edit; the learner's are the last row. An interval of 0 says that there is no rating yet."""


class LeagueAgent(Agent[LeagueConfig]):
    """A member learns from the rows of its seats; snapshots of it and anchors have the others.

    To the learner and to every opponent its rows are environments of one seat. An environment
    changes over to the next match of its lane when an episode begins, and a lane has its next match
    when no game of the one before the last is left, so that an opponent is constant within every
    episode and Inferencers need two networks a lane.
    """

    def __init__(self, spec: MultiAgentSpec, config: LeagueConfig) -> None:
        """Make the agents of the learner and the anchors.

        Raises:
          UsageError: The seats of the game do not share a policy, or an anchor cannot play them.
        """
        super().__init__(spec, config)  # type: ignore[arg-type]
        self._chances = matchmaker_of(config.matchmaker)
        members = MultiAgentConfig(config.agents, auxiliary=config.auxiliary)
        self._player = MultiAgent(spec, members)
        ((self.group, group), *others) = spec.groups.items()
        slots = [member.slots for member in self._player.members.values()]
        if others or len(group.slots) < 2 or slots != [tuple(range(len(group.slots)))]:
            raise UsageError(
                f"a league needs a game whose seats form one group and share a policy; "
                f"{spec.name or 'this environment'} has {_described(spec)}, and the configuration "
                f"{len(slots)} policies; use agents={{'*': PPOConfig()}} and a game such as "
                "KuhnPoker-v1"
            )
        if self._player.members[next(iter(self._player.members))].sees_all:
            raise UsageError(
                "central_critic=True does not go with a league, in which the learner trains on the "
                "rows of its own seats; leave it out"
            )
        one = dataclasses.replace(group, slots=group.slots[:1])
        self._seat = dataclasses.replace(spec, groups={self.group: one}, teams=())
        self.learner = MultiAgent(self._seat, members)
        """It learns from environments of one seat."""
        self.anchors = {name: self._anchor(name) for name in config.anchors}
        self.lanes = Lanes(
            config.num_opponents, len(self.anchors), config.mirrors, len(group.slots)
        )
        self.updates_in_one_program = self.learner.updates_in_one_program

    def _anchor(self, name: str) -> MultiAgent:
        strategy: Any = self.config.anchors[name]
        spec = self._seat.groups[self.group].spec
        if strategy == RANDOM:
            strategy = functools.partial(any_legal, spec)
        elif isinstance(strategy, str) and is_attribute(strategy):
            strategy = load_attribute(f"agent.anchors[{name!r}]", strategy)
        try:
            any_agent = next(iter(self.config.agents.values()))
            config = MultiAgentConfig({"*": any_agent}, {self.group: strategy})
            return MultiAgent(self._seat, config)
        except UsageError as error:
            raise UsageError(f"agent.anchors[{name!r}]={shown(strategy)}: {error}") from error

    @property
    def player(self) -> Agent:
        return self._player

    # What is made once.

    def _run_of(self, run: RunSpec, rows: np.ndarray) -> RunSpec:
        return dataclasses.replace(run, num_envs=len(rows))

    def check_run(self, run: RunSpec) -> None:
        if run.num_hosts > 1:
            raise UsageError(
                f"a league learns on one host, and there are {run.num_hosts}; leave out "
                "distributed.hosts"
            )
        self.lanes.check(run)
        self.learner.check_run(self._run_of(run, self.lanes.learner(run.num_envs)))

    def for_run(self, run: RunSpec) -> Self:
        there = copy.copy(self)
        there.learner = self.learner.for_run(run)
        return there

    def new_networks(self, key: jax.Array) -> PyTree:
        return self.learner.new_networks(key)

    def new_opt(self, networks: PyTree) -> PyTree:
        return self.learner.new_opt(networks)

    def new_experience(self, key: jax.Array, networks: PyTree, run: RunSpec) -> PyTree:
        """Return an empty table, and a history with the initial networks as generation 0."""
        own = self._run_of(run, self.lanes.learner(run.num_envs))
        learner = self.learner.new_experience(key, networks, own)
        acting = self.learner.acting_networks(networks, learner)
        size, opponents = self.config.history, self.lanes.opponents

        def rows(leaf: jax.Array) -> jax.Array:
            return jnp.zeros((size, *leaf.shape), leaf.dtype).at[0].set(leaf)

        two = jnp.zeros((2, opponents), jnp.int32)
        table = (size + len(self.anchors), self.lanes.seats, 3)
        anchors = {
            name: one.new_experience(key, one.new_networks(key), self._run_of(run, own))
            for name, one, own in self._anchors(run.num_envs)
        }
        return LeagueExperience(
            learner,
            jax.tree.map(rows, acting),
            jnp.full(size, -1, jnp.int32).at[0].set(0),
            jnp.int32(1),
            Matches(jnp.zeros(opponents, jnp.int32), two, two),
            jnp.full((run.num_inferencers, opponents), -1, jnp.int32),
            jnp.zeros(table, jnp.float32),
            jnp.full((size, size), 0.5, jnp.float32),
            anchors,
            jnp.zeros((size, *table[::2]), jnp.float32),
            jnp.zeros(table[::2], jnp.float32),
            jnp.zeros((table[0] + 1, 2), jnp.float32),
        )

    def new_step_state(self, key: jax.Array, run: RunSpec, inferencer: int) -> PyTree:
        num_envs, lanes = run.num_envs, self.lanes
        own = self._run_of(run, lanes.learner(num_envs))
        one = self._run_of(run, lanes.others(0, num_envs))
        keys = jax.random.split(jax.random.fold_in(key, 1), lanes.opponents)
        opponents = jax.vmap(lambda key: self.learner.new_step_state(key, one, inferencer))(keys)
        anchors = {
            name: anchor.new_step_state(jax.random.fold_in(key, 2 + i), one, inferencer)
            for i, (name, anchor) in enumerate(self.anchors.items())
        }
        playing = Playing(jnp.full(num_envs, -1, jnp.int32), jnp.zeros(num_envs, jnp.float32))
        learner = self.learner.new_step_state(key, own, inferencer)
        return LeagueStep(learner, opponents, anchors, playing)

    def step_state_spec(self) -> PyTree:
        return LeagueStep(self.learner.step_state_spec(), P(), P(), P(LEARNER_AXIS))  # type: ignore[arg-type]

    def advance_step_state(self, step_state: PyTree, num_steps: int) -> PyTree:
        learner = self.learner.advance_step_state(step_state.learner, num_steps)
        return step_state._replace(learner=learner)

    # Acting.

    def acting_networks(self, networks: PyTree, experience: PyTree) -> PyTree:
        return self.learner.acting_networks(networks, experience.learner)

    def value_networks(self, networks: PyTree, experience: PyTree) -> PyTree:
        return self.learner.value_networks(networks, experience.learner)

    def bank(self, experience: PyTree) -> PyTree:
        matches: Matches = experience.matches
        networks = jax.tree.map(lambda leaf: leaf[matches.row], experience.history)
        anchors = {
            name: one.acting_networks({self.group: ()}, experience.anchors[name])
            for name, one in self.anchors.items()
        }
        return Bank(matches, networks, anchors)

    def step(
        self, networks: PyTree, step_state: PyTree, env_step: EnvStep, *, explore: bool = True
    ) -> tuple[ActionOutput, PyTree]:
        """Have everybody choose the actions of their seats."""
        given: WithBank = networks
        bank: Bank = given.bank
        num_envs = len(env_step.reward[self.group])  # type: ignore[call-overload]
        first = env_step.is_first[self.group].all(axis=-1)  # type: ignore[call-overload]
        newest = self._by_lane(bank.matches.number, num_envs)
        match = jnp.where(first, newest, step_state.playing.match)
        is_old: Any = match < newest

        own = self.lanes.learner(num_envs)
        output, learner = self.learner.step(
            given.networks, step_state.learner, self.seats(env_step, own, 0), explore=explore
        )
        rows, actions = [own], [output.action[self.group]]  # type: ignore[call-overload]
        others, action, opponents = self._snapshots_step(bank, step_state, env_step, is_old)
        rows.append(others)
        actions.append(action)
        anchors = {}
        for name, one, others in self._anchors(num_envs):
            view = self.seats(env_step, others, 0)
            done, anchors[name] = one.step(bank.anchors[name], step_state.anchors[name], view)
            rows.append(others)
            actions.append(done.action[self.group])  # type: ignore[call-overload]

        back = np.argsort(np.concatenate(rows))
        action = jnp.concatenate(actions)[back, 0].reshape(
            num_envs, self.lanes.seats, *actions[0].shape[2:]
        )
        games = self._games(bank.matches, step_state.playing, env_step, first, match, is_old)
        extras = {OWN: self._spread(output.extras, own, num_envs), GAMES: games}
        playing = Playing(match, games.score)
        return ActionOutput({self.group: action}, extras), LeagueStep(  # type: ignore[arg-type]
            learner, opponents, anchors, playing
        )

    def _snapshots_step(
        self, bank: Bank, step_state: LeagueStep, env_step: EnvStep, is_old: jax.Array
    ) -> tuple[np.ndarray, jax.Array, PyTree]:
        """Return rows and actions of the snapshots, ``[K * R]``, and their step states.

        Games of the match before are played by its snapshots, if there are any such games.
        """
        num_envs, count = len(is_old), self.lanes.opponents
        rows = np.stack([self.lanes.others(lane, num_envs) for lane in range(count)])
        view = jax.tree.map(
            lambda x: x.reshape(count, -1, *x.shape[1:]), self.seats(env_step, rows.ravel(), 0)
        )
        old = is_old[rows // self.lanes.seats]

        def act(which: int) -> PyTree:
            networks = jax.tree.map(lambda leaf: leaf[which], bank.networks)
            # What is small enough for one kernel in a lane may be too large for it in all lanes.
            with left_alone() if rows.size > MOST_IN_ONE_KERNEL else contextlib.nullcontext():
                output, state = jax.vmap(self.learner.step)(networks, step_state.opponents, view)
            return output.action[self.group], state

        def chosen(spec: P, new: jax.Array, before: jax.Array) -> jax.Array:
            if not any(spec):
                return new
            return jnp.where(old.reshape(old.shape + (1,) * (new.ndim - 2)), before, new)

        def both() -> PyTree:
            new, before = act(NOW), act(BEFORE)
            specs = spec_of_each_leaf(self.learner.step_state_spec(), new[1])
            state = jax.tree.map(chosen, specs, new[1], before[1], is_leaf=is_spec)
            return chosen(P(LEARNER_AXIS), new[0], before[0]), state

        action, state = jax.lax.cond(old.any(), both, lambda: act(NOW))
        return rows.ravel(), action.reshape(-1, *action.shape[2:]), state

    def _games(
        self,
        matches: Matches,
        playing: Playing,
        env_step: EnvStep,
        first: Any,
        match: jax.Array,
        is_old: Any,
    ) -> Games:
        num_envs = len(first)
        where = np.arange(num_envs), self.lanes.seat(num_envs)
        reward, terminated = (
            field[self.group][where] for field in (env_step.reward, env_step.terminated)
        )  # type: ignore[call-overload]
        fixed = self.config.history + np.arange(len(self.anchors), dtype=np.int32)
        rest = np.concatenate([fixed, np.full(self.config.mirrors, -1, np.int32)])

        def of_lanes(own: jax.Array, rest: np.ndarray) -> jax.Array:
            now, before = (
                self._by_lane(jnp.concatenate([own[which], rest]), num_envs)
                for which in (NOW, BEFORE)
            )
            return jnp.where(is_old, before, now)

        return Games(
            match,
            jnp.where(first, 0.0, playing.score) + reward,
            of_lanes(matches.row, rest),
            of_lanes(matches.generation, np.zeros_like(rest)),
            terminated,
        )

    def _by_lane(self, of_lanes: jax.Array, num_envs: int) -> jax.Array:
        """Return ``[B]`` of each environment's lane; lanes that are not given have zeros."""
        of_lanes = jnp.asarray(of_lanes)
        padded = jnp.pad(of_lanes, (0, self.lanes.number - len(of_lanes)))
        return jnp.tile(padded, num_envs // self.lanes.number)

    def _anchors(self, num_envs: int) -> Iterator[tuple[str, MultiAgent, np.ndarray]]:
        """Yield the name, the agent and the rows of each."""
        for lane, (name, one) in enumerate(self.anchors.items(), self.lanes.opponents):
            yield name, one, self.lanes.others(lane, num_envs)

    def seats(self, env_step: EnvStep, rows: np.ndarray, num_leading: int) -> EnvStep:
        """Return ``[*, B, A, ...]`` as environments of one seat, ``[*, len(rows), 1, ...]``."""

        def one(x: Any) -> jax.Array:
            flat = jax.lax.collapse(jnp.asarray(x), num_leading, num_leading + 2)
            return jnp.expand_dims(jnp.take(flat, rows, axis=num_leading), num_leading + 1)

        obs = {name: part for name, part in env_step.obs.items() if name != COMMON}
        seats = jax.tree.map(one, env_step._replace(obs=obs))
        if COMMON not in env_step.obs:
            return seats
        envs = rows // self.lanes.seats
        common = jax.tree.map(
            lambda x: jnp.take(jnp.asarray(x), envs, axis=num_leading), env_step.obs[COMMON]
        )
        return seats._replace(obs={**seats.obs, COMMON: common})

    def _spread(self, tree: PyTree, rows: np.ndarray, num_envs: int) -> PyTree:
        """Return ``[B, A, ...]`` of ``[len(rows), 1, ...]``, with zeros in all other places."""
        place = np.full(num_envs * self.lanes.seats, len(rows))
        place[rows] = np.arange(len(rows))

        def one(x: jax.Array) -> jax.Array:
            padded = jnp.concatenate([x[:, 0], jnp.zeros_like(x[:1, 0])])
            return padded[place].reshape(num_envs, self.lanes.seats, *x.shape[2:])

        return jax.tree.map(one, tree)

    # Learning.

    def update_experience(
        self,
        experience: PyTree,
        initial_step_state: PyTree,
        final_step_state: PyTree,
        trajectory: Trajectory,
        networks: PyTree,
    ) -> PyTree:
        """Give the learner its rows, and add the results of games to the table."""
        num_envs = trajectory.env_step.reward[self.group].shape[1]  # type: ignore[call-overload]
        rows = self.lanes.learner(num_envs)

        def own(x: jax.Array) -> jax.Array:
            return jnp.take(jax.lax.collapse(x, 1, 3), rows, axis=1)[:, :, None]

        seats = trajectory._replace(
            env_step=self.seats(trajectory.env_step, rows, 1),
            action={self.group: own(trajectory.action[self.group])},  # type: ignore[arg-type, call-overload]
            extras=jax.tree.map(own, trajectory.extras[OWN]),
        )
        states = initial_step_state.learner, final_step_state.learner
        learner = self.learner.update_experience(experience.learner, *states, seats, networks)
        games: Games = trajectory.extras[GAMES]
        oldest = games.match[-1].reshape(-1, self.lanes.number)[:, : self.lanes.opponents].min(0)
        oldest = jax.lax.pmin(oldest, LEARNER_AXIS)
        results, new = self._with_results(experience, games)
        return experience._replace(
            learner=learner,
            seen=experience.seen.at[trajectory.inferencer].set(oldest),
            results=results,
            fresh=experience.fresh + new.sum(axis=1),
        )

    def _with_results(
        self, experience: LeagueExperience, games: Games
    ) -> tuple[jax.Array, jax.Array]:
        """Return the table with the games that were over, and a table of these alone.

        Those of replaced snapshots are none.
        """
        generation = jnp.concatenate(
            [experience.generation, jnp.zeros(len(self.anchors), jnp.int32)]
        )
        known = (games.opponent >= 0) & (generation[games.opponent] == games.generation)
        outcome = jnp.where(games.score > DRAWN, WON, jnp.where(games.score < -DRAWN, LOST, DRAW))
        seat = np.broadcast_to(self.lanes.seat(games.score.shape[1]), games.score.shape)
        new = jnp.zeros_like(experience.results)
        new = new.at[games.opponent, seat, outcome].add(games.over & known)
        new = jax.lax.psum(new, LEARNER_AXIS)
        kept = (1 - 1 / self.config.payoff_games) ** new.sum(axis=-1, keepdims=True)
        return experience.results * kept + new, new

    def loss(self, networks: PyTree, opt: PyTree, experience: PyTree, key: jax.Array) -> Loss:
        loss, (learner, metrics) = self.learner.loss(networks, opt, experience.learner, key)
        size = self.config.history
        rates = win_rates(experience.results).mean(axis=-1)  # type: ignore[arg-type]
        there = experience.generation >= 0
        number = jnp.sum(there)
        of_history = {
            HISTORY: jnp.sum(rates[:size] * there) / number,
            "hardest": jnp.min(rates[:size], where=there, initial=1.0),
            "newest": rates[jnp.argmax(experience.generation)],
        }
        anchors = dict(zip(self.anchors, rates[size:], strict=True))
        more = {f"win_rate/{name}": rate for name, rate in (of_history | anchors).items()}
        more["snapshots"] = number.astype(jnp.float32)
        more["elo"], more["elo_interval"] = experience.ratings[-1]
        return loss, (experience._replace(learner=learner), {**metrics, **more})

    def optimize(self, networks: PyTree, opt: PyTree, grads: PyTree) -> tuple[PyTree, PyTree]:
        return self.learner.optimize(networks, opt, grads)

    def num_off_policy_optims_per_cycle(self, cycle: int) -> int:
        return self.learner.num_off_policy_optims_per_cycle(cycle)

    def reported_metrics(self, means: dict[str, float]) -> dict[str, float]:
        return self.learner.reported_metrics(means)

    def experience_spec(self) -> PyTree:
        same: Any = P()
        others = dict.fromkeys(LeagueExperience._fields[1:], same)
        return LeagueExperience(self.learner.experience_spec(), **others)

    def lasting_experience(self, experience: PyTree) -> PyTree:
        """Return what the learner keeps, and everything of the league."""
        return experience._replace(learner=self.learner.lasting_experience(experience.learner))

    def with_lasting(self, experience: PyTree, lasting: PyTree) -> PyTree:
        learner = self.learner.with_lasting(experience.learner, lasting.learner)
        return lasting._replace(learner=learner)

    @property
    def zero_if_unsaved(self) -> Collection[str]:
        return "record", "fresh", "ratings"

    def refit_experience(self, new: PyTree, saved: PyTree) -> PyTree | None:
        """Keep the league, if the learner can keep its part; games in progress are unknown."""
        learner = self.learner.refit_experience(new.learner, saved.learner)
        return None if learner is None else saved._replace(learner=learner, seen=new.seen)

    # Between two trajectories.

    def edit_due(self, before: int, now: int) -> bool:
        every = self.config.snapshot_every, self.config.rematch_every
        return any(now // steps > before // steps for steps in every)

    def edit(
        self, state: AgentState, before: int, now: int, rng: np.random.Generator
    ) -> AgentState:
        """Take a snapshot if one is due, and give every lane that is ready its next opponent."""
        old: LeagueExperience = state.experience
        tables = (
            *("generation", "made", "matches", "seen", "results", "payoff"),
            *("record", "fresh", "ratings"),
        )
        # Copies: what shares a buffer of the experience would keep the next update from taking it.
        host = old._replace(
            **{n: jax.tree.map(np.array, jax.device_get(getattr(old, n))) for n in tables}
        )
        host = host._replace(ratings=ratings_now(host))  # type: ignore[arg-type]
        every = self.config.snapshot_every
        if now // every > before // every:
            host = self._with_snapshot(state.networks, host, rng)
            if self.config.restart and rng.random() < self.config.restart:
                state = self._begun_anew(state, rng)
                host.results[:] = host.fresh[:] = 0.0  # type: ignore[index]
        host = host._replace(matches=self._next_matches(host, rng))
        return state._replace(experience=host)

    def _begun_anew(self, state: AgentState, rng: np.random.Generator) -> AgentState:
        """Return the state with initial networks and a new optimizer state."""
        networks = self.learner.new_networks(jax.random.key(int(rng.integers(2**31))))
        return state._replace(networks=networks, opt=self.learner.new_opt(networks))

    def _with_snapshot(
        self, networks: PyTree, host: LeagueExperience, rng: np.random.Generator
    ) -> LeagueExperience:
        """Return the experience with a snapshot of now, unless chance says to keep all others.

        Args:
          networks: As they are learned.
          host: Its small arrays are NumPy's, which are written.
          rng: Chance.
        """
        generation, results, payoff = host.generation, host.results, host.payoff
        number = int(host.made)
        host = host._replace(made=np.int32(number + 1))  # type: ignore[arg-type]
        empty = np.flatnonzero(generation < 0)
        row = int(empty[0]) if len(empty) else int(rng.integers(number + 1))
        if not len(empty):
            # Vitter 1985, algorithm R, but that no snapshot that plays is replaced.
            free = np.setdiff1d(np.arange(len(generation)), np.asarray(host.matches.row))
            if row >= len(generation) or not len(free):
                return host
            row = row if row in free else int(rng.choice(free))
        acting = self.acting_networks(networks, host)
        payoff[row] = win_rates(results[: len(generation)]).mean(axis=-1)  # type: ignore[index, arg-type]
        payoff[:, row], payoff[row, row] = 1 - payoff[row], 0.5  # type: ignore[index]
        record, ratings = host.record, host.ratings
        record[row], record[:, row] = host.fresh, 0.0  # type: ignore[index]
        record[row, row], ratings[row] = 0.0, ratings[-1]  # type: ignore[index]
        host.fresh[:] = 0.0  # type: ignore[index]
        generation[row], results[row] = number, 0.0  # type: ignore[index]
        return host._replace(history=_written(host.history, acting, row))

    def _next_matches(self, host: LeagueExperience, rng: np.random.Generator) -> Matches:
        """Return the matches with new ones where no game of the match before is left."""
        number, row, generation = (np.array(x) for x in host.matches)
        results = np.asarray(host.results)[: self.config.history]
        known = np.asarray(host.generation), results, np.asarray(host.payoff)
        standings = Standings(*known, self.config.gate)
        chances = self._chances(standings)
        drawn = rng.choice(len(chances), size=len(number), p=chances)
        ready = np.array(host.seen).min(axis=0) == number
        for lane in np.flatnonzero(ready & (drawn != row[NOW])):
            number[lane] += 1
            row[BEFORE, lane], generation[BEFORE, lane] = row[NOW, lane], generation[NOW, lane]
            row[NOW, lane] = drawn[lane]
            generation[NOW, lane] = standings.generation[drawn[lane]]
        return Matches(number, row, generation)  # type: ignore[arg-type]


@functools.partial(jax.jit, donate_argnums=0)
def _written(history: PyTree, acting: PyTree, row: int) -> PyTree:
    """Return the history, which is donated, with acting networks in a row."""
    return jax.tree.map(lambda rows, leaf: rows.at[row].set(leaf), history, acting)


def _described(spec: MultiAgentSpec) -> str:
    return ", ".join(f"{len(group.slots)} x {name}" for name, group in spec.groups.items())


def any_legal(spec: EnvSpec, obs: PyTree, key: jax.Array) -> jax.Array:
    """Return any legal action of a Discrete, ``[N]``.

    Args:
      spec: Of the agent whose actions they are.
      obs: ``[N, ...]``.
      key: Chance.
    """
    space: Any = spec.action_space
    size = len(jax.tree.leaves(obs)[0])
    logits = only_legal(spec, obs, jnp.zeros((size, int(space.n))))
    return jax.random.categorical(key, logits) + int(space.start)
