"""A small correct agent, and agents with one mistake each."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from sebulba.agent import TRAJECTORY_SPEC, Agent
from sebulba.agents.kernels.optimizer import masked_mean
from sebulba.agents.kernels.returns import n_step_returns, transitions
from sebulba.types import ActionOutput


@dataclasses.dataclass(frozen=True)
class GoodConfig:
    """Hyper-parameters of the agents here."""

    learning_rate: float = 0.5
    discount: float = 0.5


class Good(Agent[GoodConfig]):
    """Advantage actor-critic, linear in the observation, with plain gradient descent."""

    def new_networks(self, key):
        size, actions = self.spec.observation_space.shape[0], self.spec.action_space.n
        return {"policy": jnp.zeros((size, actions)), "value": jnp.zeros((size, 1))}

    def new_opt(self, networks):
        return {"updates": jnp.int32(0)}

    def new_experience(self, key, networks, run):
        return {"trajectory": self.empty_trajectory(networks, run), "mean": jnp.zeros(())}

    def new_step_state(self, key, run, inferencer):
        return {"key": key, "row": jnp.zeros(run.num_envs, jnp.int32)}

    def step(self, networks, step_state, env_step, *, explore=True):
        logits = jnp.asarray(env_step.obs) @ networks["policy"]
        next_key, key = jax.random.split(step_state["key"])
        action = jax.random.categorical(key, logits) if explore else jnp.argmax(logits, -1)
        start = int(self.spec.action_space.start)
        action = (start + action).astype(self.spec.action_space.dtype)
        return ActionOutput(action), {"key": next_key, "row": step_state["row"] + 1}

    def update_experience(self, experience, initial, final, trajectory, networks):
        mean = jax.lax.pmean(trajectory.env_step.reward.mean(), "learner")
        return {"trajectory": trajectory, "mean": mean}

    def loss(self, networks, opt, experience, key):
        trajectory = experience["trajectory"]
        obs, step = trajectory.env_step.obs, self.transitions(trajectory)
        value = (obs @ networks["value"])[..., 0]
        returns = jax.vmap(n_step_returns, in_axes=1, out_axes=1)(value, step)
        advantage = returns - value[:-1]
        chosen = jax.nn.one_hot(
            trajectory.action - int(self.spec.action_space.start), self.spec.action_space.n
        )
        log_prob = (chosen * jax.nn.log_softmax(obs[:-1] @ networks["policy"])).sum(-1)
        policy_loss = self.mean(-jax.lax.stop_gradient(advantage) * log_prob, step.valid)
        value_loss = self.mean(jnp.square(advantage), step.valid)
        return policy_loss + value_loss, (experience, {"value_loss": value_loss})

    def transitions(self, trajectory):
        return transitions(trajectory, self.config.discount)

    def mean(self, x, valid):
        return masked_mean(x, valid)

    def optimize(self, networks, opt, grads):
        rate = self.config.learning_rate
        networks = jax.tree.map(lambda x, g: x - rate * g, networks, grads)
        return networks, {"updates": opt["updates"] + 1}

    def experience_spec(self):
        return {"trajectory": TRAJECTORY_SPEC, "mean": P()}


class Changed(Good):
    """Changes what a method of ``Good`` returns."""

    def changed_action(self, action: Any, env_step: Any) -> Any:
        return action

    def changed_output(self, output: Any, step_state: Any) -> Any:
        return output, step_state

    def step(self, networks, step_state, env_step, *, explore=True):
        output, after = super().step(networks, step_state, env_step, explore=explore)
        output = output._replace(action=self.changed_action(output.action, env_step))
        return self.changed_output(output, after)


# Actions and step state.


class ColumnOfActions(Changed):
    def changed_action(self, action, env_step):
        return action[:, None]


class FloatActions(Changed):
    def changed_action(self, action, env_step):
        return action.astype(jnp.float32)


class SmallActions(Changed):
    def changed_action(self, action, env_step):
        return action.astype(jnp.uint8)


class OneAction(Changed):
    def changed_action(self, action, env_step):
        return action[0]


class TupleOfActions(Changed):
    def changed_action(self, action, env_step):
        return tuple(action)


class NumpyActions(Changed):
    def changed_action(self, action, env_step):
        return np.zeros(action.shape)


class StepReturnsNothing(Changed):
    def changed_output(self, output, step_state):
        return None


class StepReturnsActionsOnly(Changed):
    def changed_output(self, output, step_state):
        return output.action


class StepReturnsThree(Changed):
    def changed_output(self, output, step_state):
        return output.action, output.extras, step_state


class PlainActions(Changed):
    def changed_output(self, output, step_state):
        return output.action, step_state


class ExtrasWithoutRows(Changed):
    def changed_output(self, output, step_state):
        return output._replace(extras={"scale": jnp.zeros(3)}), step_state


class ExtrasOfText(Changed):
    def changed_output(self, output, step_state):
        return output._replace(extras={"kind": "greedy"}), step_state


class LosesKey(Changed):
    def changed_output(self, output, step_state):
        return output, {"row": step_state["row"]}


class OtherContainers(Changed):
    def changed_output(self, output, step_state):
        return output, list(step_state.values())


class CountsInFloats(Changed):
    def changed_output(self, output, step_state):
        return output, {**step_state, "row": step_state["row"] + 1.0}


class SummedState(Changed):
    def changed_output(self, output, step_state):
        return output, {**step_state, "row": step_state["row"].sum()}


class RawKey(Changed):
    def changed_output(self, output, step_state):
        return output, {**step_state, "key": jax.random.key_data(step_state["key"])}


class NoExplore(Good):
    def step(self, networks, step_state, env_step):
        return super().step(networks, step_state, env_step)


# What JAX raises.


class Branches(Changed):
    def changed_action(self, action, env_step):
        return action if action[0] > 0 else action + 0


class CallsNumpy(Changed):
    def changed_action(self, action, env_step):
        return np.minimum(np.asarray(action), 1)


class TakesFloat(Good):
    def loss(self, networks, opt, experience, key):
        loss, (experience, _) = super().loss(networks, opt, experience, key)
        return loss, (experience, {"loss": float(loss)})


class IndexesByMask(Good):
    def loss(self, networks, opt, experience, key):
        env_step = experience["trajectory"].env_step
        return env_step.reward[env_step.valid].mean(), (experience, {})


class WrongShapes(Good):
    def loss(self, networks, opt, experience, key):
        obs = experience["trajectory"].env_step.obs
        return (networks["value"] @ obs).mean(), (experience, {})


class NotMapped(Good):
    def loss(self, networks, opt, experience, key):
        step = self.transitions(experience["trajectory"])
        value = (experience["trajectory"].env_step.obs @ networks["value"])[..., 0]
        return n_step_returns(value, step).mean(), (experience, {})


class NotDifferentiable(Good):
    def loss(self, networks, opt, experience, key):
        total = networks["policy"].sum() + networks["value"].sum()
        return jax.lax.while_loop(lambda x: x < 1, lambda x: x + 1, total), (experience, {})


class MeanInStep(Changed):
    def changed_action(self, action, env_step):
        return action + 0 * jax.lax.pmean(action, "learner")


class KeepsArray(Good):
    def update_experience(self, experience, initial, final, trajectory, networks):
        self.last = trajectory.env_step.reward
        return super().update_experience(experience, initial, final, trajectory, networks)


# Experience and specs.


class ForgetsToReturn(Good):
    def update_experience(self, experience, initial, final, trajectory, networks):
        experience["trajectory"] = trajectory


class ReturnsTrajectory(Good):
    def update_experience(self, experience, initial, final, trajectory, networks):
        return trajectory


class HalvesExperience(Good):
    def update_experience(self, experience, initial, final, trajectory, networks):
        row = trajectory.env_step._replace(obs=trajectory.env_step.obs.astype(jnp.bfloat16))
        return {**experience, "trajectory": trajectory._replace(env_step=row)}


class DropsLastRow(Good):
    def loss(self, networks, opt, experience, key):
        loss, (_, metrics) = super().loss(networks, opt, experience, key)
        trajectory = experience["trajectory"]
        row = jax.tree.map(lambda x: x[:-1], trajectory.env_step)
        return loss, ({**experience, "trajectory": trajectory._replace(env_step=row)}, metrics)


class Replicates(Good):
    def experience_spec(self):
        return P()


class SpecOfOtherTree(Good):
    def experience_spec(self):
        return {"trajectory": TRAJECTORY_SPEC}


class SplitsScalar(Good):
    def experience_spec(self):
        return {"trajectory": TRAJECTORY_SPEC, "mean": P("learner")}


class SplitsTime(Good):
    def experience_spec(self):
        return {"trajectory": TRAJECTORY_SPEC._replace(env_step=P("learner")), "mean": P()}


class UnknownAxis(Good):
    def experience_spec(self):
        return {"trajectory": P("envs"), "mean": P()}


class SplitsKey(Good):
    def step_state_spec(self):
        return P("learner")


class SpecOfOtherState(Good):
    def step_state_spec(self):
        return {"key": P()}


class ReplicatesRows(Good):
    def step_state_spec(self):
        return P()


# Loss and optimizer.


class ReturnsFromLoss(Good):
    def changed(self, loss: Any, experience: Any, metrics: Any) -> Any:
        return loss, (experience, metrics)

    def loss(self, networks, opt, experience, key):
        loss, (experience, metrics) = super().loss(networks, opt, experience, key)
        return self.changed(loss, experience, metrics)


class LossOfVector(ReturnsFromLoss):
    def changed(self, loss, experience, metrics):
        return loss * jnp.ones(3), (experience, metrics)


class LossOfInteger(ReturnsFromLoss):
    def changed(self, loss, experience, metrics):
        return loss.astype(jnp.int32), (experience, metrics)


class LossOfThree(ReturnsFromLoss):
    def changed(self, loss, experience, metrics):
        return loss, experience, metrics


class LossAlone(ReturnsFromLoss):
    def changed(self, loss, experience, metrics):
        return loss


class NoMetrics(ReturnsFromLoss):
    def changed(self, loss, experience, metrics):
        return loss, (experience, None)


class NoExperience(ReturnsFromLoss):
    def changed(self, loss, experience, metrics):
        return loss, metrics


class MetricOfVector(ReturnsFromLoss):
    def changed(self, loss, experience, metrics):
        return loss, (experience, {"returns": jnp.ones((6, 8))})


class MetricOfBool(ReturnsFromLoss):
    def changed(self, loss, experience, metrics):
        return loss, (experience, {"is_good": loss > 0})


class NetworksOnly(Good):
    def optimize(self, networks, opt, grads):
        return super().optimize(networks, opt, grads)[0]


class Swapped(Good):
    def optimize(self, networks, opt, grads):
        return super().optimize(networks, opt, grads)[::-1]


class CountsUpdatesInFloats(Good):
    def optimize(self, networks, opt, grads):
        return networks, {"updates": opt["updates"] + 0.5}


class IntegerNetworks(Good):
    def new_networks(self, key):
        return {**super().new_networks(key), "count": jnp.int32(0)}


class NoNetworks(Good):
    def new_networks(self, key):
        super().new_networks(key)


class FractionOfUpdate(Good):
    def num_off_policy_optims_per_cycle(self, cycle):
        return 0.5


# What shows only in check-agent.


class TwoNumbersOfUpdates(Good):
    def num_off_policy_optims_per_cycle(self, cycle):
        return 1 + cycle % 2


class DrawsByItsOwnKey(Good):
    """No mistake: each device learns from the half of its environments that its key draws."""

    def new_experience(self, key, networks, run):
        keys = jax.random.split(key, run.num_envs)
        return {**super().new_experience(key, networks, run), "keys": keys}

    def experience_spec(self):
        return {**super().experience_spec(), "keys": P("learner")}

    def update_experience(self, experience, *arguments):
        new = super().update_experience(experience, *arguments)
        return {**new, "keys": experience["keys"]}

    def loss(self, networks, opt, experience, key):
        drawn = jax.random.bernoulli(experience["keys"][0], 0.5, experience["keys"].shape)
        trajectory = experience["trajectory"]
        step = trajectory.env_step
        step = step._replace(obs=step.obs * drawn[None, :, None])
        given = {**experience, "trajectory": trajectory._replace(env_step=step)}
        loss, (_, metrics) = super().loss(networks, opt, given, key)
        return loss, (experience, metrics)


class NumpyNoise(Changed):
    def changed_action(self, action, env_step):
        return jnp.where(np.random.random(action.shape) < 0.5, action, 0)


class CountsOnSelf(Good):
    calls = 0

    def step(self, networks, step_state, env_step, *, explore=True):
        self.calls = self.calls + 1
        return super().step(networks, step_state, env_step, explore=explore)


class WeakScale(Good):
    def new_step_state(self, key, run, inferencer):
        return {**super().new_step_state(key, run, inferencer), "scale": jnp.float32(1)}

    def step(self, networks, step_state, env_step, *, explore=True):
        output, after = super().step(networks, step_state, env_step, explore=explore)
        return output, {**after, "scale": 1.0}


class UsesKeyTwice(Changed):
    def step(self, networks, step_state, env_step, *, explore=True):
        output, after = super().step(networks, step_state, env_step, explore=explore)
        noise = jax.random.uniform(step_state["key"], output.action.shape)
        return output._replace(extras=noise), after


class ReturnsUsedKey(Good):
    def step(self, networks, step_state, env_step, *, explore=True):
        output, after = super().step(networks, step_state, env_step, explore=explore)
        return output, {**after, "key": step_state["key"]}


class UsesKeyTwiceInLoss(ReturnsFromLoss):
    def loss(self, networks, opt, experience, key):
        noise = jax.random.normal(key) + jax.random.uniform(key)
        loss, aux = super().loss(networks, opt, experience, key)
        return loss + noise, aux


class AlwaysExplores(Good):
    def step(self, networks, step_state, env_step, *, explore=True):
        return super().step(networks, step_state, env_step, explore=True)


class LooksAtNothing(Changed):
    def changed_action(self, action, env_step):
        return jnp.zeros_like(action)


class UnusedParameter(Good):
    def new_networks(self, key):
        return {**super().new_networks(key), "target": jnp.ones(3)}


class StopsGradient(Good):
    def loss(self, networks, opt, experience, key):
        networks = {**networks, "value": jax.lax.stop_gradient(networks["value"])}
        return super().loss(networks, opt, experience, key)


class TimesZero(Good):
    def new_networks(self, key):
        return {**super().new_networks(key), "bias": jnp.ones(3)}

    def loss(self, networks, opt, experience, key):
        loss, aux = super().loss(networks, opt, experience, key)
        never = experience["trajectory"].env_step.reward.max() > 1e6
        return loss + jnp.where(never, networks["bias"].sum(), 0.0), aux


class NotANumber(Good):
    def mean(self, x, valid):
        return masked_mean(x, valid) + jnp.log(-jnp.square(x).sum() - 1.0)


class IgnoresValid(Good):
    def transitions(self, trajectory):
        step = super().transitions(trajectory)
        return step._replace(valid=jnp.ones_like(step.valid))


class DividesByOwnCount(Good):
    def mean(self, x, valid):
        return jnp.sum(jnp.where(valid, x, 0.0)) / jnp.maximum(valid.sum(), 1)


class SumsOverDevices(Good):
    def optimize(self, networks, opt, grads):
        return super().optimize(networks, opt, jax.lax.psum(grads, "learner"))

    def mean(self, x, valid):
        return jnp.where(valid, x, 0.0).sum() / valid.size * jax.lax.psum(1, "learner")


class MeanOfOwnShare(Good):
    def update_experience(self, experience, initial, final, trajectory, networks):
        return {"trajectory": trajectory, "mean": trajectory.env_step.reward.mean()}


class WrongSign(Good):
    def loss(self, networks, opt, experience, key):
        loss, (experience, metrics) = super().loss(networks, opt, experience, key)
        return 2 * metrics["value_loss"] - loss, (experience, metrics)


class IgnoresTermination(Good):
    def transitions(self, trajectory):
        step = super().transitions(trajectory)
        return step._replace(discount=jnp.full_like(step.discount, self.config.discount))


class AsksNumpyInCallback(Changed):
    def changed_action(self, action, env_step):
        def noise(action):
            return np.where(np.random.random(action.shape) < 0.5, action, 0)

        return jax.pure_callback(noise, action, action)


# Agents that cannot be made, and configurations.


class LacksLoss(Agent[GoodConfig]):
    new_networks, new_opt, new_experience = Good.new_networks, Good.new_opt, Good.new_experience
    new_step_state, step, optimize = Good.new_step_state, Good.step, Good.optimize
    update_experience = Good.update_experience


class NeedsImages(Good):
    def __init__(self, spec, config):
        super().__init__(spec, config)
        if len(spec.observation_space.shape) != 3:
            raise ValueError("observations must be images")


class NeverUpdates(Good):
    def num_off_policy_optims_per_cycle(self, cycle):
        return 0


class ForgetsSuper(Good):
    def __init__(self, spec, config):
        self.rate = config.learning_rate


@dataclasses.dataclass
class ThawedConfig:
    """A configuration that may change."""

    learning_rate: float = 0.5
    discount: float = 0.5


class PlainConfig:
    """A configuration that is no dataclass."""

    learning_rate = 0.5
    discount = 0.5


@dataclasses.dataclass(frozen=True)
class ListConfig(GoodConfig):
    """A configuration that cannot be hashed."""

    sizes: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class NeedsConfig(GoodConfig):
    """A configuration without defaults."""

    size: int = dataclasses.field(kw_only=True)


class NeedsSize(Good, Agent[NeedsConfig]):
    """An agent whose configuration has no defaults."""


def make_good(spec: Any) -> Agent:
    """Return the correct agent for these spaces."""
    return Good(spec, GoodConfig())
