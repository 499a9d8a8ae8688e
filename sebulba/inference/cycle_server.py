"""What runs the cycles of one Inferencer elsewhere, and is asked by its thread in the loop.

``inferencer_process.py`` puts it at the end of a socket, ``ray_actors.py`` into an actor of Ray.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any, NamedTuple

import cloudpickle
import jax

from sebulba.agent import Agent
from sebulba.envs.policy_view import as_policy_sees
from sebulba.errors import EnvError, is_env_failure
from sebulba.inference.choose_cycle import MakeCycle, make_cycle
from sebulba.inference.cycle import Cycle, CyclePrograms
from sebulba.inference.inferencer import INFERENCER_PHASES, without_exit
from sebulba.metrics.timer import PhaseTimer
from sebulba.options import CycleKind, Schedule
from sebulba.types import EnvAdapter, EnvFactory, RunSpec


class Given(NamedTuple):
    """What a server works with."""

    factory: EnvFactory
    """Makes the environments."""
    agent: Agent
    """Acts."""
    kind: CycleKind | MakeCycle
    """How a cycle runs."""
    schedule: Schedule
    """async or lockstep."""


class Failure(NamedTuple):
    """What was raised instead of an answer."""

    error: bytes
    """The pickled error."""
    stack: str
    """Where it was raised, for people."""


class StopOfRun:
    """Whether the cycle that runs was told to stop; what ``Cycle.run`` reads of an event."""

    def __init__(self) -> None:
        self.running = 0
        """Number of the cycle that runs, or ran last."""
        self.stopped = 0
        """Number of the cycle that was told to stop last."""

    def is_set(self) -> bool:
        """Tell whether it was."""
        return self.stopped >= self.running


class Server:
    """Answers requests; each method is one."""

    def __init__(self, given: bytes, config: Mapping[str, Any]) -> None:
        """Prepare JAX; ``given`` is the pickled ``Given``, ``config`` settings of JAX."""
        for name, value in config.items():
            jax.config.update(name, value)
        self._pickled = given
        self._stop: Any = StopOfRun()
        self._timer = PhaseTimer(*INFERENCER_PHASES)
        self._networks: Any = None
        self._env: EnvAdapter
        self._cycle: Cycle | None = None
        self._programs: CyclePrograms

    def make(self, num_envs: int, seeds: list[int]) -> tuple[Any, bool]:
        """Make the environments; return their spec, and whether they draw."""
        self._given: Given = cloudpickle.loads(self._pickled)  # imports what it consists of
        self._device = jax.local_devices(backend="cpu")[0]
        env = self._given.factory(num_envs, seeds)
        if not getattr(self._given.agent.spec, "eval_only", ()):
            env = as_policy_sees(env)
        self._env = env
        return env.spec, bool(getattr(env, "draws", False))

    def use(self, run: RunSpec) -> tuple[str, str]:
        """Prepare cycles of these sizes; return their kind, and the reason for it."""
        given, key = self._given, jax.random.key(0)
        state = jax.eval_shape(lambda key: given.agent.new_state(key, run), key)
        acting = jax.eval_shape(given.agent.acting_networks, state.networks, state.experience)
        step_state = jax.jit(lambda key: given.agent.new_step_state(key, run, 0))(key)
        self._programs = CyclePrograms(given.agent, acting, step_state, run)
        self._networks_structure = jax.tree.structure(acting)
        why = ""
        if self._cycle is None:
            make = given.kind, self._env, self._programs, self._device, self._timer
            self._cycle, why = make_cycle(*make, schedule=given.schedule)
        else:
            self._cycle.use(self._programs)
        return self._cycle.kind, why

    def reset(self) -> None:
        """Begin new episodes."""
        self._ready.reset()

    def run(self, number: int, networks: list | None, step_state: Any) -> tuple[list | None, Any]:
        """Run a cycle.

        Args:
          number: Of the cycle, from 1.
          networks: Leaves of the acting networks; None leaves those of the cycle before.
          step_state: As ``KeyData.unwrap`` returns it, on the host.

        Returns:
          Leaves of environment steps, actions and extras, and the statistics of episodes; None if
          it was stopped. And the next step state, as the one before.
        """
        self._stop.running = number
        keys = self._programs.keys
        if networks is not None:
            leaves = jax.device_put(networks, self._device)
            self._networks = jax.tree.unflatten(self._networks_structure, leaves)
        begin = keys.wrap(self._programs.copy(jax.device_put(step_state, self._device)))
        output, after = self._ready.run(self._networks, begin, self._stop)
        after = jax.device_get(keys.unwrap(after))
        if output is None:
            return None, after
        rows = jax.tree.leaves((output.env_step, output.action, output.extras))
        return [jax.device_get(rows), output.step_infos], after

    def stop(self, number: int) -> None:
        """Stop this cycle, which another thread runs; all others have their turn in one thread."""
        self._stop.stopped = number

    def position(self) -> bytes | str:
        """Return where the environment stands; see ``Cycle.position``."""
        return self._ready.position()

    def put_back(self, position: bytes) -> None:
        """Go on from a position; see ``Cycle.put_back``."""
        self._ready.put_back(position)

    def last_transition(self) -> dict:
        """Return the last observation and action, if the cycle keeps them."""
        return getattr(self._ready, "last_transition", dict)()

    def close(self) -> None:
        """Free the environments."""
        if hasattr(self, "_env"):
            self._env.close()

    def answer(self, name: str, arguments: tuple) -> Any:
        """Return the answer to a request by the name of a method, or the ``Failure`` of it."""
        try:
            return getattr(self, name)(*arguments)
        except BaseException as raised:
            return failure_of(raised)

    @property
    def _ready(self) -> Cycle:
        assert self._cycle is not None, "use comes first"
        return self._cycle


def failure_of(raised: BaseException) -> Failure:
    """Return what was raised as an answer."""
    error = without_exit(raised)
    stack = "".join(traceback.format_exception(error))
    if is_env_failure(error) and not isinstance(error, EnvError):
        own = EnvError(f"an environment raised {type(error).__name__}: {error}")
        return Failure(cloudpickle.dumps(own), stack)
    try:
        pickled = cloudpickle.dumps(error)
        cloudpickle.loads(pickled)
    except Exception:  # an error whose arguments cannot travel
        pickled = cloudpickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return Failure(pickled, stack)
