"""``bench report``: a page of tables and pictures from the JSON of the last results."""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sebulba.benchmarks.project.learning_goals import GOALS
from sebulba.errors import UsageError
from sebulba.files import read_json_object

RESULTS, PAGE = "benchmarks/results", "benchmarks/README.md"


@dataclasses.dataclass(frozen=True)
class Bar:
    """What a figure is to reach; one of the two is None."""

    at_least: float | None = None
    at_most: float | None = None

    def __str__(self) -> str:
        return (
            f"≥ {show(self.at_least)}" if self.at_least is not None else f"≤ {show(self.at_most)}"
        )

    def is_met(self, figure: float) -> bool:
        """Tell whether ``figure`` reaches it."""
        if self.at_least is not None:
            return figure >= self.at_least
        assert self.at_most is not None
        return figure <= self.at_most

    def reached(self, figure: float) -> float:
        """Return how much of it was reached, 1 where it is just met."""
        if self.at_least is not None:
            return figure / self.at_least
        assert self.at_most is not None
        # At or below zero there is no ratio, and nothing left to reach.
        return self.at_most / figure if figure > 0 else float("inf")


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """What makes a result, and what it is to reach on 2 cores with JAX on a CPU."""

    arguments: str
    """Of ``sebulba bench``, without the files that it writes."""
    bars: Mapping[str, Bar] = dataclasses.field(default_factory=dict)
    """By key of the JSON."""
    has_picture: bool = False
    """It draws a PNG of its own."""

    def command(self, name: str) -> str:
        """Return the command that makes ``results/NAME.json``."""
        picture = f" --png {RESULTS}/{name}.png" if self.has_picture else ""
        return f"sebulba bench {self.arguments} --json {RESULTS}/{name}.json{picture}"


_CEILING = {"achieved_over_ceiling": Bar(at_least=0.85)}

BENCHMARKS: dict[str, Benchmark] = {
    "inference": Benchmark(
        "inference",
        {
            "fused_over_bare": Bar(at_least=2.2),
            "stepped_over_bare": Bar(at_least=0.85),
            "jit_gain": Bar(at_least=1.37),
        },
    ),
    "train-cartpole": Benchmark(
        "train cartpole --compare stepped fused prototype",
        {
            **_CEILING,
            "fused_over_stepped": Bar(at_least=2.8),
            "stepped_over_prototype": Bar(at_least=0.90),
        },
        has_picture=True,
    ),
    "train-pong": Benchmark(
        "train pong --num-envs 16 --num-cpu-devices 2 --inference-devices 0 --update-devices 0 1",
        _CEILING,
        has_picture=True,
    ),
    "train-halfcheetah": Benchmark("train halfcheetah", _CEILING, has_picture=True),
    "overhead": Benchmark("overhead", {"overhead_us_per_step": Bar(at_most=15)}),
    "memory": Benchmark("memory pong", {"rss_slope_mb_per_min": Bar(at_most=1)}, has_picture=True),
    "start": Benchmark("start", {"first_update_beyond_imports_s": Bar(at_most=2.5)}),
    "scale": Benchmark("scale cartpole", has_picture=True),
    "tune": Benchmark("tune cartpole"),
    "learn": Benchmark("learn cartpole"),
    **{
        f"learn-{name}": Benchmark(f"learn {name}", {"share_of_seeds": Bar(at_least=1)})
        for name in GOALS
    },
}
"""By name of the JSON file. ``NAME-MORE.json`` is the same on another machine: without bars."""

_ABOUT = ("figures", "config", "machine", "versions", "commit", "commit_date", "is_modified")
"""Fields of a record that are not its keys."""
_COLOURS = {True: "#2a78b5", False: "#b5452a"}
_WIDEST = 2.5
"""Where the picture of the bars ends."""


def run(folder: str = RESULTS, page: str = PAGE) -> dict:
    """Write the page, and the picture of the bars beside the results.

    Args:
      folder: Holds ``NAME.json``, and ``NAME.png`` where a benchmark drew one.
      page: Markdown file to write.

    Returns:
      The results, by name.

    Raises:
      UsageError: There is nothing to show, a file has an unknown name, or a key is missing.
    """
    files = sorted(Path(folder).glob("*.json"))
    if not files:
        example = BENCHMARKS["inference"].command("inference")
        raise UsageError(f"{folder} holds no results; make some, such as {example}")
    results = {file.stem: read_json_object(file) for file in files}
    for file in files:
        _check(file, results[file.stem])
    bars = bar_rows(results)
    picture = Path(folder) / "bars.png"
    if bars:
        draw_bars(bars, picture)
    Path(page).write_text(markdown(results, bars, Path(folder), Path(page)), encoding="utf-8")
    print(
        f"{page}: {len(results)} results, {sum(row.is_met for row in bars)} of {len(bars)} bars met"
    )
    return results


def _check(file: Path, result: Mapping[str, Any]) -> None:
    """Raise unless the file is a known benchmark's and has what will be shown."""
    name = benchmark_of(file.stem)
    if name is None:
        raise UsageError(
            f"{file} is named after no benchmark; use one of {', '.join(BENCHMARKS)}, or NAME-MORE"
        )
    for key in (*_ABOUT, *bars_of(file.stem)):
        if key not in result:
            raise UsageError(
                f"{file} has no key {key!r}; make it anew: {BENCHMARKS[name].command(file.stem)}"
            )


def benchmark_of(stem: str) -> str | None:
    """Return the name in ``BENCHMARKS`` that a result's name is, or begins with."""
    names = [name for name in BENCHMARKS if stem == name or stem.startswith(f"{name}-")]
    return max(names, key=len, default=None)


def bars_of(stem: str) -> Mapping[str, Bar]:
    """Return the bars that a result has to reach."""
    return BENCHMARKS[stem].bars if stem in BENCHMARKS else {}


@dataclasses.dataclass(frozen=True)
class BarRow:
    """A figure and its bar."""

    name: str
    key: str
    figure: float
    bar: Bar

    @property
    def is_met(self) -> bool:
        """The figure reaches the bar."""
        return self.bar.is_met(self.figure)


def bar_rows(results: Mapping[str, Mapping[str, Any]]) -> list[BarRow]:
    """Return all figures that have a bar and were measured."""
    return [
        BarRow(name, key, results[name][key], bar)
        for name, benchmark in BENCHMARKS.items()
        if name in results
        for key, bar in benchmark.bars.items()
    ]


# The page.


def markdown(
    results: Mapping[str, Mapping[str, Any]], bars: Sequence[BarRow], folder: Path, page: Path
) -> str:
    """Return the page."""
    pictures = Path(os.path.relpath(folder, page.parent))
    rows = [
        [
            row.name,
            f"`{row.key}`",
            show(row.figure),
            str(row.bar),
            "met" if row.is_met else "**short**",
            *_commit(results[row.name]),
        ]
        for row in bars
    ]
    for name, benchmark in BENCHMARKS.items():
        if name not in results:
            rows += [
                [name, f"`{key}`", "not measured", str(bar), "", "", ""]
                for key, bar in benchmark.bars.items()
            ]
    parts = [
        "# Results of the benchmarks",
        "Made by `sebulba bench report` from the files in `results/`, each written by the command "
        "that stands with it. Bars are for 2 cores with JAX on a CPU; ratios and differences are "
        "medians over rounds, taken within a round, since machines drift.",
        table(["benchmark", "figure", "value", "bar", "", "commit", "of"], rows),
    ]
    if bars:
        parts.append(f"![How much of each bar was reached]({pictures / 'bars.png'})")
    for stem, result in results.items():
        parts += section(stem, result)
        if (folder / f"{stem}.png").exists():
            parts.append(f"![{stem}]({pictures / stem}.png)")
    return "\n\n".join(parts) + "\n"


def section(stem: str, result: Mapping[str, Any]) -> list[str]:
    """Return a result's heading, where it is from, its keys and its figures."""
    name = benchmark_of(stem)
    assert name is not None
    command = result.get("command") or BENCHMARKS[name].command(stem)
    machine, versions = result["machine"], result["versions"]
    devices = ", ".join(sorted(set(machine["devices"])))
    commit, date = _commit(result)
    about = (
        f"`{command}`\n\n"
        f"{machine.get('processor_model') or machine['processor']}, {machine['cores']} cores, "
        f"{machine['memory_gb']} GB; JAX {versions['jax']} on {devices}, Python "
        f"{versions['python']}; commit {commit} of {date}."
    )
    keys = [[f"`{key}`", show(value)] for key, value in scalars(result).items()]
    figures = [
        [title, *(show(f(values)) for f in (statistics.median, min, max)), str(len(values))]
        for title, values in result["figures"].items()
        if _is_numbers(values)
    ]
    return [
        f"## {stem}",
        about,
        table(["key", "value"], keys),
        table(["measured", "median", "lowest", "highest", "times"], figures),
    ]


def scalars(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a record that hold one value, also those one level down."""
    found: dict[str, Any] = {}
    for key, value in result.items():
        if key in _ABOUT or key == "command":
            continue
        inner = value.items() if isinstance(value, dict) else []
        found |= {f"{key}.{name}": one for name, one in inner if _is_scalar(one)}
        if _is_scalar(value):
            found[key] = value
    return found


def _is_scalar(value: Any) -> bool:
    return isinstance(value, str | int | float)


def _is_numbers(values: Any) -> bool:
    return (
        isinstance(values, list)
        and bool(values)
        and all(isinstance(value, int | float) for value in values)
    )


def _commit(result: Mapping[str, Any]) -> list[str]:
    """Return the commit, marked where files differed from it, and its date."""
    if result["commit"] is None:
        return ["unknown", "unknown"]
    return [
        result["commit"][:10] + (" (changed)" if result["is_modified"] else ""),
        result["commit_date"],
    ]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def show(value: Any) -> str:
    """Return a value as the page shows it: numbers in four digits or as whole ones."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def draw_bars(bars: Sequence[BarRow], picture: Path) -> None:
    """Draw how much of each bar was reached."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.6 + 0.35 * len(bars)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    reached = [min(max(row.bar.reached(row.figure), 0.0), _WIDEST) for row in bars]
    colours = [_COLOURS[row.is_met] for row in bars]
    axes.barh(range(len(bars)), reached, color=colours, height=0.6)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(bars)), [f"{row.name}: {row.key}" for row in bars], fontsize="small")
    axes.invert_yaxis()
    for i, (row, length) in enumerate(zip(bars, reached, strict=True)):
        axes.text(
            max(length, 1.0), i, f" {show(row.figure)} ({row.bar})", va="center", fontsize="small"
        )
    axes.set(xlabel="of the bar (1 is met)", xlim=(0, _WIDEST + 0.8))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=100)
