"""``sebulba networks``: sweep, play, fairness and deploy, and what they refuse."""

from __future__ import annotations

import json
import math

import jax
import pytest
from PIL import Image
from sebulba_networks.tools.sweep import ORDER, SWEPT

import sebulba
from sebulba.agents.configs import make_agent
from sebulba.commands import cli
from sebulba.policies.policy import save_policy
from sebulba.runs.folder import RunFolder
from sebulba.runs.read_config import read_config
from sebulba.types import RunSpec
from tests.support.needs import needs_compiler

pytestmark = needs_compiler

NETWORK = [
    *("--env.options.bandwidth-mbps", "2-8", "--env.options.rtt-ms", "4-20"),
    *("--env.options.buffer-packets", "5-60", "--env.max-episode-steps", "30"),
]


def untrained(path, preset, *options):
    """Leave what a run leaves, without training: its configuration and a policy."""
    words = [preset, *NETWORK, "--agent.torso.hidden-sizes", "8", *options]
    _, config = read_config(words, "sebulba train")
    folder = RunFolder(path)
    folder.create()
    folder.write_config(config, preset, ["sebulba", "train", *words])
    spec = sebulba.env_spec(config.env.id, **config.env.factory_arguments())
    agent = make_agent(spec, config.agent)
    run = RunSpec(num_envs=16, num_inferencers=1, steps_per_cycle=8, num_update_devices=1)

    def acting_networks(key):
        networks = agent.new_networks(key)
        return agent.acting_networks(networks, agent.new_experience(key, networks, run))

    save_policy(folder.policy, agent, jax.jit(acting_networks)(jax.random.key(0)), run)
    return path


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return untrained(tmp_path_factory.mktemp("runs") / "alone", "congestion-ppo")


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "together"
    short = ("--env.options.join-s", "0-0.3", "--env.options.stay-s", "0.1-0.5")
    return untrained(folder, "shared-bottleneck-ppo", *short)


def is_picture(file) -> bool:
    with Image.open(file) as image:
        return image.format == "PNG" and min(image.size) > 500


@pytest.mark.slow
def test_a_sweep_compares_inside_and_beyond_the_ranges(alone, capsys):
    assert cli.main(["networks", "sweep", str(alone), "--points", "3", "--networks", "2"]) == 0
    said = capsys.readouterr().out
    assert "BBR-like" in said and "of the way from the fixed window" in said
    swept = json.loads((alone / "sweep.json").read_text())
    assert list(swept["sweep"]) == list(SWEPT) and set(swept["inside"]) == set(ORDER)
    rtt = swept["sweep"]["rtt_ms"]
    assert rtt["values"] == pytest.approx([1, math.sqrt(80), 80]) and rtt["training_range"] == [
        4,
        20,
    ]
    figures = swept["sweep"]["buffer_packets"]["figures"]
    for who in ORDER:
        assert len(figures[who]) == 3 and 0 < figures[who][0]["throughput"] <= 1.001
    returns = {who: swept["inside"][who]["episode_return_mean"] for who in ORDER}
    assert returns["oracle"] > returns["fixed window"]
    low, high = returns["fixed window"], returns["oracle"]
    assert swept["gap_closed"] == pytest.approx((returns["policy"] - low) / (high - low))
    assert is_picture(alone / "sweep.png")


@pytest.mark.slow
def test_an_episode_is_drawn_into_another_folder(alone, together, tmp_path):
    for folder in (alone, together):
        words = ["networks", "play", str(folder), "--out", str(tmp_path), "--rtt-ms", "10"]
        assert cli.main(words) == 0
        assert is_picture(tmp_path / "play.png")
        assert not (folder / "play.png").exists()


@pytest.mark.slow
def test_a_policy_is_deployed_beside_what_was_predicted(alone, tmp_path, capsys):
    words = ["--out", str(tmp_path), "--steps", "4", "--bandwidth-mbps", "8"]
    assert cli.main(["networks", "deploy", str(alone), *words]) == 0
    assert is_picture(tmp_path / "deploy.png")
    result = json.loads((tmp_path / "deploy.json").read_text())
    assert list(result["figures"]) == ["policy", "AIMD", "CUBIC", "BBR-like"]
    for both in result["figures"].values():
        assert 0 < both["simulated"]["goodput_mbps"] < 8
        assert both["loopback"]["rtt_ms"] >= 4
    assert "loopback" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("run", ["alone", "together"])
def test_flows_with_one_policy_share_a_link(run, request, capsys):
    folder = request.getfixturevalue(run)
    words = ["--bandwidth-mbps", "8", "--join-s", "0.3", "--stay-s", "0.5", "--flows", "3"]
    assert cli.main(["networks", "fairness", str(folder), *words]) == 0
    assert "Jain's index" in capsys.readouterr().out
    shared = json.loads((folder / "fairness.json").read_text())["shared"]
    assert list(shared) == ["policy", "AIMD", "CUBIC", "BBR-like"]
    for one in shared.values():
        assert 1 / 3 <= one["jain"]["together"] <= 1
        assert [len(one["flows"]), len(one["goodput_mbps"]["together"])] == [3, 3]
        assert one["flows"][1]["time_s"][0] > 0.3
    assert is_picture(folder / "fairness.png")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sweep", "nowhere"], "nowhere"),
        (["sweep", "RUN", "--points", "0"], "points=0 must be at least 1"),
        (["sweep", "RUN", "--networks", "-1"], "networks=-1 must be at least 1"),
        (["sweep", "RUN", "--steps", "0"], "steps=0 must be at least 1"),
        (["sweep", "RUN", "--transport", "tcp"], "transport='tcp' is not in the native engine"),
        (["play", "RUN", "--slow-start-packets", "1"], "slow_start_packets=1 must be from 2"),
        (["fairness", "RUN", "--flows", "0"], "flows=0 must be at least 1"),
        (["fairness", "RUN", "--flows", "65"], "from 1 to 64"),
        (["play", "RUN", "--rtt-ms", "fast"], "rtt_ms='fast' must be a number"),
        (["play", "RUN", "--seed", str(2**31)], "32-bit"),
        (["play", "RUN", "--out", "nowhere"], "is not a folder; create it"),
        (["play", "RUN", "--best"], "has no best policy"),
        (["messages", "RUN", "--best"], "has no best policy"),
        (["deploy", "RUN", "--steps", "0"], "steps=0 must be"),
        (["dance", "RUN"], "invalid choice: 'dance'"),
        ([], "COMMAND"),
    ],
    ids=" ".join,
)
def test_wrong_words_are_told(words, said, alone, capsys):
    words = [str(alone) if word == "RUN" else word for word in words] if words else words
    assert cli.main(["networks", *words]) == cli.EXIT_USAGE
    assert said in capsys.readouterr().err


def test_a_run_on_another_environment_is_told(tmp_path, alone, capsys):
    record = json.loads((alone / "config.json").read_text())
    record["env"]["id"] = "CartPole-v1"
    (tmp_path / "config.json").write_text(json.dumps(record))
    assert cli.main(["networks", "play", str(tmp_path), "--trust"]) == cli.EXIT_USAGE
    assert "was trained on CartPole-v1; give a run on" in capsys.readouterr().err
