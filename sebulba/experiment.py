"""Everything around a run: builds environment, agent, loop and writers from a configuration."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from sebulba.agent import Agent
from sebulba.agents.registry import make_agent
from sebulba.configs.experiment import EnvConfig, ExperimentConfig
from sebulba.envs import env_spec, make_env_factory
from sebulba.errors import UsageError
from sebulba.evaluation import Evaluation, EvaluationPlayer, evaluate
from sebulba.jax_setup import Platform, configure_jax
from sebulba.loops.evaluator import Evaluator
from sebulba.loops.gymnasium_loop import GymnasiumLoop, Result
from sebulba.loops.metric_writers import (
    CompositeWriter,
    JsonLinesWriter,
    LinesWriter,
    TensorBoardWriter,
    number,
)
from sebulba.loops.update_loop import ObserveCycle
from sebulba.plots import learning_curve
from sebulba.policy import load_policy, save_policy
from sebulba.run_folder import RunFolder
from sebulba.runtime.devices import local_devices
from sebulba.types import EnvFactory, EnvSpec, MetricWriter, PyTree, RunSpec


def train(
    config: ExperimentConfig, folder: RunFolder, *, preset: str = "", command: Sequence[str] = ()
) -> int:
    """Train as ``config`` says and leave everything in ``folder``.

    Returns:
      0, or 128 plus the number of the signal that ended the run early; the policy is saved
      either way.

    Raises:
      UsageError: Something in ``config`` breaks a rule.
      Exception: Whatever the run raised; metrics and learning curve are in ``folder`` all the same.
    """
    configure_jax(config.platform, config.num_cpu_devices, config.compile_cache)
    with StopOnSignal() as stop_on_signal:
        factory = make_env_factory(config.env.id, **config.env.factory_arguments())
        agent = build_agent(config, env_spec(factory))
        title = preset or config.env.id
        writers = CompositeWriter(
            JsonLinesWriter(folder.metrics), TensorBoardWriter(folder.tensorboard)
        )
        with contextlib.ExitStack() as stack:

            def keep_best(networks: PyTree) -> None:
                _replace_policy(folder.best_policy, agent, networks, _run_spec(config, loop))

            player = _build_player(config, factory, agent, keep_best)
            if player is not None:
                stack.enter_context(player)
            loop = build_loop(config, factory, agent, writers, player=player)
            stack.enter_context(loop)
            state = loop.new_state(config.seed, config.steps_per_cycle)
            # Nothing can be wrong with the configuration any more: now write.
            folder.create()
            folder.write_config(config, preset, command)
            stop_on_signal.attach(loop)
            try:
                with contextlib.closing(writers):
                    writers.add(_progress_writer(title, folder, loop.describe))
                    result = loop.run(
                        state, config.num_cycles(loop.num_inferencers), config.steps_per_cycle
                    )
                save_policy(folder.policy, agent, result.acting_networks, _run_spec(config, loop))
            except BaseException:
                _rescue_policy(folder, agent, loop, _run_spec(config, loop))
                raise
            finally:
                _draw_learning_curve(folder, title)
    _print_summary(result, folder)
    return 128 + stop_on_signal.signal if stop_on_signal.signal else 0


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
) -> GymnasiumLoop:
    """Return the loop of this run; see ``GymnasiumLoop`` for writer and observe_cycle."""
    return GymnasiumLoop(
        factory,
        agent,
        config.num_envs,
        seed=config.seed,
        inference_devices=config.inference_devices,
        update_devices=config.update_devices,
        num_inferencers_per_device=config.num_inferencers_per_device,
        schedule=config.schedule,
        max_policy_lag=config.max_policy_lag,
        cycle=config.cycle,
        queue_size=config.queue_size,
        metric_writer=writer,
        metrics_interval_s=config.metrics_interval_s,
        observe_cycle=observe_cycle,
        evaluator=Evaluator(player, config.eval_every_env_steps) if player else None,
    )


def _build_player(
    config: ExperimentConfig,
    factory: EnvFactory,
    agent: Agent,
    on_best: Callable[[PyTree], None],
) -> EvaluationPlayer | None:
    if not config.eval_every_env_steps:
        return None
    return EvaluationPlayer(
        agent,
        factory,
        num_episodes=config.eval_episodes,
        num_envs=config.eval_num_envs,
        seed=config.seed,
        on_best=on_best,
    )


def _replace_policy(folder: Path, agent: Agent, networks: PyTree, run: RunSpec) -> None:
    """Save a policy in the place of an older one, of which no half is left at any time."""
    new = folder.with_name(f"{folder.name}.new")
    save_policy(new, agent, networks, run)
    if folder.exists():
        shutil.rmtree(folder)
    new.rename(folder)


def _rescue_policy(folder: RunFolder, agent: Agent, loop: GymnasiumLoop, run: RunSpec) -> None:
    """Save what a failed run had learned; nothing here may hide why it failed."""
    try:
        networks = loop.newest_networks()
        leaves = jax.tree.leaves(networks)
        if networks is None or not all(bool(jax.numpy.isfinite(leaf).all()) for leaf in leaves):
            return
        save_policy(folder.policy, agent, networks, run)
        print(f"the policy as it was last published is saved in {folder.policy}", flush=True)
    except Exception as error:
        warnings.warn(f"no policy: {type(error).__name__}: {error}", stacklevel=2)


def _run_spec(config: ExperimentConfig, loop: GymnasiumLoop) -> RunSpec:
    return RunSpec(
        config.num_envs, loop.num_inferencers, config.steps_per_cycle, len(loop.update_devices)
    )


def _progress_writer(title: str, folder: RunFolder, describe: Callable[[], str]) -> MetricWriter:
    """Return a live panel on a terminal, plain lines elsewhere."""
    if not sys.stdout.isatty():
        return LinesWriter(sys.stdout, describe)
    from sebulba.loops.live_panel import PanelWriter

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


class StopOnSignal:
    """Turns Ctrl-C and SIGTERM into ``loop.stop()``; a second one interrupts at once."""

    def __init__(self) -> None:
        """Change nothing yet."""
        self.signal: int | None = None
        """The signal that asked for the stop."""
        self._loop: GymnasiumLoop | None = None
        self._before: dict[int, object] = {}

    def attach(self, loop: GymnasiumLoop) -> None:
        """Stop this loop from now on; before, a signal interrupts at once."""
        self._loop = loop

    def _handle(self, which: int, frame: types.FrameType | None) -> None:
        del frame
        if self._loop is not None and self.signal is None:
            self.signal = which
            self._loop.stop()
        elif which == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            raise SystemExit(128 + which)

    def __enter__(self) -> StopOnSignal:
        for which in (signal.SIGINT, signal.SIGTERM):
            self._before[which] = signal.signal(which, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for which, before in self._before.items():
            signal.signal(which, before)  # type: ignore[arg-type]


def _draw_learning_curve(folder: RunFolder, title: str) -> None:
    """Draw what there is; on the way out of a failed run nothing may hide why it failed."""
    try:
        if folder.metrics.exists():
            learning_curve(folder.metrics, folder.learning_curve, title)
    except Exception as error:
        warnings.warn(f"no learning curve: {type(error).__name__}: {error}", stacklevel=2)


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
