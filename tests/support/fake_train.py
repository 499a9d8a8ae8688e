"""Stands for ``sebulba train`` in tests of sweeps: no learning, and returns that are known."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from pathlib import Path

PATIENCE_S = 60
"""After which it ends though nobody has ended it."""


def main(words: list[str]) -> int:
    """Write the metrics of a run and return the exit code.

    ``$FAKE_TRAIN`` has ``NUMBER:DEED`` words: trial NUMBER returns little and waits to be ended
    (``wait``), or ends with the code DEED and no returns.
    """
    options = dict(
        word[2:].split("=", 1) for word in words if word.startswith("--") and "=" in word
    )
    folder = Path(options["run-dir"])
    deeds = dict(word.split(":") for word in os.environ.get("FAKE_TRAIN", "").split())
    deed = deeds.get(str(int(folder.name.split("-")[1])), "0")
    final = 100.0 - 10 * abs(math.log10(float(options["learning-rate"])) + 3) + int(options["seed"])
    folder.mkdir(exist_ok=True)
    steps = range(100, 1001, 100) if deed in ("0", "wait") else ()
    with open(folder / "metrics.jsonl", "w") as file:
        for step in steps:
            value = -1000.0 if deed == "wait" else final * step / 1000
            file.write(json.dumps({"env_steps": step, "episode_return_mean": value}) + "\n")
    print(f"words: {' '.join(words)}", flush=True)
    for name in ("CUDA_VISIBLE_DEVICES", "XLA_PYTHON_CLIENT_PREALLOCATE"):
        print(f"{name}={os.environ.get(name)}", flush=True)
    if deed != "wait":
        return int(deed)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.sigtimedwait([signal.SIGUSR1], PATIENCE_S)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
