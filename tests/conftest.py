"""Eight forced CPU devices stand in for many, and XLA compiles fast: set before JAX starts."""

from __future__ import annotations

import os
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.as_users import FAST

# It sizes JAX's thread pool, which collectives of more devices than cores would exhaust.
os.environ["NPROC"] = str(max(8, int(os.environ.get("NPROC", "0") or 0)))

# Most of the time is spent in XLA, which compiles faster with this. What tests start inherits it.
# Options that were set before come last, and so count.
os.environ["XLA_FLAGS"] = f"{FAST} {os.environ.get('XLA_FLAGS', '')}"

import jax

from sebulba.runs import jax_setup

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

FOLDER = pytest.StashKey[Path]()
NO_TIME_LEFT = "no time is left for slow tests (SLOW_TESTS_UNTIL)"


def pytest_configure(config: pytest.Config) -> None:
    """Choose the folder of compiled programs, unless this is a worker, which is given one.

    It outlasts the session, below ``.pytest_cache``: a second run compiles little. Programs of
    other versions and options of XLA have other keys. Old programs are removed, and another session
    of the same clone may do so at the same time.
    """
    if hasattr(config, "workerinput"):
        return
    folder = config.rootpath / ".pytest_cache" / "jax"
    folder.mkdir(parents=True, exist_ok=True)
    jax_setup._remove_old_files(str(folder))
    config.stash[FOLDER] = folder


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests marked ``slow`` that are not of the share ``SLOW_TESTS``, such as 1/2.

    Each of two Pythons runs one half of them, and all others. A test's name decides its half.
    """
    if not (share := os.environ.get("SLOW_TESTS")):
        return
    number, _, count = share.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise pytest.UsageError(f"SLOW_TESTS={share!r} must be a share such as 1/2")
    left_out = [
        item
        for item in items
        if item.get_closest_marker("slow")
        and zlib.crc32(item.nodeid.encode()) % int(count) != int(number) - 1
    ]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip slow tests after the time ``SLOW_TESTS_UNTIL``, in seconds since 1970."""
    until = float(os.environ.get("SLOW_TESTS_UNTIL") or "inf")
    if item.get_closest_marker("slow") and time.time() > until:
        pytest.skip(NO_TIME_LEFT)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many tests ``SLOW_TESTS_UNTIL`` left out."""
    skipped = terminalreporter.stats.get("skipped", ())
    if left_out := sum(NO_TIME_LEFT in str(report.longrepr) for report in skipped):
        terminalreporter.write_line(f"{left_out} slow tests were left out: {NO_TIME_LEFT}")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give the folder to a worker of pytest-xdist."""
    node.workerinput["compile_cache"] = str(node.config.stash[FOLDER])


@pytest.fixture(scope="session", autouse=True)
def compile_cache(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keep compiled programs: many tests make the same ones."""
    config: Any = request.config
    is_worker = hasattr(config, "workerinput")
    folder = config.workerinput["compile_cache"] if is_worker else str(config.stash[FOLDER])
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # What a test configures later changes neither backend nor cache, whichever test comes first.
    jax.jit(lambda x: x + 1)(0)
    with pytest.MonkeyPatch.context() as patch:
        # Also for the processes that tests start, and instead of the user's own folder.
        patch.setenv("JAX_COMPILATION_CACHE_DIR", folder)
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        yield
    jax.config.update("jax_compilation_cache_dir", None)


@pytest.fixture(autouse=True)
def import_path() -> Iterator[None]:
    """Forget which folders a test's code was imported from: a later test may use the same names."""
    before = list(sys.path)
    yield
    sys.path[:] = before


@pytest.fixture(scope="session", autouse=True)
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Sign with a key of the session instead of the user's own, in started processes too."""
    file = tmp_path_factory.mktemp("key") / "key"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SEBULBA_KEY_FILE", str(file))
        yield file
