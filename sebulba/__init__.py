"""Sebulba: train JAX agents on environments that are not JAX.

The names below are imported when they are first used, so that ``import sebulba`` touches no
device and costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sebulba.support.lazy import lazy_names
from sebulba.support.moved import find_moved_modules

if TYPE_CHECKING:
    from sebulba.agent import Agent as Agent
    from sebulba.agent import AgentState as AgentState
    from sebulba.checkpoints.checkpointer import Checkpoint as Checkpoint
    from sebulba.checkpoints.checkpointer import Checkpointer as Checkpointer
    from sebulba.cluster.hosts.join import join_hosts as join_hosts
    from sebulba.envs import env_spec as env_spec
    from sebulba.envs import make_env_factory as make_env_factory
    from sebulba.envs.jax_env import JaxEnv as JaxEnv
    from sebulba.envs.jax_env import MultiAgentJaxEnv as MultiAgentJaxEnv
    from sebulba.envs.multi.multi_agent_env import MultiAgentEnv as MultiAgentEnv
    from sebulba.envs.tree import Act as Act
    from sebulba.envs.tree import AgentNode as AgentNode
    from sebulba.envs.tree import Obs as Obs
    from sebulba.envs.tree import Population as Population
    from sebulba.envs.tree import Repeat as Repeat
    from sebulba.envs.tree import describe as describe
    from sebulba.errors import ActionError as ActionError
    from sebulba.errors import CheckpointError as CheckpointError
    from sebulba.errors import EnvError as EnvError
    from sebulba.errors import HangError as HangError
    from sebulba.errors import HostError as HostError
    from sebulba.errors import NotFiniteError as NotFiniteError
    from sebulba.errors import UsageError as UsageError
    from sebulba.loops.evaluation import EvaluationPlayer as EvaluationPlayer
    from sebulba.loops.evaluation import evaluate as evaluate
    from sebulba.loops.evaluation_thread import Evaluator as Evaluator
    from sebulba.loops.gymnasium_loop import GymnasiumLoop as GymnasiumLoop
    from sebulba.loops.gymnasium_loop import Result as Result
    from sebulba.options import ClusterOptions as ClusterOptions
    from sebulba.options import DistributedOptions as DistributedOptions
    from sebulba.options import FaultOptions as FaultOptions
    from sebulba.options import LoopOptions as LoopOptions
    from sebulba.policies.policy import Policy as Policy
    from sebulba.policies.policy import load_policy as load_policy
    from sebulba.policies.policy import save_policy as save_policy
    from sebulba.runs.api import resume as resume
    from sebulba.runs.api import train as train
    from sebulba.runs.environment import load_env as load_env
    from sebulba.tools.check.python_api import check_agent as check_agent
    from sebulba.tools.check.python_api import check_env as check_env
    from sebulba.types import ActionOutput as ActionOutput
    from sebulba.types import EnvSpec as EnvSpec
    from sebulba.types import EnvStep as EnvStep
    from sebulba.types import MultiAgentSpec as MultiAgentSpec
    from sebulba.types import RunSpec as RunSpec
    from sebulba.types import StepInfos as StepInfos
    from sebulba.types import Trajectory as Trajectory

_MODULES = {
    "sebulba.agent": "Agent AgentState",
    "sebulba.checkpoints.checkpointer": "Checkpoint Checkpointer",
    "sebulba.runs.api": "resume train",
    "sebulba.runs.environment": "load_env",
    "sebulba.tools.check.python_api": "check_agent check_env",
    "sebulba.envs": "env_spec make_env_factory",
    "sebulba.envs.jax_env": "JaxEnv MultiAgentJaxEnv",
    "sebulba.envs.multi.multi_agent_env": "MultiAgentEnv",
    "sebulba.envs.tree": "Act AgentNode Obs Population Repeat describe",
    "sebulba.errors": "ActionError CheckpointError EnvError HangError "
    "HostError NotFiniteError UsageError",
    "sebulba.cluster.hosts.join": "join_hosts",
    "sebulba.loops.evaluation": "EvaluationPlayer evaluate",
    "sebulba.loops.evaluation_thread": "Evaluator",
    "sebulba.loops.gymnasium_loop": "GymnasiumLoop Result",
    "sebulba.options": "ClusterOptions DistributedOptions FaultOptions LoopOptions",
    "sebulba.policies.policy": "Policy load_policy save_policy",
    "sebulba.types": "ActionOutput EnvSpec EnvStep MultiAgentSpec RunSpec StepInfos Trajectory",
}
__all__, _get = lazy_names("sebulba", _MODULES)

find_moved_modules()


def __getattr__(name: str) -> Any:
    return _version() if name == "__version__" else _get(name)


def _version() -> str:
    """Return the version that was installed; sources that were not installed have none."""
    from importlib import metadata

    try:
        return metadata.version("sebulba")
    except metadata.PackageNotFoundError:
        return "0+unknown"


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
