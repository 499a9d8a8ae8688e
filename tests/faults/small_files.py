"""The command line where no file can grow beyond a few kilobytes, as on a disk that is full."""

from __future__ import annotations

import resource

from sebulba.commands.cli import entry_point

LARGEST_BYTES = 12_000
"""Enough for configuration, policy and a few metrics, too little for a checkpoint."""

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_BYTES, resource.RLIM_INFINITY))
    entry_point()
