"""Installed versions against those that are supported."""

from __future__ import annotations

import importlib.metadata
import platform
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.requirements import Requirement  # as matplotlib and tensorboardX do
from packaging.specifiers import SpecifierSet

import sebulba
from sebulba.tools.check.checks import Finding, Level, note, ok, problem


def check_versions() -> Iterator[Finding]:
    """Yield one finding of all supported packages, and one of each other package."""
    supported, python = supported_versions()
    system = f"{platform.system()} {platform.machine()}, {platform.release()}"
    yield ok(f"{sebulba.__version__}, on {system}", name="sebulba")
    yield version_finding("Python", platform.python_version(), python)
    findings = [_package_finding(*one) for one in {**supported, "jaxlib": _rule_of_jax()}.items()]
    fine = [f"{found.name} {found.seen}" for found in findings if found.level is Level.OK]
    yield ok(", ".join(fine) or "none of those that are needed", name="packages")
    yield from (found for found in findings if found.level is not Level.OK)


def _package_finding(package: str, rule: SpecifierSet | None) -> Finding:
    try:
        return version_finding(package, importlib.metadata.version(package), rule)
    except importlib.metadata.PackageNotFoundError:
        return problem("is not installed", f"pip install '{package}{rule or ''}'", package)


def version_finding(package: str, version: str, rule: SpecifierSet | None) -> Finding:
    """Return whether ``version`` is within ``rule``."""
    if rule is None:
        return note(f"{version}; which ones are supported is not known here", name=package)
    shown = ", ".join(sorted((str(one) for one in rule), reverse=True))
    if rule.contains(version, prereleases=True):
        return ok(version, name=package)
    if package == "Python":
        remedy = "make a virtual environment with another Python, and install Sebulba there"
    else:
        remedy = f"pip install '{package}{rule}'"
    return problem(f"{version} is not supported; it must be {shown}", remedy, package)


def supported_versions() -> tuple[dict[str, SpecifierSet], SpecifierSet | None]:
    """Return the supported versions of packages and of Python.

    A checkout's ``pyproject.toml`` says them, elsewhere the metadata of the installed package.
    """
    file = Path(sebulba.__file__).parent.parent / "pyproject.toml"
    project = tomllib.loads(file.read_text()).get("project", {}) if file.is_file() else {}
    if project.get("name") == "sebulba":
        return _rules(project["dependencies"]), SpecifierSet(project["requires-python"])
    try:
        metadata = importlib.metadata.metadata("sebulba")
    except importlib.metadata.PackageNotFoundError:
        return {}, None
    python = metadata["Requires-Python"]
    requirements = metadata.get_all("Requires-Dist") or []
    return _rules(requirements), SpecifierSet(python) if python else None


def _rule_of_jax() -> SpecifierSet | None:
    try:
        return _rules(importlib.metadata.requires("jax") or []).get("jaxlib")
    except importlib.metadata.PackageNotFoundError:
        return None


def _rules(requirements: Iterable[str]) -> dict[str, SpecifierSet]:
    parsed = map(Requirement, requirements)
    # A requirement of an extra may name a package a second time.
    return {
        one.name: one.specifier
        for one in parsed
        if one.marker is None or "extra" not in str(one.marker)
    }
