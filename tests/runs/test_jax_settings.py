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


def sebulba(words: str, setting: str, folder: Path) -> subprocess.CompletedProcess[str]:
    name, _, value = setting.partition("=")
    return subprocess.run(
        [sys.executable, "-m", "sebulba", *words.split()],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT)), name: value},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    "words",
    [
        "impala --env.id CartPole-v1 --total-env-steps 2100",
        "ppo --env.id CartPole-v1 --total-env-steps 2100",
        "cartpole-r2d2 --total-env-steps 4600 --agent.replay.warm-up-cycles 7",
        "cartpole-dqn --total-env-steps 1500 --agent.replay.warm-up-cycles 4",
        "kuhn --total-env-steps 3000",
        "ppo --env.id CartPole-v1 --total-env-steps 2100 --cluster.address processes",
    ],
)
def test_every_agent_is_resumed_with_64_bits(words, tmp_path):
    """No part of the state has other dtypes after an update than before."""
    options = "--run-dir run --no-anneal-learning-rate"
    for command in (f"train {words} {options}", "resume run --total-env-steps 6000"):
        done = sebulba(command, "JAX_ENABLE_X64=1", tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
        assert " 0 updates" not in done.stdout


def test_the_table_has_settings_of_both_kinds():
    assert {said for _, said in rows()} == {"trains", "refused"} and len(rows()) >= 8


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("setting", "said"), rows())
def test_a_run_trains_or_is_refused_as_the_table_says(setting, said, tmp_path):
    words = "train cartpole --num-envs 4 --steps-per-cycle 8 --total-env-steps 640 --run-dir run"
    done = sebulba(words, setting, tmp_path)
    if said == "trains":
        assert done.returncode == 0, done.stderr
        return
    name = setting.partition("=")[0]
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
