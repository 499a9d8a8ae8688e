"""Adapters in front of another, which show something else of what it returns."""

from __future__ import annotations

from typing import Any

import jax

from sebulba.types import EnvAdapter, EnvOutput, EnvSpec, FinalObs, FusedEnv, PyTree, without_parts


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
        """Begin new episodes in all environments."""
        return self.seen(self._env.reset())

    def step(self, action: Any) -> EnvOutput:
        """Act in all environments."""
        return self.seen(self._env.step(self.given(action)))

    def fused(self) -> FusedEnv | str:
        """Return the environment as JAX functions, or the reason why it has none."""
        fused = self._env.fused()
        if isinstance(fused, str):
            return fused

        def step(state: PyTree, action: PyTree) -> tuple[PyTree, EnvOutput, jax.Array]:
            state, output, num_invalid = fused.step(state, self.given(action))
            return state, self.seen(output), num_invalid

        return fused._replace(step=step)

    def close(self) -> None:
        """Close all environments."""
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
        self._hidden = env.spec.eval_only
        self.spec: EnvSpec = env.spec.policy_spec

    def seen(self, output: EnvOutput) -> EnvOutput:
        """Return the output without the hidden parts."""
        final = output.final
        if isinstance(final, FinalObs):
            final = final._replace(obs=without_parts(final.obs, self._hidden))
        return output._replace(obs=without_parts(output.obs, self._hidden), final=final)


def as_policy_sees(env: EnvAdapter) -> EnvAdapter:
    """Return ``env`` without parts that are ``eval_only``; itself where there are none."""
    return PolicyView(env) if getattr(env.spec, "eval_only", ()) else env  # type: ignore[return-value]
