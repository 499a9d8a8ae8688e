"""Makes the Inferencers of a loop, and new ones in the place of those that failed."""

from __future__ import annotations

import contextlib
import functools

import jax

from sebulba.errors import EnvHangError
from sebulba.inference.cycle import CyclePrograms
from sebulba.inference.inferencer import INFERENCER_PHASES, Inferencer, pass_on_wishes
from sebulba.inference.places import Places
from sebulba.loops.session import Session
from sebulba.metrics.timer import PhaseTimer
from sebulba.support.trees import owned_copy


class InferencerMaker:
    """Puts environment, cycle, device and step state together."""

    def __init__(self, session: Session, places: Places) -> None:
        """Make them for ``session``, in ``places``."""
        self._session = session
        self._places = places
        self._per_device = max(1, session.options.num_inferencers_per_device or 0)
        self.reasons: set[str] = set()
        """Why cycles run as they do."""

    def first(self, index: int, programs: CyclePrograms) -> Inferencer:
        """Return an Inferencer for a run that has not begun; nodes that are lost are replaced."""

        def again() -> Inferencer:
            self._session.envs.make_again(index)
            return self._new(index, programs)

        return self._places.start(functools.partial(self._new, index, programs), again)

    def _new(self, index: int, programs: CyclePrograms) -> Inferencer:
        session, timer = self._session, PhaseTimer(*INFERENCER_PHASES)
        env = session.envs[index]
        device, staging = list(session.staging.items())[index // self._per_device]
        cycle, why = self._places.make_cycle(env, programs, device, timer)
        if hasattr(cycle, "staging") and session.options.schedule == "async":
            cycle.staging = staging
        self.reasons.add(why)
        thread = session.envs.threads[index]
        return Inferencer(index, device, env, cycle, staging, timer, thread)

    def make_envs_anew(self, index: int, generation: int) -> None:
        """Replace the environments of an Inferencer that is yet to be made."""
        envs = self._session.envs
        envs.close_of(index)
        self._places.start(functools.partial(envs.make_anew, [index], generation))

    def replace_at_start(self, old: Inferencer) -> Inferencer:
        """Return what ``replace`` does, before the run begins."""
        return self._places.start(lambda: self.replace(old))

    def replace(self, old: Inferencer) -> Inferencer:
        """Return an Inferencer with new environments and a new step state in the place of one."""
        session, envs, index = self._session, self._session.envs, old.index
        agent, programs = session.agent, session.programs
        assert programs is not None
        if not isinstance(old.failure, EnvHangError):
            with contextlib.suppress(Exception):  # it has failed already
                envs.close_of(index)
        else:  # its thread closes it, if it comes back
            self._places.kill(envs[index])
            envs.leave_thread(index)
        generation = envs.begin_generation()
        key = envs.fresh_key(generation)
        envs.make_anew([index], generation)
        new, run = self._new(index, programs), programs.run
        all_envs = run.num_envs * run.num_inferencers * run.num_hosts
        step_state = agent.advance_step_state(
            agent.new_step_state(jax.random.fold_in(key, index), run, index),
            session.counters.env_steps // all_envs,
        )
        new.step_state = owned_copy(step_state, new.device)
        new.cycle = old.cycle + 2  # a gap: what it makes continues nothing
        new.dropped_cycles = old.dropped_cycles
        pass_on_wishes(old, new)
        return new
