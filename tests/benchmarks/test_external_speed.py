"""The study of external clients: its clients in C and in Python ask a server, and are timed."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from sebulba_external.serve import PolicyServer

from benchmarks.studies import external_speed


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    where = f"unix:{tmp_path_factory.mktemp('speed')}/s"
    with PolicyServer("pretrained:cartpole", where, num_seats=4) as server:
        yield server.listener.address


@pytest.mark.slow
def test_clients_are_timed(address: str) -> None:
    many = external_speed.asked(address, "", 3, 0.2, with_worlds=True)
    paced = external_speed.one_client(address, "", 0.3, 20.0)
    for figures in (many, paced):
        assert 0 < figures["p50_ms"] <= figures["p99_ms"]
    assert many["actions_per_s"] > 0
    assert paced["actions_per_s"] <= 30  # it asks 20 times a second


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_client_in_c_prints_how_long_each_answer_took(address: str, tmp_path: Path) -> None:
    program = external_speed.c_client(tmp_path)
    words = [str(program), address.removeprefix("unix:"), "", "0.2"]
    out = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    taken = [float(line) for line in out.split()]
    assert min(taken) > 0
    assert 0.15 < sum(taken) < 5
