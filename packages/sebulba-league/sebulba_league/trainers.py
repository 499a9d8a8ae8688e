"""Trainers, one inside the other: ``League(SelfPlay(Rollout(...)))``.

The innermost makes the loop when it first trains. Each of the others changes the configuration of
what learns, before that.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from sebulba.agent import AgentState
from sebulba.agents.configs import AgentConfig, make_agent
from sebulba.envs import env_spec, make_env_factory
from sebulba.errors import UsageError, shown
from sebulba.loops.evaluation import Evaluation, evaluate
from sebulba.loops.gymnasium_loop import GymnasiumLoop, Result
from sebulba.policies.policy import Policy, save_policy
from sebulba.support.checks import check_count
from sebulba_league.agent import LeagueExperience
from sebulba_league.changes import (
    SET,
    with_best_responses,
    with_curriculum,
    with_history,
    with_league,
    with_population,
)
from sebulba_league.config import LeagueConfig, Matchmaking
from sebulba_league.matchmakers import win_rates

Change = Callable[[AgentConfig], AgentConfig]


class Trained(NamedTuple):
    """What an iteration of training returns."""

    env_steps: int
    """Since the beginning."""
    metrics: Mapping[str, Any]
    """The last record."""
    win_rates: Mapping[str, float]
    """The learner's share of points by opponent, ``#7`` for generation 7; a mean over its seats."""


class Trainer(abc.ABC):
    """Trains one iteration after the other; a context manager, which frees the environments."""

    @abc.abstractmethod
    def wrap(self, change: Change) -> None:
        """Change the configuration of what learns, before the first iteration."""

    @property
    @abc.abstractmethod
    def rollout(self) -> Rollout:
        """The innermost trainer."""

    @property
    def env_steps(self) -> int:
        """Environment steps since the beginning."""
        return self.rollout.loop.counters.env_steps

    def train(self) -> Trained:
        """Train for an iteration."""
        return self.rollout.iterate()

    def evaluate(self, num_episodes: int = 100) -> Evaluation:
        """Have the policy of now play all seats, as ``sebulba.evaluate`` does."""
        rollout = self.rollout
        policy = Policy(rollout.loop.agent, rollout.result().acting_networks)
        return evaluate(policy, rollout.env, num_episodes=num_episodes)

    def save(self, folder: str | Path) -> None:
        """Save the policy of now, for ``sebulba.load_policy``."""
        save_policy(folder, self.rollout.loop.agent, self.rollout.result().acting_networks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.rollout.close()


class Rollout(Trainer):
    """The loop: Inferencers act, updates learn."""

    def __init__(
        self,
        env: Any,
        config: AgentConfig,
        *,
        num_envs: int = 128,
        steps_per_cycle: int = 32,
        rounds: int = 16,
        seed: int = 0,
        **options: Any,
    ) -> None:
        """Keep the arguments; nothing is made yet.

        Args:
          env: Whatever ``sebulba.make_env_factory`` takes; or several by name, which a
            ``Curriculum`` orders.
          config: Hyper-parameters of the agent.
          num_envs: As in ``GymnasiumLoop``.
          steps_per_cycle: As in ``GymnasiumLoop.run``.
          rounds: Trajectories of each Inferencer in an iteration.
          seed: Of everything.
          **options: As for ``GymnasiumLoop``, such as ``schedule="lockstep"``. With a
            ``checkpointer`` it resumes from the newest checkpoint.

        Raises:
          UsageError: A count is out of range.
        """
        for name, value in (("steps_per_cycle", steps_per_cycle), ("rounds", rounds)):
            check_count(name, value)
        self.env: Any = dict(env) if isinstance(env, Mapping) else make_env_factory(env)
        self.config = config
        """Hyper-parameters, as they are trained."""
        self._sizes = num_envs, steps_per_cycle, rounds
        self._options = {"seed": seed, **options}
        self._loop: GymnasiumLoop | None = None
        self._state: AgentState | None = None
        self._result: Result | None = None

    @property
    def rollout(self) -> Rollout:
        return self

    def wrap(self, change: Change) -> None:
        if self._loop is not None:
            raise UsageError(
                "this Rollout has begun to train; nest trainers before the first train()"
            )
        self.config = change(self.config)

    @property
    def loop(self) -> GymnasiumLoop:
        """The loop, made when it is first asked for."""
        if isinstance(self.env, Mapping):
            raise UsageError(
                f"{len(self.env)} environments have no structure; put a Curriculum around the "
                "Rollout, or train on a set such as sets:prior"
            )
        if self._loop is None:
            agent = make_agent(env_spec(self.env), self.config)
            self._loop = GymnasiumLoop(self.env, agent, self._sizes[0], **self._options)
            checkpointer: Any = self._options.get("checkpointer")
            if checkpointer is not None and (newest := checkpointer.load_newest()) is not None:
                self._state = self._loop.restore(newest)
        return self._loop

    def iterate(self) -> Trained:
        """Train for ``rounds`` trajectories of each Inferencer."""
        loop, (_, steps, rounds) = self.loop, self._sizes
        if self._state is None:
            self._state = loop.new_state(self._options["seed"], steps)
        self._result = loop.run(self._state, rounds * loop.num_inferencers, steps)
        self._state = self._result.state
        rates = _win_rates(self.config, self._state.experience)
        return Trained(loop.counters.env_steps, self._result.metrics, rates)

    def result(self) -> Result:
        """Return the result of the last iteration; UsageError before the first."""
        if self._result is None:
            raise UsageError("nothing has been trained yet; call train() first")
        return self._result

    def close(self) -> None:
        """Free the environments."""
        if self._loop is not None:
            self._loop.close()


class _Nested(Trainer):
    """A trainer around another one, which changes the configuration of what learns."""

    def __init__(self, inner: Trainer, change: Change) -> None:
        self._inner = inner
        self.wrap(change)

    @property
    def rollout(self) -> Rollout:
        return self._inner.rollout

    def wrap(self, change: Change) -> None:
        self._inner.wrap(change)


class SelfPlay(_Nested):
    """The learner meets snapshots of itself, any with the same chance, and itself."""

    def __init__(self, inner: Trainer, **fields: Any) -> None:
        """Let what learns in ``inner`` play against its history.

        Args:
          inner: Of a game whose seats share a policy.
          **fields: Of ``LeagueConfig``: ``history``, ``snapshot_every``, ``opponents``, ...
        """
        super().__init__(inner, lambda config: with_history(config, **fields))


class League(_Nested):
    """A matchmaker chooses the opponents, and fixed ones are among them."""

    def __init__(
        self,
        inner: Trainer,
        matchmaker: Matchmaking | str = "pfsp",
        anchors: Mapping[str, Any] | None = None,
    ) -> None:
        """Have ``matchmaker`` choose in ``inner``.

        Args:
          inner: A ``SelfPlay``.
          matchmaker: As in ``LeagueConfig``.
          anchors: As in ``LeagueConfig``, added to those of ``inner``.

        Raises:
          UsageError: ``inner`` has no history.
        """

        def change(config: AgentConfig) -> LeagueConfig:
            all_of_them = {**getattr(config, "anchors", {}), **(anchors or {})}
            return with_league(config, matchmaker=matchmaker, anchors=all_of_them)

        super().__init__(inner, change)


class PSRO(_Nested):
    """Policy-space response oracles (Lanctot et al. 2017, arXiv 1711.00832).

    Between two snapshots the learner becomes a best response to a meta-strategy: a mixture of the
    snapshots. Then it is a snapshot itself, and the mixture is solved for again.
    """

    def __init__(
        self, inner: Trainer, solver: Matchmaking | str = "psro", restart: float = 0.0
    ) -> None:
        """Have the learner of ``inner`` answer its history.

        Args:
          inner: A ``SelfPlay``, whose ``snapshot_every`` is the length of an answer.
          solver: The matchmaker that is the meta-strategy.
          restart: Chance with which an answer begins with initial networks, not with the last ones.

        Raises:
          UsageError: ``inner`` has no history.
        """
        super().__init__(inner, lambda config: with_best_responses(config, solver, restart))


class Population(_Nested):
    """Members train side by side; the worst take over from the best (``PopulationConfig``)."""

    def __init__(self, inner: Trainer, **fields: Any) -> None:
        """Train several of what learns in ``inner``, with different hyper-parameters.

        Args:
          inner: Of any environment; a league needs anchors, against which members are compared.
          **fields: Of ``PopulationConfig``: ``size``, ``vary``, ``exploit_every``, ...
        """
        super().__init__(inner, lambda config: with_population(config, **fields))


class Curriculum(_Nested):
    """Environments, or the snapshots of a league, open when those before them are learned."""

    def __init__(self, inner: Trainer, gate: Any, after: Mapping[str, Any] | None = None) -> None:
        """Order what ``inner`` trains on.

        Args:
          inner: A ``Rollout`` of several environments, or a trainer with a history.
          gate: Mean return of 20 episodes by which an environment opens others, or these by name;
            of a league the share of points against a snapshot that opens the next one.
          after: Of environments: which of them open which, ``{"hard": "easy"}``.

        Raises:
          UsageError: There is nothing to order, a name is unknown, or an environment waits for
            itself.
        """
        envs = inner.rollout.env
        if not isinstance(envs, Mapping):
            if after is not None:
                raise UsageError(
                    f"after={shown(after)} orders environments, and there is one; give several: "
                    "Rollout({'easy': 'my:Easy', 'hard': 'my:Hard'}, ...)"
                )
            super().__init__(inner, lambda config: with_curriculum(config, gate))
            return
        super().__init__(inner, lambda config: config)
        inner.rollout.env = make_env_factory(SET, envs=envs, after=after or {}, gate=gate)


def _win_rates(config: AgentConfig, experience: Any) -> dict[str, float]:
    if not isinstance(config, LeagueConfig) or not isinstance(experience, LeagueExperience):
        return {}
    generation, results = jax.device_get((experience.generation, experience.results))
    rates = np.asarray(win_rates(results).mean(axis=-1))
    names = [f"#{number}" if number >= 0 else "" for number in generation]
    named = zip([*names, *config.anchors], rates.tolist(), strict=True)
    return {name: rate for name, rate in named if name}
