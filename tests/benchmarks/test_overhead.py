"""``benchmarks overhead``: its arithmetic, its form, and that its environment does nothing."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

from benchmarks.studies import overhead
from benchmarks.studies.null import NullAgent, NullConfig, NullPool, NullVectorEnv
from benchmarks.studies.tables import differences
from sebulba.envs import env_spec, make_env_factory
from sebulba.envs.envpool_adapter import EnvpoolAdapter
from sebulba.envs.gymnasium_adapter import GymnasiumAdapter
from sebulba.tools.bench import harness
from sebulba.types import EnvStep, RunSpec


def test_differences_are_within_a_round():
    figures = {"loop": [30.0, 50.0, 41.0], "bare": [10.0, 40.0, 20.0]}
    assert differences(figures, "loop", "bare") == [20.0, 10.0, 21.0]


def test_the_key_is_the_median_over_the_adapter_of_the_fast_default():
    keys = overhead.keys_of(
        {"envpool overhead": [20.0, 10.0, 21.0], "gymnasium overhead": [30.0, 31.0, 33.0]}
    )
    assert keys == {
        "overhead_us_per_step": 20.0,
        "overhead_us_per_step_lowest": 10.0,
        "overhead_us_per_step_highest": 21.0,
        "gymnasium_overhead_us_per_step": 31.0,
    }


@pytest.mark.parametrize(
    ("make_env", "adapter_class"), [(NullPool, EnvpoolAdapter), (NullVectorEnv, GymnasiumAdapter)]
)
def test_each_null_environment_goes_through_its_adapter_and_never_changes(make_env, adapter_class):
    adapter = make_env_factory(make_env)(3, [7, 8, 9])
    assert isinstance(adapter, adapter_class)
    first = adapter.reset()
    for action in ([0, 1, 0], [1, 1, 0]):
        output = adapter.step(np.array(action, np.int32))
        assert not output.terminated.any() and not output.truncated.any()
        assert not output.is_first.any() and not output.reward.any()
        np.testing.assert_array_equal(output.obs, first.obs)
    adapter.close()


def test_the_null_agent_acts_inside_its_space_and_counts():
    agent = NullAgent(env_spec(NullVectorEnv), NullConfig())
    state = agent.new_state(jax.random.key(0), RunSpec(3, 1, 5, 1))
    obs = np.array([[0.5, 0, 0, 0], [-0.5, 1, 1, 1], [0.1, 0, 0, 0]], np.float32)
    flag = np.zeros(3, np.bool_)
    env_step = EnvStep(obs, np.zeros(3, np.int32), np.zeros(3, np.float32), flag, flag, flag)
    output, steps = agent.step(state.networks, state.step[0], env_step)
    assert output.action.tolist() == [1, 0, 1] and output.action.dtype == np.int32
    assert steps.tolist() == [1, 1, 1]


def test_what_is_between_the_phases_is_the_rest_of_the_total():
    pieces = dict.fromkeys(["policy program", "environment", "adapter", "statistics", "timer"], 1.5)
    rows = overhead.breakdown(20.0, {"act": 9.0, "env_step": 4.0, "finish": 3.0}, pieces)
    assert rows["between the phases"] == ["4.0", "timer 1.5"]
    assert rows["act"] == ["9.0", "policy program 1.5"]
    assert rows["env_step"] == ["4.0", "environment 1.5 + adapter 1.5"]


def test_the_record_has_the_promised_keys(tmp_path, capsys):
    file = tmp_path / "overhead.json"
    overhead.run(repeats=2, num_cycles=2, steps_per_cycle=11, json_file=str(file))
    record = json.loads(file.read_text())
    rounds = record["figures"]
    assert all(len(values) == 2 for values in rounds.values())
    assert rounds["envpool overhead"] == differences(rounds, "envpool loop", "envpool bare")
    assert record["overhead_us_per_step"] == pytest.approx(np.median(rounds["envpool overhead"]))
    assert {"config", "machine", "versions", "commit", "commit_date", "is_modified"} <= set(record)
    assert record["phases_us"]["envpool"]["act"] > 0
    assert "overhead_us_per_step" in capsys.readouterr().out


def test_the_machine_is_described():
    machine = harness.machine()
    assert machine["cores"] >= 1 and machine["memory_gb"] > 0
    assert machine["devices"] == [device.device_kind for device in jax.devices()]
