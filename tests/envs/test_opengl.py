"""Environments with an OpenGL context, which works only in the thread that made it."""

from __future__ import annotations

import threading

import jax
import numpy as np
import pytest

import sebulba
from sebulba.loops.evaluation import EvaluationPlayer
from sebulba.types import RunSpec
from tests.support.loop_helpers import make_tiny_loop
from tests.support.tiny import CountingEnv, TinyAgent, TinyConfig

moderngl = pytest.importorskip("moderngl", reason="pip install moderngl")
SIZE = 8


def new_context():
    """Return a context without a window, in software if need be."""
    return moderngl.create_context(standalone=True, backend="egl")


try:
    new_context().release()
except Exception as error:
    pytest.skip(f"no OpenGL here ({error}); apt install libegl1", allow_module_level=True)


class Drawn(CountingEnv):
    """Draws its time in every step, and counts only if the pixels are right."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()
        self.context = new_context()
        self.frame = self.context.simple_framebuffer((SIZE, SIZE))
        self.drawn = 0

    def draw(self) -> None:
        assert threading.get_ident() == self.thread
        self.drawn = (self.drawn + 1) % 256
        with self.context:  # other environments of this thread have contexts, too
            self.frame.use()
            self.frame.clear(self.drawn / 255, 0.0, 1.0)
            pixels = np.frombuffer(self.frame.read(), np.uint8).reshape(SIZE, SIZE, 3)
        assert (pixels == [self.drawn, 0, 255]).all()

    def reset(self, **options):
        self.draw()
        return super().reset(**options)

    def step(self, action):
        self.draw()
        return super().step(action)

    def close(self) -> None:
        self.context.release()


@pytest.mark.parametrize("inferencers", [0, 1, 2])
def test_inferencers_draw_in_contexts_of_their_own(inferencers):
    loop, _ = make_tiny_loop(
        Drawn, num_inferencers_per_device=inferencers, inference_devices=[0], schedule="lockstep"
    )
    with loop:
        result = loop.run(loop.new_state(0, 5), 3 * max(1, inferencers), 5)
    assert result.counters.env_steps == 3 * max(1, inferencers) * 5 * loop.num_envs


@pytest.mark.parametrize("inline", [False, True])
def test_evaluations_draw_too(inline):
    agent = TinyAgent(sebulba.env_spec(CountingEnv), TinyConfig())
    networks = agent.new_state(jax.random.key(0), RunSpec(5, 2, 2, 1)).networks
    with EvaluationPlayer(agent, Drawn, num_episodes=3, num_envs=2, inline=inline) as player:
        assert player(networks, threading.Event()) is not None


@pytest.mark.slow
def test_worker_processes_draw():
    factory = sebulba.make_env_factory(Drawn, vectorization="async")
    loop, _ = make_tiny_loop(factory, num_inferencers_per_device=1, inference_devices=[0])
    with loop:
        assert loop.run(loop.new_state(0, 5), 2, 5).counters.cycles == 2
