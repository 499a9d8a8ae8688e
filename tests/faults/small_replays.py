"""The command line with a lower limit, so that a small replay, too, is saved apart."""

from __future__ import annotations

from sebulba.checkpoints import checkpointer
from sebulba.commands.cli import entry_point

if __name__ == "__main__":
    checkpointer.LARGE_EXPERIENCE_BYTES = 1
    entry_point()
