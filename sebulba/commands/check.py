"""The commands ``sebulba doctor``, ``sebulba check-env`` and ``sebulba check-agent``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from sebulba.errors import UsageError
from sebulba.support.files import write_json
from sebulba.tools.check.finding import Report
from sebulba.tools.check.isolation import isolated_findings
from sebulba.tools.check.printing import print_findings

EXIT_PROBLEM = 1
DOCTOR_TIMEOUT_S = 120.0


def doctor(argv: Sequence[str]) -> int:
    """Look at this machine; return 1 if something is wrong with it, else 0."""
    parser = argparse.ArgumentParser(
        prog="sebulba doctor",
        description="Check this machine and the installed packages, and run small self-tests.",
    )
    parser.add_argument("--platform", choices=("cpu", "cuda", "tpu"), help="platform of JAX")
    parser.add_argument("--json", metavar="FILE", help="also write the report to FILE")
    arguments = parser.parse_args(argv)
    _check_folder(arguments.json)
    suite = "sebulba.tools.check.doctor:checks"
    events = isolated_findings(suite, (arguments.platform,), DOCTOR_TIMEOUT_S)
    return _end(print_findings("this machine", events), arguments.json)


def check_env(argv: Sequence[str]) -> int:
    """Check an environment; return 1 if something is wrong with it, else 0."""
    from sebulba.tools.check.env_check import env_findings

    parser = argparse.ArgumentParser(
        prog="sebulba check-env",
        description="Play an environment as a run does, and report its problems.",
    )
    parser.add_argument(
        "env", metavar="ENV", help="an id, or module:attribute of your own environment"
    )
    parser.add_argument("--backend", choices=("envpool", "gymnasium"), help="library of the id")
    parser.add_argument(
        "--action-mask",
        choices=("observation", "info"),
        help="where the mask of legal actions is",
    )
    parser.add_argument(
        "--wrappers",
        nargs="+",
        metavar="WRAPPER",
        help="module:attribute of wrappers, as for --env.wrappers",
    )
    parser.add_argument("--num-envs", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=500, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument(
        "--timeout", type=float, default=60.0, help="most seconds of a check; default: %(default)s"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the report to FILE")
    arguments = parser.parse_args(argv)
    _check_folder(arguments.json)
    names = ("backend", "action_mask", "wrappers")
    options = {name: getattr(arguments, name) for name in names}
    events = env_findings(
        arguments.env,
        num_envs=arguments.num_envs,
        num_steps=arguments.steps,
        seed=arguments.seed,
        timeout_s=arguments.timeout,
        options={k: v for k, v in options.items() if v is not None},
    )
    return _end(print_findings(arguments.env, events), arguments.json)


def check_agent(argv: Sequence[str]) -> int:
    """Check an agent; return 1 if something is wrong with it, else 0."""
    from sebulba.tools.check.agent_check import agent_findings

    parser = argparse.ArgumentParser(
        prog="sebulba check-agent",
        description="Look at what an agent's methods return, train it a little, and say what is "
        "wrong with it.",
    )
    parser.add_argument(
        "agent",
        metavar="AGENT",
        help="module:attribute: a subclass of sebulba.Agent, a configuration with agent_class, or "
        "a function of an EnvSpec that returns an agent",
    )
    parser.add_argument(
        "--config",
        metavar="CONFIG",
        help="module:attribute of its configuration; default: the one that the class belongs to",
    )
    parser.add_argument(
        "--env",
        metavar="ENV",
        help="an id, or module:attribute of your own; default: small probe environments",
    )
    parser.add_argument(
        "--steps-per-cycle", type=int, metavar="N", help="default: the first that fits the agent"
    )
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument(
        "--timeout",
        type=float,
        default=120.0,
        help="most seconds of a check; default: %(default)s",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the report to FILE")
    arguments = parser.parse_args(argv)
    _check_folder(arguments.json)
    events = agent_findings(
        arguments.agent,
        config=arguments.config,
        env=arguments.env,
        steps_per_cycle=arguments.steps_per_cycle,
        seed=arguments.seed,
        timeout_s=arguments.timeout,
    )
    return _end(print_findings(arguments.agent, events), arguments.json)


def _end(report: Report, file: str | None) -> int:
    if file is not None:
        write_json(file, report.record())
    return EXIT_PROBLEM if report.problems else 0


def _check_folder(file: str | None) -> None:
    if file is not None and not Path(file).absolute().parent.is_dir():
        raise UsageError(f"--json {file} is in a folder that does not exist; make it")
