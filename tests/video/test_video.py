"""``sebulba video``, ``sebulba watch``, and films of a training."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import gymnasium
import jax
import numpy as np
import pytest
from gymnasium import spaces

import sebulba
from sebulba.agents.configs import ImpalaConfig, make_agent
from sebulba.commands import cli
from sebulba.commands.playing import EpisodeProgress
from sebulba.configs.experiment import EnvConfig
from sebulba.envs import make_env_factory
from sebulba.errors import EnvError, UsageError
from sebulba.policies.policy import Policy
from sebulba.video import film as film_module
from sebulba.video import rendering, screens
from sebulba.video.film import TrainingFilms, check_film_file, grid, make_film
from sebulba.video.rendering import Stage, Stopped, drawing_factory
from tests.support.needs import needs_mujoco

SMALL = [
    *("--num-envs", "4", "--steps-per-cycle", "5", "--num-inferencers-per-device", "1"),
    *("--inference-devices", "0", "--update-devices", "0", "--compile-cache", "off"),
    *("--metrics-interval-s", "0", "--eval-episodes", "2", "--eval-num-envs", "2"),
]


class Drawn(gymnasium.Env):
    """The first reward is the number of the environment's episodes' seeds; the picture shows it."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 7}  # noqa: RUF012
    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None, length: int = 4) -> None:
        self.render_mode, self.length = render_mode, length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.worth = float(self.np_random.integers(1, 200))
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        reward = self.worth if self.t == 1 else 0.0
        return np.zeros(2, np.float32), reward, self.t >= self.length, False, {}

    def render(self):
        return np.full((8, 12, 3), int(self.worth), np.uint8)


class Silent(Drawn):
    """Has no parameter render_mode."""

    def __init__(self) -> None:
        super().__init__()

    def render(self):
        return None


class Breaks(Drawn):
    def render(self):
        raise RuntimeError("no paint is left")


class Grey(Drawn):
    def render(self):
        return np.zeros((8, 12), np.uint8)


def policy_of(env_id: str) -> Policy:
    agent = make_agent(sebulba.env_spec(env_id), ImpalaConfig())
    return Policy(agent, agent.acting_networks(agent.new_networks(jax.random.key(0)), ()))


def stage_of(env_id: str, num_envs: int = 3, **options: object) -> Stage:
    return Stage(drawing_factory(EnvConfig(env_id, **options)), num_envs, seed=5)  # type: ignore[arg-type]


def frames_of(file: Path) -> np.ndarray:
    """Return the pictures of a film, ``[N, height, width, 3]``."""
    from imageio_ffmpeg import get_ffmpeg_exe

    width, height = size_of(file)
    words = [
        get_ffmpeg_exe(),
        "-loglevel",
        "error",
        "-i",
        str(file),
        "-fps_mode",
        "passthrough",
        "-f",
    ]
    raw = subprocess.run([*words, "rawvideo", "-pix_fmt", "rgb24", "-"], stdout=-1, check=True)
    return np.frombuffer(raw.stdout, np.uint8).reshape(-1, height, width, 3)


def size_of(file: Path) -> tuple[int, int]:
    """Return width and height of a film, as ffmpeg says them."""
    from imageio_ffmpeg import get_ffmpeg_exe

    said = subprocess.run([get_ffmpeg_exe(), "-i", str(file)], stderr=-1, text=True).stderr
    found = re.search(r"Video: .*?, (\d+)x(\d+)", said)
    assert found, said
    return int(found[1]), int(found[2])


def refused(capsys, *argv: str) -> str:
    assert cli.main(argv) == cli.EXIT_USAGE
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the folder of a run that made films."""
    folder = tmp_path_factory.mktemp("runs") / "drawn"
    words = ["train", "impala", "--env.id", "tests.video.test_video:Drawn", *SMALL]
    words += ["--total-env-steps", "80", "--run-dir", str(folder), "--schedule", "lockstep"]
    words += ["--eval-every-env-steps", "20", "--video-every-env-steps", "40"]
    assert cli.main(words) == 0
    return folder


# Environments that draw.


@pytest.mark.parametrize(
    ("env_id", "backend", "shape"),
    [
        ("CartPole-v1", "envpool", (400, 600, 3)),
        ("CartPole-v1", "gymnasium", (400, 600, 3)),
        ("Pong-v5", None, (210, 160, 3)),
        ("FrozenLake-v1", None, (256, 256, 3)),
        ("tests.video.test_video:Drawn", None, (8, 12, 3)),
    ],
)
def test_pictures_are_of_the_whole_environment_in_colour(env_id, backend, shape):
    with stage_of(env_id, 2, backend=backend) as stage:
        stage.adapter.reset()
        drawn = stage.adapter.pictures()
        assert drawn.shape == (2, *shape) and drawn.dtype == np.uint8


@pytest.mark.slow
def test_worker_processes_draw_too():
    with stage_of("tests.video.test_video:Drawn", 2, vectorization="async") as stage:
        first = next(stage.play(policy_of("tests.video.test_video:Drawn"), 100))
    with stage_of("tests.video.test_video:Drawn", 2) as stage:
        again = next(stage.play(policy_of("tests.video.test_video:Drawn"), 100))
    assert (first.pictures == again.pictures).all() and first.pictures.shape == (2, 8, 12, 3)


def test_many_agents_are_drawn():
    with stage_of("pettingzoo:classic/tictactoe_v3", 2) as stage:
        stage.adapter.reset()
        assert stage.adapter.pictures().shape[0] == 2


@pytest.mark.parametrize(
    ("env_id", "words"),
    [
        ("Catch-v0", "'Catch-v0'"),
        ("gymnax:CartPole-v1", "'gymnax:CartPole-v1' cannot be rendered"),
        ("sebulba/CongestionControl-v0", "cannot be rendered"),
        ("tests.video.test_video:Silent", "a parameter render_mode"),
        ("tests.video.test_video:Breaks", "no paint is left"),
        ("tests.video.test_video:Grey", "got 1 of shape (8, 12)"),
        ("tests.support.populations:Pairs", "cannot be filmed"),
    ],
)
def test_what_cannot_draw_is_named(env_id, words):
    with pytest.raises(UsageError) as refusal:
        stage_of(env_id, 1)
    assert words in str(refusal.value)


@needs_mujoco
def test_a_pool_is_told_how_it_may_draw():
    for env_id, mode, words in [
        ("CartPole-v1", "human", "use sebulba watch"),
        ("HalfCheetah-v4", "rgb_array", "envpool cannot draw 'HalfCheetah-v4'"),
    ]:
        with pytest.raises(UsageError, match=words):
            make_env_factory(env_id, backend="envpool", render_mode=mode)
    pool = make_env_factory("CartPole-v1", backend="envpool")(1, [0])
    with pytest.raises(EnvError, match="make it with render_mode='rgb_array'"):
        pool.pictures()
    pool.close()


# Episodes and films.


def test_each_environment_plays_one_episode():
    with stage_of("tests.video.test_video:Drawn") as stage:
        seen = list(stage.play(policy_of("tests.video.test_video:Drawn"), 100))
        assert stage.per_second == 7
    assert len(seen) == 5 and seen[-1].is_last.all()
    assert (seen[-1].returns == seen[0].pictures[:, 0, 0, 0]).all()
    assert seen[-1].lengths.tolist() == [4, 4, 4]


def test_a_long_episode_is_cut_and_an_unwanted_one_is_left():
    with stage_of("tests.video.test_video:Drawn", 2) as stage:
        policy = policy_of("tests.video.test_video:Drawn")
        assert list(stage.play(policy, 3))[-1].lengths.tolist() == [3, 3]
        stop = threading.Event()
        playing = stage.play(policy, 3, stop)
        next(playing)
        stop.set()
        with pytest.raises(Stopped):
            next(playing)


def test_the_best_episode_is_kept(tmp_path):
    told = []
    with stage_of("tests.video.test_video:Drawn", 4) as stage:
        film = make_film(
            policy_of("tests.video.test_video:Drawn"),
            stage,
            tmp_path / "a.mp4",
            max_episode_steps=9,
            progress=lambda *done: told.append(done),
        )
    assert told == [(0, 0), (0, 1), (0, 2), (0, 3), (4, 0)]
    assert len(set(film.returns)) > 1 and film.num_pictures == 5 and film.length == 4
    frames = frames_of(film.file)
    assert len(frames) == 5 and frames.shape[1] % 8 == 0  # enlarged by a whole number
    assert abs(float(frames.mean()) - max(film.returns)) < 4
    assert list(tmp_path.iterdir()) == [film.file]


def test_a_grid_has_all_episodes_and_is_darker_at_an_end(tmp_path):
    with stage_of("tests.video.test_video:Drawn", 3) as stage:
        film = make_film(
            policy_of("tests.video.test_video:Drawn"),
            stage,
            tmp_path / "a.gif",
            max_episode_steps=9,
            as_grid=True,
        )
    frames = frames_of(film.file)
    assert len(frames) == film.num_pictures == 5
    assert frames[-1].mean() < frames[0].mean() / 2
    assert list(tmp_path.iterdir()) == [film.file]


def test_a_grid_is_about_as_wide_as_high():
    whole = grid(np.full((5, 10, 20, 3), 255, np.uint8))
    assert whole.shape == (2 * 10 + 4, 3 * 20 + 2 * 4, 3)
    assert (whole[-10:, -20:] == 0).all() and (whole[:10, :20] == 255).all()


def test_a_film_that_cannot_be_written_is_told_and_leaves_nothing(tmp_path, monkeypatch):
    for name, words in [("a.avi", "must end in .mp4 or .gif"), ("no/a.mp4", "does not exist")]:
        with pytest.raises(UsageError, match=words):
            check_film_file(tmp_path / name)
    monkeypatch.setattr(film_module, "TO_MP4", ("-c:v", "no_such_codec"))
    with (
        stage_of("tests.video.test_video:Drawn", 2) as stage,
        pytest.raises(UsageError, match="no_such_codec"),
    ):
        make_film(
            policy_of("tests.video.test_video:Drawn"),
            stage,
            tmp_path / "a.mp4",
            max_episode_steps=9,
        )
    assert not list(tmp_path.iterdir())
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(UsageError, match=r"pip install 'sebulba\[video\]'"):
        check_film_file(tmp_path / "a.mp4")


# Films of a training.


@pytest.mark.slow
def test_a_training_is_filmed(run):
    films = sorted(path.name for path in (run / "videos").iterdir())
    assert films == ["000000000040.mp4", "000000000080.mp4"]
    assert len(frames_of(run / "videos" / films[0])) == 5
    assert json.loads((run / "config.json").read_text())["video_every_env_steps"] == 40


def test_a_resumed_training_films_what_is_due(run, tmp_path):
    agent = make_agent(sebulba.env_spec("tests.video.test_video:Drawn"), ImpalaConfig())
    networks = policy_of("tests.video.test_video:Drawn").acting_networks
    factory = drawing_factory(EnvConfig("tests.video.test_video:Drawn"))
    (tmp_path / "000000000050.mp4").write_bytes(b"")
    films = TrainingFilms(agent, factory, tmp_path, 20, seed=0, max_episode_steps=9)
    stop = threading.Event()
    for env_steps in (55, 60, 61):
        films(networks, env_steps, stop)
    stop.set()
    films(networks, 90, stop)
    films.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["000000000050.mp4", "000000000060.mp4"]


def test_a_film_that_fails_does_not_end_the_training(tmp_path, monkeypatch):
    agent = make_agent(sebulba.env_spec("tests.video.test_video:Drawn"), ImpalaConfig())
    factory = drawing_factory(EnvConfig("tests.video.test_video:Drawn"))
    films = TrainingFilms(agent, factory, tmp_path, 20, seed=0, max_episode_steps=9)
    monkeypatch.setattr(film_module, "TO_MP4", ("-c:v", "no_such_codec"))
    with pytest.warns(UserWarning, match="no film at 20 env steps: .*no_such_codec"):
        films(policy_of("tests.video.test_video:Drawn").acting_networks, 20, threading.Event())
    films.close()


def test_films_need_evaluations_and_an_environment_that_draws(capsys, tmp_path):
    words = ["train", "cartpole", "--video-every-env-steps", "9", "--run-dir", str(tmp_path / "a")]
    assert cli.main(words) == cli.EXIT_USAGE
    assert "--eval-every-env-steps 9" in " ".join(capsys.readouterr().err.split())
    words = ["train", "dqn", "--env.id", "Catch-v0", *SMALL, "--run-dir", str(tmp_path / "a")]
    films = ["--eval-every-env-steps", "50", "--video-every-env-steps", "50"]
    assert "envpool cannot draw 'Catch-v0'" in refused(capsys, *words, *films)
    assert not (tmp_path / "a").exists()


# The commands.


def test_video_of_a_run(run, capsys):
    assert cli.main(["video", str(run), "--episodes", "2", "--best"]) == 0
    said = capsys.readouterr().out
    assert f"written: {run / 'video.mp4'}" in said and "5 pictures, 0.7 s" in said
    assert "best" in said.splitlines()[1] and (run / "video.mp4").stat().st_size > 500


def test_who_waits_for_a_film_is_told_how_far_it_is(run, capsys, monkeypatch):
    monkeypatch.setattr(EpisodeProgress, "LINES_S", 0.0)
    assert cli.main(["video", str(run), "--episodes", "2"]) == 0
    said = capsys.readouterr().err.splitlines()
    assert any("0 of 2 episodes done, the longest that runs has 3 steps" in line for line in said)
    assert "2 of 2 episodes done" in said[-1]


def test_a_grid_at_another_speed(run, capsys, tmp_path):
    words = ["--grid", "--episodes", "2", "--fps", "10", "--max-episode-steps", "2"]
    assert cli.main(["video", str(run), *words, "--out", str(tmp_path / "a.gif")]) == 0
    said = capsys.readouterr().out
    assert "3 pictures, 0.3 s" in said and "2 cut at 2 steps" in said


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--episodes", "0"), "episodes=0 must be from 1 to 64"),
        (("--episodes", "65"), "episodes=65 must be from 1 to 64"),
        (("--seed", "5000000000"), "32-bit integer"),
        (("--fps", "0"), "fps=0.0 must be from 0.1"),
        (("--fps", "nan"), "fps=nan must be from 0.1"),
        (("--max-episode-steps", "0"), "max_episode_steps=0"),
        (("--out", "a.txt"), "must end in .mp4 or .gif"),
        (("--out", "no/such/a.mp4"), "does not exist"),
    ],
)
def test_wrong_words_are_refused(run, capsys, words, expected):
    assert expected in refused(capsys, "video", str(run), *words)


def test_what_is_no_run_is_refused(capsys, tmp_path):
    for command in ("video", "watch"):
        assert "config.json" in refused(capsys, command, str(tmp_path))


# Screens.


class Recorder:
    """Records what is shown, and is closed by its owner after some pictures."""

    def __init__(self, closes_after: int) -> None:
        self.captions: list[str] = []
        self._closes_after = closes_after

    def show(self, picture: np.ndarray, caption: str) -> bool:
        assert picture.shape == (8, 12, 3)
        self.captions.append(caption)
        return len(self.captions) < self._closes_after

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        return None


def test_a_run_is_watched_until_the_window_is_closed(run, capsys, monkeypatch):
    recorder = Recorder(7)
    monkeypatch.setattr(screens, "open_screen", lambda where: recorder)
    assert cli.main(["watch", str(run), "--episodes", "3", "--fps", "1000"]) == 0
    assert len(recorder.captions) == 7
    assert recorder.captions[5].startswith("episode 2 of 3, step 0, return 0.00")
    assert len(capsys.readouterr().out.strip().split(",")) == 1


def test_without_a_display_and_a_terminal_nothing_can_be_watched(run, capsys, monkeypatch):
    for variable in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(variable, raising=False)
    assert "use sebulba video" in refused(capsys, "watch", str(run))
    assert "no window can be opened" in refused(capsys, "watch", str(run), "--on", "window")


@pytest.mark.parametrize(("columns", "rows"), [(40, 20), (200, 5), (3, 50), (1, 1)])
def test_a_picture_fits_into_the_terminal(columns, rows):
    picture = np.zeros((30, 60, 3), np.uint8)
    picture[:15] = (10, 20, 30)
    text = screens.in_half_blocks(picture, columns, rows)
    lines = text.split("\n")
    assert len(lines) <= rows and all(len(line) <= columns for line in lines)
    first = lines[0].spans[0].style
    assert first.color.triplet == (10, 20, 30)


@pytest.mark.parametrize(
    ("env_id", "given", "camera"),
    [
        ("HalfCheetah-v4", {}, {"camera_name": "track"}),
        ("Hopper-v5", {"reset_noise_scale": 0.1}, {"camera_name": "track"}),
        ("HalfCheetah-v4", {"camera_id": 0}, {}),
        ("HalfCheetah-v4", {"camera_name": "mine"}, {}),
        ("CartPole-v1", {}, {}),
        ("Pong-v5", {}, {}),
        ("tests.support.own:MyEnv", {}, {}),
    ],
)
def test_the_camera_follows_what_runs(env_id, given, camera):
    assert rendering._camera(env_id, given) == camera


def test_mujoco_draws_without_a_display_unless_it_is_told_how(monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    rendering._use_egl()
    assert rendering.os.environ.pop("MUJOCO_GL") == "egl"
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    rendering._use_egl()
    assert rendering.os.environ["MUJOCO_GL"] == "osmesa"
