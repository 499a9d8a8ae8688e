"""``sebulba train`` and ``sebulba resume``. Free of JAX until the run begins."""

from __future__ import annotations

import sys
import textwrap

from sebulba.configs.experiment import ExperimentConfig
from sebulba.configs.presets import OWN_NUMBERS, PRESETS, from_packages, tasks_with_names
from sebulba.errors import UsageError
from sebulba.runs.api import joined, open_run, ready, resumed
from sebulba.runs.configurations import config_first, is_trust_given
from sebulba.runs.exit_codes import EXIT_OK, EXIT_USAGE
from sebulba.runs.folder import RunFolder, choose_run_folder
from sebulba.runs.parent_process import note_run
from sebulba.runs.read_config import common_options, parse, read_config
from sebulba.runs.signals import StopOnSignal
from sebulba.support.user_code import import_from_here


def train(argv: list[str]) -> int:
    """Train as the words say; returns the exit code."""
    if not argv:
        print(_train_help(), end="", file=sys.stderr)
        return EXIT_USAGE
    if argv[0] in ("-h", "--help"):
        print(_train_help(), end="")
        return EXIT_OK
    import_from_here()
    preset, config = read_config(config_first(argv), "sebulba train")
    config = joined(config)
    folder = choose_run_folder(config, preset)
    return _run(config, folder, preset, ["sebulba", "train", *argv])


def resume(argv: list[str]) -> int:
    """Resume the run that the first word names; returns the exit code."""
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
    trust = is_trust_given(argv[1:])
    folder, record, (preset, saved) = open_run(argv[0], trust=trust, if_trusted=import_from_here)
    config = resumed(folder, record, parse(preset, argv[1:], "sebulba resume", saved))
    return _run(config, folder, preset, ["sebulba", "resume", *argv])


def _run(config: ExperimentConfig, folder: RunFolder, preset: str, command: list[str]) -> int:
    config = ready(config, folder, preset)
    note_run(folder.path)
    with StopOnSignal() as stop_on_signal:
        from sebulba.runs.train import train_in_folder

        train_in_folder(config, folder, stop_on_signal, preset=preset, command=command)
        return stop_on_signal.exit_code


def _train_help() -> str:
    width = max(map(len, OWN_NUMBERS))
    lines = [f"  {name:<{width}}  {preset.summary}" for name, preset in OWN_NUMBERS.items()]
    lines += _presets_of_packages(width)
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
            *common_options(),
            "",
            '"sebulba train CONFIG --help" shows their defaults, and --help-all all options.',
            "",
        ]
    )


def _presets_of_packages(width: int) -> list[str]:
    """Return the lines of ``sebulba train --help`` on presets that installed packages bring."""
    lines = []
    for name in from_packages():
        try:
            summary = PRESETS[name].summary
        except UsageError as error:
            summary = f"cannot be used: {error}"
        lines.append(f"  {name:<{width}}  {summary}")
    return ["", "of installed packages:", *lines] if lines else []
