"""How many cores are used: affinity, quotas of control groups, and XLA's pool of threads."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sebulba.support import key_streams, machine

PACKAGE = Path(machine.__file__).parent.parent


@pytest.mark.parametrize(
    ("group", "files", "expected"),
    [
        ("0::/", {"sys/fs/cgroup/cpu.max": "150000 100000"}, 2),
        ("0::/", {"sys/fs/cgroup/cpu.max": "20000 100000"}, 1),
        ("0::/", {"sys/fs/cgroup/cpu.max": "max 100000"}, 64),
        ("0::/a/b", {"sys/fs/cgroup/a/cpu.max": "400000 100000"}, 4),
        (
            "4:cpu,cpuacct:/box",
            {
                "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "300000",
                "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000",
            },
            3,
        ),
    ],
)
def test_threads_are_planned_for_the_cores_that_a_container_grants(
    tmp_path, monkeypatch, group, files, expected
):
    monkeypatch.setattr(machine, "_num_allowed", lambda: 64)
    for name, text in {"proc/self/cgroup": group, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "sys/fs/cgroup/a/b").mkdir(parents=True, exist_ok=True)
    assert machine.num_cores(tmp_path) == expected


THREADS = """
import os, threading
from sebulba.support import machine
machine._num_allowed = lambda: 24
from sebulba.runs.jax_setup import configure_jax
configure_jax("cpu", 2, "off")
import jax
jax.jit(lambda x: x @ x)(jax.numpy.ones((8, 8))).block_until_ready()
names = [open(f"/proc/self/task/{t}/comm").read() for t in os.listdir("/proc/self/task")]
print(sum("tf_XLAEigen" in name for name in names))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_xla_gets_as_many_threads_as_there_are_cores():
    environ = {name: value for name, value in os.environ.items() if name != "NPROC"}
    done = subprocess.run(
        [sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=300, env=environ
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 24


def test_no_two_streams_of_keys_have_the_same_number():
    streams = {name: value for name, value in vars(key_streams).items() if name.endswith("STREAM")}
    assert len({*streams.values()}) == len(streams) >= 6
    assert all(2**30 < value < 2**32 for value in streams.values())


def test_no_other_module_defines_a_stream():
    defines = re.compile(r"^_?\w*(STREAM|NOISE)\w* = 0x", re.MULTILINE)
    found = [path.name for path in PACKAGE.rglob("*.py") if defines.search(path.read_text())]
    assert found == ["key_streams.py"]
