"""Inferencers in processes of their own: the same bits, the same faults, nothing left behind."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sebulba
from sebulba.cluster.inferencers import processes
from sebulba.cluster.inferencers.remote_inferencer import RemoteInferencer
from sebulba.errors import EnvError, UsageError
from sebulba.options import ClusterOptions
from tests.support.loop_helpers import leaves_equal, make_tiny_loop
from tests.support.remote import STEPS, Fails, check_failure_is_replaced, trained
from tests.support.tiny import CountingEnv

pytestmark = pytest.mark.timeout(1200)

PROCESSES = ClusterOptions(address="processes")


def children() -> set[int]:
    """Return the processes of Inferencers that this process has started and that live."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            words = (folder / "cmdline").read_bytes()
            if parent == os.getpid() and b"inferencer_process" in words:
                found.add(int(folder.name))
    return found


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = children()
    yield
    assert children() == before


@pytest.mark.slow
@pytest.mark.parametrize("cycle", ["stepped", "fused"])
def test_lockstep_is_the_same_bit_for_bit(cycle):
    here, there = (
        trained("CartPole-v1", cluster, cycle=cycle) for cluster in (ClusterOptions(), PROCESSES)
    )
    assert leaves_equal(here.state.networks, there.state.networks)
    assert here.counters == there.counters


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_processes_and_without(tmp_path):
    whole = trained(CountingEnv, ClusterOptions(), num_cycles=12)
    clusters = [PROCESSES, ClusterOptions(), PROCESSES]
    for part, cluster in enumerate(clusters):
        with sebulba.Checkpointer(tmp_path) as saver:
            options = {"schedule": "lockstep", "cluster": cluster, "checkpointer": saver}
            loop, _ = make_tiny_loop(CountingEnv, **options)
            with loop:
                if part == 0:
                    state = loop.new_state(0, STEPS)
                else:
                    state = loop.restore(saver.load_newest())
                    assert loop.resume_notes == []
                result = loop.run(state, 4, STEPS)
    assert leaves_equal(whole.state.networks, result.state.networks)
    assert whole.counters == result.counters


@pytest.mark.slow
def test_a_checkpoint_of_two_nodes_goes_on_with_three_with_none_and_back(tmp_path):
    here = ClusterOptions()
    learned, env_steps = None, 0
    for number, cluster in ((2, PROCESSES), (3, PROCESSES), (2, here), (2, PROCESSES)):
        with sebulba.Checkpointer(tmp_path) as saver:
            loop, _ = make_tiny_loop(
                CountingEnv,
                12 // number,
                schedule="lockstep",
                cluster=cluster,
                checkpointer=saver,
                num_inferencers_per_device=number,
            )
            with loop:
                checkpoint = saver.load_newest()
                if checkpoint is None:
                    state = loop.new_state(0, STEPS)
                else:
                    state = loop.restore(checkpoint, drop_replay=True)
                    assert leaves_equal(state.networks, learned)
                    is_split_anew = checkpoint.snapshot.record["run"]["num_inferencers"] != number
                    said = any("new episodes from fresh seeds" in n for n in loop.resume_notes)
                    assert said == is_split_anew, loop.resume_notes
                result = loop.run(state, 6, STEPS)
        learned, env_steps = result.state.networks, env_steps + 6 * STEPS * 12 // number
        assert result.counters.env_steps == env_steps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raise", "ValueError: the wheel came off"),
        ("exit", "called sys.exit"),
        ("kill", "ended by SIGKILL"),
    ],
)
def test_a_failure_in_a_process_ends_the_run_with_its_words(how, said):
    env = functools.partial(Fails, how, 23)
    loop, _ = make_tiny_loop(env, cluster=PROCESSES, num_inferencers_per_device=1)
    with loop, pytest.raises(EnvError, match=said) as raised:
        loop.run(loop.new_state(0, STEPS), 40, STEPS)
    if how == "raise":
        assert 'raise ValueError("the wheel came off")' in "".join(raised.value.__notes__)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise", "kill", "hang"])
def test_a_failed_process_is_replaced(how, tmp_path):
    check_failure_is_replaced(PROCESSES, how, tmp_path)


def killed_at(moment: str, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes of Inferencers be killed so many times at a moment of the start."""
    left = [times]

    def kill_first(node: processes.ProcessNode) -> None:
        if left[0]:
            left[0] -= 1
            node._process.kill()
            node._process.wait()

    def patch(cls: type, name: str, node_of: Callable[..., processes.ProcessNode]) -> None:
        before = getattr(cls, name)

        def method(self: Any, *arguments: Any) -> Any:
            kill_first(node_of(self, *arguments))
            return before(self, *arguments)

        monkeypatch.setattr(cls, name, method)

    if moment == "before it has begun":
        patch(processes.ProcessNode, "_send_given", lambda node, _: node)
    elif moment == "as it makes environments":
        patch(RemoteInferencer, "__init__", lambda _, worker, *__: worker.node)
    else:
        patch(RemoteInferencer, "_use", lambda own, _: own.worker.node)


MOMENTS = ["before it has begun", "as it makes environments", "as it compiles"]


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("per_node", [1, 2])
def test_a_kill_at_the_very_start_is_made_good(moment, per_node, monkeypatch):
    cluster = ClusterOptions(address="processes", inferencers_per_node=per_node)
    whole = trained(CountingEnv, cluster, num_inferencers_per_device=2)
    killed_at(moment, 2, monkeypatch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = trained(
            CountingEnv, cluster, num_inferencers_per_device=2, on_env_failure="restart"
        )
    said = [str(w.message) for w in caught if "before the run began" in str(w.message)]
    assert leaves_equal(whole.state.networks, result.state.networks)
    assert result.counters.env_restarts == len(said)
    if moment != MOMENTS[0]:  # a process that no Inferencer had is replaced anyway
        assert len(said) >= 2 and "restart 2 of 10" in said[1]


@pytest.mark.slow
@pytest.mark.parametrize(("options", "times"), [({}, 1), ({"max_env_restarts": 2}, 3)])
@pytest.mark.parametrize("moment", MOMENTS[1:])
def test_kills_at_the_very_start_end_the_run_beyond_the_limit(moment, options, times, monkeypatch):
    killed_at(moment, times, monkeypatch)
    restart = {"on_env_failure": "restart"} if options else {}
    with warnings.catch_warnings(), pytest.raises(EnvError, match="SIGKILL") as raised:
        warnings.filterwarnings("ignore", ".*before the run began", RuntimeWarning)
        trained(CountingEnv, PROCESSES, num_inferencers_per_device=1, **restart, **options)
    said = "2 processes were replaced before this one; max_env_restarts=2"
    assert (said in getattr(raised.value, "__notes__", ())) == bool(options)


@pytest.mark.slow
def test_a_kill_at_the_start_of_a_resumed_run_is_made_good(tmp_path, monkeypatch):
    whole = trained(CountingEnv, PROCESSES, num_cycles=8)
    for part in range(2):
        with sebulba.Checkpointer(tmp_path) as saver:
            if part:
                killed_at("as it compiles", 1, monkeypatch)
            options = {"schedule": "lockstep", "cluster": PROCESSES, "checkpointer": saver}
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*before the run began", RuntimeWarning)
                loop, _ = make_tiny_loop(CountingEnv, on_env_failure="restart", **options)
                with loop:
                    state = loop.restore(saver.load_newest()) if part else loop.new_state(0, STEPS)
                    result = loop.run(state, 4, STEPS)
    assert leaves_equal(whole.state.networks, result.state.networks)
    assert result.counters.env_restarts == 1


@pytest.mark.slow
def test_a_second_run_of_other_length_goes_on_in_the_same_processes():
    loop, _ = make_tiny_loop(CountingEnv, cluster=PROCESSES, num_inferencers_per_device=1)
    with loop:
        first = loop.run(loop.new_state(0, STEPS), 3, STEPS)
        ours = children()
        second = loop.run(loop.new_state(0, 2 * STEPS), 3, 2 * STEPS)
        assert children() == ours
    assert (first.counters.env_steps, second.counters.env_steps) == (60, 120)


def test_what_cannot_be_sent_is_refused():
    class Holds(CountingEnv):
        lock = threading.Lock()

    with pytest.raises(UsageError, match="cannot be pickled"):
        make_tiny_loop(Holds, cluster=PROCESSES)


def test_inline_has_no_inferencers_to_put_elsewhere():
    with pytest.raises(UsageError, match="use num_inferencers_per_device=1"):
        make_tiny_loop(CountingEnv, cluster=PROCESSES, num_inferencers_per_device=0)


def test_an_environment_that_cannot_be_made_says_so():
    class Broken(CountingEnv):
        made = 0

        def __init__(self) -> None:
            raise ValueError("no wheels")

    with pytest.raises(Exception, match="no wheels"):
        make_tiny_loop(lambda: Broken(), cluster=PROCESSES)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"address": "proceses"}, "HOST:PORT"),
        ({"address": "ray://head:10001"}, "HOST:PORT"),
        ({"address": "head:70000"}, "HOST:PORT"),
        ({"nodes": 2}, "which has one"),
        ({"address": "auto", "nodes": -1}, "at least 0"),
    ],
)
def test_addresses_that_are_none_are_refused(given, said):
    with pytest.raises(UsageError, match=said):
        ClusterOptions(**given)


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_the_error_names_the_command():
    with pytest.raises(UsageError, match=r"pip install 'sebulba\[cluster\]'"):
        make_tiny_loop(CountingEnv, cluster=ClusterOptions(address="local"))
