"""Servers of dm_env_rpc: the package's compliance tests, and training on one that passes them."""

from __future__ import annotations

import unittest
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
from gymnasium import spaces

import sebulba

pytest.importorskip("dm_env_rpc")
pytest.importorskip("grpc")

from dm_env_rpc.v1 import compliance, connection, dm_env_rpc_pb2, tensor_utils
from sebulba_external.dm_env import DmEnvRpc, _action_space, _by_name, _space

from tests.external.dm_server import STEPS, Server
from tests.external.telling import ONE

SEED = '{"seed": 3}'


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as one:
        yield one


class Base:
    """What the compliance tests ask of a server."""

    address = ""
    required_world_settings: ClassVar = {"seed": tensor_utils.pack_tensor(1)}
    invalid_world_settings: ClassVar = {"colour": tensor_utils.pack_tensor(1)}
    has_multiple_world_support = True
    connection: Any = None
    world_name = ""
    specs: Any = None

    def setUp(self) -> None:
        super().setUp()  # type: ignore[misc]
        self.connection = connection.create_secure_channel_and_connect(self.address, timeout=60)
        request = dm_env_rpc_pb2.CreateWorldRequest(settings=self.required_world_settings)
        self.world_name = self.connection.send(request).world_name

    def tearDown(self) -> None:
        super().tearDown()  # type: ignore[misc]
        self.connection.send(dm_env_rpc_pb2.LeaveWorldRequest())
        request = dm_env_rpc_pb2.DestroyWorldRequest(world_name=self.world_name)
        self.connection.send(request)
        self.connection.close()

    def join(self) -> Any:
        request = dm_env_rpc_pb2.JoinWorldRequest(world_name=self.world_name)
        return self.connection.send(request).specs


class OfReset(Base, compliance.Reset):
    def join_world(self) -> Any:
        return self.join()


class OfStep(Base, compliance.Step):
    def setUp(self) -> None:
        super().setUp()
        self.specs = self.join()


class OfWorlds(Base, compliance.CreateDestroyWorld): ...


class OfJoining(Base, compliance.JoinLeaveWorld): ...


class OfResettingWorlds(Base, compliance.ResetWorld): ...


KINDS = (OfWorlds, OfJoining, OfReset, OfResettingWorlds, OfStep)
for kind in KINDS:
    kind.__test__ = False  # type: ignore[attr-defined]


@pytest.mark.slow
def test_the_server_of_the_tests_complies(server: Server) -> None:
    Base.address = server.address
    suite = unittest.TestSuite(map(unittest.defaultTestLoader.loadTestsFromTestCase, KINDS))
    result = unittest.TestResult()
    suite.run(result)
    assert result.testsRun > 30
    assert [text for _, text in (*result.errors, *result.failures)] == []


def test_a_world_is_a_gymnasium_environment(server: Server) -> None:
    env = DmEnvRpc(f"dm_env_rpc://{server.address}", SEED, seed_setting="seed")
    assert env.observation_space == spaces.Box(-2, 2, (2,), np.float32)
    assert env.action_space == spaces.Discrete(3)
    first, _ = env.reset(seed=7)
    again, _ = env.reset(seed=7)
    assert np.array_equal(first, again)
    obs, reward, terminated, truncated, _ = env.step(np.int64(2))
    assert obs[0] == pytest.approx(first[0] + 0.2)
    assert (reward, terminated, truncated) == (-0.01, False, False)
    while not terminated:
        obs, reward, terminated, truncated, _ = env.step(2)
    assert (reward, truncated) == (0.99, False)
    env.reset()
    for _ in range(STEPS):
        _, _, terminated, truncated, _ = env.step(1)
    assert (terminated, truncated) == (False, True)
    worlds = len(server.service.worlds)
    env.close()
    env.close()
    assert len(server.service.worlds) == worlds - 1


def test_what_cannot_be_joined_is_refused(server: Server) -> None:
    with pytest.raises(sebulba.UsageError, match="nobody answered at"):
        DmEnvRpc("localhost:1", timeout_s=0.2)
    with pytest.raises(sebulba.UsageError, match=r"refused a world .* expected seed"):
        DmEnvRpc(server.address)
    for bad in ("[]", "{"):
        with pytest.raises(sebulba.UsageError, match="must be a JSON object"):
            DmEnvRpc(server.address, bad)


def test_spaces_of_specs() -> None:
    from dm_env import specs

    choices = {"a": specs.DiscreteArray(3), "b": specs.DiscreteArray(2)}
    assert _action_space(choices) == spaces.MultiDiscrete([3, 2])
    assert {k: int(v) for k, v in _by_name(np.int64([2, 1]), choices).items()} == {"a": 2, "b": 1}
    moves = {
        "a": specs.BoundedArray((2,), np.float64, -1, 1),
        "b": specs.BoundedArray((), np.float32, 0, 5),
    }
    assert _action_space(moves).high.tolist() == [1, 1, 5]  # type: ignore[attr-defined]
    named = _by_name(np.float32([0.5, 1, 3]), moves)
    assert named["a"].tolist() == [0.5, 1]
    assert named["b"].shape == ()
    with pytest.raises(sebulba.UsageError, match="all must be choices"):
        _action_space({"a": moves["a"], "b": choices["a"]})
    assert _space(specs.Array((2,), np.uint8)) == spaces.Box(0, 255, (2,), np.uint8)


@pytest.mark.slow
def test_a_world_trains(server: Server) -> None:
    from sebulba.agents.configs import ImpalaConfig
    from sebulba.agents.impala import Impala

    make = sebulba.make_env_factory(
        "external:dm_env_rpc", address=server.address, settings=SEED, seed_setting="seed"
    )
    agent = Impala(sebulba.env_spec(make), ImpalaConfig(learning_rate=5e-3))
    with sebulba.GymnasiumLoop(make, agent, num_envs=8, **ONE) as loop:
        result = loop.train(total_env_steps=16_000, steps_per_cycle=32)
    assert result.metrics["episode_return_mean"] > 0.8
    assert not server.service.worlds
