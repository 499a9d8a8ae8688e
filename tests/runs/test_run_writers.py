"""Writers that ``--writers`` names: trackers by stand-ins of their libraries, and one's own."""

from __future__ import annotations

import importlib.machinery
import json
import re
import signal
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from sebulba.commands import cli
from sebulba.configs.experiment import ExperimentConfig
from sebulba.errors import UsageError
from sebulba.metrics.trackers import MlflowWriter, WandbWriter
from sebulba.metrics.writers import CompositeWriter, TensorBoardWriter
from sebulba.runs.writers import find_writer, made_writer
from sebulba.types import RunInfo
from tests.support import own

RECORD = {"env_steps": 640, "loss": np.float32(0.5), "unknown": None, "policy_lag_counts": {1: 3}}
EVALUATED = {"env_steps": 960, "eval_env_steps": 640, "eval_return_mean": 7.0}
TRAIN = [
    *("--num-envs", "4", "--steps-per-cycle", "5", "--num-inferencers-per-device", "1"),
    *("--inference-devices", "0", "--update-devices", "0", "--compile-cache", "off"),
    *("--metrics-interval-s", "0", "--total-env-steps", "200"),
]


def info(folder: Path, **config) -> RunInfo:
    return RunInfo(folder / "night", "abc123", {"agent.learning_rate": 0.1, **config}, None)


def stand_in(monkeypatch, name: str, **attributes) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, name, module)
    return module


class Calls(list):
    """Keeps the calls of the methods of an object that has all, whose results are itself."""

    def __getattr__(self, name):
        def call(*args, **kwargs):
            self.append((name, *args, *([kwargs] if kwargs else [])))
            return self

        return call


# Weights & Biases.


@pytest.fixture
def wandb(monkeypatch):
    run, begun = Calls(), {}
    run.__dict__["summary"] = {}

    def init(**options):
        begun.update(options)
        return run

    module = stand_in(monkeypatch, "wandb", init=init, Settings=dict, Image=lambda image: "image")
    module.run, module.begun = run, begun
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return module


def test_wandb_gets_configuration_metrics_and_the_end(wandb, tmp_path):
    writer = find_writer("wandb")(info(tmp_path))
    assert isinstance(writer, WandbWriter)
    writer.write({**RECORD, "picture": np.zeros((4, 5, 3), np.uint8)})
    writer.write(EVALUATED)
    writer.end("finished")
    writer.close()
    assert wandb.begun["config"] == {"agent.learning_rate": 0.1}
    assert (wandb.begun["project"], wandb.begun["id"], wandb.begun["name"]) == (
        *("sebulba", "abc123", "night"),
    )
    assert wandb.begun["resume"] == "allow" and wandb.begun["settings"] == {"console": "off"}
    assert wandb.run == [
        ("define_metric", "*", {"step_metric": "env_steps"}),
        ("define_metric", "eval_*", {"step_metric": "eval_env_steps"}),
        ("log", {"env_steps": 640.0, "loss": 0.5, "picture": "image"}),
        ("log", EVALUATED),
        ("finish", {"exit_code": 0}),
    ]
    assert wandb.run.summary == {"ended": "finished"}


@pytest.mark.parametrize(("end", "code"), [("stopped", 0), ("failed", 1)])
def test_wandb_is_told_of_a_failure(wandb, tmp_path, end, code):
    WandbWriter(info(tmp_path)).end(end)
    assert wandb.run[-1] == ("finish", {"exit_code": code}) and wandb.run.summary == {"ended": end}


def test_wandb_that_cannot_begin_is_a_sentence(wandb, tmp_path, monkeypatch):
    def init(**options):
        raise RuntimeError("No API key configured.")

    monkeypatch.setattr(wandb, "init", init)
    with pytest.raises(UsageError, match=r"RuntimeError: No API key configured.*WANDB_MODE"):
        find_writer("wandb")(info(tmp_path))


# MLflow.


class Client:
    """What is used of ``mlflow.tracking.MlflowClient``."""

    known: dict = {}  # noqa: RUF012
    is_down = False

    def __init__(self, uri):
        self.uri = uri

    def get_experiment_by_name(self, name):
        return None

    def create_experiment(self, name):
        return name

    def search_runs(self, places, what):
        return [run for run in self.known.values() if f"'{run.tags['sebulba.run_id']}'" in what]

    def create_run(self, place, run_name, tags):
        run = types.SimpleNamespace(
            **{"place": place, "name": run_name, "tags": tags, "uri": self.uri},
            **{"status": "RUNNING", "params": [], "metrics": []},
            info=types.SimpleNamespace(run_id=f"run-{len(self.known)}"),
        )
        self.known[run.info.run_id] = run
        return run

    def update_run(self, run_id, status):
        self.known[run_id].status = status

    set_terminated = update_run

    def log_batch(self, run_id, metrics=(), params=()):
        assert len(params) <= 100
        if self.is_down:
            raise ConnectionError("no answer")
        self.known[run_id].params += params
        self.known[run_id].metrics += [(name, value, step) for name, value, _, step in metrics]


@pytest.fixture
def mlflow(monkeypatch):
    for variable in ("ALLOW_FILE_STORE", "DISABLE_TELEMETRY", "HTTP_REQUEST_MAX_RETRIES"):
        monkeypatch.setenv(f"MLFLOW_{variable}", "1")  # which the writer would set for good
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    for variable in ("TRACKING_URI", "EXPERIMENT_NAME"):
        monkeypatch.delenv(f"MLFLOW_{variable}", raising=False)
    client = type("Client", (Client,), {"known": {}})
    stand_in(monkeypatch, "mlflow")
    stand_in(monkeypatch, "mlflow.tracking", MlflowClient=client)
    entity = lambda *values: values  # noqa: E731
    stand_in(monkeypatch, "mlflow.entities", Metric=entity, Param=entity)
    return client


def test_mlflow_gets_configuration_metrics_and_the_end(mlflow, tmp_path):
    many = {f"agent.x{i}": i for i in range(150)}
    writer = find_writer("mlflow")(info(tmp_path, **many))
    assert isinstance(writer, MlflowWriter)
    writer.write(RECORD)
    writer.write(EVALUATED)
    writer.end("finished")
    writer.close()
    (run,) = mlflow.known.values()
    assert (run.place, run.name, run.status) == ("sebulba", "night", "FINISHED")
    assert run.uri == (tmp_path / "night" / "mlruns").as_uri()
    assert len(run.params) == 151 and run.params[0] == ("agent.learning_rate", "0.1")
    assert run.metrics == [
        *(("env_steps", 640.0, 640), ("loss", 0.5, 640), ("env_steps", 960.0, 960)),
        *(("eval_env_steps", 640.0, 640), ("eval_return_mean", 7.0, 640)),
    ]


def test_mlflow_goes_on_with_the_run_that_is_resumed(mlflow, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    MlflowWriter(info(tmp_path)).end("stopped")
    (run,) = mlflow.known.values()
    assert run.status == "KILLED" and run.uri == "http://127.0.0.1:5000"
    writer = MlflowWriter(info(tmp_path))
    assert run.status == "RUNNING" and len(mlflow.known) == 1 and len(run.params) == 1
    writer.end("failed")
    assert run.status == "FAILED"


def test_mlflow_that_cannot_begin_is_a_sentence(mlflow, tmp_path):
    mlflow.is_down = True
    with pytest.raises(UsageError, match=r"ConnectionError: no answer.*MLFLOW_TRACKING_URI"):
        find_writer("mlflow")(info(tmp_path, rate=0.1))


def test_a_server_that_does_not_answer_is_asked_once_a_minute(mlflow, tmp_path, monkeypatch):
    writer = CompositeWriter(MlflowWriter(info(tmp_path)))
    mlflow.is_down = True
    with pytest.warns(RuntimeWarning, match="MlflowWriter failed.* no answer"):
        writer.write(RECORD)
    writer.write(RECORD)  # dropped
    mlflow.is_down = False
    monkeypatch.setattr(MlflowWriter, "RETRY_S", 0.0)
    next(iter(writer._writers))._retry_at = 0.0
    writer.write(EVALUATED)
    (run,) = mlflow.known.values()
    assert {step for _, _, step in run.metrics} == {640, 960}


# The libraries themselves, where they are installed.


def test_wandb_itself_keeps_a_run_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    writer = WandbWriter(info(tmp_path))
    writer.write({**RECORD, "picture": np.zeros((4, 5, 3), np.uint8)})
    writer.write(EVALUATED)
    assert writer._run.config["agent.learning_rate"] == 0.1
    writer.end("finished")
    (kept,) = tmp_path.glob("wandb/offline-run-*/run-abc123.wandb")
    assert b"eval_return_mean" in kept.read_bytes() and not (tmp_path / "night").exists()


def test_mlflow_itself_keeps_a_run_in_its_folder(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    writer = MlflowWriter(info(tmp_path))
    writer.write(RECORD)
    writer.end("stopped")
    writer = MlflowWriter(info(tmp_path))
    writer.write(EVALUATED)
    writer.end("finished")
    run = writer._client.get_run(writer._id)
    assert run.info.status == "FINISHED" and run.data.params == {"agent.learning_rate": "0.1"}
    history = writer._client.get_metric_history(writer._id, "eval_return_mean")
    assert [(metric.step, metric.value) for metric in history] == [(640, 7.0)]
    assert (tmp_path / "night" / "mlruns").is_dir()


# Names.


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("wandbb", "'wandbb' is unknown; the nearest are wandb; one of your own is my_package:"),
        ("zzz", "there is tensorboard, wandb, mlflow"),
        ("tests.support.own:Missing", "has no attribute 'Missing'"),
        ("tests.runs.test_run_writers:RECORD", "must be a class or a function"),
    ],
)
def test_a_name_that_stands_for_no_writer_is_refused(name, words):
    with pytest.raises(UsageError, match=words):
        find_writer(name)


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_library_is_named_with_its_extra(name, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda found: None)
    assert cli.main(["train", "cartpole", "--writers", name]) == cli.EXIT_USAGE
    said = capsys.readouterr().err
    assert f"pip install 'sebulba[{name}]'" in said and said.count("\n") == 1


@pytest.mark.parametrize("writers", [("",), ("a:b:c",), ("wandb", "wandb"), "wandb"])
def test_wrong_lists_of_writers_are_refused(writers):
    with pytest.raises(UsageError, match="writers="):
        ExperimentConfig(
            env=own.QUICK.env, agent=own.QUICK.agent, total_env_steps=1, writers=writers
        )


def test_a_file_of_a_stranger_names_no_writer(tmp_path, capsys):
    file = tmp_path / "theirs.json"
    file.write_text(
        json.dumps({"config": "cartpole", "options": {"writers": ["tests.support.own:X"]}})
    )
    assert cli.main(["train", str(file)]) == cli.EXIT_USAGE
    assert "names the writer tests.support.own:X" in capsys.readouterr().err


def test_a_writer_is_found_by_its_entry_point(tmp_path, monkeypatch):
    folder = tmp_path / "theirs-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(
        "[sebulba.writers]\nnotebook = tests.runs.test_run_writers:Notebook\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert find_writer("notebook") is Notebook
    with pytest.raises(UsageError, match="the nearest are notebook"):
        find_writer("notebok")


def test_tensorboard_is_the_default(tmp_path):
    assert own.QUICK.writers == ("tensorboard",)
    assert isinstance(find_writer("tensorboard")(info(tmp_path)), TensorBoardWriter)


# Runs.


class Notebook:
    """A writer that keeps what it is given."""

    kept: list = []  # noqa: RUF012
    stop_at = 0

    def __init__(self, run):
        self.kept.append((run.folder.name, run.config["total_env_steps"], run.resumed_at))

    def write(self, metrics):
        self.kept.append(metrics["env_steps"])
        if metrics["env_steps"] == self.stop_at:
            signal.raise_signal(signal.SIGTERM)

    def end(self, end):
        self.kept.append(end)

    def close(self):
        self.kept.append("closed")


class Fails:
    def __init__(self, run):
        pass

    def write(self, metrics):
        raise OSError("planted")

    def close(self):
        pass


class Breaks(own.MyEnv):
    def step(self, action):
        raise RuntimeError("planted in step")


def never(run):
    raise OSError("cannot begin")


@pytest.fixture
def kept(monkeypatch):
    monkeypatch.setattr(Notebook, "kept", [])
    return lambda: Notebook.kept


@pytest.mark.slow
def test_a_run_tells_its_writers_how_it_ended(tmp_path, monkeypatch, kept, capsys):
    monkeypatch.setattr(Notebook, "stop_at", 20)
    mine = [
        "--writers",
        "tests.runs.test_run_writers:Notebook",
        "tests.runs.test_run_writers:Fails",
    ]
    words = ["train", "tests.support.own:QUICK", *TRAIN, *mine, "--run-dir", str(tmp_path / "mine")]
    with pytest.warns(RuntimeWarning, match="Fails failed.* planted") as warned:
        assert cli.main(words) == 128 + signal.SIGTERM
    assert len([one for one in warned if "planted" in str(one.message)]) == 1
    first = kept()
    assert first[:2] == [("mine", 200, None), 20] and first[-2:] == ["stopped", "closed"]
    assert not (tmp_path / "mine" / "tensorboard").exists()

    del first[:]
    page = (Path(__file__).parents[2] / "docs/metrics.md").read_text()
    (pasted,) = re.findall(r"```python\n(# my_writer\.py\n.*?)```", page, re.DOTALL)
    (tmp_path / "my_writer.py").write_text(pasted)
    monkeypatch.syspath_prepend(tmp_path)
    go_on = ["resume", str(tmp_path / "mine"), "--writers", "tests.runs.test_run_writers:Notebook"]
    assert cli.main([*go_on, "my_writer:MyWriter"]) == 0
    lines = (tmp_path / "mine" / "returns.txt").read_text().splitlines()
    assert lines[-2].startswith("200 ") and lines[-1] == "finished"
    done = kept()[0][2]
    assert done >= 20 and kept()[-3:] == [200, "finished", "closed"]
    assert f"resumed at {done} env steps" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_that_fails_tells_its_writers(tmp_path, kept):
    words = [*TRAIN, "--run-dir", str(tmp_path / "mine")]
    words += ["--env.id", "tests.runs.test_run_writers:Breaks"]
    mine = ["--writers", "tests.runs.test_run_writers:Notebook"]
    assert cli.main(["train", "tests.support.own:QUICK", *words, *mine]) == cli.EXIT_ENV
    assert kept()[0][0] == "mine" and kept()[-2:] == ["failed", "closed"]


def test_a_writer_that_cannot_begin_ends_the_run_before_it_trains(tmp_path, kept, capsys):
    folder = tmp_path / "mine"
    mine = [
        "--writers",
        "tests.runs.test_run_writers:Notebook",
        "tests.runs.test_run_writers:never",
    ]
    words = ["train", "tests.support.own:QUICK", *TRAIN, *mine, "--run-dir", str(folder)]
    assert cli.main(words) == cli.EXIT_OTHER
    assert "OSError: cannot begin" in capsys.readouterr().err
    assert kept() == [("mine", 200, None), "failed", "closed"]
    assert "cannot begin" in (folder / "ended.txt").read_text()
    assert not (folder / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [("os.path:join", "join cannot be made"), ("builtins:repr", "no methods write and close")],
)
def test_what_makes_no_writer_is_refused_in_words(tmp_path, name, said):
    with pytest.raises(UsageError, match=said):
        made_writer(find_writer(name), info(tmp_path))
