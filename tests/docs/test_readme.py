"""Every fenced block of these documents runs as it is pasted; promises of tables hold.

The documents are README, CONTRIBUTING and the diagnosis.

Each block is pasted alone, into a new process in a new folder: ``sh`` into bash, ``python`` into
Python. Blocks in ``text`` only show output. What the text around a block says comes first:

- a block that uses the checkout (``make``, ``examples/``, ``pip wheel``) is pasted in a copy of it;
- one that uses ``my_env`` finds the block that begins with ``# my_env.py``, saved as that, and so
  does one that uses ``my_agent``.

Nothing is changed in what is pasted but this: what would take minutes is cut short by ``SHORTER``
in shells, and by ``FEWER`` in Python.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from sebulba.commands import cli
from tests.support.as_users import environment_of_readers

ROOT = Path(__file__).parents[2]
RUNS = (ROOT / "docs/runs.md").read_text()
FENCE = re.compile(r"^```(.*)\n((?:.*\n)*?)```$", re.MULTILINE)
SHORTER = """\
set -eu
has() { command python -c "import importlib.util as u; exit(u.find_spec('$1') is None)"; }
sebulba() {
  case "$*" in
    *brax:*) has brax || return 0 ;;
    *jumanji:*) has jumanji || return 0 ;;
    "train simple-spread"*) has jaxmarl || return 0 ;;
  esac
  case "$*" in
    "networks sweep"*) python -m sebulba "$@" --points 2 --networks 2 --steps 10 ;;
    "networks deploy"*) python -m sebulba "$@" --steps 10 ;;
    *--help*) python -m sebulba "$@" ;;
    resume*) python -m sebulba "$@" --total-env-steps 3000 ;;
    "train pong"* | "train qbert"*)
      python -m sebulba "$@" --total-env-steps 2000 --agent.torso.image-features 8 ;;
    train*) python -m sebulba "$@" --total-env-steps 2000 ;;
    bench*) python -m sebulba "$@" --seconds 0.2 --stage-seconds 0.05 ;;
    export*onnx) if command python -c "import jax2onnx"; then python -m sebulba "$@"; fi ;;
    watch*) command python -c "$IN_TERMINAL" python -m sebulba "$@" --episodes 1 >/dev/null ;;
    check-env*) python -m sebulba "$@" --steps 50 ;;
    *) python -m sebulba "$@" ;;
  esac
}
python() {
  case "$1" in
    examples/impala.py) command python "$@" --env-steps 3000 ;;
    *) command python "$@" ;;
  esac
}
make() { command make -n "$@"; }  # only says what it would do
.venv/bin/pre-commit() { test "$1" = install; }  # which make lint would have brought
pip() { command pip -qq "$@" --no-deps --no-index; }  # the packages are those of the tests
"""
IN_TERMINAL = "import os, pty, sys; sys.exit(pty.spawn(sys.argv[1:]))"
NOT_COPIED = shutil.ignore_patterns(".venv*", ".git", "build", "*.egg-info", "results")


def not_copied(folder, names):
    """Return what is left out of a copy of the checkout, its own folder of runs included."""
    return NOT_COPIED(folder, names) | ({"runs"} if Path(folder) == ROOT else set())


LENGTHS = ("512_000", "500_000", "307_200", "204_800", "200_000", "100_000", "20_480")
FEWER = {f"total_env_steps={many}": "total_env_steps=6_144" for many in LENGTHS}
FEWER["total_env_steps=200_000"] = "total_env_steps=8_192"


def blocks(file: str) -> list[tuple[str, str, str]]:
    """Return where each fenced block of a document is, its language and its text."""
    document = (ROOT / file).read_text()
    found = [
        (f"{file}:{document.count(chr(10), 0, match.start()) + 1}", match[1], match[2])
        for match in FENCE.finditer(document)
    ]
    assert len(found) == document.count("```") / 2
    return found


BLOCKS = [
    block
    for file in ("README.md", "CONTRIBUTING.md", "docs/diagnosis.md")
    for block in blocks(file)
]
PASTED = {place: (language, text) for place, language, text in BLOCKS if language != "text"}
TWICE = {
    place: (language, text)
    for place, language, text in blocks("docs/runs.md")
    if "sebulba.Checkpointer(" in text
}
"""The block that is pasted twice, by a test of its own below."""


def pasted(block: str, folder: Path, *, python_path: str = str(ROOT)) -> str:
    """Return what a block prints that is pasted into a new process in ``folder``."""
    language, text = (PASTED | TWICE)[block]
    if language == "python":
        for words, fewer in FEWER.items():
            text = text.replace(words, fewer)
        (folder / "pasted.py").write_text(text)
        command = [sys.executable, "pasted.py"]
    else:
        command = ["bash", "-c", SHORTER + text]
    environment = {
        **environment_of_readers(),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": python_path,
        "IN_TERMINAL": IN_TERMINAL,
        "PIP_NO_BUILD_ISOLATION": "0",  # which means that there is none
    }
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("block", PASTED)
def test_every_block_runs_as_pasted(block, tmp_path):
    _, text = PASTED[block]
    python_path = str(ROOT)
    if re.search(r"^make |examples/|pip wheel", text, re.MULTILINE):
        shutil.copytree(ROOT, tmp_path, symlinks=True, dirs_exist_ok=True, ignore=not_copied)
        python_path = sysconfig.get_path("purelib") if "pip install" in text else str(tmp_path)
    for name in ("my_env", "my_agent"):
        if f"{name}:" in text:
            (saved,) = [text for _, text in PASTED.values() if text.startswith(f"# {name}.py")]
            (tmp_path / f"{name}.py").write_text(saved)
    pasted(block, tmp_path, python_path=python_path)


def test_the_readme_is_read_in_one_sitting():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 180


def test_every_block_says_what_it_is():
    assert {language for _, language, _ in BLOCKS} == {"python", "sh", "text"}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_script_that_is_started_again_goes_on_and_counts_in_total(tmp_path):
    (block,) = TWICE
    steps = []
    for _ in range(2):
        pasted(block, tmp_path)
        steps.append(max(int(name) for name in os.listdir(tmp_path / "runs/python/checkpoints")))
    assert steps == [6144, 6144]


def test_every_exit_code_is_documented():
    table = RUNS[RUNS.index("## Exit codes") :]
    for code in (cli.EXIT_OK, cli.EXIT_OTHER, cli.EXIT_USAGE, cli.EXIT_ENV, cli.EXIT_NOT_FINITE):
        assert f"| {code} |" in table
    assert f"| {cli.EXIT_HANG} |" in table and "| 129, 130, 143 |" in table
