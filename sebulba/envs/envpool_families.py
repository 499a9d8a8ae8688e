"""Imports envpool without the families whose native code cannot be loaded on this machine.

envpool imports all its families at once, and some need libraries of the system for drawing, which a
minimal installation does not have. The ids of such a family stay known; whoever asks for one of
them is told what is missing.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from sebulba.errors import UsageError, text_of

LEFT_OUT: dict[str, str] = {}
"""Why a family could not be loaded, by its package, such as ``envpool.gfootball``."""
PACKAGES = {"libEGL.so.1": "libegl1", "libOpenGL.so.0": "libopengl0", "libGL.so.1": "libgl1"}
"""Debian's packages of the libraries that families need."""


def import_envpool() -> Any:
    """Return the module ``envpool``.

    Raises:
      UsageError: It cannot be imported at all.
    """
    if "envpool" in sys.modules:
        return sys.modules["envpool"]
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        import envpool
    except Exception as error:  # native code of others may raise anything
        for name in [name for name in sys.modules if name.partition(".")[0] == "envpool"]:
            del sys.modules[name]
        raise UsageError(
            f"envpool cannot be imported: {text_of(error)}; install it again, or use Gymnasium's "
            "environments with --env.backend gymnasium"
        ) from error
    finally:
        sys.meta_path.remove(finder)
    return envpool


def check_family(env_id: str, family: str) -> None:
    """Raise UsageError if an environment is of a family that could not be loaded.

    Args:
      env_id: The environment.
      family: Its package, such as ``envpool.mujoco.gym``.
    """
    if (reason := LEFT_OUT.get(family)) is None:
        return
    raise UsageError(
        f"env={env_id!r} is of {family}, which cannot be loaded: {reason}; {remedy_of(reason)}"
    )


def remedy_of(reason: str) -> str:
    """Return what brings the library that a family lacks.

    Args:
      reason: Why it cannot be loaded.
    """
    packages = [package for library, package in PACKAGES.items() if library in reason]
    if not packages:
        return "install what is missing"
    # The loader names one at a time, and families that draw need both.
    return f"apt install {' '.join(sorted({*packages, 'libegl1', 'libopengl0'}))}"


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the packages of families and what registers them; those that fail become empty."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith("envpool."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None or name == "envpool.registration":
            return None
        registers_a_family = name.endswith(".registration")
        if spec.submodule_search_locations is None and not registers_a_family:
            return None
        spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """Loads a module; leaves it empty if that fails."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        try:
            self._inner.exec_module(module)
        except ImportError as error:
            LEFT_OUT.setdefault(module.__name__.removesuffix(".registration"), str(error))
