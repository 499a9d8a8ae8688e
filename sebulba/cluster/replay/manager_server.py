"""What a trajectory manager elsewhere is asked: in a process, or in an actor of Ray.

In ``cluster/inferencers/``, ``inferencer_process.py`` puts it at the end of a socket, and
``ray_actors.py`` into an actor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cloudpickle
import jax

from sebulba.cluster.inferencers.inferencer_server import failure_of
from sebulba.cluster.replay.trajectory_manager import Part, TrajectoryManager
from sebulba.types import RunSpec


class ManagerServer:
    """Answers requests, which are ``make`` and the methods of ``TrajectoryManager``."""

    def __init__(self, given: bytes, config: Mapping[str, Any]) -> None:
        """Prepare JAX; ``given`` is the pickled agent, ``config`` settings of JAX."""
        for name, value in config.items():
            jax.config.update(name, value)
        self._given = given
        self._manager: TrajectoryManager

    def make(self, run: RunSpec, part: Part) -> None:
        """Make an empty part of a replay."""
        self._manager = TrajectoryManager(cloudpickle.loads(self._given), run, part)

    def answer(self, name: str, arguments: tuple) -> Any:
        """Return the answer to a request by the name of a method, or the ``Failure`` of it."""
        try:
            if name == "close":
                return None
            return getattr(self if name == "make" else self._manager, name)(*arguments)
        except BaseException as raised:
            return failure_of(raised)
