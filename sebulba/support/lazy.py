"""Names of a package that are imported when they are first used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, modules: Mapping[str, str]) -> tuple[list[str], Callable[[str], Any]]:
    """Return ``__all__`` and ``__getattr__`` of a package.

    Args:
      package: Its name.
      modules: What it takes from each module: names with spaces between them.
    """
    module_of = {name: module for module, names in modules.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in module_of:
            known = ", ".join(sorted(module_of))
            raise AttributeError(f"module {package!r} has no attribute {name!r}; use {known}")
        return getattr(importlib.import_module(module_of[name]), name)

    return sorted(module_of), get
