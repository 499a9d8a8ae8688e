"""``benchmarks inference``: its arithmetic, its form, a bare loop that stays bare. Never a time."""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.studies import bare, inference
from benchmarks.studies.plain_cycle import PlainCycle
from sebulba.agents.configs import SimplePolicyGradientConfig, TorsoConfig
from sebulba.tools.bench import harness
from tests.package.test_package import MODULES, named_in
from tests.support.loop_helpers import Recorder, make_tiny_loop


def test_cases_run_in_turn_and_the_first_round_does_not_count():
    order = []
    cases = {name: lambda name=name: order.append(name) or len(order) for name in "ab"}
    assert harness.interleave(cases, 2) == {"a": [3, 5], "b": [4, 6]}
    assert order == list("ababab")


def test_keys_are_medians_and_ratios_are_within_a_round():
    figures = {
        "fused": [200.0, 300.0, 100.0],
        "stepped": [90.0, 80.0, 100.0],
        "plain": [45.0, 50.0, 50.0],
        "bare": [100.0, 100.0, 200.0],
    }
    keys = inference.keys_of(figures)
    assert keys["fused_env_steps_per_s"] == 200
    assert keys["plain_bookkeeping_env_steps_per_s"] == 50
    assert keys["fused_over_bare"] == 2.0
    assert keys["stepped_over_bare"] == 0.8
    assert keys["jit_gain"] == 2.0


def test_the_bare_loop_is_short_and_imports_nothing_of_the_package_but_types():
    source, first = inspect.getsourcelines(bare.bare_loop)
    function = ast.parse("".join(source)).body[0]
    assert isinstance(function, ast.FunctionDef)
    assert function.end_lineno is not None and function.end_lineno <= 32, first
    assert named_in(Path(bare.__file__), at_import=False) & MODULES.keys() == {"sebulba.types"}


@pytest.mark.slow
def test_plain_bookkeeping_makes_the_trajectories_of_the_stepped_cycle():
    recorded = []
    for cycle in ("stepped", PlainCycle):
        recorder = Recorder()
        loop, _ = make_tiny_loop(
            "CartPole-v1", cycle=cycle, schedule="lockstep", observe_cycle=recorder
        )
        with loop:
            loop.run(loop.new_state(0, 7), 6, 7)
        recorded.append(recorder)
    for one, other in zip(*(r.trajectories for r in recorded), strict=True):
        for x, y in zip(one.env_step, other.env_step, strict=True):
            np.testing.assert_array_equal(x, y)
        np.testing.assert_array_equal(one.action, other.action)
    for one, other in zip(*(r.step_infos for r in recorded), strict=True):
        np.testing.assert_array_equal(one.episode_returns, other.episode_returns)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_record_has_the_promised_keys(tmp_path, monkeypatch, capsys):
    file = tmp_path / "inference.json"
    small = SimplePolicyGradientConfig(torso=TorsoConfig(hidden_sizes=(5,)))
    monkeypatch.setattr(inference, "SimplePolicyGradientConfig", lambda: small)
    inference.run(repeats=2, num_cycles=2, json_file=str(file))
    record = json.loads(file.read_text())
    for key in (
        "fused_env_steps_per_s",
        "stepped_env_steps_per_s",
        "plain_bookkeeping_env_steps_per_s",
        "bare_env_steps_per_s",
        "fused_over_bare",
        "stepped_over_bare",
        "jit_gain",
    ):
        assert record[key] > 0
    assert all(len(figures) == 2 for figures in record["figures"].values())
    assert {"config", "machine", "versions", "commit"} <= record.keys()
    assert "fused_over_bare" in capsys.readouterr().out
