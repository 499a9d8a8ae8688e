"""What plays a trained policy: ``sebulba eval``, ``video``, ``watch`` and ``export``.

Free of JAX until it plays.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from sebulba.commands.options import (
    BEST,
    PLATFORM,
    TRUST,
    Option,
    flag,
    json_of,
    number,
    option,
    parse,
)
from sebulba.configs.experiment import EnvConfig
from sebulba.errors import UsageError, shown
from sebulba.metrics.short_text import duration
from sebulba.options import INT32, MOST_EPISODE_STEPS
from sebulba.policies.pretrained import beside, folder_of
from sebulba.runs.folder import RunFolder
from sebulba.support.checks import at_least
from sebulba.support.files import check_folder_of, check_no_link, make_folder, whole, write_json
from sebulba.support.trust import trust_of
from sebulba.support.user_code import import_from_here

if TYPE_CHECKING:
    from sebulba.policies.policy import Policy
    from sebulba.video.rendering import Stage
    from sebulba.video.screens import Terminal, Window

MOST_FILMED = 64
"""Most episodes that are filmed side by side."""
MOST_ENVS = 65_536
"""Largest batch of an exported policy."""
PLAYED = (
    option("run", "folder of the run, such as runs/NAME, or pretrained:NAME", metavar="RUN"),
    number("--seed", 1),
    number("--max-episode-steps", MOST_EPISODE_STEPS, "cut episodes after N steps"),
    flag("--explore", "sample actions as in training, instead of the most probable ones"),
    *(BEST, TRUST, PLATFORM),
)
FPS = option("--fps", "frames per second; default: the environment's", type=float, metavar="X")


def evaluate(argv: list[str]) -> int:
    """Play a policy as the words say; returns the exit code."""
    from sebulba.runs.read_config import take_env_options

    what = (
        "Play the trained policy of a run and print its return. --env.options NAME VALUE plays it "
        "with other options of its environment."
    )
    words, options = take_env_options(argv)
    record = option("--record-dataset", "also record the episodes as a data set", metavar="DIR")
    envs = number("--num-envs", 16)
    given = played("eval", what, 100, words, envs, record, json_of("the result"))
    folder, env = run_to_play(given)
    env = dataclasses.replace(env, options={**env.options, **options})
    from sebulba.envs import env_spec, make_env_factory
    from sebulba.loops.evaluation import evaluate as play
    from sebulba.runs.writers import find_recorder

    with (
        EpisodeProgress(given.episodes, sys.stderr) as progress,
        contextlib.ExitStack() as stack,
    ):
        policy = policy_to_play(given, folder)
        factory = make_env_factory(env.id, **env.factory_arguments())
        if env.wrappers:
            env_spec(factory)  # warns of statistics in wrappers, which the policy lacks
        recorder = None
        if given.record_dataset is not None:
            sizes = given.episodes, given.num_envs, given.max_episode_steps
            make = find_recorder("evaluation")
            recorder = stack.enter_context(make(given.record_dataset, env_spec(factory), *sizes))
        evaluation = play(
            policy,
            factory,
            num_episodes=given.episodes,
            num_envs=given.num_envs,
            seed=given.seed,
            max_episode_steps=given.max_episode_steps,
            progress=progress,
            observe=recorder,
        )
    print(evaluation)
    if given.json is not None:
        write_json(given.json, evaluation.record())
    return 0


def video(argv: list[str]) -> int:
    """Film the policy of a run; returns the exit code."""
    out = "film to write, .mp4 or .gif; default: RUN/video.mp4"
    given = played(
        "video",
        "Film the trained policy of a run: the best of several episodes, or all in a grid.",
        4,
        argv,
        FPS,
        option("--out", out, metavar="FILE"),
        flag("--grid", "show all episodes in a grid"),
    )
    from sebulba.video.film import check_film_file, make_film

    run, file = run_to_play(given), Path(given.out or beside(given.run, "video.mp4"))
    check_film_file(file)
    with (
        _policy_on_stage(given, run, given.episodes) as (policy, stage),
        # Where software draws, 1000 steps take a minute or more.
        EpisodeProgress(given.episodes, sys.stderr) as progress,
    ):
        made = make_film(
            policy,
            stage,
            file,
            max_episode_steps=given.max_episode_steps,
            as_grid=given.grid,
            per_second=given.fps,
            progress=progress,
        )
    returns = ", ".join(f"{one:.2f}" for one in made.returns)
    kept = "" if given.grid or len(made.returns) == 1 else f", best {max(made.returns):.2f}"
    cut = f"; {made.num_cut} cut at {given.max_episode_steps:,} steps" if made.num_cut else ""
    print(
        f"written: {made.file} ({made.file.stat().st_size / 1000:,.0f} kB, {made.num_pictures:,} "
        f"pictures, {made.num_pictures / made.per_second:.1f} s)\nreturns {returns}{kept}{cut}"
    )
    return 0


def watch(argv: list[str]) -> int:
    """Show the policy of a run as it plays; returns the exit code."""
    on = "default: the window, if there is a display"
    given = played(
        "watch",
        "Watch the trained policy of a run in a window or, without a display, in the terminal. "
        "Ctrl-C ends it.",
        3,
        argv,
        FPS,
        option("--on", on, choices=("window", "terminal")),
    )
    from sebulba.video.screens import open_screen

    returns: list[float] = []
    with (
        _policy_on_stage(given, run_to_play(given), 1) as (policy, stage),
        open_screen(given.on) as screen,
        contextlib.suppress(KeyboardInterrupt),  # the usual end
    ):
        _watch(policy, stage, screen, given, returns)
    if returns:
        print("returns " + ", ".join(f"{one:.2f}" for one in returns))
    return 0


def _watch(
    policy: Policy,
    stage: Stage,
    screen: Window | Terminal,
    given: argparse.Namespace,
    returns: list[float],
) -> None:
    """Show episode after episode, and note what each returned."""
    from sebulba.video.screens import paced

    per_second = given.fps or stage.per_second
    for episode in range(given.episodes):
        for seen in paced(stage.play(policy, given.max_episode_steps), per_second):
            caption = (
                f"episode {episode + 1} of {given.episodes}, step {seen.lengths[0]:,}, return "
                f"{seen.returns[0]:.2f}"
            )
            if not screen.show(seen.pictures[0], caption):
                return
        returns.append(float(seen.returns[0]))


def export(argv: list[str]) -> int:
    """Export the policy of a run; returns the exit code."""
    what = (
        "Write the trained policy of a run as a program without Sebulba and without its agent, and "
        "check it against the policy."
    )
    run = "folder of a run, or of a policy such as runs/NAME/policy/MEMBER; or pretrained:NAME"
    to = "stablehlo, for jax.export.deserialize (extra export), or onnx (extra onnx)"
    options = (
        option("run", run, metavar="RUN"),
        option("--to", to, choices=("stablehlo", "onnx"), required=True),
        option("--out", "folder to write; default: RUN/export", metavar="DIR"),
        number("--batch", 1, "environments per call", metavar="B"),
        *(BEST, TRUST),
    )
    given = parse("export", what, argv, options)
    if not 1 <= given.batch <= MOST_ENVS:
        raise UsageError(f"batch={given.batch} must be from 1 to {MOST_ENVS:,}; use 1")
    out = Path(given.out or beside(given.run, "export"))
    given.explore, given.seed, given.platform = False, 0, "cpu"
    trained = policy_of(given)
    check_folder_of(out)
    from sebulba.policies.export.acting import acting_of, in_float32
    from sebulba.policies.export.check import OBSERVATIONS, largest_difference
    from sebulba.policies.export.forms import DESCRIPTION_FILE, FORMS, describe

    policy = in_float32(trained)
    acting = acting_of(policy, given.batch)
    make_folder(out, "--out")
    file = out / f"policy.{given.to}"
    with whole(file) as partial:
        run_exported = FORMS[given.to](acting, partial)
        largest = largest_difference(policy, acting, run_exported)
    description = describe(policy, acting, given.to, largest)
    write_json(out / DESCRIPTION_FILE, description)
    inputs, outputs = (
        ", ".join(port["name"] for port in description[ports]) for ports in ("inputs", "outputs")
    )
    print(
        f"written: {file} ({file.stat().st_size / 1000:,.0f} kB) and {DESCRIPTION_FILE}, for "
        f"{given.batch} environments at once\ninputs {inputs}; outputs {outputs}\n"
        f"it differs from the policy by at most {largest:.2g} in {OBSERVATIONS:,} observations"
    )
    return 0


# What they share.


def played(
    command: str,
    what: str,
    episodes: int,
    argv: Sequence[str],
    *options: Option,
) -> argparse.Namespace:
    """Return the values of the words of a command that plays so many episodes by default."""
    run, *others = PLAYED
    every = (run, number("--episodes", episodes), *others, *options)
    given = parse(command, what, argv, every)
    fps = getattr(given, "fps", None)
    if FPS in options and not 1 <= given.episodes <= MOST_FILMED:
        raise UsageError(f"episodes={given.episodes} must be from 1 to {MOST_FILMED}; use 4")
    if given.seed not in INT32:
        raise UsageError(f"seed={given.seed} must be a 32-bit integer, such as 1")
    for name in ("episodes", "max_episode_steps", "num_envs"):
        at_least(1, name, getattr(given, name, None))
    if fps is not None and not 0.1 <= fps <= 1000:
        raise UsageError(f"fps={fps} must be from 0.1 to 1000; use 30")
    return given


def run_to_play(given: argparse.Namespace) -> tuple[RunFolder, EnvConfig]:
    """Return the folder of the run and its environment; what it names may be imported from here."""
    folder = RunFolder(folder_of(given.run))
    record = folder.record()  # once: nobody can exchange it between the check and its use
    trust = folder.trust(given.trust, record)
    env = folder.read_env_config(trust, record)
    if trust.is_trusted:
        import_from_here()
    return folder, env


def policy_to_play(given: argparse.Namespace, folder: RunFolder) -> Policy:
    """Set up JAX and load the policy of a run."""
    best = folder.best_policy
    if given.best and not best.exists():
        raise UsageError(
            f"{folder.path} has no best policy, because it made no evaluations during training; "
            "train with --eval-every-env-steps, or leave --best out"
        )
    if given.best:
        check_no_link(best)
    from sebulba.loops.devices import local_devices
    from sebulba.policies.policy import load_policy
    from sebulba.runs.jax_setup import configure_jax

    configure_jax(given.platform)
    local_devices()  # says in words what is wrong with the platform
    which = best if given.best else folder.root
    return load_policy(which, explore=given.explore, seed=given.seed, trust=given.trust)


def policy_of(given: argparse.Namespace) -> Policy:
    """Set up JAX, and load the policy of a run or that of the folder of a policy."""
    folder = RunFolder(folder_of(given.run))
    record = folder.record()  # once: nobody can exchange it between the check and its use
    if "format" not in record:
        if folder.trust(given.trust, record).is_trusted:
            import_from_here()
        return policy_to_play(given, folder)
    if given.best:
        raise UsageError(
            f"{shown(given.run)} is the folder of a policy, and --best chooses one of a run; "
            "leave it out"
        )
    from sebulba.policies.policy import KIND, load_policy
    from sebulba.runs.jax_setup import configure_jax

    configure_jax(given.platform)
    if trust_of(KIND, record, given.trust).is_trusted:
        import_from_here()
    return load_policy(given.run, trust=given.trust)


@contextlib.contextmanager
def _policy_on_stage(
    given: argparse.Namespace, run: tuple[RunFolder, EnvConfig], num_envs: int
) -> Any:
    """Load the policy of the run, and make environments that draw."""
    folder, env = run
    from sebulba.video.rendering import Stage, drawing_factory

    policy = policy_to_play(given, folder)
    with Stage(drawing_factory(env), num_envs, given.seed) as stage:
        yield policy, stage


class EpisodeProgress(contextlib.AbstractContextManager):
    """Says now and then how far episodes are: in one line of a terminal, else line by line."""

    TERMINAL_S, LINES_S = 0.5, 10.0
    """Seconds between two signs, on a terminal and elsewhere; there is none before the first."""

    def __init__(self, num_episodes: int, stream: IO[str] | None) -> None:
        """Begin; nothing is written yet, and never to a ``stream`` that is None."""
        self._num_episodes = num_episodes
        self._stream = stream
        self._is_terminal = stream is not None and stream.isatty()
        self._every_s = self.TERMINAL_S if self._is_terminal else self.LINES_S
        self._began = time.monotonic()
        self._due = self._began + self._every_s
        self._width = 0
        """Characters in the line of the terminal."""

    def __call__(self, num_done: int, longest: int) -> None:
        """Write, if it is time, how many episodes are done and the steps of the longest."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + self._every_s
        line = (
            f"{num_done} of {self._num_episodes} episodes done, the longest that runs has "
            f"{longest:,} steps, {duration(now - self._began)}"
        )
        self._write(f"\r{line:<{self._width}}" if self._is_terminal else f"{line}\n")
        self._width = len(line)

    def __exit__(self, *exception: object) -> None:
        """Take the line from the terminal, also where an error will be written."""
        if self._is_terminal and self._width:
            self._write(f"\r{'':<{self._width}}\r")

    def _write(self, text: str) -> None:
        if self._stream is None:
            return
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            self._stream.write(text)
            self._stream.flush()
