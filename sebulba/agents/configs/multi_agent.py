"""Which agent plays whom where there are many."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from sebulba.agents.configs.agent_config import AgentConfig
from sebulba.errors import UsageError, shown

EVERY = "*"
"""In the place of a name: every group, or every slot."""


@dataclasses.dataclass(frozen=True)
class MultiAgentConfig(AgentConfig):
    """Agents for the groups and slots of an environment of many agents.

    Raises:
      UsageError: A name or a value is not of the right kind.
    """

    agent_class: ClassVar[str] = "sebulba.agents.multi.multi_agent:MultiAgent"

    agents: Mapping[str, AgentConfig] = dataclasses.field(default_factory=dict)
    """Hyper-parameters by who has them: ``"GROUP"`` is one policy that all slots of a group share,
    ``"GROUP/SLOT"`` that of one slot and ``"GROUP/*"`` one for each slot; ``"*"`` and ``"*/*"`` are
    for all groups that have no other. What names fewest slots wins."""

    def __post_init__(self) -> None:
        """Check names and values; whether such groups exist is seen when the agent is made."""
        if not isinstance(self.agents, Mapping) or not self.agents:
            raise UsageError(
                f"agents={shown(self.agents)} must be a dict of configurations by group; use "
                "{'*': PPOConfig()} for one policy a group"
            )
        for name, config in self.agents.items():
            if not isinstance(name, str) or not name or name.count("/") > 1:
                raise UsageError(
                    f"agents has the name {shown(name)}; use 'GROUP', 'GROUP/SLOT', 'GROUP/*', '*' "
                    "or '*/*'"
                )
            if not getattr(config, "agent_class", "") or isinstance(config, MultiAgentConfig):
                raise UsageError(
                    f"agents[{name!r}]={shown(config)} must be the hyper-parameters of an agent "
                    "for one; use for example PPOConfig()"
                )


def assigned(
    groups: Mapping[str, tuple[str, ...]], names: Mapping[str, AgentConfig]
) -> dict[str, tuple[str, tuple[int, ...], AgentConfig]]:
    """Return who plays what: member by name, with its group, slots and hyper-parameters.

    Args:
      groups: Names of the slots of each group.
      names: ``MultiAgentConfig.agents``.

    Raises:
      UsageError: A name is of no group or slot, or a slot has no agent.
    """
    _check_known(groups, names)
    members: dict[str, tuple[str, tuple[int, ...], AgentConfig]] = {}
    for group, slots in groups.items():
        shared: dict[str, list[int]] = {}
        for index, slot in enumerate(slots):
            own = (f"{group}/{slot}", f"{group}/{EVERY}")
            found = next((n for n in (*own, group, f"{EVERY}/{EVERY}", EVERY) if n in names), None)
            if found is None:
                raise UsageError(
                    f"agents={sorted(names)} has none for {group}/{slot}; add {group!r}, or '*' "
                    "for all that are not named"
                )
            if "/" in found:
                members[f"{group}/{slot}"] = (group, (index,), names[found])
            else:
                shared.setdefault(found, []).append(index)
        for found, indices in shared.items():
            members[group] = (group, tuple(indices), names[found])
    return members


def _check_known(groups: Mapping[str, tuple[str, ...]], names: Mapping[str, AgentConfig]) -> None:
    known = {EVERY, f"{EVERY}/{EVERY}", *groups, *(f"{group}/{EVERY}" for group in groups)}
    known |= {f"{group}/{slot}" for group, slots in groups.items() for slot in slots}
    for name in names:
        if name not in known:
            raise UsageError(
                f"agents has {name!r}, which is no group or slot of this environment; it has "
                f"{', '.join(sorted(known))}"
            )
