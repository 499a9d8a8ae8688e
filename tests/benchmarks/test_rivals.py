"""``benchmarks rivals``: what the other libraries are given, and what is said if one is missing."""

from __future__ import annotations

import json
import sys
import types

import pytest

from benchmarks.studies import rival, rivals
from sebulba.errors import UsageError


def test_all_train_the_same():
    for task in rivals.TASKS.values():
        config = task.experiment()
        options = task.of_library("sbx")["options"]
        replay = config.agent.replay
        assert options["gradient_steps"] == replay.updates_per_cycle
        assert options["train_freq"] == config.steps_per_cycle
        assert options["batch_size"] == replay.batch_size
        assert options["policy_kwargs"]["net_arch"] == list(config.agent.torso.hidden_sizes)
        per_cycle = config.num_envs * config.steps_per_cycle
        assert replay.warm_up_cycles * per_cycle == options["learning_starts"]
        assert task.updates_per_env_step == replay.updates_per_cycle / per_cycle


def test_a_library_that_is_missing_is_named_with_the_extra():
    given = {**rivals.TASKS["dqn"].of_library("sbx"), "library": "no_such_library"}
    with pytest.raises(UsageError, match=r"sbx does not run by .*no_such_library.*\[rivals\]"):
        rivals.Rival(sys.executable, "sbx", given, 0.1)
    with pytest.raises(UsageError, match=r"--sb3-python /no/python does not run"):
        rivals.Rival("/no/python", "sb3", given, 0.1)


def test_a_ratio_is_taken_within_a_round_and_over_the_faster_of_it():
    speeds = {"sebulba": [6.0, 8.0, 9.0], "sb3": [2.0, 4.0, 9.0], "sbx": [3.0, 2.0, 3.0]}
    keys = rivals.keys_of("sac", speeds, speeds)
    assert keys["sac_over_sb3"] == 2.0
    assert keys["sac_over_sbx"] == 3.0
    assert keys["sac_over_faster"] == 2.0
    assert keys["sac_cpu_of_sb3_over_ours"] == 0.5


def test_a_rival_counts_from_one_collection_to_another(monkeypatch):
    class BaseCallback:
        pass

    class Algorithm:
        num_timesteps = _n_updates = 0

        def learn(self, most, *, callback, **options):
            for _ in range(most):
                callback._on_rollout_start()
                for _ in range(4):
                    self.num_timesteps += 2
                    if not callback._on_step():
                        return
                self._n_updates += 8

    name = "stable_baselines3.common.callbacks"
    monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(BaseCallback=BaseCallback))
    for part in ("stable_baselines3", "stable_baselines3.common"):
        monkeypatch.setitem(sys.modules, part, types.ModuleType(part))
    measured = json.loads(json.dumps(rival.measure(Algorithm(), 0.01)))
    assert measured["wall_s"] >= 0.01
    assert measured["env_steps"] == measured["updates"] >= 16
