"""Compiles the engine at its first use, and keeps the library for the next.

``python -m sebulba_networks.build`` compiles it now, and prints where it is.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from sebulba.errors import UsageError

SOURCES = Path(__file__).parent / "engine"
COMPILER = "g++"
FLAGS = (
    *("-std=c++20", "-O3", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden"),
    "-ffp-contract=off",  # products are not fused with sums: results are the same everywhere
)
COMPILE_TIMEOUT_S = 600
SHOWN_ERRORS = 5
"""Errors of the compiler that a message shows."""


def library() -> Path:
    """Return the compiled native engine (``compiled``)."""
    return compiled("engine", SOURCES / "engine.cc", FLAGS, SOURCES.iterdir())


def compiled(
    name: str,
    main: Path,
    flags: Sequence[str],
    sources: Iterable[Path],
    *,
    headers: Path | None = None,
) -> Path:
    """Return a compiled engine, which is compiled if there is none of this version yet.

    One library serves every Python. Processes that ask at once wait for the first one's.

    Args:
      name: First part of the file's name.
      main: What the compiler is given.
      flags: What the compiler is given besides; those of libraries count only after ``main``.
      sources: All files on which the library depends.
      headers: A folder in which the compiler looks for some of the sources, wherever it is: what
        they contain decides whether another library is compiled.

    Raises:
      UsageError: There is no compiler, the sources do not compile, or nothing can be kept.
    """
    compiler = shutil.which(COMPILER)
    if compiler is None:
        raise UsageError(
            f"the network engine is compiled at its first use, and {COMPILER} is not found; "
            "install it (on Debian and Ubuntu `apt-get install g++`)"
        )
    folder = cache_folder()
    kept = folder / f"{name}-{_key(compiler, flags, sources)}.so"
    command = (
        compiler,
        str(main),
        *flags,
        *(() if headers is None else ("-isystem", str(headers))),
    )
    if kept.exists():
        return kept
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / "lock"):
            if not kept.exists():
                _compile(command, kept)
    except OSError as error:
        raise UsageError(
            f"the network engine cannot be kept in {folder} ({error.strerror}); set XDG_CACHE_HOME "
            "to a folder that can be written"
        ) from error
    return kept


def cache_folder() -> Path:
    """Return the folder that keeps compiled engines."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(home)) / "sebulba" / "networks"


def _key(compiler: str, flags: Sequence[str], sources: Iterable[Path]) -> str:
    """Return a hash of everything that the library depends on."""
    of = (tuple(flags), platform.machine(), _version(compiler))
    content = hashlib.sha256(repr(of).encode())
    for file in sorted(sources):
        content.update(file.name.encode() + b"\0" + file.read_bytes())
    return content.hexdigest()[:24]


@functools.cache
def _version(compiler: str) -> str:
    return _run(compiler, "--version")


def _compile(command: Sequence[str], library: Path) -> None:
    handle, partial = tempfile.mkstemp(suffix=".so", prefix=".partial-", dir=library.parent)
    os.close(handle)
    try:
        _run(*command, "-o", partial)
        os.replace(partial, library)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)


def _run(*command: str) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=COMPILE_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"{command[0]} took more than {COMPILE_TIMEOUT_S} s; try again") from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        errors = [line for line in lines if "error" in line] or lines[:1]
        said = "\n".join(errors[:SHOWN_ERRORS]) or f"exit code {done.returncode}"
        raise UsageError(
            f"{command[0]} could not compile {command[1]}, which needs C++20 (g++ from version 10 "
            f"on):\n{said}"
        )
    return done.stdout


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    with open(file, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    print(library())
