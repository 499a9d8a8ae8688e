"""Clients that drive their environments: what they say is what is learned from."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from pathlib import Path
from typing import Any

import gymnasium
import jax
import numpy as np
import pytest
from sebulba_external import listener, protocol, seats
from sebulba_external.client import Client
from sebulba_external.columns import SeatColumns
from sebulba_external.desk import Acting, Desk
from sebulba_external.seats import Seats

import sebulba
from sebulba.agents.configs import DQNConfig, ImpalaConfig, ReplayConfig
from sebulba.agents.dqn import DQN
from sebulba.agents.impala import Impala
from sebulba.configs.impala_presets import PRESETS
from sebulba.types import RunSpec
from tests.external.telling import (
    ONE,
    SPEC,
    B,
    Checker,
    T,
    in_threads,
    reward_of,
    training,
)

AGENT = Impala(SPEC, ImpalaConfig())
MANY = pytest.param(3, 163_840, marks=pytest.mark.slow, id="100,000 transitions")


def tell(client: int, address: str, token: str, stop: threading.Event, num_episodes: int) -> None:
    """Play episodes whose rows say whose they are: ``[client, episode, step]``."""
    rng = np.random.default_rng(client)
    with contextlib.suppress(OSError), Client(address, token) as seat:
        for episode in range(num_episodes):
            observation = np.asarray([client, episode, 0], np.float32)
            action = int(seat.begin(observation))
            length = int(rng.integers(1, 13))
            for step in range(1, length + 1):
                if stop.is_set() or rng.random() < 0.02:
                    return  # in the middle of an episode
                reward = reward_of(observation, action)
                observation = np.asarray([client, episode, step], np.float32)
                if step == length:
                    seat.end(reward, observation, truncated=bool(rng.random() < 0.5))
                else:
                    action = int(seat.step(reward, observation))


def tellers(given: Seats, count: int, stop: threading.Event) -> list[threading.Thread]:
    """Have ``count`` clients at a time play until stopped, new ones in the place of the gone."""

    def one_after_another(first: int) -> None:
        number = first
        while not stop.is_set():
            tell(number, given.address, given.token, stop, 30)
            number += count
            stop.wait(0.001)

    return in_threads(one_after_another, *((k,) for k in range(count)))


@pytest.mark.parametrize(("num_clients", "env_steps"), [(1, 4096), (3, 4096), (6, 4096), MANY])
def test_every_transition_is_one_that_a_client_made(
    tmp_path: Path, num_clients: int, env_steps: int
) -> None:
    checker, stop = Checker(), threading.Event()
    with training(f"unix:{tmp_path}/s", observe_cycle=checker) as (given, loop):
        tellers(given, num_clients, stop)
        result = loop.train(total_env_steps=env_steps, steps_per_cycle=T)
        stop.set()
    assert result.counters.env_steps == env_steps
    assert checker.valid > 0.611 * env_steps
    assert checker.ends > env_steps / 20
    assert len(checker.clients) >= num_clients
    assert given.counts["broke_off"] > 0
    assert given.counts["asked"] >= given.counts["batches"] > 0
    metrics = result.metrics
    assert num_clients <= metrics["seats/welcomed"] <= given.counts["welcomed"]
    assert 0 < metrics["seats/answer_p50_ms"] <= metrics["seats/answer_p99_ms"]
    assert 1 <= metrics["seats/requests_per_batch"] <= B
    assert 0 <= metrics["seats/clients"] <= B


@pytest.mark.slow
def test_a_new_run_may_have_another_length_while_clients_play(tmp_path: Path) -> None:
    checker, stop = Checker(), threading.Event()
    with training(f"unix:{tmp_path}/s", observe_cycle=checker) as (given, loop):
        tellers(given, B, stop)
        for checker.num_steps in (8, 4, 16, 8):
            before, steps = checker.valid, checker.num_steps
            loop.run(loop.new_state(0, steps), 1024 // (B * steps), steps)
            assert checker.valid > before + 500
        stop.set()


def test_the_return_of_an_episode_that_broke_off_goes_to_no_other() -> None:
    like = jax.tree.map(
        lambda x: np.zeros(x.shape, x.dtype),
        jax.eval_shape(
            lambda key: AGENT.empty_trajectory(AGENT.new_networks(key), RunSpec(1, 1, 2, 1)),
            jax.random.key(0),
        ),
    )
    columns = SeatColumns(like, 2)
    row, action, extras = jax.tree.map(
        lambda x: np.zeros(x.shape[2:], x.dtype), (like.env_step, like.action, like.extras)
    )
    first = row._replace(is_first=np.True_)
    rewarded = row._replace(reward=np.float32(1))

    def add(given: Any, *, acted: bool = True) -> Any:
        column = columns.add(given, list)
        if acted:
            columns.act(action, extras)
        return column

    for acted in (True, False):  # the client is gone after the answer to row T, and before
        for given in (first, rewarded):
            add(given)
        assert add(rewarded, acted=acted).step_infos.episode_returns.tolist() == []
        columns.cut()
        for given in (first, rewarded._replace(terminated=np.True_)):
            last = add(given)
        last = last or add(first)
        assert last.step_infos.episode_returns.tolist() == [1.0]
        columns = SeatColumns(like, 2)


def test_all_who_ask_at_once_are_answered_in_one_call() -> None:
    stop = threading.Event()
    with training("127.0.0.1:0") as (given, loop):
        tellers(given, B, stop)
        loop.train(total_env_steps=1024, steps_per_cycle=T)
        stop.set()
        assert given.counts["asked"] > 1.2 * given.counts["batches"]


def test_the_memory_of_a_seat_waits_while_it_does_not_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Evaluated again from the state that its column begins with, the policy that acted gives the
    # probabilities that it acted with: only if no request of another seat moved that state.
    stop, differences, run = threading.Event(), [], seats.ServedCycle.run
    config = ImpalaConfig(learning_rate=1e-30, lstm_size=8)
    agent = Impala(SPEC, config)
    evaluate = jax.jit(agent.evaluate)

    def checked(self: Any, networks: Any, *arguments: Any) -> Any:
        item, step_state = run(self, networks, *arguments)
        if item is not None:
            rows, action = item.trajectory.env_step, item.trajectory.action
            core = item.initial_step_state.core
            output = evaluate(networks, rows.obs, core, rows.is_first)
            raw = agent.distribution.index(action)
            log_prob = agent.distribution.log_prob(output.params[:-1], raw)
            difference = log_prob - item.trajectory.extras.log_prob
            differences.append(np.abs(np.asarray(difference))[rows.valid[1:]].max())
            assert np.asarray(core).any()
        return item, step_state

    monkeypatch.setattr(seats.ServedCycle, "run", checked)
    with training(f"unix:{tmp_path}/s", config) as (given, loop):
        tellers(given, B - 1, stop)
        loop.train(total_env_steps=2048, steps_per_cycle=T)
        stop.set()
    assert len(differences) == 2048 // (B * T)
    assert max(differences) < 1e-4


@pytest.mark.slow
def test_what_is_learned_is_normalised_as_it_was_when_it_was_acted_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, run, renew = threading.Event(), seats.ServedCycle.run, seats.ServedCycle._renew
    published, used = {}, []
    config = ImpalaConfig(learning_rate=1e-30, normalize_observations=True)

    def noted(self: Any, networks: Any, *arguments: Any) -> Any:
        item, step_state = run(self, networks, *arguments)
        if item is not None:
            used.append(np.asarray(item.final_step_state.scaling[0].mean))
        return item, step_state

    def renewed(self: Any, networks: Any) -> None:
        renew(self, networks)
        version, acting = self._desk.acting
        published[version] = np.asarray(acting.scaling[0].mean)

    monkeypatch.setattr(seats.ServedCycle, "run", noted)
    monkeypatch.setattr(seats.ServedCycle, "_renew", renewed)
    with training(f"unix:{tmp_path}/s", config) as (given, loop):
        tellers(given, B, stop)
        loop.train(total_env_steps=4096, steps_per_cycle=T)
        stop.set()
    assert {mean.tobytes() for mean in used} <= {mean.tobytes() for mean in published.values()}
    assert all(mean.any() for mean in used[len(used) // 2 :])


def test_exploration_falls_with_rows_and_not_with_calls() -> None:
    agent = DQN(SPEC, DQNConfig())
    run = RunSpec(B, 1, 1, 1)
    networks = agent.new_networks(jax.random.key(0))
    desk = Desk(agent, B, agent.new_step_state(jax.random.key(1), run, 0), explore=True)
    experience = agent.new_experience(jax.random.key(2), networks, run)
    desk.acting = Acting(1, agent.acting_networks(networks, experience))
    keys = []
    for call in range(3 * B):
        desk.answer(np.arange(B) == call % B)
        assert int(desk._step_state.epsilon.steps) == (call + 1) // B
        keys.append(tuple(np.asarray(desk._step_state.key)))
    assert len(set(keys)) == 3 * B


@pytest.mark.slow
def test_a_replay_draws_transitions_of_one_seat_only(tmp_path: Path) -> None:
    # Places of a trajectory change hands: 3 clients at different paces fill 4 columns.
    stop = threading.Event()
    replay = ReplayConfig(capacity=1024, batch_size=32, updates_per_cycle=1, warm_up_cycles=2)
    with training(f"unix:{tmp_path}/s", DQNConfig(replay=replay), DQN) as (given, loop):
        tellers(given, B - 1, stop)
        result = loop.train(total_env_steps=4096, steps_per_cycle=T)
        stop.set()
    # Ends of episodes are rows that nobody acts in.
    assert 0.7 * 4096 // B < result.state.step[0].epsilon.steps <= given.counts["asked"] // B
    store = result.state.experience
    starts = np.argwhere(np.asarray(store.weight) > 0)
    assert len(starts) > 400
    rows = jax.tree.map(np.asarray, store.rows)
    for j, row, place in starts:
        after = (j, (row + 1) % store.num_rows, place)
        before = rows.obs[j, row, place]
        assert np.array_equal(before[:2], rows.obs[after][:2])
        assert before[2] + 1 == rows.obs[after][2]
        assert rows.reward[after] == np.float32(reward_of(before, rows.action[j, row, place]))


def hello(token: str = "right", **changes: Any) -> dict[str, Any]:
    return {"type": "hello", "version": protocol.VERSION, "token": token} | changes


def frame(**message: Any) -> bytes:
    return protocol.pack(message)


OBSERVATION = {"": np.zeros(3, "<f4").tobytes()}
BEGIN = frame(type="begin", observation=OBSERVATION)
BAD = {
    "wrong token": ([protocol.pack(hello("wrong"))], "token is wrong"),
    "no token": ([frame(type="hello", version=1)], "token is wrong"),
    "version": ([protocol.pack(hello(version=99))], "version=99"),
    "no hello": ([BEGIN], "must be 'hello'"),
    "huge": ([protocol.pack(hello()), protocol.LENGTH.pack(2**31)], "at most"),
    "not msgpack": ([protocol.LENGTH.pack(3) + b"\xc1\xc1\xc1"], "msgpack"),
    "extension": ([protocol.LENGTH.pack(3) + b"\xd4\x01\x00"], "msgpack"),
    "nested": ([protocol.LENGTH.pack(900) + b"\x91" * 900], "msgpack"),
    "not a map": ([protocol.LENGTH.pack(1) + b"\x07"], "map"),
    "unknown": ([protocol.pack(hello()), frame(type="dance")], "unknown"),
    "local": ([protocol.pack(hello(local=True)), BEGIN], "policy and rows"),
    "seats": ([protocol.pack(hello(local=True)), frame(type="policy", seats=[9])], "below 4"),
    "count": ([protocol.pack(hello(local=True)), frame(type="rows", count=2**40)], "count="),
    "step first": (
        [protocol.pack(hello()), frame(type="step", reward=0.0, observation=OBSERVATION)],
        "send 'begin' first",
    ),
    "shape": (
        [protocol.pack(hello()), frame(type="begin", observation={"": b"1234"})],
        "has 12 bytes",
    ),
    "no observation": ([protocol.pack(hello()), frame(type="begin")], "'observation'"),
    "not finite": (
        [
            protocol.pack(hello()),
            frame(type="begin", observation={"": np.full(3, np.nan, "<f4").tobytes()}),
        ],
        "not finite",
    ),
    "reward": (
        [
            protocol.pack(hello()),
            BEGIN,
            frame(type="step", reward=float("inf"), observation=OBSERVATION),
        ],
        "reward=inf",
    ),
    "huge reward": (
        [
            protocol.pack(hello()),
            BEGIN,
            frame(type="step", reward=1e300, observation=OBSERVATION),
        ],
        "of 32 bits",
    ),
    "impatient": ([protocol.pack(hello()) + BEGIN + BEGIN], "before the last one was answered"),
}  # fmt: skip


def answers(address: str, frames: list[bytes]) -> list[dict[str, Any]]:
    """Send frames, each after the answer to the one before; return all answers until the end."""
    connection = protocol.connect(address)
    connection.settimeout(60)
    got = []
    with contextlib.closing(connection):
        for data in frames:
            connection.sendall(data)
            got.append(protocol.receive(connection))
        with contextlib.suppress(OSError):
            while True:
                got.append(protocol.receive(connection))
    return got


def test_what_breaks_the_protocol_is_refused_in_words_and_disturbs_nobody(tmp_path: Path) -> None:
    checker, stop = Checker(), threading.Event()
    with training(f"unix:{tmp_path}/s", observe_cycle=checker) as (given, loop):
        given.listener.token = "right"
        tellers(given, B - 1, stop)
        trained = in_threads(lambda: loop.train(total_env_steps=200_000, steps_per_cycle=T), ())
        for name, (frames, words) in BAD.items():
            got = answers(given.address, frames)
            assert got[-1]["type"] == "error", name
            assert words in got[-1]["message"], name
        assert given.counts["refused"] == len(BAD)
        assert trained[0].is_alive()
        before = checker.valid
        deadline = time.monotonic() + 60
        while checker.valid < before + 500:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        stop.set()
        loop.stop()
        trained[0].join(300)


def test_a_client_that_dawdles_loses_its_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "HELLO_WITHIN_S", 0.2)
    with training(f"unix:{tmp_path}/s") as (given, loop):
        trained = in_threads(lambda: loop.train(total_env_steps=1024, steps_per_cycle=T), ())
        for data in (b"", protocol.pack(hello(given.token))[:7]):
            connection = protocol.connect(given.address)
            connection.settimeout(60)
            connection.sendall(data)
            assert "in time" in protocol.receive(connection)["message"]
            connection.close()
        loop.stop()
        trained[0].join(300)


def test_more_clients_than_seats_are_refused(tmp_path: Path) -> None:
    with training(f"unix:{tmp_path}/s") as (given, loop):
        trained = in_threads(lambda: loop.train(total_env_steps=1024, steps_per_cycle=T), ())
        with contextlib.ExitStack() as stack:
            for _ in range(B):
                stack.enter_context(Client(given.address, given.token))
            with pytest.raises(ConnectionError, match="all 4 seats are taken"):
                Client(given.address, given.token)
        loop.stop()
        trained[0].join(300)


def test_what_cannot_be_served_is_refused_in_words() -> None:
    with pytest.raises(sebulba.UsageError, match="token is empty"):
        Seats(SPEC, "0.0.0.0:0", token="")
    for address in ("nonsense", "127.0.0.1:99999", ":80", "127.0.0.1:http"):
        with pytest.raises(sebulba.UsageError, match="must be HOST:PORT or unix:PATH"):
            Seats(SPEC, address)
    with (
        Seats(SPEC, "127.0.0.1:0") as given,
        pytest.raises(sebulba.UsageError, match=r"nobody can listen at .*in use"),
    ):
        Seats(SPEC, given.address)
    with pytest.raises(sebulba.UsageError, match="nobody can listen at unix:"):
        Seats(SPEC, "unix:/no/such/folder/s")
    with (
        Seats(SPEC) as given,
        pytest.raises(sebulba.UsageError, match="served by one Inferencer"),
    ):
        sebulba.GymnasiumLoop(given, AGENT, num_envs=B, **ONE | {"num_inferencers_per_device": 2})


def test_a_socket_that_a_killed_trainer_left_is_replaced_and_one_in_use_is_not(
    tmp_path: Path,
) -> None:
    left = socket.socket(socket.AF_UNIX)
    left.bind(f"{tmp_path}/s")
    left.close()
    with (
        Seats(SPEC, f"unix:{tmp_path}/s"),
        pytest.raises(sebulba.UsageError, match="in use"),
    ):
        Seats(SPEC, f"unix:{tmp_path}/s")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(sebulba.UsageError, match="in use"):
        Seats(SPEC, f"unix:{tmp_path}/file")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_unix_socket_is_open_to_its_owner_alone(tmp_path: Path) -> None:
    with Seats(SPEC, f"unix:{tmp_path}/s"):
        assert (tmp_path / "s").stat().st_mode & 0o077 == 0
    assert not (tmp_path / "s").exists()


def test_a_client_says_what_it_cannot_send() -> None:
    ours, theirs = socket.socketpair()
    seat = Client.__new__(Client)
    seat._connection, seat.observation, seat.action = ours, {"": ["<f4", [3]]}, ["<i8", []]
    with pytest.raises(ValueError, match=r"shape \(2,\); the welcome says \(3,\)"):
        seat.begin(np.zeros(2, np.float32))
    with pytest.raises(ValueError, match=r"parts \['a'\]"):
        seat.begin({"a": np.zeros(3)})
    theirs.close()
    ours.close()


@pytest.mark.slow
def test_clients_train_cartpole(tmp_path: Path) -> None:
    stop = threading.Event()

    def play(address: str, token: str, seed: int) -> None:
        world = gymnasium.make("CartPole-v1")
        with contextlib.suppress(OSError), Client(address, token) as seat:
            while not stop.is_set():
                observation, _ = world.reset(seed=seed)
                action, seed, over = seat.begin(observation), seed + 100, False
                while not over and not stop.is_set():
                    observation, reward, dead, cut, _ = world.step(int(action))
                    over = dead or cut
                    if over:
                        seat.end(float(reward), observation, truncated=not dead)
                    else:
                        action = seat.step(float(reward), observation)

    config: Any = PRESETS["cartpole"].make().agent
    with (
        Seats("CartPole-v1", f"unix:{tmp_path}/s") as given,
        sebulba.GymnasiumLoop(given, Impala(given.spec, config), num_envs=8, **ONE) as loop,
    ):
        in_threads(play, *((given.address, given.token, seed) for seed in range(8)))
        result = loop.train(total_env_steps=200_000, steps_per_cycle=32)
        stop.set()
    assert result.metrics["episode_return_mean"] > 400
