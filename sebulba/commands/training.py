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

Continue the run in folder RUN, such as runs/NAME, from its newest undamaged checkpoint.

These options of sebulba train may change:
  --platform, devices, numbers of Inferencers
  --total-env-steps, --num-envs, unless the learning rate falls over the run
  --total-env-steps N --extension-learning-rate X, if it falls: trains on at the learning rate X

--drop-replay begins with an empty replay if the saved one does not fit.
--strict refuses to skip a damaged checkpoint.
--trust is needed for a run that your own key has not signed, since it can run any code.
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
            "more tasks, as TASK-AGENT:",
            *more,
            "",
            "CONFIG may also be:",
            "  NAME.json                a configuration file, as sebulba bench tune writes it",
            "  runs/NAME                the configuration of a run",
            "  my_preset.py:quick       your own experiment, also my_package.presets:quick",
            "",
            "your own code:",
            "  sebulba train ppo --env.id ID",
            "      any environment: an id of envpool or Gymnasium; gymnax:ID, brax:ID,",
            "      jumanji:ID, pgx:ID, jaxmarl:ID, pettingzoo:ID; my_package.envs:MyEnv",
            "  sebulba train --agent my_package:MyAgent --env.id ID",
            "      your own agent; all other options are from CONFIG, if it is given",
            "  --agent.torso my_package:MyTorso",
            '  --env.wrappers "my_package:MyWrapper(size=3)" my_package:MyOtherWrapper',
            "",
            *common_options(),
            "",
            '"sebulba train CONFIG --help" shows the defaults, --help-all all options.',
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
