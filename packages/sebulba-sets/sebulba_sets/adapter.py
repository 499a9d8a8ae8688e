"""The vector environment of a set: it hides which environment a row is of, and keeps results."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from sebulba.envs.gymnasium_adapter import GymnasiumAdapter
from sebulba.envs.policy_view import View
from sebulba.envs.saving.sealed import seal, unseal
from sebulba.types import EnvOutput, EnvSpec
from sebulba_sets.set_env import ENV, LONE, WEIGHTS
from sebulba_sets.structures import Results, Structure


def spec_of_members(spec: EnvSpec, name: str) -> EnvSpec:
    """Return the spec of the environments in a set ``name``, given that of a ``SetEnv``."""
    parts: Any = spec.observation_space
    rest = {name: part for name, part in parts.spaces.items() if name != ENV}
    space = rest.get(LONE, spaces.Dict(rest))
    return dataclasses.replace(spec, observation_space=space, name=name, channels_first=None)


class Draws(NamedTuple):
    """Which environments of a set are drawn, and how."""

    names: Sequence[str]
    """Of those that may be."""
    structure: Structure
    """Their probabilities."""


class SetAdapter(View):
    """B rows, each of which draws an environment at each reset.

    Weights follow from the episodes of these rows alone. So in lockstep nothing depends on how fast
    other Inferencers are.
    """

    def __init__(
        self,
        env: GymnasiumAdapter,
        name: str,
        names: Sequence[str],
        drawn: Draws,
        played: Draws,
    ) -> None:
        """Take over ``env``, of ``SetEnv``.

        Args:
          name: Of the set.
          names: Of all environments, in their order.
          drawn: What training draws.
          played: What is drawn where a policy is played: the test split, if there is one.
        """
        super().__init__(env)  # type: ignore[arg-type]
        self.spec = spec_of_members(env.spec, name)
        self._all = {name: number for number, name in enumerate(names)}
        self._played = played
        self._returns = np.zeros(env.num_envs)
        self._given: list[float] = []
        self._draw(drawn)

    def _draw(self, draws: Draws) -> None:
        self.drawn, self.results = draws, Results(len(draws.names))
        self._places = {self._all[name]: place for place, name in enumerate(draws.names)}

    def as_played(self) -> SetAdapter:
        """Draw as evaluations do from now on, the first episodes included."""
        self._draw(self._played)
        return self

    @property
    def weights(self) -> np.ndarray:
        """The probability of each of ``drawn.names`` in the next draw."""
        return self.drawn.structure.weights(self.results)

    def reset(self) -> EnvOutput:
        self._give()
        return super().reset()

    def seen(self, output: EnvOutput) -> EnvOutput:
        obs: Any = dict(output.obs)
        numbers, ends = obs.pop(ENV), output.episode_end
        self._returns = np.where(output.is_first, 0.0, self._returns + output.unclipped_reward)
        if ends.any():
            for number, value in zip(numbers[ends], self._returns[ends], strict=True):
                self.results.add(self._places[int(number)], float(value))
            self._give()
        return output._replace(obs=obs.get(LONE, obs))

    def _give(self) -> None:
        """Have the next resets draw by the weights of now."""
        weights = [0.0] * len(self._all)
        for number, weight in zip(self._places, self.weights.tolist(), strict=True):
            weights[number] = weight
        if weights != self._given:
            self._env.use_reset_options({WEIGHTS: weights})
            self._given = weights

    def state(self) -> bytes | str:
        inner = self._env.state()
        if isinstance(inner, str):
            return inner
        content = inner, self.results.state(), self._returns
        return seal(content, of=self._who(), num_envs=self.num_envs)

    def put_back(self, state: bytes) -> None:
        """Go on from ``state``; raises EnvError where it does not fit."""
        inner, results, returns = unseal(state, of=self._who(), num_envs=self.num_envs)
        self.results, self._returns = Results.restored(results), np.array(returns)
        self._give()  # before the reset with which it begins
        self._env.put_back(inner)

    def _who(self) -> str:
        return f"the set {', '.join(self._all)}"[:1000]

    @staticmethod
    def metrics_of(adapters: Sequence[SetAdapter]) -> dict[str, float]:
        """Return the metrics of all vectors together.

        ``return/NAME``: mean of the last episodes, ``RECENT`` of each vector; ``episodes/NAME``:
        how many ended; ``weight/NAME``: mean probability.
        """
        metrics: dict[str, float] = {}
        weights = np.mean([one.weights for one in adapters], axis=0)
        for number, name in enumerate(adapters[0].drawn.names):
            recent = [*itertools.chain(*(one.results.recent(number) for one in adapters))]
            if recent:
                metrics[f"return/{name}"] = math.fsum(recent) / len(recent)
            episodes = sum(int(one.results.episodes[number]) for one in adapters)
            if episodes or weights[number]:
                metrics[f"episodes/{name}"] = episodes
                metrics[f"weight/{name}"] = float(weights[number])
        return metrics
