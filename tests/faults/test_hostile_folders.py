"""Run folders of strangers: none runs code, reads or writes outside, or shows a traceback.

Each case takes a copy of a real run folder and does to it what an attacker could. One kind is a
folder that a stranger made and signed with a key of his own, with all checksums right. The other is
a folder of one's own that somebody has changed. Every command that reads a folder is then tried.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sebulba
from sebulba.checkpoints import manifest
from sebulba.commands import cli
from sebulba.envs.saving import sealed
from sebulba.errors import CheckpointError, UsageError
from sebulba.loops import evaluation
from sebulba.policies.policy import KIND as POLICY
from sebulba.runs.folder import KIND as RUN
from sebulba.runs.folder import RunFolder
from sebulba.support import trust

SMALL = [
    *("--num-envs", "4", "--steps-per-cycle", "5", "--total-env-steps", "200"),
    *("--num-inferencers-per-device", "1", "--agent.torso.hidden-sizes", "8"),
    *("--compile-cache", "off", "--metrics-interval-s", "0", "--schedule", "lockstep"),
    *("--inference-devices", "0", "--update-devices", "0", "--env.backend", "gymnasium"),
    "--no-anneal-learning-rate",
]
REFUSED = (2, 6)
"""Exit codes of a usage error and of a checkpoint that is of no use."""
CANARY = "canary"
PLANTED = """
import pathlib
pathlib.Path({canary!r}).write_text("imported")
import gymnasium
class Env(gymnasium.Env): pass
class Agent: pass
"""


class Place:
    """A copy of a run folder, with what an attacker planted around it."""

    def __init__(self, root: Path, run: Path) -> None:
        self.run = root / "run"
        shutil.copytree(run, self.run)
        self.outside = root / "outside"
        self.outside.mkdir()
        (self.outside / "secret.txt").write_text("secret")
        shutil.copytree(run / "policy", self.outside / "policy")
        self.here = root / "here"
        self.here.mkdir()
        self.canary = self.here / CANARY
        for folder in (self.here, self.run):
            (folder / "planted_module.py").write_text(PLANTED.format(canary=str(self.canary)))

    @property
    def checkpoint(self) -> Path:
        numbers = [p for p in (self.run / "checkpoints").iterdir() if p.name.isdigit()]
        return max(numbers)

    def edit(self, kind: str, change: Callable[[dict], Any], *, sign: bool = True) -> None:
        """Change ``config.json`` of the run or of its policy, and sign it with the key of now."""
        file = self.run / ("config.json" if kind == RUN else "policy/config.json")
        record = json.loads(file.read_text())
        change(record)
        file.write_text(json.dumps(trust.signed(kind, record) if sign else record))

    def edit_manifest(self, change: Callable[[dict], Any] = lambda body: None) -> None:
        """Change the newest manifest, with every checksum in it right again."""
        file = self.checkpoint / "manifest.json"
        body = json.loads(file.read_text())["manifest"]
        for entry in body["files"]:
            content = self.checkpoint / entry["path"]
            entry["num_bytes"] = content.stat().st_size
            entry["sha256"] = hashlib.sha256(content.read_bytes()).hexdigest()
        change(body)
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        outer = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "manifest": body}
        outer["signature"] = trust.signed(manifest.KIND, body)["signature"]
        file.write_text(json.dumps(outer))

    def arrays(self) -> dict[str, np.ndarray]:
        with np.load(self.run / "policy" / "arrays.npz") as stored:
            return dict(stored)


class Runs:
    """What a pickle does when it is opened."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self.canary}",)


Case = Callable[[Place], None]
CASES: dict[str, tuple[str, Case]] = {}
"""By name: whose key signs what the case leaves ("stranger" or "mine"), and what it does."""


def case(name: str, case: Case, whose: str = "stranger") -> None:
    assert name not in CASES
    CASES[name] = whose, case


def set_env(env_id: Any, /, **options: Any) -> Case:
    def change(record: dict) -> None:
        record["env"] |= {"id": env_id, "options": options}

    return lambda place: place.edit(RUN, change)


# config.json names code.

for name, options in {
    "os:system": {"command": f"touch {CANARY}"},
    "posix:system": {"command": f"touch {CANARY}"},
    "os:popen": {"cmd": f"touch {CANARY}"},
    "os:mkdir": {"path": CANARY},
    "subprocess:run": {"args": f"touch {CANARY}", "shell": True},
    "subprocess:Popen": {"args": f"touch {CANARY}", "shell": True},
    "subprocess:getoutput": {"cmd": f"touch {CANARY}"},
    "builtins:eval": {"source": f"open('{CANARY}', 'w')"},
    "builtins:open": {"file": CANARY, "mode": "w"},
    "shutil:rmtree": {"path": "../outside"},
    "shutil:copy": {"src": "../outside/secret.txt", "dst": CANARY},
    "pathlib:Path": {},
    "pickle:loads": {},
    "importlib:import_module": {"name": "planted_module"},
    "runpy:run_path": {"path_name": "planted_module.py"},
    "runpy:run_module": {"mod_name": "planted_module"},
    "ctypes:CDLL": {"name": "/tmp/none.so"},
    "numpy:load": {"file": "../outside/secret.txt"},
    "gymnasium:make": {"id": "planted_module:Env-v0"},
    "sebulba.commands.cli:main": {},
    "planted_module:Env": {},
    "planted_module:Env-v0": {},
    "planted_module.sub:Env": {},
    "here.planted_module:Env": {},
}.items():
    case(f"environment {name}", set_env(name, **options))
case("environment CartPole-v1 of a module", set_env("planted_module:CartPole-v1"))
case("option that names a file", set_env("HalfCheetah-v4", xml_file="/etc/passwd"))
case("option that names a file beside", set_env("HalfCheetah-v4", xml_file="../outside/secret.txt"))
case("option that names a module", set_env("GymV26Environment-v0", env_id="planted_module:E-v0"))

# Policies that name code.


def policy(change: Callable[[dict], Any]) -> Case:
    return lambda place: place.edit(POLICY, change)


for name in (
    *("os:system", "subprocess:Popen", "planted_module:Agent", "builtins:exec", "pickle:Unpickler"),
    *("planted_module.sub:Agent", "sebulba.commands.cli:main", "sebulba.agents.impala:os"),
):
    case(f"agent {name}", policy(lambda record, name=name: record.update(agent=name)))
for name, fields in {
    "os:system": {"command": f"touch {CANARY}"},
    "subprocess:Popen": {"args": ["touch", CANARY]},
    "planted_module:Config": {},
    "builtins:open": {"file": CANARY, "mode": "w"},
    "sebulba.commands.cli:main": {"argv": ["--version"]},
}.items():
    config = {"class": name, "fields": fields}
    case(f"configuration {name}", policy(lambda r, c=config: r.update(agent_config=c)))

# Policies whose description is no description.


def put(path: str, value: Any) -> Case:
    def change(record: dict) -> None:
        *folders, last = path.split("/")
        for folder in folders:
            record = record[folder]
        record[last] = value

    return policy(change)


deep: Any = {"type": "Discrete", "n": 2, "start": 0, "dtype": "int32"}
for _ in range(400):
    deep = {"type": "Dict", "spaces": {"x": deep}}
case("observation space nested 400 deep", put("spec/observation_space", deep))
case("observation space of 10^15 numbers", put("spec/observation_space/shape", [10**5] * 3))
case("observation space of negative shape", put("spec/observation_space/shape", [-4]))
case("observation space of objects", put("spec/observation_space/dtype", "object"))
case("observation space of no type", put("spec/observation_space", {"shape": [4]}))
case("observation space of unknown type", put("spec/observation_space/type", "os.system"))
case("actions without an end", put("spec/action_space/n", 10**30))
case("fields that are not the agent's", put("agent_config/fields", {"__class__": "os.system"}))
case("layers of 10^12", put("agent_config/fields/torso/hidden_sizes", [10**12]))
case("a run of 10^18 environments", put("run/num_envs", 10**18))
case("arrays that are no list", put("arrays", 7))
case("a format of tomorrow", put("format", {"$ref": "file:///etc/passwd"}))

# Arrays.


def write_arrays(change: Callable[[dict[str, np.ndarray], Place], None]) -> Case:
    def run(place: Place) -> None:
        arrays = place.arrays()
        change(arrays, place)
        with open(place.run / "policy" / "arrays.npz", "wb") as file:
            np.savez(file, **arrays)
        sums = {
            name: hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()
            for name, x in arrays.items()
            if x.dtype != object
        }
        place.edit(
            POLICY,
            lambda record: [
                entry.update(sha256=sums.get(entry["name"])) for entry in record["arrays"]
            ],
        )

    return run


def first(arrays: dict[str, np.ndarray]) -> str:
    return next(name for name in arrays if arrays[name].dtype.kind == "f")


def fill(value: float) -> Case:
    return write_arrays(lambda arrays, place: arrays[first(arrays)].fill(value))


def pickled_array(arrays: dict[str, np.ndarray], place: Place) -> None:
    arrays[first(arrays)] = np.array([Runs(place.canary)], object)


case("weights that are NaN", fill(np.nan))
case("weights that are infinite", fill(np.inf))
case("weights that are a pickle", write_arrays(pickled_array))
case("weights that are missing", write_arrays(lambda arrays, place: arrays.pop(first(arrays))))
case(
    "weights too many", write_arrays(lambda arrays, place: arrays.update({"../../x": np.zeros(2)}))
)
case(
    "weights of another shape",
    write_arrays(lambda arrays, place: arrays.update({first(arrays): np.zeros((3, 3))})),
)


def raw_arrays(name: str, header: dict | None, content: bytes, compress: bool = False) -> Case:
    """Put bytes in the place of the first array."""

    def run(place: Place) -> None:
        arrays = place.arrays()
        file = place.run / "policy" / "arrays.npz"
        with zipfile.ZipFile(
            file, "w", zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
        ) as archive:
            for array_name, array in arrays.items():
                member = io.BytesIO()
                if array_name == first(arrays):
                    if header is not None:
                        np.lib.format.write_array_header_1_0(member, header)
                    member.write(content)
                else:
                    np.save(member, array)
                archive.writestr(f"{array_name}.npy", member.getvalue())

    case(name, run)
    return run


raw_arrays(
    "an array that claims 10^15 numbers",
    {"descr": "<f4", "fortran_order": False, "shape": (10**15,)},
    b"\0" * 64,
)
raw_arrays(
    "an array that unpacks to 200 MB",
    {"descr": "<f4", "fortran_order": False, "shape": (50 * 2**20,)},
    bytes(200 * 2**20),
    compress=True,
)
raw_arrays("an array without a header", None, b"\x93NUMPY\xff\xff" + b"x" * 100)
raw_arrays("an array that is text", None, b"not an array")


def write(path: str, content: bytes) -> Case:
    return lambda place: (place.run / path).write_bytes(content) and None


case("arrays.npz that is no archive", write("policy/arrays.npz", b"PK\3\4" + b"\xff" * 500))
case(
    "arrays.npz that is a pickle",
    lambda p: write("policy/arrays.npz", pickle.dumps(Runs(p.canary)))(p),
)
case("arrays.npz that is empty", write("policy/arrays.npz", b""))

# Files that are no JSON, or no files.

for path in ("config.json", "policy/config.json"):
    case(f"{path} of brackets", write(path, b"[" * 200_000))
    case(f"{path} of bytes 0xff", write(path, b"\xff" * 100))
    case(f"{path} that is a list", write(path, b"[1, 2]"))
    case(f"{path} of half an object", write(path, b'{"format": 1, '))
    case(f"{path} of a number too large", write(path, b'{"format": 1e99999, "total_env_steps": 1'))


def becomes_link(path: str, target: str) -> Case:
    def run(place: Place) -> None:
        old = place.run / path
        if old.is_dir() and not old.is_symlink():
            shutil.rmtree(old)
        else:
            old.unlink(missing_ok=True)
        old.symlink_to(place.outside / target)

    return run


LINKS = {
    "policy": "policy",
    "policy/config.json": "policy/config.json",
    "policy/arrays.npz": "policy/arrays.npz",
    "config.json": "secret.txt",
    "metrics.jsonl": "secret.txt",
    "learning_curve.png": "secret.txt",
    "ended.txt": "secret.txt",
    ".lock": "secret.txt",
    "tensorboard": "",
    "checkpoints": "",
    "best_policy": "policy",
}
for path, target in LINKS.items():
    for whose in ("stranger", "mine"):
        case(f"{path} that is a link ({whose})", becomes_link(path, target), whose)


def becomes_pipe(path: str) -> Case:
    def run(place: Place) -> None:
        (place.run / path).unlink()
        os.mkfifo(place.run / path)

    return run


for path in ("config.json", "policy/config.json", "policy/arrays.npz"):
    case(f"{path} that is a pipe", becomes_pipe(path))


# Checkpoints.


def blob_of(place: Place) -> Path:
    return next((place.checkpoint / "blobs").iterdir())


def evil_state(make: Callable[[Place], bytes]) -> Case:
    def run(place: Place) -> None:
        blob_of(place).write_bytes(make(place))
        place.edit_manifest()

    return run


def sealed_pickle(place: Place) -> bytes:
    """Return what Sebulba once saved of environments: a pickle with its checksum."""
    payload = pickle.dumps(Runs(place.canary))
    return b"sebulba state 1\n" + hashlib.sha256(payload).digest() + payload


def nested_pickle(place: Place) -> bytes:
    """Return a state of today in which the environment is a pickle, as where it must be."""
    evil = sealed.pack(("pickled", None, pickle.dumps(Runs(place.canary))))
    return sealed.seal((evil, [], ()), of="a stepped cycle of 'CartPole-v1'", num_envs=4)


case("state that is a pickle, checksums right", evil_state(sealed_pickle))
case("state with a pickle in it, checksums right", evil_state(nested_pickle))
case("state of noise", evil_state(lambda place: b"sebulba state 2\n" + b"\xc7" * 500))


def blob_path(make: Callable[[Place], str]) -> Case:
    def run(place: Place) -> None:
        def change(body: dict) -> None:
            before, after = next(iter(body["blobs"].values())), make(place)
            body["blobs"] = dict.fromkeys(body["blobs"], after)
            for entry in body["files"]:
                if entry["path"] == before:
                    entry["path"] = after

        place.edit_manifest(change)

    return run


case("blob with an absolute path", blob_path(lambda place: str(place.outside / "secret.txt")))
case("blob with a path of ..", blob_path(lambda place: "../../../outside/secret.txt"))
case("blob with a path of nothing", blob_path(lambda place: "\0"))


def link_in_checkpoint(path: str) -> Case:
    def run(place: Place) -> None:
        becomes_link(f"checkpoints/{place.checkpoint.name}/{path}", "secret.txt")(place)

    return run


for path in ("record.json", "manifest.json", "blobs", "arrays"):
    case(f"checkpoint with the link {path}", link_in_checkpoint(path), "mine")


def record_of(change: Callable[[dict], Any]) -> Case:
    def run(place: Place) -> None:
        file = place.checkpoint / "record.json"
        record = json.loads(file.read_text())
        change(record)
        file.write_text(json.dumps(record))
        place.edit_manifest()

    return run


case("record of another run", record_of(lambda r: r.update(run_id="0" * 32)))
case("record of another learning rate", record_of(lambda r: r["config"].update({"seed": 77})))
case("record of an experience outside", record_of(lambda r: r.update(experience="../../outside")))
case(
    "manifest that is a list", lambda p: (p.checkpoint / "manifest.json").write_text("[]") and None
)
case("manifest without files", lambda p: p.edit_manifest(lambda body: body.update(files=3)))


# What somebody changed in a folder of one's own.


def with_checkpoint_of_stranger(place: Place) -> None:
    """Exchange the state of the environments; the attacker has no key, and may copy a signature."""
    signature = json.loads((place.checkpoint / "manifest.json").read_text())["signature"]
    evil_state(sealed_pickle)(place)
    file = place.checkpoint / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"signature": signature}))


def edited(kind: str, change: Callable[[dict], Any], *, checksum: bool) -> Case:
    """Edit a signed file without the key, with a new checksum if that helps."""

    def run(place: Place) -> None:
        def with_sum(record: dict) -> None:
            change(record)
            if checksum:
                record["sha256"] = trust.signed(kind, record)["sha256"]

        place.edit(kind, with_sum, sign=False)

    return run


def unsigned(kind: str) -> Case:
    def change(record: dict) -> None:
        record.pop("signature")
        record.pop("sha256")
        record |= {"env": record["env"] | {"id": "planted_module:Env"}} if kind == RUN else {}
        record |= {"agent": "planted_module:Agent"} if kind == POLICY else {}

    return edited(kind, change, checksum=False)


for checksum in (True, False):
    how = "a new checksum" if checksum else "the old checksum"
    env = edited(RUN, lambda r: r["env"].update(id="planted_module:Env"), checksum=checksum)
    agent = edited(POLICY, lambda r: r.update(agent="planted_module:Agent"), checksum=checksum)
    case(f"my run, another environment, {how}", env, "mine")
    case(f"my policy, another agent, {how}", agent, "mine")
case("my run, signature taken off", unsigned(RUN), "mine")
case("my policy, signature taken off", unsigned(POLICY), "mine")
case("my run, a checkpoint exchanged", with_checkpoint_of_stranger, "mine")
case("my policy, arrays exchanged", write("policy/arrays.npz", b"PK\5\6" + b"\0" * 18), "mine")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("keys")
    return {"mine": folder / "mine", "stranger": folder / "stranger"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, keys: dict[str, Path]) -> dict[str, Path]:
    """Return a real run of one's own, and the same with everything signed by the stranger."""
    mine, root = tmp_path_factory.mktemp("mine") / "run", tmp_path_factory.mktemp("stranger")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(trust.KEY_VARIABLE, str(keys["mine"]))
        assert cli.main(["train", "cartpole", *SMALL, "--run-dir", str(mine)]) == 0
        assert any((mine / "checkpoints").glob("*/blobs/*")), "no state of an environment"
        patch.setenv(trust.KEY_VARIABLE, str(keys["stranger"]))
        place = Place(root, mine)
        place.edit(RUN, lambda record: None)
        place.edit(POLICY, lambda record: None)
        place.edit_manifest()
    return {"mine": mine, "stranger": place.run}


class Watch:
    """Sees, by Python's audit events, what is opened outside and what is imported or run."""

    def __init__(self) -> None:
        self.outside: Path | None = None
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple) -> None:
        if self.outside is None:
            return
        if event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
            path = Path(os.fsdecode(arguments[0])).absolute()
            if os.path.realpath(path).startswith(f"{self.outside}{os.sep}"):
                self.seen.append(f"opened {path}")
        elif event in ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn"):
            self.seen.append(f"{event} {arguments}")
        elif event == "import" and str(arguments[0]).startswith(("planted_module", "here.")):
            self.seen.append(f"import {arguments[0]}")


WATCH: list[Watch] = []


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    if not WATCH:
        WATCH.append(Watch())  # an audit hook cannot be taken away again
    WATCH[0].seen.clear()
    yield WATCH[0]
    WATCH[0].outside = None


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def load(run: Path) -> int:
    try:
        sebulba.load_policy(run)
    except (UsageError, CheckpointError):
        return 2
    return 0


def commands(run: Path) -> dict[str, Callable[[], int]]:
    """Return everything that reads the folder of a run."""
    evaluate = ["eval", str(run), "--episodes", "1", "--num-envs", "1"]
    again = ["train", "cartpole", *SMALL, "--run-dir", str(run), "--resume"]
    return {
        "eval": lambda: cli.main(evaluate),
        "eval --best": lambda: cli.main([*evaluate, "--best"]),
        "load_policy": lambda: load(run),
        "resume": lambda: cli.main(["resume", str(run), "--total-env-steps", "240"]),
        "train --resume": lambda: cli.main([*again, "--total-env-steps", "240"]),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_hostile_folder_does_nothing(
    name, runs, keys, tmp_path, monkeypatch, capfd, watched, record_fault
):
    whose, change = CASES[name]
    place = Place(tmp_path, runs[whose])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(trust.KEY_VARIABLE, str(keys["stranger"]))
        change(place)
    monkeypatch.setenv(trust.KEY_VARIABLE, str(keys["mine"]))
    monkeypatch.chdir(place.here)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(evaluation, "evaluate", lambda *args, **kwargs: "played")  # takes seconds
    before = content_of(place.outside)
    watched.outside = place.outside
    codes = {command: run() for command, run in commands(place.run).items()}
    watched.outside = None
    printed = "".join(capfd.readouterr())
    assert "Traceback" not in printed
    assert watched.seen == [] and not place.canary.exists()
    assert content_of(place.outside) == before
    assert set(codes.values()) <= {0, *REFUSED}, codes
    readers = (
        ("eval", "load_policy") if name.startswith("my policy") else ("resume", "train --resume")
    )
    assert all(codes[command] in REFUSED for command in readers), codes
    refused = [command for command, code in codes.items() if code in REFUSED]
    record_fault("commands", tried=len(codes), refused=len(refused))


@pytest.mark.slow
def test_a_word_follows_no_link_to_a_policy(runs, keys, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(trust.KEY_VARIABLE, str(keys["mine"]))
    place = Place(tmp_path, runs["mine"])
    becomes_link("best_policy", "policy")(place)
    assert cli.main(["eval", str(place.run), "--best", "--trust", "--episodes", "1"]) == 2
    assert "best_policy is a link" in capsys.readouterr().err


@pytest.mark.parametrize("there", [True, False])
def test_a_new_run_writes_through_no_link(there, keys, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(trust.KEY_VARIABLE, str(keys["mine"]))
    outside, run = tmp_path / "outside.txt", tmp_path / "run"
    run.mkdir()
    if there:
        outside.write_text("mine")
    (run / "episodes.jsonl").symlink_to(outside)
    new = ["train", "cartpole", *SMALL, "--run-dir", str(run)]
    assert cli.main(new) == cli.main([*new, "--resume"]) == 2
    assert "episodes.jsonl is a link to" in capsys.readouterr().err
    assert outside.read_text() == "mine" if there else not outside.exists()


def test_there_are_enough_hostile_folders():
    assert len(CASES) >= 60


@pytest.mark.slow
@pytest.mark.parametrize("whose", ["mine", "stranger"])
def test_a_run_of_ones_own_needs_no_word(whose, runs, keys, tmp_path, monkeypatch):
    monkeypatch.setenv(trust.KEY_VARIABLE, str(keys["mine"]))
    tried = {name: run() for name, run in commands(Place(tmp_path, runs[whose]).run).items()}
    assert tried.pop("eval --best") == 2  # it has none
    expected = {"mine": 0, "stranger": 2}[whose]
    assert tried == {
        "eval": 0,
        "load_policy": 0,
        "resume": expected,
        "train --resume": expected,
    }


@pytest.mark.slow
def test_a_run_of_before_there_were_signatures_goes_on_with_a_word(
    runs, keys, tmp_path, monkeypatch
):
    monkeypatch.setenv(trust.KEY_VARIABLE, str(keys["mine"]))
    place = Place(tmp_path, runs["mine"])
    for kind in (RUN, POLICY):
        place.edit(
            kind,
            lambda r: [r.pop(name, None) for name in ("signature", "sha256", "run_id", "links")],
            sign=False,
        )
    file = place.checkpoint / "manifest.json"
    outer = json.loads(file.read_text())
    del outer["signature"]
    file.write_text(json.dumps(outer))
    more = ["resume", str(place.run), "--total-env-steps"]
    assert cli.main([*more, "240"]) == 2
    assert cli.main([*more, "240", "--trust"]) == 0
    assert cli.main([*more, "280"]) == 0, "it is signed from then on"


@pytest.mark.parametrize("command", ["eval", "resume"])
def test_a_config_that_is_exchanged_after_the_check_is_not_used(
    command, runs, keys, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv(trust.KEY_VARIABLE, str(keys["mine"]))
    place = Place(tmp_path, runs["mine"])
    mine = (place.run / "config.json").read_text()
    place.edit(RUN, lambda record: record["env"].update(id="planted_module:Env"), sign=False)
    evil = (place.run / "config.json").read_text()
    checked = RunFolder.trust

    def while_checked(folder, *args):
        """Lay one's own file there for the time of the check."""
        (place.run / "config.json").write_text(mine)
        try:
            return checked(folder, *args)
        finally:
            (place.run / "config.json").write_text(evil)

    monkeypatch.setattr(RunFolder, "trust", while_checked)
    assert commands(place.run)[command]() == 2
    assert "was changed after the run wrote it" in capsys.readouterr().err
