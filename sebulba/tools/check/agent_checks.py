"""The checks of ``check-agent``, each of which looks at one thing and says what it saw."""

from __future__ import annotations

import dataclasses
import re
import traceback
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from sebulba.agent import Agent
from sebulba.errors import UsageError, describe_error, is_installed
from sebulba.loops.agent_contract import Contract
from sebulba.runs.jax_setup import configure_jax
from sebulba.support.trees import named_leaves
from sebulba.tools.check import training_checks
from sebulba.tools.check.agent_driver import (
    differs_by_device,
    named_specs,
    replicated_leaves,
    with_other_actions,
    with_other_rewards,
)
from sebulba.tools.check.agent_under_test import DEVICES, MOST_WARM_UP, AgentSubject, feed
from sebulba.tools.check.checks import Check, Finding, checks_of, note, ok, problem
from sebulba.types import PyTree

RUNS = ("state", "step", "update_experience", "loss", "optimize", "updates due")
"""Checks without whose success nothing can be run."""
NOT_UPDATED = "not tried: no update is due"


def checks(agent: Any, arguments: dict[str, Any]) -> list[Check]:
    """Return the checks of an agent, for a process of their own, whose CPU is split for them; the
    arguments are those of ``AgentSubject``."""
    configure_jax(num_cpu_devices=DEVICES)
    return suite(AgentSubject(agent, **arguments))


def suite(subject: AgentSubject) -> list[Check]:
    """Return the checks of ``subject``, each after those that it needs."""

    return checks_of(
        subject,
        ("making", check_making),
        ("config", check_config, "making"),
        ("state", check_state, "making"),
        ("step", check_step, "state"),
        ("specs", check_specs, "step"),
        ("update_experience", check_update_experience, "step", "specs"),
        ("loss", check_loss, "update_experience"),
        ("optimize", check_optimize, "loss"),
        ("updates due", check_updates_due, "making"),
        ("purity", check_purity, "optimize"),
        ("keys", check_keys, "optimize"),
        ("explore", check_explore, "step"),
        ("gradients", check_gradients, *RUNS),
        ("valid", check_valid, *RUNS),
        ("devices", check_devices, *RUNS),
        ("lockstep", training_checks.check_lockstep, *RUNS),
        ("probes", training_checks.check_probes, "lockstep"),
        ("saving", training_checks.check_saving, *RUNS),
    )


# What it is.


def check_making(subject: AgentSubject) -> Finding:
    """Make the agent, and find sizes that it takes."""
    try:
        agent, spec = subject.agent, subject.agent.spec
        where = spec.name or "its spaces"
        return ok(
            f"{type(agent).__name__} for {where}, {spec.observation_space} -> "
            f"{spec.action_space}; steps_per_cycle={subject.num_steps}"
        )
    except Exception as error:
        remedy = "repair it, or name an environment that it takes (--env), or a configuration"
        return problem(describe_error(error), remedy)


def check_config(subject: AgentSubject) -> Finding:
    """Look whether hyper-parameters are a frozen dataclass."""
    config = subject.agent.config
    config_class: Any = type(config)
    name = config_class.__name__
    remedy = "make it a @dataclasses.dataclass(frozen=True) of numbers, text and tuples"
    if not dataclasses.is_dataclass(config):
        return problem(f"{name} is no dataclass, so it cannot be saved", remedy)
    if not config_class.__dataclass_params__.frozen:
        return problem(f"{name} is not frozen: a change would not reach compiled programs", remedy)
    try:
        hash(config)
    except TypeError as error:
        return problem(f"{name} cannot be hashed ({error})", remedy)
    return ok(f"{name}, frozen")


# The contract, by shapes. What breaks it raises UsageError, which the report shows.


def _keeps(method: Callable[[Contract], Any], shown: str) -> Callable[[AgentSubject], Finding]:
    def check(subject: AgentSubject) -> Finding:
        try:
            method(subject.contract)
        except UsageError as error:
            return _problem_of(error)
        return ok(shown)

    return check


def _problem_of(error: UsageError) -> Finding:
    what, _, remedy = str(error).rpartition("; ")
    return problem(what, remedy)


check_state = _keeps(
    lambda contract: (contract.networks, contract.opt, contract.step_state),
    "networks, opt and step state are trees of arrays",
)
check_step = _keeps(
    lambda contract: (contract.step, contract.exploit),
    "returns actions of the space, and a step state as it came in",
)
check_update_experience = _keeps(
    lambda contract: contract.updated_experience, "returns an experience as it came in"
)
check_loss = _keeps(
    lambda contract: contract.grads, "returns a scalar, an experience as it came in, and metrics"
)
check_optimize = _keeps(
    lambda contract: contract.check_optimize(), "returns networks and opt as they came in"
)


_check_experience_spec = _keeps(
    lambda contract: (contract.experience, contract.local_experience),
    f"experience_spec splits the experience over {DEVICES} devices",
)


def check_specs(subject: AgentSubject) -> list[Finding]:
    """Look whether specs fit their trees, and split what has a row for each environment."""
    found, shapes = [_check_experience_spec(subject)], subject.contract.step_state
    try:
        _ = subject.contract.local_step_state
    except UsageError as error:
        return [*found, _problem_of(error)]
    if type(subject.agent).shard_step_state is not Agent.shard_step_state:
        return found
    by_shape = dict(named_specs(Agent.step_state_spec(subject.agent), shapes))
    for name, spec in named_specs(subject.agent.step_state_spec(), shapes):
        if any(spec) != any(by_shape[name]):
            has = "has" if any(by_shape[name]) else "does not have"
            wrong = problem(
                f"step_state_spec says {'to split' if any(spec) else 'P() for'} {name}, which "
                f"{has} a row for each environment",
                "use P('learner') for [B, ...] and P() for all else, or do not override it",
            )
            return [*found, wrong]
    return [*found, ok("step_state_spec splits what has a row for each environment")]


def check_updates_due(subject: AgentSubject) -> Finding:
    """Look at the numbers of updates after the first trajectories."""
    try:
        due = [subject.contract.check_due(cycle) for cycle in range(1, 101)]
    except UsageError as error:
        return _problem_of(error)
    updates = [number for number in due if number]
    counts = sorted(set(updates[1:] or updates))  # the first may make up for those before it
    if due != [subject.contract.check_due(cycle) for cycle in range(1, 101)]:
        return problem(
            "num_off_policy_optims_per_cycle gives another number when it is asked again",
            "compute it from the cycle and the config alone",
        )
    if len(counts) > 1:
        return problem(
            f"num_off_policy_optims_per_cycle gives {counts} in one run; each is compiled",
            "give 0 and one other number only",
        )
    if subject.warm_up is None:
        return note(
            f"no update is due after any of {MOST_WARM_UP} trajectories, so none was tried",
            "give a config with a shorter warm-up: --config",
        )
    return ok(f"{counts[0] if counts else 0}, from trajectory {subject.warm_up + 1} on")


# The programs.


def check_purity(subject: AgentSubject) -> Finding:
    """Trace everything again: a pure function gives the same program."""
    first = subject.contract
    second = Contract(subject.agent, first.run)
    agent, kept = second.agent, dict(vars(second.agent))
    second.check_acting()
    second.check_learning()
    changed = [name for name, value in vars(agent).items() if kept.get(name) is not value]
    for method, program in first.programs.items():
        if _text(program) != _text(second.programs[method]):
            return problem(
                f"{method} gives another program when it is traced again",
                "draw with jax.random and the key that is passed; let nothing depend on NumPy's "
                "or Python's randomness, on time, or on counts kept on self",
            )
    if changed:
        return problem(
            f"methods write self.{', self.'.join(changed)}, and a compiled one does so once only",
            "keep it in the state; in __init__ what never changes",
        )
    names, leaves = named_leaves(first.step[1])
    pairs = zip(names, leaves, jax.tree.leaves(first.step_state), strict=True)
    if weak := [name for name, new, old in pairs if new.weak_type != old.weak_type]:
        return note(
            f"step returns {', '.join(weak)} of a weak type, so it is compiled twice",
            "give its dtype: jnp.asarray(x, jnp.float32)",
        )
    return ok("the same programs when traced again")


def _text(program: Any) -> str:
    text = re.sub(r"0x[0-9a-f]+", "", str(program.jaxpr))
    consts = [np.asarray(x).tobytes() for x in program.consts if not _is_key(x)]
    return f"{text} {consts}"


def _is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(getattr(x, "dtype", np.float32), jax.dtypes.prng_key)


def check_keys(subject: AgentSubject) -> Finding:
    """Look whether a PRNG key is used twice."""
    contract, agent = subject.contract, subject.agent
    acting = (contract.staged, contract.step_state, contract.env_step)
    learning = (contract.networks, contract.opt, contract.local_experience, contract.key)

    def twice(networks: PyTree, step_state: PyTree, env_step: Any) -> PyTree:
        _, step_state = agent.act(networks, step_state, env_step)
        return agent.act(networks, step_state, env_step)

    cases: list[tuple[str, Callable, tuple, str]] = [
        ("new_networks", agent.new_networks, (contract.key,), "within it"),
        ("step", agent.act, acting, "within it"),
        ("step", twice, acting, "by the next step: the key that it returns has been used"),
        ("loss", contract.mapped(agent.loss), learning, "within it"),
    ]
    for method, function, given, where in cases:
        try:
            with jax.debug_key_reuse(True):
                jax.eval_shape(lambda *x, function=function: function(*x), *given)
        except jax.errors.KeyReuseError as error:
            return problem(
                f"{method} uses a key that was used before{_place(error)}, {where}",
                "split it: next_key, key = jax.random.split(key); draw once from each",
            )
    return ok("none is used twice")


def _place(error: BaseException) -> str:
    """Return where the key was used, from the stack that JAX kept."""
    kept = error.__cause__ or error.__context__
    frames = traceback.extract_tb(kept.__traceback__) if kept is not None else []
    own = [frame for frame in frames if not is_installed(frame.filename)]
    return f" ({own[-1].filename.rpartition('/')[2]}:{own[-1].lineno})" if own else ""


def check_explore(subject: AgentSubject) -> Finding:
    """Look whether the evaluation policy is another one, and what actions depend on."""
    programs = subject.contract.programs
    exploring, exploiting = (programs[f"step(explore={explore})"] for explore in (True, False))
    same = _text(exploring) == _text(exploiting)
    if same and "random_bits" in str(exploring):
        return problem(
            "step(explore=False) is the same program and draws random numbers, too",
            "take the likeliest action where explore is False: the evaluation policy",
        )
    given = (subject.contract.staged, subject.contract.step_state)
    num_networks, num_state = (len(jax.tree.leaves(tree)) for tree in given)
    obs = len(jax.tree.leaves(subject.contract.env_step.obs))
    total = len(exploiting.in_avals)
    for name, begin, end in (
        ("networks", 0, num_networks),
        ("env_step.obs", num_networks + num_state, num_networks + num_state + obs),
    ):
        flags = [begin <= i < end for i in range(total)]
        if not reached(exploiting.jaxpr, flags)[0]:
            return problem(
                f"the actions of step(explore=False) do not depend on {name}",
                "compute them from networks and observation",
            )
    return ok("never explores" if same else "step(explore=False) is another policy")


def reached(jaxpr: Any, flags: list[bool]) -> list[bool]:
    """Return which outputs of a program depend on the inputs that are flagged.

    Loops and branches count as a whole.
    """
    found = {var for var, flag in zip(jaxpr.invars, flags, strict=True) if flag}
    for eqn in jaxpr.eqns:
        inputs = [not hasattr(var, "val") and var in found for var in eqn.invars]
        if not any(inputs):
            continue
        outputs = [True] * len(eqn.outvars)
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        inner = getattr(inner, "jaxpr", inner)
        is_call = inner is not None and eqn.primitive.name not in ("scan", "while")
        if is_call and len(inner.invars) == len(inputs):
            outputs = reached(inner, inputs)
        found |= {var for var, flag in zip(eqn.outvars, outputs, strict=True) if flag}
    return [not hasattr(var, "val") and var in found for var in jaxpr.outvars]


# Updates.


def check_gradients(subject: AgentSubject) -> Finding:
    """Look whether a gradient reaches every leaf, in the program and in numbers."""
    contract = subject.contract
    names, _ = named_leaves(contract.networks)
    program = contract.programs["loss"].jaxpr
    flags = reached(program, [True] * len(program.invars))[-len(names) :]
    lost = [name for name, flag in zip(names, flags, strict=True) if not flag]
    if not lost and subject.warm_up is not None:
        fed = subject.fed
        if bad := [name for name, value in fed.metrics.items() if not np.isfinite(value)]:
            return problem(
                f"{', '.join(bad)} not finite after {fed.driver.updates} updates",
                "bound what goes into logarithms, divisions and exponentials",
            )
        lost = [name for name in fed.before if np.array_equal(fed.before[name], fed.after[name])]
    if lost:
        return problem(
            f"the loss gives no gradient to {', '.join(lost[:5])}",
            "use it in the loss; keep targets in new_opt and statistics in new_experience",
        )
    return ok(f"reach all {len(names)} leaves")


def check_valid(subject: AgentSubject) -> Finding:
    """Feed the same with other numbers in the transitions that are not valid."""
    if subject.warm_up is None:
        return note(NOT_UPDATED)
    fed = subject.fed
    changes = {"actions": with_other_actions}
    if not _has_statistics_of_rewards(subject):  # which may count on the 0 of a reset
        changes["rewards"] = with_other_rewards
    for what, change in changes.items():
        other = feed(fed.driver, [change(one) for one in fed.made])
        if largest_difference(other.after, fed.after) > 1e-4 * _moved(fed) + 1e-9:
            return problem(
                f"what is learned depends on {what} of transitions that are not valid, which are "
                "the resets after episodes",
                "weight transitions with env_step.valid[1:], as masked_mean(x, step.valid) does",
            )
    return ok("transitions that are not valid count for nothing")


def _has_statistics_of_rewards(subject: AgentSubject) -> bool:
    """Tell whether something that is not split over devices is computed from rewards."""
    contract = subject.contract
    program = contract.programs["update_experience"].jaxpr
    states = (contract.local_experience, contract.local_step_state, contract.local_step_state)
    before = len(jax.tree.leaves((*states, contract.env_step.obs, contract.env_step.prev_action)))
    flags = reached(program, [i == before for i in range(len(program.invars))])
    specs = named_specs(subject.agent.experience_spec(), contract.experience)
    return any(flag and not any(spec) for flag, (_, spec) in zip(flags, specs, strict=True))


def check_devices(subject: AgentSubject) -> Finding:
    """Feed the same to several devices."""
    if subject.warm_up is None:
        return note(NOT_UPDATED)
    one = subject.fed
    driver = subject.driver(one.driver.agent, DEVICES, one.driver.first_state)
    many = feed(driver, one.made)
    unlike = [name for name, leaf in replicated_leaves(driver).items() if differs_by_device(leaf)]
    if unlike:
        return problem(
            f"{', '.join(unlike[:3])} differs by device, and its spec is P()",
            "take jax.lax.pmean or psum of it over 'learner', or split it in experience_spec",
        )
    if _draws(subject):
        return ok(
            f"what is replicated is equal on {DEVICES} devices; the update draws random numbers, "
            "so it was not compared with one device"
        )
    difference, moved = largest_difference(many.after, one.after), _moved(one)
    if difference > 0.01 * moved + 1e-7:
        return problem(
            f"on {DEVICES} devices networks differ by {difference / moved:.1%} of what they moved "
            "on one, with the same trajectories",
            "divide by a pmean of the count: masked_mean(x, step.valid); take means of what "
            "normalises over 'learner', too",
        )
    return ok(f"the same gradient on {DEVICES} as on one")


def _draws(subject: AgentSubject) -> bool:
    """Tell whether an update depends on its key, or on one in the experience."""
    program = subject.contract.programs["loss"].jaxpr
    return any(reached(program, [_is_key(var.aval) for var in program.invars]))


def largest_difference(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    """Return the largest difference of any two elements; infinite where one is NaN."""
    differences = (float(np.abs(a[name] - b[name]).max(initial=0.0)) for name in a)
    return max((np.inf if np.isnan(d) else d for d in differences), default=0.0)


def _moved(fed: Any) -> float:
    return largest_difference(fed.before, fed.after)
