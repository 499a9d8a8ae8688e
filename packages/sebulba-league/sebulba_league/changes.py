"""What trainers change in a configuration. Free of JAX.

Each function takes the hyper-parameters of an agent, or a whole experiment, as the trainer finds
it, and returns it as the trainer trains it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from sebulba.agents.configs import AgentConfig, MultiAgentConfig
from sebulba.configs.experiment import EnvConfig, ExperimentConfig
from sebulba.errors import UsageError
from sebulba_league.config import LeagueConfig
from sebulba_league.population_config import (
    MEMBER,
    LeaguePopulationConfig,
    PopulationConfig,
    PopulationFields,
    positive_numbers,
)

VARIED = ("learning_rate", "entropy_coefficient")
"""Hyper-parameters that a population varies where nothing is said, if they are positive and all
agents have the same."""
SET = "sets:curriculum"
"""Id of the environment that a curriculum over environments makes."""


def with_history(config: AgentConfig, name: str = "*", **fields: Any) -> LeagueConfig:
    """Return self-play against a history: any snapshot with the same chance.

    Args:
      config: Of an agent, or of agents, whose seats share a policy.
      name: Of who learns, if ``config`` names nobody.
      **fields: Of ``LeagueConfig``.

    Raises:
      UsageError: It is a population, or a field is unknown.
    """
    if isinstance(config, PopulationFields):
        raise UsageError(
            "a population cannot be inside self-play, since its members play apart; put it "
            "outside: Population(SelfPlay(Rollout(...))), or --trainer population self-play"
        )
    check_fields(LeagueConfig, fields)
    if isinstance(config, LeagueConfig):
        return dataclasses.replace(config, **fields)
    agents = config.agents if isinstance(config, MultiAgentConfig) else {name: config}
    return LeagueConfig(agents, **{"matchmaker": "uniform", **fields})


def with_league(config: AgentConfig, trainer: str = "League", **fields: Any) -> LeagueConfig:
    """Return a league with another matchmaker, with anchors, or with both.

    Raises:
      UsageError: ``config`` has no history.
    """
    if not isinstance(config, LeagueConfig):
        raise UsageError(
            f"{trainer} needs a history; put a SelfPlay between: {trainer}(SelfPlay(Rollout(...)))"
        )
    return dataclasses.replace(config, **fields)


def with_best_responses(config: AgentConfig, solver: str = "psro", restart: float = 0.0) -> Any:
    """Return a league whose learner is a best response to a meta-strategy of its history.

    It plays no games against itself: the lanes of these get an opponent.
    """
    league = with_league(config, "PSRO")
    given = league.opponents
    lanes = None if given is None else given + league.mirrors
    return dataclasses.replace(
        league, matchmaker=solver, opponents=lanes, mirrors=0, restart=restart
    )


def with_population(config: AgentConfig, **fields: Any) -> AgentConfig:
    """Return a population of what learns.

    Raises:
      UsageError: It is a population, or a field is unknown.
    """
    if isinstance(config, PopulationFields):
        raise UsageError("a population cannot have populations for members; leave out one of them")
    check_fields(PopulationFields, fields)
    agents = config.agents if isinstance(config, MultiAgentConfig) else {MEMBER: config}
    shared = dict(set.intersection(*(set(positive_numbers(agent)) for agent in agents.values())))
    fields = {"vary": tuple(name for name in VARIED if name in shared), **fields}
    kind = LeaguePopulationConfig if isinstance(config, LeagueConfig) else PopulationConfig
    own = vars(config) if isinstance(config, MultiAgentConfig) else {"agents": agents}
    return kind(**own, **fields)


def with_curriculum(config: AgentConfig, gate: float = 0.7) -> LeagueConfig:
    """Return a league whose snapshots open one after the other."""
    return with_league(config, "Curriculum", matchmaker="curriculum", gate=gate)


def check_fields(kind: type, fields: Mapping[str, Any]) -> None:
    """Raise UsageError for the first of ``fields`` that a dataclass has not."""
    known = [field.name for field in dataclasses.fields(kind)]
    for name in fields:
        if name not in known:
            raise UsageError(f"{name} is not an option of this trainer; use {', '.join(known)}")


# On the command line.


def self_play(config: ExperimentConfig) -> ExperimentConfig:
    """Return self-play; in games of envpool the learner is named as the group of their seats."""
    name = "*" if ":" in config.env.id else "player"
    return dataclasses.replace(config, agent=with_history(config.agent, name))


def _around_history(
    change: Callable[..., AgentConfig], config: ExperimentConfig, **fields: Any
) -> ExperimentConfig:
    """Return what ``change`` does of a league; self-play is added where there is no history."""
    if not isinstance(config.agent, LeagueConfig):
        config = self_play(config)
    return dataclasses.replace(config, agent=change(config.agent, **fields))


league = functools.partial(_around_history, with_league, matchmaker="pfsp")
psro = functools.partial(_around_history, with_best_responses)


def population(config: ExperimentConfig) -> ExperimentConfig:
    """Return a population of what the experiment trains."""
    return dataclasses.replace(config, agent=with_population(config.agent))


def curriculum(config: ExperimentConfig) -> ExperimentConfig:
    """Return a curriculum over a league's opponents, or over the environments of ``env.options``.

    The latter are ``envs``, ``after`` and ``gate``, as ``sets:curriculum`` has them.
    """
    if isinstance(config.agent, LeagueConfig):
        return dataclasses.replace(config, agent=with_curriculum(config.agent))
    env = EnvConfig(SET, options=config.env.options if config.env.id == SET else {})
    return dataclasses.replace(config, env=env)
