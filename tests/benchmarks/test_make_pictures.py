"""The pictures of commands: what a terminal shows at the end, with nothing from elsewhere."""

from __future__ import annotations

import re

import pytest

from benchmarks.studies.make_pictures import ROOT, SCENES, on_screen, picture


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("one\r\ntwo\r\n", "one\ntwo"),
        ("half\rwhole\r\n", "whole"),
        ("\x1b[?25la\r\nb\r\x1b[2K\x1b[1A\x1b[2Kc\r\nd\r\ne\x1b[?25h\r\n", "c\nd\ne"),
        ("a\r\nb\r\nc\r\x1b[2K\x1b[1A\x1b[2K\x1b[1A\x1b[2Kd", "d"),
        ("\x1b]8;;there\x1b\\\x1b[1mbold\x1b[0m plain", "\x1b[1mbold\x1b[0m plain"),
    ],
    ids=["lines", "a line anew", "a panel that grows", "a panel that shrinks", "styles"],
)
def test_what_is_left_on_the_screen(text, shown):
    assert on_screen(text) == shown


def test_a_picture_shows_the_command_and_loads_nothing():
    svg = picture("sebulba runs", "\x1b[31mred\x1b[0m & plain")
    assert "sebulba\N{NO-BREAK SPACE}runs" in svg.replace("&#160;", "\N{NO-BREAK SPACE}")
    assert "red" in svg and "&amp;" in svg and "Fira" not in svg
    assert re.findall(r"https?://[^\"]*", svg) == ["http://www.w3.org/2000/svg"]


@pytest.mark.parametrize("name", SCENES)
def test_every_picture_is_there_and_shown_somewhere(name):
    file = ROOT / "docs" / f"terminal-{name}.svg"
    assert file.stat().st_size < 100_000 and f'"{SCENES[name].split()[1]}-' in file.read_text()
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert any(f"{file.name})" in page.read_text() for page in pages)
