"""What runs the cycles of Inferencers elsewhere, and is asked by their threads in the loop.

``inferencer_process.py`` puts it at the end of sockets, ``ray_actors.py`` into an actor of Ray.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import cloudpickle
import jax

from sebulba.envs.policy_view import as_policy_sees
from sebulba.errors import EnvError, UsageError, is_env_failure
from sebulba.inference.cycle import Cycle, CyclePrograms
from sebulba.inference.inferencer import INFERENCER_PHASES, without_exit
from sebulba.inference.places import Given, Places
from sebulba.metrics.timer import PhaseTimer
from sebulba.types import EnvAdapter, RunSpec

TAKE_S = 300.0
"""Longest time that networks are on their way after a cycle with them was asked for."""


class Failure(NamedTuple):
    """What was raised instead of an answer."""

    error: bytes
    """The pickled error."""
    stack: str
    """Where it was raised, for people."""


class Spent(NamedTuple):
    """What a cycle took where it ran."""

    seconds: float
    """From the request to the answer, without the way here and there."""
    cpu_s: float
    """CPU seconds of its process, of all threads, since it was started."""


class Shared:
    """What the servers of one process share: the agent, the programs and one copy of the networks.

    A version of the networks stays as long as a server may still ask for it.
    """

    def __init__(self, given: bytes) -> None:
        """Prepare; ``given`` is the pickled ``Given``."""
        self._pickled = given
        self._lock = threading.Lock()
        self.making = threading.Lock()
        """Environments are made one after the other, as in the process that trains."""
        self._given: Given | None = None
        self._programs: tuple[RunSpec, CyclePrograms, Any] | None = None
        self._came = threading.Condition()
        self._versions: dict[int, list] = {}
        self.received = 0
        """Versions that have come."""

    def given(self) -> Given:
        """Return what the servers work with; the first call imports what it consists of."""
        with self._lock:
            if self._given is None:
                self._given = cloudpickle.loads(self._pickled)
            return self._given

    def programs(self, run: RunSpec) -> tuple[CyclePrograms, Any]:
        """Return the programs for these sizes, and the structure of the acting networks."""
        given = self.given()
        with self._lock:
            if self._programs is None or self._programs[0] != run:
                key = jax.random.key(0)
                state = jax.eval_shape(lambda key: given.agent.new_state(key, run), key)
                acting = jax.eval_shape(given.agent.staged, state.networks, state.experience)
                step_state = jax.jit(lambda key: given.agent.new_step_state(key, run, 0))(key)
                programs = CyclePrograms(given.agent, acting, step_state, run)
                self._programs = run, programs, jax.tree.structure(acting)
            return self._programs[1:]

    def put(self, version: int, get: Callable[[], list], keep: Collection[int]) -> None:
        """Keep a version, unless it is here; it is on the device once.

        Args:
          keep: Numbers that may still be asked for; all other older ones go. (Newer ones may
            have come before this one, since the calls of an actor have no order.)
        """
        with self._came:
            if version not in self._versions:
                leaves = jax.device_put(get(), jax.local_devices(backend="cpu")[0])
                kept = {n: old for n, old in self._versions.items() if n in keep or n > version}
                self._versions = kept | {version: leaves}
                self.received += 1
                self._came.notify_all()

    def take(self, version: int) -> list:
        """Return the leaves of a version, which is on its way or here.

        Raises:
          EnvError: It did not arrive within ``TAKE_S`` seconds.
        """
        with self._came:
            if not self._came.wait_for(lambda: version in self._versions, TAKE_S):
                raise EnvError(
                    f"networks of version {version} did not arrive within {TAKE_S:.0f} s; versions "
                    f"{sorted(self._versions)} arrived. Check the network between the machines"
                )
            return self._versions[version]


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
    """Answers requests for one Inferencer; each method is one."""

    def __init__(
        self, given: bytes, config: Mapping[str, Any], shared: Shared | None = None
    ) -> None:
        """Prepare JAX."""
        for name, value in config.items():
            jax.config.update(name, value)
        self.shared = shared or Shared(given)
        self._stop: Any = StopOfRun()
        self._timer = PhaseTimer(*INFERENCER_PHASES)
        self._networks: Any = None
        self._env: EnvAdapter
        self._cycle: Cycle | None = None
        self._programs: CyclePrograms

    def another(self) -> Server:
        """Return one more, which shares agent, programs and networks with this one."""
        return Server(b"", {}, self.shared)

    def make(self, num_envs: int, seeds: list[int]) -> tuple[Any, bool]:
        """Make the environments; return their spec, and whether they draw."""
        given = self.shared.given()
        self._device = jax.local_devices(backend="cpu")[0]
        self._cycle = None  # that of an Inferencer that was here before
        with self.shared.making:
            env = Places(given).make(num_envs, seeds)
        if hasattr(env, "make_cycle"):
            env.close()
            raise UsageError(
                "clients drive this environment, whose Inferencer must be in the trainer; use "
                "--cluster.address threads"
            )
        if not getattr(given.agent.spec, "eval_only", ()):
            env = as_policy_sees(env)
        self._env = env
        return env.spec, bool(getattr(env, "draws", False))

    def use(self, run: RunSpec) -> tuple[str, str]:
        """Prepare cycles of these sizes; return their kind, and the reason for it."""
        given = self.shared.given()
        self._programs, self._networks_structure = self.shared.programs(run)
        why = ""
        if self._cycle is None:
            made = Places(given).make_cycle(self._env, self._programs, self._device, self._timer)
            self._cycle, why = made
        else:
            self._cycle.use(self._programs)
        return self._cycle.kind, why

    def reset(self) -> None:
        """Begin new episodes."""
        self._ready.reset()

    def run(
        self, number: int, version: int | None, step_state: Any
    ) -> tuple[list | None, Any, Spent]:
        """Run a cycle.

        Args:
          version: Of the networks, see ``Shared``; None takes those of the cycle before.
          step_state: As ``KeyData.unwrap`` returns it, on the host.

        Returns:
          Leaves of environment steps, actions and extras, and the statistics of episodes; None if
          it was stopped. The next step state, as the one before. And what it took.
        """
        began = time.perf_counter()
        self._stop.running = number
        keys = self._programs.keys
        if version is not None:
            leaves = self.shared.take(version)
            self._networks = jax.tree.unflatten(self._networks_structure, leaves)
        begin = keys.wrap(self._programs.copy(jax.device_put(step_state, self._device)))
        item, after = self._ready.run(self._networks, begin, self._stop)
        after = jax.device_get(keys.unwrap(after))
        made = None
        if item is not None:
            rows = jax.tree.leaves(tuple(item.trajectory[:3]))
            made = [jax.device_get(rows), item.step_infos]
        return made, after, Spent(time.perf_counter() - began, time.process_time())

    def stop(self, number: int) -> None:
        """Stop this cycle, which another thread runs; all others have their turn in one thread."""
        self._stop.stopped = number

    def position(self) -> bytes | str:
        return self._ready.position()

    def put_back(self, position: bytes) -> None:
        self._ready.put_back(position)

    def last_transition(self) -> dict:
        """Return the last observation and action, if the cycle keeps them."""
        return getattr(self._ready, "last_transition", dict)()

    def received(self) -> int:
        """Return how many versions of the networks have come to this process."""
        return self.shared.received

    def close(self) -> None:
        """Free the environments; others may be made after it."""
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
