# SPDX-License-Identifier: GPL-2.0-or-later
"""An ns-3 program of one's own as a Gymnasium environment; ``sebulba_scenario.h`` is its header."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete, Space
from sebulba_networks.process_pool import STEP_TIMEOUT_S, ProcessPool, ask_once
from sebulba_networks.worker import SPEC

import sebulba_ns3
from sebulba.envs.seeds import check_seed
from sebulba.errors import ActionError, EnvError, UsageError, shown
from sebulba.support.checks import require_size
from sebulba.support.files import parse_json

MODEL_VERSION = "model_version"
"""Last number that a program tells, where its agents have models that travel (``ModelServer``)."""
NUM_PUBLISHED = 2
"""Numbers that an action then has besides: version and bytes of the newest model."""


class ProgramOptions(NamedTuple):
    """What a worker process is told; the fields are those of ``CongestionControlOptions``."""

    json: str
    num_features: int
    num_actions: int
    num_agents: int = 1
    engine: str = "ns3"

    def as_json(self) -> str:
        return self.json


class Ns3Scenario(gymnasium.Env):
    """What a program in C++ simulates, in a worker process.

    A program that ns-3 ends (NS_FATAL, an assertion) is begun anew once, and repeats its episode;
    if it ends there again, that is an error of the environment.
    """

    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(
        self,
        source: str | os.PathLike[str],
        max_episode_steps: int | None = None,
        step_timeout_s: float = STEP_TIMEOUT_S,
        **parameters: float | str,
    ) -> None:
        """Compile the program, unless that was done before, and begin an episode to try it.

        Args:
          source: A file of C++ that derives from ``sebulba::Scenario``.
          max_episode_steps: Steps after which an episode is truncated; None leaves that to the
            program.
          step_timeout_s: Longest time that a step may take.
          **parameters: What ``parameter`` returns in the program.

        Raises:
          UsageError: It does not compile, an episode of it cannot begin, a value breaks a rule, or
            it has no such parameter.
        """
        self._library = sebulba_ns3.scenario_library(source)
        program = read_program(source, self._library, max_episode_steps, parameters)
        if len(program.agents) > 1:
            raise UsageError(
                f"{Path(source).name} has {len(program.agents)} agents; use ns3:program, which "
                "takes programs of any number"
            )
        (agent,) = program.agents
        self.observation_space, self.action_space = agent.observation_space, agent.action_space
        self._info, self._options = program.info, program.options
        self._timeout_s = step_timeout_s
        self._pool: ProcessPool | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin the next episode; ``seed`` decides it and all that follow."""
        super().reset(seed=seed)
        if seed is not None or self._pool is None:
            drawn = self.np_random.integers(2**31) if seed is None else check_seed(seed)
            self.close()
            self._pool = self._make_pool(int(drawn))
        return self._shown(self._pool.reset().obs[0])

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Let the agent act, and the simulator run until it is to decide again.

        Raises:
          ActionError: The action is not in the action space.
        """
        assert self._pool is not None, "call reset first"
        given = np.asarray(action, self.action_space.dtype)
        if given not in self.action_space:
            raise ActionError(f"action={shown(action)} is not in {self.action_space}")
        numbers = np.zeros(self._options.num_actions, np.float32)
        numbers[: given.size] = given.reshape(-1)
        rows = self._pool.step(numbers)
        obs, info = self._shown(rows.obs[0])
        ends = bool(rows.terminated[0]), bool(rows.truncated[0])
        return obs, float(rows.reward[0]), *ends, info

    def get_state(self) -> bytes | None:
        """Return seed, episode and actions, from which ``set_state`` goes on."""
        return None if self._pool is None else self._pool.state()

    def set_state(self, state: bytes | None) -> None:
        """Go on from ``state``: the program repeats its episode."""
        if state is not None:
            self._pool = self._pool or self._make_pool(0)
            self._pool.put_back(state)

    def close(self) -> None:
        """End the worker process."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _make_pool(self, seed: int) -> ProcessPool:
        return ProcessPool(self._library, self._options, [seed], self._timeout_s)

    def _shown(self, row: np.ndarray) -> tuple[np.ndarray, dict[str, Any]]:
        """Return observation and info of a row that has both."""
        count = len(row) - len(self._info)
        return row[:count], dict(zip(self._info, row[count:].tolist(), strict=True))


def _checked(parameters: dict[str, float | str]) -> dict[str, float | str]:
    for name, value in parameters.items():
        is_text = isinstance(value, str) and re.fullmatch(r'[^"\\\x00-\x1f]+', value)
        if not is_text and not isinstance(value, int | float):
            rule = "must be a number, or text without quotes and backslashes"
            raise UsageError(f"{name}={shown(value)} {rule}")
    return {
        name: value if isinstance(value, str) else float(value)
        for name, value in parameters.items()
    }


class Agent(NamedTuple):
    """An agent of a program."""

    name: str
    """As the program calls it."""
    observation_space: Box
    """What it sees, its own actions and ages included."""
    action_space: Space
    """Numbers, or choices."""


class Program(NamedTuple):
    """What a program says of itself."""

    agents: list[Agent]
    """In the order of rows."""
    info: list[str]
    """Names of the numbers that it tells in addition."""
    options: ProgramOptions
    """For a pool."""


def read_program(
    source: str | os.PathLike[str],
    library: Path,
    max_episode_steps: int | None,
    parameters: dict[str, float | str],
) -> Program:
    """Begin an episode of a program, and return what its agents see and do.

    Raises:
      UsageError: No episode can begin, a value breaks a rule, or it has no such parameter.
    """
    if max_episode_steps is not None:
        require_size("max_episode_steps", max_episode_steps, 1, "use None for no limit")
    config = {"parameters": _checked(parameters), "max_episode_steps": max_episode_steps or 0}
    text = json.dumps(config, sort_keys=True)
    try:
        spec = parse_json(ask_once(library, (SPEC, text.encode() + b"\0")))
    except (EnvError, ValueError) as error:
        raise UsageError(f"{Path(source).name}: {error}") from None
    agents = [
        Agent(
            one["name"],
            _box(one["observation"]),
            _box(one["action"]) if one["action"] else Discrete(one["num_choices"]),
        )
        for one in spec["agents"]
    ]
    most = max(agent.observation_space.shape[0] for agent in agents)
    num_actions = max(len(one["action"]) or 1 for one in spec["agents"])
    if MODEL_VERSION in spec["info"]:
        num_actions += NUM_PUBLISHED
    options = ProgramOptions(text, most + len(spec["info"]), num_actions, len(agents))
    return Program(agents, spec["info"], options)


def _box(ranges: list[list[float]]) -> Box:
    low, high = np.array(ranges, np.float32).T
    return Box(low, high)
