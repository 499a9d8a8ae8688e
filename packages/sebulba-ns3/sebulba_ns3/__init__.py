# SPDX-License-Identifier: GPL-2.0-or-later
"""The networks of Sebulba on ns-3: finds ns-3 and compiles the engine at its first use.

``python -m sebulba_ns3`` compiles it now, and prints where it is.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

from sebulba.envs.networks import build
from sebulba.errors import UsageError

NS3_VERSION = "3.44.post0"
INSTALL = f"pip install --no-deps ns3=={NS3_VERSION}"
"""The one command that installs ns-3. Its declared dependencies, which are compiled, are for its
Python bindings, which are not used here."""
SOURCES = Path(__file__).parent / "engine"
FLAGS = (
    *("-std=c++20", "-O2", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden"),
    "-ffp-contract=off",
    *("-DNS3_LOG_ENABLE", "-DNS3_ASSERT_ENABLE"),  # as ns-3 was compiled: classes depend on them
)
LIBRARIES = ("core", "network", "internet", "point-to-point", "traffic-control")


def library() -> Path:
    """Return the compiled engine.

    Raises:
      UsageError: ns-3 or the compiler is missing, or the sources do not compile.
    """
    ns3 = find_ns3()
    libraries = ns3 / "lib64"
    flags = (
        *FLAGS,
        *(f"-I{build.SOURCES}", f"-I{ns3 / 'include'}", f"-L{libraries}"),
        *(f"-lns3.44-{name}" for name in LIBRARIES),
        *(f"-Wl,-rpath,{libraries}", "-Wl,--allow-shlib-undefined"),
    )
    sources = (*SOURCES.iterdir(), *build.SOURCES.iterdir())
    return build.compiled(f"ns3-{NS3_VERSION}", SOURCES / "engine.cc", flags, sources)


def find_ns3() -> Path:
    """Return the folder of ns-3, without an import of its Python bindings.

    Raises:
      UsageError: It is not installed, or another version is.
    """
    found = importlib.util.find_spec("ns3")
    if found is None or not found.submodule_search_locations:
        raise UsageError(f"engine='ns3' needs ns-3, which is not installed; `{INSTALL}` installs it")
    version = importlib.metadata.version("ns3")
    if version != NS3_VERSION:
        raise UsageError(f"engine='ns3' needs ns3 {NS3_VERSION}, not {version}; `{INSTALL}`")
    return Path(next(iter(found.submodule_search_locations)))
