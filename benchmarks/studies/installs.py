"""What an installation into an empty environment takes, beside other libraries.

``python -m benchmarks.studies.installs WHEEL --json FILE`` takes some minutes and, for a
while, 10 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

OTHERS = ("stable-baselines3", "stable-baselines3[extra]", "sbx-rl", "cleanrl")
ASK = "import importlib.metadata as m; print(len(set(d.name for d in m.distributions())) - 1)"


def install(*requirements: str) -> dict[str, float | str]:
    """Return seconds, MB and packages of an environment with nothing else, or why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python = f"{folder}/bin/python"
        empty = _megabytes(folder)
        begin = time.perf_counter()
        words = [python, "-m", "pip", "install", "--quiet", "--no-cache-dir", *requirements]
        done = subprocess.run(words, capture_output=True, text=True)
        seconds = time.perf_counter() - begin
        if done.returncode != 0:
            return {"failed": (done.stderr.strip().splitlines() or ["?"])[-1]}
        count = subprocess.run([python, "-c", ASK], capture_output=True, text=True, check=True)
        return {
            "seconds": round(seconds, 1),
            "mb": round(_megabytes(folder) - empty),
            "packages": int(count.stdout),
        }


def _megabytes(folder: str) -> float:
    files = (path for path in Path(folder).rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_size for path in files) / 1e6


def main() -> None:
    """Install all, print what they took, and keep it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = {}
    for requirement in (arguments.wheel, *OTHERS):
        name = "sebulba" if requirement == arguments.wheel else requirement
        found[name] = install(requirement)
        print(name, found[name], flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
