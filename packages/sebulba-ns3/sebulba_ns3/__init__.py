# SPDX-License-Identifier: GPL-2.0-or-later
"""The networks of Sebulba on ns-3: finds ns-3 and compiles the engine at its first use.

``Ns3Scenario`` is an environment made of an ns-3 program of one's own.

``python -m sebulba_ns3`` compiles it now, and prints where it is.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sebulba_networks import build

from sebulba.errors import UsageError
from sebulba.support.files import write_whole

if TYPE_CHECKING:
    from sebulba_ns3.scenario import Ns3Scenario

NS3_VERSION = "3.44.post0"
RELEASE = "3.44"
EXAMPLE = "packages/sebulba-ns3/examples/paced_sender.cc"
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
    return _compiled(f"ns3-{NS3_VERSION}", SOURCES / "engine.cc", LIBRARIES)


def scenario_library(source: str | os.PathLike[str]) -> Path:
    """Return the compiled scenario of an ns-3 program, which may use all of ns-3.

    Raises:
      UsageError: ns-3, the compiler or the file is missing, or the program does not compile.
    """
    path = Path(source)
    if not path.is_file():
        raise UsageError(f"source={str(source)!r} is no file; give a program such as {EXAMPLE}")
    names = (file.name for file in (find_ns3() / "lib64").glob(f"libns{RELEASE}-*.so"))
    every = sorted(name.removeprefix(f"libns{RELEASE}-").removesuffix(".so") for name in names)
    return _compiled(f"ns3-scenario-{path.stem}", path, every, _gtk_stand_in())


def _gtk_stand_in() -> tuple[str, ...]:
    """Return the flags of a library that has the functions of GTK, each of which ends the process.

    ns-3's LTE is linked with a window of GTK, whose libraries the wheel does not bring. The loader
    asks for its functions, and nothing calls them.
    """
    library = find_ns3() / "lib64" / f"libns{RELEASE}-config-store.so"
    command = ["nm", "--dynamic", "--undefined-only", str(library)]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ()  # programs without LTE do not need it
    names = sorted(set(re.findall(r"^ +U (g(?:tk|dk)?_\w+)$", told, re.MULTILINE)))
    text = "#include <cstdlib>\n" + "".join(
        f'extern "C" void {name}() {{ std::abort(); }}\n' for name in names
    )
    source = build.cache_folder() / f"gtk-{zlib.crc32(text.encode()):08x}.cc"
    if not source.exists():
        source.parent.mkdir(parents=True, exist_ok=True)
        write_whole(source, text)
    compiled = build.compiled("ns3-gtk", source, ("-fPIC", "-shared"), [source])
    return "-Wl,--no-as-needed", str(compiled)


def _compiled(name: str, main: Path, libraries: Iterable[str], before: Iterable[str] = ()) -> Path:
    ns3 = find_ns3()
    flags = (
        *FLAGS,
        *(f"-I{SOURCES}", f"-I{build.SOURCES}", f"-I{ns3 / 'include'}", f"-L{ns3 / 'lib64'}"),
        *(*before, "-Wl,--as-needed"),
        *(f"-lns{RELEASE}-{library}" for library in libraries),
        *(f"-Wl,-rpath,{ns3 / 'lib64'}", "-Wl,--allow-shlib-undefined"),
    )
    sources = {main, *SOURCES.iterdir(), *build.SOURCES.iterdir()}
    return build.compiled(name, main, flags, sources)


def find_ns3() -> Path:
    """Return the folder of ns-3, without an import of its Python bindings.

    Raises:
      UsageError: It is not installed, or another version is.
    """
    found = importlib.util.find_spec("ns3")
    if found is None or not found.submodule_search_locations:
        raise UsageError(
            f"engine='ns3' needs ns-3, which is not installed; `{INSTALL}` installs it"
        )
    version = importlib.metadata.version("ns3")
    if version != NS3_VERSION:
        raise UsageError(f"engine='ns3' needs ns3 {NS3_VERSION}, not {version}; `{INSTALL}`")
    return Path(next(iter(found.submodule_search_locations)))


def __getattr__(name: str) -> Any:
    if name == "Ns3Scenario":  # with Gymnasium, which compiling does without
        from sebulba_ns3.scenario import Ns3Scenario

        return Ns3Scenario
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["INSTALL", "NS3_VERSION", "Ns3Scenario", "find_ns3", "library", "scenario_library"]
