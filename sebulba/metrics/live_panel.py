"""A live panel on a terminal: learning progress, speed, use of time, and time left."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from sebulba.metrics.counters import of_groups, of_prefix
from sebulba.metrics.short_text import count, duration, number
from sebulba.metrics.writers import seconds_left
from sebulba.support.streams import show_notices_by

SPARKS = "▁▂▃▄▅▆▇█"
REFRESH_PER_S = 4
ACCENT = "bold cyan"
DIM = "grey62"
PHASE_COLORS = ("cyan", "green", "yellow", "magenta", "blue", "red", "bright_green", "bright_blue")
LABEL_WIDTH = 10
MAX_WIDTH = 110
ECHO_WIDTH = len("^C")
"""Cells to the right of the panel: what the terminal writes there must not begin another line."""
KNOWN = frozenset(
    (
        *("updates", "env_steps", "frames", "cycles", "total_cycles", "seconds"),
        *("env_steps_per_s", "updates_per_s", "episodes", "episode_return_mean"),
        *("episode_length_mean", "episodes_averaged"),
        *("policy_lag_mean", "policy_lag_max", "policy_lag_counts"),
        *("loss", "queue_fill", "dropped_cycles", "masked_truncations"),
        *("env_restarts", "skipped_updates", "elo", "elo_interval"),
        *("nodes", "nodes_lost", "relay_ms", "relay_bytes_per_s", "relay_skipped_networks"),
        *("eval_return_mean", "eval_return_std", "eval_length_mean", "eval_episodes"),
        *("eval_env_steps", "eval_seconds", "eval_skipped", "eval_cut_episodes"),
    )
)
"""Metrics that have their own place in the panel; those of the agent follow the loss."""


class PanelWriter:
    """Shows the newest record in a panel, for which rich asks at every redraw, in a thread."""

    def __init__(
        self, title: str, folder: str, describe: Callable[[], str], console: Console | None = None
    ) -> None:
        """Make the panel; ``start`` shows it.

        Args:
          title: Name of what runs.
          folder: Folder into which it writes.
          describe: Says which devices do what; called at every redraw.
          console: Where to draw; None takes the terminal.
        """
        self._title = title
        self._folder = folder
        self._describe = describe
        self._metrics: Mapping[str, Any] | None = None
        self._num_records = 0
        self._returns: list[float] = []
        self._evaluation: Mapping[str, Any] | None = None
        self._eval_returns: list[float] = []
        self._notice = ""
        self._began = time.perf_counter()
        self._started = self._finished = False
        self._live = Live(self, console=console, refresh_per_second=REFRESH_PER_S)

    def start(self) -> None:
        """Show the panel; before the first record it says that programs are being compiled."""
        self._began = time.perf_counter()
        self._live.start()
        self._started = True
        show_notices_by(self.notify)

    def notify(self, words: str) -> None:
        """Show these words below the figures, until the end."""
        self._notice = words

    def write(self, metrics: Mapping[str, Any]) -> None:
        mean = metrics.get("episode_return_mean")
        if mean is not None:
            self._returns = [*self._returns, mean]
        evaluated = metrics.get("eval_return_mean")
        if evaluated is not None:
            self._evaluation = metrics
            self._eval_returns = [*self._eval_returns, evaluated]
        self._metrics = metrics
        self._num_records += 1

    def close(self) -> None:
        """Draw the last record once more and leave the panel on the screen."""
        if self._started:
            self._started, self._finished = False, True
            show_notices_by(None)
            self._live.stop()

    def __rich_console__(self, console: Console, options: Any) -> Any:
        """Draw for the width of the console."""
        width = min(options.max_width - ECHO_WIDTH, MAX_WIDTH)
        inner = width - 6
        metrics = self._metrics
        body = self._waiting() if metrics is None else self._body(metrics, inner)
        if self._notice and not self._finished:
            body = Group(body, Text(self._notice, style="bold yellow", overflow="fold"))
        yield Panel(
            body,
            title=Text.assemble((" sebulba ", ACCENT), (f"{self._title} ", "bold")),
            title_align="left",
            subtitle=Text(f" {self._folder} ", style=DIM),
            subtitle_align="right",
            box=box.ROUNDED,
            border_style="cyan",
            padding=(0, 2),
            width=width,
        )

    def _waiting(self) -> RenderableType:
        seconds = time.perf_counter() - self._began
        return Group(
            Text(self._describe(), style=DIM),
            Text(f"compiling and collecting the first trajectories, {seconds:.0f} s"),
        )

    def _body(self, metrics: Mapping[str, Any], width: int) -> RenderableType:
        rows = Table.grid(padding=(0, 1))
        rows.add_column(width=LABEL_WIDTH, style=DIM, no_wrap=True)
        rows.add_column(width=width - LABEL_WIDTH - 1, no_wrap=True, overflow="ellipsis")
        value_width = width - LABEL_WIDTH - 1
        rows.add_row("progress", self._progress(metrics, value_width))
        rows.add_row("return", self._return(metrics, value_width))
        if groups := of_groups(metrics):
            rows.add_row("by group", _groups(groups, value_width))
        if shares := of_prefix(metrics, "win_rate/"):
            rows.add_row("win rate", _win_rates(metrics, shares, value_width))
        if self._evaluation is not None:
            rows.add_row("evaluation", self._evaluated(self._evaluation, value_width))
            if groups := of_groups(self._evaluation, "eval_return_mean"):
                rows.add_row("by group", _groups(groups, value_width))
        rows.add_row("speed", _speed(metrics))
        rows.add_row("queue", _queue(metrics))
        if "nodes" in metrics:
            rows.add_row("nodes", _nodes(metrics))
        rows.add_row("loss", _loss(metrics, value_width))
        for side in ("learner", "inferencer"):
            phases = _phases(metrics, side)
            if phases:
                rows.add_row(side, stacked_bar(phases, value_width))
                rows.add_row("", legend(phases, value_width))
        return Group(rows, Text(self._describe(), style=DIM, overflow="fold"))

    def _progress(self, metrics: Mapping[str, Any], width: int) -> Text:
        cycles, total = metrics.get("cycles") or 0, metrics.get("total_cycles") or 0
        share = cycles / total if total else 0.0
        elapsed = metrics.get("seconds") or 0.0
        left = seconds_left(metrics)
        text = f" {share:4.0%}  {count(metrics.get('env_steps'))} env steps  {duration(elapsed)}"
        # The first window is mostly compiling, so its pace says nothing about the time left.
        if left is not None and self._num_records > 1 and not self._finished:
            text += f", {duration(left)} left"
        return bar(share, max(8, width - len(text) - 1), "green") + Text(text)

    def _return(self, metrics: Mapping[str, Any], width: int) -> Text:
        mean = metrics.get("episode_return_mean")
        if mean is None:
            return Text("- before the end of the first episode", style=DIM)
        text = f"  length {number(metrics.get('episode_length_mean'))}"
        text += f"  {count(metrics.get('episodes'))} episodes"
        value = Text(f"{number(mean):<8}", style=ACCENT)
        return value + Text(sparkline(self._returns, max(8, width - 9 - len(text))), "cyan") + text

    def _evaluated(self, metrics: Mapping[str, Any], width: int) -> Text:
        text = f"  ± {number(metrics.get('eval_return_std'))}"
        text += f" at {count(metrics.get('eval_env_steps'))} env steps"
        if cut := metrics.get("eval_cut_episodes"):
            text += f", {count(cut)} episodes cut"
        value = Text(f"{number(metrics.get('eval_return_mean')):<8}", style=ACCENT)
        spark = sparkline(self._eval_returns, max(8, width - 9 - len(text)))
        return value + Text(spark, "cyan") + text


def _fitting(parts: Iterable[Text], width: int) -> Text:
    """Return the first parts side by side, as many as fit."""
    text = Text()
    for part in parts:
        if len(text) + len(part) > width:
            break
        text.append(part)
    return text


def _groups(means: Mapping[str, float], width: int) -> Text:
    return _fitting((Text(f"{name} {number(mean)}  ") for name, mean in means.items()), width)


def _win_rates(metrics: Mapping[str, Any], shares: Mapping[str, float], width: int) -> Text:
    """Return whom the learner of a league beats how often, and its Elo rating."""
    parts = [Text(f"{name} {share:.0%}  ") for name, share in shares.items()]
    if margin := metrics.get("elo_interval"):
        parts.insert(0, Text(f"Elo {metrics['elo']:+.0f} ± {margin:.0f}  ", "bold"))
    return _fitting(parts, width)


def _speed(metrics: Mapping[str, Any]) -> Text:
    return Text.assemble(
        (count(metrics.get("env_steps_per_s")), ACCENT),
        " env steps/s  ",
        (count(metrics.get("updates_per_s")), "bold"),
        " updates/s",
    )


def _queue(metrics: Mapping[str, Any]) -> Text:
    fill = metrics.get("queue_fill")
    text = bar(fill or 0.0, 10, "yellow")
    text.append(" -  " if fill is None else f" {fill:4.0%}")
    text.append("  policy lag ", DIM)
    text.append(number(metrics.get("policy_lag_mean")), "bold")
    text.append(f" mean  {number(metrics.get('policy_lag_max'))} max")
    if dropped := metrics.get("dropped_cycles"):
        text.append(f"  {count(dropped)} dropped", "red")
    if restarts := metrics.get("env_restarts"):
        text.append(f"  {count(restarts)} environments restarted", "red")
    if skipped := metrics.get("skipped_updates"):
        text.append(f"  {count(skipped)} updates skipped", "red")
    return text


def _nodes(metrics: Mapping[str, Any]) -> Text:
    """Return how many nodes have Inferencers, and what the way to them costs."""
    text = Text.assemble((count(metrics["nodes"]), "bold"))
    if (relay_ms := metrics.get("relay_ms")) is not None:
        text.append(f"  {number(relay_ms)} ms an item")
    text.append(f"  {number((metrics.get('relay_bytes_per_s') or 0.0) / 1e6)} MB/s")
    if skipped := metrics.get("relay_skipped_networks"):
        text.append(f"  {skipped:.0%} of networks skipped", DIM)
    if lost := metrics.get("nodes_lost"):
        text.append(f"  {count(lost)} lost", "red")
    return text


def _loss(metrics: Mapping[str, Any], width: int) -> Text:
    others = (
        Text(f"  {name.removesuffix('_loss')} {number(value)}", DIM)
        for name, value in metrics.items()
        if name not in KNOWN and "/" not in name and isinstance(value, int | float)
    )
    return _fitting((Text(number(metrics.get("loss")), "bold"), *others), width)


def _phases(metrics: Mapping[str, Any], side: str) -> dict[str, float]:
    shares = of_prefix(metrics, f"time/{side}/")
    return {name: share for name, share in shares.items() if share >= 0.005}


def bar(share: float, width: int, color: str) -> Text:
    """Return a bar of ``width`` cells, of which ``share`` (0 to 1) are full."""
    full = round(min(1.0, max(0.0, share)) * width)
    return Text.assemble(("━" * full, color), ("─" * (width - full), "grey35"))


def stacked_bar(phases: Mapping[str, float], width: int) -> Text:
    """Return one bar with a segment for each phase's share; what is missing to 1 is dim."""
    text, used, total = Text(), 0, 0.0
    scale = max(1.0, sum(phases.values()))
    for color, share in zip(_colors(phases), phases.values(), strict=True):
        # Rounding the running total keeps the whole at its width.
        total += share / scale
        cells = round(total * width) - used
        text.append("█" * cells, color)
        used += cells
    return text.append("░" * (width - used), "grey35")


def legend(phases: Mapping[str, float], width: int) -> Text:
    """Return names and shares of the segments of ``stacked_bar``, largest first, as many as fit."""
    colors = dict(zip(phases, _colors(phases), strict=True))
    parts = (
        Text.assemble(("■", colors[name]), f" {name} {phases[name]:.0%}  ")
        for name in sorted(phases, key=phases.__getitem__, reverse=True)
    )
    return _fitting(parts, width + 2)


def _colors(phases: Mapping[str, float]) -> list[str]:
    return [PHASE_COLORS[i % len(PHASE_COLORS)] for i in range(len(phases))]


def sparkline(values: list[float], width: int) -> str:
    """Return a curve of ``values`` in ``width`` characters, scaled from their lowest to highest.

    If there are more values than characters, groups of values are averaged.
    """
    if not values or width < 1:
        return ""
    groups = min(width, len(values))
    edges = [round(i * len(values) / groups) for i in range(groups + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(SPARKS[int((mean - low) / span * (len(SPARKS) - 1))] for mean in means)
