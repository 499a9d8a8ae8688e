"""What the faults did, kept in a file: rounds, outcomes, figures, machine and commit.

``make test-faults`` runs the long counts and gives ``--faults-json``.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sebulba.benchmarks import harness
from tests.faults import counts

OPTION = "--faults-json"
RESULTS = pytest.StashKey[dict[str, dict[str, Any]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, metavar="FILE", help="write what the tests of faults counted")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[RESULTS] = {}


@pytest.fixture(autouse=True)
def count_rounds(request: pytest.FixtureRequest) -> Iterator[None]:
    """Note how many rounds the test asked for while it ran."""
    counts.asked.clear()
    yield
    _result(request)["rounds"] = max(counts.asked, default=1)


@pytest.fixture
def record_fault(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return what keeps figures of a test: ``record_fault(name, **figures)``."""

    def record(name: str, **figures: Any) -> None:
        _result(request).setdefault("figures", {})[name] = figures

    return record


def _result(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.config.stash[RESULTS].setdefault(request.node.nodeid, {})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """Keep outcome and duration of the tests in this folder."""
    report: pytest.TestReport = yield
    if report.when == "call" or report.outcome != "passed":
        result = item.config.stash[RESULTS].setdefault(item.nodeid, {})
        result |= {"outcome": report.outcome, "seconds": round(report.duration, 2)}
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the file, if one is wanted."""
    file = session.config.getoption(OPTION, default=None)
    if file is None:
        return
    tests = session.config.stash[RESULTS]
    outcomes = [result.get("outcome") for result in tests.values()]
    keys = {name: outcomes.count(name) for name in ("passed", "failed", "skipped")}
    record = harness.record(keys, tests, {"long": counts.is_long()})
    harness.write_json(file, record | {"command": "make test-faults", "date": _now()})


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


@pytest.fixture(scope="session")
def compile_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which all processes of the session keep compiled programs."""
    return tmp_path_factory.mktemp("compiled")
