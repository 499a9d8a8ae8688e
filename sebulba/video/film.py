"""Films of a policy: the best of several episodes, or all of them in a grid."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path

import numpy as np

from sebulba.agent import Agent
from sebulba.errors import UsageError, shown, text_of
from sebulba.policies.policy import Policy
from sebulba.support.files import PARTIAL, check_folder_of
from sebulba.types import EnvFactory, PyTree
from sebulba.video.rendering import Shown, Stage, Stopped, enlarged

SUFFIXES = (".mp4", ".gif")
GAP = 4
"""Pixels between the pictures of a grid."""
DARKER = 3
"""A picture of an episode that is over has brightness 1 / DARKER."""

Progress = Callable[[int, int], None]
"""Is told, at every picture, how many episodes are done and the steps of the longest that runs."""


@dataclasses.dataclass(frozen=True)
class Film:
    """What was filmed."""

    file: Path
    """Where it is."""
    returns: tuple[float, ...]
    """Of the episodes that were played."""
    length: int
    """Environment steps of the episode, of a grid those of the longest."""
    num_pictures: int
    """How many it has."""
    per_second: float
    """Pictures in a second."""
    num_cut: int
    """Episodes that were cut at the limit of steps."""


def check_film_file(file: Path) -> None:
    """Raise UsageError unless a film can be written to ``file``, and ffmpeg is there."""
    if file.suffix not in SUFFIXES:
        raise UsageError(
            f"{shown(str(file))} must end in {' or '.join(SUFFIXES)}; use for example video.mp4"
        )
    check_folder_of(file)
    try:
        import imageio_ffmpeg  # noqa: F401
    except ModuleNotFoundError as error:
        raise UsageError(
            f"a film needs {error.name}, which is not installed; pip install 'sebulba[video]'"
        ) from error


def make_film(
    policy: Policy,
    stage: Stage,
    file: Path,
    *,
    max_episode_steps: int,
    as_grid: bool = False,
    per_second: float | None = None,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> Film:
    """Film an episode in each environment, and keep that of the greatest return.

    Args:
      policy: Who plays.
      stage: Where; ``B`` environments play ``B`` episodes.
      file: Film to write, ``.mp4`` or ``.gif``; it is replaced when the new one is whole.
      max_episode_steps: An episode is cut after so many.
      as_grid: Show all episodes beside each other instead; an end stays in sight, darker.
      per_second: Pictures in a second; None for the environment's own.
      progress: Is told how far it is.
      stop: Ends it early.

    Raises:
      Stopped: ``stop`` was set.
      UsageError: The environments are not the policy's, or the film cannot be written.
      EnvError: An environment failed.
    """
    per_second = per_second or stage.per_second
    last: np.ndarray | None = None
    with ExitStack() as stack:
        reels = [
            stack.enter_context(_Reel(file.with_name(f"{PARTIAL}{i}-{file.name}"), per_second))
            for i in range(1 if as_grid else stage.adapter.num_envs)
        ]
        for seen in stage.play(policy, max_episode_steps, stop):
            if as_grid:
                last = _with_ends(seen, last)
                reels[0].add(grid(last))
            else:
                for i in np.flatnonzero(seen.plays):
                    reels[i].add(seen.pictures[i])
            if progress is not None:
                running = seen.plays & ~seen.is_last
                progress(int((~running).sum()), int(seen.lengths[running].max(initial=0)))
        for reel in reels:
            reel.close()
        best = 0 if as_grid else int(np.argmax(seen.returns))
        reels[best].file.replace(file)
        return Film(
            file,
            tuple(seen.returns.tolist()),
            int(seen.lengths.max() if as_grid else seen.lengths[best]),
            reels[best].num_pictures,
            per_second,
            int((seen.lengths >= max_episode_steps).sum()),
        )


def _with_ends(seen: Shown, last: np.ndarray | None) -> np.ndarray:
    """Return the pictures, those of episodes that are over as they were at their end."""
    if last is None:
        return seen.pictures.copy()
    last[seen.plays] = seen.pictures[seen.plays]
    last[seen.is_last] //= DARKER
    return last


def grid(pictures: np.ndarray) -> np.ndarray:
    """Put ``[B, height, width, 3]`` into one picture of about as many rows as columns."""
    count, height, width, _ = pictures.shape
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    whole = np.zeros((rows * (height + GAP) - GAP, columns * (width + GAP) - GAP, 3), np.uint8)
    for i, picture in enumerate(pictures):
        top, left = i // columns * (height + GAP), i % columns * (width + GAP)
        whole[top : top + height, left : left + width] = picture
    return whole


class _Reel(AbstractContextManager):
    """A film that is being written by ffmpeg, picture by picture; a context removes its file."""

    def __init__(self, file: Path, per_second: float) -> None:
        """Begin at the first picture, which says how large all are."""
        self.file = file
        self.num_pictures = 0
        self._per_second = per_second
        self._ffmpeg: subprocess.Popen | None = None

    def add(self, picture: np.ndarray) -> None:
        """Add a picture, ``[height, width, 3]`` uint8.

        Raises:
          UsageError: ffmpeg has failed.
        """
        picture = enlarged(picture)
        height, width, _ = picture.shape  # which have to be even
        picture = np.pad(picture, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
        if self._ffmpeg is None:
            self._ffmpeg = self._begin(picture)
        assert self._ffmpeg.stdin is not None
        try:
            self._ffmpeg.stdin.write(picture.tobytes())
        except OSError:
            self.close()  # says why
        self.num_pictures += 1

    def _begin(self, picture: np.ndarray) -> subprocess.Popen:
        from imageio_ffmpeg import get_ffmpeg_exe

        # A pipe that nobody reads would block ffmpeg.
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        height, width, _ = picture.shape
        to_gif = self.file.suffix == ".gif"
        # imageio_ffmpeg.write_frames would fork this process, whose threads hold locks.
        return subprocess.Popen(
            [
                *(get_ffmpeg_exe(), "-y", "-loglevel", "error"),
                *("-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}"),
                *("-r", f"{self._per_second:g}", "-i", "-"),
                *(TO_GIF if to_gif else TO_MP4),
                f"file:{self.file}",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._said,
            process_group=0,  # Ctrl-C is for this process
        )

    def __exit__(self, *exception: object) -> None:
        try:
            self.close()
        finally:
            with suppress(OSError):
                self.file.unlink(missing_ok=True)

    def close(self) -> None:
        """Let ffmpeg finish; may be called twice.

        Raises:
          UsageError: It has failed.
        """
        ffmpeg, self._ffmpeg = self._ffmpeg, None
        if ffmpeg is None:
            return
        assert ffmpeg.stdin is not None
        with suppress(OSError):  # it has ended, and its exit code says so
            ffmpeg.stdin.close()
        code = ffmpeg.wait()
        with self._said:
            self._said.seek(0)
            why = self._said.read(LONGEST_WORDS).decode(errors="replace").strip()
        if code:
            raise UsageError(
                f"ffmpeg cannot write into {self.file.parent} ({shown(why or code)}); check that "
                "the disk has space, or choose another file"
            )


TO_MP4 = ("-c:v", "libx264", "-pix_fmt", "yuv420p", "-movflags", "+faststart")
"""What browsers and slides play."""
TO_GIF = ("-vf", "split[a][b];[a]palettegen[p];[b][p]paletteuse=dither=none")
"""Colours are chosen for the film at hand, since a GIF has 256 of them."""
LONGEST_WORDS = 1000
"""Most bytes that are shown of what ffmpeg says."""


# While a run trains.

DIGITS = 12
"""Of the environment steps in the name of a film, so that names sort."""


class TrainingFilms:
    """Films an episode whenever training has passed a multiple of some environment steps.

    A film that cannot be made warns, since nothing else depends on it. ``close()`` frees the
    environment.
    """

    def __init__(
        self,
        agent: Agent,
        factory: EnvFactory,
        folder: Path,
        every_env_steps: int,
        *,
        seed: int,
        max_episode_steps: int,
    ) -> None:
        """Make the environment, by a ``drawing_factory``, and see that it draws, so that a run does
        not begin in vain. ``folder`` is made with its first film, ``ENV_STEPS.mp4``.

        Raises:
          UsageError: The environment cannot draw, or ffmpeg is missing.
        """
        check_film_file(Path("film.mp4"))
        self._policy = Policy(agent, None, seed=seed)
        self._stage = Stage(factory, 1, seed)
        self._folder = folder
        self._every_env_steps = every_env_steps
        self._max_episode_steps = max_episode_steps
        self._filmed_at = max(map(_env_steps, folder.glob("*.mp4")), default=0)

    def __call__(self, networks: PyTree, env_steps: int, stop: threading.Event) -> None:
        """Film these acting networks, if a film is due, until ``stop`` is set."""
        every = self._every_env_steps
        if env_steps // every <= self._filmed_at // every or stop.is_set():
            return
        self._filmed_at = env_steps
        self._policy.acting_networks = networks
        file = self._folder / f"{env_steps:0{DIGITS}}.mp4"
        try:
            self._folder.mkdir(exist_ok=True)
            most = self._max_episode_steps
            make_film(self._policy, self._stage, file, max_episode_steps=most, stop=stop)
        except Stopped:
            return
        except Exception as error:  # an environment that draws may raise anything
            warnings.warn(f"no film at {env_steps:,} env steps: {text_of(error)}", stacklevel=2)

    def close(self) -> None:
        """Free the environment."""
        self._stage.adapter.close()


def _env_steps(file: Path) -> int:
    return int(file.stem) if file.stem.isdecimal() else 0
