"""The environments of a loop: each Inferencer has one vector environment with its own seeds."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Collection, Sequence

import jax

from sebulba.envs import seed_block
from sebulba.envs.gymnasium_adapter import ONE_DRAWS
from sebulba.envs.policy_view import as_policy_sees
from sebulba.errors import EnvError, UsageError
from sebulba.inference.cores import Cores, run_on
from sebulba.inference.env_thread import CallingThread, EnvThread
from sebulba.inference.inferencer import name_of_thread
from sebulba.support.key_streams import FRESH_STREAM
from sebulba.types import EnvAdapter, EnvFactory, EnvSpec


class LoopEnvs:
    """Makes the environments, and replaces some by new ones with seeds the run has not used yet."""

    def __init__(
        self,
        factory: EnvFactory,
        spec: EnvSpec,
        seed: int,
        num_envs: int,
        cores: Sequence[Cores | None],
        *,
        inline: bool = False,
        host: int = 0,
        starting: Callable[[Callable[[], EnvAdapter]], EnvAdapter] = lambda make: make(),
    ) -> None:
        """Make all environments; if one cannot be made, close those that were.

        Args:
          spec: The agent's; the environments must have its spaces.
          seed: Seed of the run, an int32.
          cores: For each Inferencer, the cores that the threads of its environment may run on; None
            lets them run on any.
          inline: The main thread steps them.
          host: Which of the hosts this is that learn together; each has seeds and keys of its own.
          starting: Makes environments; it may try again.
        """
        self._factory = factory
        self._spec = spec
        self._seed = seed
        self._num_envs = num_envs
        self._host = host
        self._inline = inline
        self._may_draw = inline and len(cores) == 1
        self._cores = tuple(cores)
        self.threads = [self._new_thread(index) for index in range(len(cores))]
        """Where everything is done with the environments of each Inferencer."""
        self._begun_generations = threading.Lock()
        self.num_generations = 1
        """How often environments were made; each generation has its own seeds."""
        self._envs: list[EnvAdapter] = []
        self._generations = [0] * len(cores)
        with contextlib.ExitStack() as close_again:
            for index, thread in enumerate(self.threads):
                close_again.callback(thread.end)
                make = functools.partial(thread.call, self._make, index, 0)
                self._envs.append(starting(make))
                close_again.callback(self.close_of, index)
            close_again.pop_all()

    def _new_thread(self, index: int) -> EnvThread | CallingThread:
        return CallingThread() if self._inline else EnvThread(name_of_thread(index))

    def __getitem__(self, inferencer: int) -> EnvAdapter:
        return self._envs[inferencer]

    def leave_thread(self, inferencer: int) -> None:
        """Give an Inferencer whose environments hang another thread; the old one ends by itself."""
        self.threads[inferencer].end()
        self.threads[inferencer] = self._new_thread(inferencer)

    def close_of(self, inferencer: int) -> None:
        """Close the environments of an Inferencer."""
        self.threads[inferencer].call(self._envs[inferencer].close)

    def begin_generation(self) -> int:
        """Return the number of new environments, which no others have; from any thread."""
        with self._begun_generations:
            self.num_generations += 1
            return self.num_generations - 1

    def fresh_key(self, generation: int) -> jax.Array:
        """Return the key for step states that are made together with these environments."""
        stream = jax.random.fold_in(jax.random.key(self._seed), FRESH_STREAM)
        if self._host:
            stream = jax.random.fold_in(stream, self._host)
        return jax.random.fold_in(stream, generation)

    def make_anew(self, inferencers: Collection[int], generation: int) -> None:
        """Make new environments for some Inferencers; the caller has closed the old ones."""
        for index in inferencers:
            self._envs[index] = self.threads[index].call(self._make, index, generation)
            self._generations[index] = generation

    def make_again(self, inferencer: int) -> None:
        """Make the environments of an Inferencer, which has not begun, with the same seeds."""
        with contextlib.suppress(EnvError):  # their node was lost
            self.close_of(inferencer)
        self.make_anew([inferencer], self._generations[inferencer])

    def _make(self, index: int, generation: int) -> EnvAdapter:
        seeds = seed_block(
            self._seed,
            inferencer=index,
            num_inferencers=len(self._cores),
            num_envs=self._num_envs,
            host=self._host,
            generation=generation,
        )
        run_on(self._cores[index])  # this thread runs the Inferencer, too
        env = self._factory(self._num_envs, seeds)
        if not getattr(self._spec, "eval_only", ()):
            env = as_policy_sees(env)
        try:
            self._check_spaces(env)
            if getattr(env, "draws", False) and not self._may_draw:
                raise UsageError(f"env={env.spec.name!r}: {ONE_DRAWS}")
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
        if self._spec.final_obs and not env.spec.final_obs:
            raise UsageError(
                "final_obs=True of the agent's spec, and the environment gives no last "
                "observations (EnvSpec.final_obs=False); build the agent with "
                "spec=sebulba.env_spec(env_factory) of the same factory"
            )

    def close(self, but: Collection[int] = ()) -> None:
        """Close all environments except those of the Inferencers in ``but``."""
        with contextlib.ExitStack() as stack:  # closes the others even if one raises
            for index, thread in enumerate(self.threads):
                stack.callback(thread.end)
                if index not in but:
                    stack.callback(self.close_of, index)
