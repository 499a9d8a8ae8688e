"""A host other than host 0 of those that learn together: it writes parts of checkpoints only."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from sebulba.checkpoints.checkpointer import Checkpointer
from sebulba.cluster.hosts.hosts import Hosts
from sebulba.cluster.hosts.join import join_hosts
from sebulba.configs.experiment import ExperimentConfig
from sebulba.envs import env_spec, make_env_factory
from sebulba.errors import HangError, HostError, UsageError
from sebulba.loops.gymnasium_loop import GymnasiumLoop
from sebulba.runs.build import build_agent
from sebulba.runs.exit_codes import exit_code_of
from sebulba.runs.folder import RunFolder
from sebulba.runs.signals import StopOnSignal


def train_beside(
    config: ExperimentConfig, folder: RunFolder, stop_on_signal: StopOnSignal | None
) -> None:
    """Learn with host 0, which has the panel, the metrics and the policy.

    Args:
      config: As host 0 has it, but for the number of the host.
      folder: The folder of the run, which all hosts share.
      stop_on_signal: Turns signals into stops; None leaves them alone, and this process alive where
        the update hangs.

    Raises:
      UsageError: Something breaks a rule, or the folder is another than that of host 0.
      HostError: Another host is gone or has failed.
      Exception: Whatever the run raised.
    """
    hosts = join_hosts(config.distributed)
    with contextlib.ExitStack() as stack:

        def about() -> Mapping[str, Any]:
            return {"versions": {}, **folder.about(config)}

        checkpointer = stack.enter_context(make_checkpointer(config, folder, about))
        number = hosts.meet(None)[0]
        env = folder.chosen_env(config)
        factory = make_env_factory(env.id, **env.factory_arguments())
        agent = build_agent(config, env_spec(factory))
        loop = stack.enter_context(
            GymnasiumLoop(
                factory,
                agent,
                config.num_envs,
                options=config,
                checkpointer=checkpointer,
                on_hang=say_hung if stop_on_signal is None else _end_hung,
            )
        )
        if number is None:
            state = [loop.new_state(config.seed, config.steps_per_cycle)]
        else:
            checkpoint = checkpointer.load(number, trust=config.trust)
            state = [loop.restore(checkpoint, drop_replay=config.drop_replay)]
            for note in loop.resume_notes:
                print(f"  {hosts}: {note}", flush=True)
        num_cycles = _meet_first(hosts, folder)
        if not num_cycles:
            hosts.meet("the end", math.inf)  # host 0 may have an evaluation to play
            return
        if stop_on_signal is not None:
            stop_on_signal.attach(loop)
        result = loop.run(state.pop(), num_cycles, config.steps_per_cycle)
    how = "stopped" if result.stopped else "done"
    print(f"{how}: {hosts}, {result.counters.env_steps:,} env steps of all hosts", flush=True)


def make_checkpointer(
    config: ExperimentConfig, folder: RunFolder, about: Callable[[], Mapping[str, Any]]
) -> Checkpointer:
    """Return what saves the run, or this host's part of it.

    Args:
      config: Says how often, and which host this is.
      folder: Where the checkpoints are.
      about: Returns what a checkpoint says beside where the loop stands.
    """
    options = config.checkpoint
    return Checkpointer(
        folder.checkpoints,
        every_s=options.every_s,
        every_updates=options.every_updates,
        experience_every_s=options.replay_every_s,
        keep_last=options.keep_last,
        milestone_every=options.milestone_env_steps,
        about=about,
        host=config.distributed.host or 0,
        num_hosts=config.distributed.hosts,
    )


def _meet_first(hosts: Hosts, folder: RunFolder) -> int:
    """Return the number of cycles that host 0 says; refuse another run folder than its own."""
    run_id, num_cycles = hosts.meet(None)[0]
    here = folder.run_id()
    if here != run_id:
        raise UsageError(
            f"run folder {folder.path} on {hosts} is not that of host 0; give --run-dir a folder "
            "that all hosts share, such as one on NFS"
        )
    return num_cycles


def _end_hung(error: HangError | HostError) -> None:
    """End the process: its main thread is in a program that does not return."""
    say_hung(error)
    os._exit(exit_code_of(error))


def say_hung(error: HangError | HostError) -> None:
    """Say what hangs."""
    what = "hosts" if isinstance(error, HostError) else "hang"
    print(f"sebulba: {what}: {error}", file=sys.stderr, flush=True)
