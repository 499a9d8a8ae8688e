"""Applications on the nodes of ns-3: messages, connections, agents, queues."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from gymnasium.spaces import Box

import sebulba
from sebulba.agents.configs import SimplePolicyGradientConfig
from sebulba.agents.simple_policy_gradient import SimplePolicyGradient
from sebulba.commands import cli
from sebulba.configs.experiment import EnvConfig
from sebulba.errors import EnvError, UsageError
from sebulba.types import MultiAgentSpec
from tests.networks.test_ns3 import needs_ns3

PROGRAM = Path(__file__).parents[1] / "support/ns3_network.cc"
EXAMPLE = Path(__file__).parents[2] / "packages/sebulba-ns3/examples/remote_cart.cc"
pytestmark = needs_ns3


def played(env, num_steps: int, seed: int = 0) -> list[tuple]:
    """Return observations, rewards, ends and infos of a reset and of steps with action 1."""
    obs, info = env.reset(seed=seed)
    rows = [(obs.tolist(), 0.0, False, False, info)]
    for _ in range(num_steps):
        if rows[-1][2] or rows[-1][3]:
            break
        obs, *rest = env.step(1)
        rows.append((obs.tolist(), *rest))
    return rows


def test_54_bytes_take_as_long_as_they_do(make):
    # 16 bytes of header, a number, 28 of UDP and IP, 2 of PPP: 43.2 us at 10 Mbit/s, and 5 ms.
    rows = played(make(), 3)
    assert [row[0][0] for row in rows] == pytest.approx([5.0432] * 4, abs=1e-6)
    assert [row[0][1] for row in rows] == [0, 1, 2, 3] and rows[3][1] == 1
    assert rows[3][4]["age_ms"] == pytest.approx(5.0432)
    assert played(make(via="direct"), 1)[1][0][0] == pytest.approx(7)
    longer = played(make(ballast=1000), 1)
    assert longer[1][0][0] == pytest.approx(5.0432 + 0.8, abs=1e-6)


@pytest.mark.parametrize("link", ["point-to-point", "csma", "wifi", "lte"])
@pytest.mark.parametrize("via", ["udp", "tcp"])
def test_every_channel_carries_messages(make, link, via):
    # Phones of LTE are attached after some 0.3 s.
    options = {"link": link, "via": via, "start_ms": 500, "period_ms": 10, "count": 60}
    options["silent_s"] = 1
    rows = played(make(**options), 61)
    numbers, ages = ([row[0][i] for row in rows[:-1]] for i in (1, 0))
    assert numbers == list(range(60)) and rows[-1][3] and rows[-1][4]["silent"] == 1
    assert min(ages) > 0 and np.median(ages) < 40
    longer = played(make(**options, ballast=9000), 9)
    assert longer[9][0][0] > np.median(ages)  # the first one finds out the addresses
    told = played(make(**options, case="reconnect", reconnect_ms=104), 61)[-1][4]
    assert 40 < told["arrived"] <= told["sent"] <= 60
    moving = {**options, "case": "move", "forward": 1, "start_ms": 300}
    moved = played(make(**moving), 61)
    assert moved[-2][0][0] < 0.1  # on the node of its source
    assert moved == played(make(**moving), 61)


def test_lte_carries_messages_of_nodes_that_had_a_link(make):
    options = {"link": "lte", "interface": 2, "start_ms": 500, "silent_s": 1, "loss": 0}
    rows = played(make(**options), 20)
    assert [row[0][1] for row in rows] == list(range(21)) and rows[-1][0][0] > 5.1


def test_connections_are_made_as_a_text_says(make):
    rows = played(make(case="text"), 2)
    assert rows[1][0][0] == pytest.approx(5.0432, abs=1e-6)
    direct = played(make(case="text", connections="source_0>reader_0 direct 3"), 2)
    assert direct[1][0][0] == pytest.approx(3)
    for text, said in (
        ("source_0>reader_0", "connection .*source_0>reader_0.* is not understood"),
        ("source_0>reader_0 smoke", "is not understood; use a>b, and udp, tcp or direct"),
        ("source_0>reader_1 udp", "no application reader_1; there are reader_0, source_0"),
    ):
        with pytest.raises(UsageError, match=said):
            make(case="text", connections=text)


def test_losses_of_udp_are_counted_and_tcp_has_none(make):
    udp = played(make(loss=0.1, count=400, silent_s=1), 500)
    told = udp[-1][4]
    assert udp[-1][3] and told["silent"] == 1 and told["sent"] == 400
    assert 10 < told["sent"] - told["arrived"] < 90 and len(udp) == told["arrived"] + 1
    tcp = played(make(loss=0.1, count=400, silent_s=3, via="tcp"), 500)
    assert [row[0][1] for row in tcp[:-1]] == list(range(400))
    ages = np.array([row[0][0] for row in tcp[:-1]])
    assert np.quantile(ages, 0.5) < 100 and np.quantile(ages, 0.99) < 1000


def test_connections_come_and_go_while_the_program_runs(make):
    told = played(make(case="reconnect", period_ms=3, count=4000, end_s=10), 5000)[-1][4]
    assert told["silent"] == 0 and 1000 < told["arrived"] < told["sent"]


@pytest.mark.parametrize("via", ["udp", "tcp"])
def test_an_agent_moves_to_another_node_in_the_middle_of_an_episode(make, via):
    options = {"case": "move", "via": via, "period_ms": 1, "count": 1000, "silent_s": 1}
    lost, kept = (played(make(**options, forward=one), 1001) for one in (0, 1))
    told = kept[-1][4]
    assert told["arrived"] == told["sent"] == 1000 and len(kept) == 1001
    assert sorted(row[0][1] for row in kept[:-1]) == list(range(1000))
    assert kept[400][0][0] == pytest.approx(5.0432, abs=0.5)
    assert kept[-2][0][0] < 0.1  # on the node of its source
    assert 990 < lost[-1][4]["arrived"] < 1000


def test_a_message_too_long_for_udp_names_tcp(make):
    with pytest.raises(UsageError, match=r"65524 bytes.* too long for UDP.*65507; use TCP"):
        make(ballast=65_500)
    assert played(make(ballast=65_500, via="tcp", period_ms=1000), 1)[1][0][1] == 1


def test_an_episode_in_which_nobody_asks_is_truncated(make):
    env = make(case="nobody")
    rows = played(env, 3)
    assert [row[2:4] for row in rows] == [(False, False), (False, True)]
    assert rows[1][4]["silent"] == 1
    assert rows == played(env, 3)


def test_an_end_cuts_the_decision_that_was_on_its_way(make):
    rows = played(make(end_s=0.1), 9)
    assert [row[0][1] for row in rows] == [0, 1, 2, 3, 4, 4] and rows[-1][3]
    assert [row[1] for row in rows] == [0, 1, 1, 1, 1, 0]


def test_a_queue_grows_or_drops_what_is_old(make):
    # An observation each 20 ms, and a service of 30 ms: 300 come in 6 s, of which 200 are served.
    options = {"service_ms": 30, "count": 300, "via": "direct"}
    endless = played(make(**options), 199)[-1][4]
    assert 95 <= endless["waiting"] <= 103 and endless["dropped"] == 0
    assert 900 < endless["mean_age_ms"] < 1100
    newest = played(make(**options, rule="newest_per_source"), 190)[-1][4]
    old = played(make(**options, rule="drop_old", capacity=1), 190)[-1][4]
    new = played(make(**options, rule="drop_new", capacity=1), 190)[-1][4]
    assert newest["mean_age_ms"] == old["mean_age_ms"] < new["mean_age_ms"] < 40
    assert newest["dropped"] > 80 and newest["waiting"] <= 1
    two = played(make(**options, threads=2), 199)[-1][4]
    assert two["waiting"] == 0


def test_a_history_remembers_the_newest_numbers(make):
    # Each observation is 7 ms old when it comes, and waits 10 ms longer than the one before it.
    told = played(make(service_ms=30, via="direct", remembered=3), 20)[-1][4]
    names = ("newest_age_ms", "largest_age_ms", "mean_age_ms", "least_age_ms")
    assert [told[name] for name in names] == pytest.approx([207, 207, 197, 187])


def test_an_agent_tells_another_one_over_the_network():
    options = {"case": "words", "agents": 2, "own_actions": 1}
    env = sebulba.make_env_factory("ns3:program", source=str(PROGRAM), **options)(1, [1])
    rows, (name,) = [env.reset()], env.spec.groups
    for action in (0, 1, 2, 1):
        rows.append(env.step({name: np.full((1, 2), action, np.int32)}))
    env.close()
    heard = [row.obs[name][0, 1] for row in rows if row.acting[name][0, 1]]
    assert len(heard) == 2 and [one[1] for one in heard] == [0, 2]  # of every other row
    assert [one[0] for one in heard] == pytest.approx([5.0432] * 2, abs=1e-6)


def test_own_actions_and_ages_are_added_to_the_observation(make):
    env = make(own_actions=2, age=1)
    assert env.observation_space.shape == (9,)
    env.reset(seed=0)
    env.step(2)
    obs = env.step(1)[0]
    assert obs[2:8].tolist() == [0, 0, 1, 0, 1, 0] and obs[8] == pytest.approx(0.0050432)


def test_the_text_of_an_assertion_is_told(make):
    env = make(case="assert")
    env.reset(seed=0)
    with (
        pytest.warns(RuntimeWarning, match="one is less"),
        pytest.raises(EnvError, match=r'SIGABRT.*msg="one is less"'),
    ):
        for _ in range(4):
            env.step(0)


def test_several_agents_are_groups_of_one_pool():
    factory = sebulba.make_env_factory("ns3:program", source=str(PROGRAM), agents=2, service_ms=1)
    spec = sebulba.env_spec(factory)
    assert isinstance(spec, MultiAgentSpec)
    (name,) = spec.groups
    assert spec.groups[name].slots == ("reader_0", "reader_1")
    env = factory(2, [1, 2])
    try:
        rows = [env.reset()]
        for _ in range(4):
            rows.append(env.step({name: np.ones((2, 2), np.int32)}))
        assert len(env._pool._envs) == 2
        assert rows[0].obs[name].shape == (2, 2, 2)
        # Both are in service when the first decision is due, so both are shown.
        assert all(row.acting[name].all() for row in rows)
        assert rows[4].obs[name][:, :, 1].tolist() == [[4, 4], [4, 4]]
        state, expected = env.state(), env.step({name: np.ones((2, 2), np.int32)})
        env.put_back(state)
        again = env.step({name: np.ones((2, 2), np.int32)})
        assert np.array_equal(again.obs[name], expected.obs[name])
    finally:
        env.close()


def test_deferred_decisions_are_half_the_rows_of_eager_ones(make):
    def rewards(eager: int) -> tuple[int, list[float]]:
        options = {"agents": 2, "service_ms": 1, "end_s": 1, "eager": eager}
        factory = sebulba.make_env_factory("ns3:program", source=str(PROGRAM), **options)
        env = factory(1, [1])
        rows, (name,) = [env.reset()], env.spec.groups
        while not rows[-1].episode_end[0]:
            rows.append(env.step({name: np.ones((1, 2), np.int32)}))
        env.close()
        earned = np.array([row.reward[name][0] for row in rows])
        first = np.argmax([row.acting[name][0] for row in rows], axis=0)
        earned[first, [0, 1]] = 0  # it comes before the first decision
        return len(rows), earned.sum(axis=0).tolist()

    (few, deferred), (many, eager) = rewards(0), rewards(1)
    assert deferred == eager and min(eager) > 40
    assert abs(many - 2 * few) <= 2


def test_wrong_programs_are_told(make):
    with pytest.raises(UsageError, match="has 2 agents; use ns3:program"):
        make(agents=2)
    with pytest.raises(UsageError, match=r"build\(\) adds no agent reader_1"):
        make(case="nobody", agents=2)
    with pytest.raises(UsageError, match="needs the option source"):
        sebulba.make_env_factory("ns3:program")
    for options, said in (
        ({"via": "tpc"}, "via=tpc is none of udp, tcp, direct"),
        ({"service_ms": -1}, "service_ms=-1 must be at least 0"),
        ({"delay_ms": -5}, "a link needs a rate above 0 and a delay of at least 0"),
        ({"link_mbps": 0}, "a link needs a rate above 0"),
        ({"own_actions": 1e6}, "own_actions must be from 0 to 10,000"),
        ({"rule": "newest"}, "the rule newest is none; use drop_new, drop_old or newest_per"),
    ):
        with pytest.raises(UsageError, match=said):
            make(EXAMPLE, **options)


def test_a_program_without_messages_is_told():
    from sebulba_ns3 import messages

    options = {"source": str(PROGRAM.with_name("ns3_scenario.cc"))}
    make = sebulba.make_env_factory("ns3:program", **options, max_episode_steps=3)
    agent = SimplePolicyGradient(sebulba.env_spec(make), SimplePolicyGradientConfig())
    places = {"inference_devices": [0], "update_devices": [0], "num_inferencers_per_device": 1}
    with sebulba.GymnasiumLoop(make, agent, num_envs=1, **places) as loop:
        state = loop.new_state(0, steps_per_cycle=4)
    policy = sebulba.Policy(agent, agent.acting_networks(state.networks, state.experience))
    env = EnvConfig("ns3:program", options=options, max_episode_steps=3)
    with pytest.raises(UsageError, match=r"scenario.cc has no messages .* sebulba::Network"):
        messages.play(env, policy, 0)


def test_the_example_is_trained_by_the_command(tmp_path, capsys):
    env = sebulba.env_spec("ns3:program", source=str(EXAMPLE))
    assert env.observation_space == Box(-np.inf, np.inf, (4,))
    folder = str(tmp_path / "run")
    words = ["train", "ppo", "--env.id", "ns3:program", "--run-dir", folder]
    words += ["--env.options.source", str(EXAMPLE), "--num-envs", "2", "--steps-per-cycle", "4"]
    words += ["--agent.torso.hidden-sizes", "8", "--agent.minibatches", "1"]
    words += ["--num-inferencers-per-device", "1", "--no-anneal-learning-rate"]
    words += ["--inference-devices", "0", "--update-devices", "0", "--compile-cache", "off"]
    assert cli.main([*words, "--total-env-steps", "32"]) == 0
    assert cli.main(["resume", folder, "--total-env-steps", "64"]) == 0
    assert "resumed at 32 env steps" in capsys.readouterr().out
    words = ["eval", folder, "--episodes", "2", "--num-envs", "2", "--env.options.delay-ms", "25"]
    assert cli.main(words) == 0
    assert "return" in capsys.readouterr().out
    assert cli.main(["networks", "messages", folder]) == 0
    assert (tmp_path / "run/messages.png").stat().st_size > 1000
    told = json.loads((tmp_path / "run/messages.json").read_text())
    there, back = told["connections"]
    assert (there["from"], there["to"], there["via"]) == ("cart", "agent", "UDP")
    assert told["nodes"] == {"cart": 0, "agent": 1} and len(there["ages"]) == there["arrived"] > 5
    assert told["agents"][0]["asked"] == there["arrived"] >= back["sent"]
