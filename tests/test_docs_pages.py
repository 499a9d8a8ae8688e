"""The tutorial runs from its first block to its last, and the site of all pages can be built."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_readme import SHORTER, blocks

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_tutorial_runs_as_pasted(tmp_path):
    script = SHORTER
    for _, language, text in blocks("docs/tutorial.md"):
        if language == "sh":
            script += text
        elif text.startswith("# heater.py"):
            (tmp_path / "heater.py").write_text(text)
        elif language == "python":
            (tmp_path / "use.py").write_text(text)
            script += "python use.py\n"
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    env["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
    env.pop("XLA_FLAGS", None)
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "heater:Heater: no problems" in done.stdout
    assert re.search(r"return -\d+\.\d, at the end -?\d+\.\d degrees inside", done.stdout)
    assert (tmp_path / "heater.png").exists()


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs sebulba[docs]")
def test_the_site_has_every_page_and_asks_no_other_host(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    for page in (ROOT / "docs").glob("*.md"):
        assert (tmp_path / page.stem / "index.html").exists(), page
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(
            r'<(?:script|img|link)[^>]*(?:src|href)="(https?:[^"]*)', page.read_text()
        )
        assert not loaded, page
