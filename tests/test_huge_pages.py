"""Who starts over for huge pages, and how."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sebulba import huge_pages
from sebulba.huge_pages import OPTION, VARIABLE, are_used, restart_with_huge_pages


@pytest.fixture
def restarts(monkeypatch, tmp_path):
    """Return what it would be started over with: nothing yet."""
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, words: started.append([path, *words]))
    monkeypatch.setattr(sys, "gettrace", lambda: None)  # coverage
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(huge_pages, "SWITCH", tmp_path / "enabled")
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    yield started
    os.environ.pop(VARIABLE, None)


def test_a_command_that_trains_starts_over_as_it_was_started(restarts, monkeypatch):
    words = [sys.executable, "-u", "-m", "sebulba", "train", "pong"]
    monkeypatch.setattr(sys, "orig_argv", words)
    restart_with_huge_pages(["train", "pong"])
    assert restarts == [[sys.executable, *words]]
    assert os.environ[VARIABLE] == f"{OPTION}=1" and are_used()
    restart_with_huge_pages(["train", "pong"])
    assert len(restarts) == 1, "once"


def test_other_options_for_the_c_library_are_kept(restarts, monkeypatch):
    monkeypatch.setenv(VARIABLE, "glibc.malloc.arena_max=2")
    restart_with_huge_pages(["bench", "train"])
    assert os.environ[VARIABLE] == f"glibc.malloc.arena_max=2:{OPTION}=1" and restarts


@pytest.mark.parametrize("argv", [[], ["doctor"], ["--version"], ["--help"]])
def test_commands_that_train_nothing_do_not_start_over(restarts, argv):
    restart_with_huge_pages(argv)
    assert not restarts


@pytest.mark.parametrize("switch", ["[always] madvise never", "always madvise [never]", "", None])
def test_nothing_starts_over_where_it_would_change_nothing(restarts, tmp_path, switch):
    if switch is None:
        (tmp_path / "enabled").unlink()
    else:
        (tmp_path / "enabled").write_text(switch)
    restart_with_huge_pages(["train", "pong"])
    assert not restarts and VARIABLE not in os.environ
    assert are_used() is (switch == "[always] madvise never")


def test_a_choice_of_the_user_is_obeyed(restarts, monkeypatch):
    monkeypatch.setenv(VARIABLE, f"{OPTION}=0")
    restart_with_huge_pages(["train", "pong"])
    assert not restarts and not are_used()


def test_a_debugger_is_not_lost(restarts, monkeypatch):
    monkeypatch.setattr(sys, "gettrace", lambda: print)
    restart_with_huge_pages(["train", "pong"])
    assert not restarts


def test_a_system_that_refuses_is_no_error(restarts, monkeypatch):
    def refuse(path, words):
        raise PermissionError("no")

    monkeypatch.setattr(os, "execv", refuse)
    restart_with_huge_pages(["train", "pong"])


@pytest.mark.skipif(huge_pages.mode() != "madvise", reason="huge pages are not given to who asks")
def test_the_same_process_goes_on_with_the_same_words():
    code = (
        "import os, sys; from sebulba import huge_pages\n"
        "print(os.getpid(), sys.argv[1:], huge_pages.are_used(), flush=True)\n"
        "huge_pages.restart_with_huge_pages(sys.argv[1:])"
    )
    words = [sys.executable, "-c", code, "train", "a b"]
    environ = {name: value for name, value in os.environ.items() if name != VARIABLE}
    result = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    first, second = result.stdout.splitlines()
    pid = first.split()[0]
    assert first == f"{pid} ['train', 'a b'] False" and second == f"{pid} ['train', 'a b'] True"
