"""All parts of a replay together, as the learner sees them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sebulba.agent import LEARNER_AXIS, is_spec
from sebulba.agents.bases.off_policy import OffPolicyAgent
from sebulba.agents.replay.frame_stack import StackState
from sebulba.agents.replay.remote_sample import Drawn
from sebulba.agents.replay.store import Draw, Replay
from sebulba.cluster.inferencers.nodes import Worker
from sebulba.cluster.replay.trajectory_manager import Part, TrajectoryManager
from sebulba.errors import EnvError, ReplayError, UsageError
from sebulba.support.checks import check_divisible
from sebulba.types import PyTree, RunSpec, Trajectory


class ManagerHere:
    """A manager in this process. One thread may ask it, a request after the other is answered."""

    def __init__(self, agent: OffPolicyAgent) -> None:
        """Prepare one; ``make`` makes it."""
        self._agent = agent
        self._manager: TrajectoryManager
        self._answer: Any = None

    def begin(self, name: str, *arguments: Any) -> None:
        """Do what is asked."""
        if name == "make":
            self._manager = TrajectoryManager(self._agent, *arguments)
        else:
            self._answer = getattr(self._manager, name)(*arguments)

    def answer(self) -> Any:
        """Return the answer."""
        answer, self._answer = self._answer, None
        return answer

    def close(self) -> None:
        """Nothing to end."""


class ManagerElsewhere:
    """A manager in another process, or in an actor: ``ManagerServer`` behind a ``Worker``.

    It is asked as one here, but ``begin`` does not wait.
    """

    def __init__(self, worker: Worker) -> None:
        """Ask ``worker`` from now on."""
        self._worker = worker
        self._is_asked = False

    def begin(self, name: str, *arguments: Any) -> None:
        """Send it; an error of the request before is raised here."""
        if self._is_asked:
            self.answer()
        self._in_words(self._worker.begin, name, *arguments)
        self._is_asked = True

    def answer(self) -> Any:
        """Wait for the answer."""
        self._is_asked = False
        return self._in_words(self._worker.answer)

    def _in_words(self, call: Callable, *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except EnvError as error:
            raise ReplayError(
                f"a trajectory manager ended, and its part of the replay is lost: {error}; "
                "`sebulba resume` continues from the newest checkpoint"
            ) from error

    def close(self) -> None:
        """End it."""
        self._worker.close()


Manager = ManagerHere | ManagerElsewhere


class ShardedReplay:
    """A replay in M managers, each of which has that of as many neighbouring Inferencers.

    Every batch has equal shares from all parts. What it holds is laid out as a replay on the update
    devices, so a checkpoint does not say where the replay was. Statistics of observations are of
    all parts together and are counted here.
    """

    def __init__(self, agent: OffPolicyAgent, managers: Sequence[Manager]) -> None:
        """Take the managers; ``make`` comes next.

        Args:
          agent: The agent whose replay it is (not ``with_managers``).
        """
        self.agent = agent
        self._managers = managers
        self._run: RunSpec | None = None
        self._gathered_spec = agent.replay.gathered_spec()
        self._statistics: PyTree = ()
        # The axis over devices has one: a trajectory is counted whole.
        counted = agent.replay.counted
        self._counted = jax.jit(
            jax.vmap(counted, in_axes=None, axis_size=1, axis_name=LEARNER_AXIS)
        )

    def make(self, run: RunSpec) -> None:
        """Make it for a run of these sizes, empty."""
        number = len(self._managers)
        self._run = run
        self._statistics = jax.device_get(self.agent.replay.new_statistics())
        self._ask(lambda part: ("make", run, Part(part, number)))

    def clear(self) -> None:
        """Forget everything."""
        self._statistics = jax.device_get(self.agent.replay.new_statistics())
        self._ask(lambda part: ("clear",))

    def _ask(self, request: Callable[[int], tuple]) -> list[Any]:
        """Ask all managers at once; return their answers."""
        for part, manager in enumerate(self._managers):
            manager.begin(*request(part))
        return [manager.answer() for manager in self._managers]

    @property
    def _sizes(self) -> RunSpec:
        assert self._run is not None, "make comes first"
        return self._run

    # In the update.

    def begin(self, key_data: np.ndarray, impl: str) -> None:
        """Take the key of the updates, from which those of draws are folded."""
        self._ask(lambda part: ("begin", key_data, impl))

    def insert(self, trajectory: Trajectory, initial_step_state: PyTree) -> None:
        """Hand a trajectory over, with the step state before its row 0; do not wait."""
        of_each = self._sizes.num_inferencers // len(self._managers)
        core = jax.device_get(self.agent.recurrent_state(initial_step_state))
        manager = self._managers[int(trajectory.inferencer) // of_each]
        trajectory = jax.device_get(trajectory)
        manager.begin("insert", trajectory, core)
        if self.agent.replay.normalizer:
            counted = jax.device_get(self._counted(self._statistics, trajectory))
            self._statistics = jax.tree.map(lambda x: x[0], counted)

    def sample(self, updates: int) -> Drawn:
        """Return what the update number ``updates``, from 0, learns from, on the host."""
        parts = self._ask(lambda part: ("sample", updates))
        drawn = parts[0] if len(parts) == 1 else self._joined_draws(parts)
        return drawn._replace(statistics=self._statistics)

    def _joined_draws(self, parts: Sequence[Drawn]) -> Drawn:
        def join(spec: Any, *subtrees: PyTree) -> PyTree:
            axis = spec.index(LEARNER_AXIS)
            return jax.tree.map(lambda *x: np.concatenate(x, axis), *subtrees)

        batches = [part.batch for part in parts]
        draw = jax.tree.map(lambda *x: np.concatenate(x), *[part.draw for part in parts])
        stack = parts[0].stack
        if isinstance(stack, StackState):
            lost = [part.stack.lost for part in parts]  # type: ignore[union-attr]
            stack = stack._replace(lost=jnp.asarray(np.sum(lost, dtype=np.int32)))
        return Drawn(
            # A part gives a share of 1 / M of the batch, whatever the sum of its weights.
            draw=draw._replace(probability=draw.probability / np.float32(len(parts))),
            batch=jax.tree.map(join, self._gathered_spec, *batches, is_leaf=is_spec),
            priority=np.concatenate([part.priority for part in parts]),
            size=np.asarray(sum(part.size for part in parts), np.float32),
            inserted=np.asarray(sum(part.inserted for part in parts), np.float32),
            trajectories=np.concatenate([part.trajectories for part in parts]),
            stack=stack,
        )

    def update_priority(self, experience: Drawn) -> None:
        """Hand the priorities over that the update computed; do not wait."""
        if not self.agent.config.replay.prioritized:
            return
        draw, priority = jax.device_get((experience.draw, experience.priority))
        share = len(priority) // len(self._managers)
        for part, manager in enumerate(self._managers):
            own = slice(part * share, (part + 1) * share)
            manager.begin("update_priority", Draw(*(x[own] for x in draw)), priority[own])

    # For checkpoints.

    def num_bytes(self) -> int:
        """Return the size of everything that is held."""
        agent, run = self.agent, self._sizes
        shapes = jax.eval_shape(lambda key: agent.new_state(key, run).experience, jax.random.key(0))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))

    def state(self) -> Replay:
        """Return everything that is held, on the host, laid out as on update devices."""
        whole = joined(self._ask(lambda part: ("state",)))
        return whole._replace(statistics=self._statistics)

    def lasting(self) -> PyTree:
        """Return the statistics of observations, as ``OffPolicyAgent.lasting_experience`` does."""
        return self._statistics

    def put_back(self, state: Replay) -> None:
        """Go on with a replay that was on update devices, or in any number of managers."""
        state = jax.device_get(state)
        self._statistics = jax.tree.map(np.copy, state.statistics)
        parts = parted(state._replace(statistics=()), len(self._managers))
        self._ask(lambda part: ("put_back", parts[part]))

    def close(self) -> None:
        """End all managers; may be called twice."""
        for manager in self._managers:
            manager.close()


def joined(parts: Sequence[Replay]) -> Replay:
    """Return one replay of the parts of it, which have the Inferencers in their order."""
    if len(parts) == 1:
        return parts[0]
    whole = jax.tree.map(lambda *x: np.concatenate(np.atleast_1d(*x)), *parts)
    if isinstance(whole.stack, StackState):
        whole = whole._replace(stack=whole.stack._replace(lost=whole.stack.lost.sum(dtype="int32")))
    return whole._replace(max_priority=whole.max_priority.max())


def parted(whole: Replay, number: int) -> list[Replay]:
    """Return the parts that ``joined`` joins; frame stacks that were lost count in the first."""
    if number == 1:
        return [whole]
    leaves, structure = jax.tree.flatten(whole)
    columns = [np.split(x, number) if x.ndim else [x] * number for x in leaves]
    parts = [jax.tree.unflatten(structure, column) for column in zip(*columns, strict=True)]
    if isinstance(whole.stack, StackState):
        parts[1:] = [p._replace(stack=p.stack._replace(lost=np.int32(0))) for p in parts[1:]]
    return parts


def check_managers(agent: Any, number: int, num_inferencers: int) -> None:
    """Raise UsageError unless the replay of ``agent`` can be in so many managers."""
    if not isinstance(agent, OffPolicyAgent):
        raise UsageError(
            f"cluster.trajectory_managers={number} hold the replay of an agent, and "
            f"{type(agent).__name__} has none that they know; use 0, or DQN, R2D2, SAC or DDPG"
        )
    managers = f"the {number} trajectory managers"
    check_divisible("num_inferencers", num_inferencers, number, managers)
    check_divisible("replay.batch_size", agent.config.replay.batch_size, number, managers)
