"""Environments that installed packages bring: ``PREFIX:NAME`` and ``PREFIX/NAME``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sebulba.errors import UsageError, shown
from sebulba.options import ENV_LIBRARIES
from sebulba.support import plugins
from sebulba.support.checks import nearest


def is_package_id(env: Any) -> bool:
    """Tell whether an installed package has the prefix of an id.

    Raises:
      UsageError: Two packages have it, or one of them and Sebulba itself.
    """
    return isinstance(env, str) and plugins.env_entry(env, ENV_LIBRARIES) is not None


def package_env(env: str) -> Any:
    """Return what a package has under an id for which ``is_package_id`` holds.

    Raises:
      UsageError: The package cannot be imported, or has no such environment.
    """
    entry = plugins.env_entry(env, ENV_LIBRARIES)
    assert entry is not None, env
    found, name = plugins.load(plugins.ENVIRONMENTS, entry), env[len(entry.name) + 1 :]
    package = plugins.package_of(plugins.ENVIRONMENTS, entry.name)
    if not isinstance(found, Mapping):
        raise UsageError(
            f"env={env!r}: the package {package} has {shown(found)} for {entry.name!r}; it must be "
            "a mapping from names to what make_env_factory takes"
        )
    if name not in found:
        hint = nearest(name, found) or f"; it has {', '.join(map(str, found))}"
        raise UsageError(
            f"env={env!r}: {name!r} is not an environment of the package {package}{hint}"
        )
    return found[name]


def package_versions(env: str) -> dict[str, str]:
    """Return the package that has an id, and its version.

    Raises:
      UsageError: It cannot be imported, or has no such environment.
    """
    package_env(env)
    entry = plugins.env_entry(env, ENV_LIBRARIES)
    assert entry is not None, env
    return plugins.versions(entry)
