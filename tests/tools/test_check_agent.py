"""``check-agent`` and the check before a loop: each mistake has its sentence, and no other."""

from __future__ import annotations

import json
from typing import Any

import pytest

import sebulba
from sebulba.agents.configs import MultiAgentConfig, PPOConfig, TorsoConfig
from sebulba.agents.multi.multi_agent import MultiAgent
from sebulba.commands import cli
from sebulba.errors import UsageError
from sebulba.loops.agent_contract import check_contract
from sebulba.tools.check import training_checks
from sebulba.tools.check.agent_checks import suite
from sebulba.tools.check.agent_driver import run_spec
from sebulba.tools.check.agent_under_test import AgentSubject
from sebulba.tools.check.checks import Done, Finding, Level, run_checks
from tests.support import broken_agents
from tests.support.agent_driver import SPEC
from tests.support.agent_suite import AGENTS
from tests.support.broken_agents import Good, GoodConfig
from tests.support.populations import Turns
from tests.support.tiny import CountingEnv

CONTRACT = (
    *("making", "config", "state", "step", "specs", "update_experience"),
    *("loss", "optimize", "updates due"),
)
OF_PROGRAMS = ("purity", "keys", "explore")
OF_UPDATES = ("gradients", "valid", "devices")


def events(agent: Any, *only: str, **arguments: Any) -> list:
    """Return the events of all checks, or of the contract's and of ``only``."""
    if isinstance(agent, str) and ":" not in agent:
        agent = f"tests.support.broken_agents:{agent}"
    checks = suite(AgentSubject(agent, **arguments))
    kept = {*CONTRACT, *only} if only else {check.name for check in checks}
    passed = {check.name: True for check in checks if check.name not in kept}
    return list(run_checks(checks, passed))


def findings(agent: Any, *only: str, **arguments: Any) -> list[Finding]:
    found = [e for e in events(agent, *only, **arguments) if isinstance(e, Finding)]
    return [f for f in found if f.level is not Level.OK]


# Found by shapes, before anything starts.

OF_SHAPES = [
    ("ColumnOfActions", "step", "actions int32[8, 1]; expected int32[8]", "action[:, 0]"),
    ("FloatActions", "step", "actions float32[8]; expected int32[8]", "indices of actions"),
    ("SmallActions", "step", "actions uint8[8]; expected int32[8]", "astype"),
    ("OneAction", "step", "actions int32[]; expected int32[8]", "each row of env_step.obs"),
    ("TupleOfActions", "step", "a tuple of 8 as actions", "stack them"),
    ("NumpyActions", "step", "actions float32[8]; expected int32[8]", "indices of actions"),
    ("StepReturnsNothing", "step", "returns None", "return statement"),
    ("StepReturnsActionsOnly", "step", "int32[8]; expected (sebulba.ActionOutput", "return ("),
    ("StepReturnsThree", "step", "a tuple of 3; expected (sebulba.ActionOutput", "return ("),
    ("PlainActions", "step", "int32[8] for the actions", "sebulba.ActionOutput(action)"),
    ("ExtrasWithoutRows", "step", "extras scale float32[3]", "broadcast"),
    ("ExtrasOfText", "step", "'greedy', a str", "arrays and numbers only"),
    ("LosesKey", "step", "the step state without key", "as new_step_state makes it"),
    ("OtherContainers", "step", "the step state with 0, 1 and without key, row", "new_step_state"),
    ("CountsInFloats", "step", "row float32[8]; expected int32[8]", "as new_step_state makes it"),
    ("SummedState", "step", "row int32[]; expected int32[8]", "as new_step_state makes it"),
    ("RawKey", "step", "key uint32[2]; expected key<fry>[]", "as new_step_state makes it"),
    ("NoExplore", "step", "unexpected keyword argument 'explore'", "arguments that sebulba.Agent"),
    ("Branches", "step", "TracerBoolConversionError", "jax.lax.cond for `if`"),
    ("CallsNumpy", "step", "TracerArrayConversionError", "jnp for np"),
    ("MeanInStep", "step", "unbound axis name: learner", "update_experience, loss, optimize only"),
    ("TakesFloat", "loss", "ConcretizationTypeError", "no float()"),
    ("IndexesByMask", "loss", "NonConcreteBooleanIndexError", "jnp.where"),
    ("WrongShapes", "loss", "TypeError: dot_general requires", "broken_agents.py"),
    ("NotMapped", "loss", "assert_rank failed", "jax.vmap(kernel, in_axes=1, out_axes=1)"),
    ("NotDifferentiable", "loss", "Reverse-mode differentiation", "sebulba.Agent"),
    ("ForgetsToReturn", "update_experience", "returns None", "return statement"),
    ("ReturnsTrajectory", "update_experience", "the experience with action", "new_experience"),
    ("HalvesExperience", "update_experience", "obs bfloat16[7, 2, 3]; expected float32", "as new_"),
    ("DropsLastRow", "loss", "obs float32[6, 2, 3]; expected float32[7, 2, 3]", "new_experience"),
    (
        "Replicates",
        "update_experience",
        "expected float32[7, 8, 3]",
        "P(None, 'learner')",
    ),
    ("SpecOfOtherTree", "experience_spec", "does not fit what new_experience", "prefix tree"),
    ("SplitsScalar", "experience_spec", "P('learner') for mean", "P() for keys, counts"),
    ("SplitsTime", "experience_spec", "7 cannot be split over 4", "dimension of the environments"),
    ("UnknownAxis", "experience_spec", "P('envs') for trajectory", "P('learner')"),
    ("SplitsKey", "step_state_spec", "P('learner') for key", "P() for keys"),
    ("SpecOfOtherState", "step_state_spec", "does not fit what new_step_state", "prefix tree"),
    ("LossOfVector", "loss", "float32[3] as the loss; expected a scalar", "masked_mean"),
    ("LossOfInteger", "loss", "int32[] as the loss; expected a scalar of floats", "masked_mean"),
    ("LossOfThree", "loss", "a tuple of 3; expected (loss, (experience, metrics))", "return ("),
    ("LossAlone", "loss", "float32[]; expected (loss, (experience, metrics))", "return ("),
    ("NoMetrics", "loss", "None as metrics; expected a dict", "return {}"),
    ("NoExperience", "loss", "as its second part; expected (loss, (", "return ("),
    ("MetricOfVector", "loss", "metric 'returns' float32[6, 8]", "take its mean"),
    ("MetricOfBool", "loss", "metric 'is_good' bool[]", "float32"),
    ("NetworksOnly", "optimize", "a dict; expected (networks, opt)", "return (networks, opt)"),
    ("Swapped", "optimize", "networks with updates and without policy, value", "as they came in"),
    ("CountsUpdatesInFloats", "optimize", "opt with updates float32[]", "as they came in"),
    ("IntegerNetworks", "new_networks", "count as int32[]", "new_opt"),
    ("NoNetworks", "new_networks", "returns None", "return statement"),
    ("FractionOfUpdate", "num_off_policy_optims_per_cycle", "returns 0.5", "return 0 while"),
]
CHECKS = {
    "experience_spec": "specs",
    "step_state_spec": "specs",
    "new_networks": "state",
    "num_off_policy_optims_per_cycle": "updates due",
}


@pytest.mark.parametrize(("name", "method", "seen", "remedy"), OF_SHAPES, ids=lambda x: x[:24])
def test_a_mistake_is_found_by_shapes(name: str, method: str, seen: str, remedy: str) -> None:
    agent = getattr(broken_agents, name)(SPEC, GoodConfig())
    with pytest.raises(UsageError) as error:
        check_contract(agent, run_spec(4))
    message = str(error.value)
    assert message.startswith(f"{name}.{method}") and "\n" not in message
    assert seen in message and remedy in message
    (found,) = findings(agent, "none else")
    assert found.level is Level.PROBLEM and found.name == CHECKS.get(method, method)
    assert f"{found.seen}; {found.remedy}" == message


def tiny_loop(agent_class: Any, **options: Any) -> sebulba.GymnasiumLoop:
    agent = agent_class(sebulba.env_spec(CountingEnv), GoodConfig())
    devices = {"inference_devices": [0], "update_devices": [0]}
    return sebulba.GymnasiumLoop(CountingEnv, agent, 4, **devices, **options)


@pytest.mark.parametrize("name", ["ColumnOfActions", "LossOfVector", "TakesFloat"])
def test_a_loop_refuses_the_agent_before_it_starts(name: str) -> None:
    with tiny_loop(getattr(broken_agents, name)) as loop:
        with pytest.raises(UsageError, match=rf"^{name}\."):
            loop.new_state(0, 5)
        state = tiny_loop(Good).new_state(0, 5)
        with pytest.raises(UsageError, match=rf"^{name}\."):
            loop.run(state, 2, 5)


def test_a_loop_that_never_updates_asks_nothing_of_the_update() -> None:
    with tiny_loop(broken_agents.LossOfVector, inference_only=True) as loop:
        loop.new_state(0, 5)


def test_what_the_agent_itself_raises_keeps_its_type_and_is_told_where() -> None:
    class Raises(Good):
        def loss(self, networks, opt, experience, key):
            return experience["no such part"]

    with pytest.raises(KeyError, match="no such part") as error:
        check_contract(Raises(SPEC, GoodConfig()), run_spec())
    assert error.value.__notes__.count("in Raises.loss, while it was traced") == 1


def test_agents_of_the_package_are_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = AGENTS["reinforce"].to_count()
    monkeypatch.setattr(type(agent), "step", None)
    check_contract(agent, run_spec())


def test_agents_of_plug_ins_are_traced_whatever_their_name(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = broken_agents.ColumnOfActions(SPEC, GoodConfig())
    monkeypatch.setattr(type(agent), "__module__", "sebulba_corridor")
    with pytest.raises(UsageError, match=r"^ColumnOfActions\.step"):
        check_contract(agent, run_spec())


def test_an_own_agent_of_many_is_traced() -> None:
    class Own(MultiAgent):
        def step(self, networks, step_state, env_step, *, explore=True):
            output, state = super().step(networks, step_state, env_step, explore=explore)
            return output._replace(action=of_step(output.action)), state

    config = MultiAgentConfig({"*": PPOConfig(torso=TorsoConfig(hidden_sizes=(4,)))})
    agent = Own(sebulba.env_spec(Turns), config)
    of_step = dict
    check_contract(agent, run_spec(4))
    (group,) = agent.groups
    of_step = lambda action: {group: action[group][:, :1]}  # noqa: E731
    with pytest.raises(UsageError, match=rf"^Own\.step.* actions with {group}.*\[B, A, \.\.\.\]"):
        check_contract(agent, run_spec(4))


def test_what_is_no_agent_or_half_of_one_is_refused() -> None:
    with pytest.raises(UsageError, match="LacksLoss lacks experience_spec, loss; define"):
        broken_agents.LacksLoss(SPEC, GoodConfig())  # type: ignore[abstract]
    with pytest.raises(UsageError, match="agent=the class Good is not an agent; use an instance"):
        sebulba.GymnasiumLoop(CountingEnv, Good, 4)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"ForgetsSuper.__init__ .*super\(\).__init__"):
        sebulba.GymnasiumLoop(CountingEnv, broken_agents.ForgetsSuper(SPEC, GoodConfig()), 4)


# Found by looking at programs, and by feeding and training.


@pytest.mark.parametrize(
    ("name", "check", "seen", "remedy"),
    [
        ("TwoNumbersOfUpdates", "updates due", "gives [1, 2] in one run", "one other number"),
        ("NumpyNoise", "purity", "step(explore=True) gives another program", "jax.random"),
        ("CountsOnSelf", "purity", "methods write self.calls", "keep it in the state"),
        ("KeepsArray", "purity", "methods write self.last", "keep it in the state"),
        ("UsesKeyTwice", "keys", "step uses a key that was used before (broken_agents", "split"),
        ("ReturnsUsedKey", "keys", "by the next step: the key that it returns", "next_key, key"),
        ("UsesKeyTwiceInLoss", "keys", "loss uses a key that was used before", "split"),
        ("AlwaysExplores", "explore", "draws random numbers, too", "where explore is False"),
        ("LooksAtNothing", "explore", "do not depend on networks", "compute them"),
        ("ReplicatesRows", "specs", "P() for row, which has a row for each", "P('learner')"),
        ("UnusedParameter", "gradients", "no gradient to target", "use it in the loss"),
        ("StopsGradient", "gradients", "no gradient to value", "use it in the loss"),
    ],
)
def test_a_mistake_is_found_in_programs(name: str, check: str, seen: str, remedy: str) -> None:
    (found,) = findings(name, check)
    assert (found.name, found.level) == (check, Level.PROBLEM)
    assert seen in found.seen and remedy in found.remedy


def test_a_step_that_is_compiled_twice_is_worth_a_note() -> None:
    (found,) = findings("WeakScale", "purity")
    assert (found.name, found.level) == ("purity", Level.NOTE)
    assert "step returns scale of a weak type" in found.seen and "dtype" in found.remedy


@pytest.mark.slow
def test_devices_may_learn_from_what_keys_of_their_own_draw() -> None:
    found = [e for e in events("DrawsByItsOwnKey", "devices") if isinstance(e, Finding)]
    (devices,) = [finding for finding in found if finding.name == "devices"]
    assert devices.level is Level.OK and "the update draws random numbers" in devices.seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "check", "seen"),
    [
        ("TimesZero", "gradients", "no gradient to bias"),
        ("NotANumber", "gradients", "loss not finite after"),
        ("IgnoresValid", "valid", "depends on actions of transitions that are not valid"),
        ("DividesByOwnCount", "devices", "on 4 devices networks differ by"),
        ("MeanOfOwnShare", "devices", "experience/mean differs by device"),
        ("AsksNumpyInCallback", "lockstep", "the same seed twice, but other"),
        ("WrongSign", "probes", "the better of two actions"),
        ("IgnoresTermination", "probes", "that nothing follows a termination"),
    ],
)
def test_a_mistake_is_found_in_training(
    name: str, check: str, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_checks, "MOST_CYCLES", 100)
    (found,) = findings(name, check)
    assert (found.name, found.level) == (check, Level.PROBLEM)
    assert seen in found.seen and found.remedy


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (broken_agents.ThawedConfig, "ThawedConfig is not frozen"),
        (broken_agents.PlainConfig, "PlainConfig is no dataclass"),
        (broken_agents.ListConfig, "ListConfig cannot be hashed"),
    ],
)
def test_a_configuration_that_may_change_is_found(config: Any, words: str) -> None:
    (found,) = findings("Good", "none else", config=config)
    assert (found.name, found.level) == ("config", Level.PROBLEM)
    assert words in found.seen and "frozen=True" in found.remedy


def test_an_agent_that_takes_no_probe_is_told_to_name_an_environment() -> None:
    (found,) = findings("NeedsImages")
    assert (found.name, found.level) == ("making", Level.PROBLEM)
    assert "observations must be images (broken_agents.py:" in found.seen
    assert "--env" in found.remedy


def test_an_agent_without_updates_is_not_trained() -> None:
    found = findings("NeverUpdates", *OF_UPDATES, "probes")
    assert {f.level for f in found} == {Level.NOTE}
    assert [f.name for f in found] == ["updates due", "valid", "devices", "probes"]


# Correct agents.


@pytest.mark.slow
def test_a_correct_agent_has_no_finding_and_every_check_is_tried() -> None:
    found = events("Good")
    assert [e for e in found if isinstance(e, Finding) and e.level is not Level.OK] == []
    assert {e.name for e in found if isinstance(e, Finding)} >= {
        *CONTRACT,
        *OF_UPDATES,
        "lockstep",
        "probes",
        "saving",
    }
    assert not [e for e in found if isinstance(e, Done) and e.because]
    (probes,) = [e for e in found if isinstance(e, Finding) and e.name == "probes"]
    assert "learned 6 of 6" in probes.seen


@pytest.mark.slow
@pytest.mark.parametrize("name", AGENTS)
def test_the_agents_of_the_package_keep_the_contract(name: str) -> None:
    assert findings(AGENTS[name].config, *OF_PROGRAMS) == []


# How it is named.


@pytest.mark.parametrize(
    "agent",
    [
        "tests.support.broken_agents:Good",
        "tests.support.broken_agents:make_good",
        broken_agents.make_good,
        Good,
        Good(SPEC, GoodConfig(learning_rate=0.25)),
        "sebulba.agents.impala:Impala",
        "sebulba.agents.configs:ImpalaConfig",
    ],
    ids=("class name", "function name", "function", "class", "agent", "ours", "configuration"),
)
def test_an_agent_is_named_in_many_ways(agent: Any) -> None:
    made = AgentSubject(agent).agent
    assert type(made).__name__ in ("Good", "Impala")
    if isinstance(agent, Good):
        assert made is agent


def test_its_environment_and_its_configuration_can_be_named() -> None:
    subject = AgentSubject(
        "tests.support.broken_agents:NeedsSize",
        config=broken_agents.NeedsConfig(size=3),
        env="CartPole-v1",
        steps_per_cycle=10,
    )
    assert subject.agent.config.size == 3 and subject.num_steps == 10
    assert subject.agent.spec.observation_space.shape == (4,)


@pytest.mark.parametrize(
    ("agent", "words"),
    [
        ("MyAgent", "must be 'module:attribute'"),
        ("my agents:Agent", "must be 'module:attribute'"),
        ("no_such_package:Agent", "names the module 'no_such_package', which is not found"),
        ("tests.support.broken_agents:God", "no attribute 'God'; the nearest are Good"),
        ("tests.support.broken_agents:GoodConfig", "is not an agent; use a subclass"),
        ("tests.support.broken_agents:NeedsSize", "NeedsConfig needs arguments"),
        (3, "agent=3 is not an agent"),
    ],
)
def test_what_names_no_agent_is_refused(agent: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        AgentSubject(agent)


# In a process of its own.


def test_the_command_prints_a_line_a_finding_and_writes_json(capsys, tmp_path) -> None:
    file = tmp_path / "report.json"
    agent = "tests.support.broken_agents:ColumnOfActions"
    assert cli.main(["check-agent", agent, "--json", str(file)]) == 1
    out = capsys.readouterr().out
    assert "PROBLEM  step: ColumnOfActions.step(explore=True) returns actions int32[8, 1]" in out
    assert "\n         -> drop the last dimension: action[:, 0]" in out
    assert "these need step without a problem" in out and f"\n{agent}: 1 problem, 1 note" in out
    assert json.loads(file.read_text())["problems"] == 1


def test_an_agent_that_cannot_be_made_is_a_finding() -> None:
    report = sebulba.check_agent(broken_agents.LacksLoss)
    (found,) = report.problems
    assert found.name == "making" and "lacks experience_spec, loss" in found.seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["no_such_package:Agent"], "is not found"),
        (["tests.support.broken_agents:Good", "--timeout", "0"], "positive number of seconds"),
        (["tests.support.broken_agents:Good", "--seed", str(2**40)], "must fit 32 bits"),
        (["tests.support.broken_agents:Good", "--steps-per-cycle", "0"], "at least 1"),
        (["tests.support.broken_agents:Good", "--json", "/nowhere/x.json"], "does not exist"),
        ([], "required"),
    ],
)
def test_wrong_usage_is_refused(capsys, argv: list[str], words: str) -> None:
    assert cli.main(["check-agent", *argv]) == cli.EXIT_USAGE
    assert words in capsys.readouterr().err
