"""Records episodes: of any training, and of a trained policy."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from sebulba.envs import env_spec, make_env_factory, seed_block
from sebulba.envs.policy_view import as_policy_sees
from sebulba.errors import UsageError
from sebulba.inference.cycle import env_step_of
from sebulba.loops.evaluation import Progress, check_spaces
from sebulba.options import MOST_EPISODE_STEPS
from sebulba.policies.policy import Policy
from sebulba.support.checks import at_least, require_number
from sebulba.types import EnvAdapter, EnvSpec, EnvStep, FinalObs, PyTree, StepInfos, Trajectory
from sebulba_offline.dataset import DatasetWriter, Rows, joined

STEPS_A_PIECE = 64
"""Steps of all environments that are recorded together."""


class Recorder:
    """Writes what environments did as a data set: ``GymnasiumLoop(observe_cycle=Recorder(...))``.

    A context manager. Where a trajectory is missing, the episode in progress is cut. So are the
    episodes that run at the end. Not for clients of ``sebulba-external``: their trajectories are
    put together from several seats.
    """

    def __init__(
        self, folder: str | Path, spec: EnvSpec, *, about: Mapping[str, Any] | None = None
    ) -> None:
        """Begin a data set.

        Args:
          folder: Made if it is not there.
          spec: Of the environment, as ``sebulba.env_spec`` returns it.
          about: More facts for people.

        Raises:
          UsageError: The environment has many agents, or the folder holds a data set.
        """
        if not isinstance(spec, EnvSpec):
            raise UsageError(
                "an environment of many agents cannot be recorded; record one of a single agent"
            )
        spaces = spec.observation_space, spec.action_space
        self.writer = DatasetWriter(folder, *spaces, env=spec.name, about=about)
        self._action_dtype = spec.action_space.dtype
        self._streams: dict[tuple[int, int], _Stream] = {}
        self._cycles: dict[int, int] = {}

    def __call__(self, trajectory: Trajectory, infos: StepInfos) -> None:
        """Record one trajectory; an ``observe_cycle`` of a loop."""
        inferencer, cycle = int(trajectory.inferencer), int(trajectory.cycle)
        if self._cycles.get(inferencer, cycle - 1) != cycle - 1:
            self.cut(inferencer)
        self._cycles[inferencer] = cycle
        env_step, action = jax.device_get((trajectory.env_step, trajectory.action))
        self.add(env_step, action, np.asarray(infos.unclipped_reward), inferencer)

    def add(
        self, env_step: EnvStep, action: PyTree, reward: np.ndarray, inferencer: int = 0
    ) -> None:
        """Record rows that continue those before.

        Args:
          env_step: ``[T+1, B, ...]``; its last row comes again as the first of the next call.
          action: ``[T, B, ...]``.
          reward: Unclipped, of these actions, ``[T, B]``.
          inferencer: Whose environments they are.
        """
        for env in range(reward.shape[1]):
            key = inferencer, env
            if key not in self._streams:
                self._streams[key] = _Stream(self._action_dtype, self.writer.add)
            one = jax.tree.map(lambda x, env=env: np.asarray(x)[:, env], env_step)
            self._streams[key].add(one, np.asarray(action)[:, env], reward[:, env])

    def cut(self, inferencer: int) -> None:
        """End the episodes in progress: the next rows do not continue them."""
        for (whose, env), stream in list(self._streams.items()):
            if whose == inferencer:
                stream.close()
                del self._streams[whose, env]

    def close(self) -> None:
        """Write everything; may be called twice."""
        for stream in self._streams.values():
            stream.close()
        self._streams = {}
        self.writer.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


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
        self._reward = np.float32(0)
        """Of the row that comes next."""

    @property
    def is_full(self) -> bool:
        """Whether it takes no more."""
        return self._left == 0

    @property
    def length(self) -> int:
        """Rows of the episode in progress."""
        return sum(piece.num_rows for piece in self._pieces)

    def add(self, step: EnvStep, action: np.ndarray, reward: np.ndarray) -> None:
        """Add T rows; ``step`` has one more, which comes again."""
        if self.is_full:
            return
        rewards = np.append(self._reward, reward).astype(np.float32)
        self._reward = rewards[-1]
        end = len(action)
        rows = Rows(
            jax.tree.map(lambda x: x[:end].copy(), step.obs),
            action.astype(self._action_dtype),
            rewards[:end],
            *(np.array(flag[:end]) for flag in (step.terminated, step.truncated, step.is_first)),
        )
        starts = [at for at in np.flatnonzero(rows.is_first).tolist() if at or self._pieces]
        edges = [0, *(at for at in starts if at), end]
        for begin, stop in itertools.pairwise(edges):
            if begin in starts:
                self._finish(step, rows, begin)
            piece = rows.part(begin, stop)
            if not self._pieces:
                _begin(piece)
            self._pieces.append(piece)
            if self.length > self._most and not self.is_full:
                self._pieces = [joined(self._pieces).part(0, self._most + 1)]
                self.close()
                self._left = 0

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
    spec = env_spec(factory).policy_spec
    num_envs = min(num_envs, num_episodes)
    quota = [num_episodes // num_envs + (i < num_episodes % num_envs) for i in range(num_envs)]
    seeds = seed_block(seed, inferencer=0, num_inferencers=1, num_envs=num_envs)
    spaces = spec.observation_space, spec.action_space
    adapter = as_policy_sees(factory(num_envs, seeds))
    with contextlib.closing(adapter):
        check_spaces(policy, adapter)
        with DatasetWriter(folder, *spaces, env=spec.name, about=about) as writer:
            dtype = spec.action_space.dtype
            streams = [_Stream(dtype, writer.add, one, max_episode_steps) for one in quota]
            noise = _Noise(spec, random, seed)
            for _ in _play(policy, adapter, streams, noise):
                if told is not None:
                    told(writer.episodes, max(stream.length for stream in streams))
            return writer.episodes


class _Noise:
    """Puts random actions in the place of some."""

    def __init__(self, spec: EnvSpec, probability: float, seed: int) -> None:
        self._space, self._probability = spec.action_space, probability
        self._draws = np.random.default_rng([seed % 2**32, 0])
        self._space.seed(seed % 2**31)

    def __call__(self, action: np.ndarray) -> np.ndarray:
        """Return actions ``[B, ...]``."""
        if not self._probability:
            return action
        drawn = np.stack([self._space.sample() for _ in action]).astype(action.dtype)
        at_random = self._draws.random(len(action)) < self._probability
        return np.where(at_random.reshape(-1, *(1,) * (action.ndim - 1)), drawn, action)


def _play(
    policy: Policy, adapter: EnvAdapter, streams: list[_Stream], noise: _Noise
) -> Iterator[None]:
    """Play until all streams are full; pause after each piece."""
    state = policy.new_state(len(streams))
    rows = [env_step_of(adapter.reset(), ())]
    while not all(stream.is_full for stream in streams):
        actions, rewards = [], []
        for _ in range(STEPS_A_PIECE):
            action, state = policy.act(rows[-1], state)
            action = noise(action)
            state = state._replace(prev_action=action)
            output = adapter.step(action)
            rows.append(env_step_of(output, ()))
            actions.append(action)
            rewards.append(np.asarray(output.unclipped_reward))
        env_step, action, reward = (
            jax.tree.map(lambda *x: np.stack(x), *one) for one in (rows, actions, rewards)
        )
        for env, stream in enumerate(streams):
            one = jax.tree.map(lambda x, env=env: x[:, env], env_step)
            stream.add(one, action[:, env], reward[:, env])
        rows = rows[-1:]
        yield
