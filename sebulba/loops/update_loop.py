"""The update loop: takes and counts trajectories, learns from them, and publishes networks."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import jax
import numpy as np

from sebulba.agent import with_bank, without_bank
from sebulba.inference.inferencer_pool import RunningInferencers
from sebulba.learning.peers import Agreed, Peers, Wants, Word
from sebulba.learning.update import Updater
from sebulba.loops.evaluation_thread import Evaluations
from sebulba.loops.records import Records
from sebulba.loops.saving import Saving
from sebulba.loops.session import Session
from sebulba.support.trees import on_device
from sebulba.transport.item import Item
from sebulba.transport.staging import Staged
from sebulba.types import PyTree


class UpdateLoop:
    """Consumes what the Inferencers of a run make until a number of trajectories is reached."""

    def __init__(
        self,
        session: Session,
        updater: Updater,
        running: RunningInferencers,
        saving: Saving,
        records: Records,
        evaluations: Evaluations,
        peers: Peers,
    ) -> None:
        """Prepare a run."""
        self._session = session
        self._updater = updater
        updater.sign_of_life = session.timer.phase("update").begin_again
        self._running = running
        self._saving = saving
        self._records = records
        self._evaluations = evaluations
        self._peers = peers
        self._acting: PyTree | None = None
        """The acting networks of now; None if the updater has to be asked for them."""
        self._banks: dict[jax.Device, PyTree] | None = None
        """The agent's bank on each inference device; None if the updater has to be asked for it."""
        self._is_prepared = session.inference_only
        self._warned = False

    def consume(self) -> None:
        """Consume trajectories until the target is reached or a stop is requested."""
        if self._session.options.schedule == "lockstep":
            self._consume_rounds()
        else:
            self._consume_stream()

    def prepare_while_idle(self) -> None:
        """Prepare the update, once, while the Inferencers compile and run their first cycles."""
        if self._is_prepared:
            return
        self._is_prepared = True
        programs, step_state = self._session.programs, self._session.inferencers[0].step_state
        assert programs is not None
        due = self._due_after(self._session.counters.cycles + 1)
        with self._session.timer.phase("update"):
            step = jax.eval_shape(lambda: step_state)
            self._updater.prepare(Item(programs.shapes, step, step, ()), due=due)  # type: ignore[arg-type]

    # The two schedules.

    def _consume_stream(self) -> None:
        """Async: take trajectories as they come; publish after each that had updates due.

        With other hosts a trajectory of each makes a round. At a stop what they have of one is
        dropped, as is what still lies in the queue.
        """
        session, counters = self._session, self._session.counters
        while session.has_cycles_left and not self._peers.ends(session.stop_requested):
            before, item = counters.env_steps, self._next_with_others()
            learned = item is not None and self._consume(item)
            if self._edit_when_due(before) or learned:
                counters.policy_version += 1
                self.publish()
            del item  # which would be kept while the next one is made
            self._evaluate_and_write_when_due()
            self._checkpoint_when_due()
            self._saving.finish_when_ready([])

    def _next_with_others(self) -> Item | None:
        """Return the next trajectory of the stream; with other hosts once each of them has one."""
        # To drop what is too late is a matter of each host; a round is what all learn from.
        items, agreed = self._agree(lambda: [item] if (item := self._next_in_time()) else [])
        if agreed.stop:
            self._session.counters.dropped_stop_cycles += len(items)
            return None
        self._count_those_of_all(agreed)
        return items[0] if items else None

    def _next_in_time(self) -> Item | None:
        """Return the next trajectory that is not too late; None at a stop."""
        while True:
            with self._session.timer.phase("get"):
                item = self._running.next_item(wait_s=0.0)
            if item is None or not self._drops(item):
                return item

    def _consume_rounds(self) -> None:
        """Lockstep: one trajectory of each Inferencer, in their order, then one publish.

        Nothing is published after the last round. So every Inferencer finishes exactly the round
        that is in flight and finds no networks for another; that round is kept for the next run.
        """
        session, counters = self._session, self._session.counters
        while True:
            items, agreed = self._round(session.kept_round)
            session.kept_round = []
            self._count_those_of_all(agreed)
            self._saving.finish_when_ready(items)
            before = counters.env_steps
            while items:  # none is kept longer than it is needed
                self._consume(items.pop(0))
            self._edit_when_due(before)
            counters.policy_version += 1
            if not session.has_cycles_left or self._peers.ends(session.stop_requested):
                break
            # Begin a checkpoint before the publish that lets the Inferencers go on: it then gets
            # their positions after the round that they are in, which fit the learner's state.
            self._checkpoint_when_due()
            self.publish()
            self._evaluate_and_write_when_due()
        self._running.begin_no_more()
        session.kept_round, _ = self._round([])

    def _round(self, kept: list[Item]) -> tuple[list[Item], Agreed]:
        """Return the kept round, or the next; with other hosts once all of them have theirs."""

        def take() -> list[Item]:
            with self._session.timer.phase("get"):
                return kept or self._running.next_round(self._saving.save_learner)

        return self._agree(take)

    def _agree(self, take: Callable[[], list[Item]]) -> tuple[list[Item], Agreed]:
        """Return what ``take`` does, once the other hosts have taken theirs, and what is next."""
        began = time.perf_counter()
        error: Exception | None = None
        items: list[Item] = []
        try:
            items = take()
        except Exception as raised:
            error = raised
        infos = [item.step_infos for item in items]
        word = Word(
            failed=error is not None,
            waited_s=time.perf_counter() - began,
            episodes=sum(len(info.episode_returns) for info in infos),
            masked=sum(int(info.masked_truncation.sum()) for info in infos),
        )
        with self._session.timer.phase("get"):
            stop, ready = self._session.stop_requested, self._updater.wait
            return items, self._peers.agree(word, error, stop, self._wants_checkpoint, ready)

    def _checkpoint_when_due(self) -> None:
        """Begin a checkpoint if one is due; with other hosts if all of them begin it now."""
        wanted = self._peers.checkpoint(self._wants_checkpoint)
        if wanted.due:
            self._saving.begin(with_experience=wanted.with_experience)

    def _wants_checkpoint(self) -> Wants:
        """Return whether a checkpoint is due; if so, its interval begins anew."""
        saving = self._saving
        return Wants(saving.is_due, saving.is_busy, saving.experience_is_due)

    def _evaluate_and_write_when_due(self) -> None:
        self._evaluations.when_due(self._session.counters.env_steps, self.networks_to_play)
        self._records.write_when_due()

    def _count_those_of_all(self, agreed: Agreed) -> None:
        counters = self._session.counters
        counters.episodes += agreed.total("episodes")
        counters.masked_truncations += agreed.total("masked")

    # One trajectory.

    def _consume(self, item: Item) -> bool:
        """Count, observe and learn from one trajectory; True if updates were due."""
        session, counters = self._session, self._session.counters
        self._saving.consumed(item)
        self._count(item)
        window = self._records.window
        window.add_cycle(self._lag(item), self._running.fullness)
        if session.attached.observe_cycle is not None:
            with session.timer.phase("observe"):
                observed = session.attached.observe_cycle(item.trajectory, item.step_infos)
                window.add_observed(observed)
        if session.inference_only:
            return False
        due = self._due_after(counters.cycles)
        with session.timer.phase("update"):
            self._acting = self._updater.consume(item, updates=counters.updates, due=due)
        counters.updates += due
        return due > 0

    def _edit_when_due(self, before: int) -> bool:
        """Let the agent change its state if that is due since ``before`` env steps, and tell."""
        session, now = self._session, self._session.counters.env_steps
        if session.inference_only or not session.agent.edit_due(before, now):
            return False
        rng = np.random.default_rng([session.options.seed % 2**32, now])
        with session.timer.phase("update"):
            self._updater.edit(lambda state: session.agent.edit(state, before, now, rng))
        self._acting = self._banks = None
        return True

    def _lag(self, item: Item) -> int:
        """Return how many publishes ago the networks were that made ``item``."""
        return self._session.counters.policy_version - int(item.trajectory.policy_version)

    def _drops(self, item: Item) -> bool:
        """Tell whether networks that are too old made ``item``; if so, count it and drop it."""
        most = self._session.options.max_policy_lag
        if most is None or self._lag(item) <= most:
            return False
        self._saving.consumed(item)
        self._session.counters.dropped_lag_cycles += 1
        self._running.give_permit()
        return True

    def _due_after(self, cycles: int) -> int:
        """Return how many updates are due after trajectory number ``cycles``, counted from 1."""
        session = self._session
        return session.agent.num_off_policy_optims_per_cycle(cycles - session.counters.warm_up_from)

    def _count(self, item: Item) -> None:
        session, counters, infos = self._session, self._session.counters, item.step_infos
        env_steps = infos.episode_end.size * session.num_hosts
        counters.cycles += 1
        counters.env_steps += env_steps
        counters.frames += env_steps * session.inferencers[0].env.spec.frame_skip
        if infos.masked_truncation.any():
            self._warn_of_masked()
        session.episodes.add(infos)

    def _warn_of_masked(self) -> None:
        """Say once that the environment gives no last observations, though the agent uses them."""
        if self._warned or self._session.inference_only:
            return
        self._warned = True
        if self._session.agent.uses_final_obs:
            warnings.warn(
                "the last step before a truncation cannot be learned from: the environment resets "
                "in the same step without its last observation; give it in info['final_obs'], or "
                "use AutoresetMode.NEXT_STEP (masked_truncations counts "
                "such steps)",
                stacklevel=2,
            )

    # Networks.

    def publish(self) -> None:
        """Give the acting networks to the Inferencers of every device."""
        with self._session.timer.phase("publish"):
            if self._acting is None:
                self._acting = self._updater.acting_networks()
            version = self._session.counters.policy_version
            self._updater.published(version)
            if self._banks is None:
                bank = self._updater.bank()
                self._banks = {device: on_device(bank, device) for device in self._session.staging}
            for device, staging in self._session.staging.items():
                networks = with_bank(on_device(self._acting, device), self._banks[device])
                staging.publish(Staged(version, networks))

    def networks_to_play(self) -> PyTree:
        """Return the acting networks that were published last, on the first inference device."""
        staged = self._session.staging[self._session.inferencers[0].device].newest()
        assert staged is not None, "publishing comes first"
        return without_bank(staged.networks)
