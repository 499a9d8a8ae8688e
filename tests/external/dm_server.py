"""A server of dm_env_rpc: a disc is pushed along a line until it is at the end, or time is up."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from concurrent import futures
from typing import Any

import grpc
import numpy as np
from dm_env_rpc.v1 import (
    dm_env_rpc_pb2,
    dm_env_rpc_pb2_grpc,
    spec_manager,
    tensor_spec_utils,
    tensor_utils,
)
from google.rpc import code_pb2, status_pb2

STEPS = 20
STATES = dm_env_rpc_pb2.EnvironmentStateType


def specs() -> dm_env_rpc_pb2.ActionObservationSpecs:
    def spec(name: str, dtype: int, shape: tuple[int, ...] = (), bounds: Any = None) -> Any:
        made = dm_env_rpc_pb2.TensorSpec(name=name, dtype=dtype, shape=shape)
        if bounds is not None:
            tensor_spec_utils.set_bounds(made, *bounds)
        return made

    kinds = dm_env_rpc_pb2.DataType
    return dm_env_rpc_pb2.ActionObservationSpecs(
        actions={1: spec("push", kinds.INT32, (), (0, 2))},
        observations={
            1: spec("place", kinds.FLOAT, (2,), (-2.0, 2.0)),
            2: spec("reward", kinds.DOUBLE),
            3: spec("title", kinds.STRING),
        },
    )


class World:
    """The disc."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.specs = specs()
        self.actions = spec_manager.SpecManager(self.specs.actions)
        self.observations = spec_manager.SpecManager(self.specs.observations)
        self.state = STATES.INTERRUPTED

    def step(self, request: Any) -> Any:
        if self.state != STATES.RUNNING:
            self.place, self.steps, reward = float(self.random.uniform(-0.5, 0.5)), 0, 0.0
            self.state = STATES.RUNNING
        else:
            reward = self.act(request.actions)
        for uid in request.requested_observations:
            if uid not in self.specs.observations:
                raise ValueError(f"no observation {uid}")
        place = np.float32([self.place, self.steps / STEPS])
        values = {"place": place, "reward": reward, "title": "a disc"}
        packed = self.observations.pack(values)
        wanted = {uid: packed[uid] for uid in set(request.requested_observations)}
        return dm_env_rpc_pb2.StepResponse(state=self.state, observations=wanted)

    def act(self, given: Any) -> float:
        push = 1
        for uid, tensor in given.items():
            if uid not in self.specs.actions:
                raise ValueError(f"no action {uid}")
            push = int(self.actions.unpack({uid: tensor})["push"])
            if not 0 <= push <= 2:
                raise ValueError(f"push={push} is out of bounds")
        self.place += 0.2 * (push - 1)
        self.steps += 1
        if abs(self.place) >= 1:
            self.state = STATES.TERMINATED
        elif self.steps == STEPS:
            self.state = STATES.INTERRUPTED
        return float(self.place >= 1) - 0.01


class Service(dm_env_rpc_pb2_grpc.EnvironmentServicer):
    """Worlds by name; a connection joins one."""

    def __init__(self) -> None:
        self.worlds: dict[str, World] = {}
        self.names = map(str, itertools.count())

    def Process(self, request_iterator: Iterable[Any], context: Any) -> Iterator[Any]:
        joined: list[World] = []
        for request in request_iterator:
            kind = request.WhichOneof("payload")
            try:
                answer = getattr(self, kind)(getattr(request, kind), joined)
                yield dm_env_rpc_pb2.EnvironmentResponse(**{kind: answer})
            except Exception as error:
                status = status_pb2.Status(code=code_pb2.INVALID_ARGUMENT, message=str(error))
                yield dm_env_rpc_pb2.EnvironmentResponse(error=status)

    def create_world(self, request: Any, joined: list[World]) -> Any:
        if request.settings.keys() != {"seed"}:
            raise ValueError(f"settings are {sorted(request.settings)}; expected seed")
        name = next(self.names)
        self.worlds[name] = World(int(tensor_utils.unpack_tensor(request.settings["seed"])))
        return dm_env_rpc_pb2.CreateWorldResponse(world_name=name)

    def world(self, name: str) -> World:
        if name not in self.worlds:
            raise ValueError(f"no world {name!r}")
        return self.worlds[name]

    def destroy_world(self, request: Any, joined: list[World]) -> Any:
        self.world(request.world_name)
        del self.worlds[request.world_name]
        return dm_env_rpc_pb2.DestroyWorldResponse()

    def join_world(self, request: Any, joined: list[World]) -> Any:
        if joined or request.settings:
            raise ValueError("joined already, or unknown settings")
        joined.append(self.world(request.world_name))
        return dm_env_rpc_pb2.JoinWorldResponse(specs=joined[0].specs)

    def leave_world(self, request: Any, joined: list[World]) -> Any:
        joined.clear()
        return dm_env_rpc_pb2.LeaveWorldResponse()

    def reset(self, request: Any, joined: list[World]) -> Any:
        joined[0].state = STATES.INTERRUPTED
        return dm_env_rpc_pb2.ResetResponse(specs=joined[0].specs)

    def reset_world(self, request: Any, joined: list[World]) -> Any:
        self.world(request.world_name).state = STATES.INTERRUPTED
        return dm_env_rpc_pb2.ResetWorldResponse()

    def step(self, request: Any, joined: list[World]) -> Any:
        return joined[0].step(request)


class Server:
    """Serves at a free port of this machine."""

    def __enter__(self) -> Server:
        self.service = Service()
        self._server = grpc.server(futures.ThreadPoolExecutor(64))
        dm_env_rpc_pb2_grpc.add_EnvironmentServicer_to_server(self.service, self._server)
        credentials = grpc.local_server_credentials()
        port = self._server.add_secure_port("localhost:0", credentials)
        self.address = f"localhost:{port}"
        self._server.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.stop(0).wait()
