"""A ``MultiAgentEnv`` as a ``gymnasium.Env`` with the rows of all slots, and the adapter of these.

So what vectorizes, checks, seeds, saves and supervises single environments does it here too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from sebulba.envs.gymnasium_adapter import GymnasiumAdapter
from sebulba.envs.multi.multi_agent_env import MultiAgentEnv
from sebulba.envs.multi.pettingzoo_env import PettingZooEnv, is_pettingzoo
from sebulba.envs.obs_wrapper import part_of
from sebulba.envs.policy_view import View
from sebulba.envs.returned import flag_of, make_obs_check, number_of, parts_of
from sebulba.envs.spaces import SlotActions, choices, legal_action, masks_of
from sebulba.envs.tree import (
    OBSERVATION,
    SPEC,
    AgentNode,
    action_parts,
    agents_of,
    atomic_action_space,
    compile_tree,
    named_parts,
)
from sebulba.errors import EnvError, UsageError, shown
from sebulba.types import COMMON, EnvOutput, MultiAgentSpec

FLAGS = ("terminated", "truncated", "is_first")
MOST_CHOICES = 2**24
"""Actions travel to worker processes as float32, which are exact up to here."""


class PopulationEnv(gymnasium.Env):
    """Observes the rows of all slots, with rewards and flags among the parts of the observation."""

    def __init__(self, env: MultiAgentEnv, name: str = "", made: Any = None) -> None:
        """Take over ``env``.

        Args:
          env: The environment.
          name: Name of the spec; empty for that of the class.
          made: What a user's factory made, where that is inside ``env``.

        Raises:
          UsageError: Its tree breaks a rule.
        """
        self.env = env
        self.identity = id(env if made is None else made)
        """Of what may not be in two environments of a vector."""
        tree = getattr(env, "tree", None)
        who = type(env).__name__
        if tree is None:
            raise UsageError(f"{who} has no attribute tree; give it a Population")
        if isinstance(tree, AgentNode):
            raise UsageError(
                f"the tree of {who} is one AgentNode, a single agent; make it a gymnasium.Env "
                "with this tree, or put the node into a Population"
            )
        spec = compile_tree(tree, name=name or who, waits=not env.all_act)
        assert isinstance(spec, MultiAgentSpec)
        self.population = spec
        self.metadata = {SPEC: spec}
        self.render_mode = getattr(env, "render_mode", None)
        self._agents = {agent: _Agent(agent, node, spec) for agent, node in agents_of(tree).items()}
        self._common = dict(named_parts(tree.common, COMMON)) if tree.common is not None else {}
        self.observation_space = spaces.Dict(dict(_flat_spaces(spec)))
        self.action_space = _flat_action_space(spec)
        self._live: set[str] = set()
        self._acting: tuple[str, ...] = ()
        self._masks: dict[str, np.ndarray] = {}

    @property  # type: ignore[misc]
    def np_random(self) -> np.random.Generator:
        """The generator of the environment."""
        return self.env.np_random

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict, dict]:
        """Begin an episode, for every slot."""
        del options
        if seed is not None:
            self.env.np_random = np.random.default_rng(seed)
        observed = self._observed(self.env.reset(seed=seed), "reset")
        rows = self._empty()
        self._live = set(self._agents)
        for group in self.population.groups:
            rows[f"is_first/{group}"][:] = 1
        if not observed.keys() - {COMMON}:
            raise EnvError("reset returned no agent that acts; return the observation of one")
        self._write_observations(rows, observed)
        self._let_act(rows, [agent for agent in observed if agent != COMMON])
        return rows, {}

    def step(self, action: np.ndarray) -> tuple[dict, float, bool, bool, dict]:
        acted = set(self._acting)
        result = self.env.step(self._actions(action))
        names = "observations, rewards, terminated, truncated"
        observed, rewards, *told = parts_of(result, names, "step")
        observed = self._observed(observed, "step")
        rows = self._empty()
        self._write_observations(rows, observed)
        self._write_rewards(rows, rewards)
        terminated, truncated = map(self._told, told, FLAGS)
        rejoined = observed.keys() & self._agents.keys() - self._live
        goes_on = [
            agent
            for agent in observed
            if agent != COMMON and agent not in terminated and agent not in truncated
        ]
        if not goes_on:
            # Those who wait are told of the end, too.
            (terminated if terminated or not truncated else truncated).update(
                self._live - terminated - truncated
            )
        truncated = self._with_last_observation(truncated - terminated, observed, acted)
        for flag, agents in zip(FLAGS, (terminated, truncated, rejoined), strict=True):
            for agent in agents:
                for group, slot in self._agents[agent].slots:
                    rows[f"{flag}/{group}"][slot] = 1
        self._live = (self._live | rejoined) - terminated - truncated
        self._let_act(rows, goes_on)
        return rows, 0.0, not goes_on and bool(terminated), not goes_on and not terminated, {}

    def render(self) -> Any:
        return self.env.render()

    def close(self) -> None:
        self.env.close()

    # What the environment returned.

    def _observed(self, observed: Any, method: str) -> dict[str, Any]:
        if not isinstance(observed, Mapping):
            raise EnvError(f"{method} must return observations by agent; got {shown(observed)}")
        self._check_known(observed, f"observations of {method}", also=COMMON)
        if self._common and COMMON not in observed:
            raise EnvError(f"observations of {method} lack {COMMON!r}, which the tree has")
        return dict(observed)

    def _with_last_observation(
        self, truncated: set[str], observed: Mapping[str, Any], acted: set[str]
    ) -> set[str]:
        """Return the agents that are told that they are cut short.

        One that waited and has no last observation is not: its last decision is not learned from,
        since the first row of the next episode follows it.
        """
        for agent in sorted(truncated & acted - observed.keys()):
            raise EnvError(
                f"agent {agent!r} was truncated without its last observation, from which its value "
                "is estimated; return that, too"
            )
        return truncated & observed.keys()

    def _check_known(self, names: Mapping[str, Any], what: str, also: str = "") -> None:
        for name in names:
            if name not in self._agents and not (name == also and self._common):
                raise EnvError(
                    f"{what} name {shown(name)}, which is not in the tree; use "
                    f"{', '.join(self._agents)}"
                )

    def _told(self, told: Any, name: str) -> set[str]:
        """Return the agents that are told of an end."""
        if isinstance(told, bool | np.bool_):
            return set(self._live) if told else set()
        if not isinstance(told, Mapping):
            raise EnvError(f"{name} must be a bool, or a dict of bools by agent; got {shown(told)}")
        self._check_known(told, name)
        flags = {agent: flag_of(flag, f"{name} of agent {agent!r}") for agent, flag in told.items()}
        return {agent for agent, flag in flags.items() if flag and agent in self._live}

    def _write_rewards(self, rows: dict[str, np.ndarray], rewards: Any) -> None:
        if not isinstance(rewards, Mapping):
            raise EnvError(f"rewards must be a dict by agent; got {shown(rewards)}")
        self._check_known(rewards, "rewards")
        for agent, reward in rewards.items():
            value = number_of(reward, f"reward of agent {agent!r}")
            for group, slot in self._agents[agent].slots:
                rows[f"reward/{group}"][slot] = value

    def _write_observations(self, rows: dict[str, np.ndarray], observed: Mapping[str, Any]) -> None:
        for agent, obs in observed.items():
            if agent == COMMON:
                for name, part in self._common.items():
                    checked = _checked(obs, name, part.space, "common")
                    rows[_name(COMMON, name)] = checked
                continue
            own = self._agents[agent]
            for name, space in own.parts.items():
                checked = _checked(obs, name, space, f"observation of agent {agent!r}")
                for group, slot in own.slots:
                    rows[_name(f"obs/{group}", own.label(name))][slot] = checked

    def _let_act(self, rows: dict[str, np.ndarray], agents: list[str]) -> None:
        if self.env.all_act and len(agents) not in (0, len(self._agents)):
            missing = ", ".join(sorted(self._agents.keys() - set(agents)))
            raise EnvError(
                f"all_act=True, but {missing} does not act; observe every agent, or set "
                "all_act=False"
            )
        self._acting = tuple(agents)
        for agent in agents:
            for group, slot in self._agents[agent].slots:
                if self.population.groups[group].waits:
                    rows[f"acting/{group}"][slot] = 1
        self._masks = {
            name: rows[f"obs/{name}/{group.spec.legal_actions}"]
            for name, group in self.population.groups.items()
            if group.spec.legal_actions is not None
        }

    def _empty(self) -> dict[str, np.ndarray]:
        parts = self.observation_space.spaces  # type: ignore[attr-defined]
        return {name: _fill(space) for name, space in parts.items()}

    # What the agents do.

    def _actions(self, action: np.ndarray) -> dict[str, Any]:
        by_slot = {
            (name, slot): _decoded(numbers, self.population.groups[name].spec.action_space)
            for name, slot, numbers in self._by_slot(action)
        }
        return {agent: self._agents[agent].action(by_slot) for agent in self._acting}

    def _by_slot(self, action: np.ndarray) -> Iterator[tuple[str, int, np.ndarray]]:
        """Yield group, number and view of the action of every slot."""
        begin = 0
        for name, group in self.population.groups.items():
            size = int(np.prod(group.spec.action_space.shape or ()))
            for slot in range(len(group.slots)):
                yield name, slot, action[begin : begin + size]
                begin += size

    def legal(self, action: np.ndarray) -> np.ndarray:
        """Return ``action`` with a legal choice in place of each that is not."""
        action = np.array(action)
        for name, slot, numbers in self._by_slot(action):
            if name in self._masks:
                space = self.population.groups[name].spec.action_space
                choice = legal_action(_decoded(numbers, space), self._masks[name][slot], space)
                numbers[:] = choice.ravel()
        return action


class _Agent:
    """An agent of the environment, and the slots that it has: several where it is not atomic."""

    def __init__(self, name: str, node: AgentNode, spec: MultiAgentSpec) -> None:
        """Find the slots of the agent ``name``."""
        places = {
            slot: (group_name, index)
            for group_name, group in spec.groups.items()
            for index, slot in enumerate(group.slots)
        }
        space = node.act.space
        self._named = dict(space) if isinstance(space, Mapping) else {}  # so is spaces.Dict
        self._non_atomic = node.act.non_atomic
        self._atomic = None if self._non_atomic else atomic_action_space(space, name)
        names = [f"{name}.{part}" for part in sorted(self._named)] if self._non_atomic else [name]
        self.slots = [places[slot] for slot in names]
        self.parts = {part: obs.space for part, obs in named_parts(node.obs, name)}
        self._lone_is_named = spec.common is not None

    def label(self, part: str) -> str:
        """Return what a part of the observation is called in the spec."""
        return OBSERVATION if not part and self._lone_is_named else part

    def action(self, by_slot: Mapping[tuple[str, int], Any]) -> Any:
        """Return the action as the environment takes it."""
        chosen = [by_slot[slot] for slot in self.slots]
        if not self._named:
            return chosen[0]
        if self._non_atomic:
            return dict(zip(sorted(self._named), chosen, strict=True))
        return action_parts(chosen[0], self._named)


def _name(*parts: str) -> str:
    return "/".join(part for part in parts if part)


def _flat_spaces(spec: MultiAgentSpec) -> Iterator[tuple[str, gymnasium.Space]]:
    """Yield the parts of the observation of a ``PopulationEnv``."""
    for name, space in spec.observation_space.spaces.items():
        where = COMMON if name == COMMON else f"obs/{name}"
        if isinstance(space, spaces.Dict):
            yield from ((_name(where, part), one) for part, one in space.spaces.items())
        else:
            yield where, space
    for name, group in spec.groups.items():
        size = len(group.slots)
        yield f"reward/{name}", spaces.Box(-np.inf, np.inf, (size,), np.float32)
        for flag in FLAGS:
            yield f"{flag}/{name}", spaces.MultiBinary(size)
        if group.waits:
            yield f"acting/{name}", spaces.MultiBinary(size)


def _flat_action_space(spec: MultiAgentSpec) -> spaces.Box:
    """Return the actions of all slots side by side: choices as their numbers."""
    low: list[float] = []
    high: list[float] = []
    for name, group in spec.groups.items():
        space = group.spec.action_space
        if isinstance(space, spaces.Box):
            ends = space.low.ravel(), space.high.ravel()
        else:
            first, last = choices(space)
            ends = np.ravel(first), np.ravel(last)
            if max(np.abs(end).max() for end in ends) >= MOST_CHOICES:
                raise UsageError(f"group {name!r} has {space}; use numbers below {MOST_CHOICES}")
        low += list(ends[0]) * len(group.slots)
        high += list(ends[1]) * len(group.slots)
    return spaces.Box(np.array(low, np.float32), np.array(high, np.float32), dtype=np.float32)


def _decoded(numbers: np.ndarray, space: gymnasium.Space) -> Any:
    if isinstance(space, spaces.Box):
        return numbers.astype(space.dtype).reshape(space.shape)
    whole = np.rint(numbers).astype(np.int32)
    return int(whole[0]) if isinstance(space, spaces.Discrete) else whole.reshape(space.shape)


def _fill(space: gymnasium.Space) -> np.ndarray:
    """Return a value of a space for slots that nobody observes: zeros, where they are inside."""
    zeros = np.zeros(space.shape or (), space.dtype)
    if isinstance(space, spaces.MultiDiscrete):
        return zeros + space.start
    if isinstance(space, spaces.Discrete):
        return zeros + np.asarray(space.start, space.dtype)
    return np.clip(zeros, space.low, space.high) if isinstance(space, spaces.Box) else zeros


def _checked(obs: Any, name: str, space: gymnasium.Space, where: str) -> np.ndarray:
    """Return the part ``name`` (with dots where it is nested) of an observation, as an array."""
    obs = part_of(obs, name.split(".") if name else (), where)
    return make_obs_check(space)(obs, f"{where}{f' [{name!r}]' if name else ''}")


class PopulationAdapter(View):
    """Takes apart what a vector of ``PopulationEnv`` returns."""

    def __init__(self, env: GymnasiumAdapter, spec: MultiAgentSpec) -> None:
        """Take over ``env``, whose environments are of ``spec``."""
        super().__init__(env)  # type: ignore[arg-type]
        self.spec = dataclasses.replace(spec, name=env.spec.name)
        self._actions = SlotActions(spec.groups, self.num_envs)

    def given(self, action: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the actions of all slots side by side, once they are checked."""
        self._actions.check(action)
        columns = [action[name].reshape(self.num_envs, -1) for name in self.spec.groups]
        return np.concatenate([column.astype(np.float32) for column in columns], axis=1)

    def put_back(self, state: bytes) -> None:
        """Go on from ``state``; legal actions are not checked in the next step."""
        self._env.put_back(state)
        self._actions.look({}, ())

    def seen(self, output: EnvOutput) -> EnvOutput:
        parts = output.obs
        groups = self.spec.groups

        def part(prefix: str) -> Any:
            if prefix in parts:
                return parts[prefix]
            begin = f"{prefix}/"
            return {n.removeprefix(begin): x for n, x in parts.items() if n.startswith(begin)}

        def flag(name: str) -> dict[str, np.ndarray]:
            return {group: parts[f"{name}/{group}"].astype(np.bool_) for group in groups}

        obs = {group: part(f"obs/{group}") for group in groups}
        if self.spec.common is not None:
            obs[COMMON] = part(COMMON)
        reward = {group: parts[f"reward/{group}"] for group in groups}
        waiting = {n: parts[f"acting/{n}"].astype(np.bool_) for n, g in groups.items() if g.waits}
        self._actions.look(masks_of(groups, obs), waiting)
        return EnvOutput(
            obs,
            reward,
            flag("terminated"),
            flag("truncated"),
            flag("is_first"),
            reward,
            output.episode_end,
            acting=waiting or (),
        )


def as_gymnasium(make_env: Any, name: str) -> gymnasium.Env:
    """Call ``make_env``, and return what it made as a ``gymnasium.Env``."""
    made = make_env()
    env = PettingZooEnv(make_env, made) if is_pettingzoo(made) else made
    return PopulationEnv(env, name, made) if isinstance(env, MultiAgentEnv) else env
