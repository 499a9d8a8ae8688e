"""Leagues in Kuhn poker, by exact NashConv: ``python -m benchmarks.studies.league_games``.

Players observe their seat, and so who began; in envpool's game they do not, and no policy without
memory comes below 0.06. The mixture of the history is the strategy of a player who draws a snapshot
before each game: the mean of behaviour weighted by the player's own chance to come where it is.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from gymnasium import spaces
from sebulba_league.config import LeagueConfig

import sebulba
from benchmarks.studies import games
from sebulba.agents.configs import PPOConfig, make_agent
from sebulba.configs.presets import PRESETS
from sebulba.envs import make_env_factory
from sebulba.envs.multi.envpool_games import PLAYER
from sebulba.envs.tree import OBSERVATION
from sebulba.policies.policy import Policy
from sebulba.types import EnvOutput


class SeatSeen:
    """A game of envpool for two players in which each also observes its seat."""

    def __init__(self, env: Any) -> None:
        """Take over ``env``."""
        self._env, self.num_envs = env, env.num_envs
        group = env.spec.groups[PLAYER]
        space = group.spec.observation_space
        seen: Any = space[OBSERVATION]
        wider = spaces.Box(0, 1, (seen.shape[0] + 2,), seen.dtype.type)
        one = dataclasses.replace(
            group.spec, observation_space=spaces.Dict({**space.spaces, OBSERVATION: wider})
        )
        groups = {PLAYER: dataclasses.replace(group, spec=one)}
        self.spec = dataclasses.replace(env.spec, groups=groups)

    def reset(self) -> EnvOutput:
        """Begin new games."""
        return self._with_seat(self._env.reset())

    def step(self, action: Any) -> EnvOutput:
        """Let the player move whose turn it is."""
        return self._with_seat(self._env.step(action))

    def fused(self) -> str:
        """Say why there is no JAX code."""
        return self._env.fused()

    def close(self) -> None:
        """Free the games."""
        self._env.close()

    def _with_seat(self, output: EnvOutput) -> EnvOutput:
        obs = output.obs[PLAYER]
        seen = obs[OBSERVATION]
        seat = np.broadcast_to(np.eye(2, dtype=seen.dtype), (*seen.shape[:2], 2))
        both = np.concatenate([seen, seat], axis=-1)
        return output._replace(obs={PLAYER: {**obs, OBSERVATION: both}})


def kuhn(num_envs: int, seeds: list[int]) -> SeatSeen:
    """Make games of Kuhn poker."""
    return SeatSeen(make_env_factory("KuhnPoker-v1")(num_envs, seeds))


RULES = games.KUHN._replace(
    observation=lambda hand, seat: np.concatenate(
        [games.KUHN.observation(hand, seat), np.eye(2, dtype=np.int8)[seat]]
    )
)


def mixture(
    rules: games.Poker, players: Sequence[dict[tuple, np.ndarray]], weights: Sequence[float]
) -> dict[tuple, np.ndarray]:
    """Return the behaviour of a player who draws one of ``players`` before each game.

    Kuhn 1953, "Extensive games and the problem of information": a mixture in sequence form.
    """
    mixed: dict[tuple, np.ndarray] = {}
    rest = [(hand, np.array([weights, weights], np.float64)) for hand in rules.deals]
    while rest:
        hand, reach = rest.pop()  # [seat, player]: the chance that its own actions lead here
        if hand.payoff is not None:
            continue
        key = hand.mover, *rules.seen(hand, hand.mover)
        own = np.stack([chances[key] for chances in players])
        total = reach[hand.mover] @ own
        mixed[key] = total / max(total.sum(), 1e-300)
        for action in rules.legal(hand):
            after = reach.copy()
            after[hand.mover] *= own[:, action]
            rest.append((rules.after(hand, action), after))
    return mixed


def nash_conv_of(rules: games.Poker, chances: dict[tuple, np.ndarray]) -> float:
    """Return the NashConv of a behaviour."""
    deals = [(hand, 1.0 / len(rules.deals)) for hand in rules.deals]
    return sum(games._best_reply(rules, seat, deals, chances) for seat in (0, 1))


def chances_of(rules: games.Poker, policy: Policy) -> dict[tuple, np.ndarray]:
    """Return the behaviour of a policy."""
    return games._chances(rules, games._of_policy(policy))


def curve(config: LeagueConfig, seed: int, env_steps: int, every: int) -> Iterator[dict[str, Any]]:
    """Train in Kuhn poker; yield NashConv of the last policy and of the history."""
    agent = make_agent(sebulba.env_spec(kuhn), config)
    player: Any = agent.player
    alone = player.members[PLAYER].agent
    options: Any = {"schedule": "lockstep", "seed": seed, "num_inferencers_per_device": 1}
    began = time.perf_counter()
    with sebulba.GymnasiumLoop(kuhn, agent, 128, **options) as loop:
        state = loop.new_state(seed, 32)
        while loop.counters.env_steps < env_steps:
            result = loop.run(state, every // (128 * 32), 32)
            state = result.state
            experience = jax.device_get(state.experience)
            rows = np.flatnonzero(experience.generation >= 0)
            history = [
                chances_of(
                    RULES,
                    Policy(alone, jax.tree.map(lambda x, r=r: x[r], experience.history[PLAYER])),
                )
                for r in rows
            ]
            last = chances_of(RULES, Policy(alone, result.acting_networks[PLAYER]))
            yield {
                "env_steps": loop.counters.env_steps,
                "seconds": round(time.perf_counter() - began, 1),
                "last": nash_conv_of(RULES, last),
                "history": nash_conv_of(
                    RULES, mixture(RULES, history, [1 / len(rows)] * len(rows))
                ),
                "snapshots": len(rows),
            }


def main() -> None:
    """Print a line for each point of each seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--env-steps", type=int, default=1_638_400)
    parser.add_argument("--every", type=int, default=204_800)
    parser.add_argument("--entropy", type=float, default=0.05)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--matchmaker", default="pfsp")
    parser.add_argument("--history", type=int, default=50)
    parser.add_argument("--snapshot-every", type=int, default=32_768)
    parser.add_argument("--lanes", type=int, nargs=2, default=(3, 1), help="history and mirrors")
    given = parser.parse_args()
    agent: Any = PRESETS["kuhn"].make().agent
    assert isinstance(agent, PPOConfig)
    agent = dataclasses.replace(
        agent,
        entropy_coefficient=given.entropy,
        learning_rate=given.learning_rate,
        epochs=given.epochs,
        normalize_advantages=False,
    )
    config = LeagueConfig(
        {"*": agent},
        history=given.history,
        snapshot_every=given.snapshot_every,
        rematch_every=8192,
        matchmaker=given.matchmaker,
        opponents=given.lanes[0],
        mirrors=given.lanes[1],
    )
    for seed in range(given.first_seed, given.first_seed + given.seeds):
        for point in curve(config, seed, given.env_steps, given.every):
            print(json.dumps({"seed": seed, **point}), flush=True)


if __name__ == "__main__":
    main()
