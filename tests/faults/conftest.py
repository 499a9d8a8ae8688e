"""What the faults did, kept in a file: rounds, outcomes, figures, machine and commit.

``make test-faults`` runs the long counts, and keeps what they came to in ``results``.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sebulba.tools.bench import harness
from tests.faults import counts

OPTION = "--faults-json"
PROPERTY = "fault"
"""Under which a test's own figures travel with its report, also from another process."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, metavar="FILE", help="write what the tests of faults counted")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption(OPTION, default=None)
    if file is not None and not hasattr(config, "workerinput"):  # nor in a worker of xdist
        config.pluginmanager.register(FaultResults(file))


@pytest.fixture(autouse=True)
def count_rounds(request: pytest.FixtureRequest) -> Iterator[None]:
    """Note how many rounds the test asked for while it ran, or how many inputs it was given."""
    counts.asked.clear()
    yield
    rounds = max((number for number in counts.asked if isinstance(number, int)), default=1)
    if statistics := getattr(request.node, "hypothesis_statistics", ""):  # of generated inputs
        rounds = sum(int(number) for number in re.findall(r"(\d+) passing", statistics))
    request.node.user_properties.append((PROPERTY, {"rounds": rounds}))


@pytest.fixture
def record_fault(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return what keeps figures of a test: ``record_fault(name, **figures)``."""

    def record(name: str, **figures: Any) -> None:
        request.node.user_properties.append((PROPERTY, {name: figures}))

    return record


class FaultResults:
    """Gathers what the reports of all tests say, and writes it at the end."""

    def __init__(self, file: str) -> None:
        """Write into ``file``."""
        self._file = file
        self._tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep outcome, duration and figures."""
        result = self._tests.setdefault(report.nodeid, {})
        if report.when == "call" or report.outcome != "passed":
            result |= {"outcome": report.outcome, "seconds": round(report.duration, 2)}
        if report.when == "teardown":  # the last, and has all of them
            for name, figures in report.user_properties:
                if name == PROPERTY:
                    result |= figures

    def pytest_sessionfinish(self) -> None:
        """Write the file."""
        outcomes = [result.get("outcome") for result in self._tests.values()]
        keys = {name: outcomes.count(name) for name in ("passed", "failed", "skipped")}
        keys["bad_inputs"] = sum(
            result["rounds"] for name, result in self._tests.items() if "test_bad_input" in name
        )
        tests = dict(sorted(self._tests.items()))
        record = harness.record(keys, tests, {"long": counts.is_long()})
        harness.write_json(self._file, record | {"command": "make test-faults", "date": _now()})


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


@pytest.fixture(scope="session")
def compile_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which all processes of the session keep compiled programs."""
    return tmp_path_factory.mktemp("compiled")
