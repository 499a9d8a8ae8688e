"""Going on from a checkpoint: bit for bit in lockstep, without a gap anywhere else."""

from __future__ import annotations

from sebulba.checkpoints.checkpointer import Checkpointer
from tests.loop_helpers import Recorder, leaves_equal, make_tiny_loop

STEPS = 5


def lockstep_loop(folder=None, **options):
    checkpointer = None if folder is None else Checkpointer(folder, **options.pop("saves", {}))
    options = {"schedule": "lockstep", "checkpointer": checkpointer} | options
    loop, _ = make_tiny_loop(**options)
    return loop, checkpointer


def train(folder, num_cycles, *, resume=False, **options):
    """Return (result, trajectories) of a loop of its own, saved at the end."""
    recorder = Recorder()
    loop, checkpointer = lockstep_loop(folder, observe_cycle=recorder, **options)
    with loop, checkpointer:
        if resume:
            state = loop.restore(checkpointer.load_newest())
            assert not loop.resume_notes
        else:
            state = loop.new_state(3, STEPS)
        return loop.run(state, num_cycles, STEPS), recorder.trajectories


def test_lockstep_training_that_was_saved_and_resumed_is_the_same_bit_for_bit(tmp_path):
    whole, trajectories = train(tmp_path / "whole", 16)
    _, first = train(tmp_path / "half", 8)
    resumed, second = train(tmp_path / "half", 8, resume=True)
    assert leaves_equal(whole.state[:3], resumed.state[:3])
    assert leaves_equal(trajectories, first + second)
    assert whole.counters == resumed.counters
    names = ("episodes", "episode_return_mean", "env_steps", "cycles", "updates")
    assert {n: whole.metrics[n] for n in names} == {n: resumed.metrics[n] for n in names}
