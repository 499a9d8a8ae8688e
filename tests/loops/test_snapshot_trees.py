"""Trees of a loop in a snapshot, by names that older checkpoints have."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

import sebulba
from sebulba.agents.configs import PPOConfig, make_agent
from sebulba.loops.resuming import read_state, spaces_of
from sebulba.loops.snapshot_trees import SnapshotReader, SnapshotWriter
from sebulba.types import RunSpec, StepInfos
from tests.support.tiny import CountingEnv


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


def test_statistics_that_an_older_checkpoint_has_in_its_experience_alone_are_read():
    config = PPOConfig(normalize_observations=True, epochs=1, minibatches=1)
    agent, run = make_agent(sebulba.env_spec(CountingEnv), config), RunSpec(2, 1, 4, 1)
    keys = (jax.random.key(1), jax.random.key(2))
    state = agent.new_state(jax.random.key(0), run)
    assert jax.tree.leaves(agent.lasting_experience(state.experience))
    record = {
        "run": dataclasses.asdict(run),
        "counters": {"env_steps": 0},
        "inferencers": [{"has_step_state": True}],
        "spaces": spaces_of(agent.spec),
    }
    writer = SnapshotWriter()
    writer.record.update(record)
    for name in ("networks", "opt", "experience"):
        writer.add(name, getattr(state, name))
    writer.add("step/0", state.step[0])
    read = read_state(agent, SnapshotReader(writer.snapshot()), run, keys, False)
    jax.tree.map(np.testing.assert_array_equal, read.state.experience, state.experience)
    assert read.notes == []
