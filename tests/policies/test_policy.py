"""The policy on disk and in use: the same actions after a round trip, data only, clear refusals."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

import sebulba
from sebulba.agents.configs import ImpalaConfig, TorsoConfig, make_agent
from sebulba.errors import UsageError
from sebulba.policies import policy as policy_module
from sebulba.policies.policy import Policy, load_policy, save_policy, space_from_json, space_to_json
from sebulba.support import files
from sebulba.types import EnvSpec, RunSpec

RUN = RunSpec(num_envs=6, num_inferencers=2, steps_per_cycle=5, num_update_devices=1)
VECTOR = spaces.Box(-2.0, 3.0, (4,), np.float32)
ACTIONS = spaces.Discrete(3, dtype=np.int32)
CONFIG = ImpalaConfig(torso=TorsoConfig(hidden_sizes=(7, 5), image_features=16))


def make(
    observation_space=VECTOR, action_space=None, config: ImpalaConfig = CONFIG, seed: int = 0
) -> tuple[sebulba.Agent, object]:
    """Return an agent and acting networks that no initialisation would have made."""
    spec = EnvSpec(observation_space, action_space or ACTIONS, name="test")
    agent = make_agent(spec, config)
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(agent.new_networks, jax.random.key(0))
    networks = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype), shapes)
    return agent, agent.acting_networks(networks, None)


@pytest.fixture
def saved(tmp_path):
    agent, networks = make()
    save_policy(tmp_path / "policy", agent, networks, RUN)
    return tmp_path, Policy(agent, networks, RUN)


def sample(space, n: int, seed: int = 0):
    space.seed(seed)
    batch = [space.sample() for _ in range(n)]
    if isinstance(space, spaces.Dict):
        return {k: np.stack([row[k] for row in batch]) for k in space.spaces}
    return np.stack(batch)


SPACES = [
    (VECTOR, spaces.Discrete(3, start=2, dtype=np.int32)),
    (spaces.Box(0, 255, (4, 36, 38), np.uint8), spaces.MultiDiscrete([3, 2], dtype=np.int32)),
    (
        spaces.Dict(
            {"b": VECTOR, "a": spaces.Discrete(5, dtype=np.int32), "c": spaces.MultiBinary(3)}
        ),
        spaces.Box(np.array([-1, -2], np.float32), np.array([1, 5], np.float32)),
    ),
]


@pytest.mark.parametrize(("observation_space", "action_space"), SPACES)
@pytest.mark.parametrize("lstm_size", [0, 3])
def test_round_trip_gives_the_same_actions(tmp_path, observation_space, action_space, lstm_size):
    config = dataclasses.replace(CONFIG, lstm_size=lstm_size)
    agent, networks = make(observation_space, action_space, config)
    save_policy(tmp_path / "policy", agent, networks, RUN)
    before, after = Policy(agent, networks, RUN), load_policy(tmp_path)
    assert after.agent.config == config
    states = [None, None]
    for t in range(3):
        obs = sample(observation_space, 4, seed=t)
        actions = []
        for i, policy in enumerate((before, after)):
            action, states[i] = policy(obs, states[i])
            actions.append(action)
        np.testing.assert_array_equal(*actions)
        assert all(a in action_space for a in actions[0])


@pytest.mark.parametrize(("observation_space", "action_space"), SPACES)
def test_one_observation_is_told_from_a_batch(observation_space, action_space):
    policy = Policy(*make(observation_space, action_space), RUN)
    batch = sample(observation_space, 4)
    actions, _ = policy(batch)
    for i in range(4):
        action, state = policy(jax.tree.map(lambda x, i=i: x[i], batch))
        assert action_space.contains(action)
        np.testing.assert_allclose(action, actions[i], atol=1e-5)
        policy(jax.tree.map(lambda x, i=i: x[i], batch), state)


def test_recurrent_state_is_carried_and_forgotten_where_an_episode_begins():
    config = dataclasses.replace(CONFIG, lstm_size=8)
    policy = Policy(*make(action_space=spaces.Box(-1, 1, (2,), np.float32), config=config), RUN)
    obs = sample(VECTOR, 3)
    fresh, state = policy(obs)
    later, _ = policy(obs, state)
    reset, _ = policy(obs, state, is_first=[False, True, False])
    assert not np.allclose(later, fresh)
    np.testing.assert_allclose(reset, np.stack([later[0], fresh[1], later[2]]), atol=1e-6)


def test_the_evaluation_policy_is_not_the_exploring_one(saved):
    folder, policy = saved
    obs = np.broadcast_to(sample(VECTOR, 1), (64, 4))
    assert len(np.unique(policy(obs)[0])) == 1
    assert len(np.unique(load_policy(folder, explore=True)(obs)[0])) > 1


def test_float64_observations_are_cast_and_floats_for_pixels_refused():
    policy = Policy(*make(), RUN)
    obs = sample(VECTOR, 3)
    np.testing.assert_array_equal(policy(obs)[0], policy(obs.astype(np.float64))[0])
    pixels = Policy(*make(spaces.Box(0, 255, (4, 36, 36), np.uint8)), RUN)
    with pytest.raises(UsageError, match="float64; expected uint8"):
        pixels(np.zeros((4, 36, 36)))


@pytest.mark.parametrize(
    ("obs", "words"),
    [
        (np.zeros(3), r"shape \(3,\); expected \(4,\)"),
        (np.zeros((2, 2, 4)), r"\(2, 2, 4\)"),
        (1.0, r"shape \(\)"),
        (np.zeros((0, 4)), r"shape \(0, 4\), which is no observation"),
    ],
)
def test_refuses_an_observation_of_another_shape(obs, words):
    with pytest.raises(UsageError, match=words):
        Policy(*make(), RUN)(obs)


def test_refuses_odd_dicts_and_a_state_of_another_batch():
    policy = Policy(*make(SPACES[2][0]), RUN)
    obs = sample(SPACES[2][0], 3)
    with pytest.raises(UsageError, match="keys"):
        policy({"a": obs["a"]})
    with pytest.raises(UsageError, match="mixes"):
        policy({**obs, "a": 1})
    _, state = policy(obs)
    with pytest.raises(UsageError, match="batch of 2, but state is of 3"):
        policy(jax.tree.map(lambda x: x[:2], obs), state)


# Files.


def test_the_files_hold_data_only_and_names_that_people_read(saved):
    folder, policy = saved
    with np.load(folder / "policy" / "arrays.npz", allow_pickle=False) as arrays:
        assert len(arrays.files) == len(jax.tree.leaves(policy.acting_networks))
        assert any("kernel" in name for name in arrays.files)
    record = json.loads((folder / "policy" / "config.json").read_text())
    assert record["agent"] == "sebulba.agents.impala:Impala"


@pytest.mark.parametrize("name", ["config.json", "arrays.npz"])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "flipped", "other"])
def test_a_damaged_file_is_named(saved, name, damage):
    file = saved[0] / "policy" / name
    data = bytearray(file.read_bytes())
    if damage == "missing":
        file.unlink()
    else:
        middle = len(data) // 2
        data[middle : middle + 8] = bytes(255 - b for b in data[middle : middle + 8])
        cut = bytes(data[:middle])
        file.write_bytes({"empty": b"", "cut": cut, "flipped": bytes(data), "other": b"[]"}[damage])
    with pytest.raises(UsageError) as caught:
        load_policy(saved[0])
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("format", 99, "format 99"),
        ("agent", "nowhere.at.all:Agent", "cannot be imported"),
        ("agent", "sebulba.agents.impala:Nothing", "cannot be imported"),
        ("agent", "json:JSONDecoder", "not a sebulba.Agent"),
        ("agent", "json:loads", "not a class"),
        ("run", {"envs": 3}, "damaged"),
        ("spec", {}, "damaged"),
    ],
)
def test_a_config_that_lies_is_refused(saved, key, value, words):
    file = saved[0] / "policy" / "config.json"
    record = json.loads(file.read_text()) | {key: value}
    del record["sha256"]  # as in policies of before there were checksums
    file.write_text(json.dumps(record))
    with pytest.raises(UsageError, match=words):
        load_policy(saved[0], trust=True)


def test_arrays_of_another_network_are_refused(saved, tmp_path):
    for sizes, words in (((7, 6), "expects"), ((7,), "differs in")):
        other = dataclasses.replace(CONFIG, torso=TorsoConfig(hidden_sizes=sizes))
        agent, networks = make(config=other)
        save_policy(tmp_path / "other", agent, networks, RUN)
        arrays = (tmp_path / "other" / "arrays.npz").read_bytes()
        (saved[0] / "policy" / "arrays.npz").write_bytes(arrays)
        with pytest.raises(UsageError, match=words):
            load_policy(saved[0])


def test_pickles_are_not_loaded(saved):
    with np.load(saved[0] / "policy" / "arrays.npz") as arrays:
        stored = dict(arrays)
    stored[next(iter(stored))] = np.array([{"evil": 1}], dtype=object)
    np.savez(saved[0] / "policy" / "arrays.npz", **stored)
    with pytest.raises(UsageError, match=r"arrays\.npz is damaged"):
        load_policy(saved[0])


def test_compressed_arrays_are_refused_since_they_could_take_all_memory(tmp_path):
    agent, networks = make(config=ImpalaConfig(torso=TorsoConfig(hidden_sizes=(256,))))
    networks = jax.tree.map(np.zeros_like, networks)
    save_policy(tmp_path / "policy", agent, networks, RUN)
    file = tmp_path / "policy" / "arrays.npz"
    with np.load(file) as arrays:
        stored = dict(arrays)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, array in stored.items():
            content = io.BytesIO()
            np.save(content, array)
            archive.writestr(f"{name}.npy", content.getvalue())
    with pytest.raises(UsageError, match="is compressed"):
        load_policy(tmp_path)


def test_many_large_boxes_are_refused_before_they_are_made():
    box = space_to_json(spaces.Box(0, 255, (84, 84), np.uint8))
    large = {name: box | {"shape": [2**14, 2**12]} for name in "abcdef"}
    with pytest.raises(UsageError, match="more than 268435456 numbers"):
        space_from_json({"type": "Dict", "spaces": large})


def test_a_configuration_too_large_to_be_read_is_refused(saved):
    file = saved[0] / "policy" / "config.json"
    with open(file, "r+b") as opened:
        opened.truncate(2**40)  # which takes no room on the disk
    with pytest.raises(UsageError, match="it has more than 67,108,864 bytes"):
        load_policy(saved[0])


def test_a_class_inside_a_function_is_refused_when_saving(tmp_path):
    agent, networks = make()

    class Local(type(agent)):
        pass

    with pytest.raises(UsageError, match="Local is inside a function"):
        save_policy(tmp_path, Local(agent.spec, agent.config), networks, RUN)


def test_bfloat16_networks_survive(tmp_path):
    agent, _ = make()

    save_policy(tmp_path, HalfPrecision(agent.spec, agent.config), half(make()[1]), RUN)
    restored = load_policy(tmp_path).acting_networks
    assert {x.dtype for x in jax.tree.leaves(restored)} == {np.dtype(jnp.bfloat16)}
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), restored, half(make()[1])))


def half(tree):
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)


class HalfPrecision(type(make_agent(EnvSpec(VECTOR, ACTIONS), CONFIG))):
    """Impala that stages its networks in half precision."""

    def acting_networks(self, networks, experience):
        return half(networks)


@pytest.mark.slow
def test_a_policy_loads_without_environments_or_loop(saved):
    code = (
        "import sys, numpy, sebulba\n"
        f"policy = sebulba.load_policy({str(saved[0])!r})\n"
        "action, state = policy(numpy.zeros(4, numpy.float32))\n"
        "assert 0 <= action < 3\n"
        "print([m for m in sys.modules if m.startswith(('envpool', 'sebulba.loops'))])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-np.inf, np.inf, (2, 3), np.float32),
        spaces.Box(np.array([-1, -np.inf], np.float32), np.array([np.inf, 2.5], np.float32)),
        spaces.Box(0, 255, (4, 5, 6), np.uint8),
        spaces.Discrete(5, start=-2),
        spaces.MultiDiscrete([3, 4], start=[1, -1]),
        spaces.MultiBinary((2, 3)),
        spaces.MultiBinary(4),
        spaces.Dict({"z": spaces.Discrete(2), "a": spaces.Dict({"b": VECTOR})}),
    ],
)
def test_spaces_survive_json(space):
    text = json.dumps(space_to_json(space), allow_nan=False)
    assert space_from_json(json.loads(text)) == space


def test_unknown_spaces_are_refused():
    with pytest.raises(UsageError, match="cannot be saved"):
        space_to_json(spaces.Text(3))
    with pytest.raises(UsageError, match="'Text' is unknown"):
        space_from_json({"type": "Text"})


@pytest.mark.parametrize("name", ["/etc", "../other", ""])
def test_members_outside_the_folder_of_a_policy_are_refused(tmp_path, name):
    record = {"name": "game", "groups": {}, "common": None, "members": [name]}
    record["run"] = {"num_envs": 1, "num_inferencers": 1, "steps_per_cycle": 1}
    record["run"]["num_update_devices"] = 1
    with pytest.raises(UsageError, match="names members outside its folder"):
        policy_module._load_members(tmp_path, record, explore=False, seed=0, trust=False)


def test_a_policy_is_on_the_disk_before_it_takes_its_place(tmp_path, monkeypatch):
    synced = []
    noted = lambda file: synced.append(Path(f"/proc/self/fd/{file}").resolve())  # noqa: E731
    monkeypatch.setattr(os, "fsync", noted)
    files.replace_folder(
        tmp_path / "policy", lambda new: (new.mkdir(), (new / "arrays.npz").write_bytes(b"x"))
    )
    file, folder, above = synced
    assert file.name == "arrays.npz" and file.parent == folder
    assert folder.parent == above == tmp_path
