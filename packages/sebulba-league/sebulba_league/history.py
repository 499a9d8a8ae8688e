"""Reads the history of a league from its run. Free of JAX until it reads networks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sebulba.errors import UsageError
from sebulba_league.config import LeagueConfig
from sebulba_league.population_config import PopulationFields

if TYPE_CHECKING:
    from sebulba.checkpoints.checkpointer import Checkpoint
    from sebulba.configs.experiment import ExperimentConfig
    from sebulba.runs.folder import RunFolder
    from sebulba.types import PyTree
    from sebulba_league.agent import LeagueAgent


def newest_checkpoint(folder: RunFolder, config: ExperimentConfig, *, trust: bool) -> Checkpoint:
    """Return the newest checkpoint of a league; UsageError if there is none, or no league."""
    if not isinstance(config.agent, LeagueConfig):
        raise UsageError(
            f"{folder.path} is a run of {type(config.agent).__name__}, which has no league; name a "
            "run of a preset such as kuhn-league"
        )
    if isinstance(config.agent, PopulationFields):
        raise UsageError(
            f"{folder.path} is a run of a population, each member of which has a league of its "
            "own; name a run without a population"
        )
    from sebulba.checkpoints.checkpointer import Checkpointer

    with Checkpointer(folder.checkpoints) as checkpointer:
        checkpoint = checkpointer.load_newest(trust=trust)
    if checkpoint is None:
        raise UsageError(f"{folder.path} has no checkpoint yet; a run saves one at its end")
    return checkpoint


def read_history(
    config: ExperimentConfig, spec: Any, checkpoint: Checkpoint
) -> tuple[LeagueAgent, list[int], PyTree]:
    """Return the league, the generations of its N snapshots, the oldest first, and ``[N, ...]``.

    Args:
      config: Of the run.
      spec: Of its environment, a ``MultiAgentSpec``.
      checkpoint: Of the run.
    """
    import jax

    from sebulba.loops.snapshot_trees import SnapshotReader
    from sebulba.runs.build import build_agent
    from sebulba_league.agent import LeagueAgent

    league = build_agent(config, spec)
    assert isinstance(league, LeagueAgent)
    reader = SnapshotReader(checkpoint.snapshot)
    like = jax.eval_shape(lambda: league.new_state(jax.random.key(0), reader.run_spec()))
    history = reader.tree("lasting/history", like.experience.history)
    generation = np.asarray(checkpoint.snapshot.arrays["lasting/generation"])
    order = [i for i in np.argsort(generation) if generation[i] >= 0]
    players = jax.tree.map(lambda rows: np.asarray(rows)[order], history)
    return league, generation[order].tolist(), players
