"""Who starts over for huge pages, and how."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sebulba.commands import cli
from sebulba.runs import huge_pages
from sebulba.runs.huge_pages import (
    OPTION,
    RETURNS_FROM,
    VARIABLE,
    are_used,
    environment_before_restart,
    restart_with_huge_pages,
)

TRAIN = ["train", "pong"]
OURS = f"{OPTION}=1:{RETURNS_FROM}=4194304"


class Restarts:
    """A process that can be started over, and what it was started over with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[tuple[list[str], str]] = []
        self._monkeypatch = monkeypatch

    def begin(self, *argv: str) -> None:
        """Be a process that was started with these words."""
        words = [sys.executable, "-u", "-m", "sebulba", *argv]
        self._monkeypatch.setattr(sys, "orig_argv", words)
        restart_with_huge_pages(argv)

    def execve(self, path: str, words: list[str], environ: dict[str, str]) -> None:
        self.started.append(([path, *words], environ[VARIABLE]))


@pytest.fixture
def restarts(monkeypatch, tmp_path):
    restarts = Restarts(monkeypatch)
    monkeypatch.setattr(os, "execve", restarts.execve)
    monkeypatch.setattr(huge_pages, "in_debugger", lambda: False)  # coverage is one
    monkeypatch.setattr(os, "confstr", lambda name: "glibc 2.36")
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(huge_pages, "SWITCH", tmp_path / "enabled")
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    return restarts


def test_a_command_that_trains_starts_over_as_it_was_started(restarts):
    restarts.begin(*TRAIN)
    words = [sys.executable, sys.executable, "-u", "-m", "sebulba", *TRAIN]
    assert restarts.started == [(words, OURS)]
    assert VARIABLE not in os.environ and not are_used(), "this one has not been"


def test_it_does_so_once(restarts, monkeypatch):
    monkeypatch.setenv(VARIABLE, f"{OPTION}=1")
    restarts.begin(*TRAIN)
    assert not restarts.started and are_used()


def test_other_options_for_the_c_library_are_kept(restarts, monkeypatch):
    monkeypatch.setenv(VARIABLE, "glibc.malloc.arena_max=2")
    restarts.begin("bench", "train")
    assert restarts.started[0][1] == f"glibc.malloc.arena_max=2:{OURS}"


def test_a_bound_of_the_user_for_what_goes_back_is_obeyed(restarts, monkeypatch):
    monkeypatch.setenv(VARIABLE, f"{RETURNS_FROM}=123456")
    restarts.begin(*TRAIN)
    assert restarts.started[0][1] == f"{RETURNS_FROM}=123456:{OPTION}=1"


@pytest.mark.parametrize("argv", [[], ["doctor"], ["--version"], ["--help"]])
def test_commands_that_train_nothing_do_not_start_over(restarts, argv):
    restarts.begin(*argv)
    assert not restarts.started


def test_a_program_that_calls_the_command_line_does_not_start_over(restarts, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "sweep.py"])
    restart_with_huge_pages(TRAIN)
    assert not restarts.started


def test_where_all_memory_is_in_huge_pages_large_pieces_are_to_go_back_too(restarts, tmp_path):
    (tmp_path / "enabled").write_text("[always] madvise never")
    assert are_used()
    restarts.begin(*TRAIN)
    assert restarts.started[0][1] == OURS


@pytest.mark.parametrize("switch", ["always madvise [never]", "", None])
def test_nothing_starts_over_where_it_would_change_nothing(restarts, tmp_path, switch):
    if switch is None:
        (tmp_path / "enabled").unlink()
    else:
        (tmp_path / "enabled").write_text(switch)
    restarts.begin(*TRAIN)
    assert not restarts.started and not are_used()


@pytest.mark.parametrize("library", ["glibc 2.31", "", None, ValueError("musl")])
@pytest.mark.parametrize("switch", ["always [madvise] never", "[always] madvise never"])
def test_a_c_library_that_cannot_ask_is_not_told_to(
    restarts, monkeypatch, tmp_path, library, switch
):
    (tmp_path / "enabled").write_text(switch)

    def confstr(name):
        if isinstance(library, ValueError):
            raise library
        return library

    monkeypatch.setattr(os, "confstr", confstr)
    restarts.begin(*TRAIN)
    assert not restarts.started
    assert huge_pages.mode() == ("never" if "[madvise]" in switch else "always")


@pytest.mark.parametrize(("choice", "used"), [("0", False), ("2", True)])
def test_a_choice_of_the_user_is_obeyed(restarts, monkeypatch, choice, used):
    monkeypatch.setenv(VARIABLE, f"{OPTION}={choice}")
    restarts.begin(*TRAIN)
    assert not restarts.started and are_used() is used


def test_a_debugger_is_not_lost(restarts, monkeypatch):
    monkeypatch.setattr(huge_pages, "in_debugger", lambda: True)
    restarts.begin(*TRAIN)
    assert not restarts.started


def test_a_debugger_is_seen_however_it_follows(monkeypatch):
    monkeypatch.setattr(sys, "gettrace", lambda: None)
    if (monitoring := getattr(sys, "monitoring", None)) is None:
        assert not huge_pages.in_debugger()
    else:
        free = monitoring.get_tool(monitoring.DEBUGGER_ID) is None
        assert huge_pages.in_debugger() is not free
        if free:
            monitoring.use_tool_id(monitoring.DEBUGGER_ID, "of the test")
            assert huge_pages.in_debugger()
            monitoring.free_tool_id(monitoring.DEBUGGER_ID)
    monkeypatch.setattr(sys, "gettrace", lambda: print)
    assert huge_pages.in_debugger()


def test_a_system_that_refuses_is_no_error(restarts, monkeypatch):
    def refuse(path, words, environ):
        raise PermissionError("no")

    monkeypatch.setattr(os, "execve", refuse)
    restarts.begin(*TRAIN)
    assert VARIABLE not in os.environ


@pytest.mark.parametrize(
    ("now", "before"),
    [
        ({"A": "b"}, {"A": "b"}),
        ({"A": "b", VARIABLE: f"{OPTION}=1"}, {"A": "b"}),
        ({VARIABLE: f"a.b=1:{OURS}"}, {VARIABLE: "a.b=1"}),
        ({VARIABLE: f"{RETURNS_FROM}=1:{OPTION}=1"}, {VARIABLE: f"{RETURNS_FROM}=1"}),
        ({VARIABLE: f"{OPTION}=0"}, {VARIABLE: f"{OPTION}=0"}),
    ],
)
def test_the_environment_before_a_restart_is_known(now, before):
    assert environment_before_restart(now) == before


def test_the_command_asks_for_them_first(monkeypatch):
    asked = []
    monkeypatch.setattr(cli, "restart_with_huge_pages", lambda *given: asked.append(given))
    monkeypatch.setattr(sys, "argv", ["sebulba", "--version"])
    with pytest.raises(SystemExit):
        cli.entry_point()
    with pytest.raises(SystemExit) as end:
        cli.entry_point(len, long=("inference",))
    assert end.value.code == 1, "the command is given its one word"
    assert asked == [(["--version"], huge_pages.COMMANDS), (["--version"], ("inference",))]


KEPT_MB = """
import ctypes, pathlib
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
def resident():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6
def take_and_give_back(mb):
    at = libc.malloc(mb * 10**6)
    ctypes.memset(at, 1, mb * 10**6)
    libc.free(ctypes.c_void_p(at))
before = resident()
take_and_give_back(30)
take_and_give_back(20)
print(resident() - before)
"""


@pytest.mark.skipif(huge_pages.mode() not in ("always", "madvise"), reason="not with this library")
def test_large_pieces_go_back_at_once():
    def kept_mb(options):
        environ = os.environ | {VARIABLE: options}
        words = [sys.executable, "-c", KEPT_MB]
        return float(subprocess.check_output(words, env=environ, text=True, timeout=300))

    assert kept_mb(huge_pages.with_wanted()) < 5 < 15 < kept_mb(f"{OPTION}=1")


@pytest.mark.skipif(huge_pages.mode() != "madvise", reason="huge pages are not given to who asks")
def test_the_same_process_goes_on_with_the_same_words():
    code = (
        "import os, sys; from sebulba.runs import huge_pages\n"
        "print(os.getpid(), sys.argv[1:], huge_pages.are_used(), flush=True)\n"
        "huge_pages.restart_with_huge_pages(sys.argv[1:])"
    )
    words = [sys.executable, "-c", code, "train", "a b"]
    environ = {name: value for name, value in os.environ.items() if name != VARIABLE}
    result = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    first, second = result.stdout.splitlines()
    pid = first.split()[0]
    assert first == f"{pid} ['train', 'a b'] False" and second == f"{pid} ['train', 'a b'] True"
