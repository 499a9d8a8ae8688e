"""Hosts that learn together: what they agree on, what each saves, what becomes of the others."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sebulba import Checkpointer, HostError, UsageError
from sebulba.agents.configs.impala import ImpalaConfig
from sebulba.checkpoints.part_files import Snapshot
from sebulba.checkpoints.store import CheckpointStore
from sebulba.cluster.hosts.hosts import Hosts
from sebulba.cluster.hosts.mesh import HostMesh
from sebulba.cluster.hosts.rounds import LATE_SHARE, WINDOW_S, Gather, Lateness, Rounds
from sebulba.cluster.hosts.watch import DONE, FAILED, LIFE, REASON, Watch
from sebulba.configs.experiment import EnvConfig, ExperimentConfig
from sebulba.envs.seeds import seed_block
from sebulba.errors import CheckpointError
from sebulba.inference.loop_envs import LoopEnvs
from sebulba.learning.peers import Agreed, Peers, Wants, Word
from sebulba.options import ClusterOptions, DistributedOptions, LoopOptions
from sebulba.runs.exit_codes import EXIT_HOST, EXIT_OK, exit_code_of
from tests.support.hanging_host import HANGS
from tests.support.host_processes import DEADLINE_S, free_port, hosts, printed
from tests.support.hosts_world import NUM_ENVS, T
from tests.support.loop_helpers import make_tiny_loop

TWO = {"coordinator": "127.0.0.1:1", "num_hosts": 2, "host": 0}


class FakeNotes:
    """The notes of all hosts, in this process."""

    def __init__(self) -> None:
        self.left: dict[str, dict[int, Any]] = {}
        self.is_gone = False

    def leave(self, topic: str, host: int, about: Any) -> None:
        if self.is_gone:
            raise RuntimeError("UNAVAILABLE")
        self.left.setdefault(topic, {})[host] = json.loads(json.dumps(about))

    def read(self, topic: str) -> dict[int, Any]:
        if self.is_gone:
            raise RuntimeError("UNAVAILABLE")
        return dict(self.left.get(topic, {}))


class StillWatch(Watch):
    """A watch whose thread does nothing, so that a test says when it looks."""

    def _run(self) -> None:
        pass


def make_watch(notes: FakeNotes, host: int = 0, num_hosts: int = 2) -> StillWatch:
    return StillWatch(notes, host, num_hosts, timeout_s=30.0)


def make_hosts(notes: FakeNotes, host: int = 0, start_timeout_s: float = 1.0) -> Hosts:
    watch = make_watch(notes, host)
    return Hosts(host, 2, notes, start_timeout_s=start_timeout_s, watch=watch)


# Options.


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"coordinator": "somewhere"}, "distributed.coordinator"),
        ({"coordinator": "here:99999"}, "distributed.coordinator"),
        ({"coordinator": "here:1", "num_hosts": 2}, "distributed.host"),
        ({"coordinator": "here:1", "host": 1}, "distributed.num_hosts"),
        ({"coordinator": "here:1", "num_hosts": 2, "host": 2}, "distributed.host"),
        ({"num_hosts": 2}, "distributed.num_hosts"),
        ({**TWO, "heartbeat_timeout_s": 1.0}, "distributed.heartbeat_timeout_s"),
    ],
)
def test_wrong_options_are_named(given, named):
    with pytest.raises(UsageError, match=named):
        DistributedOptions(**given)


def test_auto_needs_no_more():
    assert DistributedOptions(coordinator="auto").is_on
    assert not DistributedOptions().is_on


def test_what_hosts_cannot_do_yet_is_refused():
    with pytest.raises(UsageError, match=r"^cluster\.trajectory_managers=1 cannot be combined"):
        LoopOptions(
            distributed=DistributedOptions(**TWO), cluster=ClusterOptions(trajectory_managers=1)
        )


def experiment(**changes: Any) -> ExperimentConfig:
    given = {"env": EnvConfig(id="CartPole-v1"), "agent": ImpalaConfig(), "total_env_steps": 1000}
    return ExperimentConfig(**{**given, "schedule": "lockstep", **changes})


def test_an_experiment_of_hosts_needs_a_folder():
    with pytest.raises(UsageError, match="run_dir"):
        experiment(distributed=DistributedOptions(**TWO))


def test_total_env_steps_are_those_of_all_hosts():
    alone = experiment(num_envs=5, steps_per_cycle=10)
    two = experiment(
        num_envs=5, steps_per_cycle=10, run_dir="x", distributed=DistributedOptions(**TWO)
    )
    assert (alone.num_cycles(1), two.num_cycles(1)) == (20, 10)


def test_a_loop_of_hosts_refuses_what_they_cannot_do():
    two = DistributedOptions(**TWO)
    with pytest.raises(UsageError, match="inference_only"):
        make_tiny_loop(schedule="lockstep", distributed=two, inference_only=True)


def test_hosts_have_seeds_and_keys_of_their_own():
    class Env:
        def close(self):
            pass

    seen: list[list[int]] = []

    class NoCheck(LoopEnvs):
        def _check_spaces(self, env):
            pass

    def factory(num_envs, seeds):
        seen.append(seeds)
        return Env()

    spec = dataclasses.make_dataclass("Spec", [("eval_only", tuple, ("x",))])()
    made = [NoCheck(factory, spec, 7, 3, [None, None], host=host) for host in range(3)]
    assert len({seed for seeds in seen for seed in seeds}) == 3 * 2 * 3
    assert seen[0] == seed_block(7, inferencer=0, num_inferencers=2, num_envs=3)
    keys = {tuple(np.asarray(jax.random.key_data(envs.fresh_key(1))).tolist()) for envs in made}
    assert len(keys) == 3


# Arrays over all hosts; two hosts of one process have devices 0 to 1 and 2 to 3.


def test_lifted_rows_keep_the_order_of_hosts_and_parts_give_them_back():
    mesh = HostMesh(jax.devices()[:4], jax.devices()[:4])
    tree = {"rows": np.arange(8.0), "all": np.ones(3), "key": jax.random.key(1)}
    specs = {"rows": P("learner"), "all": P(), "key": P()}
    lifted = mesh.put(tree, specs)
    assert lifted["rows"].sharding == NamedSharding(mesh.whole, P("learner"))
    np.testing.assert_array_equal(lifted["rows"], tree["rows"])
    assert jax.random.key_data(lifted["key"]).tolist() == [0, 1]
    assert mesh.parts(lifted)["rows"] is lifted["rows"]


def test_words_of_one_host_come_back():
    mesh = HostMesh(jax.devices()[:2], jax.devices()[:2])
    word = Word(stop=1.0, due=1.0, waited_s=1.5, episodes=3.0)
    agreed = Gather(mesh)(word)
    assert agreed == Agreed((word,))
    assert agreed.stop
    assert agreed.checkpoint
    assert agreed.total("episodes") == 3


# What they agree on.


def test_no_checkpoint_begins_while_one_host_still_writes():
    assert Agreed((Word(due=1.0), Word())).checkpoint
    assert not Agreed((Word(due=1.0), Word(busy=1.0))).checkpoint
    assert not Agreed((Word(), Word())).checkpoint


def test_any_host_stops_all_and_failures_are_named():
    agreed = Agreed((Word(), Word(stop=1.0), Word(failed=1.0)))
    assert agreed.stop
    assert agreed.failed == [2]


def test_the_starved_host_is_named_and_not_the_one_that_waits_for_it():
    lateness = Lateness()
    assert lateness.add([0.0, 90.0], now=0.0) is None  # the first round compiles
    found = None
    for second in range(1, int(WINDOW_S) + 1):
        found = found or lateness.add([0.1, 0.6], now=float(second))
    assert found is not None
    host, share = found
    assert host == 1
    assert share == pytest.approx(0.5)


def test_equal_hosts_are_not_named():
    lateness = Lateness()
    waited = LATE_SHARE - 0.05
    for second in range(100):
        assert lateness.add([1.0, 1.0 + waited], now=float(second)) is None


def make_rounds(host: int, notes: FakeNotes, words: tuple[Word, ...]) -> Rounds:
    mesh = HostMesh(jax.devices()[:1], jax.devices()[:1])
    rounds = Rounds(make_hosts(notes, host), mesh)
    rounds._gather = lambda word: Agreed(words)  # type: ignore[assignment]
    return rounds


def agree(rounds: Rounds, word: Word, error: Exception | None = None) -> Agreed:
    nothing = Wants(due=False, busy=False, with_experience=False)
    return rounds.agree(word, error, threading.Event(), lambda: nothing, lambda: None)


def test_a_checkpoint_that_is_due_stays_so_until_all_begin_it(monkeypatch):
    rounds, said = make_rounds(0, FakeNotes(), ()), []
    due, busy = [True, False, False], [1.0, 1.0, 0.0]

    def gather(word: Word) -> Agreed:
        said.append(word.due)
        return Agreed((word, Word(busy=busy.pop(0))))

    monkeypatch.setattr(rounds, "_gather", gather)
    begun = []
    for _ in range(3):
        wants = Wants(due.pop(0), busy=False, with_experience=True)
        rounds.agree(Word(), None, threading.Event(), lambda wants=wants: wants, lambda: None)
        begun.append(rounds.checkpoint(lambda: pytest.fail("all have said it")).due)
    assert [bool(word) for word in said] == [True] * 3 and begun == [False, False, True]


def test_a_stop_of_another_host_ends_this_one_with_the_round():
    rounds, stop = make_rounds(0, FakeNotes(), (Word(), Word(stop=1.0))), threading.Event()
    assert not rounds.ends(stop)
    agree(rounds, Word())
    assert rounds.ends(stop) and stop.is_set()


def test_the_collective_is_formed_while_all_hosts_are_there(monkeypatch):
    rounds, done = make_rounds(0, FakeNotes(), ()), []
    monkeypatch.setattr(rounds.hosts, "check_same", lambda about: done.append("met"))
    monkeypatch.setattr(rounds, "_gather", done.append)
    rounds.check_same({})
    assert done == ["met", Word()]


def test_a_stop_of_another_host_is_known_before_this_one_has_its_trajectory():
    notes = FakeNotes()
    stopped, waiting = (make_rounds(host, notes, (Word(), Word(stop=1.0))) for host in range(2))
    stop = threading.Event()
    assert not waiting.ends(stop)
    waiting.hosts.watch.look()
    assert not stop.is_set()
    stop_of_other = threading.Event()
    stop_of_other.set()
    nothing = Wants(due=False, busy=False, with_experience=False)
    stopped.agree(Word(), None, stop_of_other, lambda: nothing, lambda: None)
    waiting.hosts.watch.look()
    assert stop.is_set()
    agree(waiting, Word())
    stop.clear()  # the next run begins with the next round
    waiting.hosts.watch.look()
    assert not stop.is_set()


def test_who_learns_alone_waits_for_nobody():
    alone, stop = Peers(), threading.Event()
    agreed = alone.agree(Word(episodes=3.0), None, stop, pytest.fail, pytest.fail)
    assert agreed.total("episodes") == 3 and not alone.ends(stop)
    stop.set()
    assert alone.ends(stop)
    with pytest.raises(ValueError, match="mine"):
        alone.agree(Word(), ValueError("mine"), stop, pytest.fail, pytest.fail)
    with pytest.raises(ValueError, match="late"):
        alone.end(ValueError("late"))


def test_a_failure_ends_all_hosts_before_the_same_round():
    notes, words = FakeNotes(), (Word(), Word(failed=1.0))
    error = ValueError("out of luck")
    of_failed = make_rounds(1, notes, words)
    with pytest.raises(ValueError, match="out of luck"):
        agree(of_failed, words[1], error)
    of_other = make_rounds(0, notes, words)
    with pytest.raises(HostError, match=r"host 1 of 2 has failed: ValueError: out of luck"):
        agree(of_other, words[0])
    assert of_failed.ended_together
    assert of_other.ended_together


def test_a_late_host_is_named_in_a_warning():
    rounds = make_rounds(0, FakeNotes(), (Word(), Word()))
    rounds._lateness.add = lambda waited_s, now: (1, 0.6)  # type: ignore[method-assign]
    with pytest.warns(RuntimeWarning, match="host 1 of 2 is slow: for 60% of the time"):
        agree(rounds, Word())


# Who is still there.


def test_a_host_without_signs_of_life_is_named_and_the_others_are_not():
    notes = FakeNotes()
    watch = make_watch(notes, num_hosts=3)
    for second in range(60):
        for host in (1, 2):
            if host == 2 or second < 10:
                notes.leave(LIFE, host, {"number": second, "name": f"machine-{host}"})
        watch.look(now=float(second))
        error = watch.lost(30.0, now=float(second))
        assert (error is None) == (second <= 39), second
    assert "host 1 of 3 (machine-1) is lost: it has been silent for 50 s" in str(error)
    assert "sebulba resume" in str(error)


def test_a_host_that_is_done_is_not_missed():
    notes = FakeNotes()
    watch = make_watch(notes)
    notes.leave(LIFE, 1, {"number": 1, "name": "machine-1"})
    watch.look(now=0.0)
    notes.leave(DONE, 1, "")
    watch.look(now=100.0)
    assert watch.lost(30.0, now=100.0) is None


def test_the_coordinator_is_named_if_it_does_not_answer():
    notes = FakeNotes()
    watch = make_watch(notes, host=1)
    watch.look(now=0.0)
    notes.is_gone = True
    watch.look(now=40.0)
    assert "host 0 of 2, the coordinator, is lost" in str(watch.lost(30.0, now=40.0))


def test_a_loop_that_is_stuck_is_ended_by_the_watch_after_a_grace():
    notes, ended = FakeNotes(), []
    watch = make_watch(notes)
    watch.on_lost = ended.append
    notes.leave(FAILED, 1, "EnvError: broken")
    for second in range(10):
        notes.leave(LIFE, 1, {"number": second, "name": "machine-1"})
        watch.look(now=float(second))
        assert bool(ended) == (second >= 5), second
    assert len(ended) == 1
    assert "host 1 of 2 (machine-1) has failed: EnvError: broken" in str(ended[0])


def test_reasons_before_a_collective_end_nobody():
    notes = FakeNotes()
    watch = make_watch(notes)
    notes.leave(REASON, 1, "EnvError: broken")
    assert watch.lost(30.0) is None
    assert "EnvError: broken" in str(watch.failure_of(1))


def test_an_error_of_its_own_is_not_blamed_on_others(monkeypatch):
    one = make_hosts(FakeNotes())
    error = ValueError("mine")
    assert one.explained(error) is error
    monkeypatch.setattr(one.watch, "explain", lambda: HostError("host 1 is gone"))
    assert isinstance(one.explained(jax.errors.JaxRuntimeError("gloo")), HostError)
    assert isinstance(one.explained(ValueError("UNKNOWN: Gloo all-reduce failed")), HostError)
    assert one.explained(error) is error
    monkeypatch.setattr(one.watch, "explain", lambda: None)
    out_of_memory = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")
    assert one.explained(out_of_memory) is out_of_memory


# Meeting.


def test_hosts_that_differ_are_refused_by_name_on_both():
    notes = FakeNotes()
    first, second = make_hosts(notes, 0), make_hosts(notes, 1)
    notes.leave("meeting-0", 1, {"num_envs": 4, "seed": 1})
    with pytest.raises(UsageError, match="num_envs is 4 on host 1 and 8 on host 0"):
        first.check_same({"num_envs": 8, "seed": 1})
    with pytest.raises(UsageError, match="num_envs is 4 on host 1 and 8 on host 0"):
        second.check_same({"num_envs": 4, "seed": 1})


def test_a_host_that_does_not_come_is_named():
    with pytest.raises(HostError, match="host 1 of 2 did not arrive within 0 s"):
        make_hosts(FakeNotes(), start_timeout_s=0.2).meet(None)


# Checkpoints.


def snapshot(host: int) -> Snapshot:
    arrays = {"step/0": np.full(2, host)}
    if not host:
        arrays |= {"networks/w": np.ones(3), "opt/w": np.zeros(3)}
    return Snapshot({"keys": {}, "experience": None, "of": host}, arrays, {})


def save_whole(folder: Any, numbers: list[int], but: tuple = ()) -> list[Checkpointer]:
    made = [Checkpointer(folder, host=h, num_hosts=2, keep_last=2) for h in range(2)]
    for number in numbers:
        for host, checkpointer in enumerate(made):
            if (number, host) not in but:
                checkpointer.save_now(number, snapshot(host), None, None)
    return made


def test_a_host_gets_its_part_and_what_all_have_alike(tmp_path):
    made = save_whole(tmp_path, [10])
    for host, checkpointer in enumerate(made):
        with checkpointer:
            checkpoint = checkpointer.load_newest()
            assert checkpoint is not None
            assert checkpoint.snapshot.record["of"] == host
            assert checkpoint.snapshot.arrays.keys() == {"step/0", "networks/w", "opt/w"}
            assert checkpoint.snapshot.arrays["step/0"].tolist() == [host] * 2


@pytest.mark.parametrize("damage", ["missing", "changed", "never written"])
def test_a_checkpoint_with_a_part_missing_is_not_whole(tmp_path, damage):
    never = ((20, 1),) if damage == "never written" else ()
    made = save_whole(tmp_path, [10, 20], never)
    part = tmp_path / "host-1" / f"{20:012d}"
    if damage == "missing":
        shutil.rmtree(part)
    elif damage == "changed":
        (part / "record.json").write_text("{}")
    for checkpointer in made:
        with checkpointer:
            checkpoint = checkpointer.load_newest()
            assert checkpoint is not None
            assert checkpoint.env_steps == 10
            with pytest.raises(CheckpointError, match="part of host 1"):
                checkpointer.load_newest(strict=True)


def test_a_replay_that_one_host_could_not_write_is_due_again(tmp_path, monkeypatch):
    for checkpointer in save_with_replays(tmp_path, 10, due=True):
        checkpointer.close()
    with monkeypatch.context() as patch:
        original = CheckpointStore.save

        def failing(store: CheckpointStore, *given: Any, **named: Any) -> Path:
            if store.folder == tmp_path / "host-1" / "experience":
                raise OSError("no room")
            return original(store, *given, **named)

        patch.setattr(CheckpointStore, "save", failing)
        with pytest.raises(CheckpointError, match="no room"):
            save_with_replays(tmp_path, 20, due=True)
    made = [Checkpointer(tmp_path, host=h, num_hosts=2, keep_last=1) for h in range(2)]
    for host, checkpointer in enumerate(made):
        checkpoint = checkpointer.load_newest()
        assert checkpoint is not None and checkpoint.env_steps == 10
        assert not checkpointer.experience_is_due
        with monkeypatch.context() as patch:
            patch.setattr(CheckpointStore, "save", failing)
            kept = snapshot(host)
            del kept.record["experience"]
            with contextlib.suppress(CheckpointError):
                checkpointer.save_now(30, kept, Snapshot({"keys": {}}, {}, {}), None)
    assert [checkpointer.experience_is_due for checkpointer in made] == [False, True]
    for checkpointer in made:
        checkpointer.close()


def test_the_last_checkpoint_replaces_one_that_another_host_gave_up(tmp_path):
    for checkpointer in save_with_replays(tmp_path, 10, due=True):
        checkpointer.close()
    made = [Checkpointer(tmp_path, host=h, num_hosts=2) for h in range(2)]
    for checkpointer in made:
        checkpointer.load_newest()
    # Host 0 alone finishes one that has no replay, then all save the same number at the end.
    for host, checkpointer in [(0, made[0]), *enumerate(made)]:
        kept = snapshot(host)
        del kept.record["experience"]
        is_end = checkpointer.folder.joinpath(f"{20:012d}").exists()
        replay = Snapshot({"keys": {}}, {"experience/x": np.full(2, 20 + host)}, {})
        checkpointer.save_now(20, kept, replay if is_end else None, None)
    for host, checkpointer in enumerate(made):
        with checkpointer:
            checkpoint = checkpointer.load_newest(strict=True)
            assert checkpoint is not None
            assert (checkpoint.env_steps, checkpoint.experience_env_steps) == (20, 20)
            assert checkpoint.snapshot.arrays["experience/x"].tolist() == [20 + host] * 2


def test_what_is_abandoned_keeps_no_place_from_what_is_whole(tmp_path):
    for checkpointer in save_whole(tmp_path, [10, 20], ((20, 1),)):
        checkpointer.close()
    made = [Checkpointer(tmp_path, host=h, num_hosts=2, keep_last=1) for h in range(2)]
    assert [c.load_newest().env_steps for c in made] == [10, 10]  # type: ignore[union-attr]
    made[0].save_now(15, snapshot(0), None, None)  # host 1 is lost before its part is written
    for checkpointer in made:
        checkpointer.close()
    for host in range(2):
        with Checkpointer(tmp_path, host=host, num_hosts=2) as checkpointer:
            checkpoint = checkpointer.load_newest()
            assert checkpoint is not None and checkpoint.env_steps == 10
    assert not (tmp_path / f"{20:012d}").exists()


def save_with_replays(folder: Path, number: int, *, due: bool) -> list[Checkpointer]:
    with contextlib.ExitStack() as stack:
        made = [
            stack.enter_context(Checkpointer(folder, host=h, num_hosts=2, keep_last=1))
            for h in range(2)
        ]
        for checkpointer in made:
            checkpointer.load_newest()
        for host, checkpointer in enumerate(made):
            kept = snapshot(host)
            del kept.record["experience"]
            replay = Snapshot({"keys": {}}, {"experience/x": np.full(2, number + host)}, {})
            checkpointer.save_now(number, kept, replay if due else None, None)
        stack.pop_all()
    return made


@pytest.mark.parametrize("damaged", ["experience", "host-1/experience"])
def test_hosts_save_large_replays_apart_and_miss_those_of_each_other(tmp_path, damaged):
    for checkpointer in save_with_replays(tmp_path, 10, due=True):
        checkpointer.close()
    for host, checkpointer in enumerate(save_with_replays(tmp_path, 20, due=False)):
        with checkpointer:
            checkpoint = checkpointer.load_newest()
            assert checkpoint is not None
            assert (checkpoint.env_steps, checkpoint.experience_env_steps) == (20, 10)
            assert checkpoint.snapshot.arrays["experience/x"].tolist() == [10 + host] * 2
    for checkpointer in save_with_replays(tmp_path, 30, due=True):
        checkpointer.close()
    whole = {f"{30:012d}"}
    for folder in (tmp_path / "experience", tmp_path / "host-1" / "experience"):
        assert {path.name for path in folder.iterdir() if path.name.isdecimal()} >= whole
    (tmp_path / damaged / f"{30:012d}" / "record.json").write_text("{}")
    for host in range(2):
        with Checkpointer(tmp_path, host=host, num_hosts=2) as checkpointer:
            checkpoint = checkpointer.load_newest()
            assert checkpoint is not None and checkpoint.env_steps == 20


def test_a_whole_checkpoint_stays_until_another_is_whole(tmp_path):
    """Host 1 cannot write any more: what it wrote last goes with a checkpoint that stays."""
    made = save_whole(tmp_path, [10, 20, 30, 40, 50, 60], tuple((n, 1) for n in (30, 40, 50, 60)))
    for checkpointer in made:
        checkpoint = checkpointer.load_newest()
        assert checkpoint is not None and checkpoint.env_steps == 20
        checkpointer.close()


def test_hosts_whose_replays_are_of_different_ages_miss_a_checkpoint(tmp_path):
    for checkpointer in save_with_replays(tmp_path, 10, due=True):
        checkpointer.close()
    made = save_with_replays(tmp_path, 20, due=True)
    record = tmp_path / "host-1" / f"{20:012d}" / "record.json"
    theirs = json.loads(record.read_text())
    assert theirs["experience"] == 20
    store = CheckpointStore(tmp_path / "host-1", by_orbax=False)
    store.abandon([20])
    store.save(20, Snapshot({**theirs, "experience": 10}, {}, {}))
    for checkpointer in made:
        with checkpointer:
            checkpoint = checkpointer.load_newest()
            assert checkpoint is not None and checkpoint.env_steps == 10


def test_parts_of_a_run_that_never_had_a_whole_checkpoint_are_replaced(tmp_path):
    made = save_whole(tmp_path, [10], ((10, 0),))
    for checkpointer in made:
        checkpointer.close()
    made = [Checkpointer(tmp_path, host=host, num_hosts=2) for host in range(2)]
    for checkpointer in made:
        checkpointer.check_new()
    for host, checkpointer in enumerate(made):
        with checkpointer:
            new = snapshot(host)
            new.arrays["step/0"] = np.full(2, 7)
            checkpointer.save_now(10, new, None, None)
    for host in range(2):
        with Checkpointer(tmp_path, host=host, num_hosts=2) as checkpointer:
            checkpoint = checkpointer.load_newest()
            assert checkpoint is not None
            assert checkpoint.snapshot.arrays["step/0"].tolist() == [7, 7]


def test_parts_go_with_their_checkpoints(tmp_path):
    made = save_whole(tmp_path, [10, 20, 30, 40, 50])
    for checkpointer in made:
        checkpointer.close()
    whole = {p.name for p in tmp_path.iterdir() if p.name.isdecimal()}
    parts = {p.name for p in (tmp_path / "host-1").iterdir() if p.name.isdecimal()}
    assert {f"{n:012d}" for n in (40, 50)} <= whole <= parts
    assert f"{10:012d}" not in parts


@pytest.mark.parametrize("num_hosts", [1, 3])
def test_another_number_of_hosts_is_refused_by_name(tmp_path, num_hosts):
    for checkpointer in save_whole(tmp_path, [10]):
        checkpointer.close()
    with (
        Checkpointer(tmp_path, num_hosts=num_hosts) as other,
        pytest.raises(UsageError, match=rf"num_hosts={num_hosts}, but .* the parts of 2"),
    ):
        other.load_newest()


def test_only_host_0_says_when_to_save(tmp_path):
    made = [Checkpointer(tmp_path, every_s=0.0, host=h, num_hosts=2) for h in range(2)]
    assert [checkpointer.is_due(5) for checkpointer in made] == [True, False]
    for checkpointer in made:
        checkpointer.close()


# The command.


def test_a_lost_host_has_an_exit_code_of_its_own():
    assert exit_code_of(HostError("host 1 is gone")) == EXIT_HOST == 7


# Processes on loopback.


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="signals are read in /proc")
def test_a_host_that_hangs_in_native_code_ends_with_host_0(tmp_path):
    where = f"127.0.0.1:{free_port()}"
    with hosts(tmp_path) as started:
        both = started.start(*(["tests.support.hanging_host", where, host] for host in "01"))
        deadline = time.monotonic() + DEADLINE_S
        while not all(HANGS in printed(one) for one in both):
            assert time.monotonic() < deadline, [printed(one) for one in both]
            assert all(one.poll() is None for one in both), [printed(one) for one in both]
            time.sleep(0.1)
        both[0].kill()
        assert both[1].wait(DEADLINE_S) == -signal.SIGABRT, printed(both[1])
    assert f"{HANGS}0" in printed(both[1]) and "If host 0 is lost" in printed(both[1])


def wait_all(processes: list) -> list[int]:
    return [process.wait(DEADLINE_S) for process in processes]


def run_world(
    tmp_path: Path, kind: str, *, alone: bool = False, codes: Sequence[int] = (0,)
) -> Callable[[int, int], dict[str, Any]]:
    """Have two hosts learn, and one process alone if asked for; return what says how it went."""
    folders = {1: tmp_path / "one", 2: tmp_path / "two"}
    port = str(free_port())
    with hosts(tmp_path) as started:
        for number in (2, 1) if alone else (2,):
            folders[number].mkdir()
            words = (
                [
                    "tests.support.hosts_world",
                    port,
                    str(number),
                    str(host),
                    str(folders[number]),
                    kind,
                ]
                for host in range(number)
            )
            ended = wait_all(processes := started.start(*words))
            assert {*ended} <= {*codes}, [printed(process)[-3000:] for process in processes]

    def about(num_hosts: int, host: int) -> dict[str, Any]:
        return json.loads((folders[num_hosts] / f"about-{num_hosts}-{host}.json").read_text())

    return about


@pytest.mark.slow
@pytest.mark.timeout(2 * DEADLINE_S)
@pytest.mark.parametrize("kind", ["impala", "dqn"])
def test_two_hosts_learn_what_one_process_does(kind, tmp_path):
    """2 hosts x 2 devices = 1 process x 4 devices; a stop of one stops both; saved and resumed."""
    about = run_world(tmp_path, kind, alone=True)
    evaluated = [about(num, host).pop("evaluated") for num, host in ((2, 0), (2, 1), (1, 0))]
    # At the end of each run but the one that was stopped, whose last may have been skipped.
    assert [evaluated[0][0], evaluated[0][-1]] == [evaluated[2][0], evaluated[2][-1]]
    assert evaluated[1] == [], "host 0 plays for all"
    assert about(2, 0) | {"evaluated": []} == about(2, 1)
    # The other hosts hear of a stop with the next round.
    assert about(2, 0)["cycles"] == [3, 6, 8]
    assert about(1, 0)["cycles"] == [3, 5, 8]
    assert about(2, 0)["stopped"] == [False, True, False]
    for name in ("env_steps", "episodes"):
        assert about(2, 0)[name][::2] == about(1, 0)[name][::2]
    for name in ("first", "acting", "third"):
        one = np.load(tmp_path / "one" / f"{name}-1-0.npz")
        first, second = (np.load(tmp_path / "two" / f"{name}-2-{h}.npz") for h in range(2))
        for leaf in one:
            np.testing.assert_array_equal(first[leaf], second[leaf])
            np.testing.assert_allclose(first[leaf], one[leaf], rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(2 * DEADLINE_S)
@pytest.mark.parametrize("kind", ["impala-async", "dqn-async"])
def test_two_hosts_learn_the_same_from_streams(kind, tmp_path):
    about = run_world(tmp_path, kind)
    first, second = about(2, 0), about(2, 1)
    assert first | {"evaluated": []} == second
    # The trajectories that the hosts had as one of them was stopped are dropped.
    assert (first["cycles"], first["stopped"]) == ([3, 5, 8], [False, True, False])
    assert first["env_steps"] == [cycles * NUM_ENVS * T for cycles in first["cycles"]]
    for name in ("first", "acting", "third"):
        mine, other = (np.load(tmp_path / "two" / f"{name}-2-{h}.npz") for h in range(2))
        for leaf in mine:
            np.testing.assert_array_equal(mine[leaf], other[leaf])


@pytest.mark.slow
@pytest.mark.timeout(2 * DEADLINE_S)
def test_what_fails_while_hosts_end_costs_no_host_what_was_learned(tmp_path):
    run_world(tmp_path, "impala-late", codes=(1, -signal.SIGABRT))  # JAX may be quicker than we are
    said = [(tmp_path / f"printed-{host}").read_text() for host in range(2)]
    assert "RuntimeError: the late failure" in said[1]
    assert "HostError: host 1" in said[0]
    for host in range(2):
        with Checkpointer(tmp_path / "two" / "checkpoints", host=host, num_hosts=2) as checkpointer:
            checkpoint = checkpointer.load_newest(strict=True)
            assert checkpoint is not None and checkpoint.env_steps == 2 * NUM_ENVS * T


@pytest.mark.slow
@pytest.mark.timeout(2 * DEADLINE_S)
def test_a_host_that_is_killed_ends_the_others_and_all_go_on(tmp_path):
    """SIGTERM to one saves both; kill -9 of the coordinator, then of the other; and on."""
    run = tmp_path / "run"
    options = ["--schedule", "lockstep", "--cycle", "stepped", "--num-envs", "4", "--writers"]
    options += ["--steps-per-cycle", "4", "--num-inferencers-per-device", "1"]
    options += ["--eval-every-env-steps", "500", "--eval-episodes", "2"]
    options += ["--total-env-steps", "10000000"]
    options += ["--checkpoint.every-updates", "20", "--run-dir", str(run)]

    def start(started: Any, *words: str) -> list:
        where = f"127.0.0.1:{free_port()}"
        more = ["--distributed.coordinator", where, "--distributed.num-hosts", "2"]
        lines = [["sebulba", *words, *more, "--distributed.host", str(h)] for h in range(2)]
        return started.start(*lines)

    def saved() -> set[str]:
        """Return the numbers of checkpoints that have both parts."""
        mine, other = (
            {path.parent.name for path in folder.glob("*/manifest.json")}
            for folder in (run / "checkpoints", run / "checkpoints" / "host-1")
        )
        return mine & other

    def until_saved_beyond(before: set[str], processes: list) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while max(saved(), default="") <= max(before, default=""):
            assert time.monotonic() < deadline, [printed(p)[-3000:] for p in processes]
            assert all(p.poll() is None for p in processes), [printed(p)[-3000:] for p in processes]
            time.sleep(0.2)

    with hosts(tmp_path) as started:
        both = start(started, "train", "cartpole", *options)
        until_saved_beyond(set(), both)
        both[1].terminate()  # one is told to stop, and both end saved
        assert wait_all(both) == [EXIT_OK, 143], [printed(process)[-3000:] for process in both]
        for victim, name in ((0, "host 0"), (1, "host 1")):
            before = saved()
            both = start(started, "resume", str(run))
            until_saved_beyond(before, both)
            both[victim].kill()
            other = both[1 - victim]
            code = other.wait(DEADLINE_S)
            if code == -signal.SIGABRT:  # JAX is quicker than we are where host 0 is lost
                assert victim == 0 and "JAX distributed service" in printed(other)
                continue
            assert code == EXIT_HOST, printed(other)[-3000:]
            assert name in printed(other).partition("sebulba: hosts:")[2], printed(other)[-3000:]
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert any("eval_return_mean" in record for record in records), "host 0 evaluates for all"
    assert (run / "best_policy").is_dir()
