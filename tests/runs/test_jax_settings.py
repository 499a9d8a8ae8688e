"""Settings of JAX: each row of the table in docs/speed.md trains, or is refused as it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from sebulba.errors import UsageError
from tests.support.loop_helpers import make_tiny_loop

ROOT = Path(__file__).parents[2]
DEADLINE_S = 600.0
"""Against hangs only."""


def rows() -> list[tuple[str, str]]:
    """Return the variables of the table, with what the page says of each."""
    section = (ROOT / "docs" / "speed.md").read_text().partition("## JAX settings")[2]
    return re.findall(r"^\| `(JAX_\w+=\w+)` \| (\w+)", section, re.MULTILINE)


def test_the_table_has_settings_of_both_kinds():
    assert {said for _, said in rows()} == {"trains", "refused"} and len(rows()) >= 8


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("setting", "said"), rows())
def test_a_run_trains_or_is_refused_as_the_table_says(setting, said, tmp_path):
    words = "train cartpole --num-envs 4 --steps-per-cycle 8 --total-env-steps 640 --run-dir run"
    name, _, value = setting.partition("=")
    done = subprocess.run(
        [sys.executable, "-m", "sebulba", *words.split()],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), name: value},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    if said == "trains":
        assert done.returncode == 0, done.stderr
        return
    assert done.returncode == 2 and f"unset {name} in the environment" in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("jax_disable_jit", True),
        ("jax_numpy_dtype_promotion", "strict"),
        ("jax_transfer_guard_host_to_device", "disallow"),
    ],
)
def test_a_loop_in_python_refuses_them_too(name, value):
    before = getattr(jax.config, name)
    loop, _ = make_tiny_loop()
    loop.close()
    agent = loop.agent
    jax.config.update(name, value)
    try:
        with pytest.raises(UsageError, match=f"{name}={value} of JAX cannot be used"):
            type(loop)(lambda: None, agent, 4)
    finally:
        jax.config.update(name, before)
