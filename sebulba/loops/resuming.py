"""Resumes from a checkpoint: agent state, counters, Inferencers and the round in flight."""

from __future__ import annotations

import dataclasses
import textwrap
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from sebulba.agent import Agent, AgentState, is_spec, spec_of_each_leaf
from sebulba.errors import EnvError, UsageError
from sebulba.inference.inferencer import Inferencer
from sebulba.loops.session import Session
from sebulba.loops.snapshot_trees import MOST_DIFFERENCES, SnapshotReader
from sebulba.metrics.counters import Counters
from sebulba.metrics.window import RecentEpisodes
from sebulba.support.trees import is_finite
from sebulba.transport.item import HandOff
from sebulba.types import EnvSpec, PyTree, RunSpec

MOST_SHOWN = 300
"""Characters of a space in a sentence."""


class Resumed(NamedTuple):
    """The agent state that was read from a checkpoint."""

    state: AgentState
    """The state, fitted to this run."""
    notes: list[str]
    """Sentences for the user on what could not be kept."""
    layout_fits: bool
    """Whether Inferencers and environments are divided as they were, so that positions fit."""
    replay_is_new: bool
    """Whether the experience was dropped, so that its warm-up begins again."""


def read_state(
    agent: Agent,
    reader: SnapshotReader,
    run: RunSpec,
    keys: tuple[jax.Array, jax.Array],
    drop_replay: bool,
) -> Resumed:
    """Return the agent state in a checkpoint, fitted to this run.

    Args:
      run: The sizes of this run; steps_per_cycle is that of the checkpoint.
      keys: PRNG keys for step states and for an experience that cannot be read and are made new.
      drop_replay: Begin with a new experience if the saved one does not fit.
    """
    agent, (key, experience_key) = agent.for_run(run), keys
    saved = reader.run_spec()
    like = jax.eval_shape(lambda key: agent.new_state(key, run), key)
    networks, opt = reader.tree("networks", like.networks), reader.tree("opt", like.opt)
    if not is_finite(networks):
        raise UsageError(
            "the networks of the checkpoint are not finite (NaN or infinity), and training cannot "
            "go on from them; delete that checkpoint, and an older one is used"
        )
    notes = _changed_spaces(agent, reader)
    experience, replay_is_new = _experience(agent, reader, run, experience_key, drop_replay)
    if replay_is_new:
        notes.append("the replay is dropped, and fills again before the next update")
    fits = dataclasses.replace(saved, num_update_devices=run.num_update_devices) == run
    step = _step_states(agent, reader, run, key, fits, notes)
    return Resumed(AgentState(networks, opt, experience, tuple(step)), notes, fits, replay_is_new)


def with_networks_of(agent: Agent, state: AgentState, reader: SnapshotReader) -> AgentState:
    """Return a new state with the networks of a checkpoint, and what lasts of its experience.

    Raises:
      UsageError: They do not fit the agent.
    """
    networks = reader.tree("networks", state.networks)
    lasting = reader.tree("lasting", agent.lasting_experience(state.experience))
    for change in _changed_spaces(agent, reader):
        warnings.warn(change, stacklevel=2)
    return state._replace(
        networks=networks,
        opt=jax.jit(agent.new_opt)(networks),
        experience=agent.with_lasting(state.experience, lasting),
    )


def spaces_of(spec: EnvSpec) -> dict[str, str]:
    """Return what a checkpoint says of the spaces of an environment, bounds included."""
    return {"observations": repr(spec.observation_space), "actions": repr(spec.action_space)}


def _changed_spaces(agent: Agent, reader: SnapshotReader) -> list[str]:
    """Return a sentence for each space that is not as it was saved, though arrays still fit."""
    saved = reader.record.get("spaces", {})
    return [
        f"the space of the {what} is {textwrap.shorten(now, MOST_SHOWN)} and was "
        f"{textwrap.shorten(saved[what], MOST_SHOWN)}: options or another version of a library "
        "changed it, and what was learned may mean something else now"
        for what, now in spaces_of(agent.spec).items()
        if saved.get(what, now) != now
    ]


def _experience(
    agent: Agent, reader: SnapshotReader, run: RunSpec, key: jax.Array, drop_replay: bool
) -> tuple[PyTree, bool]:
    """Return the experience, and whether it is a new one because the saved one was dropped."""

    def shapes(run: RunSpec) -> PyTree:
        return jax.eval_shape(lambda key: agent.new_state(key, run).experience, key)

    def new() -> PyTree:
        return jax.jit(lambda key: agent.new_state(key, run).experience)(key)

    def with_lasting(experience: PyTree) -> PyTree:
        """Return ``experience`` with what is kept even without the rest; 0.2.0 did not keep it."""
        like = agent.lasting_experience(experience)
        if reader.lacks("lasting"):
            return experience
        return agent.with_lasting(experience, reader.tree("lasting", like))

    like, saved = shapes(run), reader.run_spec()
    different = reader.differences("experience", like)
    if not different:
        return with_lasting(reader.tree("experience", like)), False
    saved_like = shapes(saved)
    if jax.eval_shape(agent.refit_experience, like, saved_like) is not None:
        before = reader.tree("experience", saved_like)
        return agent.refit_experience(new(), before), False
    if not drop_replay:
        raise UsageError(
            f"the experience of the checkpoint does not fit this run: "
            f"{'; '.join(different[:MOST_DIFFERENCES])}. Resume with the sizes it was saved with "
            f"({saved.num_inferencers} Inferencers x {saved.num_envs} environments), or give "
            "--drop-replay to begin with an empty one"
        )
    return with_lasting(new()), True


def _step_states(
    agent: Agent,
    reader: SnapshotReader,
    run: RunSpec,
    key: jax.Array,
    layout_fits: bool,
    notes: list[str],
) -> list[PyTree]:
    saved = reader.run_spec()
    done = reader.record["counters"]["env_steps"] // saved.num_hosts

    def new(run: RunSpec, index: int) -> PyTree:
        return agent.new_step_state(jax.random.fold_in(key, index), run, index)

    def fresh(run: RunSpec, index: int) -> PyTree:
        return agent.advance_step_state(
            new(run, index), done // (run.num_envs * run.num_inferencers)
        )

    def read(run: RunSpec, index: int) -> PyTree | None:
        like, name = jax.eval_shape(lambda: new(run, index)), f"step/{index}"
        is_there = reader.record["inferencers"][index]["has_step_state"]
        if not is_there or reader.differences(name, like):  # of an older version of the agent
            return None
        return reader.tree(name, like)

    if layout_fits:
        parts = [read(run, index) for index in range(run.num_inferencers)]
        lost = [index for index, part in enumerate(parts) if part is None]
        if lost:
            notes.append(f"the step state of Inferencers {lost} was lost; they begin with new ones")
        return [fresh(run, i) if part is None else part for i, part in enumerate(parts)]
    news = [fresh(run, index) for index in range(run.num_inferencers)]
    parts = [read(saved, index) for index in range(saved.num_inferencers)]
    num_envs = run.num_envs * run.num_inferencers
    if saved.num_envs * saved.num_inferencers != num_envs or any(part is None for part in parts):
        notes.append(
            f"{saved.num_inferencers} x {saved.num_envs} environments were saved and there are "
            f"{run.num_inferencers} x {run.num_envs} now: step states begin anew"
        )
        return news
    notes.append(f"{num_envs} environments are split over {run.num_inferencers} Inferencers now")
    return split_again(agent.step_state_spec(), parts, news)


def put_session_back(
    session: Session,
    reader: SnapshotReader,
    resumed: Resumed,
    hand_off: HandOff,
    replace: Callable[[Inferencer], Inferencer],
) -> list[str]:
    """Put counters, episodes, Inferencers and the round in flight back into ``session``.

    Args:
      replace: Returns an Inferencer with new environments in the place of one whose environments
        could not be put back.

    Returns:
      Sentences for the user on what could not be put back.
    """
    notes: list[str] = []
    record = reader.record
    known = {field.name for field in dataclasses.fields(Counters)}
    saved = {name: value for name, value in record["counters"].items() if name in known}
    session.counters = Counters(**saved)
    session.episodes = RecentEpisodes.restored(record["episodes"], session.episodes.teams)
    session.seconds_before = record["seconds"]
    keeps_round = (
        resumed.layout_fits and session.options.schedule == record["schedule"] == "lockstep"
    )
    if resumed.layout_fits:
        session.inferencers = [
            _put_back(inferencer, reader, replace, notes) for inferencer in session.inferencers
        ]
    else:
        newest = max(inferencer["cycle"] for inferencer in record["inferencers"])
        for inferencer in session.inferencers:
            inferencer.cycle = newest + 1
        notes.append("new episodes from fresh seeds: the environments are divided differently")
    if keeps_round:
        assert session.programs is not None
        step_state = jax.eval_shape(lambda: resumed.state.step[0])
        items = reader.round(session.programs.shapes, step_state)
        session.kept_round = [hand_off(item) for item in items]
    elif record["round"]:
        notes.append("the round that was in flight is dropped")
    counters = session.counters
    counters.dropped_stop_cycles += record["lost_cycles"]
    counters.dropped_stop_cycles += len(record["round"]) - len(session.kept_round)
    if resumed.replay_is_new:
        counters.warm_up_from = counters.cycles
    return notes


def _put_back(
    inferencer: Inferencer,
    reader: SnapshotReader,
    replace: Callable[[Inferencer], Inferencer],
    notes: list[str],
) -> Inferencer:
    """Return ``inferencer`` where it stood, or one with new episodes and a note why."""
    inferencer.cycle = reader.record["inferencers"][inferencer.index]["cycle"]
    saved = reader.env(inferencer.index)
    try:
        if isinstance(saved, bytes):
            inferencer.env_thread.call(inferencer.run_cycle.put_back, saved)
            inferencer.needs_reset = False
            return inferencer
        reason = saved
    except EnvError as error:
        reason = str(error)
        inferencer = replace(inferencer)
    inferencer.cycle += 1  # leave a gap, since the next trajectory continues none that was saved
    note = f"new episodes from fresh seeds: {reason}"
    if note not in notes:
        notes.append(note)
    return inferencer


def split_again(spec: PyTree, parts: Sequence[PyTree], new: Sequence[PyTree]) -> list[PyTree]:
    """Return step states of other Inferencers, environments in the same order as before.

    Args:
      spec: ``Agent.step_state_spec``; says which leaves have a row for each environment.
      parts: Step states of the old Inferencers.
      new: Fresh step states of the new Inferencers, of as many environments in all; leaves without
        a row for each environment (keys, scalars) stay as they are here.
    """

    def split(leaf_spec: P, *leaves: Any) -> list[Any]:
        if not any(leaf_spec):
            return list(leaves[len(parts) :])
        rows = jnp.concatenate(leaves[: len(parts)])
        return [jnp.array(x, copy=True) for x in jnp.split(rows, len(new))]

    specs = jax.tree.leaves(spec_of_each_leaf(spec, new[0]), is_leaf=is_spec)
    leaves = zip(specs, *map(jax.tree.leaves, (*parts, *new)), strict=True)
    columns = [split(*each_leaf) for each_leaf in leaves]
    structure = jax.tree.structure(new[0])
    return [jax.tree.unflatten(structure, column) for column in zip(*columns, strict=True)]
