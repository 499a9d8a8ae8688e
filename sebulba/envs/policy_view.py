"""Adapters in front of another, which show something else of what it returns."""

from __future__ import annotations

from typing import Any

import jax

from sebulba.types import EnvAdapter, EnvOutput, EnvSpec, FusedEnv, PyTree, policy_row


class View:
    """An adapter in front of another; a subclass sets ``spec`` and says how outputs are seen."""

    spec: Any

    def __init__(self, env: EnvAdapter) -> None:
        """Take over ``env``."""
        self._env: Any = env
        self.num_envs = env.num_envs

    def __getattr__(self, name: str) -> Any:  # state, put_back, draws: what it may have
        if name == "_env":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._env, name)

    def reset(self) -> EnvOutput:
        return self.seen(self._env.reset())

    def step(self, action: Any) -> EnvOutput:
        return self.seen(self._env.step(self.given(action)))

    def fused(self) -> FusedEnv | str:
        fused = self._env.fused()
        if isinstance(fused, str):
            return fused

        def step(state: PyTree, action: PyTree) -> tuple[PyTree, EnvOutput, jax.Array]:
            state, output, num_invalid = fused.step(state, self.given(action))
            return state, self.seen(output), num_invalid

        return fused._replace(step=step)

    def close(self) -> None:
        self._env.close()

    def seen(self, output: EnvOutput) -> EnvOutput:
        """Return an output, of NumPy or JAX arrays, as this adapter shows it."""
        raise NotImplementedError

    def given(self, action: PyTree) -> PyTree:
        """Return an action as the environment behind takes it."""
        return action


class PolicyView(View):
    """Hides the parts that are ``eval_only``, which nobody then records or uploads."""

    def __init__(self, env: EnvAdapter) -> None:
        """Take over ``env``."""
        super().__init__(env)
        self.spec: EnvSpec = env.spec.policy_spec

    def seen(self, output: EnvOutput) -> EnvOutput:
        return policy_row(self._env.spec, output)


def as_played(env: EnvAdapter) -> EnvAdapter:
    """Return ``env`` as a policy plays it outside of training, if it has a method ``as_played``."""
    return as_policy_sees(env.as_played() if hasattr(env, "as_played") else env)


def as_policy_sees(env: EnvAdapter) -> EnvAdapter:
    """Return ``env`` without parts that are ``eval_only``; itself where there are none."""
    return PolicyView(env) if getattr(env.spec, "eval_only", ()) else env  # type: ignore[return-value]
