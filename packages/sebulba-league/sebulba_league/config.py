"""The hyper-parameters of a league. Free of JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal, get_args

from sebulba.agents.configs import MultiAgentConfig
from sebulba.errors import UsageError, shown
from sebulba.support.checks import check_ranges, check_types, require
from sebulba.support.user_code import is_attribute

Matchmaking = Literal[
    "latest",
    "uniform",
    "pfsp",
    "pfsp-variance",
    "main",
    "league-exploiter",
    "nash",
    "psro",
    "curriculum",
]
"""Names of ``sebulba_league.matchmakers``."""
LANES = 8
"""Lanes of a league where nothing is said of its opponents."""
RANDOM = "legal-random"
"""The anchor that takes any legal action."""


@dataclasses.dataclass(frozen=True)
class LeagueConfig(MultiAgentConfig):
    """A learner, its opponents, and which of them it meets.

    The environments of a trajectory are dealt to lanes in turns. In each of ``opponents`` lanes a
    snapshot plays the other seats, in a lane of its own each anchor, and in each of ``mirrors``
    lanes the learner plays all seats. The learner's seat goes around within a lane.

    Raises:
      UsageError: A value breaks a rule.
    """

    agent_class: ClassVar[str] = "sebulba_league.agent:LeagueAgent"

    history: int = 50
    """Most snapshots that are kept. When there are so many, a new one takes the place of a random
    one, or is not kept, so that all that were ever made are kept with the same chance."""
    snapshot_every: int = 100_000
    """Env steps from one snapshot to the next."""
    matchmaker: Matchmaking | str = "pfsp"
    """How a lane chooses its opponent: the newest snapshot; any; those that the learner seldom
    beats (pfsp), or that are near to it (pfsp-variance); AlphaStar's main agent or league
    exploiter; an equilibrium of the snapshots (nash), with a tenth of the games against any (psro);
    snapshots that open one after the other (curriculum); or module:attribute of your own function,
    Standings -> chance of each snapshot."""
    gate: float = 0.7
    """Share of points against a snapshot with which a curriculum opens the next one."""
    restart: float = 0.0
    """Chance with which the learner begins anew, with initial networks, after each snapshot."""
    rematch_every: int = 20_000
    """Env steps after which lanes choose again."""
    opponents: int | None = None
    """Lanes with a snapshot in the other seats. None: with mirrors and anchors they are 8."""
    mirrors: int = 2
    """Lanes in which the learner plays against itself."""
    anchors: dict[str, str] = dataclasses.field(default_factory=dict)
    """Fixed opponents by name, each with a lane: legal-random, the folder of a policy, or
    module:attribute of a function of JAX, (obs, key) -> action; in Python also such a function."""
    payoff_games: int = 1000
    """Games of one opponent and seat over which its results are forgotten."""

    def __post_init__(self) -> None:
        """Check values; whether lanes fit the environments is seen when a run begins."""
        super().__post_init__()
        check_types(self, "agent.", open_fields=("agents", "frozen", "auxiliary", "anchors"))
        counts = ["snapshot_every", "rematch_every", "payoff_games"]
        counts += [] if self.opponents is None else ["opponents"]
        check_ranges(self, "agent.", mirrors=0, history=1, **dict.fromkeys(counts, 1))
        check_ranges(self, "agent.", gate=(0, 1), restart=(0, 1))
        require(
            self.matchmaker in get_args(Matchmaking) or is_attribute(self.matchmaker),
            "agent.matchmaker",
            self.matchmaker,
            f"must be one of {', '.join(get_args(Matchmaking))}, or module:attribute",
            "use pfsp",
        )
        require(
            not self.frozen,
            "agent.frozen",
            dict(self.frozen),
            "does not go with a league",
            "name fixed opponents in anchors",
        )
        if not isinstance(self.anchors, Mapping):
            raise UsageError(
                f"agent.anchors={shown(self.anchors)} must be a dict by name; use "
                "{'random': 'legal-random'}"
            )
        for name in self.anchors:
            ok = isinstance(name, str) and name and not set(name) & set("./# \t\n")
            rule = "must be a name without . / # and spaces"
            require(bool(ok), "agent.anchors", name, rule, "use for example random")
        anchors = {n: str(one) if isinstance(one, Path) else one for n, one in self.anchors.items()}
        object.__setattr__(self, "anchors", anchors)

    @property
    def num_opponents(self) -> int:
        """How many lanes have a snapshot in the other seats."""
        if self.opponents is not None:
            return self.opponents
        return max(1, LANES - self.mirrors - len(self.anchors))

    def named_code(self) -> list[str]:
        """Return what it names that is read or imported."""
        named = [one for one in self.anchors.values() if isinstance(one, str) and one != RANDOM]
        code = [*super().named_code(), *(f"the opponent {one!r}" for one in named)]
        if is_attribute(self.matchmaker):
            code.append(f"the matchmaker {self.matchmaker!r}")
        return code
