"""``sebulba export``: its options."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sebulba.errors import UsageError, shown
from sebulba.policies.pretrained import beside, folder_of
from sebulba.support.files import PARTIAL, write_json
from sebulba.support.trust import trust_of
from sebulba.support.user_code import import_from_here

if TYPE_CHECKING:
    from sebulba.policies.policy import Policy

MOST_ENVS = 65_536
"""Largest batch of an exported policy."""


def export(argv: list[str]) -> int:
    """Export the policy of a run; returns the exit code."""
    arguments = _parser().parse_args(argv)
    if not 1 <= arguments.batch <= MOST_ENVS:
        raise UsageError(f"batch={arguments.batch} must be from 1 to {MOST_ENVS:,}; use 1")
    out = Path(arguments.out or beside(arguments.run, "export"))
    policy = _policy(arguments)
    if not out.absolute().parent.is_dir():
        raise UsageError(f"{shown(str(out))} is in a folder that does not exist; make it")
    from sebulba.policies.export.acting import acting_of
    from sebulba.policies.export.check import OBSERVATIONS, largest_difference
    from sebulba.policies.export.forms import DESCRIPTION_FILE, FORMS, describe

    acting = acting_of(policy, arguments.batch)
    out.mkdir(exist_ok=True)
    file = out / f"policy.{arguments.to}"
    partial = out / f"{PARTIAL}{file.name}"
    try:
        run = FORMS[arguments.to](acting, partial)
        largest = largest_difference(policy, acting, run)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
    description = describe(policy, acting, arguments.to, largest)
    write_json(out / DESCRIPTION_FILE, description)
    print(
        f"written: {file} ({file.stat().st_size / 1000:,.0f} kB) and {DESCRIPTION_FILE}, for "
        f"{arguments.batch} environments at once\n"
        f"inputs {', '.join(port['name'] for port in description['inputs'])}; outputs "
        f"{', '.join(port['name'] for port in description['outputs'])}\n"
        f"it differs from the policy by at most {largest:.2g} in {OBSERVATIONS:,} observations"
    )
    return 0


def _policy(arguments: argparse.Namespace) -> Policy:
    """Return the policy of a run, or that of the folder of a policy."""
    from sebulba.runs.folder import RunFolder

    folder = RunFolder(folder_of(arguments.run))
    record = folder.record()  # once: nobody can exchange it between the check and its use
    if "format" in record:
        return _saved_policy(arguments, record)
    if folder.trust(arguments.trust, record).is_trusted:
        import_from_here()
    from sebulba.runs.build import load_policy_of

    return load_policy_of(
        folder, explore=False, best=arguments.best, seed=0, trust=arguments.trust, platform="cpu"
    )


def _saved_policy(arguments: argparse.Namespace, record: dict[str, Any]) -> Policy:
    """Return a policy that ``save_policy`` wrote, or a run in its ``policy/``."""
    if arguments.best:
        raise UsageError(
            f"{shown(arguments.run)} is the folder of a policy, and --best chooses one of a run; "
            "leave it out"
        )
    from sebulba.policies.policy import KIND, load_policy
    from sebulba.runs.jax_setup import configure_jax

    configure_jax("cpu")
    if trust_of(KIND, record, arguments.trust).is_trusted:
        import_from_here()
    return load_policy(arguments.run, trust=arguments.trust)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sebulba export",
        description="Write the trained policy of a run as a program without Sebulba and without "
        "its agent, and check it against the policy.",
    )
    parser.add_argument(
        "run",
        metavar="RUN",
        help="folder of a run, or of a policy such as runs/NAME/policy/MEMBER; or pretrained:NAME",
    )
    parser.add_argument(
        "--to",
        choices=("stablehlo", "onnx"),
        required=True,
        help="stablehlo, for jax.export.deserialize (extra export), or onnx (extra onnx)",
    )
    parser.add_argument("--out", metavar="DIR", help="folder to write; default: RUN/export")
    parser.add_argument(
        "--batch",
        type=int,
        default=1,
        metavar="B",
        help="environments per call; default: %(default)s",
    )
    parser.add_argument(
        "--best",
        action="store_true",
        help="the policy with the highest evaluation return, not the last one",
    )
    parser.add_argument(
        "--trust", action="store_true", help="run the code that an untrusted run names"
    )
    return parser
