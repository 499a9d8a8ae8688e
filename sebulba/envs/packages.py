"""Environments that installed packages bring: ``PREFIX:NAME`` and ``PREFIX/NAME``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from sebulba.errors import UsageError, shown
from sebulba.options import ENV_LIBRARIES
from sebulba.support import plugins
from sebulba.support.checks import nearest
from sebulba.types import EnvAdapter, EnvSpec, MultiAgentSpec


class VectorParts(NamedTuple):
    """What makes the vector environments of one kind, with its options."""

    make: Callable[[int, list[int]], EnvAdapter]
    """Makes one from the number of environments and their seeds."""
    make_spec: Callable[[], EnvSpec | MultiAgentSpec]
    """Makes the spec of a single environment, without one."""
    num_threads: int | None = None
    """Most threads that step a vector environment; None if that is unknown."""


@dataclasses.dataclass(frozen=True)
class VectorKind:
    """A kind of environment that comes as vectors and uses threads of its own."""

    parts: Callable[[Mapping[str, Any], int | None, float], VectorParts]
    """Given the environment's options, the option ``num_threads`` (None for the default) and the
    longest time of a step in seconds; raises UsageError for an option that breaks a rule."""


def is_package_id(env: Any) -> bool:
    """Tell whether an installed package has the prefix of an id.

    Raises:
      UsageError: Two packages have it, or one of them and Sebulba itself; or it is that of a
        package that belongs to Sebulba and is not installed.
    """
    if not isinstance(env, str):
        return False
    if plugins.env_entry(env, ENV_LIBRARIES) is not None:
        return True
    plugins.check_not_apart(plugins.ENVIRONMENTS, plugins.prefix_of(env) or "", f"env={env!r}")
    return False


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
            f"env={env!r}: the package {package} has {shown(found)} for {entry.name!r}; it must "
            "be a mapping from names to environments as make_env_factory takes them"
        )
    if name not in found:
        known = [f"{env[: -len(name)]}{one}" for one in found] if name else [*map(str, found)]
        hint = nearest(env, known) or f"; it has {', '.join(known)}"
        hint += getattr(found, "remedy", "")
        raise UsageError(f"env={env!r} is not an environment of the package {package}{hint}")
    return found[name]


def package_versions(env: str) -> dict[str, str]:
    """Return the package that has an id, and its version.

    Raises:
      UsageError: It cannot be imported, or has no such environment.
    """
    package_env(env)
    entry = plugins.env_entry(env, ENV_LIBRARIES)
    assert entry is not None, env
    return {} if entry.dist is None else {entry.dist.name: entry.dist.version}
