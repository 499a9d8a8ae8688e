"""``sebulba train`` and ``sebulba resume``: a run in its folder, from its begin to its end."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import shlex
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import sebulba
from sebulba.agent import AgentState, without_bank
from sebulba.checkpoints.checkpointer import Checkpoint, Checkpointer
from sebulba.checkpoints.store import CheckpointStore
from sebulba.cluster.hosts.join import join_hosts
from sebulba.configs.experiment import ExperimentConfig
from sebulba.configs.presets import goal_of
from sebulba.envs import env_source, env_spec, make_env_factory
from sebulba.errors import CheckpointError, HangError, HostError, UsageError, text_of
from sebulba.loops.callbacks import Of, stop_at_return
from sebulba.loops.evaluation import EvaluationPlayer
from sebulba.loops.evaluation_thread import Evaluator, evaluation_record
from sebulba.loops.gymnasium_loop import GymnasiumLoop, Result
from sebulba.loops.resuming import with_networks_of
from sebulba.loops.session import ObserveCycle
from sebulba.loops.snapshot_trees import SnapshotReader
from sebulba.metrics.counters import EPISODES_AVERAGED
from sebulba.metrics.episode_log import EpisodeLog
from sebulba.metrics.plots import learning_curve, read_records
from sebulba.metrics.writers import (
    CompositeWriter,
    LinesWriter,
    SpacedJsonLinesWriter,
    evaluated,
    few_episodes,
    returned,
)
from sebulba.policies.policy import save_policy
from sebulba.runs.build import (
    build_agent,
    build_envs,
    build_films,
    build_player,
    note_of_unbounded_actions,
    notes_of_memory,
    warn_of_rate_0,
)
from sebulba.runs.ended import write_end
from sebulba.runs.exit_codes import EXIT_OK, exit_code_of
from sebulba.runs.folder import RunFolder, as_json
from sebulba.runs.jax_setup import set_up_jax
from sebulba.runs.signals import StopOnSignal
from sebulba.runs.wording import resuming, setting
from sebulba.runs.writers import find_callback, find_recorder, find_writer, made_writer
from sebulba.support.files import replace_folder, whole, write_whole
from sebulba.support.trees import is_finite
from sebulba.support.trust import KEY_VARIABLE, key_problem
from sebulba.types import Callback, MetricWriter, PyTree, RunEnd, RunInfo, StepInfos, Trajectory


def train_in_folder(
    config: ExperimentConfig,
    folder: RunFolder,
    stop_on_signal: StopOnSignal | None = None,
    *,
    preset: str = "",
    command: Sequence[str] = (),
) -> Result | None:
    """Train as ``config`` says and leave everything in ``folder``.

    Args:
      stop_on_signal: Turns signals into stops; it is in force already and is given the loop. None
        leaves signals alone, and this process alive where the update hangs.
      command: The words of the command line, which are kept in the folder.

    Returns:
      The result; None on a host other than the first of several. Where a signal or a callback ends
      the run early, the policy is saved as well.

    Raises:
      UsageError: Something in ``config`` breaks a rule.
      CheckpointError: The run is to be resumed and no checkpoint is whole.
      Exception: Whatever the run raised; metrics and learning curve are in ``folder`` all the same.
    """
    config = folder.with_its_inferencers(config)
    given, config = config, set_up_jax(config)
    kind = _Follower if config.distributed.host else _Run
    run = kind(config, folder, preset or config.env.id, ends_hung=stop_on_signal is not None)
    with contextlib.closing(run):
        run.resume_or_begin()
        if not run.num_cycles:
            result = run.complete()
            run.meet("the end", math.inf)  # host 0 may have an evaluation to play
            return result
        run.begin(given, preset, command)
        if stop_on_signal is not None:
            stop_on_signal.attach(run.loop)
        try:
            result = run.train()
            run.note_end(result, EXIT_OK if stop_on_signal is None else stop_on_signal.exit_code)
        finally:
            run.draw()  # last, since whoever sent a signal may kill this process soon
    return run.result(result)


def _of_extension(config: ExperimentConfig) -> str:
    """Return the options with which a run trains on, also after its learning rate is 0."""
    falls = config.anneal_learning_rate and hasattr(config.agent, "learning_rate")
    rate = f" {setting('extension_learning_rate', 'X')}" if falls else ""
    return setting("total_env_steps", "N") + rate


class _Run:
    """What surrounds the loop in one run of the command: made, used and closed together."""

    def __init__(
        self, config: ExperimentConfig, folder: RunFolder, title: str, *, ends_hung: bool
    ) -> None:
        """Keep the arguments; nothing is made yet. ``ends_hung``: end a process that hangs."""
        self._ends_hung = ends_hung
        self._config = config
        self.env = config.env
        """With what a new run finds out about its environment."""
        self._folder = folder
        self._title = title
        self._hosts = join_hosts(config.distributed) if config.distributed.is_on else None
        self._lock = contextlib.ExitStack()
        self._stack = contextlib.ExitStack()
        self._writers = CompositeWriter(before=self._mend_folder)
        self._versions = {"sebulba": sebulba.__version__, "jax": jax.__version__}
        self._config_text = ""
        self._here = os.getcwd()
        self._is_deleted = False
        self._end: RunEnd = "failed"
        """How the run ended, as far as is known yet."""
        self.env_steps_done = 0
        """Environment steps of earlier processes of this run."""

    def resume_or_begin(self) -> None:
        """Make everything, take possession of the folder, and say where the run goes on."""
        goes_on = self._folder.config.exists()
        if goes_on:
            self._lock.enter_context(self._folder.locked())
            self._folder.tidy()
        try:
            self._make()
            self._writers.add(SpacedJsonLinesWriter(self._folder.metrics))
            self._make_writers = [find_writer(name) for name in self._config.writers]
        except Exception as error:
            if goes_on:  # what is there of an earlier end is no longer why
                write_end(self._folder, error=error, metrics={})
            raise
        if not goes_on:
            # Nothing can be wrong with the configuration any more: now write.
            self._folder.create()
            self._lock.enter_context(self._folder.locked())
        elif not self._config.resume:
            self._folder.begin_anew()
        self._say_where()

    def _make(self) -> None:
        """Make agent, environments and loop, and put them where the run is resumed."""
        config, folder = self._config, self._folder
        options = config.checkpoint
        checkpointer = self._stack.enter_context(
            Checkpointer(
                folder.checkpoints,
                every_s=options.every_s,
                every_updates=options.every_updates,
                experience_every_s=options.replay_every_s,
                keep_last=options.keep_last,
                milestone_every=options.milestone_env_steps,
                about=self._about,
                host=config.distributed.host or 0,
                num_hosts=config.distributed.hosts,
            )
        )
        checkpoint = self._load(checkpointer)
        self._is_resumed = checkpoint is not None
        self._saved_by = checkpoint.snapshot.record["versions"] if checkpoint else self._versions
        env = folder.chosen_env(config)
        self.source = env_source(env.id, env.backend)
        self._versions |= self.source.versions
        if config.resume and folder.config.exists():
            factory: Any = make_env_factory(env.id, **env.factory_arguments())
            spec = env_spec(factory)
        else:
            factory, spec, env = build_envs(config, env)
            self._config = config = dataclasses.replace(config, env=env)
            self.env = env
        self._agent = build_agent(config, spec)
        warn_of_rate_0(config, self._agent)
        notes = *notes_of_memory(config), note_of_unbounded_actions(self._agent.spec)
        for note in filter(None, notes):
            print(f"sebulba: {note}", flush=True)
        self._player = self._make_player(factory)
        self.loop = self._stack.enter_context(
            GymnasiumLoop(
                factory,
                self._agent,
                config.num_envs,
                options=config,
                metric_writer=self._writers,
                callbacks=self._make_callbacks(),
                observe_cycle=self._make_observer(checkpoint),
                evaluator=self._make_evaluator(checkpoint),
                checkpointer=checkpointer,
                on_hang=self._end_hung,
            )
        )
        if checkpoint is None:
            self._state = [self._new_state()]
        else:
            self._state = [self.loop.restore(checkpoint, drop_replay=config.drop_replay)]
            self.env_steps_done = checkpoint.env_steps
        self.num_cycles = config.num_cycles(self.loop.num_inferencers, self.env_steps_done)

    def _new_state(self) -> AgentState:
        """Return the state with which the run begins."""
        config = self._config
        state = self.loop.new_state(config.seed, config.steps_per_cycle)
        if config.from_run is None:
            return state
        folder = RunFolder(Path(config.from_run))
        folder.check_has_checkpoints()
        store = CheckpointStore(folder.checkpoints)
        newest = store.load_newest(read=functools.partial(store.load, trust=config.trust))
        assert newest is not None, "it has checkpoints"
        print(f"sebulba: the networks of {folder.path} at {newest[0]:,} env steps", flush=True)
        reader = SnapshotReader(newest[1], self.loop.agent.zero_if_unsaved)
        return with_networks_of(self.loop.agent, state, reader)

    def meet(self, *said: Any) -> Any:
        """Return what host 0 says at a meeting of all hosts; alone, what this one says."""
        return said[0] if self._hosts is None else self._hosts.meet(*said)[0]

    def begin(self, given: ExperimentConfig, preset: str, command: Sequence[str]) -> None:
        """Write what was asked for, and tell the other hosts which run this is, and how long."""
        folder = self._folder
        folder.ended.unlink(missing_ok=True)
        number = self.loop.placed.options.num_inferencers_per_device
        given = dataclasses.replace(given, env=self.env, num_inferencers_per_device=number)
        folder.write_config(given, preset, command, dataclasses.asdict(self.source))
        self._config_text = folder.config.read_text()  # from now on a deleted folder ends the run
        self.meet([folder.run_id(), self.num_cycles])
        if problem := key_problem():
            print(
                f"the run is not signed, and resuming it will need {setting('trust', True)}: "
                f"{problem}; "
                f"{KEY_VARIABLE} names another place",
                flush=True,
            )

    def _load(self, checkpointer: Checkpointer) -> Checkpoint | None:
        """Return the checkpoint to resume from, which host 0 chooses."""
        config, checkpoint = self._config, None
        if config.resume:
            checkpoint = checkpointer.load_newest(strict=config.strict, trust=config.trust)
        if checkpoint is not None:
            self._folder.check_of_this_run(checkpoint.snapshot.record, config)
        self.meet(None if checkpoint is None else checkpoint.env_steps)
        return checkpoint

    def _make_player(self, factory: Any) -> EvaluationPlayer | None:
        player = build_player(self._config, factory, self._agent, self._keep_best)
        if player is not None:
            self._stack.enter_context(player)
            player.best = self._folder.best_return()
        return player

    def _make_callbacks(self) -> list[Callback]:
        """Return what may end the run early."""
        config, made = self._config, []
        if config.stop_at_return is not None:
            of: Of = "training" if self._player is None else "evaluation"
            made.append(stop_at_return(config.stop_at_return, of))
        return made + [find_callback(name) for name in config.callbacks]

    def _make_observer(self, checkpoint: Checkpoint | None) -> ObserveCycle | None:
        """Return what notes the episodes of training, and records them if that was asked for."""
        num_episodes, env_steps = 0, 0
        if checkpoint is not None:
            num_episodes = checkpoint.snapshot.record["counters"].get("episodes", 0)
            env_steps = checkpoint.env_steps
        log = EpisodeLog(self._folder.episodes, num_episodes, env_steps)
        self._writers.add(log)
        given = self._config.record_dataset
        if given is None:
            return log.observe
        append = self._config.resume and self._folder.config.exists()
        recorder = find_recorder("training")(given, self._agent.spec, append=append)
        self._stack.callback(recorder.close)

        def observe(trajectory: Trajectory, infos: StepInfos) -> None:
            log.observe(trajectory, infos)
            recorder(trajectory, infos)

        return observe

    def _make_evaluator(self, checkpoint: Checkpoint | None) -> Evaluator | None:
        if self._player is None:
            return None
        config, folder = self._config, self._folder
        played_at = folder.evaluated_at(checkpoint.env_steps) if checkpoint else 0
        films = build_films(config, folder, self._agent)
        if films is not None:
            self._stack.callback(films.close)
        return Evaluator(self._player, config.eval_every_env_steps, played_at, after=films)

    def _say_where(self) -> None:
        """Say where the run is, and where it is resumed, with what is dropped of it."""
        print(f"sebulba: {self.source} in {self._folder.path}", flush=True)
        if self.loop.placed.about:
            print(f"sebulba: {self.loop.placed.about}", flush=True)
        if not self._config.resume:
            return
        dropped = self._folder.drop_metrics_after(self.env_steps_done)
        if not self._is_resumed:
            return  # killed before its first checkpoint: it begins again
        print(f"resumed at {self.env_steps_done:,} env steps", flush=True)
        for note in self.loop.resume_notes:
            print(f"  {note}", flush=True)
        for name, version in self._versions.items():
            if (before := self._saved_by.get(name, version)) != version:
                print(f"  {name} was {before} and is {version}", flush=True)
        if dropped:
            print(f"  {dropped} later records in metrics.jsonl are dropped", flush=True)

    def train(self) -> Result:
        """Run the loop and leave everything in the folder."""
        config, folder = self._config, self._folder
        try:
            with self._writing():
                loop = self.loop
                self._writers.add(_progress_writer(self._title, folder, loop))
                # Nobody keeps the state, whose replay would be in memory twice.
                try:
                    result = self.loop.run(
                        self._state.pop(), self.num_cycles, config.steps_per_cycle
                    )
                except KeyboardInterrupt:  # in a program of the user's
                    self._end = "stopped"
                    raise
                self._mend_folder()
                self._save_policy(folder.policy, result.acting_networks, result.state)
                is_stopped = result.stopped and result.stop_reason is None
                self._end = "stopped" if is_stopped else "finished"
        except BaseException as error:
            self._mend_folder()
            self._rescue_policy()
            write_end(
                folder,
                error=error,
                metrics=self._writers.last,
                last_transition=self.loop.last_transition(),
            )
            raise
        if self._is_deleted:
            deleted = self._deleted_error()
            write_end(folder, error=deleted, metrics=result.metrics)
            raise deleted
        return result

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Begin the writers that were asked for; tell them how the run ended, and close all."""
        resumed_at = self.env_steps_done if self._config.resume else None
        config = as_json(self._config) | {"preset": self._title}
        config.pop("")  # the class of the configuration itself
        with contextlib.closing(self._writers):
            try:
                run = RunInfo(self._folder.root, self._folder.run_id() or "", config, resumed_at)
                for make in self._make_writers:
                    self._writers.add(made_writer(make, run))
                yield
            finally:
                self._writers.end("failed" if self._is_deleted else self._end)

    def _mend_folder(self) -> None:
        """If somebody deleted the folder, end the run, and make a folder to save it in."""
        if not self._config_text or not self._folder.is_deleted():
            return
        self._is_deleted = True
        self.loop.stop()
        try:
            os.makedirs(self._here, exist_ok=True)  # it may be gone with the run folder in it
            os.chdir(self._here)
            self._folder.create()
            write_whole(self._folder.config, self._config_text)
            self._lock.enter_context(self._folder.locked())
        except (UsageError, OSError) as error:
            warnings.warn(text_of(error), stacklevel=2)

    def _deleted_error(self) -> CheckpointError:
        path = self._folder.path
        return CheckpointError(
            f"run folder {path} was deleted or moved while the run wrote into it, so the run was "
            f"ended. It is saved in a new folder of that name, without the metrics before; to go "
            f"on: {resuming(path)}"
        )

    def note_end(self, result: Result, code: int) -> None:
        """Write into the folder how the run ended."""
        write_end(self._folder, code=code, reason=result.stop_reason, metrics=result.metrics)

    def result(self, result: Result) -> Result | None:
        """Say how it went; return the result."""
        _print_summary(result, self._folder, self._config)
        return dataclasses.replace(result, folder=self._folder.root)

    def complete(self) -> Result | None:
        """Leave what a process did not that was killed between its last checkpoint and its end.

        Returns:
          The result of the run as it was saved.
        """
        print(
            f"nothing to do: {self.env_steps_done:,} env steps are done; "
            f"{_of_extension(self._config)} trains on",
            flush=True,
        )
        self.meet([self._folder.run_id(), self.num_cycles])
        folder, state = self._folder, self._state.pop()
        done = self.env_steps_done
        to_play = self._player is not None and folder.evaluated_at(done) < done
        networks = without_bank(self._agent.acting_networks(state.networks, state.experience))
        records = read_records(folder.metrics) if folder.metrics.exists() else []
        last = records[-1] if records else {}
        result = Result(state, self.loop.counters, last, networks, folder=folder.root)
        if folder.is_complete and not to_play:
            return result
        self._save_policy(folder.policy, networks, state)
        try:
            with self._writing():
                if to_play:
                    last = self._play_last(networks, last)
                self._end = "finished"
        except Exception as error:
            write_end(folder, error=error, metrics=last)
            raise
        write_end(folder, metrics=last)
        self.draw()
        return dataclasses.replace(result, metrics=last)

    def _play_last(self, networks: PyTree, last: Mapping[str, Any]) -> dict[str, Any]:
        """Play the evaluation of the end, which was cut short; return its record."""
        assert self._player is not None
        print("playing the evaluation of the end, which was cut short", flush=True)
        began = time.perf_counter()
        played = self._player(jax.device_get(networks), threading.Event())
        assert played is not None, "nobody stops it"
        record = {**last, **evaluation_record(played, self.env_steps_done, began, 0)}
        self._writers.write(record)
        return record

    def draw(self) -> None:
        """Draw the learning curve; failing here only warns, since why a run failed must be seen."""
        config, folder = self._config, self._folder
        names = (config.env.id, config.agent_name)
        if not folder.metrics.exists():
            return
        try:
            with whole(folder.learning_curve) as new:
                learning_curve(
                    folder.metrics,
                    new,
                    ", ".join(name.rpartition(":")[2] for name in names),
                    episodes=folder.episodes,
                    subtitle=f"seed {config.seed}",
                    goal=goal_of(self._title, config),
                )
        except Exception as error:
            warnings.warn(f"no learning curve: {type(error).__name__}: {error}", stacklevel=2)

    def close(self) -> None:
        """Close what was made, and only then let another process into the folder."""
        with self._lock:
            self._stack.close()

    def _about(self) -> dict[str, Any]:
        """Return what a checkpoint says beside where the loop stands."""
        self._mend_folder()  # whose identity belongs to it
        return {"versions": self._versions, **self._folder.about(self._config)}

    def _keep_best(self, networks: PyTree) -> None:
        assert self._player is not None and self._player.best_evaluation is not None
        best = self._player.best_evaluation
        which = "newest" if best.is_zero_sum else "best so far"

        def write(new: Path) -> None:
            returns = returned(best.metrics(), "eval_return_mean")
            more = {"evaluation": f"{returns}, the {which}"}
            self._write_policy(new, networks, more=more)
            self._folder.write_best_return(new, best.episode_return_mean)

        try:
            replace_folder(self._folder.best_policy, write)
        except OSError as error:
            self._player.best = self._folder.best_return()
            warnings.warn(f"the best policy is not saved: {text_of(error)}", stacklevel=2)

    def _save_policy(self, folder: Path, networks: PyTree, state: AgentState | None = None) -> None:
        values: PyTree = ()
        if state is not None:
            values = self._agent.value_networks(state.networks, state.experience)
        try:
            replace_folder(folder, lambda new: self._write_policy(new, networks, values))
        except OSError as error:
            raise CheckpointError(
                f"the policy cannot be saved in {folder} ({error.strerror or error}); check that "
                f"the disk has space and the folder is writable, then: {resuming(folder.parent)}"
            ) from error

    def _write_policy(
        self,
        folder: Path,
        networks: PyTree,
        values: PyTree = (),
        more: Mapping[str, Any] | None = None,
    ) -> None:
        save_policy(
            folder,
            self._agent,
            networks,
            self.loop.run_spec(self._config.steps_per_cycle),
            run_id=self._folder.run_id(),
            value_networks=values,
            about={**self._facts(), **(more or {})},
        )

    def _facts(self) -> dict[str, Any]:
        """Return what the card of the policy says of its training."""
        config, record = self._config, self._writers.last
        facts: dict[str, Any] = {
            "configuration": self._title,
            "wrappers": ", ".join(config.env.wrappers),
            "seed": str(config.seed),
            "trained for": f"{record.get('env_steps', self.env_steps_done):,} env steps",
        }
        if number_averaged := record.get("episodes_averaged"):
            facts["return in training"] = (
                f"{returned(record)}, mean of the last {number_averaged} episodes"
            )
        if record.get("eval_return_mean") is not None:
            facts["evaluation"] = (
                f"{evaluated(record)}, {record.get('eval_episodes')} episodes at "
                f"{record.get('eval_env_steps', 0):,} env steps"
            )
        versions = ", ".join(f"{name} {version}" for name, version in self._versions.items())
        return {**facts, "versions": versions}

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

    def _end_hung(self, error: HangError | HostError) -> None:
        """Say so, and end the process: its main thread is in a program that does not return."""
        write_end(self._folder, error=error, metrics=self._writers.last)
        _say_hung(error)
        if self._ends_hung:
            os._exit(exit_code_of(error))


class _Follower(_Run):
    """The run on a host other than host 0: it learns, and saves its parts of checkpoints."""

    def resume_or_begin(self) -> None:
        self._make()
        for note in self.loop.resume_notes:
            print(f"  {self._hosts}: {note}", flush=True)
        folder = self._folder
        run_id, self.num_cycles = self.meet(None)
        if folder.run_id() != run_id:
            raise UsageError(
                f"run folder {folder.path} on {self._hosts} is not that of host 0; hosts save into "
                "one folder, so give --run-dir a folder that all of them share, such as one on NFS"
            )

    def _load(self, checkpointer: Checkpointer) -> Checkpoint | None:
        number = self.meet(None)
        return None if number is None else checkpointer.load(number, trust=self._config.trust)

    def _make_player(self, factory: Any) -> None:
        """Leave evaluations, callbacks, episodes, files and the screen to host 0."""

    def _make_callbacks(self) -> list[Callback]:
        return []

    def _make_observer(self, checkpoint: Checkpoint | None) -> None:
        pass

    def begin(self, given: ExperimentConfig, preset: str, command: Sequence[str]) -> None:
        pass

    def train(self) -> Result:
        return self.loop.run(self._state.pop(), self.num_cycles, self._config.steps_per_cycle)

    def note_end(self, result: Result, code: int) -> None:
        pass

    def draw(self) -> None:
        pass

    def complete(self) -> None:
        pass

    def result(self, result: Result) -> None:
        how = "stopped" if result.stopped else "done"
        steps = f"{result.counters.env_steps:,} env steps of all hosts"
        print(f"{how}: {self._hosts}, {steps}", flush=True)

    def _end_hung(self, error: HangError | HostError) -> None:
        _say_hung(error)
        if self._ends_hung:
            os._exit(exit_code_of(error))


def _say_hung(error: HangError | HostError) -> None:
    what = "hosts" if isinstance(error, HostError) else "hang"
    print(f"sebulba: {what}: {error}", file=sys.stderr, flush=True)


def _progress_writer(title: str, folder: RunFolder, loop: GymnasiumLoop) -> MetricWriter:
    """Return a live panel on a terminal that can show one, plain lines elsewhere."""
    can_draw = (os.environ.get("TERM") or "dumb") not in ("dumb", "unknown")
    is_unicode = (getattr(sys.stdout, "encoding", None) or "").lower().startswith("utf")
    if not (sys.stdout.isatty() and can_draw and is_unicode):
        return LinesWriter(sys.stdout, loop.describe)
    from sebulba.metrics.live_panel import PanelWriter

    panel = PanelWriter(
        title, str(folder.path), lambda: "\n".join([loop.describe(), *loop.describe_nodes()])
    )
    panel.start()
    return panel


def _mean_return(metrics: Mapping[str, Any]) -> str:
    """Return the mean return of the training episodes that the record has, and how many."""
    averaged = metrics.get("episodes_averaged")
    if not averaged:
        return "no episode ended"
    mean = f"mean return {returned(metrics)}"
    if averaged >= EPISODES_AVERAGED:
        return f"{mean} (last {averaged} episodes)"
    return mean + few_episodes(metrics)


def _print_summary(result: Result, folder: RunFolder, config: ExperimentConfig) -> None:
    """Say where the run stands, and how to resume and to play it."""
    metrics, counters = result.metrics, result.counters
    env_steps, is_stopped = f"{counters.env_steps:,}", result.stopped and not result.stop_reason
    if result.stop_reason is not None:
        print(f"ended early: {result.stop_reason}", flush=True)
    elif not counters.updates and not result.stopped:
        replay, smaller = getattr(config.agent, "replay", None), ""
        if replay is not None:
            field = "warm_up_cycles" if replay.warm_up_cycles else "warm_up_env_steps"
            smaller = f", or a smaller {setting(f'agent.replay.{field}', 'N')}"
        print(
            "nothing was learned, since no update was due so soon; use a larger "
            f"{setting('total_env_steps', 'N')}{smaller}",
            flush=True,
        )
    parts = [_mean_return(metrics)]
    if metrics.get("eval_return_mean") is not None:
        parts.append(f"{returned(metrics, 'eval_return_mean')} (evaluation)")
    parts += [] if is_stopped else [f"{env_steps} env steps"]
    parts += [f"{counters.updates:,} updates", f"{metrics.get('seconds') or 0.0:.1f} s"]
    how = f"stopped at {env_steps} of {config.total_env_steps:,} env steps, all saved"
    print(f"{how if is_stopped else 'done'}: {', '.join(parts)}", flush=True)
    if result.stopped:
        print(f"resume it: {resuming(folder.path)}", flush=True)
    by_clients = config.env.id.replace("/", ":") in ("external:clients", "external:godot")
    how = "serve it: sebulba serve" if by_clients else "play it: sebulba eval"
    print(f"{how} {shlex.quote(str(folder.path))}", flush=True)
