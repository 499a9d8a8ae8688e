"""Trees of a loop in a snapshot, by names that older checkpoints have."""

from __future__ import annotations

import numpy as np

from sebulba.loops.snapshot_trees import SnapshotReader, SnapshotWriter
from sebulba.types import StepInfos


def test_the_episodes_of_a_round_in_flight_are_read_by_their_older_names():
    rows = [np.full((2, 3), float(i)) for i in range(4)]
    infos = StepInfos(*rows, np.ones(1), np.ones(1))
    older = infos._asdict()
    older["true_reward"] = older.pop("unclipped_reward")
    writer = SnapshotWriter()
    writer.add("round/0/3", {name: x for name, x in older.items() if isinstance(x, np.ndarray)})
    found = SnapshotReader(writer.snapshot())._step_infos("round/0/3")
    for field in ("unclipped_reward", "episode_end", "episode_returns"):
        np.testing.assert_array_equal(getattr(found, field), getattr(infos, field))
