"""Runs a test in a process that compiles as users do, where this one compiles for speed."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version

import pytest

IS_0_10 = version("jaxlib").startswith("0.10.")
"""Later versions do not know the option of fusion emitters."""
FAST = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
AS_USERS = "--xla_backend_optimization_level=3 --xla_cpu_parallel_codegen_split_count=32"
if IS_0_10:
    FAST += " --xla_cpu_use_fusion_emitters=false"
    AS_USERS += " --xla_cpu_use_fusion_emitters=true"


def environment_of_readers() -> dict[str, str]:
    """Return the variables with which README and notebooks run.

    Their programs are compiled as users do it on one of the two Pythons.
    """
    return {n: v for n, v in os.environ.items() if n != "XLA_FLAGS" or IS_0_10}


def ran_as_users_compile(request: pytest.FixtureRequest) -> bool:
    """Run the test in another process if XLA optimises little in this one (``conftest.py``).

    Returns:
      Whether it ran, and passed: then there is nothing left to do.
    """
    options = os.environ.get("XLA_FLAGS", "")
    if FAST not in options or AS_USERS in options:
        return False
    words = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*words, request.node.nodeid],
        env={**os.environ, "XLA_FLAGS": AS_USERS, "SLOW_TESTS_UNTIL": "inf"},
        cwd=request.config.rootpath,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "1 passed" in done.stdout
    return True
