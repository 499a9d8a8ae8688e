"""The cycle of an agent that has a data set: trajectories of recorded rows, in their order."""

from __future__ import annotations

import threading
from typing import Any

import jax
import numpy as np

from sebulba.envs.saving.sealed import seal, unseal
from sebulba.errors import EnvError, UsageError
from sebulba.inference.cycle import CyclePrograms
from sebulba.inference.stepped_cycle import SteppedCycle
from sebulba.metrics.timer import PhaseTimer
from sebulba.support.streams import notify
from sebulba.transport.item import Item
from sebulba.types import EnvAdapter, EnvStep, PyTree, StepInfos, Trajectory
from sebulba_offline.dataset import Dataset


class DataCycle:
    """Gives the rows of a data set as trajectories, and then steps the environment, if it is to.

    The rows are cut into B columns of N trajectories each. After the N-th the first comes again.
    Row 0 of a column is marked as a reset: it does not continue what a replay holds before it. The
    last column is filled up with the first rows of the data.
    """

    kind = "data"

    def __init__(
        self,
        dataset: Dataset,
        env: EnvAdapter,
        programs: CyclePrograms,
        device: jax.Device,
        timer: PhaseTimer,
        *,
        online_after: int | None,
    ) -> None:
        """Begin with the first rows.

        Args:
          dataset: What is learned from.
          env: Stepped after ``online_after`` trajectories.
          programs: They act, and say what a trajectory is.
          device: Where the networks are.
          timer: Of the Inferencer.
          online_after: None never steps the environment.

        Raises:
          UsageError: The data are not of this environment.
        """
        check_spaces(dataset, programs)
        self._dataset, self._timer, self._programs = dataset, timer, programs
        self._online_after = online_after
        self._online = None if online_after is None else SteppedCycle(env, programs, device, timer)
        self._next = 0
        """Number of the next trajectory."""

    @property
    def _is_online(self) -> bool:
        return self._online_after is not None and self._next >= self._online_after

    def use(self, programs: CyclePrograms) -> None:
        """Use other programs; the data begin anew, since their columns are others."""
        self._programs, self._next = programs, 0
        if self._online is not None:
            self._online.use(programs)

    def reset(self) -> None:
        """Begin new episodes where the environment is stepped."""
        if self._online is not None:
            self._online.reset()

    def run(
        self, networks: PyTree, step_state: PyTree, stop: threading.Event
    ) -> tuple[Item | None, PyTree]:
        """Return the next trajectory; see ``Cycle.run``."""
        if self._is_online:
            assert self._online is not None
            return self._online.run(networks, step_state, stop)
        copy = self._programs.copy
        with self._timer.phase("act"):
            states = copy(step_state), copy(step_state)
        with self._timer.phase("finish"):
            trajectory = self._trajectory(self._next)
        self._next += 1
        if stop.is_set():
            return None, step_state
        return Item(trajectory, *states, _infos(trajectory)), step_state

    def _trajectory(self, number: int) -> Trajectory:
        """Return rows as ``[T+1, B, ...]``, in the shapes and dtypes of a trajectory."""
        shapes, run = self._programs.shapes, self._programs.run
        steps, rows = run.steps_per_cycle, self._dataset.rows
        column = steps * num_trajectories(rows.num_rows, steps * run.num_envs)
        at = number * steps % column + np.arange(steps + 1)[:, None]
        index = (at + column * np.arange(run.num_envs)[None]) % rows.num_rows
        seam = np.broadcast_to(at % column == 0, index.shape)
        is_first = rows.is_first[index] | seam
        prev_action = rows.action[index - 1]
        prev_action[is_first] = 0
        env_step = EnvStep(
            jax.tree.map(lambda x: x[index], rows.obs),
            prev_action,
            rows.reward[index],
            rows.terminated[index] & ~seam,
            rows.truncated[index] & ~seam,
            is_first,
            jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes.env_step.final),
        )
        action = rows.action[index[:-1]]
        extras = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes.extras)

        def like(array: Any, shape: Any) -> np.ndarray:
            return np.ascontiguousarray(array.astype(shape.dtype, copy=False))

        return Trajectory(*jax.tree.map(like, (env_step, action, extras), tuple(shapes[:3])))

    def position(self) -> bytes:
        """Return which trajectory is next and, after the data, where the environment stands."""
        inner: bytes | str | None = None
        if self._is_online:
            assert self._online is not None
            inner = self._online.position()
        return seal((self._next, inner), of=self._owner, num_envs=self._programs.run.num_envs)

    def put_back(self, position: bytes) -> None:
        """Go on where a checkpoint was saved.

        Raises:
          EnvError: It is of another data set, or damaged.
        """
        number, inner = unseal(position, of=self._owner, num_envs=self._programs.run.num_envs)
        if not isinstance(number, int) or number < 0:
            raise EnvError(
                f"the saved position in {self._owner} is damaged; use another checkpoint"
            )
        self._next = number
        if isinstance(inner, str):  # the data are not read again, for all that
            notify(f"new episodes from fresh seeds: {inner}")
        if self._online is not None:
            if isinstance(inner, bytes):
                self._online.put_back(inner)
            else:
                self._online.reset()

    @property
    def _owner(self) -> str:
        return f"the data set {self._dataset.checksum[:16]}"


def num_trajectories(num_rows: int, rows_a_trajectory: int) -> int:
    """Return N: how many trajectories hold all rows; two at least, since a replay needs as many."""
    return max(2, -(-num_rows // rows_a_trajectory))


def check_spaces(dataset: Dataset, programs: CyclePrograms) -> None:
    """Raise UsageError unless the agent observes and does what is in the data."""
    spec = programs.agent.spec
    for name in ("observation_space", "action_space"):
        of_data, of_agent = getattr(dataset, name), getattr(spec, name)
        if of_data != of_agent:
            raise UsageError(
                f"{name}={of_data} of the data set {dataset.folder} is not the environment's "
                f"{of_agent}; give the environment that was recorded: "
                f"--env.id {dataset.record.get('env') or 'ID'}"
            )


def _infos(trajectory: Trajectory) -> StepInfos:
    """Return statistics of steps without episodes: those of the data are not the learner's."""
    after: EnvStep = jax.tree.map(lambda x: x[1:], trajectory.env_step)
    none = np.zeros(after.reward.shape, np.bool_)
    episodes = np.zeros(0, np.float64), np.zeros(0, np.int64)
    return StepInfos(after.reward, none, np.asarray(after.inserted), none, *episodes)
