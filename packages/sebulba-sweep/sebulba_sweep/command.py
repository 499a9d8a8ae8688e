"""``sebulba sweep``: its options. Free of JAX."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sebulba.commands.options import flag, json_of, number, option
from sebulba.configs.files import config_options, write_config_file
from sebulba.configs.presets import PRESETS
from sebulba.errors import UsageError, shown
from sebulba.runs.configurations import config_first
from sebulba.runs.exit_codes import EXIT_OK, EXIT_OTHER
from sebulba.runs.folder import RunFolder
from sebulba.runs.read_config import read_config
from sebulba.runs.signals import StopOnSignal
from sebulba.support.checks import at_least
from sebulba.support.files import check_regular, make_folder, read_json_object, write_json
from sebulba_sweep.space import Space, read_space
from sebulba_sweep.study import Ended, Study, import_optuna
from sebulba_sweep.sweep import Plan, Sweep, words_of
from sebulba_sweep.table import print_trials, ranked, record_of_trial
from sebulba_sweep.training import Measure

if TYPE_CHECKING:
    from sebulba.configs.experiment import ExperimentConfig

SWEEP, BEST = "sweep.json", "best.json"
"""What is swept, and the configuration of the best trial."""
INTERVALS = 20
"""Of a training without evaluations, in which its returns are compared."""

_say = functools.partial(print, flush=True)


def main(argv: Sequence[str]) -> int:
    """Run a sweep, or go on with one; returns the exit code."""
    arguments, words = parsed(argv)
    for name, least in (("trials", 1), ("parallel", 1), ("seeds", 1), ("prune_after", 0)):
        at_least(least, name, getattr(arguments, name))
    import_optuna()  # before anything is written
    space = read_space(Path(arguments.space))
    preset, config = read_config(words, "sebulba sweep")
    for name in ("name", "run_dir"):
        if getattr(config, name) is not None:
            raise UsageError(
                f"--{name.replace('_', '-')} is of one run; use --sweep-dir DIR for the runs of a "
                "sweep"
            )
    _options_of(config, preset)  # refused before hours of training
    for name, domain in space.items():
        for end in domain.ends():
            read_config([*words, *words_of(config, {name: end})], "sebulba sweep")
    folder = Path(arguments.sweep_dir or f"sweeps/{Path(preset).name}")
    with _opened(folder, _about(arguments, words, space), arguments.resume):
        plan = _plan(config, words, arguments, folder)
        min_trials = arguments.prune_after or arguments.trials + 1  # 0 prunes none
        study = Study(folder, space, config.seed, min_trials)
        sweep = Sweep(plan, study, arguments.trials, arguments.parallel, _say)
        with StopOnSignal() as stop_on_signal:
            stop_on_signal.attach(sweep)
            sweep.run()
            best = _report(study, space, plan, arguments.json)
        return stop_on_signal.exit_code or (EXIT_OK if best else EXIT_OTHER)


def parsed(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of a sweep, and ``[CONFIG, *options]`` of its trainings."""
    parser = _parser()
    arguments, others = parser.parse_known_args(list(argv))
    words = config_first(others)
    if not words or words[0].startswith("-"):
        parser.error("CONFIG is missing; name a configuration, such as ppo, or give --agent")
    return arguments, words


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sebulba sweep",
        usage="sebulba sweep CONFIG --space FILE [options] [options of sebulba train]",
        description="Search hyper-parameters. Optuna's TPE proposes values, and trials that are "
        "worse than the median end early.",
        epilog="CONFIG is a configuration as for sebulba train, or --agent. All other options "
        "are options of sebulba train, for all trials. With --eval-every-env-steps N the sweep "
        "compares evaluations, otherwise training returns.",
        allow_abbrev=False,
    )
    space = (
        'JSON of options and values: {"learning-rate": {"low": 1e-4, "high": 1e-2, "log": true}, '
        '"num-envs": [16, 32]}'
    )
    folder = "folder of the runs and the result; default: sweeps/CONFIG"
    for name, keywords in (
        option("--space", space, metavar="FILE", required=True),
        number("--trials", 20, "trials in total, including those before --resume"),
        number("--parallel", 1, "trainings that run at the same time"),
        number("--seeds", 1, "seeds per trial, from --seed on; the trial's return is their mean"),
        number("--prune-after", 5, "complete trials before any ends early; 0: none ends early"),
        option("--sweep-dir", folder, metavar="DIR"),
        flag("--resume", "continue the sweep in the folder, or begin it"),
        json_of("the table"),
    ):
        parser.add_argument(name, **keywords)
    return parser


def _about(arguments: argparse.Namespace, words: list[str], space: Space) -> dict[str, Any]:
    """Return what may not change when a sweep goes on, as JSON has it."""
    return {
        "config": words[0],
        "options": words[1:],
        "seeds": arguments.seeds,
        "space": {
            name: list(domain[0]) if len(domain) == 1 else domain._asdict()
            for name, domain in space.items()
        },
    }


@contextlib.contextmanager
def _opened(folder: Path, about: dict[str, Any], resume: bool) -> Any:
    """Make the folder of a sweep, or see that it holds this one, and keep others out of it.

    Raises:
      UsageError: It holds another sweep, or one that is not to be resumed.
    """
    file = folder / SWEEP
    if os.path.exists(file):
        if not resume:
            raise UsageError(
                f"{folder} holds a sweep; continue it with --resume, or choose another "
                "--sweep-dir DIR"
            )
        before = read_json_object(file)
        for name, value in about.items():
            if before.get(name) != value:
                raise UsageError(
                    f"the sweep in {folder} has {name}={shown(before.get(name))}, and not "
                    f"{shown(value)}; repeat its command, or choose another --sweep-dir"
                )
    make_folder(folder, "--sweep-dir")
    for path in sorted(folder.iterdir()):  # the folder may be a stranger's
        if not path.is_dir() or path.is_symlink():
            check_regular(path, links=False)
    with RunFolder(folder).locked():
        if not file.exists():
            write_json(file, about)
        yield


def _plan(
    config: ExperimentConfig,
    words: list[str],
    arguments: argparse.Namespace,
    folder: Path,
) -> Plan:
    if config.eval_every_env_steps:
        measure = Measure("eval_return_mean", "eval_env_steps", config.eval_every_env_steps)
    else:
        every = config.total_env_steps / INTERVALS
        measure = Measure("episode_return_mean", "env_steps", every)
    if arguments.parallel > 1:  # all trainings would be on the same cores
        words = [*words, "--no-pin-inferencers"]
    seeds = tuple(range(config.seed, config.seed + arguments.seeds))
    return Plan(config, tuple(words), seeds, measure, folder)


def _report(study: Study, space: Space, plan: Plan, json_file: str | None) -> bool:
    """Print and draw what came of a sweep; tell whether a trial is done."""
    from sebulba_sweep import pictures

    trials, importances = study.trials(), study.importances()
    print_trials(trials, importances)
    if json_file is not None:
        rows = [record_of_trial(trial) for trial in ranked(trials)]
        write_json(json_file, {"trials": rows, "importances": importances})
    for file in pictures.draw(plan.folder, space, trials, importances, plan.measure.every):
        print(f"drawn: {file}")
    best = next((trial for trial in ranked(trials) if trial.ended == Ended.DONE), None)
    if best is None:
        return False
    words = plan.train_words(best.values, plan.seeds[0])
    preset, config = read_config(words, "sebulba sweep")
    measured = {"return": best.score, "trial": best.number}
    best_options = _options_of(config, preset)
    write_config_file(plan.folder / BEST, preset, best_options, measured)
    trust = " --trust" if config.named_code() or preset not in PRESETS else ""
    print(f"train the best again: sebulba train {plan.folder / BEST}{trust}", flush=True)
    return True


def _options_of(config: ExperimentConfig, preset: str) -> dict[str, Any]:
    """Return the options that make ``config`` of ``preset``, which a file may have named."""
    words = [preset, *(["--trust"] if config.trust else [])]
    default = None if preset in PRESETS else read_config(words, "sebulba sweep")[1]
    return config_options(config, preset, default)
