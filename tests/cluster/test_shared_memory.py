"""One recurrent policy for several agents: each has a memory of its own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

import sebulba
from sebulba import Act, AgentNode, Obs, Population
from sebulba.agents.configs import R2D2Config, ReplayConfig, TargetConfig, TorsoConfig, make_agent
from sebulba.inference.cycle import env_step_of

DELAY, LENGTH = 2, 10


class EachOther:
    """Each of two agents is shown its own symbol and the other's, new in every step.

    It is paid for saying what the *other* was shown two steps ago, so the two remember different
    things with one policy. The best return of an agent is 8 in 10 steps, that of guessing 4.
    """

    node = AgentNode(
        {"own": Obs(spaces.Discrete(2)), "others": Obs(spaces.Discrete(2))}, Act(spaces.Discrete(2))
    )
    tree = Population({"twin_0": node, "twin_1": node}, symmetric=True)

    def reset(self, key: Any) -> Any:
        """Begin an episode, with nothing to remember."""
        shown = jax.random.randint(key, (2,), 0, 2)
        state = {"shown": jnp.zeros((DELAY + 1, 2), jnp.int32).at[0].set(shown), "t": jnp.int32(0)}
        return self.observe(state), state

    def step(self, key: Any, state: Any, actions: Any) -> Any:
        """Pay for what was said, and show new symbols."""
        right = actions["twin"] == state["shown"][DELAY, ::-1]
        t = state["t"] + 1
        shown = jnp.roll(state["shown"], 1, axis=0).at[0].set(jax.random.randint(key, (2,), 0, 2))
        state = {"shown": shown, "t": t}
        reward = jnp.float32(right & (t > DELAY))
        return self.observe(state), state, {"twin": reward}, t == LENGTH, False

    def observe(self, state: Any) -> Any:
        shown = state["shown"][0]
        return {"twin": {"own": shown, "others": shown[::-1]}}


def returns_of(policy: Any, *, others_memory: bool = False) -> np.ndarray:
    """Return the returns of 16 episodes, ``[B, A]``.

    With ``others_memory`` the two swap memories in every other step, so that each finds in its own
    what the other kept there: all that it is asked for is 2 steps old.
    """
    num_envs = 16
    adapter = sebulba.make_env_factory(EachOther)(num_envs, list(range(100, 100 + num_envs)))
    output, state = adapter.reset(), policy.new_state(num_envs)
    total = np.zeros((num_envs, 2))
    for t in range(LENGTH):
        if others_memory and t % 2 == 0:
            state = jax.tree.map(lambda x: swapped(x, 2 * num_envs), state)
        action, state = policy.act(env_step_of(output, ()), state)
        output = adapter.step(action)
        total += output.reward["twin"]
    assert output.episode_end.all()
    adapter.close()
    return total


def swapped(x: Any, rows: int) -> Any:
    """Return rows of the two agents of each environment in each other's place."""
    is_rows = getattr(x, "ndim", 0) > 0 and x.shape[0] == rows
    return x.reshape(-1, 2, *x.shape[1:])[:, ::-1].reshape(x.shape) if is_rows else x


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_agents_with_one_policy_remember_what_each_other_was_shown():
    config = R2D2Config(
        learning_rate=3e-3,
        discount=0.5,
        num_steps=1,
        sequence_length=10,
        burn_in=0,
        lstm_size=24,
        rescale_values=False,
        head_hidden_sizes=(),
        torso=TorsoConfig(hidden_sizes=(16,)),
        replay=ReplayConfig(20_000, 64, updates_per_cycle=8, warm_up_cycles=4),
        target=TargetConfig(period=50),
    )
    agent = make_agent(sebulba.env_spec(EachOther), config)
    options: dict = {"num_inferencers_per_device": 1, "schedule": "lockstep"}
    options |= {"inference_devices": [0], "update_devices": [0]}
    with sebulba.GymnasiumLoop(EachOther, agent, 32, **options) as loop:
        result = loop.run(loop.new_state(0, LENGTH), 100, LENGTH)
    policy = sebulba.Policy(agent, result.acting_networks)
    assert returns_of(policy).min() >= LENGTH - DELAY - 1
    assert returns_of(policy).mean() > 0.98 * (LENGTH - DELAY)
    assert returns_of(policy, others_memory=True).mean() < 0.75 * (LENGTH - DELAY)
