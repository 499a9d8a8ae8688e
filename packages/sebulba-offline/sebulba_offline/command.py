"""``sebulba dataset``: record a data set, and describe one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sebulba.commands.options import flag, json_of, number, option, parse
from sebulba.commands.playing import EpisodeProgress, played, policy_to_play, run_to_play
from sebulba.errors import UsageError
from sebulba.support.files import check_folder_of, write_json

USAGE = """\
usage: sebulba dataset record RUN --out DIR [options]   record episodes of a trained policy
       sebulba dataset show DIR [--out FILE.png]         describe a data set, and draw it
       sebulba dataset minari ID DIR                     read a data set of Minari
       sebulba dataset minari ID DIR --write             write one as a data set of Minari

"sebulba dataset record --help" lists the options.
"""


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    words = {"record": record, "show": show, "minari": minari}
    if list(argv[:1]) in ([], ["-h"], ["--help"]):
        print(USAGE, end="")
        return 0 if argv else 2
    if argv[0] not in words:
        return show(argv)  # sebulba dataset DIR
    return words[argv[0]](argv[1:])


def record(argv: Sequence[str]) -> int:
    """Record episodes of a trained policy."""
    given = played(
        "dataset record",
        "Play the trained policy of a run and record whole episodes as a data set.",
        100,
        argv,
        option("--out", "folder of the data set", metavar="DIR", required=True),
        number("--num-envs", 16, "environments side by side"),
        number("--random", 0.0, "probability of an action that is drawn from the action space"),
    )
    folder, env = run_to_play(given)
    policy = policy_to_play(given, folder)
    from sebulba.envs import make_env_factory
    from sebulba_offline.dataset import read_record
    from sebulba_offline.recorder import record as play

    names = ("run", "explore", "random", "seed", "best")
    with EpisodeProgress(given.episodes, sys.stderr) as progress:
        play(
            policy,
            make_env_factory(env.id, **env.factory_arguments()),
            given.out,
            num_episodes=given.episodes,
            num_envs=given.num_envs,
            seed=given.seed,
            random=given.random,
            max_episode_steps=given.max_episode_steps,
            about={name: getattr(given, name) for name in names},
            told=progress,
        )
    written = read_record(given.out)
    print(f"written: {given.out} ({written['episodes']:,} episodes, {written['steps']:,} steps)")
    return 0


def show(argv: Sequence[str]) -> int:
    """Describe a data set."""
    given = parse(
        "dataset show",
        "Describe a data set: episodes, returns, lengths, and the ranges of its components.",
        argv,
        (
            option("dataset", "folder of the data set", metavar="DIR"),
            option("--out", "also draw it into FILE, .png or .svg", metavar="FILE"),
            json_of("the description"),
        ),
    )
    from sebulba_offline.dataset import load
    from sebulba_offline.describe import described, lines

    check_folder_of(given.out, "--out")
    if given.out is not None and Path(given.out).suffix not in (".png", ".svg"):
        raise UsageError(f"--out {given.out} must end in .png or .svg; use dataset.png")
    dataset = load(Path(given.dataset))
    about: dict[str, Any] = described(dataset)
    print("\n".join(lines(dataset, about)))
    if given.json is not None:
        write_json(given.json, about)
    if given.out is not None:
        from sebulba_offline.picture import draw

        draw(dataset, given.out)
        print(f"drawn: {given.out}")
    return 0


def minari(argv: Sequence[str]) -> int:
    """Read a data set of Minari, or write one."""
    given = parse(
        "dataset minari",
        "Read a data set of Minari into a folder, or write one from a folder.",
        argv,
        (
            option("id", "of Minari, such as mujoco/halfcheetah/medium-v0", metavar="ID"),
            option("dataset", "folder of the data set", metavar="DIR"),
            flag("--write", "write the data set in DIR as ID"),
        ),
    )
    from sebulba_offline.dataset import load
    from sebulba_offline.minari_data import from_minari, import_minari, to_minari

    import_minari()
    if given.write:
        to_minari(load(given.dataset), given.id)
        print(f"written: {given.id}")
        return 0
    record = from_minari(given.id, given.dataset).record
    print(f"written: {given.dataset} ({record['episodes']:,} episodes, {record['steps']:,} steps)")
    return 0
