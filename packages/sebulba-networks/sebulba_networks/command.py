"""The commands ``sebulba networks sweep``, ``play``, ``fairness``, ``deploy`` and ``messages``."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sebulba.errors import UsageError, shown
from sebulba.options import INT32
from sebulba.runs.folder import RunFolder
from sebulba.support.checks import at_least
from sebulba.support.files import write_json
from sebulba_networks import CONGESTION_CONTROL, SHARED_BOTTLENECK
from sebulba_networks.options import (
    CongestionControlOptions,
    SharedBottleneckOptions,
    read_options,
)

if TYPE_CHECKING:
    from sebulba.policies.policy import Policy

DESCRIPTIONS = {
    "sweep": "Play a trained policy in its training ranges, and with bandwidth, RTT and buffer "
    "varied beyond them. Compare it with fixed windows, AIMD, CUBIC and BBR-like flows.",
    "play": "Play one episode of a trained policy, and draw window, queue, RTT, throughput and "
    "loss over time.",
    "fairness": "Let several flows with the policy of a run share a bottleneck, and draw their "
    "windows and throughputs.",
    "deploy": "Let the policy of a run control a real UDP sender over the loopback interface and "
    "an emulated link, and compare it with the simulator.",
    "messages": "Play one episode of a trained policy in its ns-3 program, and draw who sent what "
    "to whom, how old messages were, and what waited and was dropped.",
}
NETWORK = ("bandwidth-mbps", "rtt-ms", "buffer-packets")
OF_THE_PAPER = {"bandwidth_mbps": "100", "rtt_ms": "35", "buffer_packets": "440"}
"""The bottleneck of two flows in RayNet's paper."""


def main(argv: Sequence[str]) -> int:
    """Run one of the commands."""
    arguments = _parser().parse_args(argv)
    if arguments.seed not in INT32:
        raise UsageError(f"seed={arguments.seed} must be a 32-bit integer, such as 1")
    for name in ("points", "networks", "flows", "steps"):
        if (value := getattr(arguments, name, 1)) is not None:
            at_least(1, name, value)
    if arguments.out is not None and not os.path.isdir(arguments.out):
        raise UsageError(f"--out={shown(arguments.out)} is not a folder; create it")
    if arguments.command == "messages":
        _messages(arguments)
        return 0
    learned = _read(arguments)
    files = Path(arguments.out or arguments.run)
    commands = {"sweep": _sweep, "play": _play, "fairness": _fairness, "deploy": _deploy}
    commands[arguments.command](learned, arguments, files)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sebulba networks", description="Plot and test policies for packet networks."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    parsers = {
        name: commands.add_parser(name, help=what, description=what)
        for name, what in DESCRIPTIONS.items()
    }
    for one in parsers.values():
        one.add_argument("run", metavar="RUN", help="folder of the run, such as runs/NAME")
    _number(parsers["sweep"], "points", 9, "values of each parameter")
    _number(parsers["sweep"], "networks", 32, "networks drawn from the training ranges")
    parsers["sweep"].add_argument(
        "--steps", type=int, metavar="N", help="steps per episode; default: as in the run"
    )
    _number(parsers["fairness"], "flows", 2, "agents")
    _number(parsers["deploy"], "steps", 100, "of the policy; a step takes two round trips")
    _text(parsers["fairness"], "join-s", "when the flows after the first begin", "8")
    _text(parsers["fairness"], "stay-s", "how long they stay; 0 for always", "12")
    for name in NETWORK:
        for command in ("play", "deploy"):
            _text(parsers[command], name, "instead of the range of the run")
        default = OF_THE_PAPER[name.replace("-", "_")]
        _text(parsers["fairness"], name, "of the bottleneck", default)
    for one in parsers.values():
        _add_common(one)
    return parser


def _number(parser: argparse.ArgumentParser, name: str, default: int, what: str) -> None:
    parser.add_argument(
        f"--{name}", type=int, default=default, metavar="N", help=f"{what}; default: %(default)s"
    )


def _text(parser: argparse.ArgumentParser, name: str, what: str, default: str = "") -> None:
    also = "; default: %(default)s" if default else ""
    parser.add_argument(
        f"--{name}", default=default or None, metavar="X", help=f"{what}, as 8 or 4-16{also}"
    )


def _add_common(parser: argparse.ArgumentParser) -> None:
    _number(parser, "seed", 1, "of the networks")
    parser.add_argument(
        "--best",
        action="store_true",
        help="the policy with the highest evaluation return, not the last one",
    )
    parser.add_argument("--engine", metavar="NAME", help="native or ns3, instead of the run's")
    parser.add_argument("--transport", choices=("udp", "tcp"), help="instead of the run's")
    parser.add_argument(
        "--slow-start-packets",
        type=int,
        metavar="N",
        help="window at which slow start ends, instead of the run's",
    )
    parser.add_argument("--out", metavar="DIR", help="folder of the files; default: RUN")
    parser.add_argument(
        "--trust", action="store_true", help="run the code that an untrusted run names"
    )
    parser.add_argument("--platform", choices=("cpu", "cuda", "tpu"), help="platform of JAX")


class _Learned(NamedTuple):
    """What a run has learned."""

    options: CongestionControlOptions
    """The network that it was trained in."""
    policy: Policy
    """Of one flow."""
    title: str
    """The run, for pictures."""


def _read(arguments: argparse.Namespace) -> _Learned:
    folder = RunFolder(Path(arguments.run))
    record = folder.record()  # once: nobody can exchange it between the check and its use
    env = folder.read_env_config(folder.trust(arguments.trust, record), record)
    known = (CONGESTION_CONTROL, SHARED_BOTTLENECK)
    if env.id not in known:
        raise UsageError(
            f"{folder.path} was trained on {env.id}; give a run on {' or '.join(known)}"
        )
    names = ("engine", "transport", "slow_start_packets")
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    own = (
        env.options
        | given
        | ({"max_episode_steps": most} if (most := env.max_episode_steps) else {})
    )
    options = read_options(own, env.id)
    assert isinstance(options, CongestionControlOptions)
    saved = _saved(folder, arguments)
    from sebulba.loops.devices import local_devices
    from sebulba.policies.policy import load_policy
    from sebulba.runs.jax_setup import configure_jax
    from sebulba_networks.adapter import FLOW

    configure_jax(arguments.platform)
    local_devices()  # says in words what is wrong with the platform
    if env.id == SHARED_BOTTLENECK:
        saved = saved / FLOW
    policy = load_policy(saved, seed=arguments.seed, trust=arguments.trust)
    return _Learned(options, policy, f"{record.get('preset')}, {folder.path.name}")


def _saved(folder: RunFolder, arguments: argparse.Namespace) -> Path:
    """Return where the policy that was asked for lies; UsageError if there is no best one."""
    if arguments.best and not folder.best_policy.exists():
        raise UsageError(
            f"{folder.path} has no best policy, which is kept where a run evaluates as it trains; "
            "train with --eval-every-env-steps, or leave --best out"
        )
    return folder.best_policy if arguments.best else folder.policy


def _messages(arguments: argparse.Namespace) -> None:
    from sebulba.runs.jax_setup import configure_jax

    folder = RunFolder(Path(arguments.run))
    record = folder.record()
    env = folder.read_env_config(folder.trust(arguments.trust, record), record)
    saved = _saved(folder, arguments)
    configure_jax(arguments.platform)
    from sebulba.policies.policy import load_policy

    if importlib.util.find_spec("sebulba_ns3") is None:
        raise UsageError("sebulba-ns3 is not installed; see its README.md")
    from sebulba_ns3 import messages

    policy = load_policy(saved, seed=arguments.seed, trust=arguments.trust)
    report = messages.play(env, policy, arguments.seed)
    files = Path(arguments.out or arguments.run)
    messages.draw(report, files / "messages.png", f"{record.get('preset')}, {folder.path.name}")
    write_json(files / "messages.json", report)
    _say_files(files, "messages.png", "messages.json")


def _sweep(learned: _Learned, arguments: argparse.Namespace, files: Path) -> None:
    from sebulba_networks.tools import sweep

    steps = {} if arguments.steps is None else {"max_episode_steps": arguments.steps}
    alone = _as(CongestionControlOptions, learned.options, **steps)
    result = sweep.sweep(
        alone,
        learned.policy,
        points=arguments.points,
        networks=arguments.networks,
        seed=arguments.seed,
    )
    sweep.draw(result, files / "sweep.png", f"{learned.title}: training ranges are shaded")
    write_json(files / "sweep.json", {"run": learned.title} | result)
    _print(sweep.table(result))
    print(
        f"{result['gap_closed']:.1%} of the way from the fixed window of "
        f"{result['fixed_window_packets']:.0f} packets to the oracle, inside the training ranges"
    )
    _say_files(files, "sweep.png", "sweep.json")


def _play(learned: _Learned, arguments: argparse.Namespace, files: Path) -> None:
    from sebulba_networks.tools import fairness

    options = dataclasses.replace(learned.options, **_network(arguments))
    flows = fairness.flows_of(options, learned.policy, arguments.seed)
    fairness.draw_episode(flows, files / "play.png", fairness.title(flows, learned.title))
    _say_files(files, "play.png")


def _fairness(learned: _Learned, arguments: argparse.Namespace, files: Path) -> None:
    from sebulba_networks.tools import fairness

    options = _as(
        SharedBottleneckOptions,
        learned.options,
        num_agents=arguments.flows,
        **_network(arguments),
        **_given(arguments, ("join_s", "stay_s")),
    )
    result = fairness.fairness(options, learned.policy, arguments.seed)
    fairness.draw_fairness(result, files / "fairness.png", learned.title)
    write_json(files / "fairness.json", {"run": learned.title} | result)
    _print(fairness.table(result))
    _say_files(files, "fairness.png", "fairness.json")


def _deploy(learned: _Learned, arguments: argparse.Namespace, files: Path) -> None:
    from sebulba_networks.tools import deployment, fairness

    network = {**_network(arguments), "max_episode_steps": arguments.steps}
    options = _as(CongestionControlOptions, learned.options, **network)
    episodes = deployment.deploy(options, learned.policy, arguments.seed)
    figures = deployment.summary(episodes)
    of_policy = episodes[deployment.POLICY]
    flows = [fairness.columns(seen) for seen in of_policy.values()]
    title = fairness.title(flows, learned.title)
    fairness.draw_episode(flows, files / "deploy.png", title, list(of_policy))
    about = {"run": learned.title, "seed": arguments.seed}
    write_json(
        files / "deploy.json", {**about, "options": dataclasses.asdict(options), "figures": figures}
    )
    _print(deployment.table(figures))
    _say_files(files, "deploy.png", "deploy.json")


def _as(
    kind: type[CongestionControlOptions], options: CongestionControlOptions, **changes: Any
) -> Any:
    """Return ``options`` as those of another number of agents."""
    names = {field.name for field in dataclasses.fields(CongestionControlOptions)}
    return kind(**{name: getattr(options, name) for name in names} | changes)


def _network(arguments: argparse.Namespace) -> dict[str, Any]:
    return _given(arguments, [name.replace("-", "_") for name in NETWORK])


def _given(arguments: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    values = {name: getattr(arguments, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _print(table: Any) -> None:
    from rich.console import Console

    Console().print(table)


def _say_files(folder: Path, *names: str) -> None:
    print(f"written: {', '.join(str(folder / name) for name in names)}")
