"""Play a policy for a number of episodes and say what it returns: once, or as it is trained."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import math
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from sebulba.agent import Agent
from sebulba.envs import make_env_factory, seed_block
from sebulba.envs.policy_view import as_played
from sebulba.errors import UsageError, is_env_failure, text_of
from sebulba.inference.cycle import env_step_of, info_columns
from sebulba.inference.env_thread import CallingThread, EnvThread
from sebulba.loops.evaluation_thread import EVALUATOR_THREAD
from sebulba.options import MOST_EPISODE_STEPS
from sebulba.policies.policy import Policy
from sebulba.support.checks import at_least, require
from sebulba.types import (
    EnvAdapter,
    EnvFactory,
    EnvOutput,
    EnvSpec,
    EnvStep,
    MultiAgentSpec,
    PyTree,
    Team,
)

CONFIDENCE = 0.95
DRAWN = 1e-6
"""A return of at most this size is that of a draw, where the payoff is zero-sum."""
MOST_SLOTS_SHOWN = 16
"""Of more slots only the teams and groups are told."""

Progress = Callable[[int, int], None]
"""Gets, after every step, how many episodes are done and the steps of the longest that runs."""
ObserveStep = Callable[[EnvStep, PyTree, EnvOutput], None]
"""Gets what the policy saw in a step, its actions, and what came of them; leaves ``[B, ...]``."""

NUM_SEEDS = 2**31
"""Seeds that there are; training takes them from one end and evaluation from the other."""


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Returns, before any clipping of rewards, and lengths of whole episodes."""

    returns: np.ndarray
    """``[N]`` float64, unclipped."""
    lengths: np.ndarray
    """``[N]`` int64, in environment steps."""
    num_cut: int = 0
    """How many of them were cut at the limit of steps; their returns are those up to there."""
    num_not_played: int = 0
    """Episodes that were asked for and would have come after one that was cut."""
    group_returns: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    """With many agents: by group, the means over its slots of their returns, ``[N]``."""
    slot_returns: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    """With many agents: the returns of each slot, by ``group/slot``, ``[N]``."""
    teams: tuple[Team, ...] = ()
    """With many agents: the populations of the tree, the whole first."""

    @property
    def episode_return_mean(self) -> float:
        """Mean of the returns."""
        return float(np.mean(self.returns))

    @property
    def episode_length_mean(self) -> float:
        """Mean of the lengths."""
        return float(np.mean(self.lengths))

    mean_return, mean_length = episode_return_mean, episode_length_mean
    """The same, by the names that they had before."""

    @property
    def interval(self) -> float | None:
        """Half the width of the 95 % confidence interval of the mean return (Student's t).

        None for a single episode.
        """
        from scipy.stats import t  # slow to import

        n = len(self.returns)
        if n < 2:
            return None
        error = float(np.std(self.returns, ddof=1)) / math.sqrt(n)
        return float(t.ppf((1 + CONFIDENCE) / 2, n - 1)) * error

    def record(self) -> dict[str, Any]:
        """Return everything as a JSON object."""
        return {
            "episodes": len(self.returns),
            "episode_return_mean": self.episode_return_mean,
            "interval_95": self.interval,
            "episode_length_mean": self.episode_length_mean,
            "cut_episodes": self.num_cut,
            "episodes_not_played": self.num_not_played,
            "returns": self.returns.tolist(),
            "lengths": self.lengths.tolist(),
            **{f"episode_return_mean/{name}": mean for name, mean in self._means()},
            **{f"outcomes/{name}": counts for name, counts in self.outcomes().items()},
        }

    @property
    def is_zero_sum(self) -> bool:
        """Whether the payoff among all agents is zero-sum, so that the mean return says nothing."""
        return bool(self.teams) and self.teams[0].payoff == "zero_sum"

    def outcomes(self) -> dict[str, dict[str, int]]:
        """Return how often each slot won, drew and lost, if the payoff among all is zero-sum."""
        if not self.is_zero_sum:
            return {}
        return {
            name: {
                "won": int((returns > DRAWN).sum()),
                "drawn": int((np.abs(returns) <= DRAWN).sum()),
                "lost": int((returns < -DRAWN).sum()),
            }
            for name, returns in self.slot_returns.items()
        }

    def _means(self, *, numbered: bool = False) -> list[tuple[str, float]]:
        """Return the mean return of each slot, if they are not too many, each team and group.

        ``numbered`` calls slots ``group/number``, as training does in its metrics.
        """
        returns = {}
        if len(self.slot_returns) <= MOST_SLOTS_SHOWN:
            names = _numbered(self.slot_returns) if numbered else self.slot_returns
            returns = dict(zip(names, self.slot_returns.values(), strict=True))
        for team in self.teams[1:]:
            returns[team.name] = np.mean([self.slot_returns[slot] for slot in team.slots], axis=0)
        returns |= self.group_returns
        return [(name, float(np.mean(of_name))) for name, of_name in returns.items()]

    def metrics(self) -> dict[str, float]:
        """Return what training writes of it."""
        return {
            "eval_return_mean": self.episode_return_mean,
            "eval_return_std": float(np.std(self.returns)),
            "eval_length_mean": self.episode_length_mean,
            "eval_episodes": len(self.returns),
            "eval_cut_episodes": self.num_cut,
            **{f"eval_return_mean/{name}": mean for name, mean in self._means(numbered=True)},
        }

    def __str__(self) -> str:
        interval = self.interval
        margin = f" ± {interval:.2f} (95 % confidence interval)" if interval is not None else ""
        return (
            f"mean return {self.episode_return_mean:.2f}{margin} "
            f"over {len(self.returns)} episodes, "
            f"mean length {self.episode_length_mean:.1f}{self._by_agent()}{self._of_those_cut()}"
        )

    def _by_agent(self) -> str:
        """Return a table with a line for each slot, team and group."""
        groups = collections.Counter(slot.rpartition("/")[0] for slot in self.slot_returns)
        means = {name: mean for name, mean in self._means() if groups[name] != 1}
        if len(means) < 2:
            return ""
        outcomes = self.outcomes()
        width = max(map(len, means))
        lines = [f"{'':{width}}  return{'    won  drawn   lost' if outcomes else ''}"]
        for name, mean in means.items():
            counts = "".join(f"{count:7,}" for count in outcomes.get(name, {}).values())
            lines.append(f"{name:{width}}  {mean:6.2f}{counts}")
        return "\n" + "\n".join(lines)

    def _of_those_cut(self) -> str:
        if not self.num_cut:
            return ""
        after = f"; {self.num_not_played} that would have come after them were not played"
        return (
            f"\n{self.num_cut} of the {len(self.returns)} episodes had not ended after "
            f"{self.lengths.max():,} steps (max_episode_steps) and were cut; they count with the "
            f"return that they had{after if self.num_not_played else ''}"
        )


def _numbered(slots: Iterable[str]) -> list[str]:
    """Return ``group/slot`` as ``group/number``."""
    groups = [slot.rpartition("/")[0] for slot in slots]
    return [f"{group}/{groups[:i].count(group)}" for i, group in enumerate(groups)]


def evaluate(
    policy: Policy,
    env: str | Callable | EnvFactory,
    *,
    num_episodes: int = 100,
    num_envs: int = 16,
    seed: int = 1,
    max_episode_steps: int = MOST_EPISODE_STEPS,
    progress: Progress | None = None,
    observe: ObserveStep | None = None,
) -> Evaluation:
    """Play ``policy`` for exactly ``num_episodes`` episodes.

    How many each environment plays is fixed beforehand (equal but for one): taking the first
    episodes to end would favour short ones. An environment whose episode is cut plays no other.

    Args:
      policy: From ``load_policy``.
      env: Whatever ``sebulba.make_env_factory`` takes.
      num_episodes: At least 1.
      num_envs: Environments side by side; no more than episodes are made.
      seed: Of the environments, an int32.
      max_episode_steps: Steps after which an episode is cut, at least 1.
      progress: Is told, after every step, how far it is.
      observe: Is given every step, also those of environments that have played their part.

    Raises:
      UsageError: A number is out of range, or the environment is not the policy's.
    """
    quota = _quota(num_episodes, num_envs)
    at_least(1, "max_episode_steps", max_episode_steps)
    seeds = seed_block(seed, inferencer=0, num_inferencers=1, num_envs=len(quota))
    with contextlib.closing(as_played(make_env_factory(env)(len(quota), seeds))) as adapter:
        check_spaces(policy, adapter)
        tally = _Tally(quota, max_episode_steps, adapter.spec)
        evaluation = _play(policy, adapter, tally, threading.Event(), progress, observe)
    assert evaluation is not None, "nobody stops it"
    return evaluation


class EvaluationPlayer:
    """Plays evaluation after evaluation of an agent that is being trained, for a loop's Evaluator.

    ``Evaluator(EvaluationPlayer(agent, env, seed=seed), every_env_steps=10_000)`` in a
    ``GymnasiumLoop`` with the same seed. The environments are its own, and so are their seeds:
    counted from the other end than those of training, under the same seed. Every evaluation plays
    fresh episodes. A context manager; ``close()`` frees the environments.
    """

    def __init__(
        self,
        agent: Agent,
        env: str | Callable | EnvFactory,
        *,
        num_episodes: int = 50,
        num_envs: int = 25,
        seed: int = 0,
        max_episode_steps: int = MOST_EPISODE_STEPS,
        on_best: Callable[[PyTree], None] | None = None,
        max_env_restarts: int = 0,
        inline: bool = False,
    ) -> None:
        """Make the environments.

        Args:
          agent: The algorithm; it acts with ``explore=False``.
          env: Whatever ``sebulba.make_env_factory`` takes.
          num_episodes: In an evaluation, at least 1.
          num_envs: Environments side by side; no more than episodes are made.
          seed: Seed of the run, an int32.
          max_episode_steps: Steps after which an episode is cut, at least 1; its environment then
            plays no other in this evaluation.
          on_best: Called with the acting networks of every evaluation that returned no less than
            all before; with those of every evaluation where the payoff is zero-sum.
          max_env_restarts: How often environments that raise or die are replaced by new ones with
            new seeds, and their evaluation is played from its beginning; the next failure is
            raised.
          inline: Make and play the environments in the calling thread, not in one of their own.

        Raises:
          UsageError: A number is out of range, or the environment is not the agent's.
        """
        self._quota = _quota(num_episodes, num_envs)
        at_least(1, "max_episode_steps", max_episode_steps)
        rule = "must not be negative"
        require(max_env_restarts >= 0, "max_env_restarts", max_env_restarts, rule, "use 10")
        self._max_episode_steps = max_episode_steps
        self._policy = Policy(agent, None, seed=seed)
        self._on_best = on_best
        self.best: float | None = None
        """Mean return of the best evaluation so far."""
        self.best_evaluation: Evaluation | None = None
        """That evaluation; the newest where the payoff is zero-sum."""
        self._seed = seed
        self._factory = make_env_factory(env)
        self._max_env_restarts = max_env_restarts
        self.env_restarts = 0
        """How often the environments were replaced."""
        self.env_thread = CallingThread() if inline else EnvThread(EVALUATOR_THREAD)
        """Where the environments are made, played and closed."""
        self._is_playing = False
        self._closed = False
        self.env_thread.call(self._make_envs)

    def _make_envs(self) -> None:
        seeds = evaluation_seeds(self._seed, len(self._quota), self.env_restarts)
        self._adapter = as_played(self._factory(len(self._quota), seeds))
        try:
            check_spaces(self._policy, self._adapter)
        except UsageError:
            self._adapter.close()
            raise

    def __call__(self, acting_networks: PyTree, stop: threading.Event) -> dict[str, float] | None:
        """Play ``num_episodes`` episodes; None as soon as ``stop`` is set.

        Raises:
          EnvError: An environment failed, or whatever it raised, after ``max_env_restarts``.
        """
        self._policy.acting_networks = acting_networks
        evaluation = self.env_thread.call(self._play_through, stop)
        if evaluation is None:
            return None
        mean = evaluation.episode_return_mean
        if self.best is None or mean >= self.best or evaluation.is_zero_sum:
            self.best, self.best_evaluation = mean, evaluation
            if self._on_best is not None:
                self._on_best(acting_networks)
        return evaluation.metrics() | {"eval_env_restarts": self.env_restarts}

    def _play_through(self, stop: threading.Event) -> Evaluation | None:
        self._is_playing = True
        try:
            while True:
                try:
                    tally = _Tally(self._quota, self._max_episode_steps, self._adapter.spec)
                    return _play(self._policy, self._adapter, tally, stop)
                except Exception as error:
                    if self.env_restarts >= self._max_env_restarts or not is_env_failure(error):
                        raise
                    if stop.is_set():
                        return None  # whoever stopped this may not close new environments
                    self._replace_envs(error)
        finally:
            self._is_playing = False

    def _replace_envs(self, error: Exception) -> None:
        self.env_restarts += 1
        warnings.warn(
            "an environment of the evaluation failed; all its environments are replaced (restart "
            f"{self.env_restarts} of {self._max_env_restarts}): {text_of(error)}",
            RuntimeWarning,
            stacklevel=2,
        )
        with contextlib.suppress(Exception):  # it is broken already
            self._adapter.close()
        try:
            self._make_envs()
        except Exception as failure:
            failure.add_note(f"in place of environments that had failed: {text_of(error)}")
            raise

    def close(self) -> None:
        """Free the environments; may be called twice.

        Those that are being played, or hang, their own thread closes when their step returns.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if not self._is_playing:
                self.env_thread.call(self._adapter.close)
            elif isinstance(self.env_thread, EnvThread):
                self.env_thread.task(lambda: self._adapter.close()).start()
        finally:
            self.env_thread.end()

    def __enter__(self) -> EvaluationPlayer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def evaluation_seeds(seed: int, num_envs: int, generation: int = 0) -> list[int]:
    """Return seeds that no environment of a training run with this ``seed`` has.

    Args:
      generation: Each has its own; ``num_envs`` times generations at most 2^17.
    """
    last = NUM_SEEDS // num_envs - 1 - generation
    return seed_block(seed, inferencer=last, num_inferencers=last + 1, num_envs=num_envs)


def _quota(num_episodes: int, num_envs: int) -> np.ndarray:
    """Return how many episodes each environment plays: equal, but for one."""
    at_least(1, "num_episodes", num_episodes)
    at_least(1, "num_envs", num_envs)
    num_envs = min(num_envs, num_episodes)
    quota = np.full(num_envs, num_episodes // num_envs)
    quota[: num_episodes % num_envs] += 1
    return quota


def check_spaces(policy: Policy, adapter: EnvAdapter) -> None:
    """Raise UsageError unless the policy observes and does what the environment has.

    Nor can it be evaluated where nobody steps the environment.
    """
    if hasattr(adapter, "make_cycle"):
        raise UsageError(
            "clients drive this environment, so that no policy can be evaluated in it; leave out "
            "--eval-every-env-steps, and evaluate in the environment that the clients play, by "
            "sebulba.evaluate(sebulba.load_policy(RUN), ENV)"
        )
    for name in ("observation_space", "action_space"):
        of_env, of_policy = getattr(adapter.spec, name), getattr(policy.spec, name)
        if of_env != of_policy:
            raise UsageError(
                f"{name}={of_env} of the environment is not the policy's {of_policy}; "
                "evaluate in the environment that it was trained in"
            )


class _Tally:
    """Counts the episodes of an evaluation, until each environment has played its part."""

    def __init__(
        self, quota: np.ndarray, max_episode_steps: int, spec: EnvSpec | MultiAgentSpec
    ) -> None:
        """Count from nothing.

        Args:
          quota: ``[B]``, how many episodes each environment plays.
        """
        self._teams = getattr(spec, "teams", ())
        self._slots = {name: group.slots for name, group in getattr(spec, "groups", {}).items()}
        self.quota = quota
        self._limit = max_episode_steps
        self._ended: list[list[tuple[float, int, np.ndarray]]] = [[] for _ in quota]
        """Return, length and returns of slots of the episodes that count, by environment."""
        self._return, self._length = np.zeros(len(quota)), np.zeros(len(quota), np.int64)
        self._of_slots = np.zeros((len(quota), sum(map(len, self._slots.values()))))
        """``[B, A]``: what the slots of all groups got so far."""
        self._plays = quota > 0
        """``[B]``: which environments have episodes left to play."""
        self._num_cut = 0

    @property
    def is_done(self) -> bool:
        """Whether no environment has an episode left to play."""
        return not self._plays.any()

    @property
    def num_done(self) -> int:
        """How many episodes have ended, or were cut."""
        return sum(map(len, self._ended))

    @property
    def longest(self) -> int:
        """Steps of the longest episode that is being played."""
        return int(self._length[self._plays].max(initial=0))

    def add(self, unclipped_reward: PyTree, played: np.ndarray, ended: np.ndarray) -> None:
        """Add a step.

        Args:
          unclipped_reward: ``[B]``; with many agents ``[B, A]`` by group.
          played: ``[B]`` bool: it was a transition.
          ended: ``[B]`` bool: an episode ended.
        """
        self._return += mean_of_slots(unclipped_reward)
        if self._slots:
            self._of_slots += np.concatenate(
                [unclipped_reward[name] for name in self._slots], axis=-1
            )
        self._length += played
        for i in np.flatnonzero(ended).tolist():
            self._end(i)
        for i in np.flatnonzero(self._plays & (self._length >= self._limit)).tolist():
            self._end(i)
            self._plays[i] = False
            self._num_cut += 1

    def _end(self, i: int) -> None:
        if self._plays[i]:
            of_slots = self._of_slots[i].copy()
            self._ended[i].append((float(self._return[i]), int(self._length[i]), of_slots))
            self._plays[i] = len(self._ended[i]) < self.quota[i]
        self._return[i], self._length[i] = 0.0, 0
        self._of_slots[i] = 0.0

    def evaluation(self) -> Evaluation:
        """Return the episodes, in the order of their environments."""
        returns, lengths, of_slots = zip(*itertools.chain(*self._ended), strict=True)
        names = [(group, slot) for group, slots in self._slots.items() for slot in slots]
        by_slot = dict(zip(names, np.array(of_slots).T, strict=True))
        by_group = {
            group: np.mean([by_slot[group, slot] for slot in slots], axis=0)
            for group, slots in self._slots.items()
        }
        return Evaluation(
            np.array(returns),
            np.array(lengths),
            self._num_cut,
            int(self.quota.sum()) - len(returns),
            by_group,
            {f"{group}/{slot}": returns for (group, slot), returns in by_slot.items()},
            self._teams,
        )


def mean_of_slots(reward: PyTree) -> np.ndarray:
    """Return rewards ``[B]``: with many agents, the mean over all slots of all groups."""
    if not isinstance(reward, dict):
        return reward
    return np.concatenate(list(reward.values()), axis=-1).mean(axis=-1, dtype=np.float64)


def _play(
    policy: Policy,
    adapter: EnvAdapter,
    tally: _Tally,
    stop: threading.Event,
    progress: Progress | None = None,
    observe: ObserveStep | None = None,
) -> Evaluation | None:
    """Begin new episodes and play until ``tally`` is done; None as soon as ``stop`` is set."""
    state = policy.new_state(len(tally.quota))
    output = adapter.reset()
    while not tally.is_done:
        if stop.is_set():
            return None
        seen = env_step_of(output, ())
        action, state = policy.act(seen, state)
        output = adapter.step(action)
        if observe is not None:
            observe(seen, action, output)
        reward, ended, inserted, *_ = info_columns(
            output.unclipped_reward, output.episode_end, env_step_of(output, action), ()
        )
        tally.add(reward, ~np.asarray(inserted), ended)
        if progress is not None:
            progress(tally.num_done, tally.longest)
    return tally.evaluation()
