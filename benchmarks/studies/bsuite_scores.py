"""Scores of bsuite (Osband et al. 2020, arXiv 1908.03568): train in its protocol, then score.

    python -m benchmarks.studies.bsuite_scores train ppo --ids testing --folder scores/ppo
    python -m benchmarks.studies.bsuite_scores score scores --json scores.json --png scores.png

It needs ``pip install 'sebulba[bsuite]'``. An agent sees one environment for as many episodes as
bsuite says, and its training is what counts: nothing is evaluated. Each id is trained by ``sebulba
train`` in a process of its own, which bsuite's logger records. Finished ids are not trained again.
bsuite downloads the images of its three ``mnist`` experiments.
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.studies.bsuite_env import ORDERS
from benchmarks.studies.tables import show, table
from sebulba.errors import UsageError
from sebulba.metrics.figures import picture
from sebulba.support.files import read_json_object, write_json
from sebulba.tools.bench import harness

PROGRAM = "python -m benchmarks.studies.bsuite_scores"
ENV = "benchmarks.studies.bsuite_env"
"""Module of the environment."""
AGENT_FILE = "agent.json"
"""File of an agent's folder: what was trained, and how each id ended."""
PROTOCOL = (
    *("--num-envs", "1", "--num-inferencers-per-device", "1", "--eval-every-env-steps", "0"),
    *("--total-env-steps", "1000000000", "--no-anneal-learning-rate"),
    *("--checkpoint.every-s", "1000000", "--callbacks", f"{ENV}:is_over", "--writers"),
)
"""Options that are the same for all agents."""


def chosen(words: Sequence[str]) -> list[str]:
    """Return the ids that are meant: ids, experiments, all, first (of each), or bsuite's testing.

    Raises:
      UsageError: There is no such id.
    """
    from bsuite import sweep

    first = [bsuite_id for bsuite_id in sweep.SWEEP if bsuite_id.endswith("/0")]
    groups = {"testing": sweep.TESTING, "first": first, "all": sweep.SWEEP}
    ids: dict[str, None] = {}
    for word in words:
        of_word = [x for x in sweep.SWEEP if word in (x, x.partition("/")[0])]
        if not (found := groups.get(word, of_word)):
            raise UsageError(f"--ids {word}: bsuite has no such id; use testing, first, all")
        ids |= dict.fromkeys(found)
    return list(ids)


def episodes_in(folder: Path, bsuite_id: str) -> int:
    """Return the last episode that is recorded of an id."""
    file = folder / f"bsuite_id_-_{bsuite_id.replace('/', '-')}.csv"
    rows = list(csv.DictReader(file.read_text().splitlines())) if file.exists() else []
    return int(rows[-1]["episode"]) if rows else 0


def train(words: Sequence[str], ids: Sequence[str], folder: Path, seconds: float | None) -> int:
    """Train the ids that are neither finished nor were given as much time; return the failures.

    Raises:
      UsageError: The folder has results of another agent, or an option is not for agents.
    """
    from bsuite import sweep

    typed = {word.partition("=")[0].replace("--no-", "--") for word in words}
    fixed = {word.replace("--no-", "--") for word in PROTOCOL if word.startswith("--")}
    if given := typed & (fixed | {"--seed", "--env.id", "--run-dir"}):
        raise UsageError(f"{' '.join(sorted(given))} is the same for all agents here; leave it out")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / AGENT_FILE
    kept: dict[str, Any] = read_json_object(file) if file.exists() else {"words": [*words]}
    ids_kept = kept.setdefault("ids", {})
    if kept["words"] != [*words]:
        raise UsageError(f"--folder {folder} has results of {' '.join(kept['words'])}; use another")
    write_json(file, kept)
    failures = 0
    for number, bsuite_id in enumerate(ids, 1):
        limit = ids_kept.get(bsuite_id, {}).get("seconds_limit")
        had_time = limit is not None and seconds is not None and limit >= seconds
        if had_time or episodes_in(folder, bsuite_id) >= sweep.EPISODES[bsuite_id]:
            continue
        began = time.perf_counter()
        code = _train_id(words, bsuite_id, folder, seconds)
        ended = {"seconds": round(time.perf_counter() - began, 1), "seconds_limit": seconds}
        ended["episodes"] = episodes_in(folder, bsuite_id)
        of = f"{ended['episodes']} of {sweep.EPISODES[bsuite_id]} episodes"
        print(
            f"{number}/{len(ids)} {bsuite_id}: {of}, {ended['seconds']} s, exit {code}", flush=True
        )
        failures += code != 0
        if code == 0:
            ids_kept[bsuite_id] = ended
            write_json(file, kept)
    return failures


def _train_id(words: Sequence[str], bsuite_id: str, folder: Path, seconds: float | None) -> int:
    """Train one id in a child process, with its output in a file, and return its exit code."""
    orders = {"folder": str(folder.resolve()), "seconds": seconds, "parent": os.getpid()}
    env = ("--env.id", f"{ENV}:BsuiteEnv", "--env.options", "bsuite_id", bsuite_id)
    command = [sys.executable, "-m", "sebulba", "train", words[0]]
    command += ["--seed", bsuite_id.partition("/")[2], *words[1:], *env, *PROTOCOL]
    with (
        tempfile.TemporaryDirectory() as runs,
        (folder / f"{bsuite_id.replace('/', '-')}.log").open("w") as log,
    ):
        return subprocess.run(
            [*command, "--run-dir", f"{runs}/run"],
            env=os.environ | {ORDERS: json.dumps(orders)},
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode


def score(folder: Path) -> dict[str, Any]:
    """Return bsuite's score of each experiment, their means by tag, and how many ids are done."""
    import matplotlib
    import pandas
    from bsuite import sweep
    from bsuite.logging import csv_load

    with matplotlib.rc_context():  # it sets a style for all pictures
        from bsuite.experiments import summary_analysis

    def append(first: Any, second: Any) -> Any:
        return pandas.concat([first, second])

    with warnings.catch_warnings(), mock.patch.object(pandas.Series, "append", append, create=True):
        warnings.simplefilter("ignore")  # bsuite is written for pandas 1
        rows = csv_load.load_one_result_set(str(folder))
        scores = summary_analysis.bsuite_score(rows)
        tags = summary_analysis.ave_score_by_tag(scores, None).dropna().sort_values("tag")
    last = rows.groupby("bsuite_id")["episode"].max()
    return {
        "scores": dict(zip(scores.bsuite_env, map(float, scores.score), strict=True)),
        "tags": dict(zip(tags.tag, map(float, tags.score), strict=True)),
        "ids": len(last),
        "finished": sum(bool(last[x] >= sweep.EPISODES[x]) for x in last.index),
    }


def page(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the scores of all agents as two tables."""
    parts = []
    for part, head in (("tags", "mean by tag"), ("scores", "experiment")):
        names = sorted({name for agent in found.values() for name in agent[part]})
        lines = [[n, *(show(agent[part].get(n, "")) for agent in found.values())] for n in names]
        parts.append(table([head, *found], lines))
    ids = ["finished ids", *(f"{agent['finished']} of {agent['ids']}" for agent in found.values())]
    return "\n\n".join([*parts, table(["", *found], [ids])])


def draw(file: str, tags: Mapping[str, Mapping[str, float]]) -> None:
    """Draw the means by tag around a circle, a line for each agent."""
    names = sorted({name for of_agent in tags.values() for name in of_agent})
    angles = np.linspace(0, 2 * np.pi, len(names) + 1)
    with picture(file, 6.5, 5) as figure:
        axes: Any = figure.add_subplot(projection="polar")
        for agent, of_agent in tags.items():
            values = [of_agent.get(name, np.nan) for name in [*names, *names[:1]]]
            (line,) = axes.plot(angles, values, marker="o", ms=3, label=agent, clip_on=False)
            axes.fill(angles, values, color=line.get_color(), alpha=0.1)
        axes.set_xticks(angles[:-1], [name.replace("_", " ") for name in names])
        for label, angle in zip(axes.get_xticklabels(), angles[:-1], strict=True):
            label.set_horizontalalignment("left" if np.cos(angle) > 0 else "right")
        axes.set_ylim(0, 1)
        axes.set_yticks([0.25, 0.5, 0.75, 1], [".25", ".5", ".75", "1"], color="grey")
        figure.legend(loc="outside right upper", frameon=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Train, or print and write the scores."""
    parser = argparse.ArgumentParser(prog=PROGRAM, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    of_train = commands.add_parser("train", allow_abbrev=False, help="more options: sebulba train")
    of_train.add_argument("preset")
    of_train.add_argument("--ids", nargs="+", default=["testing"], help=chosen.__doc__)
    of_train.add_argument("--folder", type=Path, required=True, help="of this agent's results")
    of_train.add_argument("--seconds-limit", type=float, help="most seconds of training of an id")
    of_score = commands.add_parser("score", allow_abbrev=False)
    of_score.add_argument("folder", type=Path, help="folder of the agents' folders")
    of_score.add_argument("--json")
    of_score.add_argument("--png")
    given, options = parser.parse_known_args(argv)
    if given.command == "train":
        try:
            words = [given.preset, *options]
            return int(train(words, chosen(given.ids), given.folder, given.seconds_limit) > 0)
        except UsageError as error:
            parser.error(str(error))
    agents = sorted({file.parent for file in given.folder.glob("*/bsuite_id_-_*.csv")})
    if not agents or options:
        parser.error(f"unknown: {' '.join(options)}" if options else f"no CSV in {given.folder}/*/")
    found = {agent.name: score(agent) for agent in agents}
    print(page(found))
    if given.png:
        draw(given.png, {name: of_agent["tags"] for name, of_agent in found.items()})
    trained = {a.name: read_json_object(f) for a in agents if (f := a / AGENT_FILE).exists()}
    keys = {"bsuite": importlib.metadata.version("bsuite")}
    record = harness.record(keys, found, trained) | {"command": f"{PROGRAM} score DIR"}
    harness.write_json(given.json, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
