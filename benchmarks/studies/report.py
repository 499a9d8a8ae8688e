"""``report``: a page of tables and pictures from the JSON of the last results."""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.studies import gallery as gallery_page
from benchmarks.studies import zoo_table
from benchmarks.studies.learn import RESULTS
from benchmarks.studies.learning_goals import GOALS
from benchmarks.studies.tables import show, table
from benchmarks.studies.train import PROTOTYPE
from sebulba.commands.bench import STUDIES
from sebulba.errors import UsageError
from sebulba.metrics.figures import BLUE, RED, open_frame, picture
from sebulba.support.files import read_json_object

BARS = "bars.png"
"""File of the picture of the bars, beside the page."""


@dataclasses.dataclass(frozen=True)
class Bar:
    """The value that a figure has to reach."""

    value: float
    """The least, or the most, that the figure may be."""
    is_limit: bool = False
    """The figure may be at most ``value``, not at least."""

    def __str__(self) -> str:
        return f"{'≤' if self.is_limit else '≥'} {show(self.value)}"

    def is_met(self, figure: float) -> bool:
        """Tell whether ``figure`` reaches it."""
        return figure <= self.value if self.is_limit else figure >= self.value

    def reached(self, figure: float) -> float:
        """Return how much of it was reached, 1 where it is just met."""
        if not self.is_limit:
            return figure / self.value
        # At or below zero there is no ratio, and nothing left to reach.
        return self.value / figure if figure > 0 else float("inf")


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """What makes a result, and what the result has to reach on 2 cores with JAX on a CPU."""

    arguments: str
    """Words after ``python -m benchmarks``, without the files to write."""
    bars: Mapping[str, Bar] = dataclasses.field(default_factory=dict)
    """Bars by key of the JSON."""
    has_picture: bool = False
    """The benchmark draws a PNG of its own."""

    def command(self, name: str) -> str:
        """Return the command that makes ``results/NAME.json``."""
        picture = f" --png {RESULTS}/{name}.png" if self.has_picture else ""
        return f"python -m benchmarks {self.arguments} --json {RESULTS}/{name}.json{picture}"


_CEILING = {"achieved_over_ceiling": Bar(0.85)}

BENCHMARKS: dict[str, Benchmark] = {
    "inference": Benchmark(
        "inference",
        {"fused_over_bare": Bar(2.2), "stepped_over_bare": Bar(0.85), "jit_gain": Bar(1.37)},
    ),
    "train-cartpole": Benchmark(
        "train cartpole --compare stepped fused prototype",
        {**_CEILING, "fused_over_stepped": Bar(2.8), "stepped_over_prototype": Bar(0.90)},
        has_picture=True,
    ),
    "train-pong": Benchmark(
        "train pong --num-envs 16 --num-cpu-devices 2 --inference-devices 0 --update-devices 0 1",
        _CEILING,
        has_picture=True,
    ),
    "train-halfcheetah": Benchmark("train halfcheetah", _CEILING, has_picture=True),
    "overhead": Benchmark("overhead", {"overhead_us_per_step": Bar(15, is_limit=True)}),
    "rivals": Benchmark("rivals", {"sac_over_faster": Bar(1), "dqn_over_faster": Bar(1)}),
    "memory": Benchmark(
        "memory pong", {"rss_slope_mb_per_min": Bar(1, is_limit=True)}, has_picture=True
    ),
    "start": Benchmark("start", {"first_update_beyond_imports_s": Bar(2.5, is_limit=True)}),
    "scale": Benchmark("scale cartpole", has_picture=True),
    "tune": Benchmark("tune cartpole"),
    "learn": Benchmark("learn cartpole"),
    **{f"learn-{name}": Benchmark(f"learn {name}", {"share_of_seeds": Bar(1)}) for name in GOALS},
}
"""Benchmarks by name of the JSON file. ``NAME-MORE.json`` is a result of another machine and has no
bars."""

_ABOUT = ("figures", "config", "machine", "versions", "commit", "commit_date", "is_modified")
"""Fields of a record that say how its keys came about."""
_WIDEST = 2.5
"""Longest line in the picture of the bars, as a multiple of the bar."""


def run(folder: str = RESULTS, page: str | None = None, gallery: str | None = None) -> dict:
    """Write the page, with pictures of bars and scores beside it, and the gallery, or print it.

    Args:
      folder: Folder of the results: ``NAME.json``, and ``NAME.png`` if a benchmark drew one.
      page: Markdown file to write; with neither file, the page is printed, without bars.
      gallery: Markdown file of the gallery of presets; None writes none.

    Returns:
      The results, by name.

    Raises:
      UsageError: There is no result, a file has an unknown name, or a key is missing.
    """
    files = sorted(Path(folder).glob("*.json"))
    if not files:
        example = BENCHMARKS["inference"].command("inference")
        raise UsageError(f"{folder} holds no results; make some, such as {example}")
    results = {file.stem: read_json_object(file) for file in files}
    for file in files:
        _check(file, results[file.stem])
    bars = bar_rows(results)
    if page is None and gallery is None:
        print(markdown(results, bars, Path(folder), None), end="")
    if page is not None:
        if bars:
            draw_bars(bars, Path(page).with_name(BARS))
        zoo_table.draw_scores(results, Path(page))
        Path(page).write_text(markdown(results, bars, Path(folder), Path(page)), encoding="utf-8")
        num_met = sum(row.bar.is_met(row.figure) for row in bars)
        print(f"{page}: {len(results)} results, {num_met} of {len(bars)} bars met")
    if gallery is not None:
        text = gallery_page.markdown(results, Path(folder), Path(gallery))
        Path(gallery).write_text(text, encoding="utf-8")
        print(f"{gallery}: what the presets learned")
    return results


def _check(file: Path, result: Mapping[str, Any]) -> None:
    """Raise UsageError unless a known benchmark made the file and it has all that is shown."""
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
    """Return the longest name in ``BENCHMARKS`` that a result's name is, or begins with."""
    names = [name for name in BENCHMARKS if stem == name or stem.startswith(f"{name}-")]
    return max(names, key=len, default=None)


def bars_of(stem: str) -> Mapping[str, Bar]:
    """Return the bars that a result has to reach."""
    return BENCHMARKS[stem].bars if stem in BENCHMARKS else {}


class BarRow(NamedTuple):
    """A figure and its bar."""

    name: str
    """Name of the result."""
    key: str
    """Key of the figure in its JSON."""
    figure: float
    """The figure."""
    bar: Bar
    """What it has to reach."""


def bar_rows(results: Mapping[str, Mapping[str, Any]]) -> list[BarRow]:
    """Return the measured figures that have a bar."""
    return [
        BarRow(name, key, results[name][key], bar)
        for name, benchmark in BENCHMARKS.items()
        if name in results
        for key, bar in benchmark.bars.items()
    ]


def markdown(
    results: Mapping[str, Mapping[str, Any]],
    bars: Sequence[BarRow],
    folder: Path,
    page: Path | None,
) -> str:
    """Return the page, in Markdown, as ``page``; None has links from the current folder."""
    pictures = Path(os.path.relpath(folder, page.parent if page else None))
    rows = [
        [
            row.name,
            f"`{row.key}`",
            show(row.figure),
            str(row.bar),
            "met" if row.bar.is_met(row.figure) else "**short**",
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
        "Made by `python -m benchmarks report` from the files in `benchmarks/results/`, each "
        "written by the command that stands with it.",
        *zoo_table.markdown(results, has_picture=page is not None),
        "## Bars",
        "Bars are for 2 cores with JAX on a CPU; ratios and differences are medians over rounds, "
        "taken within a round, since machines drift.",
        table(["benchmark", "figure", "value", "bar", "", "commit", "of"], rows),
    ]
    if bars and page is not None:
        parts.append(f"![How much of each bar was reached]({BARS})")
    for stem, result in results.items():
        parts += section(stem, result)
        if (folder / f"{stem}.png").exists():
            parts.append(f"![{stem}]({pictures / stem}.png)")
    return "\n\n".join(parts) + "\n"


def section(stem: str, result: Mapping[str, Any]) -> list[str]:
    """Return the parts of a result's section: heading, origin, keys and figures."""
    name = benchmark_of(stem)
    assert name is not None
    command = command_today(result.get("command")) or BENCHMARKS[name].command(stem)
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


def command_today(command: str | None) -> str | None:
    """Return the command that repeats a result which another one made, before studies moved."""
    program, _, words = (command or "").partition(" bench ")
    is_old = program == "sebulba" and words and (words.split()[0] in STUDIES or PROTOTYPE in words)
    return f"python -m benchmarks {words}" if is_old else command


def scalars(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a record that hold a single value, those one level down included."""
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
    """Return the commit, with a mark if files differed from it, and its date."""
    if result["commit"] is None:
        return ["unknown", "unknown"]
    return [
        result["commit"][:10] + (" (changed)" if result["is_modified"] else ""),
        result["commit_date"],
    ]


def draw_bars(bars: Sequence[BarRow], png_file: Path) -> None:
    """Draw how much of each bar was reached."""
    reached = [min(max(row.bar.reached(row.figure), 0.0), _WIDEST) for row in bars]
    colours = [BLUE if row.bar.is_met(row.figure) else RED for row in bars]
    names = [f"{row.name}: {row.key}" for row in bars]
    with picture(png_file, 8, 0.6 + 0.35 * len(bars), dots_per_inch=100) as figure:
        axes = figure.add_subplot()
        axes.barh(range(len(bars)), reached, color=colours, height=0.6)
        axes.axvline(1, color="black", linewidth=1)
        axes.set_yticks(range(len(bars)), names, fontsize="small")
        axes.invert_yaxis()
        for i, (row, length) in enumerate(zip(bars, reached, strict=True)):
            text = f" {show(row.figure)} ({row.bar})"
            axes.text(max(length, 1.0), i, text, va="center", fontsize="small")
        axes.set(xlabel="of the bar (1 is met)", xlim=(0, _WIDEST + 0.8))
        open_frame(axes)
