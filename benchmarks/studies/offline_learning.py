"""Recorded data of HalfCheetah, Hopper and Pendulum, and what agents learn from them.

    python -m benchmarks.studies.offline_learning FOLDER [STAGE ...] [--updates 20000] [--seeds 3]

The stages are policies, data, clones, medium, online and picture. They train the policies that are
recorded, record them, train agents on the data with several seeds, and evaluate each with the same
seeds of the environment. What is in FOLDER is not made again. A row of JSON for each policy:
``d4rl`` is the return as D4RL normalises it (Fu et al. 2020, arXiv 2004.07219), where 0 is a random
policy and 100 its expert.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np

HALFCHEETAH, HOPPER, PENDULUM = "HalfCheetah-v4", "Hopper-v4", "Pendulum-v1"
D4RL = {HALFCHEETAH: (-280.178953, 12135.0), HOPPER: (-20.272305, 3234.3)}
"""Returns of D4RL's random policy and of its expert."""
POLICIES: dict[str, list[str]] = {
    "halfcheetah-expert": ["halfcheetah-ppo", "--total-env-steps", "600000"],
    "halfcheetah-medium": ["halfcheetah-ppo", "--total-env-steps", "200000"],
    "hopper-medium": ["hopper-ppo", "--total-env-steps", "400000"],
}
"""Preset and options of the policies that are recorded; medium ones trained for a shorter time."""
NETWORKS = ["--agent.torso.hidden-sizes", "64", "64"]
SAC = [*NETWORKS, "--learning-rate", "1e-3", "--agent.replay.batch-size", "128"]
TRAININGS: dict[str, list[str]] = {
    "halfcheetah-replay": ["--env.id", HALFCHEETAH, "--total-env-steps", "60000"],
    "hopper-replay": ["--env.id", HOPPER, "--total-env-steps", "100000"],
}
"""Options of trainings of SAC that are recorded from their first step until the policy is medium,
as D4RL's medium-replay is."""
DATA: dict[str, tuple[str, list[str]]] = {
    "pendulum-expert": ("pretrained:pendulum", ["--episodes", "200"]),
    "pendulum-random": ("pretrained:pendulum", ["--episodes", "200", "--random", "1"]),
    "halfcheetah-expert": ("halfcheetah-expert", ["--episodes", "50"]),
    "halfcheetah-medium": ("halfcheetah-medium", ["--explore", "--episodes", "100"]),
    "hopper-medium": ("hopper-medium", ["--explore", "--episodes", "200"]),
}
"""Policy of each data set, and options of ``sebulba dataset record``."""
RATE = ["--learning-rate", "1e-3", "--anneal-learning-rate"]
RATES = [*RATE, "--agent.critic-learning-rate", "1e-3"]
AGENTS: dict[str, list[str]] = {
    "bc": RATE,
    "iql": [*RATES, "--agent.value-learning-rate", "1e-3"],
    "rebrac": [*RATES, "--agent.actor-penalty", "0.4"],
}
"""Options of each agent. Actions of these data are noisy: with the preset's penalty of 0.05 the
policy of ReBRAC left them, and returned -101 on HalfCheetah."""
NORMALIZED = ["--agent.normalize-observations"]
FAST_TARGET = [*NORMALIZED, "--agent.target.rate", "0.01"]
CORL_HOPPER = ["--agent.actor-penalty", "0.15", "--agent.critic-penalty", "0.5"]
CHANGES: dict[str, dict[str, list[str]]] = {
    "halfcheetah-medium": {},
    "hopper-medium": {"iql": ["--agent.reward-scale", "0.3"]},
    "hopper-replay": {
        "bc": NORMALIZED,
        "iql": [*FAST_TARGET, "--agent.reward-scale", "1"],
        "rebrac": [*FAST_TARGET, *CORL_HOPPER, "--agent.torso.layer-norm"],
    },
    "halfcheetah-replay": {
        "bc": NORMALIZED,
        "iql": [*FAST_TARGET, "--agent.reward-scale", "0.2"],
        "rebrac": FAST_TARGET,
    },
}
"""What an agent has besides on a data set. Weights of IQL depend on the size of advantages. The
actor's penalty on Hopper is that of CORL for medium-replay, of a mean and not of a sum over the
components of an action."""
UPDATES_A_CYCLE = 64
ROWS_AN_UPDATE = 2_048 // UPDATES_A_CYCLE
CLONE_UPDATES = 30_000
EPISODES = {PENDULUM: 100, HALFCHEETAH: 20, HOPPER: 50}
"""Of an evaluation."""
SEEDS = 3
ONLINE_STEPS = 4_000, 8_000, 16_000, 24_000
"""After so many env steps SAC is evaluated."""
ONLINE_DATA = "halfcheetah-replay"


class Study:
    """What was trained, recorded and evaluated in a folder."""

    def __init__(self, folder: Path, seeds: int, updates: int) -> None:
        self.folder, self.seeds, self.updates = folder, seeds, updates

    def sebulba(self, *words: str) -> None:
        """Run a command of Sebulba; its output is kept in the folder."""
        from sebulba.commands.cli import main as command

        with open(self.folder / "output.txt", "a") as output:
            output.write(f"\n$ sebulba {' '.join(words)}\n")
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                if code := command(list(words)):
                    raise SystemExit(f"exit code {code}; see {output.name}")

    def run(self, name: str, words: list[str], seed: int) -> Path:
        """Return the folder of a run, which is trained unless it ended before."""
        run = self.folder / "runs" / f"{name}-seed{seed}"
        ended = run.with_suffix(".seconds")
        if not ended.exists():
            for old in (run, self.folder / "data" / name):  # what was left of a run, and its data
                shutil.rmtree(old, ignore_errors=True)
            began = time.perf_counter()
            self.sebulba("train", *words, "--seed", str(seed), "--run-dir", str(run))
            ended.write_text(f"{time.perf_counter() - began:.0f}")
        return run

    def data(self, name: str) -> str:
        """Return the folder of a data set."""
        folder = self.folder / "data" / name
        if name in TRAININGS:
            words = ["sac", *SAC, *TRAININGS[name], "--eval-every-env-steps", "0"]
            self.run(name, [*words, "--record-dataset", str(folder)], 0)
        elif not folder.exists():
            policy, options = DATA[name]
            of = policy if ":" in policy else str(self.policy(policy))
            self.sebulba("dataset", "record", of, "--out", str(folder), *options)
        return str(folder)

    def policy(self, name: str) -> Path:
        """Return the run of a policy that is recorded."""
        return self.run(name, [*POLICIES[name], "--eval-every-env-steps", "0"], 0)

    def told(self, run: str | Path, env: str, name: str, **more: Any) -> float:
        """Evaluate a policy and print a row; returns its mean return."""
        file = self.folder / "evaluations" / f"{name}.json"
        if not file.exists():
            file.parent.mkdir(exist_ok=True)
            words = ["--episodes", str(EPISODES[env]), "--json", str(file), "--seed", "7"]
            self.sebulba("eval", str(run), *words)
        result = json.loads(file.read_text())
        mean = float(result["episode_return_mean"])
        row = {"policy": name, "env": env, "return": round(mean, 1)}
        row["interval_95"] = round(float(result["interval_95"]), 1)
        if env in D4RL:
            low, high = D4RL[env]
            row["d4rl"] = round(100 * (mean - low) / (high - low), 1)
        print(json.dumps(row | more), flush=True)
        return mean

    def learned(self, agent: str, data: str, env: str, updates: int) -> None:
        """Train an agent on a data set with each seed, and evaluate it."""
        rows = json.loads(Path(self.data(data), "dataset.json").read_text())["rows"]
        words = [agent, "--env.id", env, "--agent.dataset", self.data(data), *NETWORKS]
        words += [*AGENTS[agent], *CHANGES.get(data, {}).get(agent, [])]
        words += ["--eval-every-env-steps", "0"]
        words += ["--agent.replay.updates-per-cycle", str(UPDATES_A_CYCLE)]
        words += ["--total-env-steps", str(rows + updates * ROWS_AN_UPDATE)]
        for seed in range(self.seeds):
            run = self.run(f"{agent}-{data}-{updates}", words, seed)
            seconds = float(run.with_suffix(".seconds").read_text())
            self.told(run, env, run.name, updates=updates, seconds=seconds)

    # The stages.

    def stage_policies(self) -> None:
        """Train what is recorded."""
        for name in POLICIES:
            env = HOPPER if name.startswith("hopper") else HALFCHEETAH
            self.told(self.policy(name), env, f"policy-{name}")

    def stage_data(self) -> None:
        """Record it."""
        for name in (*DATA, *TRAININGS):
            file = self.folder / f"{name}.json"
            if not file.exists():
                self.sebulba("dataset", "show", self.data(name), "--json", str(file))
            about = json.loads(file.read_text())
            names = ("episodes", "steps", "return_mean", "return_percentiles")
            print(json.dumps({"data": name, **{key: about[key] for key in names}}), flush=True)

    def stage_clones(self) -> None:
        """Clone the experts; the greedy expert plays the same episodes."""
        self.told("pretrained:pendulum", PENDULUM, "policy-pendulum-expert")
        self.learned("bc", "pendulum-expert", PENDULUM, CLONE_UPDATES)
        self.told(self.policy("halfcheetah-expert"), HALFCHEETAH, "policy-halfcheetah-expert")
        self.learned("bc", "halfcheetah-expert", HALFCHEETAH, CLONE_UPDATES)

    def stage_medium(self) -> None:
        """Learn from data of policies that are not good."""
        for data in CHANGES:
            env = HOPPER if data.startswith("hopper") else HALFCHEETAH
            for agent in AGENTS:
                self.learned(agent, data, env, self.updates)

    def stage_online(self) -> None:
        """Train SAC with data of HalfCheetah, and SAC alone, for as many env steps."""
        data = self.data(ONLINE_DATA)
        rows = json.loads(Path(data, "dataset.json").read_text())["rows"]
        common = ["--env.id", HALFCHEETAH, *SAC, "--eval-every-env-steps", "0"]
        early = ["--agent.random-env-steps", "1000", "--agent.replay.warm-up-env-steps", "992"]
        forms = {
            "sac-data": (["--agent.dataset", data], rows),
            "sac": (early, 0),
        }
        for seed in range(self.seeds):
            for name, (options, before) in forms.items():
                first, *later = ONLINE_STEPS
                total = ["--total-env-steps", str(before + first)]
                run = self.run(f"{name}-online", [name, *common, *options, *total], seed)
                self.told(run, HALFCHEETAH, f"{name}-{first}-seed{seed}", env_steps=first)
                for steps in later:
                    told = f"{name}-{steps}-seed{seed}"
                    if not (self.folder / "evaluations" / f"{told}.json").exists():
                        self.sebulba("resume", str(run), "--total-env-steps", str(before + steps))
                    self.told(run, HALFCHEETAH, told, env_steps=steps)

    def stage_picture(self) -> None:
        """Draw what SAC and SAC with data returned over env steps, and what data alone did."""
        from sebulba.metrics.figures import BLUE, GREY, RED, open_frame, picture, shorten

        def means(pattern: str) -> list[float]:
            files = sorted((self.folder / "evaluations").glob(f"{pattern}-seed*.json"))
            return [json.loads(file.read_text())["episode_return_mean"] for file in files]

        file = self.folder / "offline-to-online.png"
        with picture(file, 7.0, 3.4, dots_per_inch=100) as figure:
            axes = figure.subplots()
            open_frame(axes, "y")
            for agent, name, style in (("iql", "IQL", ":"), ("rebrac", "ReBRAC", "--")):
                alone = means(f"{agent}-{ONLINE_DATA}-{self.updates}")
                mean = sum(alone) / len(alone)
                axes.axhline(mean, color=GREY, linestyle=style, label=f"{name}, data alone")
            for form, name, color in (("sac", "SAC", RED), ("sac-data", "SAC with data", BLUE)):
                curves = np.array([means(f"{form}-{steps}") for steps in ONLINE_STEPS])
                axes.plot(ONLINE_STEPS, curves, "o-", color=color, alpha=0.35, markersize=3)
                axes.plot(ONLINE_STEPS, curves.mean(1), color=color, linewidth=2.5, label=name)
            axes.set_xlabel("env steps")
            axes.set_ylabel("return of HalfCheetah-v4")
            shorten(axes.xaxis)
            axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
        print(json.dumps({"picture": str(file)}))


def main() -> None:
    """Run some stages."""
    stages = [name.removeprefix("stage_") for name in vars(Study) if name.startswith("stage_")]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("stages", nargs="*", default=stages)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--updates", type=int, default=20_000)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    study = Study(given.folder, given.seeds, given.updates)
    for name in given.stages:
        getattr(study, f"stage_{name}")()


if __name__ == "__main__":
    main()
