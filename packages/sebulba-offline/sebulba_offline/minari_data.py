"""Data sets of Minari (extra ``minari``), read and written.

A Minari data set is in Minari's own folder (``MINARI_DATASETS_PATH``). Nothing is downloaded here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from sebulba.envs.spaces import canonical_action_space, canonical_observation_space
from sebulba.errors import UsageError, shown, text_of
from sebulba.types import PyTree
from sebulba_offline.dataset import Dataset, DatasetWriter, Rows, load


def import_minari() -> Any:
    """Return the module ``minari``.

    Raises:
      UsageError: It is not installed.
    """
    try:
        import minari
    except ImportError as error:
        raise UsageError(
            f"Minari cannot be imported ({error}); pip install 'sebulba-offline[minari]'"
        ) from error
    return minari


def from_minari(dataset_id: str, folder: str | Path) -> Dataset:
    """Write a data set of Minari into a folder, and return it.

    Args:
      dataset_id: Such as ``mujoco/halfcheetah/medium-v0``.
      folder: Made if it is not there.

    Raises:
      UsageError: There is no such data set, or it has spaces or values that agents cannot take.
    """
    minari = import_minari()
    try:
        source = minari.load_dataset(dataset_id)
    except Exception as error:  # of files of others
        raise UsageError(
            f"the Minari data set {shown(dataset_id)} cannot be read ({text_of(error)}); minari "
            "list local names those that are here, minari download fetches one"
        ) from error
    observation = canonical_observation_space(source.observation_space)
    action = canonical_action_space(source.action_space)
    env = source.env_spec.id if source.env_spec is not None else ""
    about = {"minari": dataset_id}
    with DatasetWriter(folder, observation, action, env=env, about=about) as writer:
        for episode in source.iterate_episodes():
            if len(episode.rewards):
                writer.add(_rows(episode, observation, action))
    return load(folder)


def _rows(episode: Any, observation: Any, action_space: Any) -> Rows:
    """Return the rows of one episode of L steps, which has L + 1 observations."""
    length = len(episode.rewards)
    action = np.asarray(episode.actions).astype(action_space.dtype)
    flags = np.zeros((3, length + 1), np.bool_)
    flags[0, -1] = episode.terminations[-1]
    flags[1, -1] = not flags[0, -1]  # by a limit, or where the recording ended
    flags[2, 0] = True
    return Rows(
        _cast(observation, episode.observations),
        np.concatenate([action, np.zeros_like(action[:1])]),
        np.append(0.0, episode.rewards).astype(np.float32),
        *flags,
    )


def _cast(space: Any, values: PyTree) -> PyTree:
    if isinstance(space, spaces.Dict):
        return {name: _cast(space[name], values[name]) for name in sorted(space.spaces)}
    return np.asarray(values).astype(space.dtype)


def to_minari(dataset: Dataset, dataset_id: str, **facts: str) -> None:
    """Write a data set as one of Minari.

    Args:
      dataset: From ``load``.
      dataset_id: Name with a version, such as ``cartpole/clone-v0``.
      **facts: Such as ``author`` and ``description``, as ``minari.create_dataset_from_buffers``
        takes them.

    Raises:
      UsageError: Minari refuses it.
    """
    minari = import_minari()
    from minari.data_collector import EpisodeBuffer

    buffers = [EpisodeBuffer(**one) for one in _buffers(dataset)]
    try:
        minari.create_dataset_from_buffers(
            dataset_id,
            buffers,
            observation_space=dataset.observation_space,
            action_space=dataset.action_space,
            **facts,
        )
    except (ValueError, AssertionError, TypeError) as error:
        raise UsageError(
            f"Minari refuses {shown(dataset_id)} ({text_of(error)}); use a name such as "
            "cartpole/clone-v0 that is new"
        ) from error


def _buffers(dataset: Dataset) -> Iterator[dict[str, Any]]:
    told = dataset.episodes()
    for number, (first, length) in enumerate(zip(told.first, told.lengths, strict=True)):
        rows = dataset.rows.part(first, first + length + 1)
        yield {
            "id": number,
            "observations": rows.obs,
            "actions": rows.action[:-1],
            "rewards": list(rows.reward[1:]),
            "terminations": list(rows.terminated[1:]),
            "truncations": list(rows.truncated[1:]),
        }
