"""PettingZoo's environments, AEC and Parallel, as a ``MultiAgentEnv``.

PettingZoo is imported when one of its ids is asked for. An object of a user's own shows by its
class that it is one, and has imported it.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from sebulba.envs.multi.multi_agent_env import MultiAgentEnv
from sebulba.envs.observation_parts import MASK
from sebulba.envs.returned import parts_of
from sebulba.envs.saving.saved_env import equal
from sebulba.envs.tree import (
    OBSERVATION,
    Act,
    AgentNode,
    Obs,
    Population,
    atomic_action_space,
    num_choices,
)
from sebulba.errors import EnvError, UsageError, text_of
from sebulba.support.checks import nearest
from sebulba.types import COMMON

PETTINGZOO = "pettingzoo"
"""Library, package, extra, and what its ids begin with: ``pettingzoo:classic/chess_v6``."""
FAMILIES = {
    "atari": "pettingzoo.atari",
    "butterfly": "pettingzoo.butterfly",
    "classic": "pettingzoo.classic",
    "mpe": "mpe2",
    "sisl": "pettingzoo.sisl",
}
"""Packages of the families; particles have one of their own."""
_MOST_SEED = 2**31 - 1


def is_pettingzoo_id(env: str) -> bool:
    """Tell whether ``env`` is ``pettingzoo:FAMILY/NAME``."""
    return env.startswith(f"{PETTINGZOO}:")


def is_pettingzoo(env: Any) -> bool:
    """Tell whether ``env`` is an environment of PettingZoo's AEC or Parallel API."""
    library = sys.modules.get(PETTINGZOO)
    return library is not None and isinstance(env, library.AECEnv | library.ParallelEnv)


class PettingZooEnv(MultiAgentEnv):
    """An AEC or Parallel environment.

    Agents with equal spaces are a group. ``action_mask`` in an observation, or in an info, says
    which actions are legal. In AEC, who is selected acts; rewards of a step are what it adds to
    ``_cumulative_rewards``; who is dead steps with None.

    It is pickled as the seed of the episode and the actions since then, which a copy plays again.
    So the seed given to its ``reset`` must decide all chance of an episode.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        env: Any = None,
        *,
        all_act: bool = False,
        same_observation: bool = False,
    ) -> None:
        """Take over ``env``, or the one that ``make`` makes.

        Args:
          make: Makes such an environment; kept for copies.
          env: One that it made.
          all_act: Every agent acts in every step; an attribute of this name of the environment
            says so, too.
          same_observation: All agents are shown the same, as the screen of a game, which then is
            their common part; each observes its number besides. An attribute of this name says
            so, too.

        Raises:
          UsageError: The spaces of the environment do not fit, or ``same_observation``.
        """
        self._make = make
        self.env = make() if env is None else env
        self.all_act = all_act or bool(getattr(self.env.unwrapped, "all_act", False))
        self.render_mode = getattr(self.env, "render_mode", None)
        self._is_parallel = isinstance(self.env, sys.modules[PETTINGZOO].ParallelEnv)
        self._masked = _masked_by_info(self.env)
        self._names = _names_in_tree(_agents_of(self.env))
        self._agents = {name: agent for agent, name in self._names.items()}
        same = getattr(self.env.unwrapped, "same_observation", False)
        self.same_observation = same_observation or bool(same)
        make_tree = _tree_of_same if self.same_observation else _tree
        self.tree = make_tree(self.env, self._names, self._masked)
        self._seed: int | None = None
        self._taken: list[dict[str, Any]] = []
        self._seen: Any = None
        self._lingering: set[str] = set()
        """Agents that have ended and are still in ``agents`` of a Parallel environment."""
        self._said_lingering = False

    def reset(self, *, seed: int | None = None) -> dict[str, Any]:
        """Begin an episode, whose seed is drawn where none is given."""
        self._seed = int(self.np_random.integers(_MOST_SEED)) if seed is None else seed
        self._taken = []
        self._seen = self._named(self._begin(self._seed))
        return self._seen

    def step(self, actions: dict[str, Any]) -> tuple[dict, dict, dict, dict]:
        self._taken.append(actions)
        own = {self._agents[name]: action for name, action in actions.items()}
        result = self._act_in_parallel(own) if self._is_parallel else self._act_in_turn(own)
        seen, rewards, terminated, truncated = map(self._named, result)
        self._seen = seen
        return seen, rewards, terminated, truncated

    def _named(self, by_agent: Any) -> Any:
        """Return a mapping by the agents of the environment by their names in the tree."""
        if not isinstance(by_agent, Mapping):
            return by_agent  # refused elsewhere
        return {self._names.get(agent, agent): value for agent, value in by_agent.items()}

    def render(self) -> Any:
        return self.env.render()

    def close(self) -> None:
        self.env.close()

    def _begin(self, seed: int) -> dict[str, Any]:
        self._lingering = set()
        returned = self.env.reset(seed=seed)
        if not self._is_parallel:
            return self._until_one_acts()[0]
        names = "observations, infos"
        return self._observed(*parts_of(returned, names, "reset of a Parallel environment"))

    def _act_in_parallel(self, actions: dict[str, Any]) -> tuple[dict, dict, dict, dict]:
        returned = self.env.step(actions)
        names = "observations, rewards, terminations, truncations, infos"
        observations, rewards, terminated, truncated, infos = parts_of(
            returned, names, "step of a Parallel environment"
        )
        involved = {*actions, *self.env.agents} - self._lingering
        seen = {agent: obs for agent, obs in observations.items() if agent in involved}
        if isinstance(terminated, Mapping) and isinstance(truncated, Mapping):
            ended = {a for a in involved if _is_set(terminated, a) or _is_set(truncated, a)}
            self._check_agents(ended, {*actions} - ended)
        return self._observed(seen, infos), rewards, terminated, truncated

    def _check_agents(self, ended: set[str], others: set[str]) -> None:
        """Compare those who are still in ``agents`` with what the flags of a step say.

        Raises:
          EnvError: ``agents`` is empty, and agents that acted have no flag.
        """
        present = {*self.env.agents}
        if not present and others:
            names = ", ".join(map(repr, sorted(others)))
            raise EnvError(
                f"agents is empty, and {names} neither terminated nor truncated; set a flag of "
                "every agent that leaves"
            )
        self._lingering &= present  # one that has left may come again
        if (new := ended & present - self._lingering) and present - ended - self._lingering:
            self._lingering |= new
            if not self._said_lingering:
                self._said_lingering = True
                warnings.warn(
                    f"{', '.join(map(repr, sorted(new)))} ended and stays in agents; it counts as "
                    "ended for the episode; remove agents from the list when they end",
                    stacklevel=2,
                )

    def _act_in_turn(self, actions: dict[str, Any]) -> tuple[dict, dict, dict, dict]:
        ((mover, action),) = actions.items()
        before = {**self.env._cumulative_rewards, mover: 0.0}  # which its step sets to 0
        self.env.step(action)
        now = dict(self.env._cumulative_rewards)
        rewards = {agent: total - before.get(agent, 0.0) for agent, total in now.items()}
        seen, terminated, truncated = self._until_one_acts()
        return seen, rewards, terminated, truncated

    def _until_one_acts(self) -> tuple[dict, dict, dict]:
        """Step with None for all who are dead; return what they and the next mover are shown.

        The dicts that follow say who has reached a terminal state, and whose episode is cut short.
        """
        seen: dict[str, Any] = {}
        ends: tuple[dict, dict] = ({}, {})
        infos: dict[str, Any] = {}
        while self.env.agents:
            agent = self.env.agent_selection
            seen[agent], _, *flags, infos[agent] = self.env.last()
            for end, flag in zip(ends, flags, strict=True):
                end[agent] = flag
            if not any(flags):
                break
            self.env.step(None)
        return self._observed(seen, infos), *ends

    def _observed(self, observations: Mapping[str, Any], infos: Any) -> dict[str, Any]:
        """Return observations with the masks that infos have."""
        if self.same_observation:
            return self._observed_by_all(observations)
        seen = dict(observations)
        for agent in seen.keys() - self._masked.keys() if isinstance(infos, Mapping) else ():
            has_own = isinstance(seen[agent], Mapping) and MASK in seen[agent]
            if MASK in (infos.get(agent) or ()) and not has_own:
                raise EnvError(
                    f"the info of agent {agent!r} has an {MASK} in step but not in reset, so it "
                    "cannot be used; give it in the infos of reset, too"
                )
        for agent in seen.keys() & self._masked.keys():
            mask = (infos.get(agent) or {}).get(MASK)
            none = np.zeros(self._masked[agent], np.int8)  # nothing is known to be illegal
            parts = seen[agent] if isinstance(seen[agent], Mapping) else {OBSERVATION: seen[agent]}
            seen[agent] = {**parts, MASK: none if mask is None else mask}
        return seen

    def _observed_by_all(self, observations: Mapping[str, Any]) -> dict[str, Any]:
        """Return what all are shown, and the number of each who is shown it."""
        names = [*observations]
        for name in names[1:]:
            if not equal(observations[name], observations[names[0]]):
                raise EnvError(
                    f"same_observation=True, but agents {names[0]!r} and {name!r} observe "
                    "different things; use same_observation=False"
                )
        if names:
            self._shown = observations[names[0]]
        agents = self.env.possible_agents
        return {COMMON: self._shown, **{name: agents.index(name) for name in names}}

    # Copies.

    def __getstate__(self) -> dict[str, Any]:
        kept = ("_make", "all_act", "same_observation", "_seed", "_taken", "_seen")
        return {**{name: getattr(self, name) for name in kept}, "np_random": self.np_random}

    def __setstate__(self, state: dict[str, Any]) -> None:
        same, all_act = state["same_observation"], state["all_act"]
        self.__init__(state["_make"], all_act=all_act, same_observation=same)  # type: ignore[misc]
        seed, taken = state["_seed"], state["_taken"]
        if seed is not None:
            self.reset(seed=seed)
            for actions in taken:
                self.step(actions)
            if not equal(self._seen, state["_seen"]):
                raise EnvError(
                    f"seed {seed} and {len(taken)} actions do not lead to the same observations "
                    "again; let the seed of reset decide all chance of an episode"
                )
        self.np_random = state["np_random"]


def _is_set(flags: Mapping[str, Any], agent: str) -> bool:
    """Tell whether a flag is true; what is no bool is refused elsewhere."""
    flag = flags.get(agent)
    return isinstance(flag, bool | np.bool_) and bool(flag)


# The tree.


def _masked_by_info(env: Any) -> dict[str, int]:
    """Return the number of actions of the agents whose info, not observation, has the mask."""
    returned = env.reset(seed=0)
    infos = dict(getattr(env, "infos", None) or {})
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
        infos |= returned[1]  # of a Parallel environment
    found = {}
    for agent in env.possible_agents:
        info = infos.get(agent)
        space = env.observation_space(agent)
        in_obs = isinstance(space, spaces.Dict) and MASK in space.spaces
        if isinstance(info, Mapping) and MASK in info and not in_obs:
            found[agent] = len(info[MASK])
    return found


def _names_in_tree(agents: Sequence[Any]) -> dict[Any, str]:
    """Return a name that a tree can have for each agent: its own, where it is one.

    In others ``_`` takes the place of what separates names; numbers get ``agent_`` in front.
    """
    names: dict[Any, str] = {}
    for agent in agents:
        name = "_".join(map(str, agent)) if isinstance(agent, tuple) else str(agent)
        name = re.sub(r"[./*\s]", "_", name) or "_"
        if not isinstance(agent, str):
            name = f"agent_{name}" if name.lstrip("-").isdigit() else name
        while name in names.values():
            name += "_"
        names[agent] = name
    return names


def _tree(env: Any, names: Mapping[Any, str], masked: Mapping[str, int]) -> Population:
    return Population(
        {
            name: _node(agent, env.observation_space(agent), env.action_space(agent), masked)
            for agent, name in names.items()
        }
    )


def _agents_of(env: Any) -> list[str]:
    agents = getattr(env, "possible_agents", None)
    if not agents:
        raise UsageError(f"{env} has no possible_agents; list all agents there")
    return agents


def _tree_of_same(env: Any, names: Mapping[Any, str], masked: Mapping[str, int]) -> Population:
    """Return the tree of agents who all are shown the same."""
    agents = [*names]
    shown = env.observation_space(agents[0])
    for agent in agents[1:]:
        if (other := env.observation_space(agent)) != shown:
            raise UsageError(
                f"same_observation=True, but agent {agents[0]!r} observes {shown} and {agent!r} "
                f"{other}; use same_observation=False"
            )
    if masked or (isinstance(shown, spaces.Dict) and MASK in shown.spaces):
        raise UsageError(
            f"same_observation=True, but agents have their own {MASK}; use same_observation=False"
        )
    number = Obs(spaces.Discrete(len(agents)))
    return Population(
        {name: AgentNode(number, Act(env.action_space(a))) for a, name in names.items()},
        common=Obs(shown),
    )


def _node(
    agent: str, observed: gymnasium.Space, action: gymnasium.Space, masked: Mapping[str, int]
) -> AgentNode:
    is_dict = isinstance(observed, spaces.Dict)
    if agent not in masked and not (is_dict and MASK in observed.spaces):  # type: ignore[attr-defined]
        return AgentNode(Obs(observed), Act(action))
    parts = observed.spaces if is_dict else {OBSERVATION: observed}  # type: ignore[attr-defined]
    entries = num_choices(atomic_action_space(action, str(agent)))
    mask = spaces.MultiBinary(masked.get(agent) or entries or 1)
    seen = {name: Obs(part) for name, part in parts.items() if name != MASK}
    return AgentNode({**seen, MASK: Obs(mask, legal_actions=True)}, Act(action))


# Ids.


def check_pettingzoo_id(env: str) -> None:
    """Raise UsageError unless ``env`` is an id of an installed PettingZoo."""
    if importlib.util.find_spec(PETTINGZOO) is None:
        raise UsageError(
            f"env={env!r} needs pettingzoo, which is not installed; "
            "pip install 'sebulba[pettingzoo]'"
        )
    env_id = env.removeprefix(f"{PETTINGZOO}:")
    family = env_id.partition("/")[0]
    if family in FAMILIES and not _folders(FAMILIES[family]):
        raise _needs(env, FAMILIES[family], family)
    known = pettingzoo_ids()
    if env_id not in known:
        hint = nearest(env_id, known) or f"; it has {', '.join(sorted(known))}"
        raise UsageError(f"env={env!r}: {env_id!r} is not an id of pettingzoo{hint}")


def pettingzoo_ids() -> set[str]:
    """Return all ids, ``FAMILY/NAME``, of the families that are installed."""
    return {
        f"{family}/{file.stem}"
        for family, package in FAMILIES.items()
        for folder in _folders(package)
        for file in folder.glob("*_v[0-9]*.py")
    }


def _folders(package: str) -> list[Path]:
    found = importlib.util.find_spec(package)
    return [Path(place) for place in (found and found.submodule_search_locations) or ()]


def pettingzoo_package(env: str) -> str:
    """Return the package that brings ``env``, an id."""
    return FAMILIES[env.removeprefix(f"{PETTINGZOO}:").partition("/")[0]]


def make_pettingzoo(env: str, options: Mapping[str, Any]) -> PettingZooEnv:
    """Make the environment of an id, Parallel where it has that.

    Args:
      env: The id, which ``check_pettingzoo_id`` has taken.
      options: Those of the environment, and ``all_act`` and ``same_observation`` of
        ``PettingZooEnv``.

    Raises:
      UsageError: A package is missing, or an option is wrong.
    """
    options = dict(options)
    own = {name: bool(options.pop(name, False)) for name in ("all_act", "same_observation")}
    return PettingZooEnv(_Maker(env, options), **own)


class _Maker:
    """Makes the environment of an id, in any process."""

    def __init__(self, env: str, options: dict[str, Any]) -> None:
        self._env = env
        self._options = options

    def __call__(self) -> Any:
        family, _, name = self._env.removeprefix(f"{PETTINGZOO}:").partition("/")
        with warnings.catch_warnings(action="ignore"):
            try:
                importlib.import_module(PETTINGZOO)
                module = importlib.import_module(f"{FAMILIES[family]}.{name}")
                make = getattr(module, "parallel_env", None) or module.env
                return make(**self._options)
            except ImportError as error:
                raise _needs(self._env, error.name or text_of(error), family) from error
            except Exception as error:  # of the library: options, files that are not there, ...
                raise UsageError(f"env={self._env!r} cannot be made: {text_of(error)}") from error


_DISTRIBUTIONS = {"Box2D": "box2d", "multi_agent_ale_py": "multi-agent-ale-py"}
"""What pip calls the packages whose names are others."""


def _needs(env: str, package: str, family: str) -> UsageError:
    if not package.isidentifier():
        return UsageError(f"env={env!r} needs a package: {package}")
    name = _DISTRIBUTIONS.get(package, package)
    whole = "" if family == "mpe" else f"; `pip install 'pettingzoo[{family}]'` brings all of these"
    return UsageError(
        f"env={env!r} needs the package {package}, which is not installed; "
        f"pip install {name}{whole}"
    )
