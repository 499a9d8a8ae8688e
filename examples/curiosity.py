"""A reward that chance never finds: random network distillation leads PPO to it.

    python examples/curiosity.py            # with and without bonuses, three seeds each

A vault has a lock of ``DIALS`` dials. Each has ``TURNS`` settings, of which one is right; a wrong
one sets the whole lock back. Only the open vault pays, so random settings find nothing: they open
it once in ``TURNS ** DIALS`` tries. An *auxiliary*, a member that acts nowhere, adds a bonus for
what was seldom observed, here for every dial that was not reached before.
"""

from __future__ import annotations

import argparse
from typing import Any

from gymnasium import spaces

import sebulba
from sebulba import Act, AgentNode, MultiAgentEnv, Obs, Population
from sebulba.agents.configs import (
    MultiAgentConfig,
    PPOConfig,
    RandomNetworkDistillationConfig,
    TorsoConfig,
    make_agent,
)

DIALS, TURNS = 16, 4
RIGHT = [(7 * dial + 3) % 5 % TURNS for dial in range(DIALS)]
"""The right setting of each dial."""


class Vault(MultiAgentEnv):
    """One agent at a lock; it sees how many dials are right, and has twice as many steps."""

    all_act = True
    tree = Population(
        {"thief": AgentNode(Obs(spaces.Discrete(DIALS + 1)), Act(spaces.Discrete(TURNS)))}
    )

    def reset(self, *, seed: int | None = None) -> Any:
        """Begin with the lock set back."""
        self.t = self.right = 0
        return {"thief": self.right}

    def step(self, actions: dict[str, Any]) -> Any:
        """Set the next dial."""
        self.t += 1
        self.right = self.right + 1 if actions["thief"] == RIGHT[self.right] else 0
        is_open = self.right == DIALS
        observations = {"thief": self.right}
        return observations, {"thief": float(is_open)}, is_open, self.t == 2 * DIALS


def train(seed: int, *, bonus: bool = True, num_cycles: int = 300, **given: Any) -> float:
    """Train PPO on the vault, and return how often its evaluation policy opens it."""
    torso = TorsoConfig(hidden_sizes=(32,))
    ppo = PPOConfig(
        torso=torso, learning_rate=3e-3, epochs=4, minibatches=2, entropy_coefficient=0.02
    )
    novelty = RandomNetworkDistillationConfig(torso=torso, learning_rate=1e-3, updates_per_cycle=4)
    config = MultiAgentConfig({"*": ppo}, auxiliary={"novelty": novelty} if bonus else {})
    agent = make_agent(sebulba.env_spec(Vault), config)
    # In lockstep with one Inferencer, a seed has the same result every time.
    options: dict[str, Any] = {"schedule": "lockstep", "num_inferencers_per_device": 1, **given}
    with sebulba.GymnasiumLoop(Vault, agent, num_envs=16, seed=seed, **options) as loop:
        result = loop.run(loop.new_state(seed, 32), num_cycles, 32)
    policy = sebulba.Policy(agent, result.acting_networks)
    return sebulba.evaluate(policy, Vault, num_episodes=20, num_envs=20).episode_return_mean


def main() -> None:
    """Print how often the vault is opened."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    for seed in range(parser.parse_args().seeds):
        with_bonus, without = train(seed), train(seed, bonus=False)
        print(f"seed {seed}: opened {with_bonus:.0%} with bonuses, {without:.0%} without")


if __name__ == "__main__":
    main()
