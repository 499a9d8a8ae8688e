"""Any Gymnasium environment behind a network that delays and loses messages.

``--env.id networked:CartPole-v1 --env.options.delay 5`` on the command line; around an environment
of your own, ``--env.wrappers "sebulba_networks.networked:Networked(delay=5)"``. Worker processes
import this module, which needs no JAX.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.spaces.utils import flatten, flatten_space

from sebulba.errors import UsageError, shown

MOST_STEPS = 10_000
"""Longest delay, and most past actions or observations that are observed."""
OBSERVATION, ACTIONS, AGE = "observation", "actions", "age"
"""Parts of the observation, if there is more to observe than the environment's own."""
Delay = int | tuple[int, int]
"""In steps: a number, or the least and the largest, between which each message draws its own."""


class _Message(NamedTuple):
    """A message on its way, or one that has arrived."""

    arrives: int
    """The step in which it arrives."""
    sent: int
    """The step in which it was sent."""
    content: Any
    """An observation or an action."""


class Link:
    """One way through the network.

    Messages may overtake each other; one that is older than one that has arrived is of no use.
    """

    def __init__(self, delay: tuple[int, int], loss: float, kept: int) -> None:
        """Make it; ``kept`` is how many of the newest messages that arrived are remembered."""
        self._delay, self._loss = delay, loss
        self._on_the_way: list[_Message] = []
        self.arrived: deque[_Message] = deque(maxlen=kept)
        self.num_sent = self.num_lost = 0

    def begin(self, content: Any) -> None:
        """Begin an episode with a message that is there without a delay."""
        self._on_the_way.clear()
        self.arrived.extend([_Message(0, 0, content)] * (self.arrived.maxlen or 0))
        self.num_sent = self.num_lost = 0

    def send(self, content: Any, now: int, random: np.random.Generator) -> None:
        """Send a message, which may be lost."""
        self.num_sent += 1
        least, largest = self._delay
        delay = least if least == largest else int(random.integers(least, largest + 1))
        if self._loss and random.random() < self._loss:
            self.num_lost += 1
            return
        self._on_the_way.append(_Message(now + delay, now, content))

    def receive(self, now: int) -> _Message:
        """Take in what arrives by ``now``; return the message that was sent last of all arrived."""
        due = [one for one in self._on_the_way if one.arrives <= now]
        self._on_the_way = [one for one in self._on_the_way if one.arrives > now]
        for one in sorted(due, key=lambda message: message.sent):
            if one.sent > self.arrived[-1].sent:
                self.arrived.append(one)
        return self.arrived[-1]


class Networked(gymnasium.Wrapper):
    """An environment whose observations and actions travel through a network.

    In every step the agent sees the newest observation that has arrived and sends an action. The
    environment takes the newest action that has arrived and goes on; it waits for nobody. The first
    observation of an episode is there at once. Until an action has arrived, the environment gets 0,
    or what is next to it. Rewards and ends are those of the environment's step. They do not travel.
    """

    def __init__(
        self,
        env: gymnasium.Env,
        *,
        delay: Delay = 0,
        action_delay: Delay = 0,
        loss: float = 0.0,
        own_actions: bool | int = False,
        observations: int = 1,
        ages: bool = False,
    ) -> None:
        """Put the network around ``env``.

        Args:
          env: Observes anything but what has the parts ``actions`` or ``age``.
          delay: Steps that an observation takes to the agent; a pair draws for each.
          action_delay: Steps that an action takes to the environment.
          loss: Probability that a message is lost, either way.
          own_actions: How many of the last actions that were sent the agent sees; True takes as
            many as may be on the way: the largest delays of both ways.
          observations: How many of the last observations that have arrived the agent sees.
          ages: Whether the agent sees how many steps ago each of these was sent.

        Raises:
          UsageError: A value breaks a rule.
        """
        super().__init__(env)
        there, back = _delays("delay", delay), _delays("action_delay", action_delay)
        if isinstance(loss, bool) or not isinstance(loss, int | float) or not 0 <= loss < 1:
            raise UsageError(f"loss={shown(loss)} must be a probability below 1; use 0.1")
        if own_actions is True:
            own_actions = there[1] + back[1]
        self._num_actions = _count("own_actions", own_actions, 0)
        num_seen = _count("observations", observations, 1)
        if not isinstance(ages, bool):
            raise UsageError(f"ages={shown(ages)} must be True or False")
        self._ages = ages
        self._up, self._down = Link(there, loss, num_seen), Link(back, loss, 1)
        self._idle = _idle(env.action_space)
        self._own: deque[np.ndarray] = deque(maxlen=self._num_actions)
        self._now = 0
        self._random = np.random.default_rng()
        self._set_space(num_seen)

    def _set_space(self, num_seen: int) -> None:
        """Add the parts that are observed in addition; without any, the space stays as it is."""
        inner = self.env.observation_space
        added: dict[str, spaces.Space] = {}
        if num_seen > 1:
            inner = spaces.Tuple([inner] * num_seen)
        if self._num_actions:
            flat = flatten_space(self.env.action_space)
            assert isinstance(flat, spaces.Box)
            low = np.tile(np.minimum(flat.low, 0), self._num_actions).astype(np.float32)
            high = np.tile(np.maximum(flat.high, 0), self._num_actions).astype(np.float32)
            added[ACTIONS] = spaces.Box(low, high)
        if self._ages:
            added[AGE] = spaces.Box(0, np.inf, (num_seen,), np.float32)
        self._is_plain = not added
        if added:
            inner = spaces.Dict({OBSERVATION: inner, **added})
        self.observation_space = inner

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; ``seed`` decides the delays and losses, too."""
        if seed is not None:
            self._random = np.random.default_rng([seed, 1])
        obs, info = self.env.reset(seed=seed, options=options)
        self._now = 0
        self._up.begin(copy.deepcopy(obs))
        self._down.begin(self._idle)
        nothing = np.zeros_like(flatten(self.env.action_space, self._idle), np.float32)
        self._own.extend([nothing] * self._num_actions)
        return self._seen(), {**info, "network": self._told()}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Send an action, and let the environment take one that has arrived."""
        if self._num_actions:
            self._own.append(np.asarray(flatten(self.env.action_space, action), np.float32))
        self._down.send(action, self._now + 1, self._random)
        given = self._down.receive(self._now + 1).content
        obs, reward, terminated, truncated, info = self.env.step(given)
        self._now += 1
        self._up.send(copy.deepcopy(obs), self._now, self._random)
        return self._seen(), reward, terminated, truncated, {**info, "network": self._told()}

    def _seen(self) -> Any:
        self._up.receive(self._now)
        arrived = self._up.arrived
        contents = tuple(copy.deepcopy(one.content) for one in arrived)  # it may be seen again
        obs = contents[0] if len(contents) == 1 else contents
        if self._is_plain:
            return obs
        seen = {OBSERVATION: obs}
        if self._num_actions:
            seen[ACTIONS] = np.concatenate(self._own)
        if self._ages:
            seen[AGE] = np.array([self._now - one.sent for one in arrived], np.float32)
        return seen

    def _told(self) -> dict[str, int]:
        """Return what a step tells of the network."""
        links = (self._up, self._down)
        return {
            "age": self._now - self._up.arrived[-1].sent,
            "sent": sum(link.num_sent for link in links),
            "lost": sum(link.num_lost for link in links),
        }


def _delays(name: str, value: Any) -> tuple[int, int]:
    """Return the least and the largest delay."""
    pair = (value, value) if not isinstance(value, tuple | list) else tuple(value)
    are_counts = all(type(one) is int and 0 <= one <= MOST_STEPS for one in pair)
    if len(pair) != 2 or not are_counts or pair[0] > pair[1]:
        raise UsageError(
            f"{name}={shown(value)} must be a number of steps from 0 to {MOST_STEPS:,}, or the "
            "least and the largest; use 5 or (3, 8)"
        )
    return pair


def _count(name: str, value: Any, least: int) -> int:
    if value is False and least == 0:
        return 0
    if type(value) is not int or not least <= value <= MOST_STEPS:
        raise UsageError(
            f"{name}={shown(value)} must be a whole number from {least} to {MOST_STEPS:,}; use 4"
        )
    return value


def _idle(space: spaces.Space) -> Any:
    """Return the action of an environment that no action has reached yet."""
    if isinstance(space, spaces.Discrete):
        return space.start
    if isinstance(space, spaces.MultiDiscrete):
        return np.array(space.start)
    if isinstance(space, spaces.Box):
        return np.clip(np.zeros(space.shape, space.dtype), space.low, space.high)
    if isinstance(space, spaces.MultiBinary):
        return np.zeros(space.shape, space.dtype)
    raise UsageError(
        f"the action space {space} cannot travel through a network here; use a Box, a Discrete, a "
        "MultiDiscrete or a MultiBinary"
    )


@dataclasses.dataclass(frozen=True)
class _Maker:
    """Makes a networked environment of an id of Gymnasium."""

    id: str
    """In Gymnasium's registry."""

    def __call__(self, **options: Any) -> gymnasium.Env:
        """Make it; options that are not of the network are those of ``gymnasium.make``."""
        names = Networked.__init__.__kwdefaults__ or ()
        own = {name: options.pop(name) for name in names if name in options}
        try:
            env = gymnasium.make(self.id, disable_env_checker=True, **options)
        except (gymnasium.error.Error, TypeError) as error:
            raise UsageError(f"env='networked:{self.id}': {error}") from error
        return Networked(env, **own)


class _Environments(Mapping[str, _Maker]):
    """Every id of Gymnasium.

    An id with a colon is none: Gymnasium would import the module before the colon without asking.
    """

    remedy = (
        "; around an environment of another package, use --env.id MODULE:ID --env.wrappers "
        '"sebulba_networks.networked:Networked(delay=5)"'
    )
    """Said where a name is none of these."""

    def __getitem__(self, name: str) -> _Maker:
        if name not in gymnasium.registry:
            raise KeyError(name)
        return _Maker(name)

    def __iter__(self) -> Iterator[str]:
        return iter(gymnasium.registry)

    def __len__(self) -> int:
        return len(gymnasium.registry)


ENVIRONMENTS = _Environments()
"""What the entry point ``networked`` of ``sebulba.environments`` names."""
