"""Members that learn on devices of their own."""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from sebulba_league import LeagueConfig
from sebulba_league.parallel import Learners, ParallelUpdater, _members_of

import sebulba
from sebulba import UsageError
from sebulba.agents.configs import (
    DQNConfig,
    ImpalaConfig,
    MultiAgentConfig,
    PPOConfig,
    RandomNetworkDistillationConfig,
    ReplayConfig,
    TargetConfig,
    TorsoConfig,
    make_agent,
)
from sebulba.agents.ppo import PPO as PPOAgent
from sebulba.checkpoints.checkpointer import Checkpointer
from sebulba.loops.devices import place
from sebulba.options import DistributedOptions, LoopOptions
from sebulba.support.trees import host_copy
from tests.support.as_users import ran_as_users_compile
from tests.support.loop_helpers import leaves_equal
from tests.support.populations import Pairs, Turns

SMALL = TorsoConfig(hidden_sizes=(16,))
PPO = PPOConfig(torso=SMALL, epochs=2, minibatches=2, learning_rate=1e-2)
DQN = DQNConfig(
    torso=SMALL,
    learning_rate=1e-2,
    exploration_env_steps=2000,
    replay=ReplayConfig(4000, 32, warm_up_cycles=2, cycles_per_update=2),
    target=TargetConfig(period=20),
)
IMPALA = ImpalaConfig(torso=SMALL, learning_rate=3e-3)
ALIKE = MultiAgentConfig({"red": PPO, "blue": dataclasses.replace(PPO, learning_rate=3e-3)})
PACED = MultiAgentConfig({"red": PPO, "blue": DQN})
TWO: Any = {
    "inference_devices": [0],
    "num_inferencers_per_device": 2,
    "schedule": "lockstep",
    "metrics_interval_s": 1e6,
}
APART = ["red=0", "blue=1"]


def loop_of(env: Any, config: Any, devices: Any, **options: Any) -> Any:
    agent = make_agent(sebulba.env_spec(env), config)
    return sebulba.GymnasiumLoop(env, agent, 4, update_devices=devices, **(TWO | options))


def trained(env: Any, config: Any, devices: Any, cycles: int = 8, **options: Any) -> Any:
    with loop_of(env, config, devices, **options) as loop:
        return loop.run(loop.new_state(0, 10), cycles, 10)


SEATS = MultiAgentConfig({"*/*": IMPALA}, frozen={})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "config", "devices"),
    [
        (Pairs, ALIKE, ["red=0", "blue=1"]),
        (Pairs, PACED, ["blue=2", "red=1"]),
        (Turns, SEATS, ["seat/seat_0=3", "seat/seat_1=0"]),
    ],
)
def test_in_lockstep_devices_of_their_own_change_no_bit(env, config, devices, request):
    """XLA rounds alike in the programs of some members and of all, where it optimises."""
    if ran_as_users_compile(request):
        return
    together, apart = (trained(env, config, where) for where in ([0], devices))
    assert leaves_equal(host_copy(together.state), host_copy(apart.state))
    assert leaves_equal(together.acting_networks, apart.acting_networks)
    assert together.counters == apart.counters
    names = {n for n in together.metrics if n.split("/")[0] in ("loss", "red", "blue", "seat")}
    assert len(names) > 10 and names <= apart.metrics.keys()
    own_pace = {"loss", "red/due", "blue/due"} if config is PACED else set()
    for name in names - own_pace:
        assert apart.metrics[name] == pytest.approx(together.metrics[name], rel=1e-4, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"), [(APART, ["blue=0", "red=3"]), (APART, ["red=0,1", "blue=2"])]
)
def test_a_run_is_resumed_with_other_devices(first, then, tmp_path):
    never = trained(Pairs, PACED, first)
    with Checkpointer(tmp_path) as saver, loop_of(Pairs, PACED, first, checkpointer=saver) as loop:
        loop.run(loop.new_state(0, 10), 4, 10)
    with Checkpointer(tmp_path) as saver, loop_of(Pairs, PACED, then) as loop:
        resumed = loop.run(loop.restore(saver.load_newest()), 4, 10)
        assert not loop.resume_notes
    assert resumed.counters == never.counters
    if "red=0,1" not in then:  # where rows are drawn for each device
        assert leaves_equal(host_copy(resumed.state), host_copy(never.state))


@pytest.mark.slow
def test_a_slow_set_holds_nobody_back():
    """In async blue's updates after its first trajectory wait until red has had all of its own."""
    go, seen, published_before_blue = threading.Event(), [], set()

    def waits(number: Any) -> None:
        seen.append(int(number))
        if len(seen) <= 4:
            time.sleep(0.1)
            published_before_blue.update(versions)
        else:
            assert go.wait(60)

    class Waits(PPOAgent):
        def optimize(self, networks: Any, opt: Any, grads: Any) -> Any:
            jax.debug.callback(waits, jnp.int32(0), ordered=False)
            return super().optimize(networks, opt, grads)

    versions = []

    def record(trajectory: Any, infos: Any) -> None:
        versions.append(int(trajectory.policy_version))
        if len(versions) == 12:
            go.set()

    agent = make_agent(sebulba.env_spec(Pairs), ALIKE)
    slow = agent.members["blue"]
    agent.members["blue"] = slow._replace(agent=Waits(slow.agent.spec, slow.agent.config))
    options = TWO | {"schedule": "async", "observe_cycle": record}
    with sebulba.GymnasiumLoop(Pairs, agent, 4, update_devices=APART, **options) as loop:
        result = loop.run(loop.new_state(0, 10), 16, 10)
    assert len(published_before_blue) <= 1, "a set learns once before others go on without it"
    assert max(versions) > 6  # published while blue had not learned from its second trajectory
    assert result.metrics["blue/missed"] >= 8 and result.metrics["red/missed"] == 0
    own = result.state.opt
    assert int(own["red"][1][0].count) == 16 * 4 and 4 < int(own["blue"][1][0].count) <= 8 * 4
    assert len(seen) > 4


@pytest.mark.slow
def test_what_members_learned_in_async_goes_on_in_async(tmp_path):
    options = {"schedule": "async"}
    with (
        Checkpointer(tmp_path) as saver,
        loop_of(Pairs, PACED, APART, checkpointer=saver, **options) as loop,
    ):
        before = loop.run(loop.new_state(0, 10), 9, 10)
    with Checkpointer(tmp_path) as saver, loop_of(Pairs, PACED, [0], **options) as loop:
        state = loop.restore(saver.load_newest())
        for part in ("networks", "opt", "experience"):
            assert leaves_equal(getattr(state, part), getattr(before.state, part))
        after = loop.run(state, 6, 10)
    assert after.counters.cycles == 15
    assert int(after.state.opt.updates["red"]) > int(before.state.opt.updates["red"])


def test_a_sum_over_members_has_what_a_busy_one_said_last():
    sets: Any = [
        SimpleNamespace(name="red", missed=0, newest_metrics={"loss": 1.0, "grad_norm": 3.0}),
        SimpleNamespace(name="blue", missed=2, newest_metrics={"loss": 0.5, "grad_norm": 4.0}),
    ]
    sets[0].take_metrics = lambda: sets[0].newest_metrics
    sets[1].take_metrics = dict
    agent = make_agent(sebulba.env_spec(Pairs), ALIKE)
    metrics = ParallelUpdater(agent, sets, waits_for_all=False).take_metrics()
    assert metrics == {"loss": 1.5, "grad_norm": 5.0, "red/missed": 0.0, "blue/missed": 2.0}


def test_what_fails_while_a_checkpoint_waits_ends_the_run(monkeypatch, tmp_path):
    learn, calls = Learners._learn, []

    def fails(self: Any, *arguments: Any) -> None:
        calls.extend([self.name] * (self.name == "blue"))
        if len(calls) == 2 and self.name == "blue":
            time.sleep(0.5)  # a checkpoint begins meanwhile
            raise ZeroDivisionError("of blue")
        learn(self, *arguments)

    monkeypatch.setattr(Learners, "_learn", fails)
    monkeypatch.setattr(Checkpointer, "is_due", lambda self, updates: len(calls) == 2)
    with (
        Checkpointer(tmp_path) as saver,
        loop_of(Pairs, ALIKE, APART, checkpointer=saver, schedule="async") as loop,
        pytest.raises(ZeroDivisionError, match="of blue"),
    ):
        loop.run(loop.new_state(0, 10), 12, 10)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["lockstep", "async"])
def test_what_fails_on_a_device_of_its_own_ends_the_run(schedule, tmp_path):
    class Fails(PPOAgent):
        def loss(self, *arguments: Any) -> Any:
            raise ZeroDivisionError("of blue")

    agent = make_agent(sebulba.env_spec(Pairs), ALIKE)
    slow = agent.members["blue"]
    options = TWO | {"schedule": schedule}
    with (
        Checkpointer(tmp_path, every_s=0.0) as saver,
        sebulba.GymnasiumLoop(
            Pairs, agent, 4, update_devices=APART, checkpointer=saver, **options
        ) as loop,
    ):
        state = loop.new_state(0, 10)
        agent.members["blue"] = slow._replace(agent=Fails(slow.agent.spec, slow.agent.config))
        loop.agent.members["blue"] = agent.members["blue"]
        with pytest.raises(ZeroDivisionError, match="of blue"):
            loop.run(state, 4, 10)


def test_a_group_stands_for_its_members_that_are_not_named():
    agent = make_agent(sebulba.env_spec(Turns), SEATS)
    assert list(agent.members) == ["seat/seat_0", "seat/seat_1"]
    both = {"seat": ["seat/seat_0", "seat/seat_1"]}
    assert _members_of(agent, ["seat"]) == both
    rest = {"seat": ["seat/seat_1"], "seat/seat_0": ["seat/seat_0"]}
    assert _members_of(agent, ["seat", "seat/seat_0"]) == rest


RND = RandomNetworkDistillationConfig(torso=SMALL, features=8)
CRITIC = dataclasses.replace(PPO, central_critic=True)


@pytest.mark.parametrize(
    ("config", "devices", "said"),
    [
        (ALIKE, ["red=0", "green=1"], "'green'.*use red, blue"),
        (ALIKE, ["red=0"], "no device to blue; add blue=DEVICE"),
        (ALIKE, ["red=0", "blue=0"], "names a device twice"),
        (ALIKE, ["red=0", "blue=9"], "device 9, but there are 8"),
        (ALIKE, ["red=0", "red=1"], "name each member once"),
        (ALIKE, ["red=0", "blue="], "name each member once"),
        (ALIKE, ["red=0", 1], "name each member once"),
        (ALIKE, ["red=0", "blue=x"], "names 'x'; use a number or a name"),
        (ALIKE, ["red=0,1,2", "blue=3"], "num_envs=4 must be divisible by 3, as each member spl"),
        (
            MultiAgentConfig({"red": CRITIC, "blue": PPO}),
            APART,
            "the central critic of 'red' sees what all members do; name devices alone",
        ),
        (MultiAgentConfig({"*": PPO}, auxiliary={"rnd": RND}), APART, "the auxiliary 'rnd'"),
    ],
)
def test_wrong_devices_are_refused_in_words(config, devices, said):
    with pytest.raises(UsageError, match=said):
        loop_of(Pairs, config, devices)


def test_a_single_agent_and_a_league_have_no_members():
    for env, config in (("CartPole-v1", PPO), ("pgx:tic_tac_toe", LeagueConfig({"*": PPO}))):
        with pytest.raises(UsageError, match="has no members that learn apart"):
            loop_of(env, config, ["player=0"])


def test_hosts_that_learn_together_are_refused():
    options = LoopOptions(distributed=DistributedOptions(coordinator="a:1", num_hosts=2, host=0))
    factory = sebulba.make_env_factory(Pairs)
    with pytest.raises(UsageError, match="one host; leave out distributed"):
        place(options, factory, make_agent(sebulba.env_spec(Pairs), ALIKE), 4, update=APART)


def test_without_the_package_the_remedy_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "sebulba_league.parallel", None)
    with pytest.raises(UsageError, match="pip install sebulba-league"):
        loop_of(Pairs, ALIKE, APART)
