"""A policy as one function of arrays, with what it carries from step to step and nothing else."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jax.extend.core import Jaxpr, Literal
from jax.interpreters.partial_eval import dce_jaxpr

from sebulba.agents.configs import TorsoConfig
from sebulba.agents.multi.multi_agent import MultiAgent
from sebulba.errors import UsageError
from sebulba.policies.policy import Policy, PolicyState
from sebulba.support.one_kernel import left_alone
from sebulba.support.trees import is_key, named_leaves
from sebulba.types import EnvStep, PyTree, empty_env_step

ACTION = "action"
PROBABILITIES = "probabilities"
STATE = "state"


@dataclasses.dataclass(frozen=True)
class Port:
    """An input or output of an exported policy."""

    name: str
    """Its name."""
    shape: tuple[int, ...]
    """``[B, ...]``."""
    dtype: str
    """NumPy's name of it."""


@dataclasses.dataclass(frozen=True)
class Acting:
    """The function, ``tuple of inputs -> tuple of outputs``, and what these are."""

    function: Any
    """Takes arrays in the order of ``inputs`` and returns a list in the order of ``outputs``."""
    inputs: tuple[Port, ...]
    """Observation, flags of the step that the policy looks at, and what it carries."""
    outputs: tuple[Port, ...]
    """The action, for a Discrete its distribution, and what it carries."""
    initial: dict[str, np.ndarray]
    """What is carried into the first step of an episode, by the names of inputs."""
    carried: dict[str, str]
    """The output that is each such input in the next step."""


def in_float32(policy: Policy) -> Policy:
    """Return a policy whose torso computes in float32, so that every form rounds the same."""
    agent = policy.agent
    torso = getattr(agent.config, "torso", None)
    if not isinstance(torso, TorsoConfig) or torso.dtype == "float32":
        return policy
    torso = dataclasses.replace(torso, dtype="float32")
    config = dataclasses.replace(agent.config, torso=torso)
    return Policy(type(agent)(agent.spec, config), policy.acting_networks, policy.run)


def acting_of(policy: Policy, batch: int) -> Acting:
    """Return what a policy does in a step, for ``batch`` environments.

    The action is what the environment takes: normalisation of observations and the bounds of
    actions are within. What does not matter to the actions of any step, such as keys of random
    numbers, is left out.

    Args:
      policy: Loaded without ``explore``.
      batch: B, at least 1.

    Raises:
      UsageError: It has many agents, or draws random numbers.
    """
    if isinstance(policy.agent, MultiAgent):
        raise UsageError(
            f"this policy has the members {', '.join(policy.agent.members)}; export that of one, "
            "which is in the folder of its name"
        )
    state = policy.new_state(batch)
    row: Any = empty_env_step(policy.spec, batch)
    row = row._replace(prev_action=(), final=())
    example, tree = jax.tree.flatten((row, state))
    traced = functools.partial(_step, policy, tree)
    with left_alone():
        closed, shapes = jax.make_jaxpr(traced, return_shape=True)(*example)
    of_step = [f"{STATE}_{i}" for i in range(len(jax.tree.leaves(state.step)))]
    names = [*by_name(row), *of_step, "prev_action"]
    num_rows = len(jax.tree.leaves(row))
    num_answers = len(shapes) - (len(names) - num_rows)
    answers = [ACTION, PROBABILITIES][:num_answers]
    jaxpr, needed, kept = _reduced(closed.jaxpr, num_rows, num_answers)
    for index in needed:
        if is_key(example[index]):
            raise UsageError(
                f"{type(policy.agent).__name__} draws random numbers as it acts, which no exported "
                "policy can; load it without explore"
            )
    output_names = [*answers, *(f"next_{name}" for name in names[num_rows:])]
    output_names[-1] = ACTION  # which is the next step's previous action
    kept = [i for i in kept if i < len(output_names) - 1]
    carried = [i for i in needed if i >= num_rows]
    return Acting(
        # Without the previous action, which is the action.
        lambda *arrays: _evaluated(jaxpr, closed.consts, *arrays)[: len(kept)],
        tuple(_port(names[i], example[i]) for i in needed),
        tuple(_port(output_names[i], shapes[i]) for i in kept),
        {names[i]: np.asarray(example[i], _port(names[i], example[i]).dtype) for i in carried},
        {names[i]: output_names[num_answers + i - num_rows] for i in carried},
    )


def _step(policy: Policy, tree: Any, *leaves: Any) -> list[Any]:
    """Return all that a policy answers and carries, of all that it looks at, as flat arrays."""
    row, state = jax.tree.unflatten(tree, leaves)
    env_step: EnvStep = row._replace(prev_action=state.prev_action)
    networks, agent = policy.acting_networks, policy.agent
    output, step_state = agent.act(networks, state.step, env_step, explore=False)
    answers = [output.action]
    if isinstance(policy.spec.action_space, spaces.Discrete):
        answers.append(agent.acting_distribution(networks, state.step, env_step))
    after = PolicyState(step_state, output.action)
    assert jax.tree.structure(after) == jax.tree.structure(state)  # type: ignore[operator]
    return [*answers, *jax.tree.leaves(after)]


def _reduced(whole: Jaxpr, num_rows: int, num_answers: int) -> tuple[Jaxpr, list[int], list[int]]:
    """Leave out what no answer depends on, at this step or at any later one.

    Args:
      whole: Its inputs are the row and then the state; its outputs the answers and the state.
      num_rows: Inputs of the row.
      num_answers: Outputs that are answers.

    Returns:
      What is left, and which inputs and outputs it still has.
    """
    total = len(whole.outvars)
    kept = set(range(num_answers))
    while True:
        jaxpr, used = dce_jaxpr(whole, [i in kept for i in range(total)])
        needed = [i for i, is_used in enumerate(used) if is_used]
        more = kept | {num_answers + i - num_rows for i in needed if i >= num_rows}
        if more == kept:
            return jaxpr, needed, sorted(kept)
        kept = more


def _evaluated(jaxpr: Jaxpr, constants: Sequence[Any], *arrays: Any) -> list[Any]:
    """Evaluate a function as it was traced, but loops of one step as what they do in it.

    A policy goes through its memory in such a loop, for which formats other than XLA's would need
    loops, too.
    """
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, constants, strict=True))
    values.update(zip(jaxpr.invars, arrays, strict=True))
    for equation in jaxpr.eqns:
        given = [one.val if isinstance(one, Literal) else values[one] for one in equation.invars]
        name = equation.primitive.name
        if name == "scan" and equation.params["length"] == 1:
            found = _one_step(equation, given)
        elif name == "stack":  # which jax2onnx does not know
            found = [jnp.concatenate([jnp.expand_dims(one, 0) for one in given])]
            found = [jnp.moveaxis(found[0], 0, equation.params["axis"])]
        elif name in ("jit", "pjit"):
            inner = equation.params["jaxpr"]
            found = _evaluated(inner.jaxpr, inner.consts, *given)
        else:
            parameters = equation.primitive.get_bind_params(equation.params)
            found = equation.primitive.bind(*given, **parameters)
            found = found if equation.primitive.multiple_results else [found]
        values.update(zip(equation.outvars, found, strict=True))
    return [one.val if isinstance(one, Literal) else values[one] for one in jaxpr.outvars]


def _one_step(loop: Any, given: list[Any]) -> list[Any]:
    """Return what a ``jax.lax.scan`` of length 1 returns: the carry, and its rows.

    What the loop goes over, and what it gathers, has a dimension more than within it.
    """
    body = loop.params["jaxpr"]
    pairs = zip(given, body.jaxpr.invars, strict=True)
    within = [jnp.squeeze(one, 0) if jnp.ndim(one) > v.aval.ndim else one for one, v in pairs]
    found = _evaluated(body.jaxpr, body.consts, *within)
    pairs = zip(found, loop.outvars, strict=True)
    return [one[None] if v.aval.ndim > jnp.ndim(one) else one for one, v in pairs]


def by_name(tree: PyTree) -> dict[str, Any]:
    """Return the leaves of a tree by names that are words, such as ``obs`` or ``obs_image``."""
    return {
        re.sub(r"\W+", "_", name).strip("_"): leaf
        for name, leaf in zip(*named_leaves(tree), strict=True)
    }


def _port(name: str, leaf: PyTree) -> Port:
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)  # of 32 bits, as JAX computes, not 64
    return Port(name, tuple(leaf.shape), np.dtype(dtype).name)
