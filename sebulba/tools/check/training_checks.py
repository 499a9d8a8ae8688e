"""The checks of ``check-agent`` that train: the same bits twice, probes, and a saved policy."""

from __future__ import annotations

import math
import tempfile
import time
from typing import Any

import jax
import numpy as np

from sebulba.agent import Agent
from sebulba.errors import UsageError
from sebulba.loops.gymnasium_loop import GymnasiumLoop
from sebulba.policies.policy import Policy, load_policy, save_policy
from sebulba.support.trees import named_leaves
from sebulba.tools.check.agent_driver import NUM_INFERENCERS
from sebulba.tools.check.agent_under_test import NUM_TRAINED, AgentSubject, trained_run
from sebulba.tools.check.checks import Finding, note, ok, problem
from sebulba.tools.check.probe_envs import Questions, wrong_answers

CYCLES_A_ROUND = 100
MOST_CYCLES = 1200
"""Trajectories after which an agent must answer the first questions."""
TIME_SHARE = 0.5
"""Share of the deadline that the probes may take."""
FIRST = ("action", "other", "over")
"""Questions that any agent can answer; the others need a value, or a memory."""
MEANINGS = {
    "action": "the better of two actions",
    "other": "the better action as the observation says",
    "over": "that nothing follows a termination",
    "later": "that what comes later counts",
    "sooner": "that what comes later counts less",
    "cut": "that a truncated episode would have gone on (needs a value)",
    "asked 0": "what was seen a step ago",
    "asked 1": "what was seen a step ago",
}


def loop_of(subject: AgentSubject, agent: Agent, env: Any) -> GymnasiumLoop:
    """Return a loop in which a seed decides everything."""
    first = jax.local_devices()[0]
    return GymnasiumLoop(
        env,
        agent,
        NUM_TRAINED,
        seed=subject.seed,
        schedule="lockstep",
        cycle="stepped",
        num_inferencers_per_device=NUM_INFERENCERS,
        inference_devices=[first],
        update_devices=[first],
    )


def check_lockstep(subject: AgentSubject) -> Finding:
    """Train twice from the same seed."""
    agent, env = subject.agent, subject.factory
    if env is None:
        try:
            agent, env = subject.probed(None)
        except Exception as error:
            return note(
                f"not tried: it does not take the probe environment ({error})",
                "name an environment that it takes: --env",
            )
    num_cycles = NUM_INFERENCERS * (2 + (subject.warm_up or 0) // NUM_INFERENCERS)
    with loop_of(subject, agent, env) as loop:
        state = loop.new_state(subject.seed, subject.num_steps)
        first, again = (loop.run(state, num_cycles, subject.num_steps) for _ in range(2))
    names, leaves = named_leaves(first.state._replace(step=()))
    others = jax.tree.leaves(again.state._replace(step=()))
    pairs = zip(names, leaves, others, strict=True)
    unlike = [name for name, a, b in pairs if not np.array_equal(a, b, equal_nan=True)]
    if unlike:
        return problem(
            f"the same seed twice, but other {', '.join(unlike[:3])}",
            "draw with jax.random only, and let no callback return something else",
        )
    updates = first.counters.updates
    return ok(f"the same bits twice after {updates} update{'' if updates == 1 else 's'}")


def check_probes(subject: AgentSubject) -> Finding:
    """Let it learn the answers to all questions at once."""
    if subject.warm_up is None:
        return note("not tried: no update is due")
    discount = getattr(subject.agent.config, "discount", None)
    try:
        agent, asked = subject.probed(discount if isinstance(discount, float) else None)
    except Exception as error:
        return note(f"not asked: it does not take the probe environment ({error})")
    wrong, env_steps = _learn(subject, agent, asked)
    names = asked.first_states or [f"target {i}" for i in range(4)]
    failed = {one.partition(":")[0] for one in wrong}
    learned = [name for name in names if name not in failed]
    if not wrong:
        return ok(f"learned {len(names)} of {len(names)} answers within {env_steps:,} env steps")
    meant = dict.fromkeys(MEANINGS.get(one, f"the action of a Box ({one})") for one in wrong)
    seen = f"not learned within {env_steps:,} env steps: {', '.join(meant)}"
    if learned:
        seen += f"; learned: {', '.join(learned)}"
    must = failed & {*FIRST, "target 0", "target 1"}
    remedy = "look at the signs of the loss, at discount and `last`, or raise the learning rate"
    return problem(seen, remedy) if must else note(seen, "fine where the algorithm cannot")


def _learn(subject: AgentSubject, agent: Agent, asked: Questions) -> tuple[list[str], int]:
    """Train until all answers are right; return the wrong ones, and environment steps."""
    deadline = time.monotonic() + TIME_SHARE * subject.timeout_s
    wrong, env_steps = asked.first_states, 0
    with loop_of(subject, agent, asked) as loop:
        state = loop.new_state(subject.seed, subject.num_steps)
        run = trained_run(subject.num_steps)
        rounds = math.ceil((MOST_CYCLES + (subject.warm_up or 0)) / CYCLES_A_ROUND)
        for _ in range(rounds):
            result = loop.run(state, CYCLES_A_ROUND, subject.num_steps)
            state, env_steps = result.state, result.counters.env_steps
            policy = Policy(agent, jax.device_get(result.acting_networks), run)
            wrong = wrong_answers(policy, asked.first_states)
            if not wrong or time.monotonic() > deadline:
                break
    return wrong, env_steps


def check_saving(subject: AgentSubject) -> Finding:
    """Save the policy, load it, and let it act."""
    agent, contract = subject.agent, subject.contract
    if type(agent).__module__ == "__main__":
        return note("not tried: only the script itself can load its agent", "move it to a module")
    run = trained_run(subject.num_steps)
    networks = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), contract.acting_networks)
    try:
        with tempfile.TemporaryDirectory() as folder:
            save_policy(folder, agent, networks, run)
            policy = load_policy(folder, trust=True)
        action, _ = policy(policy.spec.observation_space.sample())
    except (UsageError, TypeError, ValueError) as error:
        what, _, remedy = str(error).rpartition("; ")
        return problem(f"its policy cannot be saved and loaded: {what or error}", remedy)
    return ok(f"a policy is saved, loaded, and acts: {action!s:.40}")
