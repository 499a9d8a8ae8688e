"""The command line: record, describe, train, resume and evaluate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sebulba_offline.dataset import load

import sebulba
from sebulba.commands.cli import main
from sebulba.metrics.plots import read_records
from tests.support import recorded


def test_a_data_set_is_described_and_drawn(tmp_path: Path, capsys: Any) -> None:
    folder = recorded.aim(tmp_path / "data", 20)
    picture, facts = tmp_path / "data.png", tmp_path / "data.json"
    assert main(["dataset", "show", str(folder), "--out", str(picture), "--json", str(facts)]) == 0
    printed = capsys.readouterr().out
    assert "20, 100 steps, 100 % ended in a terminal state" in printed
    assert json.loads(facts.read_text())["return_mean"] < -1
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["dataset", str(folder)]) == 0
    assert printed.startswith(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["dataset", "nowhere"], "holds no data set"),
        (["dataset", "show", "nowhere", "--out", "x.txt"], "must end in .png or .svg"),
        (["dataset", "record", "pretrained:cartpole", "--out", "d", "--random", "2"], "random=2.0"),
        (["dataset", "record", "pretrained:cartpole", "--out", "d", "--best"], "no best policy"),
        (["train", "bc", "--agent.dataset", "nowhere"], "holds no data set"),
        (["train", "bc"], "record one with sebulba dataset record"),
    ],
)
def test_wrong_words_end_in_a_sentence(
    words: list[str], said: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_a_policy_is_recorded_cloned_and_resumed(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    record = ["dataset", "record", "pretrained:cartpole", "--out", "data", "--episodes", "8"]
    assert main(record) == 0
    assert load("data").episodes().returns.mean() > 450
    assert main(record) == 2  # the folder is taken
    sizes = ["--eval-every-env-steps", "200000", "--eval-episodes", "10", "--writers"]
    train = ["train", "bc", "--agent.dataset", "data", *sizes, "--num-cpu-devices", "1"]
    assert main([*train, "--name", "clone", "--total-env-steps", "200000"]) == 0
    records = read_records("runs/clone/metrics.jsonl")
    assert records[-1]["eval_return_mean"] > 400 and records[-1]["episode_return_mean"] is None
    assert main(["eval", "runs/clone", "--episodes", "10", "--json", "eval.json"]) == 0
    assert json.loads(Path("eval.json").read_text())["episode_return_mean"] > 400
    assert main(["resume", "runs/clone", "--total-env-steps", "400000"]) == 0
    assert main([*train, "--name", "whole", "--total-env-steps", "400000"]) == 0
    networks = [sebulba.load_policy(f"runs/{name}").acting_networks for name in ("clone", "whole")]
    import jax

    jax.tree.map(np.testing.assert_array_equal, *networks)
