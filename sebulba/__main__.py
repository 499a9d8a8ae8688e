"""``python -m sebulba`` is the ``sebulba`` command."""

from __future__ import annotations

from sebulba.commands.cli import entry_point

if __name__ == "__main__":
    entry_point()
