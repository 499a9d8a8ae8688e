"""Gathers the metrics of a window of time into one record."""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from sebulba.errors import NotFiniteError, UsageError, shown
from sebulba.metrics.counters import EPISODES_AVERAGED, Counters
from sebulba.types import EnvSpec, MultiAgentSpec, StepInfos

MOST_SLOTS_APART = 8
"""A group with more slots has one return in the metrics and not one for each."""


Teams = Mapping[str, Sequence[tuple[str, int]]]
"""Groups and numbers of the slots of teams, by name."""


def teams_of(spec: EnvSpec | MultiAgentSpec) -> Teams:
    """Return the teams whose returns are reported: the whole, named "", if it cooperates, and every
    population within it, of at least two slots each."""
    if not isinstance(spec, MultiAgentSpec):
        return {}
    numbers = {
        f"{name}/{slot}": (name, number)
        for name, group in spec.groups.items()
        for number, slot in enumerate(group.slots)
    }
    return {
        team.name: [numbers[slot] for slot in team.slots]
        for team in spec.teams
        if len(team.slots) > 1 and (team.name or team.payoff == "cooperative")
    }


class RecentEpisodes:
    """Returns and lengths of the last ``EPISODES_AVERAGED`` episodes that ended."""

    def __init__(self, teams: Teams | None = None) -> None:
        """Begin without episodes; ``teams`` are those whose returns are reported."""
        self.teams = teams or {}
        self._returns: collections.deque[float] = collections.deque(maxlen=EPISODES_AVERAGED)
        self._lengths: collections.deque[int] = collections.deque(maxlen=EPISODES_AVERAGED)
        self._slots: dict[str, collections.deque[list[float]]] = {}
        """Returns of the slots of each group, where there are groups."""

    def add(self, step_infos: StepInfos) -> None:
        """Add the episodes that ended in one cycle."""
        self._returns.extend(step_infos.episode_returns.tolist())
        self._lengths.extend(step_infos.episode_lengths.tolist())
        for group, returns in dict(step_infos.slot_returns).items():
            self._of_group(group).extend(returns.tolist())

    def _of_group(self, group: str) -> collections.deque[list[float]]:
        return self._slots.setdefault(group, collections.deque(maxlen=EPISODES_AVERAGED))

    def state(self) -> list[Any]:
        """Return the returns and the lengths, and those of slots by group, as JSON."""
        slots = {
            group: [[None if math.isnan(x) else x for x in one] for one in returns]
            for group, returns in self._slots.items()
        }
        return [list(self._returns), list(self._lengths), *([slots] if slots else [])]

    @classmethod
    def restored(cls, state: list[Any], teams: Teams | None = None) -> RecentEpisodes:
        """Return the episodes whose ``state()`` this is."""
        episodes = cls(teams)
        episodes._returns.extend(state[0])
        episodes._lengths.extend(int(length) for length in state[1])
        for group, returns in (state[2] if len(state) > 2 else {}).items():
            known = ([math.nan if x is None else x for x in one] for one in returns)
            episodes._of_group(group).extend(known)
        return episodes

    def means(self) -> dict[str, float | None]:
        """Return mean return and length, None before the first episode, and of how many.

        With many agents also ``episode_return_mean/GROUP``, the mean over the slots of a group,
        and ``episode_return_mean/GROUP/NUMBER`` of each slot where there are several; and
        ``team_return_mean``, the mean of the sums over all agents where they cooperate, and
        ``team_return_mean/POPULATION`` of each population within the whole.
        """
        there_are = len(self._returns) > 0
        return {
            "episode_return_mean": float(np.mean(self._returns)) if there_are else None,
            "episode_length_mean": float(np.mean(self._lengths)) if there_are else None,
            "episodes_averaged": len(self._returns),
            **{
                f"episode_return_mean/{name}": value
                for group, returns in self._slots.items()
                for name, value in _means_of_slots(group, np.array(list(returns), np.float64))
            },
            **self._means_of_teams(),
        }

    def _means_of_teams(self) -> dict[str, float]:
        if not any(self._slots.values()):
            return {}
        returns = {group: np.array(list(rows), np.float64) for group, rows in self._slots.items()}
        means = {}
        for name, slots in self.teams.items():
            of_slots = [returns[group][:, slot] for group, slot in slots]
            metric = f"team_return_mean/{name}" if name else "team_return_mean"
            means[metric] = float(np.nansum(of_slots, axis=0).mean())
        return means

    def score(self) -> float | None:
        """Return the mean return, None until there are ``EPISODES_AVERAGED`` episodes."""
        return float(np.mean(self._returns)) if len(self._returns) == EPISODES_AVERAGED else None


def _means_of_slots(group: str, returns: np.ndarray) -> Iterator[tuple[str, float | None]]:
    """Yield the mean of a group's returns ``[N, A]``, and of each slot, over those that acted.

    Before the first episode it is None, and slots are not known.
    """
    if not len(returns):
        yield group, None
        return
    acted = ~np.isnan(returns)
    yield group, _mean(returns[acted])
    if 1 < returns.shape[1] <= MOST_SLOTS_APART:
        for slot in range(returns.shape[1]):
            yield f"{group}/{slot}", _mean(returns[acted[:, slot], slot])


def _mean(x: np.ndarray) -> float | None:
    return float(np.mean(x)) if len(x) else None


class MetricWindow:
    """Gathers what happened since the last record."""

    def __init__(self, counters: Counters, began: float) -> None:
        """Open the first window of a run; ``began`` is its start by ``time.perf_counter()``."""
        self._counters = counters
        self._began = began
        self._open()

    def _open(self) -> None:
        self._opened = time.perf_counter()
        self._env_steps = self._counters.env_steps
        self._updates = self._counters.updates
        self._lags: list[int] = []
        self._observed: dict[str, list[Any]] = collections.defaultdict(list)
        self._queue_fill: list[float] = []

    @property
    def is_empty(self) -> bool:
        """Whether no trajectory was consumed since the window opened."""
        return not self._lags

    @property
    def seconds(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self._began

    @property
    def age_s(self) -> float:
        """Seconds since the window opened."""
        return time.perf_counter() - self._opened

    def add_cycle(self, lag: int, queue_fill: float) -> None:
        """Add a consumed trajectory: its policy lag, and how full the queue was then (0 to 1)."""
        self._lags.append(lag)
        self._queue_fill.append(queue_fill)

    def add_observed(self, metrics: Mapping[str, Any] | None) -> None:
        """Add what ``observe_cycle`` returned: numbers are averaged, the last image is kept.

        Raises:
          UsageError: It is neither None nor a dict of those by name.
        """
        if not isinstance(metrics, Mapping | None):
            raise _not_metrics(metrics)
        for name, value in (metrics or {}).items():
            array = _as_numbers(value)
            if not isinstance(name, str) or array is None:
                raise _not_metrics({name: value})
            if array.ndim == 0:
                self._observed[name].append(float(array))
            else:
                self._observed[name] = [array]

    def close(
        self,
        update_metrics: Mapping[str, float],
        episodes: RecentEpisodes,
        more: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Return the record of this window and open the next.

        Args:
          update_metrics: Means over the window's updates.
          episodes: The last training episodes.
          more: Further metrics for the record.

        Raises:
          NotFiniteError: The loss or another metric of an update is NaN or infinite.
        """
        self.check_finite(update_metrics)
        counters, now = self._counters, time.perf_counter()
        elapsed = max(now - self._opened, 1e-9)
        record: dict[str, Any] = {
            "updates": counters.updates,
            "env_steps": counters.env_steps,
            "frames": counters.frames,
            "cycles": counters.cycles,
            "seconds": now - self._began,
            "env_steps_per_s": (counters.env_steps - self._env_steps) / elapsed,
            "updates_per_s": (counters.updates - self._updates) / elapsed,
            "episodes": counters.episodes,
            **episodes.means(),
            "policy_lag_mean": float(np.mean(self._lags)) if self._lags else None,
            "policy_lag_max": max(self._lags, default=None),
            "policy_lag_counts": dict(sorted(collections.Counter(self._lags).items())),
            "queue_fill": float(np.mean(self._queue_fill)) if self._queue_fill else None,
            "dropped_cycles": counters.dropped_cycles,
            "env_restarts": counters.env_restarts,
            "skipped_updates": counters.skipped_updates,
            "masked_truncations": counters.masked_truncations,
            "loss": None,
            **update_metrics,
            **{k: v[0] if np.ndim(v[0]) else float(np.mean(v)) for k, v in self._observed.items()},
            **more,
        }
        self._open()
        return record

    def check_finite(self, update_metrics: Mapping[str, float]) -> None:
        """Raise NotFiniteError if one of these metrics is NaN or infinite."""
        for name, value in sorted(update_metrics.items(), key=lambda item: item[0] != "loss"):
            if not math.isfinite(value):
                raise NotFiniteError(
                    f"{name} = {value} in updates {self._updates} to {self._counters.updates}; "
                    "expected a finite number. A lower learning rate, gradient clipping, or "
                    "scaled rewards and observations are the usual remedies"
                )


def _as_numbers(value: Any) -> np.ndarray | None:
    """Return a number, or an image ``[H, W, C]``, as an array; None if it is neither."""
    try:
        array = np.asarray(value)
    except Exception:  # a user's object may raise anything when converted
        return None
    is_real = np.can_cast(array.dtype, np.float64, "same_kind")  # bfloat16 too
    return array if is_real and array.ndim in (0, 3) else None


def _not_metrics(got: Any) -> UsageError:
    return UsageError(
        f"observe_cycle returned {shown(got)}; it must return None, or a dict of numbers (or "
        "images [height, width, channels]) by name, such as {'speed': 1.5}"
    )


def time_shares(
    before: Mapping[str, float], after: Mapping[str, float], elapsed_s: float
) -> dict[str, float]:
    """Return the share of ``elapsed_s`` that each phase took between two readings of a timer.

    A share that would be negative is 0: the timer is that of an Inferencer replaced meanwhile.
    """
    seconds = {name: max(0.0, after[name] - before.get(name, 0.0)) for name in after}
    return {name: one / max(elapsed_s, 1e-9) for name, one in seconds.items()}
