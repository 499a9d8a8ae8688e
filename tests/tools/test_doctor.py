"""The doctor: this machine as it is has no problem, and each planted one is found."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import json
import os
import shutil
import tempfile
from pathlib import Path

import jax
import pytest
from packaging.specifiers import SpecifierSet
from rich.console import Console

from sebulba.commands import cli
from sebulba.envs import gymnasium_adapter
from sebulba.support import machine
from sebulba.tools.check import doctor, self_tests
from sebulba.tools.check.checks import (
    Check,
    Finding,
    Level,
    Report,
    note,
    ok,
    problem,
    run_checks,
    table,
)
from sebulba.tools.check.versions import check_versions, supported_versions, version_finding

GB = 10**9


def findings(check) -> list[Finding]:
    return [e for e in run_checks([Check("x", check)], {}) if isinstance(e, Finding)]


def problems(check) -> list[Finding]:
    return [finding for finding in findings(check) if finding.level is Level.PROBLEM]


@pytest.mark.slow
def test_this_machine_has_no_problem_and_nothing_is_left_behind(capsys, tmp_path, monkeypatch):
    folder, file = tmp_path / "here", tmp_path / "report.json"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    code = cli.main(["doctor", "--platform", "cpu", "--json", str(file)])
    out = capsys.readouterr().out
    assert code == 0, out
    assert list(folder.iterdir()) == []
    record = json.loads(file.read_text())
    names = [finding["name"] for finding in record["findings"]]
    assert record["problems"] == 0
    for name in ("Python", "packages", "devices", "cores", "memory", "disk", "compile cache"):
        assert name in names
    for name in ("envpool atari", "extras", "aliasing, ours", "donation", "gradient", "training"):
        assert name in names
    assert "OK       disk: " in out and str(folder / "runs") in out
    assert out.splitlines()[-1].startswith("this machine: no problems")


# What is installed.


def test_a_version_out_of_range_is_a_problem(monkeypatch):
    real = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "0.9.1" if name == "jax" else real(name)
    )
    (found,) = problems(check_versions)
    assert found.name == "jax" and "0.9.1 is not supported" in found.seen
    assert found.remedy.startswith("pip install 'jax") and ">=0.10" in found.remedy


def test_a_package_that_is_missing_is_a_problem(monkeypatch):
    real = importlib.metadata.version

    def version(name):
        if name == "optax":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    (found,) = problems(check_versions)
    assert found.name == "optax" and found.seen == "is not installed"


def test_the_supported_versions_are_those_of_the_project():
    rules, python = supported_versions()
    assert rules["jax"].contains("0.10.2") and not rules["jax"].contains("0.9.9")
    assert python is not None and not python.contains("3.10.1")
    found = version_finding("Python", "3.10.1", python)
    assert found.level is Level.PROBLEM and "virtual environment" in found.remedy


@pytest.mark.parametrize(
    ("version", "rule", "level"),
    [
        ("1.2", SpecifierSet(">=1.2"), Level.OK),
        ("1.3.dev1", SpecifierSet(">=1.2"), Level.OK),
        ("2.0", SpecifierSet("<2"), Level.PROBLEM),
        ("2.0", None, Level.NOTE),
    ],
)
def test_versions_are_compared_by_their_rule(version, rule, level):
    assert version_finding("x", version, rule).level is level


# The machine.


def test_a_platform_that_cannot_start_is_explained(monkeypatch):
    def no_backend(backend=None):
        raise AssertionError

    monkeypatch.setattr(jax, "local_devices", no_backend)
    (found,) = problems(doctor.check_devices)
    assert "JAX cannot start platform" in found.seen and "--platform cpu" in found.remedy


def test_a_compile_cache_that_cannot_be_written_is_a_problem(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (found,) = problems(doctor.check_compile_cache)
    assert "Not a directory" in found.seen and "--compile-cache DIR" in found.remedy


def test_a_disk_that_is_full_is_a_problem(monkeypatch):
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=GB // 2))
    (found,) = problems(doctor.check_disk)
    assert found.seen.startswith("0.5 GB free for") and "--run-dir" in found.remedy


def system(root: Path, **files: str) -> Path:
    """Write files of ``proc`` and ``sys``, ``__`` for ``/``."""
    files["proc__meminfo"] = "MemTotal: 8000 kB\nMemAvailable: 6000 kB\n"
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_control_groups_there_is_no_limit(tmp_path):
    root = system(tmp_path)
    assert machine.cores(root).quota is None
    assert machine.memory(root) == (8000 * 1024, None, 6000 * 1024)


def test_limits_of_control_groups_of_version_2_count_also_those_above(tmp_path):
    root = system(
        tmp_path,
        proc__self__cgroup="0::/a/b\n",
        sys__fs__cgroup__a__cpu_DOT_max="150000 100000\n",
        sys__fs__cgroup__a__b__cpu_DOT_max="max 100000\n",
        sys__fs__cgroup__a__memory_DOT_max=f"{4000 * 1024}\n",
        sys__fs__cgroup__a__memory_DOT_current=f"{1000 * 1024}\n",
        sys__fs__cgroup__a__memory_DOT_stat=f"anon 5\ninactive_file {500 * 1024}\n",
        sys__fs__cgroup__a__b__memory_DOT_max="max\n",
    )
    cores = machine.cores(root)
    assert cores.quota == 1.5 and cores.usable == min(1.5, cores.allowed)
    assert machine.memory(root) == (8000 * 1024, 4000 * 1024, 3500 * 1024)


def test_limits_of_control_groups_of_version_1_count(tmp_path):
    root = system(
        tmp_path,
        proc__self__cgroup="3:memory:/outside/of/container\n1:cpu,cpuacct:/\n0::/\n",
        sys__fs__cgroup__cpu__cpu_DOT_cfs_quota_us="50000\n",
        sys__fs__cgroup__cpu__cpu_DOT_cfs_period_us="100000\n",
        sys__fs__cgroup__memory__memory_DOT_limit_in_bytes=f"{2000 * 1024}\n",
        sys__fs__cgroup__memory__memory_DOT_usage_in_bytes=f"{1900 * 1024}\n",
    )
    assert machine.cores(root).quota == 0.5
    assert machine.memory(root) == (8000 * 1024, 2000 * 1024, 100 * 1024)


def test_fewer_cores_than_threads_are_sized_by_are_noted(monkeypatch):
    monkeypatch.setattr(machine, "cores", lambda: machine.CoreCounts(64, 64, 4.0))
    (found,) = findings(doctor.check_cores)
    assert found.level is Level.NOTE and found.seen.startswith("4 usable (64 installed")
    assert "--env.num-threads 2" in found.remedy


# The self-tests find what they look for.


def test_an_adapter_that_does_not_copy_is_found(monkeypatch):
    assert problems(self_tests.check_aliasing) == []
    monkeypatch.setattr(
        gymnasium_adapter, "make_obs_check", lambda space, num_envs: lambda obs, name: obs
    )
    (found,) = problems(self_tests.check_aliasing)
    assert found.name == "aliasing, ours" and "7 of 8 observations changed" in found.seen


def test_published_networks_that_are_not_copies_are_found(monkeypatch):
    assert problems(self_tests.check_donation) == []
    monkeypatch.setattr(self_tests, "owned_copy", lambda tree, device: jax.device_put(tree, device))
    (found,) = problems(self_tests.check_donation)
    assert "deleted" in found.seen


def test_a_gradient_that_is_wrong_is_found(monkeypatch):
    assert problems(self_tests.check_gradient) == []
    monkeypatch.setattr(jax, "grad", lambda loss: lambda w: 0 * w)
    (found,) = problems(self_tests.check_gradient)
    assert "is off by" in found.seen


def test_sweeps_are_missing_without_their_package_also_where_optuna_is_there(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n: (n != "sebulba_sweep" and find(n)) or None
    )
    (missing,) = [one for one in findings(doctor.check_extras) if one.name == "sebulba_sweep"]
    assert "sebulba sweep" in missing.seen and "./packages/sebulba-sweep" in missing.remedy


@pytest.mark.slow
def test_families_that_cannot_be_loaded_are_named_with_the_packages_they_need(monkeypatch):
    reason = "libEGL.so.1: cannot open shared object file"
    monkeypatch.setitem(doctor.LEFT_OUT, "envpool.gfootball", reason)
    (said,) = (one for one in doctor._check_envpool() if "gfootball cannot be" in one.seen)
    assert said.remedy == "apt install libegl1 libopengl0" and reason in said.seen


@pytest.mark.slow
def test_a_family_that_aborts_is_a_line_and_not_the_end():
    from sebulba.tools.check.isolation import isolated_findings

    events = isolated_findings("tests.tools.test_doctor:checks_that_abort", (), 60.0)
    found = [event for event in events if isinstance(event, Finding)]
    assert [(f.name, f.level) for f in found] == [
        ("first", Level.OK),
        ("aborts", Level.PROBLEM),
        ("last", Level.OK),
    ]
    assert "died with signal 6" in found[1].seen


def checks_that_abort() -> list[Check]:
    def abort():
        os.abort()

    return [
        Check("first", lambda: [ok("fine")]),
        Check("aborts", abort),
        Check("last", lambda: [ok("fine")]),
    ]


# How it looks.


REPORT = Report(
    "this machine",
    (
        ok("fine", name="a"),
        note("so so " * 20, "look at it", name="b [0]"),
        problem("is bad", "mend it", name="c"),
    ),
)


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits_and_has_every_word(width):
    console = Console(width=width, record=True, file=io.StringIO(), color_system=None)
    console.print(table(REPORT))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width
    words = " ".join(" ".join(lines).split())
    for word in ("OK a fine", "note b [0] so so", "-> look at it", "PROBLEM c is bad -> mend it"):
        assert word in words


def test_plain_lines_have_the_remedy_below():
    lines = str(REPORT).splitlines()
    assert lines[0] == "OK       a: fine"
    assert lines[-3:-1] == ["PROBLEM  c: is bad", "         -> mend it"]
    assert lines[-1] == "this machine: 1 problem, 1 note"
