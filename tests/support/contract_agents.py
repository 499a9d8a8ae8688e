"""Three agents that stress the agent contract; none claims to learn.

All take observations of a float Box of one dimension and Discrete actions.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from sebulba.agent import LEARNER_AXIS, TRAJECTORY_SPEC, Agent
from sebulba.agents.kernels.returns import n_step_returns, transitions
from sebulba.types import ActionOutput, EnvStep, PyTree, RunSpec, Trajectory

ENVS = P(None, LEARNER_AXIS)
"""Leaves whose second dimension is that of environments."""


class ContractAgent(Agent):
    """What the three share: sizes, key, plain SGD."""

    config: Any

    @property
    def sizes(self) -> tuple[int, int]:
        """Return numbers of observation components and of actions."""
        assert isinstance(self.spec.action_space, gymnasium.spaces.Discrete)
        assert self.spec.observation_space.shape is not None
        return self.spec.observation_space.shape[0], int(self.spec.action_space.n)

    def action(self, index: jax.Array) -> jax.Array:
        return (index + int(self.spec.action_space.start)).astype(jnp.int32)  # type: ignore[attr-defined]

    def index(self, trajectory: Trajectory) -> jax.Array:
        return trajectory.action - int(self.spec.action_space.start)  # type: ignore[attr-defined]

    def new_opt(self, networks: PyTree) -> PyTree:
        return {"updates": jnp.int32(0)}

    def new_step_state(self, key: jax.Array, run: RunSpec, inferencer: int) -> PyTree:
        return {"key": key}

    def optimize(self, networks: PyTree, opt: PyTree, grads: PyTree) -> tuple[PyTree, PyTree]:
        networks = jax.tree.map(lambda x, g: x - self.config.learning_rate * g, networks, grads)
        return networks, {**opt, "updates": opt["updates"] + 1}


def of_action(x: jax.Array, index: jax.Array) -> jax.Array:
    """Return ``x[..., index]``, ``[...]`` of ``[..., A]``."""
    return jnp.take_along_axis(x, index[..., None], axis=-1)[..., 0]


def mean_over_devices(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Return this device's part of the weighted mean over all devices."""
    count = jax.lax.pmean(weight.sum(dtype=jnp.float32), LEARNER_AXIS)
    return (x * weight).sum() / jnp.maximum(count, 1e-6)


@dataclasses.dataclass(frozen=True)
class MinibatchConfig:
    """Hyper-parameters of MinibatchAgent."""

    learning_rate: float = 0.01
    epochs: int = 2
    minibatches: int = 3


class MinibatchAgent(ContractAgent):
    """Epochs x minibatches; running observation statistics leave through the acting networks."""

    config_class = MinibatchConfig

    def new_networks(self, key: jax.Array) -> PyTree:
        size, actions = self.sizes
        return {"policy": 0.1 * jax.random.normal(key, (size, actions)), "value": jnp.zeros(size)}

    def new_experience(self, key: jax.Array, networks: PyTree, run: RunSpec) -> PyTree:
        size, cells = self.sizes[0], run.steps_per_cycle * run.num_envs
        stats = {"count": jnp.ones(()), "mean": jnp.zeros(size), "m2": jnp.ones(size)}
        acting = self.acting_networks(networks, {"stats": stats})
        return {
            "stats": stats,
            "trajectory": self.empty_trajectory(acting, run),
            "returns": jnp.zeros((run.steps_per_cycle, run.num_envs)),
            "order": jnp.zeros(cells, jnp.int32),
            "minibatch": jnp.int32(0),
        }

    def experience_spec(self) -> PyTree:
        split = {"trajectory": TRAJECTORY_SPEC, "returns": ENVS, "order": P(LEARNER_AXIS)}
        return {"stats": P(), "minibatch": P(), **split}

    def acting_networks(self, networks: PyTree, experience: PyTree) -> PyTree:
        return {"networks": networks, "stats": experience["stats"]}

    def normalize(self, obs: Any, stats: PyTree) -> jax.Array:
        def like(x: jax.Array) -> jax.Array:
            return x.reshape((1,) * (obs.ndim - 1) + x.shape)

        return (obs - like(stats["mean"])) / like(jnp.sqrt(stats["m2"] / stats["count"] + 1e-6))

    def step(
        self, networks: PyTree, step_state: PyTree, env_step: EnvStep, *, explore: bool = True
    ) -> tuple[ActionOutput, PyTree]:
        logits = self.normalize(env_step.obs, networks["stats"]) @ networks["networks"]["policy"]
        key, action_key = jax.random.split(step_state["key"])
        index = jax.random.categorical(action_key, logits) if explore else logits.argmax(-1)
        extras = {"log_prob": of_action(jax.nn.log_softmax(logits), index)}
        return ActionOutput(self.action(index), extras), {"key": key}

    def update_experience(
        self,
        experience: PyTree,
        initial_step_state: PyTree,
        final_step_state: PyTree,
        trajectory: Trajectory,
        networks: PyTree,
    ) -> PyTree:
        old, obs = experience["stats"], trajectory.env_step.obs[:-1]
        count = jax.lax.psum(float(obs.shape[0] * obs.shape[1]), LEARNER_AXIS)
        mean = jax.lax.psum(obs.sum((0, 1)), LEARNER_AXIS) / count
        m2 = jax.lax.psum(jnp.square(obs - mean[None, None]).sum((0, 1)), LEARNER_AXIS)
        share, delta = count / (old["count"] + count), mean - old["mean"]
        stats = {
            "count": old["count"] + count,
            "mean": old["mean"] + share * delta,
            "m2": old["m2"] + m2 + jnp.square(delta) * old["count"] * share,
        }
        value = self.normalize(trajectory.env_step.obs, stats) @ networks["value"]
        kernel = jax.vmap(n_step_returns, in_axes=1, out_axes=1)
        returns = kernel(value, transitions(trajectory, 0.9))
        return {**experience, "stats": stats, "trajectory": trajectory, "returns": returns}

    def loss(self, networks: PyTree, opt: PyTree, experience: PyTree, key: jax.Array) -> Any:
        cells = experience["order"].shape[0]
        in_epoch = experience["minibatch"] % self.config.minibatches
        fresh = jax.random.permutation(key, cells).astype(jnp.int32)
        order = jnp.where(in_epoch == 0, fresh, experience["order"])
        size = cells // self.config.minibatches
        chosen = jax.lax.dynamic_slice(order, (in_epoch * size,), (size,))

        def take(x: jax.Array) -> jax.Array:
            return x.reshape(cells, *x.shape[2:])[chosen]

        trajectory = experience["trajectory"]
        obs = take(self.normalize(trajectory.env_step.obs[:-1], experience["stats"]))
        returns, valid = take(experience["returns"]), take(transitions(trajectory, 0.9).valid)
        value = obs @ networks["value"]
        advantage = returns - jax.lax.stop_gradient(value)
        log_probs = jax.nn.log_softmax(obs @ networks["policy"])
        log_prob = of_action(log_probs, take(self.index(trajectory)))
        ratio = jnp.exp(log_prob - take(trajectory.extras["log_prob"]))
        clipped = jnp.clip(ratio, 0.8, 1.2)
        policy_loss = -jnp.minimum(ratio * advantage, clipped * advantage)
        loss = mean_over_devices(policy_loss + jnp.square(returns - value), valid)
        minibatch = experience["minibatch"] + 1
        metrics = {"observations": experience["stats"]["count"]}
        return loss, ({**experience, "order": order, "minibatch": minibatch}, metrics)

    def num_off_policy_optims_per_cycle(self, cycle: int) -> int:
        return self.config.epochs * self.config.minibatches


@dataclasses.dataclass(frozen=True)
class ReplayConfig:
    """Hyper-parameters of RecurrentReplayAgent."""

    learning_rate: float = 0.01
    capacity: int = 3
    batch_size: int = 8
    warm_up_cycles: int = 5
    updates_per_cycle: int = 2
    core_size: int = 6


class RecurrentReplayAgent(ContractAgent):
    """Prioritized replay of sequences that span two cycles, from stored recurrent states.

    A sequence is made of two trajectories of one Inferencer whose cycles follow each other; a gap
    makes none. Environment i of Inferencer j explores with a rate of its own.
    """

    config_class = ReplayConfig

    def new_networks(self, key: jax.Array) -> PyTree:
        (size, actions), core = self.sizes, self.config.core_size
        shapes = {"in": (size, core), "core": (core, core), "out": (core, actions)}
        keys = jax.random.split(key, len(shapes))
        return {n: 0.1 * jax.random.normal(k, shapes[n]) for n, k in zip(shapes, keys, strict=True)}

    def new_step_state(self, key: jax.Array, run: RunSpec, inferencer: int) -> PyTree:
        index = inferencer * run.num_envs + jnp.arange(run.num_envs)
        share = index / max(run.num_envs * run.num_inferencers - 1, 1)
        core = jnp.zeros((run.num_envs, self.config.core_size))
        return {"key": key, "core": core, "epsilon": 0.4 ** (1.0 + 7.0 * share)}

    def new_experience(self, key: jax.Array, networks: PyTree, run: RunSpec) -> PyTree:
        trajectory = self.empty_trajectory(networks, run)
        one = {"env_step": trajectory.env_step, "action": trajectory.action}
        core = jnp.zeros((run.num_envs, self.config.core_size))

        def stack(count: int, x: jax.Array) -> jax.Array:
            return jnp.zeros((count, *x.shape), x.dtype)

        last = jax.tree.map(lambda x: stack(run.num_inferencers, x), one)
        both = jax.tree.map(lambda x: stack(self.config.capacity, x), joined(one, one))
        return {
            "last": last,
            "last_core": stack(run.num_inferencers, core),
            "last_cycle": jnp.full(run.num_inferencers, -2, jnp.int32),
            "sequences": both,
            "cores": stack(self.config.capacity, core),
            "priority": jnp.zeros((self.config.capacity, run.num_envs)),
            "inserted": jnp.int32(0),
        }

    def experience_spec(self) -> PyTree:
        rows = P(None, None, LEARNER_AXIS)
        split = {"last_core": ENVS, "cores": ENVS, "priority": ENVS}
        return {"last": rows, "sequences": rows, "last_cycle": P(), "inserted": P(), **split}

    def unroll(self, networks: PyTree, core: jax.Array, env_step: EnvStep) -> Any:
        """Return (values of actions ``[T, B, A]``, recurrent state after the last row)."""

        def row(core: jax.Array, x: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            core = jnp.where(x[1][:, None], 0.0, core)
            core = jnp.tanh(x[0] @ networks["in"] + core @ networks["core"])
            return core, core @ networks["out"]

        core, values = jax.lax.scan(row, core, (env_step.obs, env_step.is_first))
        return values, core

    def step(
        self, networks: PyTree, step_state: PyTree, env_step: EnvStep, *, explore: bool = True
    ) -> tuple[ActionOutput, PyTree]:
        one = jax.tree.map(lambda x: jnp.asarray(x)[None], env_step)
        values, core = self.unroll(networks, step_state["core"], one)
        key, random_key, explore_key = jax.random.split(step_state["key"], 3)
        index = values[0].argmax(-1)
        if explore:
            other = jax.random.randint(random_key, index.shape, 0, self.sizes[1])
            explores = jax.random.uniform(explore_key, index.shape) < step_state["epsilon"]
            index = jnp.where(explores, other, index)
        return ActionOutput(self.action(index)), {**step_state, "key": key, "core": core}

    def update_experience(
        self,
        experience: PyTree,
        initial_step_state: PyTree,
        final_step_state: PyTree,
        trajectory: Trajectory,
        networks: PyTree,
    ) -> PyTree:
        j = trajectory.inferencer
        new = {"env_step": trajectory.env_step, "action": trajectory.action}
        last = jax.tree.map(lambda x: x[j], experience["last"])
        follows = trajectory.cycle == experience["last_cycle"][j] + 1
        slot = experience["inserted"] % self.config.capacity

        def insert(into: jax.Array, x: jax.Array) -> jax.Array:
            return into.at[slot].set(jnp.where(follows, x, into[slot]))

        sequence = joined(last, new)
        highest = jnp.maximum(jax.lax.pmax(experience["priority"].max(), LEARNER_AXIS), 1.0)
        one = jnp.full(experience["priority"].shape[1:], highest)
        core = initial_step_state["core"]
        return {
            "last": jax.tree.map(lambda into, x: into.at[j].set(x), experience["last"], new),
            "last_core": experience["last_core"].at[j].set(core),
            "last_cycle": experience["last_cycle"].at[j].set(trajectory.cycle),
            "sequences": jax.tree.map(insert, experience["sequences"], sequence),
            "cores": insert(experience["cores"], experience["last_core"][j]),
            "priority": insert(experience["priority"], one),
            "inserted": experience["inserted"] + follows,
        }

    def loss(self, networks: PyTree, opt: PyTree, experience: PyTree, key: jax.Array) -> Any:
        priority = experience["priority"]
        share = self.config.batch_size // int(jax.lax.psum(1, LEARNER_AXIS))
        logits = jnp.log(jnp.maximum(priority, 1e-9)).ravel()
        chosen = jax.random.categorical(key, logits, shape=(share,))
        slot, env = chosen // priority.shape[1], chosen % priority.shape[1]
        # [S, 2T+1, B, ...] at (slot, env) is [batch, 2T+1, ...]; time goes first.
        sequence = jax.tree.map(
            lambda x: jnp.moveaxis(x[slot, :, env], 0, 1), experience["sequences"]
        )
        env_step, zero = sequence["env_step"], jnp.int32(0)
        whole = Trajectory(env_step, sequence["action"], (), zero, zero, zero)
        t = transitions(whole, 0.9)
        values, _ = self.unroll(networks, experience["cores"][slot, env], env_step)
        target = t.reward + t.discount * jax.lax.stop_gradient(values[1:].max(-1))
        error = jnp.where(t.valid, target - of_action(values[:-1], self.index(whole)), 0.0)
        probability = jax.nn.softmax(logits)[chosen]
        weight = 1.0 / (probability * logits.size)
        weight = weight / jax.lax.pmax(weight.max(), LEARNER_AXIS)
        loss = mean_over_devices(jnp.square(error) * weight[None], t.valid)
        size = jax.lax.stop_gradient(jnp.abs(error)).mean(0) + 1e-3
        experience = {**experience, "priority": priority.at[slot, env].set(size)}
        metrics = {"inserted": experience["inserted"].astype(jnp.float32)}
        return loss, (experience, metrics)

    def num_off_policy_optims_per_cycle(self, cycle: int) -> int:
        return self.config.updates_per_cycle if cycle > self.config.warm_up_cycles else 0


def joined(first: PyTree, second: PyTree) -> PyTree:
    """Return two trajectories that follow each other as one; the row they share is there once."""

    def rows(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.concatenate([x[:-1], y])

    return {
        "env_step": jax.tree.map(rows, first["env_step"], second["env_step"]),
        "action": jnp.concatenate([first["action"], second["action"]]),
    }


@dataclasses.dataclass(frozen=True)
class TargetConfig:
    """Hyper-parameters of TargetNetworkAgent."""

    learning_rate: float = 0.01
    cycles_per_update: int = 3
    updates_per_target: int = 2


class TargetNetworkAgent(ContractAgent):
    """Q-learning on the last few trajectories together; target networks live in ``opt``."""

    config_class = TargetConfig

    def new_networks(self, key: jax.Array) -> PyTree:
        return {"values": 0.1 * jax.random.normal(key, self.sizes)}

    def new_opt(self, networks: PyTree) -> PyTree:
        return {"updates": jnp.int32(0), "target": jax.tree.map(jnp.copy, networks)}

    def new_experience(self, key: jax.Array, networks: PyTree, run: RunSpec) -> PyTree:
        count = self.config.cycles_per_update
        empty = self.empty_trajectory(networks, run)
        gathered = jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype), empty)
        return {"gathered": gathered, "taken": jnp.int32(0)}

    def experience_spec(self) -> PyTree:
        gathered = jax.tree.map(
            lambda spec: P(None, *spec), TRAJECTORY_SPEC, is_leaf=lambda x: isinstance(x, P)
        )
        return {"gathered": gathered, "taken": P()}

    def step(
        self, networks: PyTree, step_state: PyTree, env_step: EnvStep, *, explore: bool = True
    ) -> tuple[ActionOutput, PyTree]:
        values = env_step.obs @ networks["values"]
        key, action_key = jax.random.split(step_state["key"])
        index = jax.random.categorical(action_key, 5 * values) if explore else values.argmax(-1)
        return ActionOutput(self.action(index)), {"key": key}

    def update_experience(
        self,
        experience: PyTree,
        initial_step_state: PyTree,
        final_step_state: PyTree,
        trajectory: Trajectory,
        networks: PyTree,
    ) -> PyTree:
        slot = experience["taken"] % self.config.cycles_per_update
        gathered = jax.tree.map(
            lambda into, x: into.at[slot].set(x), experience["gathered"], trajectory
        )
        return {"gathered": gathered, "taken": experience["taken"] + 1}

    def loss(self, networks: PyTree, opt: PyTree, experience: PyTree, key: jax.Array) -> Any:
        gathered = experience["gathered"]
        t = jax.vmap(lambda trajectory: transitions(trajectory, 0.9))(gathered)
        obs = gathered.env_step.obs
        bootstrap = (obs[:, 1:] @ opt["target"]["values"]).max(-1)
        value = of_action(obs[:, :-1] @ networks["values"], self.index(gathered))
        error = t.reward + t.discount * bootstrap - value
        loss = mean_over_devices(jnp.square(error), t.valid)
        gap = sum(
            jnp.abs(a - b).sum()
            for a, b in zip(jax.tree.leaves(networks), jax.tree.leaves(opt["target"]), strict=True)
        )
        return loss, (experience, {"target_gap": gap})

    def optimize(self, networks: PyTree, opt: PyTree, grads: PyTree) -> tuple[PyTree, PyTree]:
        networks, opt = super().optimize(networks, opt, grads)
        due = opt["updates"] % self.config.updates_per_target == 0
        target = jax.tree.map(lambda t, x: jnp.where(due, x, t), opt["target"], networks)
        return networks, {**opt, "target": target}

    def num_off_policy_optims_per_cycle(self, cycle: int) -> int:
        return int(cycle % self.config.cycles_per_update == 0)


CONTRACT_AGENTS = (MinibatchAgent, RecurrentReplayAgent, TargetNetworkAgent)
"""Each is made as ``agent_class(spec, agent_class.config_class())``."""
