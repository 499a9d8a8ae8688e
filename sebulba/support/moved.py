"""What has another name by now: modules, some in other packages, and keys of files."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MOVED = {
    "sebulba.envs.networks": "sebulba_networks",
    "sebulba.tools.networks": "sebulba_networks.tools",
    "sebulba.commands.networks": "sebulba_networks.command",
    "sebulba.tools.check.env_check": "sebulba.tools.check.python_api",
    "sebulba.tools.check.agent_check": "sebulba.tools.check.python_api",
    "sebulba.tools.check.finding": "sebulba.tools.check.checks",
}
"""New names by old ones; what is below moved with them. Configurations, saved policies and programs
of users may have the old ones."""


RENAMED_KEYS = {"mean_return": "episode_return_mean"}
"""New keys by old ones, of the JSON files of a run."""


def with_new_keys(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a file of a run says by the keys that it would have now."""
    return {RENAMED_KEYS.get(key, key): value for key, value in record.items()}


class MovedModules:
    """Finds modules by their old names, for ``sys.meta_path``: they are those of the new names."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to import a module that has moved; None of any other."""
        new = _new_name(name)
        if new is None:
            return None
        import importlib.util

        package = new.partition(".")[0]
        if importlib.util.find_spec(package) is None:
            from sebulba.support.plugins import NotInstalledError, not_installed

            where = not_installed(package.replace("_", "-"))
            raise NotInstalledError(f"the module {name} is now {new} {where}")
        found = importlib.util.find_spec(new)
        if found is None:
            return None
        is_package = found.submodule_search_locations is not None
        loader: Any = _Loader(new)
        return ModuleSpec(name, loader, origin=found.origin, is_package=is_package)


class _Loader:
    def __init__(self, new: str) -> None:
        self._new, self._spec = new, None  # type: Any, Any

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module of the new name."""
        module = importlib.import_module(self._new)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Take back that the import system has given it the old name."""
        module.__spec__ = self._spec

    def get_code(self, name: str) -> Any:
        """Return its code, for ``python -m``."""
        import importlib.util

        found: Any = importlib.util.find_spec(self._new)
        return found.loader.get_code(self._new)


def _new_name(name: str) -> str | None:
    if not name.startswith("sebulba."):
        return None
    olds = (old for old in MOVED if f"{name}.".startswith(f"{old}."))
    return next((MOVED[old] + name[len(old) :] for old in olds), None)


def find_moved_modules() -> None:
    """Let Python find moved modules by their old names; a second call does nothing."""
    if MovedModules not in sys.meta_path:
        # First: a folder that is left over, with nothing but caches, would be found as the module.
        sys.meta_path.insert(0, MovedModules)  # type: ignore[arg-type]
