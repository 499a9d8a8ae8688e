# SPDX-License-Identifier: GPL-2.0-or-later
"""``--env.id ns3:program``: an ns-3 program of one agent or many, all simulators in one pool."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from sebulba_networks.pools import PoolAdapter
from sebulba_networks.process_pool import ProcessPool

import sebulba_ns3
from sebulba.envs.packages import VectorKind, VectorParts
from sebulba.envs.seeds import check_seeds
from sebulba.envs.spaces import canonical_action_space, make_action_check
from sebulba.envs.tree import Act, AgentNode, Obs, Population, compile_tree
from sebulba.errors import UsageError
from sebulba.support.files import parse_json
from sebulba.types import EnvOutput, EnvSpec, MultiAgentSpec, PyTree
from sebulba_ns3.scenario import MODEL_VERSION, Program, read_program

NAME = "ns3:program"
EXAMPLE = "packages/sebulba-ns3/examples/remote_cart.cc"
SILENT = "silent"
"""Number that a program tells where nobody was to decide for too long."""


class ProgramAdapter(PoolAdapter):
    """A vector of simulators, with next-step autoreset. Each runs in a worker of its own.

    Groups are agents with equal spaces.
    """

    on_end: Callable[[dict[str, float]], object] | None = None
    """Called with what a program tells at the end of each episode."""

    def __init__(
        self, library: Any, program: Program, seeds: Sequence[int], step_timeout_s: float
    ) -> None:
        """Begin a worker process for each seed."""
        spec = program_spec(program)
        self._program = program
        self._places = _places(spec, program)
        self._checks = {
            group: make_action_check(
                canonical_action_space(program.agents[places[0]].action_space),
                len(seeds) * len(places),
            )
            for group, places in self._places.items()
        }
        self._is_one = isinstance(spec, EnvSpec)
        self._ended: list[dict[str, float]] = []
        self._is_warned = False
        checked = check_seeds(seeds, len(seeds))
        pool = ProcessPool(library, program.options, checked, step_timeout_s)
        super().__init__(pool, spec, program.options)

    def reset(self) -> EnvOutput:
        """Begin new episodes in all simulators."""
        return self._output(self._pool.reset())

    def step(self, action: PyTree) -> EnvOutput:
        """Act, and let all simulators run until somebody is to decide in each.

        Raises:
          ActionError: An action is invalid; no simulator has received it.
          EnvError: A simulator failed.
        """
        by_group = {"": action} if self._is_one else action
        given = self._blank()
        for group, places in self._places.items():
            own = np.asarray(by_group[group])
            self._checks[group](own.reshape(-1, *own.shape[1 if self._is_one else 2 :]))
            numbers = own.reshape(self.num_envs, len(places), -1)
            given[:, places, : numbers.shape[2]] = numbers
        return self._output(self._pool.step(given))

    def report(self, row: int = 0) -> Any:
        """Return what happened in the episode of a simulator so far."""
        assert isinstance(self._pool, ProcessPool)
        return parse_json(self._pool.report(row))

    @staticmethod
    def metrics_of(adapters: Sequence[Any]) -> dict[str, float]:
        """Return ``info/NAME``: means over the episodes that ended since the last time."""
        ended = []
        for one in adapters:
            since, one._ended = one._ended, []
            ended += since
        names = ended[0] if ended else ()
        return {f"info/{n}": math.fsum(told[n] for told in ended) / len(ended) for n in names}

    def fused(self) -> str:
        return "ns-3 runs in processes of its own"

    def _blank(self) -> np.ndarray:
        """Return the numbers that simulators get before actions are in them."""
        options = self._program.options
        return np.zeros((self.num_envs, options.num_agents, options.num_actions), np.float32)

    def _output(self, rows: Any) -> EnvOutput:
        num_agents = self._program.options.num_agents
        obs = rows.obs.reshape(self.num_envs, num_agents, -1)
        for told in self._told(obs[rows.episode_end, 0]):
            self._warn_of_silence(told)
            self._ended.append(told)
            if self.on_end is not None:
                self.on_end(told)

        by_group = self.by_group

        def seen(places: list[int]) -> np.ndarray:
            space = self._program.agents[places[0]].observation_space
            return obs[:, places, : space.shape[0]]

        reward = by_group(rows.reward)
        every = {group: seen(places) for group, places in self._places.items()}
        return EnvOutput(
            obs=every[""][:, 0] if self._is_one else every,
            reward=reward,
            terminated=by_group(rows.terminated),
            truncated=by_group(rows.truncated),
            is_first=by_group(rows.is_first),
            unclipped_reward=reward,
            episode_end=rows.episode_end,
            acting=() if self._is_one else by_group(rows.acting),
        )

    def by_group(self, x: np.ndarray) -> PyTree:
        """Return ``[B]``, or ``{group: [B, A]}`` of many agents, of a value for each agent."""
        x = x.reshape(self.num_envs, -1)
        if self._is_one:
            return x[:, 0]
        return {group: x[:, places] for group, places in self._places.items()}

    def _told(self, rows: np.ndarray) -> Iterator[dict[str, float]]:
        info = self._program.info
        for row in rows:
            yield dict(zip(info, row[len(row) - len(info) :].tolist(), strict=True))

    def _warn_of_silence(self, told: dict[str, float]) -> None:
        if not self._is_warned and told.get(SILENT):
            self._is_warned = True
            warnings.warn(
                f"{NAME}: an episode was truncated, because no agent was asked for an action for "
                "silent_limit of simulated time: its messages are lost, or nobody sends any; look "
                "at the connections, or set a larger silent_limit in build()",
                stacklevel=4,
            )


def program_spec(program: Program) -> EnvSpec | MultiAgentSpec:
    """Return the spec of one simulator."""
    nodes = {
        agent.name: AgentNode(Obs(agent.observation_space), Act(agent.action_space))
        for agent in program.agents
    }
    if len(nodes) == 1:
        return compile_tree(*nodes.values(), name=NAME)
    return compile_tree(Population(nodes), name=NAME, waits=True)


def _places(spec: EnvSpec | MultiAgentSpec, program: Program) -> dict[str, list[int]]:
    """Return the numbers of the agents of each group, in the order of its slots."""
    if isinstance(spec, EnvSpec):
        return {"": [0]}
    names = [agent.name for agent in program.agents]
    return {group: [names.index(slot) for slot in one.slots] for group, one in spec.groups.items()}


def _parts(
    options: Mapping[str, Any], num_threads: int | None, step_timeout_s: float
) -> VectorParts:
    del num_threads  # each simulator has a process
    parameters = dict(options)
    if "source" not in parameters:
        raise UsageError(f"{NAME} needs the option source; give a program such as {EXAMPLE}")
    source, limit = parameters.pop("source"), parameters.pop("max_episode_steps", None)
    library = sebulba_ns3.scenario_library(source)
    program = read_program(source, library, limit, parameters)
    kind: type[ProgramAdapter] = ProgramAdapter
    if MODEL_VERSION in program.info:
        from sebulba_ns3.models import ModelsAdapter  # with JAX, which compiling does without

        kind = ModelsAdapter
    return VectorParts(
        lambda num_envs, seeds: kind(library, program, seeds, step_timeout_s),
        lambda: program_spec(program),
    )


ENVIRONMENTS = {"program": VectorKind(_parts)}
"""What the entry point ``ns3`` of ``sebulba.environments`` names."""
