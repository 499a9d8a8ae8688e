"""Installs a package as pip would, without pip: its metadata lies in a folder of Python's path."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path


def install(
    folder: Path, name: str, entry_points: Mapping[str, Mapping[str, str]], version: str = "1.0"
) -> None:
    """Write the metadata of a package into a folder of Python's path.

    Args:
      folder: It.
      name: The package's name.
      entry_points: Values by group and name.
      version: The package's version.
    """
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = []
    for group, entries in entry_points.items():
        lines += [f"[{group}]", *(f"{entry} = {value}" for entry, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


def install_project(folder: Path, pyproject: str) -> None:
    """Write the metadata that a ``pyproject.toml`` declares into a folder of Python's path."""
    project = tomllib.loads(pyproject)["project"]
    install(folder, project["name"], project["entry-points"], project["version"])
