"""Several Inferencers in one process: one copy of the networks, and what becomes of a lost one."""

from __future__ import annotations

import collections
import io
import multiprocessing
import re
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any

import cloudpickle
import jax
import numpy as np
import pytest
from rich.console import Console

from sebulba.agents.replay.store import MIN_PRIORITY
from sebulba.cluster import parts as parts_module
from sebulba.cluster.inferencers import inferencer_process, inferencer_server
from sebulba.cluster.inferencers.inferencer_server import Failure, Server, Shared, Spent
from sebulba.cluster.inferencers.nodes import Node, Version, Versions, Worker
from sebulba.cluster.inferencers.remote_inferencer import CYCLES, make_servers, pickled
from sebulba.cluster.inferencers.remote_places import RemotePlaces
from sebulba.cluster.replay.managed_update import ManagedUpdater
from sebulba.cluster.replay.trajectory_manager import TrajectoryManager
from sebulba.errors import EnvError, EnvHangError, LostNodeError, UsageError
from sebulba.inference.env_thread import CallingThread
from sebulba.inference.inferencer import Inferencer
from sebulba.inference.inferencer_pool import RunningInferencers
from sebulba.inference.places import Given
from sebulba.inference.replacements import BEING_REPLACED, Replacements
from sebulba.metrics import live_panel
from sebulba.metrics.counters import Counters
from sebulba.metrics.timer import PhaseTimer
from sebulba.options import ClusterOptions, FaultOptions, LoopOptions
from sebulba.transport.permits import Stop
from sebulba.transport.staging import Staging
from sebulba.transport.trajectory_queue import TrajectoryQueue
from tests.cluster import test_managers
from tests.support.loop_helpers import leaves_equal, make_tiny_loop
from tests.support.remote import STEPS
from tests.support.tiny import CountingEnv

pytestmark = pytest.mark.timeout(1200)


def processes(per_node: int, **options: Any) -> ClusterOptions:
    return ClusterOptions(address="processes", inferencers_per_node=per_node, **options)


# Versions of the networks.


def test_a_version_has_one_number_and_is_new_once_whoever_asks_first():
    versions, a, b, c = Versions(3), [1], [1], [1]
    assert versions.of(0, a) == Version(1, True, {1})
    assert versions.of(1, b) == Version(2, True, {1, 2})
    assert versions.of(2, a) == Version(1, False, {1, 2})  # an older one than the newest
    assert versions.of(0, b) == Version(2, False, {1, 2})
    # Nobody asks for the first any more, but for whoever was given its number.
    assert versions.of(2, c) == Version(3, True, {2, 3})
    assert versions.of(1, a).is_new


def test_who_asks_late_for_the_version_before_the_newest_finds_it_there():
    versions, a, b, c = Versions(2), [1], [1], [1]
    assert versions.of(0, a) == Version(1, True, {1})
    assert versions.of(0, b) == Version(2, True, {1, 2})  # the other has not asked yet
    assert versions.of(1, a) == Version(1, False, {1, 2})
    assert versions.of(1, b) == Version(2, False, {2})
    assert versions.of(1, c) == Version(3, True, {2, 3})


def test_a_node_with_one_inferencer_keeps_one_version():
    versions = Versions(1)
    assert [versions.of(0, [1]).keep for _ in range(3)] == [{1}, {2}, {3}]


def test_a_process_keeps_the_versions_that_may_be_asked_for_and_takes_each_once():
    shared, asked = Shared(b""), []

    def get(number: int) -> Any:
        return lambda: asked.append(number) or [np.full(2, number, np.float32)]

    shared.put(1, get(1), {1})
    shared.put(2, get(2), {1, 2})
    shared.put(2, get(2), {1, 2})
    assert asked == [1, 2] and shared.received == 2
    assert [float(shared.take(n)[0][0]) for n in (1, 2)] == [1.0, 2.0]
    shared.put(3, get(3), {2, 3})
    assert sorted(shared._versions) == [2, 3]


def test_a_version_that_comes_late_does_not_push_out_a_newer_one():
    shared = Shared(b"")
    shared.put(6, lambda: [np.full(2, 6.0)], {5, 6})
    shared.put(5, lambda: [np.full(2, 5.0)], {4, 5})
    assert [float(shared.take(n)[0][0]) for n in (5, 6)] == [5.0, 6.0]
    shared.put(7, lambda: [np.full(2, 7.0)], {6, 7})
    assert sorted(shared._versions) == [6, 7]


def test_who_asks_before_a_version_comes_waits_for_it():
    shared, taken = Shared(b""), []
    thread = threading.Thread(target=lambda: taken.append(shared.take(1)))
    thread.start()
    shared.put(1, lambda: [np.zeros(3)], {1})
    thread.join(300)
    assert len(taken) == 1


def test_who_asks_for_a_version_that_never_comes_is_told(monkeypatch):
    monkeypatch.setattr(inferencer_server, "TAKE_S", 0.1)
    shared = Shared(b"")
    shared.put(1, lambda: [np.zeros(3)], {1})
    with pytest.raises(EnvError, match=r"version 2 did not arrive.*versions \[1\] arrived"):
        shared.take(2)


# Places.


class FakeWorker(Worker):
    freed = 0
    is_slow = False

    def free(self) -> bool:
        self.freed += 1
        return not self.is_slow

    def is_free(self) -> bool:
        return not self.is_slow

    def send(self, name: str, *arguments: Any) -> None: ...

    def has_answer(self) -> bool:
        return True

    def receive(self) -> Any:
        return None, False

    def stop(self, number: int) -> None: ...


class FakeNode(Node):
    name = where = "fake"

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self.ended = 0
        self.waits = False

    @property
    def is_placed(self) -> bool:
        return not self.waits

    def worker(self, slot: int) -> Worker:
        return FakeWorker(self, slot)

    def send(self, version: Version, networks: Any, device: Any) -> Any:
        return version.number

    def kill(self) -> None:
        self.is_lost = True

    def end(self) -> None:
        self.ended += 1


def test_a_lost_node_is_waited_for_without_a_limit_while_others_live():
    places = RemotePlaces(FakeNode, 3, 1)
    one, two, three = places.nodes
    assert not places.waits_for(three), "the run has not begun"
    places.started(0, None, patient=False)
    assert not places.waits_for(three), "a lost one ends the run, or all wait for it"
    places.started(0, None, patient=True)
    assert places.waits_for(three)
    three.waits = two.waits = True
    assert places.num_living == 1
    assert places.waits_for(two) and not places.waits_for(one)
    one.kill()
    assert not places.waits_for(two) and not places.waits_for(three)
    two.waits = False
    assert places.waits_for(three) and not places.waits_for(two)


def test_inferencers_fill_a_process_before_the_next_and_a_lost_one_is_not_used_again():
    places = RemotePlaces(FakeNode, 5, 2)
    assert [node.room for node in places.nodes] == [2, 2, 1]
    envs = [places.make(3, [0, 1, 2]) for _ in range(5)]
    first, second, third = places.nodes
    assert [env.worker.node for env in envs] == [first, first, second, second, third]

    envs[2].close()
    envs[2].close()
    assert (envs[2].worker.freed, second.ended) == (1, 0)
    assert places.make(3, [0]).worker.node is second  # its place is free again

    envs[0].kill()
    assert places.num_living == 2
    for env in envs[:2]:
        env.close()
    assert envs[0].worker.freed == 0 and first.ended  # nobody is there to free it
    new = [places.make(3, [0]).worker.node for _ in range(2)]
    assert new[0] is new[1] and new[0] not in (first, second, third)
    places.close()
    assert all(node.ended for node in places.nodes) and places.num_living == 0
    with pytest.raises(EnvError, match="is closed"):
        places.make(3, [0])


def test_traffic_tells_the_way_from_the_cycle():
    node = FakeNode(1)
    node.version(0, [np.zeros(8, np.float32)], None)  # type: ignore[arg-type]
    node.note(Spent(2.0, 7.0), 2.5, 10, 100)
    node.note(Spent(1.0, 6.0), 0.9, 10, 100)  # clocks differ: never less than nothing
    traffic = node.traffic
    assert (traffic.items, traffic.versions, traffic.bytes_out, traffic.bytes_in) == (2, 1, 52, 200)
    assert (traffic.relay_s, traffic.cpu_s) == (0.5, 7.0)


def test_metrics_tell_of_the_traffic_of_a_window():
    places = RemotePlaces(FakeNode, 2, 1)
    places.started(0, None, patient=False)
    first, second = places.nodes
    first.version(0, [np.zeros(250, np.float32)], None)  # type: ignore[arg-type]
    first.note(Spent(1.0, 1.0), 1.004, 0, 3000)
    assert places.figures(2.0, 1) == {
        "nodes": 2,
        "nodes_lost": 0,
        "relay_ms": pytest.approx(4.0),
        "relay_bytes_per_s": 2000.0,
        "relay_skipped_networks": 0.5,  # the second has not had the version
    }
    second.kill()
    record = places.figures(2.0, 1)
    assert (record["nodes"], record["nodes_lost"]) == (1, 1)
    assert record["relay_ms"] is record["relay_skipped_networks"] is None
    lines = places.lines([])
    assert lines[0] == "fake: lost after 0 trajectories"
    assert lines[1].startswith("fake: no Inferencer; 1 trajectories, 4.0 ms each, 1 networks")


def test_the_panel_shows_nodes_only_where_there_are_any():
    record = {"nodes": 3, "nodes_lost": 1, "relay_ms": 0.5, "relay_bytes_per_s": 2e6}
    assert live_panel._nodes(record).plain.split("  ") == [
        "3",
        "0.5 ms an item",
        "2 MB/s",
        "1 lost",
    ]
    console = Console(record=True, width=100, file=io.StringIO())
    for metrics, is_shown in ((record, True), ({}, False)):
        view = live_panel.PanelWriter("run", "folder", str)
        view.write(metrics)
        console.print(view)
        assert ("0.5 ms an item" in console.export_text()) == is_shown


def test_the_lines_leave_out_lost_nodes_before_living_ones():
    places = RemotePlaces(FakeNode, 10, 1)
    for node in places.nodes[1:]:
        node.kill()
    lines = places.lines([])
    assert lines[0] == "2 more nodes" and lines[-1].startswith("fake: no Inferencer")


def test_a_new_node_has_as_much_room_as_is_missing():
    places = RemotePlaces(FakeNode, 5, 4)
    envs = [places.make(3, [0]) for _ in range(5)]
    assert [node.room for node in places.nodes] == [4, 1]
    for lost, room in ((envs[4:], 1), (envs[:4], 4)):
        lost[0].kill()
        for env in lost:
            env.close()
        new = [places.make(3, [0]).worker.node for _ in lost]
        assert {node.room for node in new} == {room}
        assert places.num_living == 2


def test_who_was_closed_cannot_ask_for_whoever_has_its_place():
    places = RemotePlaces(FakeNode, 2, 2)
    env, _ = (places.make(3, [0]) for _ in range(2))
    env.close()
    with pytest.raises(EnvError, match="fake were closed"):
        env.worker.ask("run")


def test_environments_that_are_never_made_are_given_up_and_named(monkeypatch):
    places = RemotePlaces(FakeNode, 1, 1)
    places.limit_s = 0.0
    monkeypatch.setattr(FakeWorker, "has_answer", lambda self: False)
    with pytest.raises(EnvError, match=r"fake did not answer 'make' .*faults\.hang_timeout_s"):
        places.make(3, [0])
    assert places.nodes[0].is_lost


def test_those_that_a_node_makes_at_once_may_take_as_long_as_each_alone(monkeypatch):
    places = RemotePlaces(FakeNode, 4, 4)
    places.limit_s = 0.5
    monkeypatch.setattr(FakeWorker, "has_answer", lambda self: False)
    (node,) = places.nodes
    with node.preparing(), node.preparing(), pytest.raises(EnvError, match="'make' for 2 s"):
        places.make(3, [0])
    assert node.num_preparing == 0


@pytest.mark.parametrize("room", [1, 2])
def test_a_stop_does_not_wait_for_environments_that_are_being_made(room, monkeypatch):
    places = RemotePlaces(FakeNode, 2, room)
    other = places.make(3, [0])
    monkeypatch.setattr(FakeWorker, "has_answer", lambda self: False)
    monkeypatch.setattr(FakeWorker, "is_slow", True)
    places.stopping.set()
    with pytest.raises(EnvError, match="run ended before the fake had answered 'make'"):
        places.make(3, [0])
    last = places.nodes[-1]
    assert last.ended == (2 if room == 1 else 0) and not last.is_lost
    assert other.worker.node.lives
    assert last.take() is None  # what is being made there would answer whoever has the place
    monkeypatch.setattr(FakeWorker, "is_slow", False)
    assert (last.take() is None) == (room == 1)  # it has been made and freed


class Overlap:
    """Makes environments, and notes how many are being made at once."""

    now = most = 0
    lock = threading.Lock()


def make_slowly(num_envs: int, seeds: list[int]) -> Any:
    with Overlap.lock:
        Overlap.now += 1
        Overlap.most = max(Overlap.most, Overlap.now)
    threading.Event().wait(0.05)
    with Overlap.lock:
        Overlap.now -= 1
    return types.SimpleNamespace(spec=None)


def test_a_node_makes_environments_one_after_the_other():
    agent = types.SimpleNamespace(spec=types.SimpleNamespace(eval_only=("part",)))
    given = pickled(Given(make_slowly, agent, "stepped", "async"), "processes")  # type: ignore[arg-type]
    servers = make_servers(CYCLES, given, {}, 3)
    threads = [threading.Thread(target=server.make, args=(1, [0])) for server in servers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert Overlap.most == 1


@pytest.mark.slow
def test_a_place_that_a_stop_left_empty_is_filled_in_a_run_of_another_length():
    loop, _ = make_tiny_loop(CountingEnv, cluster=processes(2), on_env_failure="restart")
    with loop, warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*gets replaced by a new one", RuntimeWarning)
        loop.run(loop.new_state(0, STEPS), 4, STEPS)
        loop._envs[1].close()
        loop._session.inferencers[1].needs_reset = True
        second = loop.run(loop.new_state(1, STEPS + 1), 8, STEPS + 1)
    assert second.counters.env_restarts == 1 and second.counters.cycles == 8


def test_an_answer_that_cannot_be_sent_is_answered_with_the_reason():
    here, there = multiprocessing.Pipe()
    with here, there:
        inferencer_process._send(there, lambda: 0)
        answer = here.recv()
    assert isinstance(answer, Failure)
    # Python 3.13 says it in other words.
    assert re.search("pickle|get local object", str(cloudpickle.loads(answer.error)))


def test_a_request_that_cannot_be_read_ends_the_process(monkeypatch, capsys):
    def leave(code: int) -> None:
        raise SystemExit(code)

    def recv() -> None:
        raise ModuleNotFoundError("no module named there")

    monkeypatch.setattr(inferencer_process.os, "_exit", leave)
    with pytest.raises(SystemExit) as left:
        inferencer_process._listen(types.SimpleNamespace(recv=recv), print)  # type: ignore[arg-type]
    assert left.value.code == 1 and "no module named there" in capsys.readouterr().err


# Being replaced.


def running_with(places: RemotePlaces, inferencers: list[Any], replace: Any) -> RunningInferencers:
    """Return what collects trajectories of ``inferencers``, with no update loop around it."""
    counters = Counters()
    given = LoopOptions(faults=FaultOptions(on_env_failure="restart", max_env_restarts=4))
    running = RunningInferencers(
        given,
        inferencers,
        counters,
        PhaseTimer("restart"),
        None,  # type: ignore[arg-type]
        threading.Event(),
        replace,
        places,
    )
    running._stops = [Stop.new() for _ in inferencers]
    return running


def failed(places: RemotePlaces, error: EnvError) -> Inferencer:
    """Return an Inferencer elsewhere that ``error`` has ended in a cycle."""
    found = types.SimpleNamespace(
        index=0,
        env=places.make(3, [0]),
        failure=error,
        needs_reset=False,
        position_wanted=threading.Event(),
        left_position=None,
        env_thread=CallingThread(),
    )
    return found  # type: ignore[return-value]


def loses(times: int, new: Any) -> Callable[[Any], Any]:
    """Return a ``replace`` whose new node is lost so many times."""
    left = [times]

    def replace(old: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise LostNodeError("the new one ended")
        return new

    return replace


@pytest.mark.parametrize(("times", "goes_on"), [(3, True), (4, False)])
@pytest.mark.parametrize("schedule", ["async", "lockstep"])
def test_a_node_that_is_lost_at_its_start_is_replaced_again(times, goes_on, schedule, monkeypatch):
    places, error = RemotePlaces(FakeNode, 1, 1), LostNodeError("lost")
    new = object.__new__(Inferencer)
    new.index, new.position_wanted = 0, threading.Event()
    old = failed(places, error)
    running = running_with(places, [old], loses(times, new))
    running._replaces_beside = schedule == "async"
    started: list[Any] = []
    monkeypatch.setattr(running, "_start", started.append)

    def mend() -> None:
        with pytest.warns(RuntimeWarning, match="restart 1 of 4"):
            assert running._mend(error)
        while running._replacements:
            running._start_replaced()

    if goes_on:
        mend()
        assert started == [new] and running._inferencers == [new]
    else:
        with pytest.raises(LostNodeError, match="the new one ended") as raised:
            mend()
        assert "Inferencer 0 was to get new environments" in raised.value.__notes__[-1]
    assert running._counters.env_restarts == 4 and running._counters.dropped_env_cycles == 1


def test_a_failure_while_ending_leaves_the_place_empty_and_waits_for_no_node():
    places, error = RemotePlaces(FakeNode, 1, 1), LostNodeError("lost")
    old = failed(places, error)
    running = running_with(places, [old], lambda old: pytest.fail("it was replaced"))
    running.queue.fail(error)
    places.nodes[0].kill()
    with pytest.warns(RuntimeWarning):
        running.raise_failures()
    assert running._inferencers == [old] and not running._replacements
    with pytest.raises(EnvError, match="were closed"):
        old.env.worker.ask("run")  # type: ignore[attr-defined]


def test_a_node_that_hangs_is_lost_before_it_is_replaced(monkeypatch):
    places, error = RemotePlaces(FakeNode, 2, 1), EnvHangError("silent")
    old = failed(places, error)
    running = running_with(places, [old], None)
    monkeypatch.setattr(running, "_put_in_place_of", lambda *_: None)
    monkeypatch.setattr(running, "_start", lambda _: None)
    running._replaces_beside = False
    with pytest.warns(RuntimeWarning, match="restart 1 of 4"):
        assert running._mend(error)
    assert places.num_living == 1 and places.nodes[0].is_lost


def test_a_checkpoint_does_not_wait_for_who_is_being_replaced():
    places, error = RemotePlaces(FakeNode, 2, 1), EnvError("lost")
    old, new = failed(places, error), object.__new__(Inferencer)
    old.cycle, new.index = 7, 0
    new.position_wanted, new.left_position = threading.Event(), None
    go_on = threading.Event()
    replacements = Replacements(lambda old: go_on.wait(300) and new)  # type: ignore[arg-type]
    replacements.begin(old, error)
    old.position_wanted.set()
    assert replacements.take() == [] and len(replacements) == 1
    assert old.left_position == (7, None, BEING_REPLACED)
    old.left_position = None
    old.position_wanted.set()
    go_on.set()
    replacements.threads[0].join(300)
    (arrival,) = replacements.take()
    assert arrival.new is new and not replacements
    assert new.left_position is old.left_position is not None
    assert not new.position_wanted.is_set()


# Whole runs.


@pytest.mark.slow
def test_lockstep_of_two_in_a_process_is_the_same_and_a_version_is_sent_once():
    results = []
    for cluster in (ClusterOptions(), processes(2)):
        options = {"schedule": "lockstep", "num_inferencers_per_device": 2, "cluster": cluster}
        loop, _ = make_tiny_loop("CartPole-v1", cycle="stepped", **options)
        with loop:
            results.append(loop.run(loop.new_state(0, STEPS), 8, STEPS))
            if cluster.address == "processes":
                (node,) = loop._parts.inferencers.nodes
                # Of four rounds all have networks of their own.
                assert node.traffic.versions == 4 and node.traffic.items >= 8
                assert loop._envs[1].worker.ask("received") == 4
                assert node.traffic.bytes_in > 0
                assert loop.describe_nodes()[0].startswith(f"{node.name}: 2 between phases; ")
                assert results[0].metrics.keys() < results[1].metrics.keys()
                assert results[1].metrics["nodes"] == 1 and results[1].metrics["relay_ms"] > 0
                assert loop._envs[0].worker.node is loop._envs[1].worker.node is node
    here, there = results
    assert leaves_equal(here.state.networks, there.state.networks)
    assert here.counters == there.counters


# Options.


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"inferencers_per_node": 2}, "cannot be combined with cluster.address=threads"),
        ({"address": "processes", "inferencers_per_node": 0}, "at least 1"),
    ],
)
def test_options_of_nodes_keep_their_rules(given, said):
    with pytest.raises(UsageError, match=said):
        ClusterOptions(**given)


# All messages of the design.


class HereNode(Node):
    """Servers in this process, which are asked without a socket."""

    name = where = "here"

    def __init__(self, given: bytes, room: int, server: str = CYCLES) -> None:
        super().__init__(room)
        self.servers = make_servers(server, given, {}, room)

    def worker(self, slot: int) -> Worker:
        return HereWorker(self, slot)

    def send(self, version: Version, networks: Any, device: Any) -> int:
        if version.is_new:
            leaves = jax.device_get(jax.tree.leaves(networks))
            self.servers[0].shared.put(version.number, lambda: leaves, version.keep)
        return version.number

    def kill(self) -> None: ...

    def end(self) -> None: ...


class HereWorker(FakeWorker):
    node: HereNode

    def send(self, name: str, *arguments: Any) -> None:
        self._answer = self.node.servers[self._slot].answer(name, arguments)

    def receive(self) -> Any:
        return self._answer


def expected_weight(layout: Any, before: Any, draw: Any, priority: np.ndarray) -> np.ndarray:
    """Return what priorities after an update have to be, one start after the other."""
    weight = np.array(before.weight)
    given: dict[tuple[int, int, int], np.ndarray] = {}
    for i, p in enumerate(np.asarray(priority)):
        row, of = int(draw.row[i]), int(draw.inferencer[i])
        start = row // layout.rows_between_starts(before.steps_per_cycle)
        index = of, start, int(draw.env[i])
        is_there = before.cycle[of, row // before.steps_per_cycle] == draw.cycle[i]
        if is_there and before.weight[index] > 0:
            new = np.maximum(p, np.float32(MIN_PRIORITY)) ** np.float32(layout.priority_exponent)
            given[index] = max(given.get(index, np.float32(0)), new)
    for index, new in given.items():
        weight[index] = new
    return weight


@pytest.fixture
def nodes_here(monkeypatch) -> list[HereNode]:
    """Let loops with processes have nodes in this one; they come into the list."""
    nodes: list[HereNode] = []

    def new(given: bytes, room: int, server: str = CYCLES, of: str = "") -> HereNode:
        node = HereNode(given, room, server)
        if server == CYCLES:
            nodes.append(node)
        return node

    monkeypatch.setattr(parts_module, "ProcessNode", new)
    return nodes


@pytest.mark.slow
def test_a_stop_of_an_earlier_cycle_does_not_stop_those_of_who_gets_the_place(nodes_here):
    loop, _ = make_tiny_loop(CountingEnv, schedule="lockstep", cluster=processes(2))
    with loop:
        first = loop.run(loop.new_state(0, STEPS), 4, STEPS)
        (node,) = nodes_here
        node.servers[1].stop(next(node.cycle_numbers))
        inferencers = loop._session.inferencers
        inferencers[1] = loop._maker.replace(inferencers[1])
        assert inferencers[1].env.worker._slot == 1  # type: ignore[attr-defined]
        assert loop.run(first.state, 4, STEPS).counters.cycles == 8


@pytest.mark.slow
def test_one_run_has_all_messages_and_priorities_are_those_of_numpy(monkeypatch, nodes_here):
    trace: list[str] = []

    def note(kind: type, method: str, message: str) -> None:
        original = getattr(kind, method)

        def noted(self: Any, *arguments: Any, **keywords: Any) -> Any:
            trace.append(message)
            return original(self, *arguments, **keywords)

        monkeypatch.setattr(kind, method, noted)

    note(Server, "run", "1 a cycle is run there")
    note(TrajectoryQueue, "put", "2 its trajectory comes")
    note(TrajectoryManager, "insert", "3 a manager gets it")
    note(TrajectoryManager, "sample", "3 a batch is asked for")
    note(ManagedUpdater, "consume", "4 the update learns from it")
    note(Staging, "publish", "6 networks are published")
    note(HereNode, "send", "7 an Inferencer asks for them")
    note(Shared, "put", "8 its process gets them")
    set_priority, stale = TrajectoryManager.update_priority, []

    def checked(self: Any, draw: Any, priority: Any) -> None:
        trace.append("5 priorities go back")
        before = self.state()
        expected = expected_weight(self._layout, before, draw, priority)
        set_priority(self, draw, priority)
        np.testing.assert_allclose(self.state().weight, expected, rtol=1e-6)
        stale.append(not np.array_equal(expected, before.weight))

    monkeypatch.setattr(TrajectoryManager, "update_priority", checked)
    cluster = processes(2, trajectory_managers=1)
    options = {"num_inferencers_per_device": 2, "schedule": "async"}
    with test_managers.new_loop("dqn", cluster, **options) as loop:
        result = loop.run(loop.new_state(7, test_managers.STEPS), 16, test_managers.STEPS)
    counts = collections.Counter(trace)
    assert len(counts) == 9
    assert counts["3 a manager gets it"] == result.counters.cycles == 16
    assert counts["5 priorities go back"] == counts["3 a batch is asked for"]
    assert counts["5 priorities go back"] == result.counters.updates > 0 and any(stale)
    # Two Inferencers of one process ask, and a version goes there once.
    (node,) = nodes_here
    assert node.traffic.versions == node.servers[0].shared.received
    assert node.traffic.versions <= counts["6 networks are published"] + 1
    assert counts["7 an Inferencer asks for them"] >= node.traffic.versions
