"""Everything around a run: builds environment, agent, loop and writers from a configuration."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import sebulba
from sebulba.agent import Agent
from sebulba.agents.configs import make_agent
from sebulba.checkpoints.checkpointer import Checkpointer
from sebulba.commands.crash_report import LastRecord, write_end
from sebulba.commands.exit_codes import EXIT_OK, exit_code_of
from sebulba.commands.jax_setup import Platform, configure_jax
from sebulba.commands.run_folder import RunFolder
from sebulba.commands.stop_on_signal import StopOnSignal
from sebulba.configs.experiment import EnvConfig, ExperimentConfig
from sebulba.envs import env_spec, make_env_factory
from sebulba.errors import HangError, UsageError
from sebulba.files import PARTIAL, replace_folder
from sebulba.loops.devices import local_devices
from sebulba.loops.evaluation import Evaluation, EvaluationPlayer, evaluate
from sebulba.loops.evaluator import Evaluator, evaluation_record
from sebulba.loops.gymnasium_loop import GymnasiumLoop, Result
from sebulba.loops.supervisor import OnHang
from sebulba.loops.update_loop import ObserveCycle
from sebulba.metrics.plots import learning_curve, read_records
from sebulba.metrics.writers import (
    CompositeWriter,
    JsonLinesWriter,
    LinesWriter,
    TensorBoardWriter,
    number,
)
from sebulba.policies.policy import load_policy, save_policy
from sebulba.trees import is_finite
from sebulba.types import EnvFactory, EnvSpec, MetricWriter, PyTree, RunSpec


def train(
    config: ExperimentConfig,
    folder: RunFolder,
    stop_on_signal: StopOnSignal,
    *,
    preset: str = "",
    command: Sequence[str] = (),
) -> int:
    """Train as ``config`` says and leave everything in ``folder``.

    Args:
      config: What to do.
      folder: Of the run.
      stop_on_signal: In force; gets the loop to stop.
      preset: Name of the configuration.
      command: The words that asked for this.

    Returns:
      0, or 128 plus the number of the signal that ended the run early; the policy is saved
      either way.

    Raises:
      UsageError: Something in ``config`` breaks a rule.
      CheckpointError: The run is to be resumed and no checkpoint is whole.
      Exception: Whatever the run raised; metrics and learning curve are in ``folder`` all the same.
    """
    configure_jax(config.platform, config.num_cpu_devices, config.compile_cache)
    run = _Run(config, folder, preset or config.env.id)
    with contextlib.closing(run):
        run.resume_or_begin()
        if not run.num_cycles:
            print(f"nothing to do: {run.env_steps_done:,} env steps are done", flush=True)
            run.complete()
            return EXIT_OK
        folder.ended.unlink(missing_ok=True)
        folder.write_config(config, preset, command)
        stop_on_signal.attach(run.loop)
        try:
            result = run.train()
            code = stop_on_signal.exit_code
            write_end(folder, code=code, metrics=result.metrics)
        finally:
            run.draw()  # last, as who sends a signal may not wait for long
    _print_summary(result, folder)
    return code


class _Run:
    """One run of the command: everything around the loop, made and closed together."""

    def __init__(self, config: ExperimentConfig, folder: RunFolder, title: str) -> None:
        """Nothing is made yet."""
        self._config = config
        self._folder = folder
        self._title = title
        self._last = LastRecord()
        self._lock = contextlib.ExitStack()
        self._stack = contextlib.ExitStack()
        self._writers = CompositeWriter(self._last)
        self._versions = {"sebulba": sebulba.__version__, "jax": jax.__version__}
        self.env_steps_done = 0
        """Before this run."""

    def resume_or_begin(self) -> None:
        """Make everything, take possession of the folder, and say where the run goes on.

        Raises:
          UsageError: Something in the configuration breaks a rule, or another process runs here.
          CheckpointError: No checkpoint is whole.
        """
        goes_on = self._folder.config.exists()
        if goes_on:
            self._lock.enter_context(self._folder.locked())
            self._folder.tidy()
        try:
            self._make()
        except Exception as error:
            if goes_on:  # what is there of an earlier end is no longer why
                write_end(self._folder, error=error, metrics={})
            raise
        if not goes_on:
            # Nothing can be wrong with the configuration any more: now write.
            self._folder.create()
            self._lock.enter_context(self._folder.locked())
        self._say_where()

    def _make(self) -> None:
        """Make agent, environments and loop, and put them where the run is resumed.

        Raises:
          UsageError: Something in the configuration breaks a rule.
          CheckpointError: No checkpoint is whole.
        """
        config, folder = self._config, self._folder
        checkpointer = self._stack.enter_context(self._make_checkpointer())
        checkpoint = checkpointer.load_newest(strict=config.strict) if config.resume else None
        self._is_resumed = checkpoint is not None
        self._saved_by = checkpoint.snapshot.record["versions"] if checkpoint else self._versions
        factory = make_env_factory(config.env.id, **config.env.factory_arguments())
        self._agent = build_agent(config, env_spec(factory))
        self._player = _build_player(config, factory, self._agent, self._keep_best)
        if self._player is not None:
            self._stack.enter_context(self._player)
            self._player.best = folder.best_return()
        self.loop = self._stack.enter_context(
            build_loop(
                config,
                factory,
                self._agent,
                self._writers,
                player=self._player,
                played_at=folder.evaluated_at(checkpoint.env_steps) if checkpoint else 0,
                checkpointer=checkpointer,
                on_hang=self._end_hung,
            )
        )
        self._run_spec = _run_spec(config, self.loop)
        if checkpoint is None:
            self._state = [self.loop.new_state(config.seed, config.steps_per_cycle)]
        else:
            self._state = [self.loop.restore(checkpoint, drop_replay=config.drop_replay)]
            self.env_steps_done = checkpoint.env_steps
        self.num_cycles = config.num_cycles(self.loop.num_inferencers, self.env_steps_done)
        self._writers.add(JsonLinesWriter(folder.metrics))
        resumed_at = self.env_steps_done if config.resume else None
        self._writers.add(TensorBoardWriter(folder.tensorboard, resumed_at))

    def _say_where(self) -> None:
        """Say where the run is resumed, if it is, and drop metrics of what is not known there."""
        if not self._config.resume:
            return
        dropped = self._folder.drop_metrics_after(self.env_steps_done)
        if not self._is_resumed:
            return  # killed before its first checkpoint: it begins again
        print(f"resumed at {self.env_steps_done:,} env steps", flush=True)
        for note in self.loop.resume_notes:
            print(f"  {note}", flush=True)
        for name, version in self._versions.items():
            if (before := self._saved_by.get(name)) != version:
                print(f"  {name} was {before} and is {version}", flush=True)
        if dropped:
            print(f"  {dropped} later records in metrics.jsonl are dropped", flush=True)

    def train(self) -> Result:
        """Run the loop and leave everything in the folder."""
        config, folder = self._config, self._folder
        try:
            with contextlib.closing(self._writers):
                self._writers.add(_progress_writer(self._title, folder, self.loop.describe))
                # Nobody keeps the state, whose replay would be in memory twice.
                result = self.loop.run(self._state.pop(), self.num_cycles, config.steps_per_cycle)
            self._save_policy(folder.policy, result.acting_networks)
        except BaseException as error:
            self._rescue_policy()
            write_end(
                folder,
                error=error,
                metrics=self._last.record,
                last_transition=self.loop.last_transition(),
            )
            raise
        return result

    def complete(self) -> None:
        """Leave what a process did not that was killed between its last checkpoint and its end."""
        folder, state = self._folder, self._state.pop()
        done = self.env_steps_done
        to_play = self._player is not None and folder.evaluated_at(done) < done
        if folder.is_complete and not to_play:
            return
        networks = self._agent.acting_networks(state.networks, state.experience)
        records = read_records(folder.metrics) if folder.metrics.exists() else []
        last = records[-1] if records else {}
        self._save_policy(folder.policy, networks)
        try:
            if to_play:
                last = self._play_last(networks, last)
        except Exception as error:
            write_end(folder, error=error, metrics=last)
            raise
        write_end(folder, metrics=last)
        self.draw()

    def _play_last(self, networks: PyTree, last: Mapping[str, Any]) -> dict[str, Any]:
        """Play the evaluation of the end, which was cut short; return its record."""
        assert self._player is not None
        print("playing the evaluation of the end, which was cut short", flush=True)
        began = time.perf_counter()
        played = self._player(jax.device_get(networks), threading.Event())
        assert played is not None, "nobody stops it"
        record = {**last, **evaluation_record(played, self.env_steps_done, began, 0)}
        with contextlib.closing(self._writers):
            self._writers.write(record)
        return record

    def draw(self) -> None:
        """Draw the learning curve; failing here only warns, since why a run failed must be seen."""
        folder = self._folder
        new = folder.path / f"{PARTIAL}{folder.learning_curve.name}"
        try:
            if folder.metrics.exists() and learning_curve(folder.metrics, new, self._title):
                new.replace(folder.learning_curve)
        except Exception as error:
            warnings.warn(f"no learning curve: {type(error).__name__}: {error}", stacklevel=2)

    def close(self) -> None:
        """Close what was made, and only then let another process into the folder."""
        with self._lock:
            self._stack.close()

    def _make_checkpointer(self) -> Checkpointer:
        options = self._config.checkpoint
        return Checkpointer(
            self._folder.checkpoints,
            every_s=options.every_s,
            every_updates=options.every_updates,
            experience_every_s=options.replay_every_s,
            keep_last=options.keep_last,
            milestone_every=options.milestone_env_steps,
            about=self._about,
        )

    def _about(self) -> dict[str, Any]:
        """Return what a checkpoint says beside where the loop stands."""
        return {
            "versions": self._versions,
        }

    def _keep_best(self, networks: PyTree) -> None:
        assert self._player is not None and self._player.best is not None
        best = self._player.best

        def write(new: Path) -> None:
            save_policy(new, self._agent, networks, self._run_spec)
            self._folder.write_best_return(new, best)

        replace_folder(self._folder.best_policy, write)

    def _save_policy(self, folder: Path, networks: PyTree) -> None:
        replace_folder(folder, lambda new: save_policy(new, self._agent, networks, self._run_spec))

    def _rescue_policy(self) -> None:
        """Save what a failed run had learned; nothing here may hide why it failed."""
        folder = self._folder.policy
        try:
            networks = self.loop.newest_networks()
            if networks is None or not is_finite(networks):
                return
            self._save_policy(folder, networks)
            print(f"the policy as it was last published is saved in {folder}", flush=True)
        except Exception as error:
            warnings.warn(f"no policy: {type(error).__name__}: {error}", stacklevel=2)

    def _end_hung(self, error: HangError) -> None:
        """End the process: its main thread is in a program that does not return."""
        write_end(self._folder, error=error, metrics=self._last.record)
        print(f"sebulba: hang: {error}", file=sys.stderr, flush=True)
        os._exit(exit_code_of(error))


def build_agent(config: ExperimentConfig, spec: EnvSpec) -> Agent:
    """Return the agent, told how many updates this run will have."""
    agent = make_agent(spec, config.agent)
    if not config.anneal_learning_rate:
        return agent
    due = map(agent.num_off_policy_optims_per_cycle, range(1, config.num_cycles(1) + 1))
    return make_agent(spec, config.agent_for(sum(due)))


def build_loop(
    config: ExperimentConfig,
    factory: EnvFactory,
    agent: Agent,
    writer: MetricWriter,
    observe_cycle: ObserveCycle | None = None,
    player: EvaluationPlayer | None = None,
    played_at: int = 0,
    checkpointer: Checkpointer | None = None,
    on_hang: OnHang | None = None,
) -> GymnasiumLoop:
    """Return the loop of this run; see ``GymnasiumLoop`` for the arguments after ``agent``.

    ``player`` and ``played_at`` are those of ``Evaluator``.
    """
    return GymnasiumLoop(
        factory,
        agent,
        config.num_envs,
        seed=config.seed,
        inference_devices=config.inference_devices,
        update_devices=config.update_devices,
        num_inferencers_per_device=config.num_inferencers_per_device,
        pin_inferencers=config.pin_inferencers,
        schedule=config.schedule,
        max_policy_lag=config.max_policy_lag,
        cycle=config.cycle,
        queue_size=config.queue_size,
        metric_writer=writer,
        metrics_interval_s=config.metrics_interval_s,
        observe_cycle=observe_cycle,
        evaluator=Evaluator(player, config.eval_every_env_steps, played_at) if player else None,
        checkpointer=checkpointer,
        on_env_failure=config.faults.on_env_failure,
        max_env_restarts=config.faults.max_env_restarts,
        on_not_finite=config.faults.on_not_finite,
        max_skipped_updates=config.faults.max_skipped_updates,
        hang_timeout_s=config.faults.hang_timeout_s,
        on_hang=on_hang,
    )


def _build_player(
    config: ExperimentConfig,
    factory: EnvFactory,
    agent: Agent,
    on_best: Callable[[PyTree], None],
) -> EvaluationPlayer | None:
    if not config.eval_every_env_steps:
        return None
    restarts = config.faults.on_env_failure == "restart"
    return EvaluationPlayer(
        agent,
        factory,
        num_episodes=config.eval_episodes,
        num_envs=config.eval_num_envs,
        seed=config.seed,
        on_best=on_best,
        max_env_restarts=config.faults.max_env_restarts if restarts else 0,
    )


def _run_spec(config: ExperimentConfig, loop: GymnasiumLoop) -> RunSpec:
    return RunSpec(
        config.num_envs, loop.num_inferencers, config.steps_per_cycle, len(loop.update_devices)
    )


def _progress_writer(title: str, folder: RunFolder, describe: Callable[[], str]) -> MetricWriter:
    """Return a live panel on a terminal, plain lines elsewhere."""
    if not sys.stdout.isatty():
        return LinesWriter(sys.stdout, describe)
    from sebulba.metrics.live_panel import PanelWriter

    panel = PanelWriter(title, str(folder.path), describe)
    panel.start()
    return panel


def evaluate_run(
    folder: RunFolder,
    env: EnvConfig,
    *,
    num_episodes: int,
    num_envs: int,
    seed: int,
    explore: bool = False,
    best: bool = False,
    platform: Platform | None = None,
) -> Evaluation:
    """Play the trained policy of a run in its environment; see ``sebulba.evaluate``.

    Args:
      folder: Of the run.
      env: The environment.
      num_episodes: At least 1.
      num_envs: Environments side by side.
      seed: Of environments and policy.
      explore: Act as in training.
      best: Take the policy that returned most in an evaluation during training, not the last.
      platform: What JAX runs on.
    """
    if best and not folder.best_policy.exists():
        raise UsageError(
            f"{folder.path} has no best policy, which is kept where a run evaluates as it trains; "
            "train with --eval-every-env-steps, or leave --best out"
        )
    configure_jax(platform)
    local_devices()  # says in words what is wrong with the platform
    policy = load_policy(folder.best_policy if best else folder.path, explore=explore, seed=seed)
    factory = make_env_factory(env.id, **env.factory_arguments())
    return evaluate(policy, factory, num_episodes=num_episodes, num_envs=num_envs, seed=seed)


def _print_summary(result: Result, folder: RunFolder) -> None:
    metrics, counters = result.metrics, result.counters
    evaluation = ""
    if (evaluated := metrics.get("eval_return_mean")) is not None:
        evaluation = f"{number(evaluated)} (evaluation), "
    print(
        f"{'stopped' if result.stopped else 'done'}: "
        f"mean return {number(metrics.get('episode_return_mean'))} (last 100 episodes), "
        f"{evaluation}"
        f"{counters.env_steps:,} env steps, {counters.updates:,} updates, "
        f"{metrics.get('seconds') or 0.0:.1f} s\n"
        f"play it: sebulba eval {folder.path}",
        flush=True,
    )
