"""Environments of many agents as trees: who there is, what each observes and does.

    pursuit = Population(
        {
            "hunter": Population(Repeat(AgentNode(Obs(sight), Act(moves)), most=3)),
            "prey": AgentNode({"sight": Obs(sight), "all": Obs(map, eval_only=True)}, Act(moves)),
        },
        common=Obs(weather),
    )

``compile_tree`` makes a ``MultiAgentSpec`` of it: agents with equal observations and actions are
the slots of a *group*. A tree of one ``AgentNode`` is a single agent, an ``EnvSpec``.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

import gymnasium
import numpy as np
from gymnasium import spaces

from sebulba.envs.spaces import canonical_action_space, canonical_observation_space, num_choices
from sebulba.errors import UsageError, shown
from sebulba.types import COMMON, OBSERVATION, EnvSpec, Group, MultiAgentSpec, Team

Payoff = Literal["cooperative", "zero_sum", "general"]

SPEC = "population"
"""Where the metadata of an environment, single or vector, has its ``MultiAgentSpec``."""
MOST_SLOTS = 1024
"""Slots that a ``Repeat`` may have."""


@dataclasses.dataclass(frozen=True)
class Obs:
    """A part of an observation."""

    space: gymnasium.Space
    """Box, Discrete, MultiDiscrete, MultiBinary, or a Dict of these."""
    eval_only: bool = False
    """Only the learner sees it; the policy never does."""
    legal_actions: bool = False
    """It says which actions are legal: MultiBinary, an entry for each action."""
    frame_stack: int = 0
    """If positive, axis 0 of an image stacks this many frames, newest last: a replay keeps each
    frame once, if the agent observes nothing else and never waits."""


@dataclasses.dataclass(frozen=True)
class Act:
    """What an agent does."""

    space: gymnasium.Space | Mapping[str, gymnasium.Space]
    """Box of floats, Discrete or MultiDiscrete; or a dict of these by name."""
    non_atomic: bool = False
    """Each part of a dict is chosen by a slot of its own, as by an agent of its own."""


@dataclasses.dataclass(frozen=True)
class AgentNode:
    """One agent."""

    obs: Obs | Mapping[str, Any]
    """What it observes: a part, or a dict of parts, which may be nested."""
    act: Act
    """What it does."""


@dataclasses.dataclass(frozen=True)
class Repeat:
    """A number of alike agents that may change from step to step."""

    node: AgentNode
    """One of them."""
    most: int
    """How many there can be at once."""


@dataclasses.dataclass(frozen=True)
class Population:
    """Agents, or populations of agents."""

    members: Mapping[str, AgentNode | Population] | Repeat
    """By name; or a number of alike ones, whose names are ``"0"``, ``"1"`` and so on."""
    common: Obs | None = None
    """What all of them observe, which is stored once; for the root only."""
    payoff: Payoff = "general"
    """How their rewards relate: all the same, adding up to zero, or anything."""
    symmetric: bool = False
    """They can change places: all are in one group."""


Node = AgentNode | Population


def seats(name: str, number: int, node: AgentNode) -> Population:
    """Return the players of a game, who can change places; two of them play for what the other
    loses."""
    payoff: Payoff = "zero_sum" if number == 2 else "general"
    players = {f"{name}_{index}": node for index in range(number)}
    return Population(players, payoff=payoff, symmetric=True)


@dataclasses.dataclass(frozen=True)
class Slot:
    """A place for an agent, before it is put into a group."""

    name: str
    """Path, with dots."""
    spec: EnvSpec
    """What it observes and does."""
    waits: bool
    """Whether there may be nobody who acts."""


def compile_tree(root: Any, *, name: str = "", waits: bool = False) -> EnvSpec | MultiAgentSpec:
    """Return what an agent is built from; that of a lone ``AgentNode`` is an ``EnvSpec``.

    Args:
      root: The tree.
      name: Name of the environment.
      waits: Agents may have to wait in any group, as where they take turns or die. Those of a
        ``Repeat``, and the parts of an action that is not atomic, may in any case.

    Raises:
      UsageError: Something in the tree breaks a rule; the message names the node.
    """
    if isinstance(root, AgentNode):
        slots = list(_slots_of_agent(root, "", None, waits))
        if len(slots) == 1:
            return dataclasses.replace(slots[0].spec, name=name)
        raise UsageError(
            f"{_at('')}an action that is not atomic makes several agents; put the node into a "
            "Population"
        )
    _require(isinstance(root, Population), "", f"is {shown(root)}; give a Population")
    common = _common(root)
    slots = list(_slots(root, "", common, waits, ()))
    groups = _groups(slots, name)
    place = {slot: f"{g}/{slot}" for g, group in groups.items() for slot in group.slots}
    teams = tuple(_teams(root, "", place))
    spaces_ = canonical_observation_space(common.space) if common else None
    return MultiAgentSpec(groups, spaces_, teams, name)


# Walking the tree.


def _slots(
    node: Any, path: str, common: Obs | None, waits: bool, above: tuple[int, ...]
) -> Iterator[Slot]:
    if isinstance(node, AgentNode):
        yield from _slots_of_agent(node, path, common, waits)
        return
    _require(isinstance(node, Population), path, f"is {shown(node)}; give AgentNode or Population")
    _require(id(node) not in above, path, "contains itself; make a tree")
    _check_population(node, path)
    if isinstance(node.members, Repeat):
        repeat = node.members
        for index in range(repeat.most):
            yield from _slots_of_agent(repeat.node, _join(path, str(index)), common, True)
        return
    for member, below in node.members.items():
        yield from _slots(below, _join(path, member), common, waits, (*above, id(node)))


def _check_population(node: Population, path: str) -> None:
    members = node.members
    if isinstance(members, Repeat):
        _check_repeat(members, path)
    else:
        _require(
            isinstance(members, Mapping),
            path,
            f"has members={shown(members)}; give a dict by name, or Repeat(node, most)",
        )
        _require(len(members) > 0, path, "has no members; give it at least one")
        for member in members:
            _check_name(member, path, "member")
    _require(
        node.payoff in get_args(Payoff),
        path,
        f"has payoff={shown(node.payoff)}; use one of {', '.join(get_args(Payoff))}",
    )
    _check_bool(path, "symmetric", node.symmetric)
    _require(path == "" or node.common is None, path, "has common; give it to the root")


def _check_repeat(repeat: Repeat, path: str) -> None:
    node, most = repeat.node, repeat.most
    if isinstance(node, list | tuple | Mapping):
        _require(
            False, path, "repeats several nodes; all of a Repeat are alike: give one AgentNode"
        )
    _require(isinstance(node, AgentNode), path, f"repeats {shown(node)}; give the AgentNode of one")
    is_count = isinstance(most, int) and not isinstance(most, bool) and 1 <= most <= MOST_SLOTS
    _require(is_count, path, f"has most={shown(most)}; use a number from 1 to {MOST_SLOTS}")


def _common(root: Population) -> Obs | None:
    common = root.common
    if common is None:
        return None
    _require(isinstance(common, Obs), COMMON, f"is {shown(common)}; give Obs(space)")
    _check_obs(common, COMMON)
    _require(not common.legal_actions, COMMON, "has legal_actions; each agent has its own")
    _require(not common.eval_only, COMMON, "is eval_only; give eval_only parts to the agents")
    _space(common.space, COMMON)
    return common


def _teams(node: Node, path: str, place: Mapping[str, str]) -> Iterator[Team]:
    if isinstance(node, AgentNode):
        return
    below = path + "." if path else ""
    slots = tuple(where for slot, where in place.items() if slot.startswith(below))
    _require(
        node.payoff != "zero_sum" or len(slots) > 1,
        path,
        "is zero_sum with one agent; use payoff='general', or give it more",
    )
    in_groups = {where.partition("/")[0] for where in slots}
    _require(
        not node.symmetric or len(in_groups) == 1,
        path,
        f"is symmetric, but its agents differ ({', '.join(sorted(in_groups))}); give all of them "
        "equal observations and actions, or drop symmetric",
    )
    yield Team(path, slots, node.payoff, node.symmetric)
    if isinstance(node.members, Mapping):
        for member, child in node.members.items():
            yield from _teams(child, _join(path, member), place)


def agents_of(node: Any, path: str = "") -> dict[str, AgentNode]:
    """Return the agents of a tree that ``compile_tree`` has taken, by their paths with dots."""
    if isinstance(node, AgentNode):
        return {path: node}
    members = node.members
    if isinstance(members, Repeat):
        return {_join(path, str(index)): members.node for index in range(members.most)}
    agents: dict[str, AgentNode] = {}
    for member, below in members.items():
        agents |= agents_of(below, _join(path, member))
    return agents


# One agent.


def _slots_of_agent(node: AgentNode, path: str, common: Obs | None, waits: bool) -> Iterator[Slot]:
    is_hidden = isinstance(node.act, Obs) and node.act.eval_only
    wrong = "an eval_only action" if is_hidden else f"act={shown(node.act)}"
    _require(isinstance(node.act, Act), path, f"has {wrong}; give Act(space)")
    _check_bool(path, "Act.non_atomic", node.act.non_atomic)
    parts = dict(named_parts(node.obs, path))
    if node.act.non_atomic:
        _require(
            isinstance(node.act.space, Mapping),
            path,
            "has a non_atomic action of one space; give a dict of spaces by name, or drop "
            "non_atomic",
        )
        masked = [part for part, obs in parts.items() if obs.legal_actions]
        _require(
            not masked,
            path,
            f"has legal_actions ({', '.join(masked)}) for a non_atomic action; give each part a "
            "node of its own",
        )
        for part, space in _named_spaces(node.act.space, path).items():
            action = _action_space(space, _join(path, part))
            yield Slot(_join(path, part), _spec(parts, action, path, common, True), True)
        return
    action = atomic_action_space(node.act.space, path)
    yield Slot(path, _spec(parts, action, path, common, waits), waits)


def named_parts(obs: Any, path: str, at: str = "") -> Iterator[tuple[str, Obs]]:
    """Yield the parts of an observation by their names, with dots where they are nested."""
    if isinstance(obs, Mapping):
        _require(len(obs) > 0, path, f"observes nothing in obs{at and f'[{at!r}]'}; give a part")
        for name, part in obs.items():
            _check_name(name, path, "observation")
            yield from named_parts(part, path, _join(at, name))
        return
    where = _join(path, at) if at else path
    _require(isinstance(obs, Obs), where, f"observes {shown(obs)}; give Obs(space)")
    _check_obs(obs, where)
    if isinstance(obs.space, spaces.Dict):
        _require(not obs.legal_actions, where, "has legal_actions that are a Dict; use one space")
        inside = {name: dataclasses.replace(obs, space=s) for name, s in obs.space.spaces.items()}
        yield from named_parts(inside, path, at)
        return
    yield at, dataclasses.replace(obs, space=_space(obs.space, where))


def _spec(
    parts: Mapping[str, Obs], action: gymnasium.Space, path: str, common: Obs | None, waits: bool
) -> EnvSpec:
    masks = [name for name, obs in parts.items() if obs.legal_actions]
    _require(len(masks) < 2, path, f"has {len(masks)} legal_actions ({', '.join(masks)}); keep one")
    seen = [name for name, obs in parts.items() if not (obs.eval_only or obs.legal_actions)]
    _require(
        len(seen) > 0 or common is not None,
        path,
        "observes nothing that its policy can see; give it a part that is neither eval_only nor "
        "legal_actions",
    )
    observed = {name: obs.space for name, obs in parts.items()}
    if common is not None:
        _require(COMMON not in observed, path, f"observes {COMMON!r} of its own; rename it")
        if "" in observed:
            observed[OBSERVATION] = observed.pop("")
        observed[COMMON] = canonical_observation_space(common.space)
    if masks:
        obs, size = parts[masks[0]], num_choices(action)
        _require(not obs.eval_only, path, f"has {masks[0]!r} legal_actions that are eval_only")
        _require(size is not None, path, f"has legal_actions for {action}; they are for Discrete")
        fits = isinstance(obs.space, spaces.MultiBinary) and obs.space.shape == (size,)
        _require(
            fits, path, f"has legal_actions of {obs.space}; use MultiBinary({size}) for {action}"
        )
    hidden = tuple(name for name, obs in parts.items() if obs.eval_only)
    legal = masks[0] if masks else None
    if list(observed) != [""]:
        return EnvSpec(spaces.Dict(observed), action, eval_only=hidden, legal_actions=legal)
    stack = 0 if waits else parts[""].frame_stack
    return EnvSpec(observed[""], action, stack, eval_only=hidden, legal_actions=legal)


def atomic_action_space(space: Any, path: str) -> gymnasium.Space:
    """Return one space for an action: that of a dict has its parts, by name, side by side."""
    if not isinstance(space, Mapping | spaces.Dict):
        return _action_space(space, path)
    named = _named_spaces(space, path)
    parts = [_action_space(part, _join(path, name)) for name, part in named.items()]
    if all(isinstance(part, spaces.Discrete) for part in parts):
        sizes, starts = [p.n for p in parts], [p.start for p in parts]  # type: ignore[attr-defined]
        return spaces.MultiDiscrete(sizes, dtype=np.int32, start=starts)
    if all(isinstance(part, spaces.Box) for part in parts):
        low, high = (
            np.concatenate([getattr(part, end).ravel() for part in parts])
            for end in ("low", "high")
        )
        return spaces.Box(low, high, dtype=np.float32)
    kinds = ", ".join(f"{name}={part}" for name, part in zip(named, parts, strict=True))
    raise UsageError(
        f"{_at(path)}an action of several kinds ({kinds}) is not supported; use Discrete for all "
        "parts or Box for all, or non_atomic=True"
    )


def action_parts(action: Any, space: Any) -> Any:
    """Return an action of ``atomic_action_space(space)`` as ``space`` has it: a dict for a dict."""
    if not isinstance(space, Mapping | spaces.Dict):
        return action
    named = dict(space.spaces if isinstance(space, spaces.Dict) else space)
    parts, begin = {}, 0
    for name in sorted(named):
        size = int(np.prod(named[name].shape or ()))
        part = np.asarray(action[begin : begin + size]).reshape(named[name].shape or ())
        parts[name] = int(part) if isinstance(named[name], spaces.Discrete) else part
        begin += size
    return parts


def _named_spaces(space: Any, path: str) -> dict[str, Any]:
    named = dict(space.spaces if isinstance(space, spaces.Dict) else space)
    _require(len(named) > 0, path, "has an action without parts; give it at least one")
    for name in named:
        _check_name(name, path, "action")
    return {name: named[name] for name in sorted(named)}


# Groups.


def _groups(slots: list[Slot], name: str) -> dict[str, Group]:
    alike: list[list[Slot]] = []
    for slot in slots:
        for group in alike:
            if group[0].spec == slot.spec:
                group.append(slot)
                break
        else:
            alike.append([slot])
    groups: dict[str, Group] = {}
    for group in alike:
        spec = dataclasses.replace(group[0].spec, name=name)
        names = tuple(slot.name for slot in group)
        waits = any(slot.waits for slot in group)
        groups[_unique(_group_name(names), groups)] = Group(spec, names, waits)
    return groups


def _group_name(slots: tuple[str, ...]) -> str:
    """Return what the names have in common but for a number at the end; else ``agents``."""
    stems = {re.sub(r"[._-]?\d+$", "", slot) for slot in slots}
    return (stems.pop() if len(stems) == 1 else "") or "agents"


def _unique(name: str, taken: Mapping[str, Any]) -> str:
    names = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
    return next(one for one in names if one not in taken and one != COMMON)


# Rules.


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _at(path: str) -> str:
    return f"node {path!r}: " if path else "the root of the tree: "


def _require(fits: bool, path: str, problem: str) -> None:
    if not fits:
        where = f"node {path!r}" if path else "the root of the tree"
        raise UsageError(f"{where} {problem}")


def _check_name(name: Any, path: str, kind: str) -> None:
    fits = isinstance(name, str) and re.fullmatch(r"[^./*\s]+", name) is not None
    _require(fits, path, f"has the {kind} name {shown(name)}; use text without . / * and spaces")
    _require(
        kind != "member" or name != COMMON, path, f"has a member {COMMON!r}; the name is reserved"
    )


def _check_bool(path: str, name: str, value: Any) -> None:
    _require(isinstance(value, bool), path, f"has {name}={shown(value)}; use True or False")


def _check_obs(obs: Obs, path: str) -> None:
    _check_bool(path, "Obs.eval_only", obs.eval_only)
    _check_bool(path, "Obs.legal_actions", obs.legal_actions)
    _require(
        isinstance(obs.space, gymnasium.Space),
        path,
        f"has space={shown(obs.space)}; give a Space",
    )
    shape = obs.space.shape or ()
    _require(
        obs.frame_stack == 0 or (len(shape) == 3 and obs.frame_stack == shape[0]),
        path,
        f"has frame_stack={shown(obs.frame_stack)} for {obs.space}; use the number of frames in "
        "axis 0 of an image, or 0",
    )


def _space(
    space: gymnasium.Space, path: str, canonical: Any = canonical_observation_space
) -> gymnasium.Space:
    try:
        return canonical(space)
    except UsageError as error:
        raise UsageError(f"{_at(path)}{error}") from error


def _action_space(space: Any, path: str) -> gymnasium.Space:
    _require(
        isinstance(space, gymnasium.Space), path, f"has the action {shown(space)}; give a Space"
    )
    return _space(space, path, canonical_action_space)


# For people.


def describe(spec: Any) -> str:
    """Return who there is, who shares what and who sees what, as a text of several lines.

    Args:
      spec: A tree, or what ``sebulba.env_spec`` returned.

    Raises:
      UsageError: Something in the tree breaks a rule, or it is neither.
    """
    if isinstance(spec, AgentNode | Population):
        spec = compile_tree(spec)
    if isinstance(spec, EnvSpec):
        return "\n".join([f"{spec.name or 'environment'}: a single agent", *_seen(spec, "  ")])
    if not isinstance(spec, MultiAgentSpec):
        raise UsageError(f"describe takes a tree or the spec of an environment, not {shown(spec)}")
    slots = sum(len(group.slots) for group in spec.groups.values())
    lines = [f"{spec.name or 'environment'}: {slots} agents in {_count(spec.groups, 'group')}"]
    for name, group in spec.groups.items():
        waits = ", which may have to wait" if group.waits else ""
        lines.append(f"  group {name!r}: {_count(group.slots, 'slot')}{waits}")
        lines.append(f"    slots     {', '.join(group.slots)}")
        lines += _seen(group.spec, "    ")
    for team in spec.teams:
        among = f"in {team.name}: {', '.join(team.slots)}" if team.name else "among all"
        lines.append(f"  payoff {team.payoff}{', symmetric,' if team.symmetric else ''} {among}")
    return "\n".join(lines)


def _count(things: Any, word: str) -> str:
    return f"{len(things)} {word}{'' if len(things) == 1 else 's'}"


def _seen(spec: EnvSpec, indent: str) -> list[str]:
    lines = []
    space = spec.observation_space
    parts = space.spaces if isinstance(space, spaces.Dict) else {"": space}
    for name, part in parts.items():
        who = "policy and learner"
        if name in spec.eval_only:
            who = "the learner only"
        elif name == spec.legal_actions:
            who = "masks the actions"
        elif name == COMMON:
            who = "policy and learner, the same for all agents, stored once"
        label = f" {name}" if name else ""
        lines.append(
            f"{indent}observes {label or 'it'}: {_short(part)} ({who})".replace("  it", "")
        )
    return [*lines, f"{indent}does      {_short(spec.action_space)}"]


def _short(space: gymnasium.Space) -> str:
    text = " ".join(str(space).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
