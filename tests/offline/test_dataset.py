"""Data sets on disk: what is written is read, and damage is found, with its row."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete
from sebulba_offline.dataset import RECORD_FILE, DatasetWriter, Rows, load
from sebulba_offline.describe import described, lines

from sebulba.errors import UsageError
from tests.support import recorded

SPACE = Dict({"speed": Box(-1, 1, (3,), np.float32), "kind": Discrete(4, dtype=np.int32)})
ACTIONS = Discrete(3, start=5, dtype=np.int32)


def episode(length: int, seed: int = 0, *, terminated: bool = True) -> Rows:
    rng = np.random.default_rng(seed)
    flags = np.zeros((3, length + 1), np.bool_)
    flags[0 if terminated else 1, -1] = flags[2, 0] = True
    action = rng.integers(5, 8, length + 1).astype(np.int32)
    action[-1] = 0
    reward = rng.normal(size=length + 1).astype(np.float32)
    reward[0] = 0
    obs = {
        "kind": rng.integers(0, 4, length + 1).astype(np.int32),
        "speed": rng.uniform(-1, 1, (length + 1, 3)).astype(np.float32),
    }
    return Rows(obs, action, reward, *flags)


def written(folder: Path, lengths: tuple[int, ...] = (3, 5, 2), **options: Any) -> list[Rows]:
    episodes = [episode(n, seed, terminated=seed != 1) for seed, n in enumerate(lengths)]
    with DatasetWriter(folder, SPACE, ACTIONS, env="Toy-v0", **options) as writer:
        for one in episodes:
            writer.add(one)
    return episodes


@pytest.mark.parametrize("rows_a_file", [1, 8, 1000])
def test_what_is_written_is_read(tmp_path: Path, rows_a_file: int) -> None:
    episodes = written(tmp_path, rows_a_file=rows_a_file)
    dataset = load(tmp_path)
    assert len(dataset.record["files"]) == {1: 3, 8: 2, 1000: 1}[rows_a_file]
    at = 0
    for one in episodes:
        for name in Rows._fields[1:]:
            got = getattr(dataset.rows, name)[at : at + one.num_rows]
            np.testing.assert_array_equal(got, getattr(one, name))
        for part in ("kind", "speed"):
            np.testing.assert_array_equal(
                dataset.rows.obs[part][at : at + one.num_rows], one.obs[part]
            )
        at += one.num_rows
    assert at == dataset.rows.num_rows == dataset.record["rows"]
    assert (dataset.observation_space, dataset.action_space) == (SPACE, ACTIONS)
    told = dataset.episodes()
    assert told.lengths.tolist() == [3, 5, 2] and told.terminated.tolist() == [True, False, True]
    np.testing.assert_allclose(told.returns, [one.reward.sum() for one in episodes], rtol=1e-6)


def test_a_second_writer_does_not_overwrite(tmp_path: Path) -> None:
    written(tmp_path)
    with pytest.raises(UsageError, match="holds a data set already"):
        DatasetWriter(tmp_path, SPACE, ACTIONS)


def test_a_description_has_the_numbers_of_the_data(tmp_path: Path) -> None:
    episodes = written(tmp_path)
    dataset = load(tmp_path)
    about = described(dataset)
    returns = [float(one.reward.sum()) for one in episodes]
    assert about["episodes"] == 3 and about["steps"] == 10
    assert about["return_mean"] == pytest.approx(np.mean(returns))
    actions = np.concatenate([one.action[:-1] for one in episodes])
    shares = [np.mean(actions == action) for action in (5, 6, 7)]
    np.testing.assert_allclose(about["action"]["shares"], shares)
    speed = np.concatenate([one.obs["speed"] for one in episodes]).astype(np.float64)
    np.testing.assert_allclose(about["observation"]["obs/speed"]["std"], speed.std(axis=0))
    assert any("Toy-v0" in line for line in lines(dataset, about))


def changed(folder: Path, change: Any) -> None:
    """Change the arrays of the first file, and give it the right checksum again."""
    file = folder / "rows-00000.npz"
    with np.load(file) as opened:
        arrays = {name: opened[name].copy() for name in opened.files}
    change(arrays)
    np.savez(file, **arrays)
    seal(folder)


def seal(folder: Path) -> None:
    record = json.loads((folder / RECORD_FILE).read_text())
    data = (folder / "rows-00000.npz").read_bytes()
    record["files"][0]["sha256"] = hashlib.sha256(data).hexdigest()
    (folder / RECORD_FILE).write_text(json.dumps(record))


def put(name: str, row: int, value: Any) -> Any:
    def change(arrays: dict[str, np.ndarray]) -> None:
        arrays[name][row] = value

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (put("obs/speed", 6, np.nan), "row 6: obs/speed is not finite"),
        (put("reward", 2, np.inf), "row 2: reward is not finite"),
        (put("action", 5, 8), r"row 5: the action is not in Discrete\(3, start=5, "),
        (put("action", 1, 4), "row 1: the action is not in"),
        (put("is_first", 4, False), "row 4: episodes begin"),
        (put("is_first", 6, True), "row 6: episodes begin"),
        (put("terminated", -1, False), "row 12: "),
        (lambda arrays: arrays.pop("reward"), "lacks reward"),
        (lambda arrays: arrays.update(reward=arrays["reward"][:5]), r"has reward of float32\(5,\)"),
        (
            lambda arrays: arrays.update(action=arrays["action"].astype(np.int64)),
            "has action of int64|bytes of action",
        ),
        (lambda arrays: arrays.update(reward=np.array([{}] * 13)), "damaged|more than"),
    ],
)
def test_a_damaged_row_is_named(tmp_path: Path, change: Any, said: str) -> None:
    written(tmp_path)
    load(tmp_path)
    changed(tmp_path, change)
    with pytest.raises(UsageError, match=said) as raised:
        load(tmp_path)
    assert "rows-00000.npz" in str(raised.value) and "; " in str(raised.value)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    written(tmp_path)
    file, record = tmp_path / "rows-00000.npz", tmp_path / RECORD_FILE
    whole, text = file.read_bytes(), record.read_text()
    for place in (10, len(whole) // 2, len(whole) - 10):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(UsageError, match=r"rows-00000\.npz is damaged: its checksum"):
            load(tmp_path)
    file.write_bytes(whole[: len(whole) // 2])
    seal(tmp_path)
    with pytest.raises(UsageError, match=r"rows-00000\.npz is damaged"):
        load(tmp_path)
    file.unlink()
    with pytest.raises(UsageError, match=r"rows-00000\.npz cannot be read"):
        load(tmp_path)
    record.write_text(text.replace('"format": 1', '"format": 2'))
    with pytest.raises(UsageError, match="has format 2"):
        load(tmp_path)
    record.write_text(text.replace("rows-00000.npz", "../rows.npz"))
    with pytest.raises(UsageError, match="outside its folder"):
        load(tmp_path)
    record.unlink()
    with pytest.raises(UsageError, match="sebulba dataset record"):
        load(tmp_path)


def test_a_file_that_asks_for_much_memory_is_refused(tmp_path: Path) -> None:
    written(tmp_path)
    file = tmp_path / "rows-00000.npz"
    with np.load(file) as opened:
        arrays = {name: opened[name] for name in opened.files}
    data = io.BytesIO()
    arrays["reward"] = np.zeros(10_000_000, np.float32)
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            one = io.BytesIO()
            np.save(one, array)
            archive.writestr(f"{name}.npy", one.getvalue())
    file.write_bytes(data.getvalue())
    seal(tmp_path)
    with pytest.raises(UsageError, match="bytes of reward, more than"):
        load(tmp_path)


def test_a_wrong_episode_is_not_written(tmp_path: Path) -> None:
    one = episode(3)
    one.reward[2] = np.nan
    with (
        DatasetWriter(tmp_path, SPACE, ACTIONS) as writer,
        pytest.raises(UsageError, match="episode 0 cannot be recorded: row 2: reward"),
    ):
        writer.add(one)
    assert not (tmp_path / RECORD_FILE).exists()


def test_the_scripted_player_holds_the_pole(tmp_path: Path) -> None:
    dataset = load(recorded.cart_pole(tmp_path, 3))
    assert dataset.episodes().returns.tolist() == [200, 200, 200]
    assert isinstance(dataset.action_space, gymnasium.spaces.Discrete)
