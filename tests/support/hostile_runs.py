"""Run folders as somebody may make them who wants a reader to run code, hang, or leave the folder.

Each function gets the folder of a good run, and spoils it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

from tests.tools.test_comparison import CONFIG, make_run

SCRIPT = "</style></title><script>document.title='owned'</script><img src=x onerror=alert(1)>"
SECRET = "root:x:0:0"
"""What files outside of the folder hold."""


def _config(**fields) -> Callable[[Path], None]:
    return lambda run: put(run / "config.json", json.dumps(CONFIG | fields))


def _metrics(*lines: str) -> Callable[[Path], None]:
    return lambda run: put(run / "metrics.jsonl", "".join(f"{line}\n" for line in lines))


def put(file: Path, text: str | bytes) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(text if isinstance(text, bytes) else text.encode())


def _lead_out(name: str) -> Callable[[Path], None]:
    def spoil(run: Path) -> None:
        outside = run.parent.parent / "outside"
        outside.mkdir(exist_ok=True)
        put(outside / "secret", json.dumps({"env_steps": 1, "preset": SECRET}) + "\n")
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(outside / "secret")

    return spoil


def _lead_folder_out(name: str) -> Callable[[Path], None]:
    def spoil(run: Path) -> None:
        put(run.parent.parent / "outside/evaluation.json", '{"episode_return_mean": 31415}')
        put(run.parent.parent / "outside/000000031415/manifest.json", SECRET)
        put(run.parent.parent / "outside/000000031415.mp4", SECRET)
        (run / name).symlink_to(run.parent.parent / "outside")

    return spoil


def _pipe(name: str) -> Callable[[Path], None]:
    def spoil(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)

    return spoil


def _sparse(run: Path) -> None:
    with open(run / "metrics.jsonl", "ab") as file:
        file.truncate(2**32)


def _replaced_by_folder(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()


def _of_a_far_future(run: Path) -> None:
    os.utime(run / "metrics.jsonl", (2**45, 2**45))


def _manifest(text: str) -> Callable[[Path], None]:
    def spoil(run: Path) -> None:
        (run / "checkpoints").mkdir()
        put(run / "checkpoints/000000000400/manifest.json", text)
        (run / "checkpoints/٣").mkdir()
        (run / f"checkpoints/{'9' * 200}").mkdir()

    return spoil


_RECORD = {"env_steps": 10, "seconds": 1, "updates": 1, "loss": 0.5, "episode_return_mean": 3.0}
SPOILED: dict[str, Callable[[Path], None]] = {
    "script in values": _config(
        preset=SCRIPT, agent_config=SCRIPT, seed=SCRIPT, env={"id": SCRIPT}, sebulba=SCRIPT
    ),
    "script in names of options": _config(**{SCRIPT: {SCRIPT: SCRIPT}}),
    "script in versions": _config(environment={"versions": {SCRIPT: SCRIPT}}),
    "attribute in values": _config(preset="\" onload='alert(1)' style='width:9em", seed="&#60;b"),
    "script in names of metrics": _metrics(
        json.dumps({**_RECORD, SCRIPT: 1.0, "$\\frac{a}$": 2, "time/learner/" + SCRIPT: 0.5})
    ),
    "script in the end": lambda run: put(run / "ended.txt", f"a b  exit code 1: {SCRIPT}\n\x1b[2J"),
    "a long end": lambda run: put(run / "ended.txt", "x" * 10**6),
    "not finite": _metrics(
        *('{"env_steps": NaN, "loss": NaN}', '{"env_steps": Infinity, "seconds": -Infinity}'),
        '{"env_steps": 5, "seconds": NaN, "loss": Infinity, "episode_return_mean": -Infinity}',
        '{"env_steps": 6, "loss": 1e308, "episode_return_mean": -1e308, "seconds": 1e-320}',
    ),
    "numbers that no float can be": _metrics(
        json.dumps({name: 10**400 for name in _RECORD} | {"env_steps": 10**400}),
        '{"env_steps": 1e29, "seconds": -1e29, "loss": -1e29, "updates": 1e29}',
        '{"env_steps": -5, "seconds": 1e29, "eval_return_mean": 1, "eval_env_steps": true}',
    ),
    "total of no float": _config(total_env_steps=10**400),
    "half a configuration": lambda run: put(run / "config.json", '{"preset": "cart'),
    "half of everything": _metrics('{"env_steps": 1, "lo', "\x00\x01", "{}", "[]", "null", "7"),
    "deep configuration": lambda run: put(run / "config.json", '{"a":' * 10**4 + "1" + "}" * 10**4),
    "deep metrics": _metrics("[" * 10**5, '{"env_steps": ' + '{"a":' * 10**4),
    "large configuration": _config(preset="x" * 2**21),
    "many options": _config(**{f"option{i}": i for i in range(20_000)}),
    "many metrics": _metrics(json.dumps(_RECORD | {f"metric{i}": i for i in range(9_000)})),
    "large metrics": _sparse,
    "long line": _metrics("x" * 2**22),
    "values of other types": _config(
        preset=[1], agent_config={}, seed=None, env=[], environment=[], total_env_steps="many"
    ),
    "metrics of other types": _metrics(
        json.dumps({name: [1] for name in _RECORD} | {"env_steps": 1}),
        json.dumps({name: "1" for name in _RECORD} | {"env_steps": 1}),
        json.dumps({name: {"a": None} for name in _RECORD} | {"env_steps": True}),
    ),
    "half of a surrogate": _config(preset="\ud800", seed="\ud800"),
    "metrics lead out": _lead_out("metrics.jsonl"),
    "configuration leads out": _lead_out("config.json"),
    "end leads out": _lead_out("ended.txt"),
    "films lead out": _lead_folder_out("videos"),
    "best policy leads out": _lead_folder_out("best_policy"),
    "checkpoints lead out": _lead_folder_out("checkpoints"),
    "metrics are a pipe": _pipe("metrics.jsonl"),
    "configuration is a pipe": _pipe("config.json"),
    "end is a pipe": _pipe("ended.txt"),
    "lock is a pipe": _pipe(".lock"),
    "metrics are a folder": _replaced_by_folder,
    "of a far future": _of_a_far_future,
    "film leads out": _lead_out("video.mp4"),
    "film is a pipe": _pipe("video.mp4"),
    "films are odd": lambda run: [
        put(run / f"videos/{name}", SECRET)
        for name in ("9" * 99 + ".mp4", "0" * 11 + "\u0660.mp4", '" onerror="x.mp4', "a.html")
    ],
    "films are no films": lambda run: put(run / "videos/000000000010.mp4", SCRIPT),
    "manifest is none": _manifest(json.dumps({"manifest": {"files": SCRIPT}, "sha256": SCRIPT})),
}
"""What is wrong with a folder, and what makes it so."""
NAMES = (
    "<img src=x onerror=alert(1)>",
    "\" onmouseover=alert(1) '",
    "..%2f..%2fetc",
    "%3Cscript%3E",
    "a?b#c&d",
    "new\nline\x1b[2J\u202e",
    os.fsdecode(b"\xff\xfe no UTF-8"),
    "...",
    "~0123456789abcdef",
)
"""Names of folders."""


def make_hostile_folder(folder: Path) -> list[Path]:
    """Make all of these, two links, and a good run; return the runs."""
    made = [make_run(folder / "good")]
    for what, spoil in SPOILED.items():
        run = make_run(folder / what.replace(" ", "-"))
        spoil(run)
        made.append(run)
    made += [make_run(folder / name) for name in NAMES]
    outside = make_run(folder.parent / "elsewhere", preset=SECRET)
    (folder / "link-out").symlink_to(outside)
    (folder / "link-to-itself").symlink_to(folder)
    (folder / "link-to-nothing").symlink_to(folder / "nothing")
    return made


TAGS = re.compile(
    "html|head|meta|title|style|script|body|main|section|footer|h1|h2|h3|p|a|b|i|pre|mark|small|"
    "video|table|thead|tbody|tr|th|td|ul|li|div|span|details|summary|figure|figcaption|img|"
    "form|input|button|label"
)
ATTRIBUTES = re.compile(
    "charset|http-equiv|content|name|lang|class|style|id|src|alt|href|defer|type|value|action|"
    "method|controls|preload|loop"
)


FILM = r"/run/[A-Za-z0-9._~-]+/film/(video|[0-9]{12})\.mp4\?[0-9]+"


class Harmless(HTMLParser):
    """Raises AssertionError for what only hostile content can have put into a page."""

    def handle_starttag(self, tag, attrs):
        assert TAGS.fullmatch(tag), tag
        for name, value in attrs:
            assert ATTRIBUTES.fullmatch(name), (tag, name)
            if name == "style":
                assert re.fullmatch(r"width:\d+\.\d%", value), value
            if name == "src" and tag == "video":
                inside = value.startswith("data:video/mp4;base64,")
                assert inside or re.fullmatch(FILM, value), value
            elif name == "src":
                assert value.startswith("data:image/svg+xml;base64,") or value == "/board.js", value
            if name in ("href", "action"):
                assert re.match(r"/(?!/)", value), value
        if tag == "script":
            assert dict(attrs).get("src") == "/board.js"

    def handle_data(self, data):
        if self.get_starttag_text() == "<style>":
            assert "<" not in data or self.cdata_elem is None


def check_harmless(page: str) -> None:
    """Raise AssertionError if a page has what no page of ours has, or what lies elsewhere."""
    Harmless().feed(page)
    assert page.count("<style>") == 1 and page.count("<title>") == 1
    assert SECRET not in page and "31415" not in page and "31,415" not in page
    assert "\x1b" not in page and "\x00" not in page
