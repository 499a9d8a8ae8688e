"""What each agent has to learn, and within which budget. Free of JAX."""

from __future__ import annotations

from typing import Any

from sebulba.benchmarks.learn import Goal
from sebulba.configs.presets import PRESETS

_OFTEN = ("--metrics-interval-s", "0.1")
"""Options for presets that train 200,000 env steps in half a second."""

_SB3_ZOO = "Stable-Baselines3 with its zoo's settings"


def _reach(preset: str, env_steps: int, **more: Any) -> Goal:
    """Return the goal to reach the mean return that the preset names."""
    mean_return = PRESETS[preset].goal
    assert mean_return is not None, preset
    return Goal(preset, mean_return, env_steps, **more)


GOALS: dict[str, Goal] = {
    "cartpole": _reach(
        "cartpole",
        600_000,
        evaluated=False,
        options=_OFTEN,
        reference="a prototype: 250k to 450k",
    ),
    "pendulum": _reach("pendulum", 3_000_000, evaluated=False),
    "cartpole-ppo": _reach(
        "cartpole-ppo",
        100_000,
        evaluated=False,
        seconds=5,
        options=_OFTEN,
        reference=f"{_SB3_ZOO} on 2 cores: 61k to 70k env steps, 15 to 20 s",
    ),
    "cartpole-dqn": _reach("cartpole-dqn", 100_000, reference=f"{_SB3_ZOO}: about 50k"),
    "pendulum-sac": _reach("pendulum-sac", 20_000, reference=f"{_SB3_ZOO}: -176"),
    "pendulum-ddpg": _reach("pendulum-ddpg", 20_000, reference=f"{_SB3_ZOO}, SAC: -176"),
    "cartpole-r2d2": _reach(
        "cartpole-r2d2",
        2_000_000,
        seconds=900,
        reference="a memoryless V-trace prototype: 50 over 30M",
    ),
    "cartpole-r2d2-memoryless": Goal(
        "cartpole-r2d2", 150, 2_000_000, is_limit=True, options=("--agent.lstm-size", "0")
    ),
    "repeat-r2d2": _reach(
        "repeat-r2d2", 1_000_000, reference="56 is the best possible; at most 5 % less"
    ),
    "repeat-r2d2-zero-state": Goal(
        "repeat-r2d2",
        50.4,
        1_000_000,
        is_limit=True,
        options=("--agent.no-stored-state",),
        reference="10 % below the best possible",
    ),
    "halfcheetah-ppo": _reach(
        "halfcheetah-ppo", 1_000_000, evaluated=False, reference="CleanRL: about 1.4k"
    ),
    "halfcheetah-sac": _reach(
        "halfcheetah-sac",
        300_000,
        options=("--total-env-steps", "300000"),
        seeds=1,
        reference="CleanRL: 9.6k at 1M",
    ),
}
"""Goals by the NAME of the result, ``learn-NAME.json``; it is mostly that of a preset."""
