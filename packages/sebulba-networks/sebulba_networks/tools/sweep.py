"""``sebulba networks sweep``: a policy inside its training ranges, and beyond them."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from sebulba.loops.evaluation import evaluation_seeds
from sebulba.metrics.figures import BLUE, GREY, RED, open_frame, picture
from sebulba.policies.policy import Policy
from sebulba_networks.options import CongestionControlOptions
from sebulba_networks.tools.playing import (
    FIXED,
    ORACLE,
    POLICY,
    RULES,
    Comparison,
    Figures,
    compare,
    packets,
)

SWEPT = {
    "bandwidth_mbps": "bandwidth in Mbit/s",
    "rtt_ms": "round-trip propagation in ms",
    "buffer_packets": "buffer in packets",
}
BEYOND = 4.0
"""How far beyond its training range a parameter goes, as a factor."""
STYLES: dict[str, dict[str, Any]] = {
    POLICY: {"color": BLUE, "linewidth": 2.2, "marker": "o", "markersize": 4},
    ORACLE: {"color": "black", "linestyle": "--", "linewidth": 1.2},
    FIXED: {"color": GREY, "linestyle": ":", "linewidth": 1.6},
    "AIMD": {"color": RED, "linewidth": 1.2},
    "CUBIC": {"color": "#3a9a5b", "linewidth": 1.2},
    "BBR-like": {"color": "#8a5bb5", "linewidth": 1.2},
}
ORDER = (POLICY, ORACLE, FIXED, *RULES)


def sweep(
    options: CongestionControlOptions, policy: Policy, *, points: int, networks: int, seed: int
) -> dict[str, Any]:
    """Return what a policy does in its training ranges, and with one parameter varied.

    Args:
      options: The network that it was trained in.
      policy: What was trained.
      points: Values of each parameter; the others are at the mean of their ranges.
      networks: Networks drawn from the training ranges.
      seed: Of these.
    """
    means = {name: _mean(options, name) for name in SWEPT}
    window = packets(means["bandwidth_mbps"] * 1e6, means["rtt_ms"] / 1e3)
    inside = compare(options, policy, window, evaluation_seeds(seed, networks))
    swept = {}
    for name in SWEPT:
        values = _values(options, name, points)
        at = [_at(options, means | {name: value}) for value in values]
        compared = [compare(one, policy, window, evaluation_seeds(seed, 1)) for one in at]
        swept[name] = {
            "values": values,
            "training_range": list(getattr(options, name)),
            "figures": {who: [_record(one[who]) for one in compared] for who in ORDER},
        }
    return {
        "networks": networks,
        "seed": seed,
        "means": means,
        "fixed_window_packets": window,
        "inside": {who: _record(inside[who]) for who in ORDER},
        "gap_closed": gap_closed(inside),
        "sweep": swept,
    }


def _at(options: CongestionControlOptions, network: dict[str, Any]) -> CongestionControlOptions:
    return dataclasses.replace(options, **network)


def gap_closed(inside: Comparison) -> float:
    """Return the share of the way from the fixed window's return to the oracle's."""
    mine, low, high = (
        Figures.mean(inside[who]).episode_return_mean for who in (POLICY, FIXED, ORACLE)
    )
    return (mine - low) / (high - low) if high > low else math.nan


def _record(figures: list[Figures]) -> dict[str, float]:
    return dataclasses.asdict(Figures.mean(figures))


def _mean(options: CongestionControlOptions, name: str) -> float:
    low, high = getattr(options, name)
    middle = (low + high) / 2
    return round(middle) if name == "buffer_packets" else middle


def _values(options: CongestionControlOptions, name: str, points: int) -> list[float]:
    low, high = getattr(options, name)
    values = np.geomspace(low / BEYOND, high * BEYOND, points)
    if name == "buffer_packets":
        return np.maximum(1, values.round()).tolist()
    return values.tolist()


# What is shown.


def table(swept: dict[str, Any]) -> Table:
    """Return the means inside the training ranges and beyond them."""
    shown = Table("ranges", "window")
    for what in ("return", "throughput", "queueing delay", "loss"):
        shown.add_column(what, justify="right", no_wrap=True)
    beyond = {who: _mean_beyond(swept["sweep"], who) for who in ORDER}
    for where, means in (("inside", swept["inside"]), ("beyond", beyond)):
        shown.add_section()
        for number, who in enumerate(ORDER):
            style = "bold" if who == POLICY else ""
            shown.add_row("" if number else where, who, *_cells(means[who]), style=style)
    return shown


def _cells(one: dict[str, float]) -> tuple[str, ...]:
    return (
        f"{one['episode_return_mean']:.1f}",
        f"{one['throughput']:.1%}",
        f"{one['queueing_delay_ms']:.2f} ms",
        f"{one['loss']:.2%}",
    )


def _mean_beyond(of_parameters: dict[str, Any], who: str) -> dict[str, float]:
    """Return the means over all values that are outside the training ranges."""
    outside = [
        Figures(**figures)
        for one in of_parameters.values()
        for value, figures in zip(one["values"], one["figures"][who], strict=True)
        if not one["training_range"][0] <= value <= one["training_range"][1]
    ]
    return dataclasses.asdict(Figures.mean(outside))


ROWS = {
    "episode_return_mean": ("return of an episode", 1.0),
    "throughput": ("throughput in %\nof the capacity", 100.0),
    "queueing_delay_ms": ("queueing delay in ms", 1.0),
    "loss": ("loss in %", 100.0),
}
LINEAR_UP_TO = {"queueing_delay_ms": 0.1, "loss": 0.01}
"""Axes that are logarithmic from there on."""


def draw(swept: dict[str, Any], file: Path, title: str) -> None:
    """Draw all figures over each parameter, its training range shaded."""
    with picture(file, 11, 10) as figure:
        axes = figure.subplots(len(ROWS), len(SWEPT), sharex="col", sharey="row")
        for column, (name, one) in enumerate(swept["sweep"].items()):
            for row, figure_name in enumerate(ROWS):
                _draw_panel(axes[row][column], one, figure_name)
            _mark_values(axes[-1][column], one["values"])
            axes[-1][column].set_xlabel(SWEPT[name])
        for row, (name, (label, _)) in enumerate(ROWS.items()):
            axes[row][0].set_ylabel(label)
            _scale(axes[row][0], name)
        handles, labels = (list(reversed(x)) for x in axes[0][0].get_legend_handles_labels())
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
        figure.suptitle(title)


def _draw_panel(axes: Any, one: dict[str, Any], name: str) -> None:
    factor = ROWS[name][1]
    axes.axvspan(*one["training_range"], color=BLUE, alpha=0.08, linewidth=0)
    for who in reversed(ORDER):
        heights = [factor * figures[name] for figures in one["figures"][who]]
        axes.plot(one["values"], heights, label=who, **STYLES[who])
    open_frame(axes, "both")


def _mark_values(axes: Any, values: list[float]) -> None:
    """Make the axis logarithmic, with every second value at it."""
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log")
    axes.set_xticks(
        values[::2], [f"{value:.3g}" if value < 1000 else f"{value:.0f}" for value in values[::2]]
    )
    axes.xaxis.set_minor_locator(NullLocator())


def _scale(axes: Any, name: str) -> None:
    """Let the axis begin at 0, after all is drawn that shares it."""
    if name in LINEAR_UP_TO:
        axes.set_yscale("symlog", linthresh=LINEAR_UP_TO[name])
        axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylim(bottom=0)
