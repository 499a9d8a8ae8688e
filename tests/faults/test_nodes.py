"""Processes with Inferencers that are killed or stopped at random moments; the others go on."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sebulba.options import ClusterOptions
from tests.cluster.test_processes import children
from tests.faults.children import Child, training_began
from tests.faults.counts import is_long, rounds
from tests.faults.test_signals import DEADLINE_S, SMALL, check_goes_on, check_saved, shell_code
from tests.support.loop_helpers import make_tiny_loop
from tests.support.remote import STEPS
from tests.support.tiny import CountingEnv

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(rounds(1200, 3600)),
    pytest.mark.filterwarnings("ignore:.*gets replaced by a new one:RuntimeWarning"),
]
HANG_S = 20.0
"""Limit of a silence, where processes are stopped."""


class Assassin:
    """An ``observe_cycle`` that signals processes, each once its Inferencers have come back."""

    def __init__(self, kind: signal.Signals, times: int) -> None:
        self.kind, self.times = kind, times
        self.seen: list[tuple[int, int, float]] = []
        """Inferencer, cycle and moment of each trajectory."""
        self.struck: list[float] = []
        self.loop: Any = None
        self._rng = np.random.default_rng(0)
        self._missing: set[int] = set()
        self._next_at = 0.0

    def __call__(self, trajectory: Any, step_infos: Any) -> None:
        who, cycle, now = int(trajectory.inferencer), int(trajectory.cycle), time.monotonic()
        before = next((c for i, c, _ in reversed(self.seen) if i == who), None)
        self.seen.append((who, cycle, now))
        if before is None or cycle != before + 1:
            self._missing.discard(who)
        if len({i for i, _, _ in self.seen}) < self.loop.num_inferencers or self._missing:
            self._next_at = now + self._rng.uniform(0, 0.3)
        elif len(self.struck) == self.times:
            self.loop.stop()
        elif now >= self._next_at:
            self._strike()

    def _strike(self) -> None:
        inferencers = self.loop._session.inferencers
        spared = inferencers[0].env.worker.node
        nodes = self.loop._parts.inferencers.nodes
        living = [node for node in nodes if node.lives and node is not spared]
        node = living[self._rng.integers(len(living))]
        self._missing = {i.index for i in inferencers if i.env.worker.node is node}
        self.struck.append(time.monotonic())
        # While a cycle runs, and not always at the end of one.
        threading.Timer(self._rng.uniform(0, 0.05), os.kill, (node._process.pid, self.kind)).start()

    def gaps(self, who: int) -> list[int]:
        """Return by how much the cycles of an Inferencer go on, where not by one."""
        cycles = [cycle for i, cycle, _ in self.seen if i == who]
        return [b - a for a, b in itertools.pairwise(cycles) if b != a + 1]

    def waits(self, spared: bool) -> list[float]:
        """Return seconds from each strike to the next trajectory of Inferencer 0, whose process is
        spared, or to the last of those that came back."""
        found = []
        for moment, end in zip(self.struck, [*self.struck[1:], np.inf], strict=True):
            later = [(i, c, t) for i, c, t in self.seen if moment < t < end]
            if spared:
                found.append(next(t for i, _, t in later if i == 0) - moment)
            else:
                cycles = {(i, c) for i, c, _ in self.seen}
                back = [t for i, c, t in later if i and (i, c - 1) not in cycles]
                found.append(max(back) - moment)
        return found


@pytest.mark.parametrize(
    "kind", rounds([signal.SIGKILL], [signal.SIGKILL, signal.SIGSTOP]), ids=lambda kind: kind.name
)
def test_the_others_go_on_while_what_was_lost_is_replaced(kind, record_fault):
    assassin = Assassin(kind, rounds(2, 20 if kind == signal.SIGKILL else 5))
    per_node = rounds(2, 1)
    before = children()
    loop, _ = make_tiny_loop(
        CountingEnv,
        cluster=ClusterOptions(address="processes", inferencers_per_node=per_node),
        num_inferencers_per_device=3 if per_node == 1 else 4,
        on_env_failure="restart",
        max_env_restarts=1000,
        hang_timeout_s=HANG_S if kind == signal.SIGSTOP else 300.0,
        observe_cycle=assassin,
    )
    assassin.loop = loop
    with loop:
        result = loop.run(loop.new_state(0, STEPS), 10**7, STEPS)
        generations = loop._envs.num_generations
    assert children() == before
    restarts = assassin.times * per_node
    assert result.counters.env_restarts == restarts
    assert generations == 1 + restarts, "each with seeds of its own"
    assert 0 < result.counters.dropped_env_cycles <= restarts
    seen = [(who, cycle) for who, cycle, _ in assassin.seen]
    assert len(set(seen)) == len(seen), "none twice"
    assert assassin.gaps(0) == []
    # The cycle that was lost, and the one that marks the break.
    gaps = [gap for who in range(1, loop.num_inferencers) for gap in assassin.gaps(who)]
    assert gaps == [3] * restarts
    figures = {"go_on_s": assassin.waits(spared=True), "back_s": assassin.waits(spared=False)}
    record_fault(
        kind.name, times=assassin.times, **{name: max(each) for name, each in figures.items()}
    )


def marked(mark: str) -> set[int]:
    """Return the processes that have ``mark`` in their environment, but for this one."""
    found = set()
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and mark.encode() in (folder / "environ").read_bytes():
                found.add(int(folder.name))
    return found - {os.getpid()}


@pytest.mark.skipif(not is_long(), reason="test_signals has one of them")
def test_runs_with_nodes_end_at_signals_saved_and_leave_no_process(
    tmp_path, compile_cache_folder, record_fault, monkeypatch
):
    mark = f"MARK-{tmp_path}"
    monkeypatch.setenv("SEBULBA_TEST_MARK", mark)
    rng, seconds = np.random.default_rng(1), []
    options = ["--num-inferencers-per-device", "4", "--cluster.inferencers-per-node", "2"]
    for round_ in range(rounds(1, 20)):
        which = [signal.SIGTERM, signal.SIGINT][round_ % 2]
        run = tmp_path / f"{round_}"
        words = ["train", "cartpole", *SMALL, *options, "--cluster.address", "processes"]
        words += ["--total-env-steps", "1000000000", "--run-dir", str(run)]
        words += ["--compile-cache", str(compile_cache_folder)]
        with Child(words, tmp_path / f"{round_}.log", in_group_of_its_own=True) as child:
            child.wait_until(training_began(run))
            assert len(marked(mark)) >= 1 + 2, "there are two nodes"
            time.sleep(rng.uniform(0, 3))
            began = time.monotonic()
            (child.send_to_group if round_ % 4 < 2 else child.send)(which)
            assert shell_code(child.wait(DEADLINE_S)) == 128 + which, child.printed
            seconds.append(time.monotonic() - began)
        saved = check_saved(run)
        deadline = time.monotonic() + DEADLINE_S
        while left := marked(mark):
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
        print(round_, which.name, seconds[-1])
    check_goes_on(run, saved, tmp_path / "resumed.log")
    record_fault("signals", times=len(seconds), most_seconds_to_exit=max(seconds))
