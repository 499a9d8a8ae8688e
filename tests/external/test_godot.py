"""Games that speak the dialect of Godot RL Agents: a double of one, and one in a real engine."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from sebulba_external import godot
from sebulba_external.actor import Actor, Begin, End, Step
from sebulba_external.environments import ENVIRONMENTS, GodotOptions, _game
from sebulba_external.godot import Game, play
from sebulba_external.protocol import ProtocolError

import sebulba
from tests.external import godot_double
from tests.external.test_simulators import processes_with, wait_until

DOUBLE = f"{sys.executable} {godot_double.__file__} --port={{port}} --env_seed={{seed}}"
ENGINE = shutil.which(os.environ.get("GODOT3", "godot3-server"))
SCRIPT = Path(__file__).parents[2] / "examples/godot_game/game.gd"
REAL = (
    f"{ENGINE} --disable-render-loop --fixed-fps 60 -s {SCRIPT} --port={{port}} --env_seed={{seed}}"
)
GAMES = [
    pytest.param(DOUBLE, id="double"),
    pytest.param(
        REAL, id="engine", marks=pytest.mark.skipif(ENGINE is None, reason="needs godot3-server")
    ),
]


@pytest.mark.parametrize("command", GAMES)
def test_a_game_says_what_its_agents_see_and_do(command: str) -> None:
    with Game(command, seed=3) as game:
        assert game.policies == ["vector", "pixels"]
        assert game.observations == [{"obs": ("<f4", (4,))}, {"camera_2d": ("|u1", (8, 8, 2))}]
        assert game.actions == [{"push": ("discrete", 5)}] * 2
        vector, pixels = game.reset()
        assert (vector.shape, pixels.shape, pixels.dtype) == ((4,), (8, 8, 2), np.uint8)
        assert not vector[2:].any()
        assert pixels.max() > 100
        for step in range(1, 61):
            (vector, pixels), rewards, done = game.step([np.int32(2), np.int32(1)])
            assert done == [step == 60] * 2
        assert vector[0] > 0.7  # pushed against the right wall
        assert pixels[:, :2].max() > pixels[:, 4:].max()  # and the left one
        assert rewards[0] < 0.4
        (vector, _), _, done = game.step([np.int32(0), np.int32(0)])
        assert not done[0]
        assert np.abs(vector[2:]).max() < 0.1
    assert game._process is not None
    assert game._process.returncode == 0  # it ended by itself


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_dialect_is_that_of_godot_rl() -> None:
    core = pytest.importorskip("godot_rl.core.godot_env")
    said: list[list[bytes]] = []

    def heard(connection: socket.socket) -> list[bytes]:
        """Answer as the double does, and note what is said."""
        discs, words = godot_double.Discs(1), []
        with contextlib.suppress(SystemExit), connection:
            while True:
                length = connection.recv(4, socket.MSG_PEEK)
                message = godot_double.receive(connection)
                words.append((length, message))
                if message["type"] == "env_info":
                    godot_double.send(connection, godot_double.INFO)
                if message["type"] == "reset":
                    answer = {"type": "reset", "obs": discs.observations()}
                    godot_double.send(connection, answer)
                if message["type"] == "action":
                    discs.act(message["action"])
                    answer = {"type": "step", "obs": discs.observations(), "done": [False] * 2}
                    godot_double.send(connection, answer | {"reward": discs.rewards()})
        return words

    def connected(port: int) -> socket.socket:
        for _ in range(1000):
            with contextlib.suppress(ConnectionRefusedError):
                return socket.create_connection(("127.0.0.1", port))
            threading.Event().wait(0.01)
        raise AssertionError("nobody listens")

    observed = []
    for end in ("theirs", "ours"):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        thread = threading.Thread(target=lambda p=port: said.append(heard(connected(p))))
        thread.start()
        if end == "theirs":
            env = core.GodotEnv(port=port)
            first, _ = env.reset()
            # Their tuple has an entry a head; each has one for each agent.
            second, rewards, *_ = env.step([np.int64([2, 3])])
            observed.append((first, second, rewards))
            env.close()
        else:
            with Game(port=port) as game:
                first = game.reset()
                second, rewards, _ = game.step([np.int64(2), np.int64(3)])
                observed.append((first, second, rewards))
        thread.join(60)
    assert said[0] == said[1]
    assert [message["type"] for _, message in said[0]] == [
        *("handshake", "env_info", "reset", "action", "close")
    ]
    theirs, ours = observed
    assert theirs[2] == ours[2]
    for of_theirs, of_ours in zip(theirs[:2], ours[:2], strict=True):
        np.testing.assert_array_equal(np.float32(of_theirs[0]["obs"]), of_ours[0])
        image = of_theirs[1]["camera_2d"]
        # Their one observation space is that of the first agent, so theirs stays digits.
        assert np.asarray(image).size in (1, 128)


@contextlib.contextmanager
def answered(answers: list[Any]) -> Iterator[int]:
    """Be a game that says ``answers`` to messages after the handshake; yield the port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def run() -> None:
        for _ in range(1000):
            with contextlib.suppress(ConnectionRefusedError, SystemExit, OSError):
                with socket.create_connection(("127.0.0.1", port)) as connection:
                    godot_double.receive(connection)
                    for answer in answers:
                        godot_double.receive(connection)
                        if isinstance(answer, bytes):
                            connection.sendall(answer)
                        else:
                            godot_double.send(connection, answer)
                    godot_double.receive(connection)
                return
            threading.Event().wait(0.01)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield port
    thread.join(60)


def changed(**fields: Any) -> dict[str, Any]:
    return godot_double.INFO | fields


MIXED = {"a": {"size": 2, "action_type": "discrete"}, "b": {"size": 2, "action_type": "continuous"}}
BAD = {
    "no agents": (changed(n_agents=0), "n_agents=0"),
    "names": (changed(agent_policy_names=["one"]), "one for each of 2"),
    "space": (changed(observation_space={"x": {"size": [1], "space": "tape"}}), "space='tape'"),
    "mixed": (changed(action_space=MIXED), "all must be discrete"),
    "another": ({"type": "step"}, "of type 'env_info'"),
    "not json": (b"\x03\x00\x00\x00{{{", "not JSON"),
    "huge": (b"\xff\xff\xff\xff", "at most"),
    "nested": (b"\x50\xc3\x00\x00" + b"[" * 50_000, "not JSON"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_breaks_the_dialect_is_refused_in_words(case: str) -> None:
    answer, words = BAD[case]
    with answered([answer]) as port, pytest.raises(ProtocolError, match=words):
        Game(port=port, timeout_s=30)


def test_observations_that_do_not_fit_are_refused() -> None:
    bad = {"type": "reset", "obs": [{"obs": [1.0]}, {"camera_2d": "00"}]}
    with (
        answered([godot_double.INFO, bad]) as port,
        Game(port=port) as game,
        pytest.raises(ProtocolError, match="'obs' is not of shape"),
    ):
        game.reset()


def test_heads_of_actions_are_apart() -> None:
    continuous = {"move": ("continuous", 2), "turn": ("continuous", 1)}
    assert godot._by_head(np.float32([1, 2, 3]), continuous) == {"move": [1.0, 2.0], "turn": [3.0]}
    discrete = {"jump": ("discrete", 2), "turn": ("discrete", 3)}
    assert godot._by_head(np.int32([1, 2]), discrete) == {"jump": 1, "turn": 2}


class Recorder:
    """An actor that notes what it is told, and does nothing."""

    def __init__(self) -> None:
        self.reports: dict[Any, list[Any]] = {}
        self.syncs = 0

    def act(self, reports: dict[Any, Any]) -> dict[Any, Any]:
        for stream, report in reports.items():
            self.reports.setdefault(stream, []).append(report)
        if len(self.reports[next(iter(reports))]) > 150:
            raise ConnectionError("enough")
        return {one: np.int32(0) for one, report in reports.items() if not isinstance(report, End)}

    def sync(self) -> None:
        self.syncs += 1


@pytest.mark.parametrize("truncates", [False, True])
def test_agents_report_their_episodes_to_the_actors_of_their_policies(truncates: bool) -> None:
    actors: Any = {"vector": Recorder(), "pixels": Recorder()}
    with Game(DOUBLE) as game, pytest.raises(ConnectionError, match="enough"):
        play(game, actors, truncates=truncates, sync_every=10)
    assert [list(one.reports) for one in actors.values()] == [[0], [1]]
    reports = actors["vector"].reports[0]
    kinds = [type(report) for report in reports[:124]]
    assert kinds == ([Begin] + [Step] * 59 + [End]) * 2 + [Begin, Step]
    assert reports[60].truncated is truncates
    assert np.array_equal(reports[61].observation, reports[60].observation)
    assert actors["vector"].syncs >= 14


def test_an_environment_of_a_game_has_the_spaces_of_a_policy() -> None:
    spec, agents = _game(GodotOptions(DOUBLE, policy="vector"))
    assert (spec.observation_space.shape, spec.action_space, agents) == (
        (4,),
        spaces.Discrete(5),
        1,
    )
    spec, _ = _game(GodotOptions(DOUBLE, policy="pixels"))
    assert spec.observation_space == spaces.Box(0, 255, (8, 8, 2), np.uint8)
    with pytest.raises(sebulba.UsageError, match=r"different spaces; .*pixels, vector"):
        _game(GodotOptions(DOUBLE))
    with pytest.raises(sebulba.UsageError, match=r"policy='sound' is none of .*pixels"):
        _game(GodotOptions(DOUBLE, policy="sound"))
    with pytest.raises(sebulba.UsageError, match="cannot be played"):
        _game(GodotOptions("/no/such/game"))
    with pytest.raises(sebulba.UsageError, match="needs the option 'game'"):
        ENVIRONMENTS["godot"].parts({}, None, 1.0)


def test_agents_that_nobody_trains_act_at_random() -> None:
    with Game(DOUBLE) as game, godot.at_random(game, "pixels", 0) as actor:
        actions = {int(actor.act({1: Begin(None)})[1][0]) for _ in range(100)}
        assert actions == set(range(5))
    assert isinstance(actor, Actor)


def trained(tmp_path: Path, command: str, env_steps: int, *options: str) -> tuple[float, str]:
    """Train on a game by the command line; return the mean return, and what was printed."""
    words = [sys.executable, "-m", "sebulba", "train", "cartpole-ppo", "--run-dir", "run"]
    words += ["--env.id", "external:godot", "--num-envs", "4", "--no-anneal-learning-rate"]
    words += ["--inference-devices", "0", "--update-devices", "0"]
    words += ["--num-inferencers-per-device", "1", "--total-env-steps", str(env_steps)]
    words += ["--env.options", "game", command, *options]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    return float(done.stdout.split("mean return ")[-1].split()[0]), done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("command", GAMES)
def test_the_command_line_trains_on_games_and_leaves_none(tmp_path: Path, command: str) -> None:
    mark = f"--mark-{os.getpid()}-{tmp_path.name}"
    _, out = trained(tmp_path, f"{command} {mark}", 4096, "policy", "vector")
    assert "done: mean return" in out
    wait_until(lambda: not processes_with(mark), 50)
