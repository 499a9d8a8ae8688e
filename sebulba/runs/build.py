"""From a configuration to agent, loop and evaluation: what commands build and benchmarks too."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import gymnasium

from sebulba.agent import Agent
from sebulba.agents.configs import MultiAgentConfig, OptimizerConfig, make_agent
from sebulba.agents.kernels.squashing import Squashing
from sebulba.agents.multi.multi_agent import MultiAgent
from sebulba.configs.experiment import EnvConfig, ExperimentConfig
from sebulba.envs import env_spec, make_env_factory
from sebulba.envs.wrappers import find_offsets
from sebulba.loops.evaluation import EvaluationPlayer
from sebulba.runs.folder import RunFolder
from sebulba.runs.wording import setting
from sebulba.types import EnvFactory, EnvSpec, MultiAgentSpec, PyTree, RunSpec

if TYPE_CHECKING:
    from sebulba.video.film import TrainingFilms


def build_envs(config: ExperimentConfig, env: EnvConfig) -> tuple[EnvFactory, Any, EnvConfig]:
    """Return the factory of the environments of a new run, their spec, and what it is made of.

    Where observations are normalised and the first has numbers of 64 bits that are far from 0, the
    environment gets a wrapper that subtracts them. Being in the configuration, it lasts.
    """
    factory: Any = make_env_factory(env.id, **env.factory_arguments())
    if not getattr(config.agent, "normalize_observations", False) or config.distributed.is_on:
        return factory, env_spec(factory), env
    found: list[str | None] = []
    spec = factory.spec(lambda one: found.append(find_offsets(one, config.seed % 2**31)))
    if not found or (wrapper := found[0]) is None:
        return factory, spec, env
    print(
        f"sebulba: observations have numbers far from 0, which float32 hardly tells apart; the run "
        f"subtracts them first: {setting('env.wrappers', repr(wrapper))}",
        flush=True,
    )
    env = dataclasses.replace(env, wrappers=(*env.wrappers, wrapper))
    factory = make_env_factory(env.id, **env.factory_arguments())
    return factory, env_spec(factory), env


def build_agent(config: ExperimentConfig, spec: EnvSpec) -> Agent:
    """Return the agent, told over how many updates its learning rate falls, if it does."""
    agent = make_agent(spec, config.agent, config.agent_class)
    if not config.anneal_learning_rate:
        return agent
    return make_agent(spec, config.agent_for(_num_updates(config, agent)), config.agent_class)


def _num_updates(config: ExperimentConfig, agent: Agent) -> int | dict[str, int]:
    """Return the updates of the run, or of the part of it over which the learning rate falls.

    Those of many agents are by their names in the configuration.
    """

    hosts = config.distributed.hosts
    agent = agent.for_run(RunSpec(config.num_envs, 1, config.steps_per_cycle, 1, hosts))

    def updates_of(one: Agent) -> int:
        return sum(map(one.num_off_policy_optims_per_cycle, range(1, config.annealed_cycles + 1)))

    if not isinstance(agent, MultiAgent) or not isinstance(config.agent, MultiAgentConfig):
        return updates_of(agent)
    members = [member.agent for member in agent.members.values() if member.trains]
    return {
        name: max((updates_of(one) for one in members if one.config == own), default=1)
        for name, own in config.agent.agents.items()
    }


def warn_of_rate_0(config: ExperimentConfig, agent: Agent) -> None:
    """Warn where a schedule that was set by hand is at 0 before the run ends."""
    optimizer = getattr(config.agent, "optimizer", None)
    if config.anneal_learning_rate or not isinstance(optimizer, OptimizerConfig):
        return
    if optimizer.schedule != "linear" or optimizer.share_after_schedule:
        return
    num_updates = _num_updates(config, agent)
    assert isinstance(num_updates, int)  # one agent has the optimizer
    if num_updates > optimizer.schedule_updates:
        warnings.warn(
            f"agent.optimizer.schedule_updates={optimizer.schedule_updates} is less than the "
            f"{num_updates:,} updates of the run, and the learning rate is 0 after it, so nothing "
            "is learned then; raise it, use --anneal-learning-rate instead, or set "
            "agent.optimizer.share_after_schedule",
            stacklevel=2,
        )


def notes_of_memory(config: ExperimentConfig) -> Iterator[str]:
    """Yield what users should know of memories between torso and heads of an actor-critic."""
    for one in config.members().values():
        size, minibatches = getattr(one, "lstm_size", 0), getattr(one, "minibatches", 0)
        if size and minibatches:
            shared = (
                ", which policy and value share" if hasattr(one, "separate_value_torso") else ""
            )
            yield (
                f"{getattr(one, 'memory', None) or 'lstm'} of {size} units{shared}; minibatches of "
                f"{config.num_envs // minibatches} of {config.num_envs} environments"
            )


def note_of_unbounded_actions(spec: EnvSpec | MultiAgentSpec) -> str | None:
    """Return what a user should know of components of the action that have no bounds."""
    if not isinstance(spec, EnvSpec) or not isinstance(spec.action_space, gymnasium.spaces.Box):
        return None
    squashing = Squashing(spec.action_space)
    if not (found := squashing.unbounded()):
        return None
    which = "all components" if len(found) == squashing.size else f"components {found[:8]}"
    return (
        f"{which} of the action lack a bound: the first actions are of size 1 or so; where the "
        "best are of another size, such as 50, only SAC finds them soon: give the space two bounds"
    )


def build_player(
    config: ExperimentConfig,
    factory: EnvFactory,
    agent: Agent,
    on_best: Callable[[PyTree], None],
) -> EvaluationPlayer | None:
    """Return what plays evaluations during training; None where the run has none."""
    if not config.eval_every_env_steps:
        return None
    return EvaluationPlayer(
        agent,
        factory,
        num_episodes=config.eval_episodes,
        num_envs=config.eval_num_envs,
        seed=config.seed,
        max_episode_steps=config.eval_max_episode_steps,
        on_best=on_best,
        max_env_restarts=config.env_restarts_allowed,
        inline=config.inline,
    )


def build_films(config: ExperimentConfig, folder: RunFolder, agent: Agent) -> TrainingFilms | None:
    """Return what films during training; None where the run makes no films."""
    if not config.video_every_env_steps:
        return None
    from sebulba.video.film import TrainingFilms
    from sebulba.video.rendering import drawing_factory

    return TrainingFilms(
        agent,
        drawing_factory(folder.chosen_env(config)),
        folder.videos,
        config.video_every_env_steps,
        seed=config.seed,
        max_episode_steps=config.eval_max_episode_steps,
    )
