"""What the tests of Inferencers elsewhere share, in processes and in actors of Ray."""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from sebulba.options import ClusterOptions
from tests.support.loop_helpers import make_tiny_loop
from tests.support.tiny import CountingEnv

STEPS = 5


class Fails(CountingEnv):
    """Fails as it is told to when its environment has made so many steps in all."""

    def __init__(self, how: str, at: int, flag: str = "") -> None:
        super().__init__()
        self._how, self._at, self._flag, self._num = how, at, flag, 0

    def step(self, action):
        self._num += 1
        if self._num == self._at and self._is_first():
            if self._how == "raise":
                raise ValueError("the wheel came off")
            if self._how == "exit":
                sys.exit(3)
            if self._how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(3600)
        return super().step(action)

    def _is_first(self) -> bool:
        """Tell whether none has failed yet, over all processes."""
        try:
            return not self._flag or not open(self._flag, "x").close()
        except FileExistsError:
            return False


def trained(env: Any, cluster: ClusterOptions, num_cycles: int = 6, **options: Any) -> Any:
    loop, _ = make_tiny_loop(env, schedule="lockstep", cluster=cluster, **options)
    with loop:
        result = loop.run(loop.new_state(0, STEPS), num_cycles, STEPS)
        assert ("in processes" in loop.describe()) == (cluster.address == "processes")
        return result


def check_failure_is_replaced(cluster: ClusterOptions, how: str, folder: Path) -> None:
    """Let an environment fail once, and check that one other takes its place."""
    env = functools.partial(Fails, how, 23, str(folder / "failed"))
    faults = {"on_env_failure": "restart", "hang_timeout_s": 30.0 if how == "hang" else 300.0}
    loop, _ = make_tiny_loop(env, cluster=cluster, **faults)
    with loop, warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*gets replaced by a new one", RuntimeWarning)
        result = loop.run(loop.new_state(0, STEPS), 20, STEPS)
    assert result.counters.env_restarts == 1 and result.counters.cycles == 20
