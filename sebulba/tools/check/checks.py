"""Checks that run one after the other; the failure of one does not end the report."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

from sebulba.errors import UsageError, describe_error
from sebulba.tools.check.finding import Finding, Level, problem


@dataclasses.dataclass(frozen=True)
class Check:
    """One check."""

    name: str
    """Name in the report."""
    run: Callable[[], Iterable[Finding]]
    """Yields what it finds."""
    needs: tuple[str, ...] = ()
    """Names of checks that have to pass before this one makes sense."""


class Begun(NamedTuple):
    """A check begins."""

    name: str
    """Its name."""


class Done(NamedTuple):
    """A check has ended, or was skipped."""

    name: str
    """Its name."""
    passed: bool
    """It found no problem."""
    because: tuple[str, ...] = ()
    """Names of the checks that failed, so that this one was skipped."""


Event = Begun | Done | Finding
SubjectT = TypeVar("SubjectT")


def suite(
    make: Callable[[], SubjectT], checks_of: Callable[[SubjectT], list[Check]]
) -> list[Check]:
    """Return the checks of what ``make`` returns, or one that shows what its module raised.

    Raises:
      UsageError: ``make`` raised it.
    """
    try:
        return checks_of(make())
    except UsageError:
        raise
    except Exception as error:
        return [Check("importing", functools.partial(_raise, error))]


def _raise(error: Exception) -> Iterator[Finding]:
    raise error


def run_checks(checks: Iterable[Check], passed: Mapping[str, bool]) -> Iterator[Event]:
    """Run checks in order and yield what happens.

    Args:
      checks: Checks to run.
      passed: Whether each check passed that was run or skipped before, which are not run again.
    """
    has_passed = dict(passed)
    for check in checks:
        if check.name in passed:
            continue
        because = tuple(name for name in check.needs if not has_passed.get(name, False))
        if because:
            has_passed[check.name] = False
            yield Done(check.name, False, because)
            continue
        yield Begun(check.name)
        has_passed[check.name] = True
        for finding in _findings(check):
            has_passed[check.name] &= finding.level is not Level.PROBLEM
            yield finding
        yield Done(check.name, has_passed[check.name])


def _findings(check: Check) -> Iterator[Finding]:
    try:
        for finding in check.run():
            yield finding if finding.name else dataclasses.replace(finding, name=check.name)
    except (Exception, SystemExit) as error:
        yield problem(describe_error(error), "correct the code that raises it", check.name)
