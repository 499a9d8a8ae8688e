"""Environments that draw themselves, and episodes of a policy as pictures."""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import gymnasium
import numpy as np

from sebulba.configs.experiment import EnvConfig
from sebulba.envs import make_env_factory, seed_block
from sebulba.envs.factory import has_gymnasium_id
from sebulba.envs.jax_libraries import library_of
from sebulba.envs.packages import VectorKind, is_package_id, package_env
from sebulba.envs.policy_view import as_played
from sebulba.errors import UsageError, text_of
from sebulba.inference.cycle import env_step_of, info_columns
from sebulba.loops.evaluation import check_spaces, mean_of_slots
from sebulba.policies.policy import Policy
from sebulba.support.user_code import is_attribute, load_attribute
from sebulba.types import EnvAdapter, EnvFactory

RENDER_MODE = {"render_mode": "rgb_array"}
PER_SECOND = 30.0
"""Pictures in a second where the environment says nothing."""
FASTEST = 60.0
"""Most pictures in a second that are shown or written."""


def drawing_factory(env: EnvConfig) -> EnvFactory:
    """Return a factory of environments that draw, as far as can be told without making one.

    envpool draws what needs no OpenGL, Atari among it. What else Gymnasium knows, too, is made by
    Gymnasium.

    Raises:
      UsageError: Nothing draws this environment.
    """
    arguments = env.factory_arguments()
    package = package_env(env.id) if is_package_id(env.id) else None
    if library_of(env.id) or isinstance(package, VectorKind):
        raise UsageError(f"{env.id!r} cannot be rendered, so it cannot be filmed or watched")
    if package is not None or is_attribute(env.id):
        made_by = load_attribute("env", env.id) if package is None else package
        wanted = RENDER_MODE if _takes_render_mode(made_by) else {}
        return make_env_factory(env.id, **{**wanted, **arguments})
    from sebulba.envs.envpool_adapter import draws, envpool_id

    known = envpool_id(env.id) if env.backend != "gymnasium" else None
    if known is not None and not draws(known):
        if not has_gymnasium_id(env.id):
            raise UsageError(
                f"envpool cannot draw {env.id!r}, and Gymnasium does not have it, so it cannot be "
                "filmed or watched"
            )
        arguments |= {"backend": "gymnasium", "num_threads": None}
        _use_egl()
    return make_env_factory(env.id, **{**RENDER_MODE, **_camera(env.id, arguments), **arguments})


def _camera(env_id: str, given: Mapping[str, Any]) -> dict[str, str]:
    """Return the option with which the camera follows, in Gymnasium's tasks of MuJoCo.

    Gymnasium 1.4 shows them from one place, where a body that runs is soon out of sight. Most have
    a camera of this name; the others are shown as without the option.
    """
    spec = gymnasium.registry.get(env_id.rpartition(":")[2])
    is_mujoco = str(getattr(spec, "entry_point", "")).startswith("gymnasium.envs.mujoco.")
    chosen = {"camera_id", "camera_name"} & given.keys()
    return {"camera_name": "track"} if is_mujoco and not chosen else {}


def _takes_render_mode(make_env: Any) -> bool:
    try:
        parameters = inspect.signature(make_env).parameters
    except (TypeError, ValueError):
        return False
    return "render_mode" in parameters


def _use_egl() -> None:
    """Let MuJoCo draw without a display, unless the user has chosen what it draws with."""
    if not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")


class Shown(NamedTuple):
    """What B environments show after a step, or at the begin of their episodes."""

    pictures: np.ndarray
    """``[B, height, width, 3]`` uint8."""
    returns: np.ndarray
    """``[B]`` float64, of the episodes up to here."""
    lengths: np.ndarray
    """``[B]`` int64, in environment steps."""
    plays: np.ndarray
    """``[B]`` bool: the picture is of the first episode, not of what comes after its end."""
    is_last: np.ndarray
    """``[B]`` bool: the episode ended with this step."""


class Stopped(Exception):
    """Somebody set the event that ends an episode early."""


class Stage(contextlib.AbstractContextManager):
    """Environments that draw, in which a policy plays."""

    def __init__(self, factory: EnvFactory, num_envs: int, seed: int) -> None:
        """Make the environments, by a ``drawing_factory``, and see that they draw.

        Raises:
          UsageError: They cannot draw.
        """
        seeds = seed_block(seed, inferencer=0, num_inferencers=1, num_envs=num_envs)
        self.adapter: Any = as_played(factory(num_envs, seeds))
        try:
            self._check_draws()
        except BaseException:
            self.adapter.close()
            raise
        per_second = getattr(self.adapter, "pictures_per_second", None) or PER_SECOND
        self.per_second = min(float(per_second), FASTEST)
        """Pictures in a second at the environment's own speed."""

    def _check_draws(self) -> None:
        name = self.adapter.spec.name
        if not hasattr(self.adapter, "pictures"):
            raise UsageError(f"{name!r} cannot be rendered, so it cannot be filmed or watched")
        self.adapter.reset()
        try:
            self.adapter.pictures()
        except Exception as error:  # libraries that draw raise anything
            hint = "; MUJOCO_GL=egl or MUJOCO_GL=osmesa may help" if "GL" in str(error) else ""
            if isinstance(error, NotImplementedError) and not str(error):
                hint = "it needs a render() that returns [height, width, 3] uint8"
            raise UsageError(f"{name!r} cannot draw itself: {text_of(error)}{hint}") from error

    def play(
        self, policy: Policy, max_episode_steps: int, stop: threading.Event | None = None
    ) -> Iterator[Shown]:
        """Play one episode in each environment, and yield every picture.

        Raises:
          Stopped: ``stop`` was set.
          UsageError: The environments are not the policy's.
          EnvError: An environment failed.
        """
        adapter: EnvAdapter = self.adapter
        check_spaces(policy, adapter)
        num_envs = adapter.num_envs
        state = policy.new_state(num_envs)
        output = adapter.reset()
        shown = Shown(
            self.adapter.pictures(),
            np.zeros(num_envs),
            np.zeros(num_envs, np.int64),
            np.ones(num_envs, np.bool_),
            np.zeros(num_envs, np.bool_),
        )
        yield shown
        while not (shown.is_last | ~shown.plays).all():
            if stop is not None and stop.is_set():
                raise Stopped
            plays = shown.plays & ~shown.is_last
            action, state = policy.act(env_step_of(output, ()), state)
            output = adapter.step(action)
            reward, ended, *_ = info_columns(
                output.unclipped_reward, output.episode_end, env_step_of(output, action), ()
            )
            lengths = shown.lengths + plays
            shown = Shown(
                self.adapter.pictures(),
                shown.returns + np.where(plays, mean_of_slots(reward), 0.0),
                lengths,
                plays,
                plays & (np.asarray(ended, np.bool_) | (lengths >= max_episode_steps)),
            )
            yield shown

    def __exit__(self, *exception: object) -> None:
        self.adapter.close()


def enlarged(picture: np.ndarray, least: int = 400) -> np.ndarray:
    """Return a picture whose longer side has about ``least`` pixels or more.

    The factor is a whole number, so that pixels stay sharp.
    """
    factor = max(1, round(least / max(picture.shape[:2])))
    return picture.repeat(factor, axis=0).repeat(factor, axis=1)
