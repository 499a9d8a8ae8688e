"""``python -m benchmarks`` runs a study, and ends with the errors and exit codes of ``sebulba``."""

from __future__ import annotations

from benchmarks.commands import BENCHMARKS, main
from sebulba.commands import cli
from sebulba.support.user_code import import_from_here


def command(argv: list[str]) -> int:
    """Run the study that the words name."""
    import_from_here()
    return main(argv)


if __name__ == "__main__":
    cli.entry_point(command, BENCHMARKS)
