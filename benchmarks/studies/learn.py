"""``benchmarks learn NAME...``: what a preset learns, how soon, how surely, with curves.

Each seed is trained through the command line, as a user would do it, in a process of its own, one
seed after the other. What is reported is what they left in their run folders. Free of JAX.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sebulba.configs.experiment import ExperimentConfig
from sebulba.metrics.counters import EPISODES_AVERAGED
from sebulba.metrics.figures import BLUE, GREY, open_frame, picture
from sebulba.metrics.plots import learning_curves, read_records
from sebulba.runs.folder import file_name
from sebulba.support.checks import require
from sebulba.support.files import read_json_object, write_json

RESULTS = "benchmarks/results"
"""Folder that ``learn`` writes to and ``report`` reads."""
RESULT_FILE = "learn.json"
"""File of a run folder that keeps what counts of it."""
MOST_POINTS = 200
"""Points of a training curve in the JSON."""
ROUNDING = 1.02
"""Budgets are rounded up to whole trajectories of all Inferencers."""


@dataclasses.dataclass(frozen=True)
class Goal:
    """A mean return, or another figure, that a preset has to reach within a budget.

    Training episodes reach it if the mean of the last 100 does at any time within the budget. An
    evaluated goal is reached if both of the last two evaluations within the budget reach it, so
    that a lucky one does not count. Where agents play against themselves, returns say nothing; then
    an exam of the last policy counts.
    """

    preset: str
    """Configuration of ``sebulba train``."""
    episode_return_mean: float
    """Return to reach."""
    env_steps: int
    """Budget of environment steps."""
    evaluated: bool = True
    """The return is that of the evaluation policy, not that of the training episodes."""
    is_limit: bool = False
    """What counts must not exceed ``episode_return_mean``: a return that shows what the agent
    cannot do without a part that ``options`` take away, or an exam's figure of losses."""
    seconds: float | None = None
    """Seconds of the run, compile included, within which to reach it; None for no limit."""
    options: tuple[str, ...] = ()
    """Further options of ``sebulba train``."""
    seeds: int = 3
    """Number of seeds, all of which have to reach it."""
    reference: str = ""
    """What others measured."""
    exam: str = ""
    """Name of an exam in ``games.py``, whose figure counts in place of a return."""
    member: str = "player"
    """Member whose policy takes the exam."""

    def __str__(self) -> str:
        where = "both last evaluations" if self.evaluated else "mean of 100 training episodes"
        where = self.exam or where
        time = "" if self.seconds is None else f" and {self.seconds:g} s"
        sign = "≤" if self.is_limit else "≥"
        return (
            f"{where} {sign} {self.episode_return_mean:g} within {self.env_steps:,} env steps{time}"
        )


@dataclasses.dataclass(frozen=True)
class SeedResult:
    """One run."""

    seed: int
    """Seed of the run."""
    exit_code: int
    """Exit code of the process."""
    wall_s: float
    """Seconds from the start of the process to its end."""
    seconds: float | None
    """Seconds of the run, compile and evaluations included; None if there was no record."""
    training: list[tuple[int, float, float]]
    """Environment steps, seconds, mean return of the last 100 training episodes."""
    evaluations: list[tuple[int, float, float]]
    """Environment steps, mean and standard deviation of the returns of an evaluation."""
    exam: float | None = None
    """Figure of the exam, where the goal has one."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether a run reached its goal, and when."""

    is_reached: bool
    """The run reached the goal."""
    episode_return_mean: float | None
    """The return that counts: the worse of the last two evaluations, or the last training mean."""
    env_steps: int | None = None
    """Environment steps until the goal was first reached."""
    seconds: float | None = None
    """Seconds of the run until then; only known of training episodes."""


def run(
    *,
    goals: Mapping[str, Goal | None],
    configs: Mapping[str, ExperimentConfig],
    options: Sequence[str] = (),
    seeds: int | None = None,
    results: str = RESULTS,
    runs: str | None = None,
) -> dict[str, dict]:
    """Train every seed of every name, print tables, write JSON and curves.

    A seed that was finished in the folder ``runs`` by the same commit with the same options is not
    trained again; any other run of that seed there is replaced. Names of the same training with
    the same options share its runs, such as goals that differ in their exams.

    Args:
      goals: Goals by the name of the result; None for a preset of that name without a goal.
      configs: Configurations to train, by the same names.
      options: More options of ``sebulba train``, for all names.
      seeds: Number of seeds, from 0; None takes that of the goal, or 3.
      results: Folder for ``learn-NAME.json`` and ``learn-NAME.png``.
      runs: Folder that keeps the run folders, or None.

    Returns:
      What was written, by name.

    Raises:
      UsageError: The results of two names would be one file.
    """
    from sebulba.tools.bench import harness

    check_files(goals)
    written = {}
    folders: dict[tuple[str, ...], str] = {}  # by what is trained there
    trainings: dict[tuple[Any, ...], SeedResult] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name, goal in goals.items():
            commit = harness.commit()
            words = [*train_words(name, goal), *options]
            trained = file_name(folders.setdefault(tuple(words), name))
            print(f"{name}: {goal or 'no goal'}\n{HEADER}", flush=True)
            done = []
            for seed in range(seeds or (goal.seeds if goal else 3)):
                folder = Path(runs or temporary) / f"{trained}-seed{seed}"
                training = (tuple(words), seed, commit[0])
                if training not in trainings:
                    trainings[training] = train_seed(words, seed, folder, commit[0])
                done.append(examined(trainings[training], goal, folder))
                print(table_row(done[-1], goal), flush=True)
            print(summary(done, goal), flush=True)
            record = harness.record(
                keys_of(done, goal), figures_of(done, goal), dataclasses.asdict(configs[name])
            ) | dict(zip(("commit", "commit_date", "is_modified"), commit, strict=True))
            of_seeds = [] if seeds is None else ["--seeds", str(seeds)]
            record["command"] = " ".join(["python -m benchmarks learn", name, *of_seeds, *options])
            write(record, done, goal, file_name(name), Path(results))
            written[name] = record
    if len(written) > 1:
        print(overview(written), flush=True)
    return written


def check_files(names: Iterable[str]) -> None:
    """Raise UsageError if the results of two names would be one file."""
    first: dict[str, str] = {}
    for name in names:
        other = first.setdefault(file_name(name), name)
        require(
            other == name,
            "names",
            f"{other} {name}",
            f"would both write learn-{file_name(name)}.json",
            "name one of them at a time, each with a --results folder of its own",
        )


def train_words(name: str, goal: Goal | None) -> list[str]:
    """Return ``PRESET [options]``, as ``sebulba train`` takes them."""
    return [goal.preset, *goal.options] if goal else [name]


def train_seed(words: Sequence[str], seed: int, folder: Path, commit: str | None) -> SeedResult:
    """Return the result of a seed, which is trained unless ``folder`` holds its result already."""
    return _kept(folder, words, commit) or _trained(folder, words, seed, commit)


def examined(result: SeedResult, goal: Goal | None, folder: Path) -> SeedResult:
    """Return the result with the figure of the goal's exam, if it has one."""
    if goal is None or not goal.exam or result.exit_code != 0:
        return result
    figure = figure_of_exam(goal.exam, folder / "policy" / goal.member)
    return dataclasses.replace(result, exam=figure)


def _kept(folder: Path, words: Sequence[str], commit: str | None) -> SeedResult | None:
    file = folder / RESULT_FILE
    if commit is None or not file.exists():
        return None
    kept = read_json_object(file)
    made_by = kept.pop("made_by", None)
    return SeedResult(**kept) if made_by == {"commit": commit, "words": [*words]} else None


def _trained(folder: Path, words: Sequence[str], seed: int, commit: str | None) -> SeedResult:
    if folder.exists():
        shutil.rmtree(folder)
    command = [sys.executable, "-m", "sebulba", "train", *words, "--seed", str(seed)]
    began = time.perf_counter()
    done = subprocess.run(
        [*command, "--run-dir", str(folder)], stdout=subprocess.DEVNULL, check=False
    )
    wall_s = time.perf_counter() - began
    metrics = folder / "metrics.jsonl"
    records = read_records(metrics) if metrics.exists() else []
    result = seed_result(records, seed, done.returncode, wall_s)
    if done.returncode == 0:
        made_by = {"commit": commit, "words": [*words]}
        file = folder / RESULT_FILE
        file.write_text(json.dumps(dataclasses.asdict(result) | {"made_by": made_by}))
    return result


def figure_of_exam(exam: str, policy: Path) -> float:
    """Return the figure of a saved policy, which a process of its own computes."""
    command = [sys.executable, "-m", "benchmarks.studies.games", exam, str(policy)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return float(json.loads(done.stdout.splitlines()[-1]))  # jaxmarl prints before


def seed_result(
    records: Sequence[Mapping[str, Any]], seed: int, exit_code: int, wall_s: float
) -> SeedResult:
    """Return what counts of a run's records."""
    training = [
        (r["env_steps"], r["seconds"], r["episode_return_mean"])
        for r in records
        if r.get("episode_return_mean") is not None
        and r.get("episodes_averaged", EPISODES_AVERAGED) >= EPISODES_AVERAGED
    ]
    evaluations = [
        (r["eval_env_steps"], r["eval_return_mean"], r["eval_return_std"])
        for r in records
        if r.get("eval_return_mean") is not None
    ]
    seconds = records[-1]["seconds"] if records else None
    return SeedResult(seed, exit_code, wall_s, seconds, training, evaluations)


def verdict(result: SeedResult, goal: Goal) -> Verdict:
    """Compare a run with its goal."""
    if goal.exam:
        return _verdict_of_exam(result, goal)
    if not goal.evaluated:
        training = [point for point in result.training if point[0] <= goal.env_steps]
        last = training[-1][2] if training else None
        first = next((p for p in training if p[2] >= goal.episode_return_mean), None)
        in_time = first is not None and (goal.seconds is None or first[1] <= goal.seconds)
        is_reached = in_time and result.exit_code == 0
        return Verdict(is_reached, last, *(first[:2] if first else ()))
    evaluations = [point for point in result.evaluations if point[0] <= ROUNDING * goal.env_steps]
    last_two = [mean for _, mean, _ in evaluations[-2:]]
    if len(last_two) < 2 or result.exit_code != 0:
        return Verdict(False, None)
    if goal.is_limit:
        return Verdict(max(last_two) <= goal.episode_return_mean, max(last_two))
    in_time = goal.seconds is None or (result.seconds or 0.0) <= goal.seconds
    reached = next((p[0] for p in evaluations if p[1] >= goal.episode_return_mean), None)
    is_reached = in_time and min(last_two) >= goal.episode_return_mean
    return Verdict(is_reached, min(last_two), reached)


def _verdict_of_exam(result: SeedResult, goal: Goal) -> Verdict:
    figure = result.exam
    if figure is None or result.exit_code != 0:
        return Verdict(False, None)
    in_time = goal.seconds is None or (result.seconds or 0.0) <= goal.seconds
    is_good = (
        figure <= goal.episode_return_mean if goal.is_limit else figure >= goal.episode_return_mean
    )
    return Verdict(in_time and is_good, figure)


HEADER = " seed exit  reached    return   env steps  seconds   run s  wall s"


def table_row(result: SeedResult, goal: Goal | None) -> str:
    """Return a run as a line under ``HEADER``."""

    def cell(value: float | None, width: int, form: str) -> str:
        return f"{'-' if value is None else format(value, form):>{width}}"

    last = result.training[-1][2] if result.training else None
    found = verdict(result, goal) if goal else Verdict(False, last)
    word = "" if goal is None else "yes" if found.is_reached else "no"
    return " ".join(
        [
            f"{result.seed:>5} {result.exit_code:>4} {word:>8}",
            cell(found.episode_return_mean, 9, ".3f" if goal and goal.exam else ".1f"),
            cell(found.env_steps, 11, ",d"),
            cell(found.seconds, 8, ".1f"),
            cell(result.seconds, 7, ".1f"),
            cell(result.wall_s, 7, ".1f"),
        ]
    )


def summary(results: Sequence[SeedResult], goal: Goal | None) -> str:
    """Return how many seeds reached the goal, and when."""
    if goal is None:
        return f"{len(results)} seeds"
    verdicts = [verdict(result, goal) for result in results]
    text = f"{sum(v.is_reached for v in verdicts)} of {len(results)} seeds: {goal}"
    steps = [v.env_steps for v in verdicts if v.env_steps is not None]
    if steps:
        text += f"; first after {min(steps):,} to {max(steps):,}"
    return text


def overview(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a line for each result: the returns of its seeds, the goal, and what others have."""
    width = max(map(len, records))
    lines = [f"{'':{width}}  reached  returns that count; goal; reference"]
    for name, record in records.items():
        returns = " ".join(f"{x:.4g}" for x in record["figures"].get("return that counts", []))
        share = record.get("share_of_seeds")
        reached = "" if share is None else f"{share * record['seeds']:.0f} of {record['seeds']}"
        told = [returns, *(record[key] for key in ("goal", "reference") if key in record)]
        lines.append(f"{name:{width}}  {reached:>7}  {'; '.join(told)}")
    return "\n".join(lines)


def keys_of(results: Sequence[SeedResult], goal: Goal | None) -> dict[str, Any]:
    """Return the keys of the JSON."""
    if goal is None:
        return {"seeds": len(results)}
    reached = sum(verdict(result, goal).is_reached for result in results)
    return {
        "goal": str(goal),
        "reference": goal.reference or "none",
        "seeds": len(results),
        "share_of_seeds": reached / len(results),
    }


def figures_of(results: Sequence[SeedResult], goal: Goal | None) -> dict[str, Any]:
    """Return the numbers of all seeds, and their curves."""
    figures: dict[str, Any] = {"run, s": [r.seconds for r in results if r.seconds is not None]}
    if goal is not None:
        verdicts = [verdict(result, goal) for result in results]
        figures |= {
            "return that counts": [
                v.episode_return_mean for v in verdicts if v.episode_return_mean is not None
            ],
            "env steps until first reached": [v.env_steps for v in verdicts if v.env_steps],
            "seconds until first reached": [v.seconds for v in verdicts if v.seconds],
        }
    curves = [
        {
            "seed": r.seed,
            "training [env steps, seconds, mean return]": thinned(r.training),
            "evaluations [env steps, mean return, standard deviation]": r.evaluations,
        }
        for r in results
    ]
    return {name: values for name, values in figures.items() if values} | {"curves": curves}


def thinned(points: Sequence[Any], most: int = MOST_POINTS) -> list[Any]:
    """Return at most ``most`` of the points at even distances, the last among them."""
    step = -(-len(points) // most) if points else 1
    return [*points[::-1][::step]][::-1]


def write(
    record: Mapping[str, Any],
    results: Sequence[SeedResult],
    goal: Goal | None,
    name: str,
    folder: Path,
) -> None:
    """Write ``learn-NAME.json`` and ``learn-NAME.png``."""
    folder.mkdir(exist_ok=True)
    write_json(folder / f"learn-{name}.json", record)
    file = folder / f"learn-{name}.png"
    if goal is not None and goal.exam:  # returns of play against oneself say nothing
        draw_exam({r.seed: r.exam for r in results}, goal, name, file)
        return
    learning_curves(
        {f"seed {r.seed}": ([(x, y) for x, _, y in r.training], r.evaluations) for r in results},
        file,
        title=name,
        line=goal.episode_return_mean if goal else None,
    )


def draw_exam(figures: Mapping[int, float | None], goal: Goal, name: str, file: Path) -> None:
    """Draw the figure of an exam, of every seed by its number; None if there is none."""
    with picture(file, 7, 0.8 + 0.45 * len(figures)) as figure:
        axes = figure.add_subplot()
        words = {s: "none" if found is None else f"{found:.3g}" for s, found in figures.items()}
        names = [f"seed {seed}: {word}" for seed, word in words.items()]
        lengths = [found or 0.0 for found in figures.values()]
        axes.barh(names, lengths, height=0.6, color=BLUE)
        sign = "≤" if goal.is_limit else "≥"
        label = f"goal {sign} {goal.episode_return_mean:g}"
        axes.axvline(goal.episode_return_mean, color=GREY, linestyle=":", label=label)
        axes.invert_yaxis()
        longest = max(*lengths, goal.episode_return_mean) or 1.0
        axes.set(xlabel=goal.exam, xlim=(-0.01 * longest, 1.15 * longest))
        axes.set_title(name, loc="left", fontweight="bold")
        axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0)
        open_frame(axes, "x")
