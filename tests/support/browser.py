"""Pages as a real browser has them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium-headless-shell") or shutil.which("chromium")


def shown_in_a_browser(address: str, profile: Path) -> str:
    """Return the page as Chromium has it after five seconds of its own time, scripts run."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here")
    words = [
        *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"),
        *(f"--user-data-dir={profile}", "--virtual-time-budget=5000", f"http://{address}"),
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True)
    return done.stdout
