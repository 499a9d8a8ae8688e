"""Memory in huge pages, which the C library asks for only if it is told so before a process starts.

A CPU's program takes its temporary arrays from the system and gives them back at every call: half a
gigabyte for an update of a convolutional network, in pages of 4 KiB that the kernel clears and
enters one by one, 45 % of the CPU time of training Pong. With pages of 2 MiB it trains 1.7 times as
fast on one CPU device; small networks do as before.

Getting pages is then so cheap that large pieces may go back to the system at once. The C library
would rather keep them, for every thread its own and in ever more places, since it raises the bound
for what goes back to the largest piece that it has seen. So it is told a bound that stays.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Container, Mapping, Sequence
from pathlib import Path

SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")
VARIABLE, OPTION = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"
RETURNS_FROM = "glibc.malloc.mmap_threshold"
"""Bytes: what is as large goes back to the system as soon as it is free."""
WANTED = {OPTION: "1", RETURNS_FROM: str(4 * 2**20)}
FIRST_GLIBC = (2, 35)
"""That has both options."""
COMMANDS = ("train", "resume", "eval", "bench")
"""Which run programs for long."""


def restart_with_huge_pages(argv: Sequence[str], commands: Container[str] = COMMANDS) -> None:
    """Start this process over, as the same process, with memory in huge pages.

    Only where that changes anything: for a command that runs programs, given to this process by
    whoever started it, on a system that has huge pages for it, and not in a debugger. Who sets the
    first option in ``GLIBC_TUNABLES`` is obeyed.
    """
    is_ours = argv and argv[0] in commands and sys.orig_argv[-len(argv) :] == list(argv)
    if not is_ours or not sys.executable or in_debugger():
        return
    before = os.environ.get(VARIABLE, "")
    if OPTION in before or mode() not in ("always", "madvise") or not _glibc_can_ask():
        return
    asking = os.environ | {VARIABLE: with_wanted(before)}
    with contextlib.suppress(OSError):  # then without
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], asking)


def with_wanted(options: str = "") -> str:
    """Return the C library's options, as ``VARIABLE`` has them, with ours that they leave open."""
    ours = [f"{name}={value}" for name, value in WANTED.items() if name not in options]
    return ":".join(filter(None, (options, *ours)))


def environment_before_restart(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a process that has not been started over."""
    ours = with_wanted().split(":")
    others = [word for word in environ.get(VARIABLE, "").split(":") if word not in ours]
    before = {name: value for name, value in environ.items() if name != VARIABLE}
    return before | ({VARIABLE: ":".join(others)} if any(others) else {})


def in_debugger() -> bool:
    """Tell whether something follows this interpreter's steps, which would lose it."""
    monitoring = getattr(sys, "monitoring", None)  # from Python 3.12 on
    has_tool = monitoring is not None and monitoring.get_tool(monitoring.DEBUGGER_ID) is not None
    return sys.gettrace() is not None or has_tool


def mode() -> str | None:
    """Return to whom the system gives huge pages: ``"always"``, ``"madvise"`` (those who ask, and
    the C library can) or ``"never"``; None if it does not say."""
    try:
        chosen = re.search(r"\[(\w+)\]", SWITCH.read_text())
    except OSError:
        return None
    if chosen is None:
        return None
    return "never" if chosen[1] == "madvise" and not _glibc_can_ask() else chosen[1]


def _glibc_can_ask() -> bool:
    try:
        version = re.fullmatch(r"glibc (\d+)\.(\d+).*", os.confstr("CS_GNU_LIBC_VERSION") or "")
    except (ValueError, OSError):  # another library
        return False
    return version is not None and (int(version[1]), int(version[2])) >= FIRST_GLIBC


def are_used() -> bool:
    """Tell whether this process has its arrays in huge pages."""
    asks = re.search(rf"{OPTION}=[12]", os.environ.get(VARIABLE, "")) is not None
    return mode() == "always" or (mode() == "madvise" and asks)
