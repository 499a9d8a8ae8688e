"""Replays in trajectory managers: the same draws, the same priorities, the same checkpoints."""

from __future__ import annotations

import dataclasses
import subprocess

import jax
import numpy as np
import pytest

import sebulba
from benchmarks.studies.lockstep_hashes import CASES, REPLAY, SMALL
from sebulba.agents.configs import DQNConfig, PPOConfig
from sebulba.agents.dqn import DQN
from sebulba.agents.ppo import PPO
from sebulba.cluster.inferencers.nodes import Worker
from sebulba.cluster.replay.sharded_replay import ManagerHere, joined, parted
from sebulba.errors import ReplayError, UsageError
from sebulba.options import ClusterOptions
from tests.support.as_users import ran_as_users_compile
from tests.support.loop_helpers import leaves_equal
from tests.support.tiny import CountingEnv

pytestmark = pytest.mark.timeout(1200)

STEPS, CYCLES = 6, 16
HERE = ClusterOptions(trajectory_managers=1)
ONE = {"num_inferencers_per_device": 1}


def new_loop(name, cluster, config=None, devices=1, **options):
    env, agent_class, given = CASES[name]
    agent = agent_class(sebulba.env_spec(env), config or given)
    options = {"seed": 3, "schedule": "lockstep", "cycle": "stepped", **options}
    options["update_devices"] = range(devices)
    return sebulba.GymnasiumLoop(env, agent, 8, inference_devices=[0], cluster=cluster, **options)


def trained(name, cluster, cycles=CYCLES, **options):
    """Return the result of a run, and its replay on the host."""
    with new_loop(name, cluster, **options) as loop:
        result = loop.run(loop.new_state(7, STEPS), cycles, STEPS)
        return result, jax.device_get(loop._parts.updater.experience())


def uniform(name):
    config = CASES[name][2]
    return dataclasses.replace(config, replay=dataclasses.replace(config.replay, prioritized=False))


def normalized(name):
    return dataclasses.replace(CASES[name][2], normalize_observations=True)


def played_at_random(name):
    """Return a configuration whose actions do not depend on how networks were rounded."""
    return dataclasses.replace(normalized(name), initial_epsilon=1.0, final_epsilon=1.0)


def check_same(one, other):
    (result, replay), (other_result, other_replay) = one, other
    assert result.counters.updates > 0
    assert leaves_equal(replay, other_replay)
    assert leaves_equal(result.state.networks, other_result.state.networks)
    assert leaves_equal(result.state.opt, other_result.state.opt)
    assert result.counters == other_result.counters


@pytest.mark.slow
@pytest.mark.parametrize(("name", "config"), [("dqn", None), ("r2d2", uniform("r2d2"))])
def test_one_manager_is_the_same_as_the_update_device_bit_for_bit(name, config, request):
    # XLA makes two programs of one here, which are the same to the bit as users compile them.
    if ran_as_users_compile(request):
        return
    on_device = trained(name, ClusterOptions(), config=config, **ONE)
    check_same(on_device, trained(name, HERE, config=config, **ONE))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "config"), [("sac", None), ("ddpg", None), ("dqn", played_at_random("dqn"))]
)
def test_what_xla_rounds_otherwise_in_one_program_stays_as_close_as_that(name, config):
    (one, replay), (other, other_replay) = (
        trained(name, cluster, config=config, **ONE) for cluster in (ClusterOptions(), HERE)
    )
    assert one.counters == other.counters and one.counters.updates > 0
    # Rows that were acted by the initial networks are the same to the bit. Later rows of SAC and
    # DDPG have actions of networks which are only close, and what follows from these actions.
    first = jax.tree.map(lambda leaf: leaf[:, : REPLAY.warm_up_cycles * STEPS], replay.rows)
    other_first = jax.tree.map(
        lambda leaf, like: leaf[:, : like.shape[1]], other_replay.rows, first
    )
    assert leaves_equal(first, other_first)
    rounded = {"rows": 0, "weight": 0, "statistics": 0, "max_priority": 0}
    assert leaves_equal(replay._replace(**rounded), other_replay._replace(**rounded))
    close = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5)  # noqa: E731
    acted = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-2, atol=1e-3)  # noqa: E731
    jax.tree.map(acted, replay.rows, other_replay.rows)
    for field in ("weight", "statistics", "max_priority"):
        jax.tree.map(close, getattr(replay, field), getattr(other_replay, field))
    jax.tree.map(close, one.state.networks, other.state.networks)


@pytest.mark.slow
def test_managers_in_processes_are_the_same_as_here_over_two_update_devices():
    here, there = (
        trained("dqn", ClusterOptions(address=address, trajectory_managers=2), devices=2)
        for address in ("threads", "processes")
    )
    check_same(here, there)


@pytest.mark.slow
def test_a_replay_of_two_managers_goes_on_in_one_and_on_the_device(tmp_path):
    kept = []
    for number in (2, 1, 0):
        cluster = ClusterOptions(trajectory_managers=number)
        with (
            sebulba.Checkpointer(tmp_path) as saver,
            new_loop("dqn", cluster, normalized("dqn"), checkpointer=saver) as loop,
        ):
            if kept:
                state = loop.restore(saver.load_newest())
                updater = loop._parts.updater
                found = updater.experience() if number else state.experience
                assert leaves_equal(kept[-1], jax.device_get(found))
                # Inferencers act with these before the first update.
                assert leaves_equal(state.experience.statistics, kept[-1].statistics)
            else:
                state = loop.new_state(7, STEPS)
            loop.run(state, 6, STEPS)
            kept.append(jax.device_get(loop._parts.updater.experience()))
    assert all(len(replay.trajectories) == 2 for replay in kept)
    counts = [float(replay.statistics[0].num_samples) for replay in kept]
    assert counts == pytest.approx([6 * STEPS * 8 * n for n in (1, 2, 3)], rel=1e-5)


@pytest.mark.slow
def test_what_managers_are_asked_in_a_run(monkeypatch):
    asked = []
    begin = ManagerHere.begin

    def noted(self, name, *arguments):
        asked.append((name, arguments[-1] if name == "sample" else None))
        begin(self, name, *arguments)

    monkeypatch.setattr(ManagerHere, "begin", noted)
    result, _ = trained("dqn", HERE, cycles=8, **ONE)
    names = [name for name, _ in asked]
    assert names[0] == "make" and "begin" in names
    assert names.count("insert") == result.counters.cycles == 8
    samples = [number for name, number in asked if name == "sample"]
    assert samples == list(range(result.counters.updates))
    for at, name in enumerate(names):
        # Priorities go back after every update, before anything else is asked.
        assert name != "sample" or names[at + 1] == "update_priority"


@pytest.mark.slow
def test_every_message_of_a_run_is_in_one_trace_each_after_the_one_it_needs(monkeypatch):
    """Networks to a node, trajectories back, on to a manager, batches from it, priorities to it."""
    trace = []

    def sent(worker, name, *arguments):
        trace.append(("to", worker, name, arguments))
        begin(worker, name, *arguments)

    def received(worker, *arguments):
        answered = answer(worker, *arguments)
        trace.append(("from", worker, requests_of(worker)[-1], answered))
        return answered

    def requests_of(worker):
        return [name for way, one, name, _ in trace if one is worker and way == "to"]

    begin, answer = Worker.begin, Worker.answer
    monkeypatch.setattr(Worker, "begin", sent)
    monkeypatch.setattr(Worker, "answer", received)
    cluster = ClusterOptions(address="processes", inferencers_per_node=2, trajectory_managers=1)
    with new_loop("dqn", cluster, num_inferencers_per_device=2) as loop:
        result = loop.run(loop.new_state(7, STEPS), 8, STEPS)
        (node,) = loop._parts.inferencers.nodes
        taken = loop._envs[0].worker.ask("received")
    assert result.counters.updates > 0

    # Networks: one message a version and node, which both Inferencers there take (6, 7, 8).
    runs = [(w, a[1]) for way, w, name, a in trace if way == "to" and name == "run"]
    versions = [version for _, version in runs if version is not None]
    assert node.traffic.versions == taken == len(set(map(version_number, versions)))
    assert len(versions) == 2 * taken, "named to each of the two"
    # Trajectories: an answer for each request, then an insertion (1, 2, 3).
    steps = [
        (way, name)
        for way, _, name, _ in trace
        if name in ("run", "insert", "sample", "update_priority")
    ]
    num = {step: steps.count(step) for step in set(steps)}
    cycles, updates = result.counters.cycles, result.counters.updates
    assert num["to", "insert"] == cycles == 8
    assert 0 <= num["to", "run"] - cycles <= 2, "begun and not needed, one an Inferencer at most"
    assert num["to", "sample"] == num["from", "sample"] == num["to", "update_priority"] == updates
    for at, (way, name) in enumerate(steps):
        before = steps[:at]
        if (way, name) == ("to", "insert"):
            assert before.count(("to", "insert")) < before.count(("from", "run"))
    # Batches, and the priorities of just these rows (4, 5).
    batches = [a for way, _, name, a in trace if (way, name) == ("from", "sample")]
    given = [a for way, _, name, a in trace if (way, name) == ("to", "update_priority")]
    for drawn, (draw, priority) in zip(batches, given, strict=True):
        assert leaves_equal(drawn.draw, draw)
        assert priority.shape == drawn.priority.shape and (priority > 0).all()


def version_number(version):
    """Return the number in what names networks to a process."""
    return version[0] if isinstance(version, tuple) else version


@pytest.mark.slow
def test_parts_join_to_the_whole():
    _, replay = trained("dqn", ClusterOptions(), cycles=4)
    assert leaves_equal(joined(parted(replay, 2)), replay)


@pytest.mark.slow
def test_a_killed_manager_ends_the_run_with_its_process_and_the_way_on(monkeypatch):
    started = []
    start = subprocess.Popen.__init__

    def noted(process, *arguments, **options):
        start(process, *arguments, **options)
        started.append(process)

    def kill(*_):
        started[-1].kill()  # managers start after the Inferencers

    monkeypatch.setattr(subprocess.Popen, "__init__", noted)
    cluster = ClusterOptions(address="processes", trajectory_managers=1)
    with (
        new_loop("dqn", cluster, observe_cycle=kill) as loop,
        pytest.raises(ReplayError, match=r"process \d+ of a trajectory manager .*SIGKILL.*resume"),
    ):
        loop.run(loop.new_state(7, STEPS), 40, STEPS)


@pytest.mark.parametrize(
    ("agent_class", "config", "number", "said"),
    [
        (PPO, PPOConfig(torso=SMALL), 1, "PPO has none that they know; use 0, or DQN"),
        (DQN, DQNConfig(torso=SMALL, replay=REPLAY), 3, "num_inferencers"),
        (
            DQN,
            DQNConfig(torso=SMALL, replay=dataclasses.replace(REPLAY, batch_size=15)),
            2,
            "replay.batch_size",
        ),
    ],
)
def test_replays_that_cannot_be_in_managers_are_refused(agent_class, config, number, said):
    agent = agent_class(sebulba.env_spec(CountingEnv), config)
    with pytest.raises(UsageError, match=said):
        sebulba.GymnasiumLoop(
            CountingEnv,
            agent,
            8,
            update_devices=[0],
            cluster=ClusterOptions(trajectory_managers=number),
        )


def test_a_negative_number_is_refused():
    with pytest.raises(UsageError, match="trajectory_managers"):
        ClusterOptions(trajectory_managers=-1)
