# SPDX-License-Identifier: GPL-2.0-or-later
"""Who sends what to whom in an episode: the picture of ``sebulba networks messages``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sebulba.configs.experiment import EnvConfig
from sebulba.envs import make_env_factory
from sebulba.errors import UsageError
from sebulba.loops.evaluation import evaluate
from sebulba.metrics.figures import BLUE, GREY, RED, open_frame, picture
from sebulba.policies.policy import Policy
from sebulba.types import EnvAdapter
from sebulba_ns3.program import NAME


def play(env: EnvConfig, policy: Policy, seed: int) -> dict[str, Any]:
    """Play an episode, and return what its applications did.

    Returns:
      ``connections``, each with ``from``, ``to``, ``via``, ``sent``, ``arrived``, ``bytes`` and the
      ``ages`` in seconds of the last 1000; ``agents``, each with ``name``, ``asked``, ``dropped``,
      ``waiting`` and the ``waits`` in seconds; ``nodes``, the node of each application.

    Raises:
      UsageError: The environment is not an ns-3 program, or one whose messages are not known.
    """
    if env.id != NAME:
        raise UsageError(f"the run was trained on {env.id}; give a run on {NAME}")
    make, reports = make_env_factory(env.id, **env.factory_arguments()), []

    def factory(num_envs: int, seeds: list[int]) -> EnvAdapter:
        adapter: Any = make(num_envs, seeds)
        adapter.on_end = lambda told: reports.append(adapter.report())
        return adapter

    evaluate(policy, factory, num_episodes=1, num_envs=1, seed=seed)
    if "connections" not in reports[0]:
        raise UsageError(
            f"{env.options.get('source')} has no messages to draw; give a run on a program that "
            "derives from sebulba::Network"
        )
    return reports[0]


def draw(report: Mapping[str, Any], file: str | Path, title: str) -> None:
    """Draw applications and messages, ages by connection, and what agents did with messages."""
    with picture(file, 12, 5) as figure:
        figure.suptitle(title)
        graph, ages, agents = figure.subplots(1, 3, width_ratios=(2, 1.2, 1))
        _draw_graph(report, graph)
        _draw_ages(report["connections"], ages)
        _draw_agents(report["agents"], agents)


def _label(one: Mapping[str, Any]) -> str:
    return f"{one['from']} > {one['to']}"


def _draw_graph(report: Mapping[str, Any], axes: Any) -> None:
    """Draw each application in its place on a circle, ordered by node, and arrows between them."""
    nodes = report["nodes"]
    names = sorted(nodes, key=lambda name: (nodes[name], name))
    deciding = {one["name"] for one in report["agents"]}
    angles = [2 * math.pi * i / len(names) + math.pi / 2 for i in range(len(names))]
    places = dict(zip(names, np.stack([np.cos(angles), np.sin(angles)], axis=1), strict=True))
    for one in report["connections"]:
        begin, end = places[one["from"]], places[one["to"]]
        arrow = {"arrowstyle": "->", "color": GREY, "shrinkA": 28, "shrinkB": 28}
        curve = {"connectionstyle": "arc3,rad=0.18"}
        axes.annotate("", end, begin, arrowprops=arrow | curve)
        lost = one["sent"] - one["arrived"]
        text = f"{one['via']}: {one['sent']}, {one['bytes'] / 1000:.1f} kB"
        across = np.array([end[1] - begin[1], begin[0] - end[0]]) * 0.1
        axes.text(
            *(0.7 * begin + 0.3 * end + across),
            text + (f", {lost} not arrived" if lost else ""),
            fontsize=7,
            color=RED if lost else "black",
            ha="center",
        )
    for name, place in places.items():
        box = {"boxstyle": "round", "facecolor": "white"}
        box["edgecolor"] = BLUE if name in deciding else GREY
        axes.text(*place, f"{name}\nnode {nodes[name]}", ha="center", va="center", bbox=box)
    axes.set(xlim=(-1.5, 1.5), ylim=(-1.4, 1.4), title="messages; agents are blue")
    axes.axis("off")


def _draw_ages(connections: list[Mapping[str, Any]], axes: Any) -> None:
    """Draw the distribution of the ages of messages that arrived."""
    arrived = [one for one in connections if one["ages"]]
    open_frame(axes, "x")
    if arrived:
        ages = [1000 * np.array(one["ages"]) for one in arrived]
        axes.boxplot(ages, orientation="horizontal", whis=(0, 100))
        axes.set_yticklabels([_label(one) for one in arrived], fontsize=7)
    axes.set(xlabel="ms", title="ages of messages")


def _draw_agents(agents: list[Mapping[str, Any]], axes: Any) -> None:
    """Draw how many observations each agent decided on, dropped, or still had in its queue."""
    open_frame(axes, "x")
    names, left = [one["name"] for one in agents], np.zeros(len(agents))
    parts = {
        "decided": [one["asked"] - one["dropped"] - one["waiting"] for one in agents],
        "waiting at the end": [one["waiting"] for one in agents],
        "dropped": [one["dropped"] for one in agents],
    }
    for (name, counts), color in zip(parts.items(), (BLUE, GREY, RED), strict=True):
        axes.barh(names, counts, 0.5, left=left, color=color, label=name)
        left = left + counts
    waits = [1000 * float(np.mean(one["waits"] or [0])) for one in agents]
    for name, total, wait in zip(names, left, waits, strict=True):
        axes.text(total, name, f" waited {wait:.1f} ms", va="center", fontsize=7)
    axes.set(xlabel="observations", title="agents", xlim=(0, 1.6 * max(1, *left)))
    axes.legend(frameon=False, fontsize=7, loc="lower center", bbox_to_anchor=(0.4, -0.35))
