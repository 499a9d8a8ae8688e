"""What installed packages bring by entry points. Free of JAX.

Names are read from the packages' metadata when they are first asked for. A package is imported when
one of its names is used, so one that is broken stops nobody who uses another.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from sebulba.errors import UsageError, text_of

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


class NotInstalledError(UsageError, ModuleNotFoundError):
    """Something is in a package that belongs to Sebulba and is not installed."""


class Group(NamedTuple):
    """A kind of thing that packages bring."""

    name: str
    """The group of entry points."""
    what: str
    """One of its things, for messages."""


ENVIRONMENTS = Group("sebulba.environments", "the prefix of environments")
"""By the prefix of their ids: a mapping from names to what ``make_env_factory`` takes."""
PRESETS = Group("sebulba.presets", "the preset")
"""By name: a ``Preset``, or a mapping that has one under that name."""
COMMANDS = Group("sebulba.commands", "the command")
"""By the word after ``sebulba``: a function of the words after it that returns the exit code."""
WRITERS = Group("sebulba.writers", "the writer")
"""By the name of ``--writers``: what makes a writer."""
RECORDERS = Group("sebulba.recorders", "the recorder")
"""``training`` and ``evaluation``: what makes a recorder of ``--record-dataset``."""
TRAINERS = Group("sebulba.trainers", "the trainer")
"""By the name of ``--trainer``: a function that changes an ``ExperimentConfig``."""

_NETWORKS, _EXTERNAL, _LEAGUE = "sebulba-networks", "sebulba-external", "sebulba-league"
_OFFLINE = "sebulba-offline"
_APART = {
    ENVIRONMENTS: {
        "sebulba": _NETWORKS,
        "networked": _NETWORKS,
        "external": _EXTERNAL,
        "sets": "sebulba-sets",
        "ns3": "sebulba-ns3",
    },
    PRESETS: {
        **{f"congestion-{agent}": _NETWORKS for agent in ("ppo", "impala", "sac", "ddpg")},
        "shared-bottleneck-ppo": _NETWORKS,
        **{f"{of}pqn": "sebulba-pqn" for of in ("", "cartpole-", "atari-", "breakout-minatar-")},
        **{f"{game}-league": _LEAGUE for game in ("kuhn", "leduc", "tic-tac-toe", "connect-four")},
        **dict.fromkeys(("bc", "iql", "td3-bc", "rebrac", "sac-data"), _OFFLINE),
    },
    RECORDERS: dict.fromkeys(("training", "evaluation"), _OFFLINE),
    TRAINERS: dict.fromkeys(("self-play", "league", "psro", "population", "curriculum"), _LEAGUE),
    COMMANDS: {
        "networks": _NETWORKS,
        "serve": _EXTERNAL,
        "sweep": "sebulba-sweep",
        "league": _LEAGUE,
        "play": _LEAGUE,
        "dataset": _OFFLINE,
        "board": "sebulba-board",
        "report": "sebulba-board",
    },
}
"""Packages that belong to Sebulba and are installed apart from it, by the names that they bring."""

_PREFIX = re.compile(r"([^:/]+)(?::|/(?!.*:))", re.DOTALL)
"""Of ``PREFIX:NAME`` and ``PREFIX/NAME``, but not of ``folder/file.py:attribute``."""


def names(group: Group, but: Collection[str] = ()) -> list[str]:
    """Return the names that packages bring, sorted, without those in ``but``."""
    return sorted(_entries(group.name, tuple(sys.path)).keys() - set(but))


def package_of(group: Group, name: str) -> str:
    """Return the packages that bring a name, as text."""
    return " and ".join(_packages(_entries(group.name, tuple(sys.path))[name]))


def find(group: Group, name: str, ours: Iterable[str] = ()) -> EntryPoint | None:
    """Return the entry point of a name; None if no package brings it. Nothing is imported.

    Args:
      ours: Names of that kind that Sebulba itself has.

    Raises:
      UsageError: Two packages bring it, or one of them and Sebulba itself.
    """
    entries = _entries(group.name, tuple(sys.path)).get(name, ())
    packages = _packages(entries)
    if entries and name in ours:
        raise UsageError(
            f"{group.what} {name!r} belongs to Sebulba, and the package {' and '.join(packages)} "
            f"also brings it; pip uninstall {packages[0]}, or give its entry point "
            "another name"
        )
    if len(entries) > 1:
        raise UsageError(
            f"{group.what} {name!r} is brought by the packages {' and '.join(packages)}; pip "
            "uninstall one of them, or give its entry point another name"
        )
    return entries[0] if entries else None


def check_not_apart(group: Group, name: str, what: str) -> None:
    """Raise UsageError if a package brings a name that is not installed and belongs to Sebulba."""
    package = _APART[group].get(name)
    if package is not None and name not in names(group):
        raise NotInstalledError(f"{what} is {not_installed(package)}")


def not_installed(package: str) -> str:
    """Return that something is of a package which is not installed, and the remedy."""
    return (
        f"of the package {package}, which is not installed; pip install {package} (in a checkout: "
        f"pip install ./packages/{package})"
    )


def load(group: Group, entry: EntryPoint) -> Any:
    """Return what an entry point names.

    Raises:
      UsageError: It cannot be imported.
    """
    try:
        return entry.load()
    except (Exception, SystemExit) as error:  # of the package: a missing import, ...
        (package,) = _packages([entry])
        raise UsageError(
            f"{group.what} {entry.name!r} is brought by the package {package}, which cannot be "
            f"imported: its entry point {entry.name} = {entry.value} ({group.name}) raises "
            f"{text_of(error)}; pip install --upgrade {package}, or pip uninstall {package}"
        ) from error


def env_entry(env_id: str, ours: Iterable[str] = ()) -> EntryPoint | None:
    """Return the entry point that brings an environment; None if no package does.

    Args:
      env_id: ``PREFIX:NAME`` or ``PREFIX/NAME``, where the name of the entry point is PREFIX.

    Raises:
      UsageError: ``find`` refuses the prefix.
    """
    prefix = prefix_of(env_id)
    return None if prefix is None else find(ENVIRONMENTS, prefix, ours)


def parallel_members() -> Any:
    """Return the module that has members learn on devices of their own."""
    try:
        return importlib.import_module("sebulba_league.parallel")
    except ModuleNotFoundError as error:
        raise NotInstalledError(f"update_devices by member is {not_installed(_LEAGUE)}") from error


def prefix_of(env_id: str) -> str | None:
    """Return PREFIX of ``PREFIX:NAME`` and ``PREFIX/NAME``; None of any other id."""
    match = _PREFIX.match(env_id)
    return None if match is None else match[1]


def _packages(entries: Iterable[EntryPoint]) -> list[str]:
    """Return the names of the packages that have these entry points."""
    return [entry.value if entry.dist is None else entry.dist.name for entry in entries]


@functools.lru_cache(maxsize=32)
def _entries(group: str, path: tuple[str, ...]) -> Mapping[str, tuple[EntryPoint, ...]]:
    """Return the entry points of a group by name, as Python finds them on ``path``."""
    from importlib import metadata  # slow to import, and commands can do without

    found: dict[str, tuple[EntryPoint, ...]] = {}
    for entry in metadata.entry_points(group=group):
        found[entry.name] = (*found.get(entry.name, ()), entry)
    return found
