"""Inferencers in actors of Ray: the same bits, the same faults, on one node and on two."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
import warnings
from unittest import mock

import numpy as np
import pytest

from sebulba.cluster.inferencers.ray_actors import ActorNode, NetworkStore
from sebulba.errors import EnvError, UsageError
from sebulba.options import ClusterOptions, FaultOptions, LoopOptions
from tests.cluster import test_managers
from tests.support.loop_helpers import leaves_equal, make_tiny_loop
from tests.support.remote import STEPS, Fails, check_failure_is_replaced, trained
from tests.support.tiny import CountingEnv

ray = pytest.importorskip("ray")

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray.*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # of sockets that Ray leaves to Python
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
LOCAL = ClusterOptions(address="local")


def processes_of_ray() -> set[int]:
    """Return the processes of Ray that descend from this one."""
    found = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True)
    rows = [line.split(None, 2) for line in found.stdout.splitlines()]
    children: dict[int, list[int]] = {}
    for pid, parent, _ in rows:
        children.setdefault(int(parent), []).append(int(pid))
    mine, todo = set(), [os.getpid()]
    while todo:
        new = children.get(todo.pop(), [])
        mine.update(new)
        todo.extend(new)
    return {int(pid) for pid, _, args in rows if int(pid) in mine and "ray" in args}


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = signal.getsignal(signal.SIGTERM)
    yield
    assert signal.getsignal(signal.SIGTERM) is before
    deadline = time.monotonic() + 300
    while processes_of_ray() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not processes_of_ray()


@pytest.mark.parametrize("per_node", [1, 2])
def test_lockstep_is_the_same_bit_for_bit_and_a_version_is_sent_once(per_node):
    cluster = ClusterOptions(address="local", inferencers_per_node=per_node)
    loop, _ = make_tiny_loop("CartPole-v1", schedule="lockstep", cluster=cluster)
    with loop:
        there = loop.run(loop.new_state(0, STEPS), 6, STEPS)
        assert "in actors on" in loop.describe()
        # Of three rounds of two Inferencers each, all with networks of their own.
        assert loop._parts.inferencers._store.transfers == 3
        for node in loop._parts.inferencers.nodes:
            assert node.traffic.versions == 3
        assert len(loop._parts.inferencers.nodes) == 2 // per_node
        # Each actor has fetched them once, for all of its Inferencers.
        assert loop._envs[1].worker.ask("received") == 3
    here = trained("CartPole-v1", ClusterOptions())
    assert leaves_equal(here.state.networks, there.state.networks)
    assert here.counters == there.counters


@pytest.mark.parametrize("how", ["raise", "kill", "hang"])
def test_a_failed_actor_is_replaced(how, tmp_path):
    check_failure_is_replaced(LOCAL, how, tmp_path)


def test_a_killed_actor_ends_the_run_with_its_machine_and_process():
    env = functools.partial(Fails, "kill", 23)
    loop, _ = make_tiny_loop(env, cluster=LOCAL, num_inferencers_per_device=1)
    with loop, pytest.raises(EnvError, match=r"actor on \S+ \(process \d+\) ended"):
        loop.run(loop.new_state(0, STEPS), 40, STEPS)


def test_a_replay_in_an_actor_is_the_same_bit_for_bit():
    here, there = (
        test_managers.trained("dqn", ClusterOptions(address=address, trajectory_managers=2))
        for address in ("threads", "local")
    )
    test_managers.check_same(here, there)


def test_where_no_cluster_is_the_error_says_how_to_start_one():
    cluster = ClusterOptions(address="127.0.0.1:1")
    with pytest.raises(UsageError, match="ray start --head"):
        make_tiny_loop(CountingEnv, cluster=cluster)


def test_a_place_is_free_again_though_its_actor_was_never_placed():
    actor = mock.MagicMock()  # Ray has not found a machine for it, so that it answers nothing
    module = mock.MagicMock(wait=mock.Mock(side_effect=AssertionError("nothing was asked")))
    module.remote.return_value.return_value.remote.return_value = actor
    node = ActorNode(module, NetworkStore(module), b"", 2, None)
    first, second = node.take(), node.take()
    assert first is not None and second is not None and node.take() is None
    first.close()
    assert node.take() is not None


@pytest.fixture
def two_nodes(monkeypatch):
    """A cluster of a head with room for two Inferencers and a node with room for one."""
    from ray.cluster_utils import Cluster

    # All processes have to have the same mode; a test before may have chosen another for this one.
    monkeypatch.setenv("RAY_AUTH_MODE", os.environ.get("RAY_AUTH_MODE", "disabled"))

    before = signal.getsignal(signal.SIGTERM)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 2, "include_dashboard": False},
        )
        cluster.add_node(num_cpus=1)
    signal.signal(signal.SIGTERM, before)
    yield cluster
    cluster.shutdown()


def test_inferencers_are_spread_over_nodes_and_outlive_one(two_nodes):
    address = ClusterOptions(address=two_nodes.address, nodes=2)
    removed: list[object] = []
    newest = {0: 0, 1: 0}

    def observe(trajectory, step_infos):
        who, cycle = int(trajectory.inferencer), int(trajectory.cycle)
        # Of both: one that is lost before its first cycle has begun leaves no gap in its cycles.
        if not removed and min(newest.values()) >= 2:
            removed.extend(two_nodes.worker_nodes)
            two_nodes.remove_node(removed[0])
        if cycle > newest[who] + 1:  # the one that was lost has come back
            loop.stop()
        newest[who] = cycle

    loop, _ = make_tiny_loop(
        CountingEnv, cluster=address, on_env_failure="restart", observe_cycle=observe
    )
    with loop, warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*gets replaced by a new one", RuntimeWarning)
        assert len({loop._envs[index].worker.node.machine_id for index in range(2)}) == 2
        result = loop.run(loop.new_state(0, STEPS), 10**6, STEPS)
        assert len({loop._envs[index].worker.node.machine_id for index in range(2)}) == 1
    assert result.counters.env_restarts == 1 and result.stopped


def test_a_machine_that_comes_gets_the_inferencer_of_one_that_went(two_nodes):
    """There is no room for it on the head, whose two Inferencers go on meanwhile."""
    address = ClusterOptions(address=two_nodes.address, nodes=2)
    removed: list[object] = []
    seen = {index: 0 for index in range(3)}
    went_on = lost = 0

    def observe(trajectory, step_infos):
        nonlocal went_on, lost
        who, cycle = int(trajectory.inferencer), int(trajectory.cycle)
        gap, seen[who] = cycle > seen[who] + 1, cycle
        if not removed and min(seen.values()) >= 2:
            removed.extend(two_nodes.worker_nodes)
            two_nodes.remove_node(removed[0])
        elif removed and not lost:
            went_on += 1
            if went_on == 200:
                before = signal.getsignal(signal.SIGTERM)
                two_nodes.add_node(num_cpus=1)
                signal.signal(signal.SIGTERM, before)
            if gap:
                lost = went_on
                loop.stop()

    options = LoopOptions(cluster=address, faults=FaultOptions(on_env_failure="restart"))
    loop, _ = make_tiny_loop(
        CountingEnv, options=options, num_inferencers_per_device=3, observe_cycle=observe
    )
    with loop, warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*gets replaced by a new one", RuntimeWarning)
        first = {loop._envs[index].worker.node.machine_id for index in range(3)}
        result = loop.run(loop.new_state(0, STEPS), 10**6, STEPS)
        last = {loop._envs[index].worker.node.machine_id for index in range(3)}
    assert len(first) == len(last) == 2 and len(first | last) == 3
    assert lost > 200, "there was no room for it before"
    assert result.stopped and result.counters.env_restarts >= 1


def test_what_an_actor_answered_outlives_it_and_what_it_put_does_not(two_nodes):
    """Why trajectories are answers, and no actor puts any: Ray loses what a lost process owns."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    before = signal.getsignal(signal.SIGTERM)
    ray.init(address=two_nodes.address, log_to_driver=False)
    signal.signal(signal.SIGTERM, before)

    @ray.remote
    class Producer:
        def answer(self):
            return np.ones(10**6)  # which is in the object store, by its size

        def put(self):
            return [ray.put(np.ones(10**6))]

        def pid(self):
            return os.getpid()

    try:
        (other,) = two_nodes.worker_nodes
        elsewhere = NodeAffinitySchedulingStrategy(other.node_id, soft=False)
        producer = Producer.options(scheduling_strategy=elsewhere).remote()
        answered, put = producer.answer.remote(), ray.get(producer.put.remote())[0]
        ray.wait([answered, put], num_returns=2, fetch_local=False)
        os.kill(ray.get(producer.pid.remote()), signal.SIGKILL)
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(producer.pid.remote())
        assert ray.get(answered).sum() == 10**6
        with pytest.raises(ray.exceptions.ObjectLostError):
            ray.get(put, timeout=300)
    finally:
        ray.shutdown()


def test_a_head_that_goes_ends_the_run_which_is_saved(two_nodes, tmp_path, monkeypatch):
    # Ray itself ends the process, after a minute if nothing else is said.
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "5")
    said, run = tmp_path / "said", tmp_path / "run"
    command = [sys.executable, "-m", "sebulba", "train", "cartpole-ppo", "--run-dir", str(run)]
    options = ["--cluster.address", two_nodes.address, "--checkpoint.every-updates", "500"]
    with said.open("w") as file:
        train = subprocess.Popen(
            [*command, *options, "--total-env-steps", "100000000"], stdout=file, stderr=file
        )
    try:
        deadline = time.monotonic() + 300
        while not [*run.glob("checkpoints/[0-9]*")] and time.monotonic() < deadline:
            assert train.poll() is None, said.read_text()
            time.sleep(0.2)
        assert [*run.glob("checkpoints/[0-9]*")], said.read_text()
        two_nodes.head_node.kill_gcs_server()
        assert train.wait(300) == 1
    finally:
        train.kill()
        train.wait()
    assert not (run / "ended.txt").exists()
