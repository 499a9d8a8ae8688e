"""What clients of sebulba-external teach on CartPole: returns over env steps, in both forms.

    python -m benchmarks.studies.external_cartpole [impala|ppo|dqn ...] [--forms served local]

``sebulba train`` starts eight clients, each a process with one stream. A row of JSON for each agent
and form: when the mean of the last 100 episodes was first 475, what it was at the end, and the lag.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CLIENTS = 8
GOAL = 475.0
AGENTS: dict[str, tuple[str, list[str]]] = {
    "impala": ("cartpole", ["--total-env-steps", "250000"]),
    "ppo": ("cartpole-ppo", ["--total-env-steps", "120000", "--steps-per-cycle", "64"]),
    "dqn": ("cartpole-dqn", ["--total-env-steps", "100000"]),
}
"""Preset and options of each agent. PPO has as many rows in a trajectory as its preset."""
SYNC_EVERY = 16
"""Steps after which a local client takes a newer policy."""


def play(address: str, token: str, seed: int, form: str) -> None:
    """Play CartPole as one client, until the trainer is gone."""
    import gymnasium
    from sebulba_external.actor import Actor, Begin, End, Step

    world = gymnasium.make("CartPole-v1")
    with Actor(address, token, local=form == "local", seed=seed, timeout_s=600.0) as actor:
        observation, _ = world.reset(seed=seed % 2**31)
        report: Any = Begin(observation)
        for step in range(1, 1 << 62):
            action = actor.act({"": report})[""]
            observation, reward, terminated, truncated, _ = world.step(int(action))
            report = Step(float(reward), observation)
            if terminated or truncated:
                actor.act({"": End(float(reward), observation, truncated=not terminated)})
                report = Begin(world.reset()[0])
            if step % SYNC_EVERY == 0:
                actor.sync()


def trained(agent: str, form: str, seed: int, options: list[str]) -> dict[str, Any]:
    """Train with eight clients; return what the records say."""
    preset, own = AGENTS[agent]
    client = f"{sys.executable} -m benchmarks.studies.external_cartpole"
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        words = [sys.executable, "-m", "sebulba", "train", preset, *own, "--run-dir", str(run)]
        words += ["--env.id", "external:clients", "--num-envs", str(CLIENTS), "--seed", str(seed)]
        words += ["--num-inferencers-per-device", "1", "--eval-every-env-steps", "0"]
        words += ["--metrics-interval-s", "0.5", *options]
        words += ["--env.options", "like", "CartPole-v1", "command"]
        words += [f"{client} --play {{address}} {{token}} {{seed}} {form}"]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    named = [record for record in records if record.get("episode_return_mean") is not None]
    first = [record for record in named if record["episode_return_mean"] >= GOAL]
    figures = {
        "agent": agent,
        "form": form,
        "seed": seed,
        "reached_at_env_steps": first[0]["env_steps"] if first else None,
        "best": max(record["episode_return_mean"] for record in named),
    }
    names = ["env_steps", "episode_return_mean", "env_steps_per_s", "policy_lag_mean"]
    names += ["seats/columns_dropped", "seats/rows_refused", "seats/answer_p50_ms"]
    curve = [named[k * (len(named) - 1) // 9] for k in range(10)] if len(named) > 9 else named
    figures |= {f"last_{name}": named[-1].get(name) for name in names}
    return figures | {"curve": [[x["env_steps"], round(x["episode_return_mean"])] for x in curve]}


def main() -> None:
    """Train each agent in each form."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("agents", nargs="*", default=list(AGENTS))
    parser.add_argument("--forms", nargs="+", default=["served", "local"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--play", nargs=4, help=argparse.SUPPRESS)
    given, options = parser.parse_known_args()
    if given.play:
        address, token, seed, form = given.play
        return play(address, token, int(seed), form)
    for agent in given.agents:
        for form in given.forms:
            print(json.dumps(trained(agent, form, given.seed, options)), flush=True)


if __name__ == "__main__":
    main()
