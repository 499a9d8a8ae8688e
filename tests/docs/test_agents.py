"""``docs/agents/writing-an-agent.md``: its agent trains as pasted, check-agent finds nothing."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sebulba
from sebulba.loops.agent_contract import check_contract
from tests.tools.test_check_agent import OF_PROGRAMS, findings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/agents/writing-an-agent.md").read_text()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    path = tmp_path / "agent_of_the_page.py"
    path.write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    return path


@pytest.mark.slow
def test_the_agent_of_the_page_learns_as_pasted(module: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, module], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    (mean,) = re.findall(r"mean return: (\d+)", done.stdout)
    assert int(mean) > 200


def test_check_agent_finds_nothing_in_it(module: Path) -> None:
    assert findings("agent_of_the_page:A2C", *OF_PROGRAMS) == []


def test_the_refusal_that_the_page_shows_is_what_a_loop_says(module: Path) -> None:
    page = importlib.import_module("agent_of_the_page")

    class A2C(page.A2C):
        def step(self, networks, step_state, env_step, *, explore=True):
            output, state = super().step(networks, step_state, env_step, explore=explore)
            return output._replace(action=output.action[:, None]), state

    agent = A2C(sebulba.env_spec("CartPole-v1"), page.A2CConfig())
    with pytest.raises(sebulba.UsageError) as error:
        check_contract(agent, sebulba.RunSpec(32, 1, 32, 1))
    blocks = re.findall(r"^```\w*\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    (shown,) = [block for block in blocks if block.startswith("A2C.step")]
    assert str(error.value).split() == shown.split()
