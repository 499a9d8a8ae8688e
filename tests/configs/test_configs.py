"""Configurations: checked on construction, complete, and what the presets promise."""

from __future__ import annotations

import dataclasses
import math

import pytest

from sebulba.agents.configs import AgentConfig, ImpalaConfig
from sebulba.agents.configs.off_policy import OffPolicyConfig
from sebulba.configs import tasks
from sebulba.configs.experiment import EnvConfig, ExperimentConfig
from sebulba.configs.presets import ATARI, BY_TASK, NEUTRAL, OWN_NUMBERS, PRESETS
from sebulba.envs.envpool_adapter import envpool_id
from sebulba.errors import UsageError


def config(**fields) -> ExperimentConfig:
    fields = {"total_env_steps": 1000, "num_envs": 7, "steps_per_cycle": 5} | fields
    return ExperimentConfig(env=EnvConfig("CartPole-v1"), agent=ImpalaConfig(), **fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_envs": 0}, ["num_envs=0", "at least 1"]),
        ({"steps_per_cycle": -3}, ["steps_per_cycle=-3", "at least 1"]),
        ({"total_env_steps": 0}, ["total_env_steps=0"]),
        ({"queue_size": 0}, ["queue_size=0"]),
        ({"num_inferencers_per_device": -1}, ["num_inferencers_per_device=-1", "at least 0"]),
        ({"max_policy_lag": -1}, ["max_policy_lag=-1"]),
        ({"num_cpu_devices": 0}, ["num_cpu_devices=0"]),
        ({"metrics_interval_s": float("nan")}, ["metrics_interval_s=nan"]),
        ({"seed": 2**31}, ["seed=2147483648", "32-bit", "2147483647"]),
        ({"num_cpu_devices": 2, "platform": "cuda"}, ["num_cpu_devices=2", "cuda"]),
        ({"name": "a/b"}, ["'a/b'", "--run-dir"]),
        ({"name": " "}, ["name=' '"]),
    ],
)
def test_refuses_a_bad_value_and_names_it(fields, words):
    with pytest.raises(UsageError) as caught:
        config(**fields)
    assert all(word in str(caught.value) for word in words), caught.value


def test_env_config_refuses_an_empty_id_and_an_option_given_twice():
    with pytest.raises(UsageError, match="must name an environment"):
        EnvConfig(" ")
    with pytest.raises(UsageError, match=r"--env\.noop-max"):
        EnvConfig("Pong-v5", options={"noop_max": 3})


def test_factory_arguments_leave_out_what_is_not_given():
    env = EnvConfig("Pong-v5", episodic_life=False, noop_max=7, options={"use_inter_area": True})
    assert env.factory_arguments() == {
        "vectorization": "sync",
        "episodic_life": False,
        "noop_max": 7,
        "use_inter_area": True,
    }


def test_num_cycles_rounds_up_and_lockstep_to_whole_rounds():
    assert config(total_env_steps=70).num_cycles(3) == 2
    assert config(total_env_steps=71).num_cycles(3) == 3
    assert config(total_env_steps=106, schedule="lockstep").num_cycles(3) == 6


def test_an_annealed_learning_rate_follows_the_length_of_the_run():
    assert config().agent_for(7) == config().agent
    optimizer = config(anneal_learning_rate=True).agent_for(7).optimizer
    assert (optimizer.schedule, optimizer.schedule_updates) == ("linear", 7)


@pytest.mark.parametrize("name", PRESETS)
def test_preset_is_documented_and_frozen(name):
    preset = PRESETS[name]
    made = preset.make()
    assert preset.summary and preset.make.__doc__
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.seed = 1  # type: ignore[misc]
    # Two and four update devices can split every preset, eight those without a replay, whose few
    # environments follow from the paper's ratio of updates to environment steps.
    assert made.num_envs % (4 if hasattr(made.agent, "replay") else 8) == 0


def numbers_of(config: ExperimentConfig, agent: AgentConfig) -> dict[str, float]:
    """Return how much happens in a run: updates and the rest per run or per env step."""
    cycles = config.num_cycles(1)
    if not isinstance(agent, OffPolicyConfig):
        return {"updates": cycles * getattr(agent, "epochs", 1) * getattr(agent, "minibatches", 1)}
    replay, target = agent.replay, agent.target
    schedule = replay.schedule(config.num_envs * config.steps_per_cycle)
    updates = sum(map(schedule.due, range(1, cycles + 1)))
    rows = replay.batch_size * getattr(agent, "sequence_length", 1)
    at_random = getattr(agent, "exploration_env_steps", getattr(agent, "random_env_steps", 0))
    return {
        "updates": updates,
        "target": updates / target.period * target.rate,
        "warm_up": schedule.first / cycles,
        "exploration": at_random / config.total_env_steps,
        "passes": updates * rows / config.total_env_steps,
    }


RANGES = {
    "updates": (100, math.inf),
    # Times that the target comes to where the networks are: copies, or moves by all of the way.
    "target": (20, math.inf),
    # Shares of the run.
    "warm_up": (0, 0.2),
    "exploration": (0, 0.5),
    # How often a row is learned from.
    "passes": (0.5, 300),
}


@pytest.mark.parametrize("name", PRESETS)
def test_what_happens_in_the_run_of_a_preset_is_in_proportion(name):
    made = PRESETS[name].make()
    agents = made.agent.agents.values() if hasattr(made.agent, "agents") else [made.agent]
    for agent in agents:
        for what, number in numbers_of(made, agent).items():
            least, most = RANGES[what]
            assert least <= number <= most, (what, number)


GAMES = ("kuhn", "leduc", "tic-tac-toe", "connect-four", "lbf", "rware")


def agent_name(preset: str) -> str:
    return type(PRESETS[preset].make().agent).__name__.removesuffix("Config").lower()


def test_presets_are_those_that_the_manual_names():
    names = list(PRESETS)
    assert names[:6] == list(NEUTRAL) == [agent_name(name) for name in NEUTRAL]
    assert names[6:11] == ["cartpole", "pendulum", "pong", "breakout", "halfcheetah"]
    for name in names[11:]:
        if name not in OWN_NUMBERS | BY_TASK:
            continue  # of a package of its own
        if ":" in PRESETS[name].make().env.id or name in GAMES:
            continue  # of a library of JAX environments, or of many agents
        of_agent = agent_name(name) in name.split("-")[1:]
        assert of_agent, "of an agent other than Impala: ENV-AGENT"


@pytest.mark.parametrize("name", BY_TASK)
def test_a_preset_by_task_is_that_of_its_agent_in_an_environment_of_envpool(name):
    made, agent = PRESETS[name].make(), name.rpartition("-")[2]
    start = (ATARI if made.env.id in tasks.GAMES else NEUTRAL)[agent].make()
    changes = next((t.changes for t in tasks.TASKS if t.env_id == made.env.id), {}).get(agent, {})
    of_run = {name: value for name, value in changes.items() if name == "steps_per_cycle"}
    of_agent = {name: value for name, value in changes.items() if name not in of_run}
    same = dataclasses.replace(
        start,
        env=dataclasses.replace(start.env, id=made.env.id),
        agent=dataclasses.replace(start.agent, **of_agent),
        total_env_steps=made.total_env_steps,
        **of_run,
    )
    assert made == same
    assert name == f"{tasks.name_of(made.env.id)}-{agent}"
    assert envpool_id(made.env.id) == made.env.id
    assert made.env.id in PRESETS[name].summary


def test_no_preset_has_two_names():
    made = [preset.make() for preset in PRESETS.values()]
    again = [one for number, one in enumerate(made) if one in made[:number]]
    assert [one.env.id for one in again] == ["Pong-v5"] * 4  # atari-AGENT begins with Pong


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_neutral_preset_has_nothing_of_a_task(name):
    made = NEUTRAL[name].make()
    assert made.agent.reward_scale == 1
    assert made.agent.discount == 0.99
    assert made.agent.optimizer.epsilon <= 1e-3
    assert made.env == EnvConfig(made.env.id), "an environment without options"
    if hasattr(made.agent, "normalize_rewards"):
        assert made.agent.normalize_observations and made.agent.normalize_rewards


def test_a_learning_rate_is_annealed_only_where_the_agent_has_an_optimizer():
    @dataclasses.dataclass(frozen=True)
    class NoOptimizer:
        learning_rate: float = 1.0

    env = EnvConfig("CartPole-v1")
    with pytest.raises(UsageError, match=r"anneal_learning_rate=True needs.*NoOptimizer has not"):
        ExperimentConfig(
            env=env, agent=NoOptimizer(), total_env_steps=1000, anneal_learning_rate=True
        )
    plain = ExperimentConfig(env=env, agent=NoOptimizer(), total_env_steps=1000)
    assert plain.agent_for(7) == NoOptimizer()
    optimizer = config(anneal_learning_rate=True).agent_for(7).optimizer
    assert (optimizer.schedule, optimizer.schedule_updates) == ("linear", 7)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("(50, 350)", (50, 350)),
        ("[1, 'a']", [1, "a"]),
        ("{'a': {1: None}}", {"a": {1: None}}),
        ("(not a tuple", "(not a tuple"),
        ("human", "human"),
    ],
)
def test_an_option_of_an_environment_may_be_a_tuple_a_list_or_a_dict(text, value):
    config = EnvConfig("CartPole-v1", options={"bound": text})
    assert config.factory_arguments()["bound"] == value
    assert config.options == {"bound": text}, "as it was typed, for config.json"
