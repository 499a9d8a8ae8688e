"""Sebulba: train JAX agents on environments that are not JAX.

The names below are imported when they are first used, so that ``import sebulba`` touches no
device and costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sebulba.support.moved import find_moved_modules

if TYPE_CHECKING:
    from sebulba.agent import Agent, AgentState
    from sebulba.checkpoints.checkpointer import Checkpoint, Checkpointer
    from sebulba.cluster.hosts.join import join_hosts
    from sebulba.envs import env_spec, make_env_factory
    from sebulba.envs.jax_env import JaxEnv, MultiAgentJaxEnv
    from sebulba.envs.multi.multi_agent_env import MultiAgentEnv
    from sebulba.envs.tree import Act, AgentNode, Obs, Population, Repeat, describe
    from sebulba.errors import (
        ActionError,
        CheckpointError,
        EnvError,
        HangError,
        HostError,
        NotFiniteError,
        UsageError,
    )
    from sebulba.loops.evaluation import EvaluationPlayer, evaluate
    from sebulba.loops.evaluation_thread import Evaluator
    from sebulba.loops.gymnasium_loop import GymnasiumLoop, Result
    from sebulba.options import ClusterOptions, DistributedOptions, FaultOptions, LoopOptions
    from sebulba.policies.policy import Policy, load_policy, save_policy
    from sebulba.runs.api import resume, train
    from sebulba.runs.environment import load_env
    from sebulba.tools.check.python_api import check_agent, check_env
    from sebulba.types import (
        ActionOutput,
        EnvSpec,
        EnvStep,
        MultiAgentSpec,
        RunSpec,
        StepInfos,
        Trajectory,
    )

_ROOMS = {
    "sebulba.agent": ("Agent", "AgentState"),
    "sebulba.checkpoints.checkpointer": ("Checkpoint", "Checkpointer"),
    "sebulba.runs.api": ("resume", "train"),
    "sebulba.runs.environment": ("load_env",),
    "sebulba.tools.check.python_api": ("check_agent", "check_env"),
    "sebulba.envs": ("env_spec", "make_env_factory"),
    "sebulba.envs.jax_env": ("JaxEnv", "MultiAgentJaxEnv"),
    "sebulba.envs.multi.multi_agent_env": ("MultiAgentEnv",),
    "sebulba.envs.tree": ("Act", "AgentNode", "Obs", "Population", "Repeat", "describe"),
    "sebulba.errors": (
        "ActionError",
        "CheckpointError",
        "EnvError",
        "HangError",
        "HostError",
        "NotFiniteError",
        "UsageError",
    ),
    "sebulba.cluster.hosts.join": ("join_hosts",),
    "sebulba.loops.evaluation": ("EvaluationPlayer", "evaluate"),
    "sebulba.loops.evaluation_thread": ("Evaluator",),
    "sebulba.loops.gymnasium_loop": ("GymnasiumLoop", "Result"),
    "sebulba.options": ("ClusterOptions", "DistributedOptions", "FaultOptions", "LoopOptions"),
    "sebulba.policies.policy": ("Policy", "load_policy", "save_policy"),
    "sebulba.types": (
        "ActionOutput",
        "EnvSpec",
        "EnvStep",
        "MultiAgentSpec",
        "RunSpec",
        "StepInfos",
        "Trajectory",
    ),
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}

__all__ = [
    "Act",
    "ActionError",
    "ActionOutput",
    "Agent",
    "AgentNode",
    "AgentState",
    "Checkpoint",
    "CheckpointError",
    "Checkpointer",
    "ClusterOptions",
    "DistributedOptions",
    "EnvError",
    "EnvSpec",
    "EnvStep",
    "EvaluationPlayer",
    "Evaluator",
    "FaultOptions",
    "GymnasiumLoop",
    "HangError",
    "HostError",
    "JaxEnv",
    "LoopOptions",
    "MultiAgentEnv",
    "MultiAgentJaxEnv",
    "MultiAgentSpec",
    "NotFiniteError",
    "Obs",
    "Policy",
    "Population",
    "Repeat",
    "Result",
    "RunSpec",
    "StepInfos",
    "Trajectory",
    "UsageError",
    "check_agent",
    "check_env",
    "describe",
    "env_spec",
    "evaluate",
    "join_hosts",
    "load_env",
    "load_policy",
    "make_env_factory",
    "resume",
    "save_policy",
    "train",
]

find_moved_modules()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _ROOM_OF:
        raise AttributeError(f"module 'sebulba' has no attribute {name!r}")
    return getattr(importlib.import_module(_ROOM_OF[name]), name)


def _version() -> str:
    """Return the version that was installed; sources that were not installed have none."""
    from importlib import metadata

    try:
        return metadata.version("sebulba")
    except metadata.PackageNotFoundError:
        return "0+unknown"


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
