"""kill -9 at random moments, again and again: the run goes on where it was saved, until it is done.

Every round starts the same command with ``--resume`` and kills it: while it starts, or some time
into training, with a checkpoint every second. Where a replay is saved apart the command is one with
a lower limit for that.
"""

from __future__ import annotations

import itertools
import json
import re
import time
from pathlib import Path

import numpy as np
import pytest

import sebulba
from sebulba.checkpoints.store import CheckpointStore
from sebulba.metrics.plots import read_records
from tests.faults.children import Child, newest_whole, training_began
from tests.faults.counts import rounds

EARLIEST_S, LATEST_START_S, LATEST_TRAINING_S = 0.5, 8.0, 4.0
"""When a process is killed: so long after its start, or after its first metrics."""
FOR_EVER, LITTLE_MORE = "1000000000", 20_000
"""Environment steps."""

SMALL = ["--agent.torso.hidden-sizes", "8", "--cycle", "stepped", "--no-anneal-learning-rate"]
RUNS = {
    # Module, words, rounds in short and in long.
    "stepped": ("sebulba", ["cartpole", "--num-envs", "16", *SMALL], (2, 12)),
    "fused": ("sebulba", ["cartpole", "--no-anneal-learning-rate"], (0, 8)),
    "dqn with its replay apart": (
        "tests.faults.small_replays",
        [
            *("cartpole-dqn", *SMALL, "--agent.replay.capacity", "20000"),
            *("--checkpoint.replay-every-s", "2", "--eval-every-env-steps", "2000"),
            *("--eval-episodes", "5", "--eval-num-envs", "5"),
        ],
        (1, 10),
    ),
}


def kill_at_random(child: Child, run: Path, rng: np.random.Generator) -> None:
    if rng.random() < 0.3:
        delay = rng.uniform(EARLIEST_S, LATEST_START_S)
    else:
        child.wait_until(training_began(run))
        delay = child.age_s + rng.uniform(0, LATEST_TRAINING_S)
    child.wait_until(lambda: child.age_s >= delay)
    assert not child.has_ended, child.printed
    child.kill()


def resumed_at(child: Child) -> int | None:
    """Return where the child said that it went on; None if it said nothing."""
    found = re.search(r"resumed at ([\d,]+) env steps", child.printed)
    return int(found[1].replace(",", "")) if found else None


def check_metrics(run: Path) -> list[dict]:
    """Return the records, each of which goes on where the one before ended."""
    records = read_records(run / "metrics.jsonl") if (run / "metrics.jsonl").exists() else []
    for before, record in itertools.pairwise(records):
        # An evaluation that is played after training has a record of its own.
        is_evaluation = record.get("eval_env_steps") is not None
        assert record["env_steps"] > before["env_steps"] - is_evaluation
    env_steps_a_cycle = {record["env_steps"] / record["cycles"] for record in records}
    assert len(env_steps_a_cycle) <= 1
    return records


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", [*RUNS])
def test_a_run_that_is_killed_at_random_moments_goes_on_until_it_is_done(
    name, tmp_path, compile_cache_folder, record_fault
):
    module, words, counts = RUNS[name]
    if not (num_rounds := rounds(*counts)):
        pytest.skip("one of the long counts only")
    run = tmp_path / "run"
    words = [
        *("train", *words),
        *("--run-dir", str(run), "--resume", "--checkpoint.every-s", "1"),
        *("--compile-cache", str(compile_cache_folder), "--total-env-steps"),
    ]
    rng = np.random.default_rng(7)
    expected, seen = None, dict(kills=num_rounds, trained=0, resumed=0, in_a_save=0)
    for round_ in range(num_rounds):
        with Child([*words, FOR_EVER], tmp_path / f"{round_}.log", module) as child:
            kill_at_random(child, run, rng)
        at = resumed_at(child)
        if at is not None:
            assert expected is not None and at == expected.env_steps
            seen["resumed"] += 1
        elif expected is not None:
            assert "env steps/s" not in child.printed  # it had not begun
        before, expected = expected, newest_whole(run / "checkpoints")
        if before is not None:
            assert expected is not None
            for counter, value in before.counters.items():
                assert expected.counters[counter] >= value
        records = check_metrics(run)
        seen["trained"] += bool(records)
        seen["in_a_save"] += bool(list(run.rglob(".partial-*")))
    last = expected.env_steps if expected is not None else 0
    with Child([*words, str(last + LITTLE_MORE)], tmp_path / "last.log", module) as child:
        assert child.wait() == 0, child.printed
    assert resumed_at(child) == (last or None)
    check_the_end(run, last + LITTLE_MORE)
    record_fault(name, **seen)


LOCKSTEP = [
    *("train", "cartpole", "--schedule", "lockstep", *SMALL),
    *("--num-envs", "4", "--checkpoint.every-s", "0.3"),
]
IN_LOCKSTEP = {
    "lockstep": (["--env.backend", "gymnasium"], 16_000),
    "lockstep of PettingZoo": (["--env.id", "tests.support.pettingzoo_echo:EchoAEC"], 2_400),
    "lockstep of JAX": (
        ["--env.id", "tests.envs.test_jax_populations:Duel", "--cycle", "fused"],
        100_000,
    ),
}
"""Options and env steps."""


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", IN_LOCKSTEP)
def test_a_run_in_lockstep_is_the_same_bit_for_bit_however_often_it_is_killed(
    name, tmp_path, compile_cache_folder, record_fault
):
    if "PettingZoo" in name:
        pytest.importorskip("pettingzoo", reason="the package pettingzoo is not installed")
    options, env_steps = IN_LOCKSTEP[name]
    words = [*LOCKSTEP, *options, "--compile-cache", str(compile_cache_folder), "--resume"]
    never = tmp_path / "never"
    end = ["--total-env-steps", str(env_steps)]
    with Child([*words, *end, "--run-dir", str(never)], tmp_path / "never.log") as child:
        assert child.wait() == 0, child.printed
    run, rng, kills = tmp_path / "run", np.random.default_rng(11), 0
    for round_ in range(rounds(1, 10)):
        # So far at most, so that there is something left to be killed in.
        part = ["--total-env-steps", str(env_steps * (round_ + 1) // rounds(2, 11))]
        with Child([*words, *part, "--run-dir", str(run)], tmp_path / f"{round_}.log") as child:
            if child.wait_until(training_began(run)):
                time.sleep(rng.uniform(0.3, 1.5))
            kills += not child.has_ended
            child.kill()
    with Child([*words, *end, "--run-dir", str(run)], tmp_path / "last.log") as child:
        assert child.wait() == 0, child.printed
    assert "new episodes" not in child.printed
    ends = [
        CheckpointStore(path / "checkpoints").load(numbers[-1])
        for path in (never, run)
        for numbers in [CheckpointStore(path / "checkpoints").numbers()]
    ]
    assert ends[0].record["counters"] == ends[1].record["counters"]
    assert ends[0].arrays.keys() == ends[1].arrays.keys()
    for array, values in ends[0].arrays.items():
        np.testing.assert_array_equal(values, ends[1].arrays[array], err_msg=array)
    record_fault(name, kills=kills)


def check_the_end(run: Path, env_steps: int) -> None:
    """Check that everything is there, and nothing else."""
    records = check_metrics(run)
    counters = newest_whole(run / "checkpoints").counters
    assert records[-1]["env_steps"] == counters["env_steps"] >= env_steps
    assert records[-1]["updates"] == counters["updates"]
    assert json.loads((run / "config.json").read_text())["total_env_steps"] == env_steps
    assert "exit code 0: done" in (run / "ended.txt").read_text()
    assert (run / "learning_curve.png").stat().st_size
    sebulba.load_policy(run)
    halves = [path for path in run.rglob("*") if "partial" in path.name or ".new" in path.name]
    assert not halves
