"""kill -9 of what learns from data, of what clients play in, and of a server: what comes back.

    python -m benchmarks.studies.data_kills FOLDER [CASE ...]

The cases are offline, online, served, local, simulators and serve. A row of JSON for each.
``same_bits`` compares the policy with that of a run that was not killed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SEBULBA = [sys.executable, "-m", "sebulba"]
PLAYER = "benchmarks.studies.external_cartpole"
DEADLINE_S = 300.0
EVERY_UPDATES = 200
"""Between checkpoints."""


def until(what: str, is_so: Callable[[], Any]) -> Any:
    """Wait until something is so, and return it."""
    end = time.monotonic() + DEADLINE_S
    while not (found := is_so()):
        if time.monotonic() > end:
            raise SystemExit(f"after {DEADLINE_S:g} s: {what}")
        time.sleep(0.05)
    return found


def records(run: Path) -> list[dict[str, Any]]:
    """Return the records of metrics that are whole."""
    if not (run / "metrics.jsonl").exists():
        return []
    lines = (run / "metrics.jsonl").read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines]


def env_steps(run: Path) -> int:
    """Return how far a run was when it last said so."""
    return max((record.get("env_steps", 0) for record in records(run)), default=0)


def players() -> list[int]:
    """Return the processes of clients."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if PLAYER in words and "--play" in words and "-c" not in words:  # no shim
            found.append(int(folder.name))
    return found


def arrays(run: Path) -> dict[str, np.ndarray]:
    """Return the numbers of a trained policy."""
    file = next((run / "policy").glob("*.npz"))
    with np.load(file, allow_pickle=False) as saved:
        return {name: saved[name] for name in saved.files}


def same(one: Path, other: Path) -> bool:
    """Tell whether two runs ended with the same policy, bit for bit."""
    a, b = arrays(one), arrays(other)
    return a.keys() == b.keys() and all(a[k].tobytes() == b[k].tobytes() for k in a)


class Kills:
    """The cases, each in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.log = open(folder / "output.txt", "ab")  # noqa: SIM115

    def call(self, *words: str) -> None:
        """Run a command to its end."""
        subprocess.run([*SEBULBA, *words], stdout=self.log, stderr=self.log, check=True)

    def train(self, run: Path, *words: str) -> subprocess.Popen:
        """Begin a run with checkpoints."""
        shutil.rmtree(run, ignore_errors=True)
        often = ["--checkpoint.every-updates", str(EVERY_UPDATES), "--metrics-interval-s", "0.2"]
        words = ("train", *words, *often, "--run-dir", str(run))
        return subprocess.Popen([*SEBULBA, *words], stdout=self.log, stderr=self.log)

    def killed(self, process: subprocess.Popen, run: Path, at: int) -> int:
        """Kill a run once it is at so many env steps and has a checkpoint; returns where it was."""

        def is_due() -> bool:
            if process.poll() is not None:
                raise SystemExit(f"{run} ended before it was killed; see {self.log.name}")
            return env_steps(run) >= at and any((run / "checkpoints").glob("*"))

        until("no checkpoint", is_due)
        process.send_signal(signal.SIGKILL)
        process.wait()
        return env_steps(run)

    def cloned(self) -> str:
        """Return a data set of CartPole."""
        data = self.folder / "cartpole"
        if not data.exists():
            self.call(
                "dataset", "record", "pretrained:cartpole", "--out", str(data), "--episodes", "20"
            )
        return str(data)

    def twice(self, name: str, at: int, *words: str) -> dict[str, Any]:
        """Train, and train with a kill in between; both in lockstep."""
        whole, run = self.folder / f"{name}-whole", self.folder / name
        if self.train(whole, *words).wait():
            raise SystemExit(f"{whole} failed; see {self.log.name}")
        killed_at = self.killed(self.train(run, *words), run, at)
        self.call("resume", str(run))
        return {
            "killed": name,
            "at_env_steps": killed_at,
            "ended_at": env_steps(run),
            "same_bits": same(whole, run),
        }

    # The cases.

    def case_offline(self) -> dict[str, Any]:
        """Kill a learner of a data set."""
        words = ("--env.id", "CartPole-v1", "--agent.dataset", self.cloned())
        steps = ("--total-env-steps", "800000", "--eval-every-env-steps", "0")
        return self.twice("offline", 300_000, "bc", *words, *steps)

    def case_online(self) -> dict[str, Any]:
        """Kill a learner that went from data to its environment."""
        data = self.folder / "pendulum"
        if not data.exists():
            options = ("--out", str(data), "--episodes", "10", "--random", "0.5")
            self.call("dataset", "record", "pretrained:pendulum", *options)
        words = ["--env.id", "Pendulum-v1", "--env.backend", "gymnasium"]
        words += ["--agent.dataset", str(data), "--total-env-steps", "8000"]
        words += ["--agent.torso.hidden-sizes", "64", "64", "--eval-every-env-steps", "0"]
        return self.twice("online", 5_000, "sac-data", *words)

    def clients(self, form: str) -> tuple[str, ...]:
        """Return the words of a run whose clients are CartPole."""
        command = f"{sys.executable} -m {PLAYER} --play {{address}} {{token}} {{seed}} {form}"
        options = ("--env.options", "like", "CartPole-v1", "command", command)
        words = ["cartpole", "--env.id", "external:clients", "--num-envs", "4"]
        words += ["--num-inferencers-per-device", "1", "--total-env-steps", "100000"]
        return *words, *options

    def of_clients(self, form: str) -> dict[str, Any]:
        """Kill a trainer of clients; count those that are alive afterwards."""
        run = self.folder / form
        killed_at = self.killed(self.train(run, *self.clients(form)), run, 40_000)
        until("clients are alive", lambda: not players())
        self.call("resume", str(run))
        last = records(run)[-1]
        return {
            "killed": form,
            "at_env_steps": killed_at,
            "ended_at": last["env_steps"],
            "return": round(last["episode_return_mean"], 1),
            "clients_alive": len(players()),
        }

    def case_served(self) -> dict[str, Any]:
        """Kill a trainer that acts for clients."""
        return self.of_clients("served")

    def case_local(self) -> dict[str, Any]:
        """Kill a trainer whose clients act themselves."""
        return self.of_clients("local")

    def case_simulators(self) -> dict[str, Any]:
        """Kill the clients, one after the other, while the trainer runs."""
        run, count = self.folder / "simulators", 0
        process = self.train(run, *self.clients("served"))
        for at in range(20_000, 80_001, 15_000):
            until("the run ended", lambda at=at: env_steps(run) >= at and players())  # type: ignore[misc]
            os.kill(players()[0], signal.SIGKILL)
            count += 1
        code = process.wait()
        return {
            "killed": f"{count} simulators",
            "exit_code": code,
            "ended_at": env_steps(run),
            "clients_alive": len(players()),
        }

    def case_serve(self) -> dict[str, Any]:
        """Kill a server, and start it again at the same address."""
        from sebulba_external.client import Client

        socket, observation = self.folder / "socket", np.array([0.0, 0.1, 0.05, -0.2], np.float32)
        actions = []
        for _ in range(2):
            words = ("serve", "pretrained:cartpole", "--listen", f"unix:{socket}")
            process = subprocess.Popen([*SEBULBA, *words], stdout=self.log, stderr=self.log)

            def asked() -> Any:
                try:
                    with Client(f"unix:{socket}", "") as client:
                        first = client.begin(observation)
                        more = [client.step(0.0, observation * k) for k in range(-20, 20)]
                        return np.array([first, *more]).tolist()
                except OSError:
                    return None

            actions.append(until("nobody answers", asked))
            process.send_signal(signal.SIGKILL)
            process.wait()
        return {"killed": "serve", "same_actions": actions[0] == actions[1]}


def main() -> None:
    """Run some cases."""
    cases = [name.removeprefix("case_") for name in vars(Kills) if name.startswith("case_")]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("cases", nargs="*", default=cases)
    given = parser.parse_args()
    kills = Kills(given.folder)
    for name in given.cases:
        print(json.dumps(getattr(kills, f"case_{name}")()), flush=True)


if __name__ == "__main__":
    main()
