"""SIGTERM and Ctrl-C at random moments: the run ends soon, saved, and goes on where it was."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.classic_control import CartPoleEnv

from sebulba.metrics.plots import read_records
from tests.faults.children import Child, Whole, newest_whole, training_began
from tests.faults.counts import rounds
from tests.faults.test_kill import resumed_at

PROMISED_S = 5.0
"""From signal to exit, after the program or compile in flight."""
DEADLINE_S = 10 * PROMISED_S
LITTLE_MORE = 1_000
"""Environment steps."""

SMALL = [
    *("--num-envs", "8", "--agent.torso.hidden-sizes", "8", "--no-anneal-learning-rate"),
    *("--eval-every-env-steps", "4000", "--eval-num-envs", "4", "--eval-episodes", "8"),
    *("--checkpoint.every-s", "0"),
]
RUNS = {
    "async": ["cartpole", *SMALL, "--cycle", "stepped"],
    "lockstep": ["cartpole", *SMALL, "--cycle", "stepped", "--schedule", "lockstep"],
    "fused": ["cartpole", *SMALL],
    "ppo": ["cartpole-ppo", *SMALL],
    "dqn": ["cartpole-dqn", *SMALL],
    "workers": ["cartpole", *SMALL, "--env.backend", "gymnasium", "--env.vectorization", "async"],
}
"""All of them evaluate often, and save all the time."""
MOMENTS = {"import": 0.15, "compile": 0.25, "training": 0.6}
"""When the signal comes, with its share: while JAX is imported, from then to the first metrics,
and after those, in whatever the run is just doing."""


def wait_for(moment: str, child: Child, run: Path, rng: np.random.Generator) -> None:
    """Wait until some time in ``moment``, longer in it the more it is known to last."""
    if moment == "import":
        until = rng.uniform(0.05, 1.0)
    elif moment == "compile":
        child.wait_until(lambda: "sebulba:" in child.printed)
        until = child.age_s + rng.uniform(0, 4)
    else:
        child.wait_until(training_began(run))
        until = child.age_s + rng.uniform(0, 3)
    child.wait_until(lambda: child.age_s >= until)


def shell_code(code: int) -> int:
    """Return an exit code as a shell shows it: before Python handles signals, they kill it."""
    return 128 - code if code < 0 else code


def signalled(child: Child, which: int) -> float:
    """Send a signal and return the seconds until the process ended, as it should."""
    began = time.monotonic()
    child.send(which)
    code = child.wait(DEADLINE_S)
    assert shell_code(code) == 128 + which, child.printed
    return time.monotonic() - began


def check_saved(run: Path) -> Whole:
    """Check that everything is there; return where the run is to go on."""
    saved = newest_whole(run / "checkpoints")
    last = read_records(run / "metrics.jsonl")[-1]
    for name in ("env_steps", "updates", "cycles"):
        assert last[name] == saved.counters[name]
    assert re.search(r"exit code 1(30|43): stopped by", (run / "ended.txt").read_text())
    assert (run / "policy").is_dir() and (run / "learning_curve.png").exists()
    assert not list(run.rglob(".partial-*"))
    return saved


def check_goes_on(run: Path, saved: Whole, log: Path) -> None:
    """Check that the run goes on with the counters that it was saved with."""
    more = str(saved.env_steps + LITTLE_MORE)
    options = ["--total-env-steps", more, "--eval-every-env-steps", "0"]
    with Child(["resume", str(run), *options], log) as child:
        assert child.wait() == 0, child.printed
    assert resumed_at(child) == saved.env_steps
    counters, now = saved.counters, newest_whole(run / "checkpoints").counters
    if not counters["cycles"]:
        return  # it was stopped in its first compile, and began
    first = next(r for r in read_records(run / "metrics.jsonl") if r["env_steps"] > saved.env_steps)
    a_cycle = saved.env_steps // counters["cycles"]
    cycles = (first["env_steps"] - saved.env_steps) // a_cycle
    assert first["cycles"] == counters["cycles"] + cycles
    assert now["dropped_stop_cycles"] in (
        counters["dropped_stop_cycles"],
        counters["dropped_stop_cycles"] + 2,  # of an asynchronous end
    )
    assert now["policy_version"] > counters["policy_version"]
    assert now["updates"] > counters["updates"]


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_signal_at_any_moment_ends_the_run_soon_and_it_goes_on(
    tmp_path, compile_cache_folder, record_fault
):
    rng = np.random.default_rng(3)
    seconds: dict[str, list[float]] = {moment: [] for moment in MOMENTS}
    resumed = 0
    for round_ in range(rounds(3, 100)):
        # The first few are one of each, whatever is drawn.
        moment = [*MOMENTS][round_] if round_ < 3 else rng.choice([*MOMENTS], p=[*MOMENTS.values()])
        which = signal.SIGINT if round_ % 5 == 1 else signal.SIGTERM
        name = [*RUNS][round_ % len(RUNS)]
        run = tmp_path / f"{round_}"
        words = ["train", *RUNS[name], "--run-dir", str(run), "--total-env-steps", "1000000000"]
        words += ["--compile-cache", str(compile_cache_folder)]
        with Child(words, tmp_path / f"{round_}.log") as child:
            wait_for(moment, child, run, rng)
            seconds[moment].append(signalled(child, which))
        print(round_, moment, name, which, seconds[moment][-1])
        if newest_whole(run / "checkpoints") is not None:
            saved = check_saved(run)
            check_goes_on(run, saved, tmp_path / f"{round_}-resumed.log")
            resumed += 1
        else:
            assert moment != "training"
    assert resumed
    record_fault(
        "signals",
        signals=sum(map(len, seconds.values())),
        resumed=resumed,
        seconds_to_exit={moment: distribution(values) for moment, values in seconds.items()},
        promised_s=PROMISED_S,
    )


class TakesItsTimeToClose(CartPoleEnv):
    """Leaves the number of its process in a folder when it has closed."""

    def close(self) -> None:
        time.sleep(2)
        Path(os.environ["CLOSED"], str(os.getpid())).touch()


@pytest.mark.slow
@pytest.mark.parametrize("to", ["the process", "its group"])
def test_a_signal_ends_a_run_with_worker_processes_and_it_goes_on(
    to, tmp_path, compile_cache_folder, monkeypatch
):
    monkeypatch.setenv("CLOSED", str(tmp_path / "closed"))
    run, closed = tmp_path / "run", tmp_path / "closed"
    closed.mkdir()
    words = ["train", *RUNS["workers"], "--run-dir", str(run), "--total-env-steps", "1000000000"]
    words += ["--env.id", "tests.faults.test_signals:TakesItsTimeToClose"]
    words += ["--num-envs", "2", "--eval-num-envs", "1", "--eval-every-env-steps", "0"]
    words += ["--compile-cache", str(compile_cache_folder)]
    with Child(words, tmp_path / "log", in_group_of_its_own=True) as child:
        child.wait_until(training_began(run))
        if to == "its group":
            child.send_to_group(signal.SIGTERM)
            assert shell_code(child.wait(DEADLINE_S)) == 128 + signal.SIGTERM, child.printed
        else:
            signalled(child, signal.SIGTERM)
    deadline = time.monotonic() + DEADLINE_S
    while len(list(closed.iterdir())) < 2 * 2:  # of two Inferencers
        assert time.monotonic() < deadline, child.printed
        time.sleep(0.01)
    check_goes_on(run, check_saved(run), tmp_path / "resumed.log")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_signal_to_all_ends_a_run_whose_inferencers_are_processes_and_it_goes_on(
    tmp_path, compile_cache_folder, monkeypatch
):
    monkeypatch.setenv("CLOSED", str(tmp_path / "closed"))
    run, closed = tmp_path / "run", tmp_path / "closed"
    closed.mkdir()
    words = ["train", "cartpole", *SMALL, "--run-dir", str(run)]
    words += ["--total-env-steps", "1000000000"]
    words += ["--env.id", "tests.faults.test_signals:TakesItsTimeToClose", "--num-envs", "1"]
    words += ["--cluster.address", "processes", "--compile-cache", str(compile_cache_folder)]
    with Child(words, tmp_path / "log", in_group_of_its_own=True) as child:
        child.wait_until(training_began(run))
        own = str(child.pid)
        child.send_to_group(signal.SIGTERM)
        assert shell_code(child.wait(DEADLINE_S)) == 128 + signal.SIGTERM, child.printed
    processes = {path.name for path in closed.iterdir()} - {own}
    assert len(processes) == 2 and all(has_ended(pid) for pid in processes)
    check_goes_on(run, check_saved(run), tmp_path / "resumed.log")


class Spins(gymnasium.Env):
    """Never returns from a step, and leaves the number of its process in a folder."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        Path(os.environ["SPINS"], str(os.getpid())).touch()
        while True:
            pass


def has_ended(pid: str) -> bool:
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.slow
@pytest.mark.parametrize("ends", [signal.SIGKILL, signal.SIGINT])
def test_a_worker_process_that_hangs_ends_with_the_main_process(ends, tmp_path, monkeypatch):
    monkeypatch.setenv("SPINS", str(tmp_path / "pids"))
    (tmp_path / "pids").mkdir()
    words = ["train", "cartpole", "--env.id", "tests.faults.test_signals:Spins"]
    words += ["--env.vectorization", "async", "--num-envs", "2", "--run-dir", str(tmp_path / "run")]
    words += ["--num-inferencers-per-device", "1", "--compile-cache", "off"]
    with Child(words, tmp_path / "log") as child:
        child.wait_until(lambda: len(list((tmp_path / "pids").iterdir())) == 2)
        child.send(ends)
        if ends == signal.SIGINT:
            assert child.wait_until(lambda: "stopping" in child.printed)
            child.send(ends)
        child.wait(DEADLINE_S)
    workers = [path.name for path in (tmp_path / "pids").iterdir()]
    deadline = time.monotonic() + DEADLINE_S
    while not all(map(has_ended, workers)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Stuck(gymnasium.Env):
    """Returns from its first steps only."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self._steps += 1
        if self._steps > 100:
            time.sleep(1e6)
        return np.zeros(2, np.float32), 0.0, False, False, {}


@pytest.mark.slow
@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_after_a_signal_ends_at_once_what_cannot_end_by_itself(
    first, tmp_path, compile_cache_folder
):
    run = tmp_path / "run"
    words = ["train", "cartpole", "--env.id", "tests.faults.test_signals:Stuck", *SMALL]
    words += ["--run-dir", str(run), "--compile-cache", str(compile_cache_folder)]
    with Child(words, tmp_path / "log") as child:
        child.wait_until(training_began(run))
        child.send(first)
        assert child.wait_until(lambda: "stopping" in child.printed)
        child.send(signal.SIGINT)
        # Without it, the end waits for the environment, and then says that it hangs.
        assert shell_code(child.wait(DEADLINE_S)) == 130
    assert not (run / "ended.txt").exists()


def distribution(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    points = {"lowest": 0, "median": 50, "p90": 90, "highest": 100}
    return {name: round(float(np.percentile(values, at)), 3) for name, at in points.items()}
