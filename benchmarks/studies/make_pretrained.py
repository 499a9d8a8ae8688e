"""Trains the policies that come with the package.

``python -m benchmarks.studies.make_pretrained [NAME ...]`` trains those that are named, or all.
Each is trained by the command line, and evaluated. Then what is needed to play is copied into
``sebulba/policies/trained/NAME`` without signatures, since no key but the user's own means anything
to a user; without them no code can be named but that of Sebulba. ``--from DIR`` takes runs that are
there already, by name.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import sebulba
from sebulba.policies.card import CARD_FILE
from sebulba.policies.policy import CONFIG_FILE, save_policy
from sebulba.policies.pretrained import EVALUATION_FILE, FOLDER, about, folder_of
from sebulba.runs.folder import RunFolder
from sebulba.support.trust import signed
from sebulba.types import EnvFactory

COMMANDS: dict[str, tuple[str, ...]] = {
    "acrobot": ("train", "acrobot-ppo", "--total-env-steps", "300000"),
    "cartpole": ("train", "cartpole"),
    "inverteddoublependulum": (
        *("train", "inverteddoublependulum-ppo", "--total-env-steps", "300000"),
    ),
    "lunarlander": (
        *("train", "ppo", "--env.id", "LunarLander-v3"),
        *("--eval-every-env-steps", "250000", "--eval-episodes", "50"),
    ),
    "mountaincar": ("train", "mountaincar-ppo", "--total-env-steps", "300000"),
    "pendulum": (
        *("train", "pendulum-sac", "--agent.torso.hidden-sizes", "64", "64"),
        *("--total-env-steps", "16000", "--eval-every-env-steps", "0"),
    ),
}
"""The words that train each."""
EPISODES = 200
"""Of an evaluation."""


def main(argv: Sequence[str] | None = None) -> None:
    """Train, evaluate and copy."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.make_pretrained")
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--from", dest="runs", metavar="DIR", help="take its runs, DIR/NAME")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        for name in arguments.names or COMMANDS:
            run = Path(arguments.runs or temporary, name)
            if not run.exists():
                _sebulba(*COMMANDS[name], "--run-dir", str(run))
            evaluation = sebulba.evaluate(
                sebulba.load_policy(run), environment(run), num_episodes=EPISODES, num_envs=50
            )
            copy(run, FOLDER / name, evaluation.returns)
            print(about(name), flush=True)


def environment(run: str | Path) -> EnvFactory:
    """Return what makes the environments of a run."""
    folder = RunFolder(folder_of(run))
    record = folder.record()
    env = folder.read_env_config(folder.trust(False, record), record)
    return sebulba.make_env_factory(env.id, **env.factory_arguments())


def copy(run: Path, folder: Path, returns: np.ndarray) -> None:
    """Write what is needed to play the policy of a run.

    Args:
      run: Folder of the run.
      folder: Where to; what was there is deleted.
      returns: Of the episodes of an evaluation.
    """
    record = json.loads((run / CONFIG_FILE).read_text())
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    *command, option, _ = record["command"]
    assert option == "--run-dir", record["command"]
    facts = {
        "episode_return_mean": round(float(np.mean(returns)), 4),
        "episode_return_std": round(float(np.std(returns)), 4),
        "num_episodes": len(returns),
        "env_steps": last["env_steps"],
        "versions": _versions(run),
    }
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    policy = sebulba.load_policy(run)
    mean, deviation = facts["episode_return_mean"], facts["episode_return_std"]
    spread = f"{mean:.2f} ± {deviation:.2f} (standard deviation)"
    save_policy(
        folder / "policy",
        policy.agent,
        policy.acting_networks,
        policy.run,
        run_id=record["run_id"],
        value_networks=policy.value_networks or (),
        about={
            "trained by": " ".join(command),
            "seed": str(record["seed"]),
            "trained for": f"{facts['env_steps']:,} env steps",
            "evaluation": f"{spread}, {len(returns)} episodes",
            "versions": ", ".join(f"{what} {which}" for what, which in facts["versions"].items()),
        },
    )
    _write(folder / EVALUATION_FILE, facts)
    _unsign(folder / "policy" / CONFIG_FILE)
    _write(folder / CONFIG_FILE, {**record, "command": command, "run_dir": None})
    _unsign(folder / CONFIG_FILE)


def _versions(run: Path) -> dict[str, str]:
    """Return the versions that the card of the run's policy has."""
    card = (run / "policy" / CARD_FILE).read_text()
    (line,) = (line for line in card.splitlines() if line.startswith("| versions |"))
    return dict(one.split() for one in line.split("|")[2].split(","))


def _unsign(file: Path) -> None:
    """Write a record again, with its checksum and without a signature."""
    _write(file, {**signed("", json.loads(file.read_text())), "signature": None})


def _write(file: Path, record: dict[str, Any]) -> None:
    file.write_text(json.dumps(record, indent=2) + "\n")


def _sebulba(*words: str) -> None:
    print("sebulba", *words, flush=True)
    subprocess.run([sys.executable, "-m", "sebulba", *words], check=True)


if __name__ == "__main__":
    main()
