"""``python -m benchmarks`` runs a study, and ends with the errors and exit codes of ``sebulba``."""

from __future__ import annotations

from benchmarks.commands import BENCHMARKS, main
from sebulba.commands import cli


def command(argv: list[str]) -> int:
    """Run the study that the words name."""
    cli._import_from_here()
    return main(argv, cli.read_config)


if __name__ == "__main__":
    cli.entry_point(command, BENCHMARKS)
