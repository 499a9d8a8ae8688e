"""Environments of one agent that say which actions are legal, and raise at any other."""

from __future__ import annotations

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from sebulba import Act, AgentNode, Obs

NUM_ACTIONS = 4
LENGTH = 5


class InfoMask(gymnasium.Env):
    """Pays for the legal action with the greatest number; the mask is in the info."""

    observation_space = spaces.Box(0, 1, (NUM_ACTIONS,), np.float32)
    action_space = spaces.Discrete(NUM_ACTIONS)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.draw()

    def draw(self):
        self.x = self.np_random.uniform(size=NUM_ACTIONS).astype(np.float32)
        self.mask = self.np_random.permutation([1, 1, 0, 0]).astype(np.int8)
        return self.shown()

    def shown(self):
        return self.x.copy(), {"action_mask": self.mask.copy()}

    def step(self, action):
        if not self.mask[action]:
            raise ValueError(f"illegal action {action}")
        reward = float(self.x[action] == self.x[self.mask > 0].max())
        self.t += 1
        obs, info = self.draw()
        return obs, reward, False, self.t == LENGTH, info


class ObsMask(InfoMask):
    """The same with the mask in the observation, as a Box."""

    observation_space = spaces.Dict(
        x=InfoMask.observation_space, action_mask=spaces.Box(0, 1, (NUM_ACTIONS,), np.int8)
    )

    def shown(self):
        return {"x": self.x.copy(), "action_mask": self.mask.copy()}, {}


class TreeMask(InfoMask):
    """The same by a tree, with a part that only the learner sees and a nested one."""

    tree = AgentNode(
        {
            "seen": {"x": Obs(InfoMask.observation_space)},
            "ok": Obs(spaces.MultiBinary(NUM_ACTIONS), legal_actions=True),
            "time": Obs(spaces.Discrete(LENGTH + 1), eval_only=True),
        },
        Act(spaces.Discrete(NUM_ACTIONS)),
    )
    observation_space = None
    action_space = None

    def shown(self):
        return {"seen": {"x": self.x.copy()}, "ok": self.mask.copy(), "time": self.t}, {}


class Parts(InfoMask):
    """Two entries of an action, each with a mask of its own."""

    action_space = spaces.MultiDiscrete([2, 3])

    def shown(self):
        self.mask = np.array([1, 0]), np.array([False, True, True])
        return self.x.copy(), {"action_mask": self.mask}

    def step(self, action):
        assert all(mask[one] for mask, one in zip(self.mask, action, strict=True))
        self.t += 1
        return self.shown()[0], 0.0, False, self.t == LENGTH, self.shown()[1]


class Stuck(ObsMask):
    """Allows nothing from the third step on, or at the end alone."""

    def __init__(self, at: int = 3) -> None:
        self.at = at

    def shown(self):
        if self.t >= self.at:
            self.mask[:] = 0
        return super().shown()


class JaxMask:
    """A JAX environment with a mask in the observation; it pays for any legal action."""

    observation_space = spaces.Dict(
        x=spaces.Box(0, 1, (2,), np.float32), action_mask=spaces.MultiBinary(NUM_ACTIONS)
    )
    action_space = spaces.Discrete(NUM_ACTIONS)

    def reset(self, key):
        return self.draw(key, 0)

    def draw(self, key, t):
        mask = jnp.arange(NUM_ACTIONS) % 2 == jax.random.randint(key, (), 0, 2)
        obs = {"x": jax.random.uniform(key, (2,)), "action_mask": mask}
        return obs, {"mask": mask, "t": jnp.int32(t)}

    def step(self, key, state, action):
        reward = jnp.where(state["mask"][action], 1.0, -100.0)
        obs, new = self.draw(key, state["t"] + 1)
        return obs, new, reward, False, new["t"] == LENGTH
