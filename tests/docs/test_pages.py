"""The guides run from their first block to their last, and the site of all pages can be built.

The blocks of a page run in their order, in one folder. Python that begins with a comment of a name,
such as ``# heater.py``, is saved as that file; other Python is a program. Blocks in ``text`` show
output, or a command that needs what the tests have not got: a GPU, a library, a second machine.
Commands for some libraries are left out where these are not installed (``SHORTER``).
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sebulba
from tests.docs.test_readme import FEWER, IN_TERMINAL, SHORTER, blocks

ROOT = Path(__file__).parents[2]


FILE = re.compile(r"# (\w+\.py)\n")
GUIDES = [
    "environments",
    "environment-sets",
    "runs",
    "policies",
    "compare-runs",
    "metrics",
    "speed",
    "agents/memory",
    "agents/neural-networks",
    "agents/writing-an-agent",
    "agents/atari",
    "agents/continuous-control",
    "many-agents",
    "leagues",
    "trainers",
    "jax-environments",
    "networks",
    "cluster",
    "external",
    "offline",
]
"""Pages of which every block runs; others have tests of their own."""


def run_page(page: str, folder: Path) -> str:
    """Run the blocks of a page in a folder, in their order, and return what they print."""
    (folder / "examples").symlink_to(ROOT / "examples")
    script = SHORTER
    for number, (_, language, text) in enumerate(blocks(f"docs/{page}.md")):
        if language == "sh":
            script += text
        elif language == "python":
            saved = FILE.match(text)
            name = saved[1] if saved else f"block_{number}.py"
            script += "" if saved else f"python {name}\n"
            for words, fewer in FEWER.items():
                text = text.replace(words, fewer)
            (folder / name).write_text(text)
        else:
            assert language == "text", f"a block of {page}.md is {language!r}: sh, python or text"
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {
        **os.environ,
        "PATH": path,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "JAX_PLATFORMS": "cpu",
        "IN_TERMINAL": IN_TERMINAL,
    }
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=env, capture_output=True, text=True, timeout=560
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_tutorial_runs_as_pasted(tmp_path):
    printed = run_page("tutorial", tmp_path)
    assert "heater:Heater: no problems" in printed
    assert re.search(r"return -\d+\.\d, at the end -?\d+\.\d degrees inside", printed)
    assert (tmp_path / "heater.png").exists()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", GUIDES)
def test_a_guide_runs_as_pasted(page, tmp_path):
    run_page(page, tmp_path)
    if page == "metrics":
        check_metrics_are_explained(tmp_path / "runs")


def check_metrics_are_explained(runs: Path) -> None:
    """Every metric of these runs has its name on the page, but those of phases by their part."""
    said = (ROOT / "docs/metrics.md").read_text()
    for file in runs.glob("*/metrics.jsonl"):
        for line in file.read_text().splitlines():
            for name in json.loads(line):
                assert f"`{name.rpartition('/')[2]}`" in said, f"{name} of {file.parent.name}"


LINK = re.compile(r"\]\(([^)#\s:]*)(?:#([^)\s]*))?\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page, in the form that GitHub and the site share."""
    headings = HEADING.findall(FENCED.sub("", page.read_text()))
    words = [re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in headings]
    return {text.replace(" ", "-") for text in words}


def broken_links(page: Path) -> list[str]:
    """Return the links of a page to files and headings that do not exist."""
    found = []
    for file, anchor in LINK.findall(FENCED.sub("", page.read_text())):
        target = page.parent / file if file else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(f"{file}#{anchor}")
    return found


def test_every_link_leads_to_a_file_and_a_heading():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    assert not {str(page): broken for page in pages if (broken := broken_links(page))}


def test_a_broken_link_is_seen(tmp_path):
    (tmp_path / "a.md").write_text(
        "# One word\n[b](b.md) [c](#one-word) [d](#two) [e](a.md#one-word)\n"
    )
    assert broken_links(tmp_path / "a.md") == ["b.md#", "#two"]


PROSE = [
    *ROOT.glob("*.md"),
    *(page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "measurements"),
    *ROOT.glob("packages/*/README.md"),
    ROOT / "tests/faults/README.md",
]
LONGEST_SENTENCE = 30
"""Words, of which code between backticks is one."""


def sentences(page: str) -> list[str]:
    """Return the sentences of a page, without code, tables and headings; list items begin one."""
    page = FENCED.sub("", page)
    page = re.sub(r"^ *\|.*$|^#+ .*$", "\n", page, flags=re.MULTILINE)
    page = re.sub(r"^ *(?:[-*]|\d+\.) (?:\[ \] )?", "\n\n", page, flags=re.MULTILINE)
    page = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", page)
    page = re.sub(r"`[^`]+`", "code", page)
    paragraphs = [" ".join(text.split()) for text in re.split(r"\n\s*\n", page)]
    found = [re.split(r"(?<=[^.][.!?])[*)\"']* ", text) for text in paragraphs]
    return [sentence for paragraph in found for sentence in paragraph if sentence]


def long_sentences(page: str) -> list[str]:
    return [text for text in sentences(page) if len(text.split()) > LONGEST_SENTENCE]


@pytest.mark.parametrize("page", PROSE, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_sentence_can_be_read_aloud_in_one_breath(page):
    assert long_sentences(page.read_text()) == []


def test_a_long_sentence_is_seen_and_code_and_tables_are_none():
    words = "word " * 30
    assert long_sentences(f"# {words}word\n{words.strip()}. {words}of code.\n") == [
        f"{words}of code."
    ]
    assert not long_sentences(f"| {words}word |\n```sh\n{words}word\n```\n`{words}word`\n")
    assert not long_sentences(f"- {words}\n- {words}\n\n**{words.strip()}.** {words}\n")


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = [page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")]
    assert not [str(page) for page in pages if f": {page}\n" not in navigation]


def test_the_reference_has_all_that_the_package_gives():
    page = (ROOT / "docs/reference.md").read_text()
    given = {room: names for room, names in sebulba._MODULES.items() if f"::: {room}\n" not in page}
    missing = [
        n for room, names in given.items() for n in names.split() if f":: {room}.{n}\n" not in page
    ]
    assert missing == []


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs sebulba[docs]")
def test_the_site_has_every_page_and_asks_no_other_host(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for page in (ROOT / "docs").rglob("*.md"):
        folder = tmp_path / page.relative_to(ROOT / "docs").with_suffix("")
        folder = folder.parent if page.name == "index.md" else folder
        assert (folder / "index.html").exists(), page
    for page in ("results", "gallery"):  # made from the results of the benchmarks
        assert "learn-cartpole.png" in (tmp_path / page / "index.html").read_text()
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(
            r'<(?:script|img|link)[^>]*(?:src|href)="(https?:[^"]*)', page.read_text()
        )
        assert not loaded, page
