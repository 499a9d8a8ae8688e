"""The hyper-parameters of a population. Free of JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from sebulba.agents.configs import AgentConfig, MultiAgentConfig
from sebulba.errors import UsageError
from sebulba.support.checks import check_ranges, check_types, require
from sebulba_league.config import LeagueConfig

UNVARIED = frozenset(
    (
        *("initial_std", "initial_temperature", "value_max"),
        *("initial_epsilon", "final_epsilon", "epsilon", "epsilon_exponent"),
        *("noise_scale", "noise_exponent", "noise_correlation"),
        *("max_rho", "max_c", "max_policy_rho"),
    )
)
"""Hyper-parameters with which initial networks are made or Inferencers act, which is once for all
members; and the clips of V-trace, which are no arrays."""
MEMBER = "member"
"""Name of the agent of a population that was given one."""


@dataclasses.dataclass(frozen=True)
class PopulationFields:
    """What a population has beside the hyper-parameters of its members."""

    size: int = 4
    """Members, each of which has an equal part of the environments."""
    vary: tuple[str, ...] = ("learning_rate",)
    """Hyper-parameters that differ between members and change while they train: positive numbers
    with which an agent learns, such as learning_rate, entropy_coefficient and discount, not those
    with which it acts or begins."""
    spread: float = 3.0
    """Members begin with hyper-parameters from 1 / spread to spread times the given ones, evenly
    spaced by their logarithms."""
    exploit_every: int = 100_000
    """Env steps after which the worst members take over networks from the best."""
    replaced: float = 0.2
    """Share of the members that do, rounded up; as many are the best."""
    perturbed_by: float = 1.2
    """A hyper-parameter that was taken over is multiplied by this, or divided by it."""
    fitness_episodes: int = 100
    """Episodes of a member over which its old returns are forgotten."""

    def fitted(self, num_envs: int) -> Any:
        """As ``AgentConfig.fitted``, for the environments of a member."""
        return super().fitted(max(1, num_envs // self.size))  # type: ignore[misc]

    def check_population(self) -> None:
        """Raise UsageError if a value is out of its range."""
        counts = dict.fromkeys(("exploit_every", "fitness_episodes"), 1)
        check_ranges(self, "agent.", size=2, replaced=(0, 0.5), **counts)
        check_ranges(self, "agent.", spread=(1, 1000), perturbed_by=(1, 1000))

    def check_varied(self, agents: Mapping[str, AgentConfig]) -> None:
        """Raise UsageError if a hyper-parameter that varies is one with which no agent learns.

        It must be a positive number, and the same in all agents.

        Args:
          agents: By name.
        """
        for name, (of, agent) in ((n, one) for n in self.vary for one in agents.items()):
            value = getattr(agent, name, None)
            numbers = [n for n, x in positive_numbers(agent)]
            has = "no such field" if value is None else value
            rule = f"must be a positive number of agents[{of!r}], which has {has}"
            if name in UNVARIED:
                rule = "cannot differ between members"
            use = f"use some of {', '.join(numbers)}"
            require(name in numbers, "agent.vary", name, rule, use)
        for name in self.vary:
            values = {of: getattr(agent, name, None) for of, agent in agents.items()}
            same = len(set(map(repr, values.values()))) == 1
            rule = f"must be the same in all agents at first, and they have {values}"
            require(same, "agent.vary", name, rule, "give them one value, or vary other ones")


def positive_numbers(agent: AgentConfig) -> Iterator[tuple[str, float]]:
    """Yield the positive floats with which an agent learns, and their values."""
    for field in dataclasses.fields(agent):
        value = getattr(agent, field.name)
        if field.name not in UNVARIED and isinstance(value, float) and value > 0:
            yield field.name, value


@dataclasses.dataclass(frozen=True)
class PopulationConfig(PopulationFields, MultiAgentConfig):
    """Agents that train side by side, of which the worst take over from the best.

    Population-based training (Jaderberg et al. 2017, arXiv 1711.09846). In an environment of one
    agent, ``agents`` has one entry of any name; of many agents it is as in ``MultiAgentConfig``.

    Raises:
      UsageError: A value breaks a rule.
    """

    agent_class: ClassVar[str] = "sebulba_league.population:PopulationAgent"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_types(self, "agent.", open_fields=("agents", "frozen", "auxiliary"))
        self.check_population()
        self.check_varied(self.agents)

    def inner(self, *, many: bool) -> AgentConfig:
        """Return the hyper-parameters of a member, in an environment of one agent or of many.

        Raises:
          UsageError: There are several agents, and the environment has one.
        """
        if many:
            agents = {"*" if name == MEMBER else name: one for name, one in self.agents.items()}
            return MultiAgentConfig(agents, self.frozen, self.auxiliary)
        if len(self.agents) > 1 or self.frozen or self.auxiliary:
            raise UsageError(
                f"agents={sorted(self.agents)}: members of a population in an environment of one "
                "agent have one agent each; use agents={'member': PPOConfig()}"
            )
        return next(iter(self.agents.values()))


@dataclasses.dataclass(frozen=True)
class LeaguePopulationConfig(PopulationFields, LeagueConfig):
    """Leagues that train side by side, whose fitness is the share of points against anchors.

    Raises:
      UsageError: A value breaks a rule.
    """

    agent_class: ClassVar[str] = "sebulba_league.population:PopulationAgent"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_population()
        self.check_varied(self.agents)

    def inner(self, *, many: bool) -> LeagueConfig:
        """Return the hyper-parameters of a member."""
        fields = dataclasses.fields(LeagueConfig)
        return LeagueConfig(**{field.name: getattr(self, field.name) for field in fields})


def with_values(config: Any, values: Mapping[str, Any]) -> Any:
    """Return hyper-parameters with other values in all agents; they are not checked.

    So values may be arrays of JAX that are being traced.
    """
    agents = getattr(config, "agents", None)
    if agents is not None:
        values = {"agents": {name: with_values(one, values) for name, one in agents.items()}}
    changed = object.__new__(type(config))
    changed.__dict__.update(config.__dict__, **values)
    return changed
