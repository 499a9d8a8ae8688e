"""``sebulba networks fairness`` and ``play``: flows over time, and how they share a link."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from sebulba.metrics.figures import GREY, open_frame, picture
from sebulba.policies.policy import Policy
from sebulba_networks.native import PACKET_BYTES, PAYLOAD_BYTES
from sebulba_networks.options import CongestionControlOptions, SharedBottleneckOptions
from sebulba_networks.tools.playing import (
    POLICY,
    RULES,
    Learned,
    columns,
    ignored,
    packets,
    play,
)

COLOURS = ("#2a78b5", "#d1602a", "#3a9a5b", "#8a5bb5", "#b0892a")
Flow = dict[str, np.ndarray]
"""What an agent saw, ``[N]`` by the names in ``native.INFO``."""


def flows_of(options: CongestionControlOptions, policy: Policy, seed: int) -> list[Flow]:
    """Return the flows of an episode whose agents all have ``policy``."""
    make = functools.partial(Learned, policy) if options.control == "agent" else lambda: ignored
    return [columns(seen) for seen in play(options, lambda slot: make(), [seed])]


def fairness(options: SharedBottleneckOptions, policy: Policy, seed: int) -> dict[str, Any]:
    """Return how flows of the policy share a bottleneck, and those that it is compared with.

    Args:
      options: The network.
      policy: Moves the window of every flow.
      seed: Of the episode.
    """
    controls: dict[str, Any] = {POLICY: "agent", **RULES}
    shared = {}
    for name, control in controls.items():
        network = dataclasses.replace(options, control=control)
        shared[name] = share_of(flows_of(network, policy, seed))
    return {"options": dataclasses.asdict(options), "seed": seed, "shared": shared}


def share_of(flows: list[Flow]) -> dict[str, Any]:
    """Return what each flow got while all were there, and Jain's index of it."""
    begin = max(flow["time_ns"][0] for flow in flows)
    end = min(flow["time_ns"][-1] for flow in flows)
    spans = {"together": (begin, end), "second_half": ((begin + end) / 2, end)}
    goodput = {name: [_goodput(flow, *span) for flow in flows] for name, span in spans.items()}
    return {
        "seconds_together": max(0.0, (end - begin) / 1e9),
        "goodput_mbps": goodput,
        "jain": {name: jain(values) for name, values in goodput.items()},
        "loss": [flow["lost"].sum() / max(flow["sent"].sum(), 1) for flow in flows],
        "flows": [_trace(flow) for flow in flows],
    }


def jain(shares: list[float]) -> float:
    """Return Jain's index: 1 where all have the same, 1/n where one has all."""
    squares = len(shares) * sum(share**2 for share in shares)
    return sum(shares) ** 2 / squares if squares else 1.0


def _goodput(flow: Flow, begin: float, end: float) -> float:
    """Return the payload that was acknowledged between two times in ns, in Mbit/s."""
    if end <= begin:
        return 0.0
    first = flow["time_ns"] - flow["interval_ns"]
    overlap = np.minimum(flow["time_ns"], end) - np.maximum(first, begin)
    share = np.clip(overlap, 0, None) / np.maximum(flow["interval_ns"], 1)
    return float((share * flow["acked"]).sum() * PAYLOAD_BYTES * 8e3 / (end - begin))


def _trace(flow: Flow) -> dict[str, list[float]]:
    return {
        "time_s": (flow["time_ns"] / 1e9).round(4).tolist(),
        "window": flow["window"].round(2).tolist(),
        "throughput_mbps": (flow["throughput_bps"] / 1e6).round(3).tolist(),
    }


def table(result: dict[str, Any]) -> Table:
    """Return Jain's index and what the flows got, by who moved the windows."""
    number = len(next(iter(result["shared"].values()))["flows"])
    shown = Table("windows", title=f"{number} flows while all are there")
    for name in ("Jain's index", "second half", "goodput in Mbit/s", "loss"):
        shown.add_column(name, justify="right")
    for who, one in result["shared"].items():
        shown.add_row(
            who,
            f"{one['jain']['together']:.3f}",
            f"{one['jain']['second_half']:.3f}",
            ", ".join(f"{value:.1f}" for value in one["goodput_mbps"]["together"]),
            ", ".join(f"{value:.2%}" for value in one["loss"]),
            style="bold" if who == POLICY else "",
        )
    return shown


def draw_fairness(result: dict[str, Any], file: Path, title: str) -> None:
    """Draw windows and throughputs over time, a column for each who moved the windows."""
    shared = result["shared"]
    bandwidth, rtt = (np.mean(result["options"][name]) for name in ("bandwidth_mbps", "rtt_ms"))
    marks = {
        "window": packets(bandwidth * 1e6, rtt / 1e3),
        "throughput_mbps": bandwidth * PAYLOAD_BYTES / PACKET_BYTES,
    }
    mark_names = {"window": "product of bandwidth and delay", "throughput_mbps": "capacity"}
    labels = {"window": "window in packets", "throughput_mbps": "throughput in Mbit/s"}
    with picture(file, 13, 5.6) as figure:
        axes = figure.subplots(2, len(shared), sharex=True, sharey="row")
        for column, (who, one) in enumerate(shared.items()):
            axes[0][column].set_title(f"{who}: Jain's index {one['jain']['together']:.3f}")
            axes[1][column].set_xlabel("time in s")
            for row, name in enumerate(labels):
                _draw_flows(axes[row][column], one["flows"], name)
                axes[row][column].axhline(
                    marks[name], color=GREY, linestyle="--", linewidth=1, label=mark_names[name]
                )
                axes[row][0].set_ylabel(labels[name])
        for row in axes:
            row[0].set_ylim(bottom=0)
            row[0].legend(loc="upper right", frameon=False, fontsize=8)
        axes[0][0].set_xlim(0, max(flow["time_s"][-1] for flow in shared[POLICY]["flows"]))
        figure.suptitle(title)


def _draw_flows(axes: Any, flows: list[dict[str, list[float]]], name: str) -> None:
    for index, flow in enumerate(flows):
        axes.plot(flow["time_s"], flow[name], color=COLOURS[index % len(COLOURS)], linewidth=1.2)
    open_frame(axes, "both")


# One episode.


def title(flows: list[Flow], run: str) -> str:
    """Return the title of the picture of an episode: the run and the network."""
    first = {name: values[0] for name, values in flows[0].items()}
    return (
        f"{run}: {first['bandwidth_bps'] / 1e6:.1f} Mbit/s, {first['base_rtt_ns'] / 1e6:.1f} ms, "
        f"buffer {first['buffer_packets']:.0f} packets"
    )


def draw_episode(flows: list[Flow], file: Path, title: str, names: Sequence[str] = ()) -> None:
    """Draw window, queue, RTT, loss and throughput of an episode over time.

    Args:
      flows: At least one.
      file: PNG to write.
      title: Of the picture.
      names: Of the flows; none are numbers.
    """
    names = names or [f"flow {index}" if len(flows) > 1 else "" for index in range(len(flows))]
    first = {name: values[0] for name, values in flows[0].items()}
    bandwidth = first["bandwidth_bps"]
    product = packets(bandwidth, first["base_rtt_ns"] / 1e9)
    capacity = bandwidth * PAYLOAD_BYTES / PACKET_BYTES / 1e6
    panels = (
        _Panel("window", "window\nin packets", 1, product, "product of bandwidth and delay"),
        _Panel("queue_length", "queue\nin packets", 1, first["buffer_packets"], "buffer"),
        _Panel("srtt_ns", "smoothed RTT\nin ms", 1e-6, first["base_rtt_ns"] / 1e6, "least RTT"),
        _Panel("throughput_bps", "throughput\nin Mbit/s", 1e-6, capacity, "capacity"),
        _Panel("loss", "loss in %", 100),
    )
    losses = [np.minimum(1, flow["lost"] / np.maximum(flow["sent"], 1)) for flow in flows]
    flows = [{**flow, "loss": loss} for flow, loss in zip(flows, losses, strict=True)]
    with picture(file, 9, 9) as figure:
        axes = figure.subplots(len(panels), 1, sharex=True)
        for axis, panel in zip(axes, panels, strict=True):
            _draw_panel(axis, flows, panel, names)
        axes[-1].set_xlabel("time in s")
        figure.suptitle(title)


class _Panel(NamedTuple):
    """One of the things that are drawn over time."""

    name: str
    """Of what is drawn of a flow."""
    label: str
    """Of the axis."""
    factor: float
    """From the flow's unit to that of the axis."""
    mark: float | None = None
    """Where a line goes, in the unit of the axis."""
    mark_name: str = ""
    """What the line is."""


def _draw_panel(axes: Any, flows: list[Flow], panel: _Panel, names: Sequence[str]) -> None:
    for index, flow in enumerate(flows):
        axes.plot(
            flow["time_ns"] / 1e9,
            panel.factor * flow[panel.name],
            color=COLOURS[index % len(COLOURS)],
            linewidth=1.2,
            label=names[index] or None,
        )
    if panel.mark is not None:
        axes.axhline(panel.mark, color=GREY, linestyle="--", linewidth=1, label=panel.mark_name)
        axes.legend(loc="best", frameon=False, fontsize=8)
    axes.set_ylabel(panel.label)
    axes.set_ylim(bottom=0)
    open_frame(axes, "both")
