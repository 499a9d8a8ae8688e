"""``bench train``: its arithmetic, its form, a prototype of the same work. Never a time."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import re
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks.studies import prototype
from benchmarks.studies import train as with_prototype
from benchmarks.studies.prototype_case import PrototypeCase
from sebulba.agents.configs import ImpalaConfig, PPOConfig, TorsoConfig
from sebulba.configs.experiment import EnvConfig, ExperimentConfig
from sebulba.envs import env_spec, make_env_factory, seed_block
from sebulba.errors import UsageError
from sebulba.learning.update import Updater
from sebulba.options import ClusterOptions
from sebulba.runs.build import build_agent
from sebulba.tools.bench import budget as budget_module
from sebulba.tools.bench import ceiling, gil, harness, raw_env, train
from sebulba.tools.bench.budget import Budget
from sebulba.tools.bench.ceiling import Cost, Setup, Training
from sebulba.tools.bench.stages import ReplayEnv, Stages, env_work, measure_together
from sebulba.transport.hand_off import HandOffToMesh
from sebulba.transport.item import Item
from sebulba.transport.mesh import UpdateMesh
from sebulba.types import RunSpec
from tests.package.test_package import MODULES, named_in

COSTS = {
    "cycle": Cost(wall_us=3.0, cpu_us=5.0),
    "hand-off": Cost(wall_us=0.5, cpu_us=1.0),
    "update": Cost(wall_us=2.0, cpu_us=4.0),
    "environment": Cost(wall_us=1.0, cpu_us=2.0),
    "inference": Cost(wall_us=2.0, cpu_us=3.0),
}
SETUP = Setup(
    cores=2,
    shares_cores=True,
    num_envs=32,
    steps_per_cycle=16,
    num_inferencers_per_device=2,
    cycle="stepped",
    could_fuse=True,
)
CONFIG = ExperimentConfig(
    env=EnvConfig("CartPole-v1"),
    agent=ImpalaConfig(torso=TorsoConfig(hidden_sizes=(5,))),
    total_env_steps=1000,
    num_envs=3,
    steps_per_cycle=4,
    inference_devices=(0,),
    update_devices=(0,),
    compile_cache="off",
)


def training(speed: float, cpu_us: float = 10.0, learner_waits: float = 0.5) -> Training:
    return Training(speed, cpu_us, learner_waits)


def replace(**changes: Any) -> Setup:
    return dataclasses.replace(SETUP, **changes)


# Ceilings.


def test_where_stages_share_cores_the_ceiling_is_cores_over_their_cpu_seconds():
    assert ceiling.ceiling(COSTS, SETUP) == pytest.approx(2e6 / 10)
    assert ceiling.shares(COSTS, SETUP) == {"cycle": 0.5, "hand-off": 0.1, "update": 0.4}


def test_where_stages_have_hardware_of_their_own_the_ceiling_is_the_slowest():
    setup = replace(shares_cores=False)
    assert ceiling.ceiling(COSTS, setup) == pytest.approx(1e6 / 3)
    assert ceiling.shares(COSTS, setup)["update"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(("share", "suspect"), [(1.01, False), (1.03, True), (0.5, False)])
def test_a_run_faster_than_its_ceiling_is_a_wrong_measurement(share, suspect):
    verdict = ceiling.judge(COSTS, training(share * 200_000), SETUP)
    assert verdict.achieved_over_ceiling == pytest.approx(share)
    assert verdict.suspect == suspect


def test_the_bottleneck_of_a_good_run_is_the_largest_stage_and_of_a_cycle_its_larger_part():
    good = training(190_000)
    assert ceiling.judge(COSTS, good, SETUP).bottleneck == "inference"
    update = COSTS | {"update": Cost(2.0, 6.0), "cycle": Cost(3.0, 3.0)}
    assert ceiling.judge(update, good, SETUP).bottleneck == "update"
    environment = COSTS | {"environment": Cost(2.5, 3.5)}
    assert ceiling.judge(environment, good, SETUP).bottleneck == "environment"


def test_a_run_at_the_speed_of_its_slowest_stage_is_limited_by_that():
    costs = COSTS | {"update": Cost(wall_us=8.0, cpu_us=8.0)}
    verdict = ceiling.judge(costs, training(115_000), SETUP)
    assert (verdict.slowest_stage, verdict.slowest_stage_env_steps_per_s) == ("update", 125_000)
    assert verdict.achieved_over_ceiling < ceiling.GOOD
    assert verdict.bottleneck == "update"
    assert "--num-cpu-devices 2 --update-devices 0 1" in verdict.advice


@pytest.mark.parametrize(
    ("run", "setup", "bottleneck", "option"),
    [
        (training(100_000, cpu_us=19.0), SETUP, "contention", "--num-inferencers-per-device 1"),
        (
            training(100_000, cpu_us=19.0),
            replace(num_inferencers_per_device=1),
            "contention",
            "--env.num-threads 1",
        ),
        (training(100_000, learner_waits=0.01), SETUP, "update", "--steps-per-cycle 32"),
        (training(100_000), SETUP, "python", "--cycle fused"),
        (training(100_000), replace(could_fuse=False), "python", "--num-envs 64"),
        (
            training(100_000),
            replace(cycle="fused", cores=4),
            "waits",
            "--num-inferencers-per-device 3",
        ),
        (training(100_000), replace(cycle="fused"), "waits", "--num-envs 64"),
    ],
)
def test_a_run_far_below_its_ceiling_gets_the_setting_that_could_help(
    run, setup, bottleneck, option
):
    verdict = ceiling.judge(COSTS, run, setup)
    assert verdict.bottleneck == bottleneck
    assert option in verdict.advice


IN_PYTHON = COSTS | {
    "cycle": Cost(wall_us=10.0, cpu_us=10.0),
    "environment": Cost(wall_us=8.0, cpu_us=8.0),
    ceiling.ALONE: Cost(wall_us=8.0, cpu_us=8.0),
}
TWO = replace(num_inferencers=2, could_fuse=False)


def test_environments_that_take_turns_at_the_interpreter_get_one_each():
    verdict = ceiling.judge(IN_PYTHON, training(95_000), TWO)
    assert verdict.achieved_over_ceiling < ceiling.GOOD
    assert verdict.bottleneck == "interpreter"
    assert verdict.advice.startswith("--cluster.address processes")
    assert "80% of a cycle" in verdict.advice
    # Also where the update waits, and nothing is at its own limit.
    assert ceiling.judge(IN_PYTHON, training(60_000), TWO).bottleneck == "interpreter"


@pytest.mark.parametrize(
    ("costs", "setup"),
    [
        ({ceiling.ALONE: Cost(16.0, 16.0)}, TWO),  # faster together: in native code, or asleep
        ({"environment": Cost(8.0, 16.0)}, TWO),  # each keeps all cores busy
        ({"environment": Cost(4.0, 4.0)}, TWO),  # a small part of a cycle
        ({}, dataclasses.replace(TWO, cores=1)),
        ({}, dataclasses.replace(TWO, gil_share=0.1)),
        ({}, dataclasses.replace(TWO, address="processes")),
    ],
)
def test_processes_are_not_advised_where_they_would_not_pay(costs, setup):
    verdict = ceiling.judge(IN_PYTHON | costs, training(60_000), setup)
    assert verdict.bottleneck != "interpreter" and "--cluster" not in verdict.advice


def test_a_long_way_of_items_is_to_be_gone_less_often():
    setup = dataclasses.replace(TWO, address="processes")
    far = COSTS | {ceiling.RELAY: Cost(wall_us=2.5, cpu_us=4.0)}
    assert ceiling.judge(far, training(190_000), setup).bottleneck == "relay"
    for speed in (190_000, 100_000):
        assert "--steps-per-cycle 32" in ceiling.judge(far, training(speed), setup).advice
    near = COSTS | {ceiling.RELAY: Cost(wall_us=0.1, cpu_us=0.1)}
    assert "--num-envs 64" in ceiling.judge(near, training(100_000), setup).advice


def test_every_option_that_is_advised_exists():
    source = inspect.getsource(ceiling)
    names = {f.name for f in dataclasses.fields(ExperimentConfig)}
    names |= {f"env.{f.name}" for f in dataclasses.fields(EnvConfig)} | {"agent.torso"}
    names |= {f"cluster.{f.name}" for f in dataclasses.fields(ClusterOptions)}
    advised = {name.replace("-", "_") for name in re.findall(r"--([a-z.-]+[a-z])", source)}
    assert len(advised) > 5
    assert advised <= names


# Measuring.


def test_works_run_at_the_same_time_after_each_has_warmed_up():
    together = threading.Barrier(3, timeout=300)
    warm_ups = []

    def work(until: float) -> int:
        if not until:
            warm_ups.append(1)
        else:
            assert len(warm_ups) == 3
        together.wait()  # breaks unless all three are there
        return 7

    cost = measure_together([work] * 3, 0.1)
    assert cost.wall_us > 0 and cost.cpu_us > 0


def test_what_a_work_raises_is_raised():
    def fails(until: float) -> int:
        raise ValueError("of the environment")

    with pytest.raises(ValueError, match="of the environment"):
        measure_together([lambda until: 1, fails], 0.1)


def test_the_best_of_the_rounds_is_taken_of_wall_and_cpu_apart():
    rounds = [{"update": Cost(2.0, 5.0)}, {"update": Cost(3.0, 4.0)}]
    assert train.best_costs(rounds) == {"update": Cost(2.0, 4.0)}


def test_the_trajectories_of_start_and_end_do_not_count(monkeypatch):
    factory = make_env_factory("CartPole-v1")
    case = train.TrainingCase(CONFIG, factory, build_agent(CONFIG, env_spec(factory)))
    case.close()
    # Slow at both ends, one second a trajectory between.
    in_flight = CONFIG.queue_size + 2 * 2
    seconds = [100.0] * in_flight + [1.0] * 10 + [50.0] * in_flight
    clock = itertools.accumulate(seconds)
    consumed = []

    def run(state: Any, num_cycles: int, steps_per_cycle: int) -> Any:
        consumed.append(num_cycles)
        for _ in range(num_cycles):
            case._observe(None, None)  # type: ignore[arg-type]
        case.write(RECORD)
        return case

    monkeypatch.setattr(case.loop, "run", run)
    monkeypatch.setattr(train.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(train.time, "process_time", lambda: 0.0)
    assert case.run_cycles(9).env_steps_per_s == CONFIG.num_envs * CONFIG.steps_per_cycle
    assert consumed == [len(seconds)]


RECORD = {"policy_lag_counts": {1: 2}, "queue_fill": 0.5, "time/learner/get": 0.25}


def test_records_of_start_and_end_are_left_out():
    odd = {"policy_lag_counts": {9: 1}, "queue_fill": None, "time/learner/get": 1.0}
    more = {"policy_lag_counts": {1: 1, 3: 1}, "queue_fill": 0.0, "time/learner/get": 0.75}
    reduced = train.reduce_records([odd, RECORD, more, odd])
    assert reduced == {
        "policy_lags": {1: 3, 3: 1},
        "queue_fill": 0.25,
        "time_shares": {"time/learner/get": 0.5},
    }


@pytest.fixture(scope="module")
def stages() -> Any:
    factory = make_env_factory("CartPole-v1")
    made = Stages(CONFIG, factory, build_agent(CONFIG, env_spec(factory)), 0.01)
    made.use_new_state()
    yield made
    made.close()


@pytest.mark.slow
def test_stages_are_measured_at_a_new_state_as_at_a_trained_one(stages):
    costs = stages.measure()
    assert costs.keys() == {*ceiling.STAGES, *ceiling.BREAKDOWN, ceiling.RAW}
    assert stages.raw_name.startswith("envpool, 6 environments in ")
    assert all(cost.wall_us > 0 and cost.cpu_us > 0 for cost in costs.values())
    assert stages.kind == "fused" and not stages.could_fuse
    assert stages.shares_cores and stages.num_inferencers == 2


@pytest.mark.slow
def test_a_replayed_environment_returns_the_rows_of_its_cycle_in_both_ways(stages):
    kept = stages._kept[0]
    replay, output = ReplayEnv(stages._agent.spec, kept), kept.trajectory
    state, step, *_ = replay.fused()
    for t in [*range(1, CONFIG.steps_per_cycle), 0]:
        stepped = replay.step(np.zeros(CONFIG.num_envs, np.int32))
        np.testing.assert_array_equal(stepped.obs, np.asarray(output.env_step.obs)[t + 1])
        np.testing.assert_array_equal(stepped.is_first, np.asarray(output.env_step.is_first)[t + 1])
        np.testing.assert_array_equal(stepped.episode_end, kept.step_infos.episode_end[t])
    for _ in range(CONFIG.steps_per_cycle):
        state, fused, num_invalid = jax.jit(step)(state, np.zeros(CONFIG.num_envs, np.int32))
    last = CONFIG.steps_per_cycle - 1
    np.testing.assert_array_equal(fused.obs, np.asarray(output.env_step.obs)[last + 1])
    assert int(num_invalid) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env_id", "kind"), [("KuhnPoker-v1", "stepped"), ("LevelBasedForaging-v0", "fused")]
)
def test_stages_of_many_agents_are_measured_too(env_id, kind):
    env = EnvConfig(env_id)
    config = dataclasses.replace(CONFIG, env=env, agent=PPOConfig(minibatches=1))
    factory = make_env_factory(env.id)
    stages = Stages(config, factory, build_agent(config, env_spec(factory)), 0.01)
    try:
        stages.use_new_state()
        assert all(cost.wall_us > 0 for cost in stages.measure().values())
        assert stages.kind == kind
    finally:
        stages.close()


@pytest.mark.parametrize("kind", ["stepped", "fused"])
def test_an_environment_alone_counts_its_steps(kind):
    env = make_env_factory("CartPole-v1")(3, [1, 2, 3])
    actions = np.ones((4, 3), np.int32)
    assert env_work(env, actions, kind, jax.devices()[0])(0.0) == 12
    env.close()


# Comparisons.


def test_ratios_are_within_a_round():
    speeds = {
        "stepped": [10.0, 20.0, 30.0],
        "fused": [30.0, 20.0, 60.0],
        "prototype": [20.0, 20.0, 20.0],
        "gil_share": [0.1, 0.3, 0.2],
        "train": [1.0, 1.0, 1.0],
    }
    assert train.compared(speeds) == {
        "stepped_env_steps_per_s": 20.0,
        "fused_env_steps_per_s": 30.0,
        "prototype_env_steps_per_s": 20.0,
        "fused_over_stepped": 2.0,
        "stepped_over_prototype": 1.0,
        "gil_share": 0.2,
    }
    assert train.compared({"train": [1.0], "stages": [2.0]}) == {}


def test_what_threads_are_slower_by_than_processes_is_lost_to_the_lock():
    assert gil.gil_share(75.0, 100.0) == 0.25
    assert gil.gil_share(110.0, 100.0) == 0.0


def test_a_comparison_that_is_impossible_is_refused():
    elsewhere = dataclasses.replace(CONFIG, env=EnvConfig("CartPole-v1", backend="gymnasium"))
    with pytest.raises(UsageError, match="leave prototype out"):
        PrototypeCase(elsewhere, build_agent(CONFIG, env_spec("CartPole-v1")))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_processes_with_cycles_of_their_own_answer():
    stepped = dataclasses.replace(CONFIG, cycle="stepped")
    with gil.cycle_processes(stepped, 1, 0.01) as measure:
        assert measure() > 0


# The prototype.


def test_the_prototype_imports_nothing_of_the_package_but_the_contracts():
    imported = named_in(Path(prototype.__file__), at_import=False) & MODULES.keys()
    assert imported == {"sebulba.agent", "sebulba.support.trees", "sebulba.types"}


@pytest.mark.slow
def test_the_prototype_learns_from_a_trajectory_what_the_trainer_learns_from_it(stages):
    agent, kept = stages._agent, stages._kept[0]
    run = RunSpec(CONFIG.num_envs, 2, CONFIG.steps_per_cycle, 1)
    state = agent.new_state(jax.random.key(3), run)
    trajectory = jax.tree.map(np.array, kept.trajectory)
    mesh = UpdateMesh(jax.devices()[:1])
    updater = Updater(agent, mesh, jax.random.key(0))
    updater.begin(run)
    updater.place(state)
    step_states = kept.initial_step_state, kept.final_step_state
    copies = jax.tree.map(lambda x: x.copy(), step_states)
    placed = HandOffToMesh(agent, mesh)(Item(trajectory, *copies, kept.step_infos))
    updater.consume(placed, updates=0, due=1)

    initial, final = map(prototype.unwrap_keys, step_states)
    networks, _, _, loss = prototype.make_update(agent)(
        state.networks, state.opt, state.experience, trajectory, initial, final, np.uint32(0)
    )
    assert float(loss) == pytest.approx(updater.take_metrics()["loss"], rel=1e-5)
    moved = False
    for ours, its, before in zip(
        *map(jax.tree.leaves, (updater.state([]).networks, networks, state.networks)), strict=True
    ):
        np.testing.assert_allclose(ours, its, rtol=1e-5, atol=1e-6)
        moved |= not np.array_equal(its, before)
    assert moved


@pytest.mark.slow
def test_the_prototype_trains_with_finite_losses():
    agent = build_agent(CONFIG, env_spec("CartPole-v1"))
    run = RunSpec(CONFIG.num_envs, 2, CONFIG.steps_per_cycle, 1)
    seeds = [seed_block(0, inferencer=i, num_inferencers=2, num_envs=3) for i in range(2)]
    made = prototype.Prototype("CartPole-v1", agent, run, seeds, num_threads=1)
    before = jax.tree.map(np.array, made.networks)
    seen = [*made.train(5), *made.train(2)]
    made.close()
    assert len(seen) == 6 + 2  # whole rounds of two threads
    assert np.isfinite([loss for _, loss in seen]).all()
    assert [began for began, _ in seen] == sorted(began for began, _ in seen)
    assert not np.array_equal(jax.tree.leaves(before)[0], jax.tree.leaves(made.networks)[0])


# The whole.


@pytest.mark.slow
def test_cycles_elsewhere_are_measured_there_with_the_cost_of_their_way(capsys):
    config = dataclasses.replace(
        CONFIG,
        cycle="stepped",
        cluster=ClusterOptions(address="processes", inferencers_per_node=2),
    )
    factory = make_env_factory("CartPole-v1")
    made = Stages(config, factory, build_agent(config, env_spec(factory)), 0.01)
    try:
        made.use_new_state()
        costs = made.measure()
        assert made.kind == "stepped" and made.shares_cores
        setup = train.setup_of(config, made)
    finally:
        made.close()
    assert costs.keys() == {*ceiling.STAGES, *ceiling.BREAKDOWN, ceiling.RELAY, ceiling.RAW}
    relay, cycle = costs[ceiling.RELAY], costs["cycle"]
    assert 0 < relay.wall_us < cycle.wall_us
    # The CPU time of a cycle has that of its process, too.
    assert cycle.cpu_us > relay.cpu_us > 0
    rounds = [train.Round(1e5, 9.0, {1: 1}, 0.5, {"time/learner/get": 0.5})]
    keys, figures = train.summarize(rounds, [costs], setup)
    settings = {"preset": "x", "devices": "y", "raw_environment": made.raw_name}
    record = {"config": {**dataclasses.asdict(config), **settings}}
    train.print_result({**keys, **record, "figures": figures}, setup)
    assert "ms an item from where its cycle ran" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_the_record_has_the_promised_keys(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train.Bench, "_make_gil_case", lambda bench: lambda: 0.25)
    file, picture = tmp_path / "train.json", tmp_path / "train.png"
    with_prototype.run(
        CONFIG,
        preset="tiny",
        repeats=1,
        seconds=0.02,
        stage_seconds=0.01,
        compare=("stepped", "fused", "prototype"),
        json_file=str(file),
        png_file=str(picture),
    )
    record = json.loads(file.read_text())
    for key in (
        "env_steps_per_s",
        "ceiling_env_steps_per_s",
        "achieved_over_ceiling",
        "fused_over_stepped",
        "stepped_over_prototype",
        "gil_share",
    ):
        assert record[key] > 0
    assert record["env_steps_per_s"] == record["fused_env_steps_per_s"]
    assert record["bottleneck"] and record["advice"].startswith("--")
    assert record["suspect"] == (record["achieved_over_ceiling"] > 1.02)
    assert record["stages"].keys() == {*ceiling.STAGES, *ceiling.BREAKDOWN, ceiling.RAW}
    assert record["stages"]["update"].keys() == {"wall_us", "cpu_us"}
    assert record["policy_lag"].keys() == {"mean", "max"}
    assert 0 <= record["queue_fill"] <= 1
    assert all(len(figures) == 1 for figures in record["figures"].values())
    assert {"config", "machine", "versions", "commit"} <= record.keys()
    assert picture.stat().st_size > 0
    printed = capsys.readouterr().out
    assert "achieved_over_ceiling" in printed and "bottleneck" in printed
    assert re.search(r"training is \d+\.\d\d of the raw environment \(envpool, 6 env", printed)
    for done in ("JAX starts", "compiling the run", "compiling fused", "round 1 of 1"):
        assert f" s: {done}" in printed


# Within a budget.


class Clock:
    """Stands still but for what is added."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize(
    ("seconds", "rounds"),
    [(1e9, [2, 3, 4, 5, 6]), (60.0, [2, 3, 4]), (40.0, [2]), (30.0, [1]), (1.0, [1])],
)
def test_rounds_end_before_the_next_would_be_too_late(seconds, rounds):
    clock = Clock()
    budget = Budget(seconds, clock)
    clock.now += 20.0  # to compile
    done = itertools.count(1)

    def measure():
        clock.now += 10.0
        return next(done)

    figures = harness.interleave({"a": measure}, 5, budget=budget)
    assert figures["a"] == rounds  # the first is to warm up, and counts if it is the only one
    assert budget.left() >= 0 or rounds == [1]


@pytest.mark.parametrize(
    ("left_s", "share"), [(1e9, 1.0), (100.0, 0.5), (50.0, 0.25), (0.0, 0.05), (-9.0, 0.05)]
)
def test_rounds_are_shortened_to_what_is_left(left_s, share):
    assert train.fitting_share(left_s, 100.0) == share


def test_something_is_printed_every_few_seconds(monkeypatch, capsys):
    monkeypatch.setattr(budget_module, "EVERY_S", 0.01)
    with Budget(60.0) as budget:
        budget.doing("compiling")
        said = ""
        while said.count("s: compiling") < 3:
            said += capsys.readouterr().out


@pytest.mark.slow
def test_training_ends_early_when_the_time_is_over():
    clock = Clock()
    factory = make_env_factory("CartPole-v1")
    agent = build_agent(CONFIG, env_spec(factory))
    case = train.TrainingCase(CONFIG, factory, agent, Budget(10.0, clock))
    try:
        case.run_cycles(1)
        clock.now += 11.0
        made = case.run_cycles(10_000)
        assert case.result is not None
        assert made.env_steps_per_s > 0 and case.result.counters.cycles < 5000
        assert not case.is_cut, "a few trajectories count"
        clock.now += train.MOST_LATE_S
        case.run_cycles(10_000)
        assert case.is_cut
    finally:
        case.close()


@pytest.mark.slow
def test_a_stepped_cycle_has_its_upload_act_and_fetch_measured():
    config = dataclasses.replace(CONFIG, cycle="stepped")
    factory = make_env_factory("CartPole-v1")
    made = Stages(config, factory, build_agent(config, env_spec(factory)), 0.01)
    try:
        made.use_new_state()
        costs = made.measure()
        setup = train.setup_of(config, made)
    finally:
        made.close()
    assert {*ceiling.ACTING, ceiling.RAW} < costs.keys()
    result = {
        "stages": {name: dataclasses.asdict(cost) for name, cost in costs.items()},
        "env_steps_per_s": 1e5,
        "training_cpu_us": 9.0,
    }
    rows = train.stage_rows(result, setup)
    for part in ("upload", "act", "fetch"):
        assert f"    {part}, in inference" in rows
    assert "  raw environment" in rows and "  environment apart" in rows


def test_the_raw_environment_steps_as_its_library_does():
    single = EnvConfig("tests.support.tiny:CountingEnv")
    (raw,) = raw_env.raw_envs(single, make_env_factory(single.id), 4)
    assert [next(raw.steps) for _ in range(9)] == [1] * 9
    assert raw_env.cost_of(raw, 0.01).wall_us > 0
    raw.close()
    masked = EnvConfig("Taxi-v4", backend="gymnasium", action_mask="info")
    assert (
        raw_env.raw_envs(masked, make_env_factory(masked.id, **masked.factory_arguments()), 4) == []
    )
    partly_hidden = EnvConfig("CartpoleBalance-v1", privileged=("velocity",))
    for config in (EnvConfig("CartPole-v1"), partly_hidden):
        factory = make_env_factory(config.id, **config.factory_arguments())
        pools = raw_env.raw_envs(config, factory, 6)
        assert [next(pool.steps) for pool in pools] == [6, 3]
        assert "in batches of 3" in pools[1].name
        for pool in pools:
            pool.close()


def test_a_suspect_measurement_is_said_to_be_wrong():
    verdict = ceiling.judge(COSTS, training(300_000), SETUP)
    result = {
        **dataclasses.asdict(verdict),
        "env_steps_per_s": 300_000,
        "busy_cores": 2.0,
        "policy_lag": {"mean": 1.0, "max": 2},
        "queue_fill": 0.5,
        "time_shares": {},
    }
    assert any("this measurement is wrong" in line for line in train.verdict_lines(result, SETUP))
    result["suspect"] = False
    assert not any("wrong" in line for line in train.verdict_lines(result, SETUP))
