"""The command line: ``sebulba train``, ``resume``, ``eval``, ``policies``, ``runs``, ``plot``,
``diff``, ``report``, ``board``, ``video``, ``watch``, ``export``, ``sweep``, ``bench``,
``doctor``, ``check-env``, ``check-agent``.

Wrong names of commands, configurations and options, and values that break a rule by themselves, are
found before JAX is imported; what only the environment knows, before anything runs.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import faulthandler
import importlib
import inspect
import os
import resource
import sys
import threading
import traceback
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import sebulba
from sebulba.errors import MORE_OPEN_FILES, UsageError, text_of
from sebulba.runs.exit_codes import (
    EXIT_CHECKPOINT,
    EXIT_ENV,
    EXIT_HANG,
    EXIT_HOST,
    EXIT_NOT_FINITE,
    EXIT_OK,
    EXIT_OTHER,
    EXIT_USAGE,
    exit_code_of,
)
from sebulba.runs.huge_pages import restart_with_huge_pages
from sebulba.runs.parent_process import go_on_in_child, leave, note_end, note_run
from sebulba.runs.signals import StopOnSignal
from sebulba.support import plugins
from sebulba.support.files import write_json
from sebulba.support.streams import make_streams_safe
from sebulba.support.trust import Trust
from sebulba.support.user_code import import_from

if TYPE_CHECKING:
    from sebulba.configs.experiment import ExperimentConfig
    from sebulba.runs.folder import RunFolder

USAGE = """\
usage: sebulba train CONFIG [options]      train an agent
       sebulba resume RUN [options]        go on with a run that ended, or was ended
       sebulba eval RUN [options]          play a trained policy
       sebulba policies                    list those that come with Sebulba
       sebulba runs [FOLDER]               list runs: how far, how well, how they ended
       sebulba plot RUN... [options]       draw runs, seeds together
       sebulba diff RUN RUN                see in what two runs differ
       sebulba report RUN [--out FILE]     write a run as one HTML page
       sebulba board [FOLDER] [--port N]   show runs in a browser
       sebulba video RUN [--out FILE]      film a trained policy
       sebulba watch RUN                   watch it in a window or the terminal
       sebulba export RUN --to FORM        write a policy as StableHLO or ONNX
       sebulba sweep CONFIG --space FILE   search hyper-parameters by many trainings
       sebulba bench BENCHMARK [options]   measure this machine
       sebulba doctor [options]            see whether this machine is fit
       sebulba check-env ENV [options]     see what is wrong with an environment
       sebulba check-agent AGENT [options] see what is wrong with an agent
       sebulba --version

"sebulba train --help" lists the configurations, "sebulba train CONFIG --help" its options.
"""

LEAST_OPEN_FILES = 128
WANTED_OPEN_FILES = 4096
"""Files, pipes and sockets that a process may have open: worker processes take some each."""

SYSTEM_ERRORS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.EMFILE, errno.ENFILE, errno.EIO),
)
"""Of disks that are full, read-only or broken, and of too many open files."""

_PLAIN_WARNING = warnings.formatwarning
SHORT_OPTIONS = {
    "--learning-rate": "--agent.learning-rate",
    "--agent.torso": "--agent.torso.kind",
}
"""Options of a component that are common enough to be given without its name."""

OWN_AGENT = "--agent module:class trains an agent of your own, whose hyper-parameters are then here"

COMMON_OPTIONS = {
    "--agent AGENT": "an agent of your own: my_package:MyAgent",
    "--env.id ID": "environment",
    "--env.backend NAME": "envpool, taken where it has the id, or gymnasium",
    "--total-env-steps N": "environment steps to train for",
    "--num-envs N": "environments per Inferencer",
    "--steps-per-cycle N": "environment steps in a trajectory",
    "--learning-rate X": "step size of the optimizer",
    "--seed N": "of networks, actions and environments",
    "--eval-every-env-steps N": "let the evaluation policy play so often; 0 for never",
    "--stop-at-return X": "end the run when it returns so much",
    "--writers NAME ...": "tensorboard, wandb, mlflow, or my_package:MyWriter",
    "--schedule NAME": "async, or lockstep for bit-identical networks",
    "--name NAME": "of the folder under runs/",
    "--resume": "go on if the folder holds a run, else begin it",
    "--run-dir DIR": "folder of the run, instead of runs/NAME",
}
"""What ``sebulba train --help`` shows of the options; a test holds that each exists."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Args:
      argv: Arguments after the program's name; None takes those of the process.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        return _command(argv)
    except SystemExit as exit_:  # tyro and argparse have printed why
        return exit_code_of(exit_)
    except BaseException as error:
        code = exit_code_of(error)
        if code in (EXIT_ENV, EXIT_OTHER) and not _is_of_the_system(error):
            traceback.print_exc()
        print(f"sebulba: {_describe(code, error)}", file=sys.stderr)
        _tell_hosts(error)
        return code


def _tell_hosts(error: BaseException) -> None:
    """Tell the hosts that learn with this one, if there are any, that it ends and why."""
    join = sys.modules.get("sebulba.cluster.hosts.join")
    hosts = join.joined() if join is not None else None
    if hosts is not None:
        hosts.end_after(error)


def _hosts_failed() -> bool:
    """Tell whether hosts learned together and do not end together."""
    join = sys.modules.get("sebulba.cluster.hosts.join")
    hosts = join.joined() if join is not None else None
    return hosts is not None and hosts.has_failed


def _is_of_the_system(error: BaseException) -> bool:
    """Tell whether a disk or a limit of the system is at fault, which a traceback says nothing of.

    One that an environment raised may be its own.
    """
    return (
        isinstance(error, OSError)
        and exit_code_of(error) == EXIT_OTHER
        and (error.errno in SYSTEM_ERRORS or "No usable temporary directory" in str(error))
    )


def _describe(code: int, error: BaseException) -> str:
    """Say in a line what ended the command."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    what = {
        EXIT_USAGE: "error",
        EXIT_NOT_FINITE: "not finite",
        EXIT_HANG: "hang",
        EXIT_CHECKPOINT: "checkpoint",
        EXIT_HOST: "hosts",
        EXIT_ENV: "environment",
    }.get(code, "error")
    if code in (EXIT_ENV, EXIT_OTHER):
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        return f"{what}: {text_of(error)}{notes}"
    return f"{what}: {error}"


def entry_point() -> None:
    """Run the command of this process and end it.

    A crash in native code prints the Python stacks of all threads. A training is a child of this
    process, which waits for it. It goes on where nothing can be printed any more; of any other
    command that has ended well, what it printed was all.
    """
    stdout = make_streams_safe()
    faulthandler.enable()
    restart_with_huge_pages(sys.argv[1:])
    trains = sys.argv[1:2] in (["train"], ["resume"])
    if trains:
        go_on_in_child()
    warnings.formatwarning = _words_of_warning
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    if stdout.is_lost and not trains:
        code = code or EXIT_OTHER
    ours = ("inferencer-", "evaluator")
    if any(thread.name.startswith(ours) for thread in threading.enumerate()):
        # One that hangs inside XLA would abort the interpreter's own way out.
        leave(code)
    if _hosts_failed():
        leave(code)  # jax.distributed would wait for hosts that are gone
    note_end(code)
    sys.exit(code)


def _words_of_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """Return a warning of this package in its words alone, and of others with where it is from."""
    if Path(filename).is_relative_to(Path(__file__).parents[1]):
        return f"sebulba: warning: {message}\n"
    return _PLAIN_WARNING(message, category, filename, lineno, line)


OWN = ("train", "resume", "eval")
OTHERS = {
    "policies": "compare:policies",
    "runs": "compare:runs",
    "plot": "compare:plot",
    "diff": "compare:diff",
    "report": "board:report",
    "board": "board:board",
    "video": "video:video",
    "watch": "video:watch",
    "export": "export:export",
    "sweep": "sweep:main",
    "bench": "bench:main",
    "doctor": "check:doctor",
    "check-env": "check:check_env",
    "check-agent": "check:check_agent",
}
"""Module of this folder and function of each command; it is imported when it is called."""
NAME_CODE_AT_ONCE = ("bench", "check-env")
"""Commands whose words may name code of the current folder, whoever wrote it."""


def _command(argv: list[str]) -> int:
    if not argv:
        print(_usage(), end="", file=sys.stderr)
        return EXIT_USAGE
    word, *rest = argv
    if word in ("-h", "--help"):
        print(_usage(), end="")
        return EXIT_OK
    if word == "--version":
        print(f"sebulba {sebulba.__version__}")
        return EXIT_OK
    entry = plugins.find(plugins.COMMANDS, word, (*OWN, *OTHERS))
    if entry is not None:
        return plugins.load(plugins.COMMANDS, entry)(rest) or EXIT_OK
    if word in OWN:
        return {"train": _train, "resume": _resume, "eval": _eval}[word](rest)
    if word not in OTHERS:
        plugins.check_not_apart(plugins.COMMANDS, word, f"the command {word!r}")
        nearest = _nearest(word, (*OWN, *OTHERS, *plugins.names(plugins.COMMANDS)))
        raise UsageError(f"command {word!r} is unknown; use {nearest}, see sebulba --help")
    if word in NAME_CODE_AT_ONCE:
        _import_from_here()
    module, _, function = OTHERS[word].partition(":")
    call = getattr(importlib.import_module(f"sebulba.commands.{module}"), function)
    given = {"read_config": read_config, "import_from_here": _import_from_here}
    taken = inspect.signature(call).parameters
    return call(rest, **{name: value for name, value in given.items() if name in taken})


def _usage() -> str:
    """Return the usage, with the commands that installed packages bring."""
    before, version, after = USAGE.partition("       sebulba --version\n")
    group, lines = plugins.COMMANDS, []
    for word in plugins.names(group, but=(*OWN, *OTHERS)):
        usage = f"sebulba {word} ..."
        lines.append(f"       {usage:<36}of the package {plugins.package_of(group, word)}\n")
    return "".join((before, *lines, version, after))


def _import_from_here() -> None:
    """Let ``my_package.envs:MyEnv`` be found in the current folder, after what is installed.

    Raises:
      UsageError: The current folder was deleted.
    """
    try:
        here = os.getcwd()
    except OSError as error:
        raise UsageError(
            f"the current folder is gone ({error.strerror}); change into one that exists"
        ) from error
    if "" not in sys.path:
        import_from(here)


def _nearest(word: str, known: Iterable[str]) -> str:
    """Return the known words near ``word``, or all of them."""
    near = difflib.get_close_matches(word, list(known), n=3, cutoff=0.5)
    return " or ".join(near or known)


def _allow_open_files() -> None:
    """Raise the limit of open files as far as it goes.

    Raises:
      UsageError: It is too low for JAX, an environment and a run folder together.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < WANTED_OPEN_FILES:
        soft = WANTED_OPEN_FILES if hard == resource.RLIM_INFINITY else min(WANTED_OPEN_FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft != resource.RLIM_INFINITY and soft < LEAST_OPEN_FILES:
        raise UsageError(
            f"this process may open {soft} files, and a run needs {LEAST_OPEN_FILES}; "
            f"{MORE_OPEN_FILES}"
        )


def _train(argv: list[str]) -> int:
    if not argv:
        print(_train_help(), end="", file=sys.stderr)
        return EXIT_USAGE
    if argv[0] in ("-h", "--help"):
        print(_train_help(), end="")
        return EXIT_OK
    _import_from_here()
    from sebulba.runs.configurations import config_first

    preset, config = read_config(config_first(argv), "sebulba train")
    from sebulba.runs.folder import choose_run_folder

    config = _joined(config)
    folder = choose_run_folder(config, preset)
    return _run(config, folder, preset, ["sebulba", "train", *argv])


def _joined(config: ExperimentConfig) -> ExperimentConfig:
    """Meet the other hosts, if there are any, and note which of them this is."""
    if not config.distributed.is_on:
        return config
    from sebulba.runs.meet_hosts import joined_config

    return joined_config(config)


def _run(config: ExperimentConfig, folder: RunFolder, preset: str, command: list[str]) -> int:
    _allow_open_files()
    _check_writers(config)
    config = folder.continued(config)
    # Said now, since importing JAX and compiling take seconds; the folder is not made yet.
    print(f"sebulba: {preset}", flush=True)
    if config.anneal_learning_rate and not folder.config.exists():
        print(
            f"the learning rate falls to 0 over {config.annealed_env_steps:,} env steps; in a run "
            "that is to go on after them, --no-anneal-learning-rate keeps it",
            flush=True,
        )
    note_run(folder.path)
    with StopOnSignal() as stop_on_signal:
        from sebulba.runs.train import train

        return train(config, folder, stop_on_signal, preset=preset, command=command)


def _check_writers(config: ExperimentConfig) -> None:
    """Raise UsageError, before the run begins, if a writer or callback is unknown or unusable."""
    from sebulba.runs.writers import find_callback, find_writer

    for name in config.writers:
        find_writer(name)
    for name in config.callbacks:
        find_callback(name)


def _resume(argv: list[str]) -> int:
    usage = """\
usage: sebulba resume RUN [options]

Go on with the run in folder RUN, such as runs/NAME, from its newest checkpoint that is whole.
The options are those of sebulba train, for what may change: --platform, devices, numbers of
Inferencers, and, unless the learning rate falls over the run, --total-env-steps and --num-envs.
Where it falls, --total-env-steps N --extension-learning-rate X goes on beyond its end, at the
learning rate X.
--drop-replay begins with an empty replay where the saved one does not fit; --strict refuses to
pass over a damaged checkpoint. A run that your own key has not signed needs --trust, since it can
run any code.
"""
    if not argv or argv[0] in ("-h", "--help"):
        print(usage, end="", file=sys.stdout if argv else sys.stderr)
        return EXIT_OK if argv else EXIT_USAGE
    import dataclasses

    from sebulba.runs.configurations import is_trust_given
    from sebulba.runs.folder import RunFolder

    folder = RunFolder(Path(argv[0]))
    folder.check_path()
    record = folder.record()  # once: nobody can exchange it between the check and its use
    trust = is_trust_given(argv[1:])
    if folder.trust(trust, record).is_trusted:
        _import_from_here()
    preset, saved = folder.read_config(record, trust=trust)
    config = _parse(preset, argv[1:], "sebulba resume", saved)
    config = dataclasses.replace(config, resume=True, name=None, run_dir=str(folder.path))
    config = _joined(config)
    folder.check_trusted(config.trust, record)
    folder.check_resumable(config)
    folder.check_has_checkpoints()
    return _run(config, folder, preset, ["sebulba", "resume", *argv])


def _train_help() -> str:
    import textwrap

    from sebulba.configs.presets import OWN_NUMBERS, tasks_with_names

    width, wide = max(map(len, OWN_NUMBERS)), max(map(len, COMMON_OPTIONS))
    lines = [f"  {name:<{width}}  {preset.summary}" for name, preset in OWN_NUMBERS.items()]
    lines += _presets_from_packages(width)
    more = [
        f"  {line}"
        for names in tasks_with_names().values()
        for line in textwrap.wrap(" ".join(names), 78, break_on_hyphens=False)
    ]
    return "\n".join(
        [
            "usage: sebulba train CONFIG [options]",
            "",
            "configurations:",
            *lines,
            "",
            "the same agents on more tasks, as TASK-AGENT:",
            *more,
            "",
            "Or a configuration file NAME.json, such as sebulba bench tune writes; the folder of a",
            "run, or its config.json; or an experiment of your own: my_preset.py:quick or",
            "my_package.presets:quick.",
            "",
            "Any other environment: sebulba train AGENT --env.id ID, where AGENT is one of the",
            "first six, for any task, and ID is known to envpool or Gymnasium, is gymnax:ID (or",
            "brax:, jumanji:, pgx:, jaxmarl:, pettingzoo:), or is my_package.envs:MyEnv (a",
            "class or a factory).",
            "",
            "An agent of your own: sebulba train --agent my_package:MyAgent --env.id ID, or",
            "sebulba train CONFIG --agent my_package:MyAgent for all else of a configuration.",
            "A network: --agent.torso my_package:MyTorso. Wrappers: --env.wrappers",
            'gymnasium.wrappers:FlattenObservation "my_package:MyWrapper(size=3)".',
            "",
            "common options:",
            *(f"  {option:<{wide}}  {what}" for option, what in COMMON_OPTIONS.items()),
            "",
            '"sebulba train CONFIG --help" lists all options with their defaults.',
            "",
        ]
    )


def _presets_from_packages(width: int) -> list[str]:
    """Return the lines of ``sebulba train --help`` on presets that installed packages bring."""
    from sebulba.configs.presets import PRESETS, from_packages

    lines = []
    for name in from_packages():
        try:
            summary = PRESETS[name].summary
        except UsageError as error:
            summary = f"cannot be used: {error}"
        lines.append(f"  {name:<{width}}  {summary}")
    return ["", "of installed packages:", *lines] if lines else []


def read_config(argv: list[str], command: str) -> tuple[str, ExperimentConfig]:
    """Read ``CONFIG [options]``; ``sebulba.runs.configurations`` says what CONFIG may be.

    Args:
      argv: The words.
      command: What they were given to, for messages.

    Returns:
      The name of the configuration, and the experiment.

    Raises:
      UsageError: The configuration is unknown, or an option breaks a rule.
      SystemExit: tyro has printed what is wrong with an option, or the help.
    """
    from sebulba.runs.configurations import AGENT, is_trust_given, start_of, take_agent

    word, *options = argv
    start = start_of(word, trust=is_trust_given(options), command=command)
    if start.file is None:
        return start.name, _parse(start.name, options, command, start.config)
    # No file can say of itself that it is to be trusted.
    words = [*start.words, "--no-trust", *options]
    config = _parse(start.name, words, command, start.config)
    if named := config.named_code():
        _, agent = take_agent(words)  # of which start_of has asked, if it is the file's
        typed = [*options, *([AGENT, agent] if agent else [])]
        known = _parse(start.name, typed, command, start.config).named_code()
        for what in (what for what in named if what not in known):
            doubt = "nothing says who wrote the file"
            Trust(doubt, config.trust).check(f"{start.file} names {what}")
    return start.name, config


def _parse(
    preset: str,
    options: list[str],
    command: str = "sebulba train",
    default: ExperimentConfig | None = None,
) -> ExperimentConfig:
    import dataclasses

    import tyro

    from sebulba.commands.options import ENV_OPTIONS, gather_env_options, registry
    from sebulba.configs.experiment import ExperimentConfig
    from sebulba.configs.own_agent import with_agent
    from sebulba.configs.presets import PRESETS
    from sebulba.runs.configurations import take_agent

    short = "; ".join(f"{short} is {long}" for short, long in SHORT_OPTIONS.items())
    start = default or PRESETS[preset].make()
    options, agent = take_agent(options)
    if agent is not None:
        start = with_agent(start, agent)
    before = start.env.options
    words, pairs = gather_env_options([_long_option(option) for option in options])
    if pairs:  # for tyro, a dict with entries has these options and no others
        start = dataclasses.replace(start, env=dataclasses.replace(start.env, options={}))
        words += [ENV_OPTIONS, *pairs]
    summary = PRESETS[preset].summary if preset in PRESETS else f"{start.agent_name}, your own"
    config = tyro.cli(
        ExperimentConfig,
        prog=f"{command} {preset}",
        description=f"{summary}.\n{short}.\n{OWN_AGENT}.",
        default=start,
        args=words,
        # The preset chooses the algorithm; without this each class would be a sub-command.
        config=(tyro.conf.AvoidSubcommands,),
        registry=registry,
    )
    if not pairs:
        return config
    env = dataclasses.replace(config.env, options={**before, **config.env.options})
    return dataclasses.replace(config, env=env)


def _long_option(option: str) -> str:
    name, equals, value = option.partition("=")
    return SHORT_OPTIONS.get(name.replace("_", "-"), name) + equals + value


def _eval_parser() -> argparse.ArgumentParser:
    from sebulba.options import MOST_EPISODE_STEPS

    parser = argparse.ArgumentParser(
        prog="sebulba eval", description="Play the trained policy of a run and print its return."
    )
    parser.add_argument(
        "run", metavar="RUN", help="folder of the run, such as runs/NAME, or pretrained:NAME"
    )
    parser.add_argument("--episodes", type=int, default=100, help="default: %(default)s")
    parser.add_argument("--num-envs", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    parser.add_argument(
        "--max-episode-steps",
        type=int,
        default=MOST_EPISODE_STEPS,
        metavar="N",
        help="cut an episode that has not ended after N steps; default: %(default)s",
    )
    parser.add_argument(
        "--explore", action="store_true", help="sample actions as in training, not the best ones"
    )
    parser.add_argument(
        "--best",
        action="store_true",
        help="the policy that returned most in an evaluation during training, not the last",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the result there")
    parser.add_argument(
        "--trust", action="store_true", help="run the code that a run of somebody else names"
    )
    parser.add_argument("--platform", choices=("cpu", "cuda", "tpu"), help="what JAX runs on")
    return parser


def _eval(argv: list[str]) -> int:
    from sebulba.options import INT32
    from sebulba.policies.pretrained import folder_of
    from sebulba.runs.folder import RunFolder

    arguments = _eval_parser().parse_args(argv)
    if arguments.seed not in INT32:
        raise UsageError(f"seed={arguments.seed} must be a 32-bit integer, such as 1")
    _check_folder_of("--json", arguments.json)
    for name in ("episodes", "num_envs", "max_episode_steps"):
        if (value := getattr(arguments, name)) < 1:
            raise UsageError(f"{name}={value} must be at least 1; use 1 or more")

    folder = RunFolder(folder_of(arguments.run))
    record = folder.record()  # once: nobody can exchange it between the check and its use
    trust = folder.trust(arguments.trust, record)
    env = folder.read_env_config(trust, record)
    if trust.is_trusted:
        _import_from_here()
    from sebulba.commands.episode_progress import EpisodeProgress
    from sebulba.runs.build import evaluate_run

    with EpisodeProgress(arguments.episodes, sys.stderr) as progress:
        evaluation = evaluate_run(
            folder,
            env,
            num_episodes=arguments.episodes,
            num_envs=arguments.num_envs,
            seed=arguments.seed,
            max_episode_steps=arguments.max_episode_steps,
            progress=progress,
            explore=arguments.explore,
            best=arguments.best,
            trust=arguments.trust,
            platform=arguments.platform,
        )
    print(evaluation)
    if arguments.json is not None:
        write_json(arguments.json, evaluation.record())
    return EXIT_OK


def _check_folder_of(option: str, file: str | None) -> None:
    if file is not None and not Path(file).absolute().parent.is_dir():
        raise UsageError(f"{option} {file} is in a folder that does not exist; make it")


if __name__ == "__main__":
    entry_point()
