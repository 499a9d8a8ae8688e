"""A single agent as a population of one, for comparisons with itself."""

from __future__ import annotations

import functools
from typing import Any

import jax

import sebulba
from sebulba import Act, AgentNode, Obs, Population
from sebulba.agents.configs import make_agent
from sebulba.envs.tree import compile_tree
from sebulba.types import EnvAdapter, EnvOutput, FusedEnv

GROUP = "solo"


class Alone:
    """Shows the rows of an adapter as those of a group with one slot."""

    def __init__(self, env: EnvAdapter) -> None:
        self._env = env
        self.num_envs = env.num_envs
        spec = env.spec
        obs = Obs(spec.observation_space, frame_stack=spec.frame_stack)
        tree = Population({GROUP: AgentNode(obs, Act(spec.action_space))})
        self.spec = compile_tree(tree, name=spec.name)

    def reset(self) -> EnvOutput:
        return _apart(self._env.reset())

    def step(self, action: Any) -> EnvOutput:
        return _apart(self._env.step(action[GROUP][:, 0]))

    def fused(self) -> FusedEnv | str:
        inside = self._env.fused()
        if isinstance(inside, str):
            return inside
        inside_step = inside.step

        def step(state: Any, action: Any) -> Any:
            state, output, num_invalid = inside_step(state, action[GROUP][:, 0])
            return state, _apart(output), num_invalid

        return FusedEnv(inside.state, step)

    def state(self) -> bytes | str:
        return self._env.state()

    def put_back(self, state: bytes) -> None:
        self._env.put_back(state)

    def close(self) -> None:
        self._env.close()


def _apart(output: EnvOutput) -> EnvOutput:
    fields = output._asdict()
    del fields["acting"], fields["final"]
    end = fields.pop("episode_end")
    slots = {n: {GROUP: jax.tree.map(lambda x: x[:, None], x)} for n, x in fields.items()}
    return EnvOutput(**slots, episode_end=end)


def alone(env: Any) -> Any:
    """Return a factory of the same environments as populations of one."""
    factory = sebulba.make_env_factory(env)

    def make(num_envs: int, seeds: list[int]) -> Alone:
        return Alone(factory(num_envs, seeds))

    return make


def agent_alone(agent_class: Any, spec: Any, config: Any) -> Any:
    """Return the agent that the configuration of a single one makes for a population."""
    agent = make_agent(spec, config)
    assert {type(member.agent) for member in agent.members.values()} == {agent_class}
    return agent


def alone_class(agent_class: Any) -> Any:
    return functools.partial(agent_alone, agent_class)
