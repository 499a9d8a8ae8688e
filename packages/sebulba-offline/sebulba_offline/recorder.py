"""Records episodes: of any training, and of a trained policy."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from sebulba.envs import env_spec, make_env_factory
from sebulba.errors import UsageError
from sebulba.inference.cycle import env_step_of
from sebulba.loops.evaluation import Progress, evaluate
from sebulba.options import MOST_EPISODE_STEPS
from sebulba.policies.policy import Policy, PolicyState
from sebulba.support.checks import at_least, require_number
from sebulba.types import EnvOutput, EnvSpec, EnvStep, FinalObs, PyTree, StepInfos, Trajectory
from sebulba_offline.dataset import DatasetWriter, Rows, joined

STEPS_A_PIECE = 64
"""Steps of all environments that are recorded together."""
FLUSH_S = 30.0
"""Seconds of training after which a file is written: a run that is killed loses no more."""
MOST_BYTES = 2**28
"""Most bytes of the episodes in progress; beyond that the longest is cut."""


class _Recording(contextlib.AbstractContextManager):
    """Is closed at the end of its block."""

    def close(self) -> None:
        raise NotImplementedError

    def __exit__(self, *exception: object) -> None:
        self.close()


class Recorder(_Recording):
    """Writes what environments did as a data set: ``GymnasiumLoop(observe_cycle=Recorder(...))``.

    A context manager. Where a trajectory is missing, the episode in progress is cut, and its rest
    is left out. Episodes that run at the end are cut, too. It is what ``--record-dataset`` makes.
    """

    def __init__(
        self,
        folder: str | Path,
        spec: EnvSpec,
        *,
        about: Mapping[str, Any] | None = None,
        append: bool = False,
    ) -> None:
        """Begin a data set.

        Args:
          folder: Made if it is not there.
          spec: Of the environment, as ``sebulba.env_spec`` returns it.
          about: More facts for people.
          append: Add to the data set that the folder holds, if it holds one.

        Raises:
          UsageError: The environment has many agents, or ``DatasetWriter`` refuses the folder.
        """
        spec = _of_one_agent(spec)
        spaces = spec.observation_space, spec.action_space
        self.writer = DatasetWriter(folder, *spaces, env=spec.name, about=about, append=append)
        self._action_dtype = spec.action_space.dtype
        self._streams: dict[tuple[int, int], _Stream] = {}
        self._latest: dict[tuple[int, int], int] = {}
        """Number of the newest column of each stream."""
        self._flushed_at = time.monotonic()

    def __call__(self, trajectory: Trajectory, infos: StepInfos) -> None:
        """Record one trajectory; an ``observe_cycle`` of a loop."""
        inferencer, cycle = int(trajectory.inferencer), int(trajectory.cycle)
        env_step, action = jax.device_get((trajectory.env_step, trajectory.action))
        reward = np.asarray(infos.unclipped_reward)
        num_envs = reward.shape[1]
        streams, numbers, begins = range(num_envs), [cycle] * num_envs, env_step.is_first[0]
        if len(infos.streams):
            streams, numbers, begins = np.asarray(infos.streams).tolist()
        for column in sorted(range(num_envs), key=numbers.__getitem__):
            one = jax.tree.map(lambda x, column=column: np.array(x[:, column]), env_step)
            one.is_first[0] = begins[column]  # for a replay, a seam between seats is a first row
            stream = self._stream((inferencer, streams[column]), numbers[column])
            stream.add(one, np.asarray(action)[:, column], reward[:, column])
        self._keep_small()

    def _stream(self, key: tuple[int, int], number: int) -> _Stream:
        """Return the stream that column ``number`` continues; a new one after a gap."""
        if self._latest.get(key) != number - 1:
            if key in self._streams:
                self._streams[key].end()
            self._streams[key] = _Stream(self._action_dtype, self.writer.add)
        self._latest[key] = number
        return self._streams[key]

    def _keep_small(self) -> None:
        """Write a file if it is due, and cut the longest episode if all need too much memory."""
        streams = self._streams.values()
        while sum(stream.num_bytes for stream in streams) > MOST_BYTES:
            max(streams, key=lambda stream: stream.num_bytes).close()
        if time.monotonic() >= self._flushed_at + FLUSH_S:
            self.writer.flush()
            self._flushed_at = time.monotonic()

    def close(self) -> None:
        """Write everything; may be called twice."""
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.end()
        self.writer.close()


class EvaluationRecorder(_Recording):
    """Writes the episodes that an evaluation counts: ``evaluate(observe=EvaluationRecorder(...))``.

    A context manager.
    """

    def __init__(
        self,
        folder: str | Path,
        spec: EnvSpec,
        num_episodes: int,
        num_envs: int,
        max_episode_steps: int = MOST_EPISODE_STEPS,
        *,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin a data set; numbers are as ``sebulba.evaluate`` takes them.

        Raises:
          UsageError: The environment has many agents, or ``DatasetWriter`` refuses the folder.
        """
        spec = _of_one_agent(spec).policy_spec
        spaces = spec.observation_space, spec.action_space
        self.writer = DatasetWriter(folder, *spaces, env=spec.name, about=about)
        num_envs = min(num_envs, num_episodes)
        self.streams = [
            _Stream(
                spec.action_space.dtype,
                self.writer.add,
                num_episodes // num_envs + (env < num_episodes % num_envs),
                max_episode_steps,
            )
            for env in range(num_envs)
        ]
        """One for each environment; full when it has played its part."""
        self._rows: list[EnvStep] = []
        self._actions: list[np.ndarray] = []
        self._rewards: list[np.ndarray] = []

    def __call__(self, seen: EnvStep, action: np.ndarray, output: EnvOutput) -> None:
        """Record a step: what was seen, what was done, and what came of it."""
        if not self._rows:
            self._rows.append(seen)
        self._actions.append(np.asarray(action))
        self._rewards.append(np.asarray(output.unclipped_reward))
        self._rows.append(env_step_of(output, ()))
        if len(self._actions) >= STEPS_A_PIECE:
            self._add()

    def _add(self) -> None:
        """Pass on the steps so far."""
        if not self._actions:
            return
        step, action, reward = (
            jax.tree.map(lambda *x: np.stack(x), *one)
            for one in (self._rows, self._actions, self._rewards)
        )
        for env, stream in enumerate(self.streams):
            one = jax.tree.map(lambda x, env=env: x[:, env], step)
            stream.add(one, action[:, env], reward[:, env])
        self._rows, self._actions, self._rewards = self._rows[-1:], [], []

    def close(self) -> None:
        """Write everything; may be called twice."""
        self._add()
        for stream in self.streams:
            stream.end()
        self.writer.close()


def _of_one_agent(spec: Any) -> EnvSpec:
    if not isinstance(spec, EnvSpec):
        raise UsageError(
            "an environment of many agents cannot be recorded; record one of a single agent"
        )
    return spec


class _Stream:
    """The rows of one environment, cut into episodes."""

    def __init__(
        self,
        action_dtype: Any,
        add: Callable[[Rows], None],
        quota: int | None = None,
        most: int = MOST_EPISODE_STEPS,
    ) -> None:
        """Pass ``quota`` episodes to ``add``, or all; one of over ``most`` steps is the last."""
        self._action_dtype, self._add = action_dtype, add
        self._left, self._most = quota, most
        self._pieces: list[Rows] = []
        """Of the episode in progress, with an action in each row."""
        self._waits: tuple[EnvStep, np.float32] | None = None
        """The row that comes next, ``[1, ...]``, and its reward."""

    @property
    def is_full(self) -> bool:
        """Whether it takes no more."""
        return self._left == 0

    @property
    def length(self) -> int:
        """Rows of the episode in progress."""
        return sum(piece.num_rows for piece in self._pieces)

    @property
    def num_bytes(self) -> int:
        """Of the episode in progress."""
        return sum(piece.num_bytes for piece in self._pieces)

    def add(self, step: EnvStep, action: np.ndarray, reward: np.ndarray) -> None:
        """Add T rows; ``step`` has one more, which comes again, and may have been cut then."""
        if self.is_full:
            return
        end = len(action)
        flags = [np.array(flag) for flag in (step.terminated, step.truncated, step.is_first)]
        first = np.float32(0)
        if self._waits is not None:
            before, first = self._waits
            was_cut = flags[1][0]  # since then
            told = before.terminated, before.truncated | was_cut, before.is_first
            for flag, value in zip(flags, told, strict=True):
                flag[:1] = value
        rewards = np.append(first, reward).astype(np.float32)
        rows = Rows(
            jax.tree.map(lambda x: x[:end].copy(), step.obs),
            action.astype(self._action_dtype),
            rewards[:end],
            *(flag[:end] for flag in flags),
        )
        self._take(step, rows)
        self._waits = jax.tree.map(lambda x: np.array(x[end : end + 1]), step), rewards[-1]

    def end(self) -> None:
        """Add the row that waits, and end the episode in progress with it."""
        if self._waits is not None and self._pieces:
            step, reward = self._waits
            last = self._pieces[-1]
            rows = Rows(
                step.obs,
                np.zeros_like(last.action[-1:]),
                np.array([reward]),
                *map(np.array, (step.terminated, step.truncated, step.is_first)),
            )
            self._take(step, rows)
        self._waits = None
        self.close()

    def _take(self, step: EnvStep, rows: Rows) -> None:
        """Add T rows, which are those of ``step``."""
        end = rows.num_rows
        starts = [at for at in np.flatnonzero(rows.is_first).tolist() if at or self._pieces]
        edges = [0, *(at for at in starts if at), end]
        for begin, stop in itertools.pairwise(edges):
            if begin in starts:
                self._finish(step, rows, begin)
            piece = rows.part(begin, stop)
            if not self._pieces:
                if not piece.is_first[0]:
                    continue  # the rest of an episode whose begin is not there
                _begin(piece)
            self._pieces.append(piece)
            if self.length > self._most and not self.is_full:
                self._pieces = [joined(self._pieces).part(0, self._most + 1)]
                self.close()
                self._left = None if self._left is None else 0

    def _finish(self, step: EnvStep, rows: Rows, at: int) -> None:
        """End the episode before row ``at``, which begins another."""
        if rows.terminated[at] or rows.truncated[at]:  # the environment reset in the same step
            last = rows.part(at, at + 1).map(np.copy)
            final = step.final
            if isinstance(final, FinalObs) and final.given[at]:
                last = last._replace(obs=jax.tree.map(lambda x: x[at : at + 1], final.obs))
            elif rows.terminated[at]:  # nothing bootstraps from what is not known
                before = self._pieces[-1].obs
                last = last._replace(obs=jax.tree.map(lambda x: x[-1:], before))
            else:  # without its last observation the last step cannot be learned from
                return self.close()
            self._pieces.append(last._replace(is_first=np.zeros(1, np.bool_)))
        self.close()

    def close(self) -> None:
        """End the episode in progress at its last row."""
        if not self._pieces:
            return
        episode, self._pieces = joined(self._pieces), []
        if episode.num_rows < 2 or self.is_full:
            return
        if self._left is not None:
            self._left -= 1
        episode.action[-1] = 0
        episode.truncated[-1] |= not episode.terminated[-1]
        self._add(episode)


def _begin(piece: Rows) -> None:
    """Make the first of these rows that of an episode."""
    piece.is_first[0], piece.reward[0] = True, 0.0
    piece.terminated[0] = piece.truncated[0] = False


def record(
    policy: Policy,
    env: Any,
    folder: str | Path,
    *,
    num_episodes: int = 100,
    num_envs: int = 16,
    seed: int = 1,
    random: float = 0.0,
    max_episode_steps: int = MOST_EPISODE_STEPS,
    about: Mapping[str, Any] | None = None,
    told: Progress | None = None,
) -> int:
    """Play ``policy`` and record whole episodes; returns how many.

    How many each environment plays is fixed beforehand: the first to end would be the short ones.

    Args:
      policy: From ``load_policy``; ``explore=True`` acts as in training.
      env: Whatever ``sebulba.make_env_factory`` takes.
      folder: Of the data set.
      num_episodes: At least 1.
      num_envs: Environments side by side.
      seed: Of environments and random actions, an int32.
      random: Probability that an action is drawn from the action space, from 0 to 1.
      max_episode_steps: Steps after which an episode is cut; its environment then plays no other.
      about: More facts for people.
      told: Is told how far it is.

    Raises:
      UsageError: A number is out of range, or the environment is not the policy's.
    """
    at_least(1, "num_episodes", num_episodes)
    at_least(1, "num_envs", num_envs)
    at_least(1, "max_episode_steps", max_episode_steps)
    require_number("random", random, 0, 1, "use 0.1")
    factory = make_env_factory(env)
    sizes = num_episodes, num_envs, max_episode_steps
    with EvaluationRecorder(folder, env_spec(factory), *sizes, about=about) as recorder:
        evaluate(
            _NoisyPolicy(policy, random, seed),
            factory,
            num_episodes=num_episodes,
            num_envs=num_envs,
            seed=seed,
            max_episode_steps=max_episode_steps,
            progress=told,
            observe=recorder,
        )
    return recorder.writer.episodes


class _NoisyPolicy(Policy):
    """Acts as another, with random actions in the place of some."""

    def __init__(self, policy: Policy, probability: float, seed: int) -> None:
        self.__dict__.update(vars(policy))
        self._space, self._probability = policy.spec.action_space, probability
        self._draws = np.random.default_rng([seed % 2**32, 0])
        self._space.seed(seed % 2**31)

    def act(self, env_step: EnvStep, state: PolicyState) -> tuple[PyTree, PolicyState]:
        action, state = super().act(env_step, state)
        if not self._probability:
            return action, state
        drawn = np.stack([self._space.sample() for _ in action]).astype(action.dtype)
        at_random = self._draws.random(len(action)) < self._probability
        action = np.where(at_random.reshape(-1, *(1,) * (action.ndim - 1)), drawn, action)
        return action, state._replace(prev_action=action)
