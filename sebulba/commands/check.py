"""The commands ``sebulba doctor``, ``sebulba check-env`` and ``sebulba check-agent``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sebulba.commands.options import PLATFORM, json_of, number, option, parse
from sebulba.support.files import write_json
from sebulba.tools.check.checks import Event, print_findings
from sebulba.tools.check.isolation import isolated_findings

EXIT_PROBLEM = 1
DOCTOR_TIMEOUT_S = 120.0
SEED = number("--seed", 0)
JSON = json_of("the report")


def doctor(argv: Sequence[str]) -> int:
    """Look at this machine; return 1 if something is wrong with it, else 0."""
    what = "Check this machine and the installed packages, and run small self-tests."
    given = parse("doctor", what, argv, (PLATFORM, JSON))
    suite = "sebulba.tools.check.doctor:checks"
    events = isolated_findings(suite, (given.platform,), DOCTOR_TIMEOUT_S)
    return _report("this machine", events, given.json)


def check_env(argv: Sequence[str]) -> int:
    """Check an environment; return 1 if something is wrong with it, else 0."""
    from sebulba.tools.check.python_api import env_findings

    what = "Play an environment as a run does, and report its problems."
    mask = "where the mask of legal actions is"
    wrappers = "module:attribute of wrappers, as for --env.wrappers"
    options = (
        option("env", "an id, or module:attribute of your own environment", metavar="ENV"),
        option("--backend", "library of the id", choices=("envpool", "gymnasium")),
        option("--action-mask", mask, choices=("observation", "info")),
        option("--wrappers", wrappers, nargs="+", metavar="WRAPPER"),
        number("--num-envs", 4),
        number("--steps", 500),
        SEED,
        number("--timeout", 60.0, "most seconds of a check"),
        JSON,
    )
    given = parse("check-env", what, argv, options)
    of_env = {name: getattr(given, name) for name in ("backend", "action_mask", "wrappers")}
    events = env_findings(
        given.env,
        num_envs=given.num_envs,
        num_steps=given.steps,
        seed=given.seed,
        timeout_s=given.timeout,
        options={k: v for k, v in of_env.items() if v is not None},
    )
    return _report(given.env, events, given.json)


def check_agent(argv: Sequence[str]) -> int:
    """Check an agent; return 1 if something is wrong with it, else 0."""
    from sebulba.tools.check.python_api import agent_findings

    what = (
        "Look at what an agent's methods return, train it a little, and say what is wrong with it."
    )
    agent = (
        "module:attribute: a subclass of sebulba.Agent, a configuration with agent_class, or a "
        "function of an EnvSpec that returns an agent"
    )
    config = "module:attribute of its configuration; default: the one that the class belongs to"
    env = "an id, or module:attribute of your own; default: small probe environments"
    steps = "default: the first that fits the agent"
    options = (
        option("agent", agent, metavar="AGENT"),
        option("--config", config, metavar="CONFIG"),
        option("--env", env, metavar="ENV"),
        option("--steps-per-cycle", steps, type=int, metavar="N"),
        SEED,
        number("--timeout", 120.0, "most seconds of a check"),
        JSON,
    )
    given = vars(parse("check-agent", what, argv, options))
    file, name = given.pop("json"), given.pop("agent")
    events = agent_findings(name, timeout_s=given.pop("timeout"), **given)
    return _report(name, events, file)


def _report(title: str, events: Iterable[Event], file: str | None) -> int:
    report = print_findings(title, events)
    if file is not None:
        write_json(file, report.record())
    return EXIT_PROBLEM if report.problems else 0
