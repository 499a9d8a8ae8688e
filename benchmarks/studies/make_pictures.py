"""Draws commands for the documentation: ``python -m benchmarks.studies.make_pictures [NAME ...]``.

Each command runs in a terminal of its own, and what is on the screen when it ends becomes
``docs/terminal-NAME.svg``. Nothing in such a file is loaded from elsewhere, fonts included.
"""

from __future__ import annotations

import argparse
import codecs
import fcntl
import io
import os
import pty
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).parents[2]
ROWS, COLUMNS = 40, 100
SCENES = {
    "train": "sebulba train cartpole --name first",
    "eval": "sebulba eval pretrained:lunarlander",
    "policies": "sebulba policies",
    "runs": "sebulba runs",
    "bench": "sebulba bench train cartpole --compare stepped fused",
}
"""Commands by the name of their picture."""
FONTS = "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace"

_TOKEN = re.compile(
    r"\x1b\[\??([\d;]*)([A-Za-z])"  # a number and a letter, such as a colour
    r"|\x1b\][^\x1b\x07]*(?:\x1b\\|\x07)"  # an operating system command
    r"|[\r\n]|[^\x1b\r\n]+"
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run commands and draw what they show."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.make_pictures")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(SCENES)}; all")
    parser.add_argument("--runs", metavar="DIR", help="runs to show, as make_pretrained has them")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        if arguments.runs:
            shutil.copytree(arguments.runs, Path(temporary, "runs"))
        for name in arguments.names or SCENES:
            shown = on_screen(seen(SCENES[name], temporary))
            file = ROOT / "docs" / f"terminal-{name}.svg"
            file.write_text(picture(SCENES[name], shown))
            print(f"{file} ({file.stat().st_size / 1000:.0f} kB)", flush=True)


def seen(command: str, folder: str) -> str:
    """Return what a command writes to a terminal.

    Args:
      command: Words of the shell, the first of which is ``sebulba``.
      folder: Where it runs.

    Raises:
      RuntimeError: It failed.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    hidden = {"COLUMNS", "LINES", "NO_COLOR", "XLA_FLAGS"}
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    env |= {"TERM": "xterm-256color", "COLORTERM": "truecolor", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", *shlex.split(command)],
        cwd=folder,
        env=env,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    text, decode = "", codecs.getincrementaldecoder("utf-8")().decode
    try:
        while block := os.read(ours, 65536):
            text += decode(block)
    except OSError:  # how Linux says that nobody writes there any more
        pass
    os.close(ours)
    if process.wait():
        raise RuntimeError(f"{command} ended with {process.returncode}:\n{text[-2000:]}")
    return text


def on_screen(text: str) -> str:
    """Return what is left on a terminal of this text: lines, in which only styles are escapes.

    It knows what our commands use: the cursor goes up, to the begin of a line, and on; lines are
    written anew as a whole, or cleared.
    """
    lines, row, anew = [""], 0, False
    for token in _TOKEN.finditer(text):
        number, letter = token[1], token[2]
        if token[0] == "\n":
            row, anew = row + 1, True
            lines += [""] * (row + 1 - len(lines))
        elif token[0] == "\r":
            anew = True
        elif letter == "A":
            row = max(0, row - int(number or 1))
        elif letter == "K" and number == "2":
            lines[row] = ""
        elif letter == "m" or (letter is None and not token[0].startswith("\x1b")):
            lines[row] = token[0] if anew else lines[row] + token[0]
            anew = False
    return "\n".join(lines).rstrip()


def picture(command: str, shown: str) -> str:
    """Return a terminal with a command and what it showed, as SVG."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.assemble(("$ ", "dim"), (command, "bold")))
    console.print(Text.from_ansi(shown))
    svg = console.export_svg(title=command, theme=MONOKAI, unique_id=command.split()[1])
    svg = re.sub(r"@font-face \{.*?\}\s*|<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    return svg.replace("Fira Code, monospace", FONTS)


if __name__ == "__main__":
    main()
