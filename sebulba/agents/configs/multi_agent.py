"""Which agent plays whom where there are many."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from sebulba.agents.configs.agent_config import AgentConfig
from sebulba.agents.configs.auxiliary import AuxiliaryConfig
from sebulba.agents.configs.frozen import FrozenConfig
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
    frozen: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Who acts by a fixed strategy, under the same names: the folder of a policy, what
    ``sebulba.load_policy`` returned, or a function of JAX, ``(obs [N, ...], key) -> action``."""
    auxiliary: Mapping[str, AuxiliaryConfig] = dataclasses.field(default_factory=dict)
    """Hyper-parameters of members without actions, by names that are no group's."""

    def __post_init__(self) -> None:
        """Check names and values; whether such groups exist is seen when the agent is made."""
        if not isinstance(self.agents, Mapping) or not self.agents:
            raise UsageError(
                f"agents={shown(self.agents)} must be a dict of configurations by group; use "
                "{'*': PPOConfig()} for one policy a group"
            )
        for field in ("frozen", "auxiliary"):
            if not isinstance(getattr(self, field), Mapping):
                raise UsageError(
                    f"{field}={shown(getattr(self, field))} must be a dict by member; leave it "
                    "out if it is empty"
                )
        frozen = {n: str(one) if isinstance(one, Path) else one for n, one in self.frozen.items()}
        object.__setattr__(self, "frozen", frozen)
        self._check_names()
        self._check_values()

    def _check_names(self) -> None:
        for name in (*self.agents, *self.frozen):
            if not isinstance(name, str) or not name or name.count("/") > 1:
                field = "agents" if name in self.agents else "frozen"
                raise UsageError(
                    f"{field} has the name {shown(name)}; use 'GROUP', 'GROUP/SLOT', 'GROUP/*', "
                    "'*' or '*/*'"
                )
        options: dict[str, str] = {}
        for name in (*self.agents, *self.frozen):
            other = options.setdefault(name.replace("_", "-"), name)
            if other != name:
                raise UsageError(
                    f"{other!r} and {name!r} are the same name on the command line, which writes "
                    "'-' for '_'; rename one of them"
                )
        if twice := sorted(self.agents.keys() & self.frozen.keys()):
            raise UsageError(f"{twice[0]!r} is in agents and in frozen; leave it out of one")
        for name in self.auxiliary:
            if not isinstance(name, str) or not re.fullmatch(r"[^./*\s]+", name):
                raise UsageError(
                    f"auxiliary has the name {shown(name)}; use text without . / * and spaces"
                )

    def _check_values(self) -> None:
        for name, config in self.agents.items():
            if not getattr(config, "agent_class", "") or isinstance(config, MultiAgentConfig):
                raise UsageError(
                    f"agents[{name!r}]={shown(config)} must be the hyper-parameters of a single "
                    "agent; use for example PPOConfig()"
                )
        for name, auxiliary in self.auxiliary.items():
            if not getattr(auxiliary, "auxiliary_class", ""):
                raise UsageError(
                    f"auxiliary[{name!r}]={shown(auxiliary)} must be the hyper-parameters of an "
                    "auxiliary; use for example RandomNetworkDistillationConfig()"
                )

    def fitted(self, num_envs: int) -> MultiAgentConfig:
        agents = {name: one.fitted(num_envs) for name, one in self.agents.items()}
        return dataclasses.replace(self, agents=agents)

    def named_code(self) -> list[str]:
        """Return what it names that is read or imported."""
        return [f"the policy in {one!r}" for one in self.frozen.values() if isinstance(one, str)]

    def players(self) -> dict[str, AgentConfig | FrozenConfig]:
        """Return hyper-parameters and fixed strategies by who has them."""
        frozen = {
            name: FrozenConfig(Path(one) if isinstance(one, str) else one)
            for name, one in self.frozen.items()
        }
        return {**self.agents, **frozen}


def assigned(
    groups: Mapping[str, tuple[str, ...]], names: Mapping[str, AgentConfig | FrozenConfig]
) -> dict[str, tuple[str, tuple[int, ...], AgentConfig | FrozenConfig]]:
    """Return who plays what: member by name, with its group, slots and hyper-parameters.

    Args:
      groups: Names of the slots of each group.
      names: ``MultiAgentConfig.players()``.

    Raises:
      UsageError: A name is of no group or slot, or a slot has no agent.
    """
    _check_known(groups, names)
    members: dict[str, tuple[str, tuple[int, ...], AgentConfig | FrozenConfig]] = {}
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


def _check_known(groups: Mapping[str, tuple[str, ...]], names: Mapping[str, Any]) -> None:
    known = {EVERY, f"{EVERY}/{EVERY}", *groups, *(f"{group}/{EVERY}" for group in groups)}
    known |= {f"{group}/{slot}" for group, slots in groups.items() for slot in slots}
    for name in names:
        if name not in known:
            raise UsageError(
                f"agents has {name!r}, which is not a group or slot of this environment; use "
                f"{', '.join(sorted(known))}, or begin with a configuration of one policy, such "
                "as ppo"
            )
