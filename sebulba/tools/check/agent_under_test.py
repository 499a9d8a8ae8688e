"""The agent that is checked, and how it is made and fed."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium
import jax
import numpy as np

from sebulba.agent import Agent
from sebulba.agents.configs.agent_config import config_of, make_agent
from sebulba.envs.factory import env_spec, make_env_factory
from sebulba.envs.seeds import check_seed
from sebulba.errors import UsageError, shown
from sebulba.loops.agent_contract import Contract, check_is_agent
from sebulba.support.checks import check_count
from sebulba.support.trees import named_leaves
from sebulba.support.user_code import load_attribute
from sebulba.tools.check.agent_driver import (
    NUM_INFERENCERS,
    Driver,
    Made,
    Streams,
    named_specs,
    run_spec,
)
from sebulba.tools.check.probe_envs import Questions, questions_for
from sebulba.types import EnvSpec, PyTree, RunSpec

DEVICES = 4
"""CPU devices that share an update where devices are compared."""
UNROLLS = (6, 5, 8, 10, 16, 20, 32, 40, 64, 80, 128)
"""Lengths of which the first is taken that the agent's ``check_run`` takes."""
MOST_WARM_UP = 400
"""Trajectories after which an agent without an update is not fed further."""
NUM_FED = 6
"""Trajectories that an agent is given from the first update on."""

NUM_TRAINED = 16
"""Environments of an Inferencer where it is trained."""

MakeAgent = Callable[[EnvSpec], Agent]


def trained_run(num_steps: int) -> RunSpec:
    """Return the sizes of a run in which the agent is trained in a loop."""
    return RunSpec(NUM_TRAINED, NUM_INFERENCERS, num_steps, num_update_devices=1)


class Fed(NamedTuple):
    """An agent that was fed on one device."""

    driver: Driver
    """What fed it."""
    made: list[Made]
    """What it was given."""
    before: dict[str, np.ndarray]
    """Its networks before, by name."""
    after: dict[str, np.ndarray]
    """And after."""
    metrics: dict[str, float]
    """Those of the last update."""


class AgentSubject:
    """An agent, the ways to make it, and what it was given."""

    def __init__(
        self,
        agent: Any,
        *,
        config: Any = None,
        env: Any = None,
        steps_per_cycle: int | None = None,
        seed: int = 0,
        timeout_s: float = 120.0,
    ) -> None:
        """Find out how the agent is made.

        The arguments are those of ``check_agent``.

        Raises:
          UsageError: It names nothing, or an argument breaks a rule.
        """
        if steps_per_cycle is not None:
            check_count("steps_per_cycle", steps_per_cycle)
        self.make = how_to_make(agent, config)
        self.factory = None if env is None else make_env_factory(env)
        self.seed = check_seed(seed)
        self.timeout_s = timeout_s
        self._given = agent
        self._unrolls = UNROLLS if steps_per_cycle is None else (steps_per_cycle,)

    @functools.cached_property
    def agent(self) -> Agent:
        """The agent, for the spaces that it is checked with.

        These are those of the environment, or of an agent that was made already, or those of the
        first probe that the agent takes.
        """
        if self.factory is not None:
            return self.make(env_spec(self.factory))
        if isinstance(self._given, Agent):
            return self._given
        errors = []
        for actions in ("discrete", "continuous"):
            try:
                return self.make(env_spec(questions_for(actions)))
            except Exception as error:
                errors.append(error)
        raise errors[0]

    def probed(self, discount: float | None) -> tuple[Agent, Questions]:
        """Return the agent for the probe environment of its kind of actions, and this."""
        is_box = isinstance(self.agent.spec.action_space, gymnasium.spaces.Box)
        asked = questions_for("continuous" if is_box else "discrete", discount, self.remembers)
        return self.make(env_spec(asked)), asked

    @property
    def remembers(self) -> bool:
        """The step state has vectors for each environment, as a recurrent one."""
        state = self.contract.step_state
        specs = named_specs(Agent.step_state_spec(self.agent), state)
        return any(
            any(spec) and leaf.ndim > 1 and leaf.dtype.kind == "f"
            for (_, spec), leaf in zip(specs, jax.tree.leaves(state), strict=True)
        )

    @functools.cached_property
    def num_steps(self) -> int:
        """T, which the agent's ``check_run`` takes wherever it is fed and trained."""
        errors = []
        for num_steps in self._unrolls:
            try:
                fed = (run_spec(devices, num_steps=num_steps) for devices in (1, DEVICES))
                for run in (*fed, trained_run(num_steps)):
                    self.agent.check_run(run)
                return num_steps
            except UsageError as error:
                errors.append(error)
        raise errors[0]

    @functools.cached_property
    def contract(self) -> Contract:
        """What its methods return, on several devices."""
        check_is_agent(self.agent)
        return Contract(self.agent, run_spec(DEVICES, num_steps=self.num_steps))

    @functools.cached_property
    def warm_up(self) -> int | None:
        """Trajectories before the first update; None if there are too many to wait for."""
        due = (n for n in range(1, MOST_WARM_UP) if self.contract.check_due(n))
        first = next(due, None)
        return None if first is None else first - 1

    # Feeding it.

    def driver(self, agent: Agent, devices: int, state: Any = None) -> Driver:
        """Return what feeds ``agent``."""

        def streams(agent: Agent, state: Any) -> Streams:
            return Streams(agent, state, self.seed % 2**32, self.num_steps)

        return Driver(agent, devices, NUM_INFERENCERS, streams, state, self.num_steps)

    @functools.cached_property
    def fed(self) -> Fed:
        """The agent after some updates on one device, which show the gradients."""
        assert self.warm_up is not None, "the caller asks whether it is ever updated"
        driver = self.driver(descends_plainly(self.agent), 1)
        num = self.warm_up + NUM_FED
        return feed(driver, [driver.made(i % NUM_INFERENCERS) for i in range(num)])


def feed(driver: Driver, made: list[Made]) -> Fed:
    """Give trajectories to an agent from its first state on."""
    driver.begin_anew()
    before = on_host(driver.state.networks)
    metrics: dict[str, float] = {}
    for one in made:
        metrics = driver.consume(one) or metrics
    return Fed(driver, made, before, on_host(driver.state.networks), metrics)


def on_host(tree: PyTree) -> dict[str, np.ndarray]:
    """Return copies of the leaves by name."""
    return {name: np.array(leaf) for name, leaf in zip(*named_leaves(tree), strict=True)}


PLAIN_RATE = 1e-3


def descends_plainly(agent: Agent) -> Agent:
    """Return a copy of an agent that takes steps against the gradient and keeps its ``opt``."""

    def optimize(self: Any, networks: PyTree, opt: PyTree, grads: PyTree) -> tuple[PyTree, PyTree]:
        return jax.tree.map(lambda x, g: x - PLAIN_RATE * g, networks, grads), opt

    plain = copy.copy(agent)
    plain.__class__ = type(type(agent).__name__, (type(agent),), {"optimize": optimize})
    return plain


# How it is made.


def how_to_make(agent: Any, config: Any = None) -> MakeAgent:
    """Return the function from spaces to the agent; the arguments are those of ``check_agent``.

    Raises:
      UsageError: It is none of these.
    """
    found = load_attribute("agent", agent) if isinstance(agent, str) else agent
    if isinstance(found, Agent):
        config = found.config if config is None else _config(config)
        return lambda spec: type(found)(spec, config)
    if isinstance(found, type) and issubclass(found, Agent):
        chosen = config_of(found) if config is None else _config(config)
        if chosen is None:
            raise UsageError(
                f"{found.__name__} names no configuration; give one with config=..., or --config "
                "module:attribute, or make it a subclass of sebulba.Agent[MyConfig]"
            )
        return lambda spec: found(spec, chosen)
    if getattr(found, "agent_class", ""):
        named = found() if isinstance(found, type) else found
        return lambda spec: make_agent(spec, named)
    if callable(found) and not isinstance(found, type):
        return functools.partial(_made_by, found)
    raise UsageError(
        f"agent={shown(agent)} is not an agent; use a subclass of sebulba.Agent, a configuration "
        "with "
        "agent_class, or a function of an EnvSpec that returns an agent"
    )


def _made_by(function: Any, spec: EnvSpec) -> Agent:
    agent = function(spec)
    if not isinstance(agent, Agent):
        raise UsageError(f"{shown(function)} returns {shown(agent)}; expected a sebulba.Agent")
    return agent


def _config(config: Any) -> Any:
    found = load_attribute("config", config) if isinstance(config, str) else config
    return found() if callable(found) else found
