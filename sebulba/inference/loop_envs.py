"""The environments of a loop: one vector environment an Inferencer, each with seeds of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence

import jax

from sebulba.envs import seed_block
from sebulba.errors import UsageError
from sebulba.inference.cores import Cores, shares_of_cores, threads_run_on
from sebulba.types import EnvAdapter, EnvFactory, EnvSpec

FRESH_STREAM = 0xFFFFFFFE
"""Folded into the key of the seed to make the keys of what is made anew during a run. Without it
that of the second generation would be the step key of ``Agent.new_state``: splitting a key folds in
0, 1, 2 and so on."""


def cores_of_inferencers(
    factory: EnvFactory, num_inferencers: int, *, pin: bool
) -> list[Cores | None]:
    """Return on which cores each Inferencer and its environment run; None: any, all if not ``pin``.

    Only a factory of envpools says how many threads an environment has.
    """
    return shares_of_cores(num_inferencers, getattr(factory, "num_threads", None) if pin else None)


class LoopEnvs:
    """Makes the environments, and makes some anew with seeds that the run never had."""

    def __init__(
        self,
        factory: EnvFactory,
        spec: EnvSpec,
        seed: int,
        num_envs: int,
        cores: Sequence[Cores | None],
    ) -> None:
        """Make all; none stays open if one cannot be made.

        Args:
          factory: Makes one.
          spec: Of the agent, whose spaces they must have.
          seed: Of the run, an int32.
          num_envs: B, environments in each.
          cores: One an Inferencer: those that the threads of its environment run on; None: any.

        Raises:
          UsageError: Their spaces are not the agent's.
        """
        self._factory = factory
        self._spec = spec
        self._seed = seed
        self._num_envs = num_envs
        self.cores = tuple(cores)
        self.num_generations = 0
        """How often environments were made: each time has its own seeds."""
        self._envs: list[EnvAdapter] = []
        with contextlib.ExitStack() as close_again:
            for index in range(len(self.cores)):
                self._envs.append(self._make(index))
                close_again.callback(self._envs[-1].close)
            close_again.pop_all()
        self.num_generations = 1

    def __getitem__(self, inferencer: int) -> EnvAdapter:
        return self._envs[inferencer]

    def fresh_key(self) -> jax.Array:
        """Return the key of what is made anew beside the environments of the next generation."""
        stream = jax.random.fold_in(jax.random.key(self._seed), FRESH_STREAM)
        return jax.random.fold_in(stream, self.num_generations)

    def make_anew(self, inferencers: Collection[int]) -> None:
        """Make those of some Inferencers anew; who calls has closed the old ones."""
        for index in inferencers:
            self._envs[index] = self._make(index)
        self.num_generations += 1

    def _make(self, index: int) -> EnvAdapter:
        seeds = seed_block(
            self._seed,
            inferencer=index,
            num_inferencers=len(self.cores),
            num_envs=self._num_envs,
            generation=self.num_generations,
        )
        with threads_run_on(self.cores[index]):
            env = self._factory(self._num_envs, seeds)
        try:
            self._check_spaces(env)
        except UsageError:
            env.close()
            raise
        return env

    def _check_spaces(self, env: EnvAdapter) -> None:
        for name in ("observation_space", "action_space"):
            of_env, of_agent = getattr(env.spec, name), getattr(self._spec, name)
            if of_env != of_agent:
                raise UsageError(
                    f"{name}={of_env} of the environment is not the agent's {of_agent}; build the "
                    "agent with spec=sebulba.env_spec(env_factory) of the same factory"
                )

    def close(self, but: Collection[int] = ()) -> None:
        """Close all but those of some Inferencers."""
        with contextlib.ExitStack() as stack:  # one that raises does not keep the others open
            for index, env in enumerate(self._envs):
                if index not in but:
                    stack.callback(env.close)
