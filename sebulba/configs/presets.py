"""Ready experiments, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sebulba.configs import (
    ddpg_presets,
    dqn_presets,
    impala_presets,
    jax_many_agents_presets,
    ppo_presets,
    r2d2_presets,
    sac_presets,
    tasks,
)
from sebulba.configs.experiment import ExperimentConfig
from sebulba.configs.preset import Preset
from sebulba.errors import UsageError, shown
from sebulba.support import plugins

_ROOMS = (
    *(impala_presets, ppo_presets, dqn_presets, r2d2_presets, sac_presets, ddpg_presets),
    jax_many_agents_presets,
)
_WRITTEN = {name: preset for room in _ROOMS for name, preset in room.PRESETS.items()}

NEUTRAL = {agent: _WRITTEN[agent] for agent in ("impala", "ppo", "dqn", "r2d2", "sac", "ddpg")}
"""For any task that an agent can take, by the name that the command line knows."""

ATARI = {agent: _WRITTEN[f"atari-{agent}"] for agent in ("ppo", "impala", "dqn", "r2d2")}
"""For any game of Atari, by agent."""

OWN_NUMBERS = {
    **NEUTRAL,
    **dict(sorted(_WRITTEN.items(), key=lambda item: item[1] in ATARI.values())),
}
"""Those that are written out, by the name that the command line knows; any game's are last."""

_OTHER_NAMES = ("pong-impala", "breakout-impala")
"""Of ``pong`` and ``breakout``."""

BY_TASK: dict[str, Preset] = {
    name: preset
    for name, preset in {**tasks.task_presets(NEUTRAL), **tasks.game_presets(ATARI)}.items()
    if name not in _OTHER_NAMES
}
"""Those of ``OWN_NUMBERS`` in the environments of more tasks, by TASK-AGENT."""

_OURS: dict[str, Preset] = {**OWN_NUMBERS, **BY_TASK}


class _Presets(Mapping[str, Preset]):
    """Presets of Sebulba and of installed packages; the latter are imported when they are read.

    Reading one raises UsageError where its package is refused (``sebulba.support.plugins``).
    """

    def __getitem__(self, name: str) -> Preset:
        entry = plugins.find(plugins.PRESETS, name, _OURS)
        if entry is None:
            plugins.check_not_apart(plugins.PRESETS, name, f"the preset {name!r}")
            return _OURS[name]
        found = plugins.load(plugins.PRESETS, entry)
        found = found.get(name) if isinstance(found, Mapping) else found
        if not isinstance(found, Preset):
            raise UsageError(
                f"the preset {name!r} of the package {plugins.package_of(plugins.PRESETS, name)} "
                f"is {shown(found)}; it must be a sebulba.configs.preset.Preset, or a mapping that "
                "has one under that name"
            )
        return found

    def __contains__(self, name: object) -> bool:
        return name in _OURS or name in from_packages()

    def __iter__(self) -> Iterator[str]:
        return iter([*_OURS, *from_packages()])

    def __len__(self) -> int:
        return len(_OURS) + len(from_packages())


PRESETS: Mapping[str, Preset] = _Presets()
"""All, by the name that the command line knows."""


def from_packages() -> list[str]:
    """Return the names of the presets that installed packages bring, but for names of Sebulba."""
    return plugins.names(plugins.PRESETS, but=_OURS)


def tasks_with_names() -> dict[str, list[str]]:
    """Return the names in ``BY_TASK``, by the environment that they are for."""
    tasks_: dict[str, list[str]] = {}
    for name in BY_TASK:
        tasks_.setdefault(name.rpartition("-")[0], []).append(name)
    return tasks_


def goal_of(preset: str, config: ExperimentConfig) -> float | None:
    """Return the goal of a preset; None if it has none, or ``config`` has another environment."""
    if preset not in PRESETS:
        return None
    env, names = PRESETS[preset].make().env, ("id", "max_episode_steps", "options")
    same = all(getattr(env, name) == getattr(config.env, name) for name in names)
    return PRESETS[preset].goal if same else None
