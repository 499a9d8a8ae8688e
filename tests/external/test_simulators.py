"""Simulators that a command starts: never too many, begun again, gone with the run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sebulba_external import simulators
from sebulba_external.environments import ENVIRONMENTS, ClientOptions
from sebulba_external.seats import Seats
from sebulba_external.simulators import Simulators

import sebulba
from sebulba.agents.configs import ImpalaConfig
from sebulba.agents.impala import Impala
from sebulba.cluster.inferencers.inferencer_server import Server
from sebulba.inference.places import Given

SLEEPER = "import sys, time; print(sys.argv[1:], flush=True); time.sleep(600)"


def wait_until(condition: Callable[[], object], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def processes_with(mark: str) -> list[int]:
    """Return the processes whose command has ``mark``, but for their shims."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if mark in words and "killpg" not in words[2]:
                found.append(int(folder.name))
    return found


def command_of(code: str, *words: str) -> str:
    return " ".join([sys.executable, "-c", f'"{code}"', *words])


def test_commands_are_filled_in_run_side_by_side_and_killed(tmp_path: Path) -> None:
    mark = f"mark-{os.getpid()}-{tmp_path.name}"
    command = command_of(SLEEPER, mark, "{address}", "{seed}", "{number}")
    started = Simulators(command, 3, "unix:/a", "secret", [7, 8, 9])
    logs = [started.folder / f"{number}.log" for number in range(3)]
    wait_until(lambda: all(log.read_bytes() for log in logs))
    assert [log.read_text().strip() for log in logs] == [
        f"['{mark}', 'unix:/a', '{7 + number}', '{number}']" for number in range(3)
    ]
    assert len(processes_with(mark)) == 3
    started.close()
    assert processes_with(mark) == []
    assert not started.folder.exists()


def test_one_that_dies_is_begun_again_and_there_are_never_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulators, "PAUSE_S", 0.1)
    mark = f"mark-{os.getpid()}-{tmp_path.name}"
    with contextlib.closing(Simulators(command_of(SLEEPER, mark), 2, "", "", [0])) as started:
        for restarts in (1, 2, 3):
            wait_until(lambda: len(processes_with(mark)) == 2)
            started.seated += 1  # it was of use
            os.kill(processes_with(mark)[0], signal.SIGKILL)
            wait_until(lambda expected=restarts: started.restarts >= expected)
            assert len(processes_with(mark)) <= 2
        assert started.error is None


def test_what_a_simulator_has_started_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulators, "PAUSE_S", 0.1)
    monkeypatch.setattr(simulators, "MOST_FRUITLESS", 1000)
    mark = f"mark-{os.getpid()}-{tmp_path.name}"
    (tmp_path / "sleeper.py").write_text("import time; time.sleep(600)")
    code = (
        "import subprocess, sys, time; "
        "subprocess.Popen([sys.executable, *sys.argv[1:]]); time.sleep(0.2)"
    )
    command = command_of(code, f"{tmp_path}/sleeper.py", mark)
    with contextlib.closing(Simulators(command, 1, "", "", [0])) as started:
        for restarts in (1, 2, 3):
            wait_until(lambda expected=restarts: started.restarts >= expected)
            assert len(processes_with(mark)) <= 2  # a command and what it starts
    wait_until(lambda: not processes_with(mark), 5)


def test_a_command_that_never_connects_ends_the_run_with_its_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(simulators, "PAUSE_S", 0.01)
    command = command_of("import sys; print('no map named moon'); sys.exit(3)")
    with contextlib.closing(Simulators(command, 1, "", "", [0])) as started:
        wait_until(lambda: started.error)
        text = str(started.error)
    assert "ended 5 times (exit code 3)" in text
    assert text.endswith("no map named moon")
    with contextlib.closing(Simulators("/no/such/program", 1, "", "", [0])) as started:
        wait_until(lambda: started.error)
        assert str(started.error).endswith("/no/such/program: No such file or directory")


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(sebulba.UsageError, match=r"'adress'.*placeholders are \{address\}"):
        Simulators("play {adress}", 1, "", "", [0])
    with pytest.raises(sebulba.UsageError, match="quotes must match"):
        Simulators("play 'a", 1, "", "", [0])
    with pytest.raises(sebulba.UsageError, match="needs command"):
        ClientOptions("CartPole-v1")
    with pytest.raises(sebulba.UsageError, match="simulators=-1"):
        ClientOptions("CartPole-v1", command="play", simulators=-1)
    parts = ENVIRONMENTS["clients"].parts
    with pytest.raises(sebulba.UsageError, match="needs the option 'like'"):
        parts({}, None, 1.0)
    with pytest.raises(sebulba.UsageError, match="no option 'port'"):
        parts({"like": "CartPole-v1", "port": 1}, None, 1.0)


def test_nobody_evaluates_in_an_environment_that_clients_drive() -> None:
    policy = sebulba.load_policy("pretrained:cartpole")
    with pytest.raises(sebulba.UsageError, match=r"leave out --eval-every-env-steps"):
        sebulba.evaluate(policy, clients_of(SLEEPER), num_episodes=1)


def test_clients_are_not_served_in_another_process() -> None:
    policy = sebulba.load_policy("pretrained:cartpole")
    given = Given(clients_of(SLEEPER), policy.agent, "auto", "async")
    shared = SimpleNamespace(given=lambda: given, making=threading.Lock())
    with pytest.raises(sebulba.UsageError, match=r"--cluster.address threads"):
        Server(b"", {}, shared).make(2, [0, 1])


def clients_of(code: str) -> Any:
    options = {"like": "CartPole-v1", "command": command_of(code)}
    return sebulba.make_env_factory("external:clients", **options)


PLAYER = """
import sys
import gymnasium
from sebulba_external.client import Client

address, token, seed, mark = sys.argv[1:]
env = gymnasium.make("CartPole-v1")
with Client(address, token) as seat:
    observation, _ = env.reset(seed=int(seed))
    while True:
        action, over = seat.begin(observation), False
        while not over:
            observation, reward, dead, cut, _ = env.step(int(action))
            over = dead or cut
            if over:
                seat.end(reward, observation, truncated=not dead)
            else:
                action = seat.step(reward, observation)
        observation, _ = env.reset()
"""


@pytest.mark.slow
def test_the_command_line_trains_on_simulators_and_leaves_none(tmp_path: Path) -> None:
    (tmp_path / "player.py").write_text(PLAYER)
    mark = f"mark-{os.getpid()}-{tmp_path.name}"
    options = ["like", "CartPole-v1", "command"]
    options += [f"{sys.executable} player.py {{address}} {{token}} {{seed}} {mark}"]
    options += ["simulators", "3"]
    command = [sys.executable, "-m", "sebulba", "train", "cartpole", "--run-dir", "run"]
    command += ["--env.id", "external:clients", "--num-envs", "4", "--no-anneal-learning-rate"]
    command += ["--inference-devices", "0", "--update-devices", "0"]
    command += ["--num-inferencers-per-device", "1", "--env.options", *options]
    done = subprocess.run(
        [*command, "--total-env-steps", "4096"],
        cwd=tmp_path, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "done: mean return" in done.stdout
    assert processes_with(mark) == []

    command += ["--resume", "--total-env-steps", "1_000_000"]
    run = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL)
    wait_until(lambda: len(processes_with(mark)) == 3, 300)
    run.kill()
    run.wait()
    wait_until(lambda: not processes_with(mark), 50)


LICENSED = """
import os, subprocess, sys, time
import numpy as np
from sebulba_external.client import Client

address, token, log, episodes, *mark = sys.argv[1:]

def note(word):
    with open(log, "a") as file:
        file.write(f"{word} {os.getpid()} {time.monotonic()}\\n")

note("began")
if mark:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", *mark])
with Client(address, token) as seat:
    for episode in range(int(episodes)):
        seat.begin(np.zeros(4, np.float32))
        for _ in range(9):
            seat.step(1.0, np.zeros(4, np.float32))
        seat.end(1.0, np.zeros(4, np.float32), truncated=False)
        if episode == 2:
            note("played")
note("ended")
"""


def noted(log: Path, word: str) -> dict[int, float]:
    """Return the times at which simulators noted ``word``, by pid."""
    lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    return {int(pid): float(at) for what, pid, at in lines if what == word}


@pytest.mark.slow
def test_of_two_licences_five_seats_never_take_a_third(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulators, "PAUSE_S", 0.05)
    (tmp_path / "licensed.py").write_text(LICENSED)
    log = tmp_path / "log"
    command = f"{sys.executable} {tmp_path}/licensed.py {{address}} {{token}} {log} 6"
    samples: list[set[int]] = []
    stop = threading.Event()

    def audit() -> None:
        while not stop.wait(0.002):
            samples.append(set(processes_with(str(log))))

    auditor = threading.Thread(target=audit, daemon=True)
    auditor.start()
    with Seats("CartPole-v1", f"unix:{tmp_path}/s", command=command, simulators=2) as seats:
        agent = Impala(seats.spec, ImpalaConfig())
        options = {"num_inferencers_per_device": 1, "inference_devices": [0]}
        with sebulba.GymnasiumLoop(seats, agent, 5, **options) as loop:
            loop.train(total_env_steps=5 * 10 * 8, steps_per_cycle=10)
    stop.set()
    auditor.join()
    began, ended = noted(log, "began"), noted(log, "ended")
    assert len(began) >= 5
    assert max(map(len, samples)) == 2
    assert len(set.union(*samples) & began.keys()) >= 5
    for at in began.values():
        alive = [pid for pid, start in began.items() if start <= at < ended.get(pid, 1e99)]
        assert len(alive) <= 2
    assert processes_with(str(log)) == []


def test_a_limit_is_of_the_run_and_not_of_each_inferencer(tmp_path: Path) -> None:
    options = {"like": "CartPole-v1", "command": command_of(SLEEPER), "simulators": 2}
    factory = sebulba.make_env_factory("external:clients", **options)
    first = factory(2, [0, 1])
    with contextlib.closing(first), pytest.raises(sebulba.UsageError, match="simulators=2 are"):
        factory(2, [2, 3])
    factory(2, [0, 1]).close()


def test_nothing_that_simulators_started_outlives_a_trainer_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "licensed.py").write_text(LICENSED)
    log, mark = tmp_path / "log", f"mark-{os.getpid()}-{tmp_path.name}"
    words = f"{sys.executable} licensed.py {{address}} {{token}} {log} 1000000 {mark}"
    options = ["like", "CartPole-v1", "command", words, "simulators", "2"]
    command = [sys.executable, "-m", "sebulba", "train", "cartpole", "--run-dir", "run"]
    command += ["--env.id", "external:clients", "--num-envs", "5", "--platform", "cpu"]
    command += ["--inference-devices", "0", "--update-devices", "0"]
    command += ["--num-inferencers-per-device", "1", "--total-env-steps", "10_000_000"]
    with open(tmp_path / "output", "w") as output:
        run = subprocess.Popen(
            [*command, "--env.options", *options], cwd=tmp_path, stdout=output, stderr=output
        )
    try:
        wait_until(lambda: run.poll() is not None or len(noted(log, "played")) == 2, 300)
        assert run.poll() is None, (tmp_path / "output").read_text()
        pids = processes_with(mark)
        assert len(pids) == 4  # each has started one more
        assert set(noted(log, "played")) <= set(pids)
    finally:
        run.kill()
        run.wait()
    wait_until(lambda: not processes_with(mark), 50)
