"""Environments that each have one thing wrong with them."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorWrapper

from sebulba.envs.memory_tasks import RepeatObservation


class Good(gymnasium.Env):
    """Rewards the first action; an episode is 5 steps, or ends in a terminal state before."""

    observation_space: spaces.Space = spaces.Box(-1, 1, (3,))
    action_space: spaces.Space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.obs(), {}

    def obs(self) -> Any:
        return self.np_random.uniform(-1, 1, 3).astype(np.float32)

    def step(self, action):
        self.t += 1
        terminated = bool(self.np_random.integers(8) == 0)
        return self.obs(), float(np.sum(action) <= 0), terminated, self.t >= 5, {}


class GoodDict(Good):
    observation_space = spaces.Dict({"x": spaces.Box(-1, 1, (3,)), "k": spaces.Discrete(2)})

    def obs(self):
        return {"x": super().obs(), "k": int(self.np_random.integers(2))}


class WrongShape(Good):
    def obs(self):
        return super().obs()[:2]


class WrongDtype(Good):
    observation_space = spaces.Box(0, 255, (3,), np.uint8)


class CastDtype(Good):
    def obs(self):
        return super().obs().astype(np.float64)


class WideSpace(Good):
    observation_space = spaces.Box(-1, 1, (3,), np.float64)

    def obs(self):
        return super().obs().astype(np.float64)


class LargeImage(Good):
    observation_space = spaces.Box(0, 255, (210, 160, 3), np.uint8)

    def obs(self):
        return np.full((210, 160, 3), self.t, np.uint8)


class NotANumber(Good):
    def obs(self):
        return np.full(3, np.nan if self.t == 3 else 0, np.float32)


class FarOutside(Good):
    def obs(self):
        return 255 * super().obs()


class JustOutside(Good):
    def obs(self):
        return np.float32(1.1) * super().obs()


class OutsideDiscrete(Good):
    observation_space = spaces.Discrete(3)

    def obs(self):
        return self.t


class WrongKeys(GoodDict):
    def obs(self):
        return {"x": super().obs()["x"]}


class FourTuple(Good):
    def step(self, action):
        return super().step(action)[:4]


class NoInfoOfReset(Good):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0]


class NoSeed(Good):
    def reset(self):
        return super().reset()


class NumberForFlag(Good):
    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward, int(terminated), truncated, info


class Raises(Good):
    def step(self, action):
        if self.t == 3:
            raise RuntimeError("planted in step")
        return super().step(action)


class RaisesWhenMade(Good):
    def __init__(self):
        raise OSError("no such simulator")


class InfiniteReward(Good):
    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, np.inf, *rest


class HugeReward(Good):
    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, 1e6 * reward, *rest


class NoReward(Good):
    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, 0.0, *rest


class NeverEnds(Good):
    def step(self, action):
        obs, reward, _, _, info = super().step(action)
        return obs, reward, False, False, info


class GlobalChance(Good):
    def obs(self):
        return np.random.uniform(-1, 1, 3).astype(np.float32)


class SeedIgnored(Good):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=0)


class SharedState(Good):
    state: ClassVar[list[float]] = [0.0]

    def obs(self):
        self.state[0] = 0.5 * self.state[0] + float(self.np_random.uniform(-0.5, 0.5))
        return np.full(3, self.state[0], np.float32)

    def reset(self, *, seed=None, options=None):
        self.state[0] = 0.0
        return super().reset(seed=seed)


class VaryingInfos(Good):
    def step(self, action):
        *rest, _ = super().step(action)
        return *rest, {"t": self.t} | ({"won": True} if self.t == 5 else {})


class MasksActions(Good):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0], {"action_mask": np.ones(2, np.int8)}

    def step(self, action):
        *rest, _ = super().step(action)
        return *rest, {"action_mask": np.ones(2, np.int8)}


class Rewrites(Good):
    def __init__(self):
        self.buffer = np.zeros(3, np.float32)

    def obs(self):
        self.buffer[:] = super().obs()
        return self.buffer


class ClosesOnce(Good):
    closed = False

    def close(self):
        if self.closed:
            raise RuntimeError("closed twice")
        self.closed = True


class CannotClose(Good):
    def close(self):
        raise RuntimeError("planted in close")


class HoldsLock(Good):
    def __init__(self):
        self.lock = threading.Lock()


class GraphSpace(Good):
    observation_space = spaces.Dict(
        {"x": spaces.Box(-1, 1, (3,)), "map": spaces.Graph(spaces.Discrete(2), None)}
    )


class OnlyText(Good):
    observation_space = spaces.Text(20)


class TextSpace(Good):
    observation_space = spaces.Dict({"x": spaces.Box(-1, 1, (3,)), "mission": spaces.Text(20)})

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed, options=options)
        return {"x": obs, "mission": "go"}, info

    def step(self, action):
        obs, *rest = super().step(action)
        return {"x": obs, "mission": "go"}, *rest


class NoActionSpace(Good):
    action_space = None  # type: ignore[assignment]


class Unbounded(Good):
    action_space = spaces.Box(-np.inf, np.inf, (1,))


class NotAnEnv:
    pass


_ONLY = Good()


def same_twice():
    return _ONLY


def vector(num_envs, seeds):
    """Resets in the next step, as it says."""
    return SyncVectorEnv([Good] * num_envs, autoreset_mode=AutoresetMode.NEXT_STEP)


def same_step_vector(num_envs, seeds):
    return SyncVectorEnv([Good] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


class WithoutFinalObs(VectorWrapper):
    """Loses the last observation of truncated episodes."""

    def step(self, actions):
        *row, info = super().step(actions)
        return *row, {key: value for key, value in info.items() if "final" not in key}


def no_final_obs_vector(num_envs, seeds):
    return WithoutFinalObs(same_step_vector(num_envs, seeds))


def lying_vector(num_envs, seeds):
    """Resets in the same step and says that it does in the next."""
    env = same_step_vector(num_envs, seeds)
    env.metadata = {**env.metadata, "autoreset_mode": AutoresetMode.NEXT_STEP}
    return env


class ShortRepeat(RepeatObservation):
    """Ends an episode within the steps of a test."""

    def __init__(self, num_envs: int, seeds: list[int]) -> None:
        super().__init__(num_envs, seeds, episode_length=10)


class RewritingAdapter(ShortRepeat):
    """Hands out one array again and again."""

    def __init__(self, num_envs: int, seeds: list[int]) -> None:
        super().__init__(num_envs, seeds)
        self.obs = np.zeros(num_envs, np.int32)

    def step(self, action):
        output = super().step(action)
        self.obs[:] = output.obs
        return output._replace(obs=self.obs)


class Remembers(ShortRepeat):
    """Can be put back."""

    def state(self):
        return pickle.dumps((self._state, self._seed))

    def put_back(self, state):
        self._state, self._seed = pickle.loads(state)


class ForgetsEpisode(Remembers):
    def put_back(self, state):
        super().put_back(state)
        self._state = (self._state[0] + 1, self._state[1])


class SaysWhyNot(Remembers):
    def state(self):
        return "planted reason"


PID_FILE = "BROKEN_ENVS_PID_FILE"


class Hangs(Good):
    """Leaves a process behind, too."""

    def step(self, action):
        if self.t == 3:
            process = subprocess.Popen(["sleep", "600"])
            Path(os.environ[PID_FILE]).write_text(str(process.pid))
            time.sleep(600)
        return super().step(action)


class Aborts(Good):
    def close(self):
        sys.stderr.write("check failed: x > 0\n")
        sys.stderr.flush()
        os.abort()


class Exits(Good):
    def reset(self, *, seed=None, options=None):
        sys.exit(7)
