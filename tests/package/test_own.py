"""An agent, a network, an environment and wrappers of one's own, from the command line."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from gymnasium import spaces

import sebulba
from benchmarks.__main__ import command
from sebulba.agents.configs import AgentConfig, ImpalaConfig, TorsoConfig, make_agent
from sebulba.agents.configs.agent_config import config_of
from sebulba.commands import cli, playing
from sebulba.configs.experiment import EnvConfig
from sebulba.configs.files import config_options, write_config_file
from sebulba.configs.presets import PRESETS
from sebulba.errors import UsageError
from sebulba.loops import evaluation
from sebulba.runs.configurations import start_of
from sebulba.runs.folder import RunFolder, choose_run_folder
from sebulba.runs.read_config import read_config
from sebulba.support import trust
from sebulba.support import user_code as own_code
from sebulba.support.user_code import is_attribute
from sebulba.types import EnvSpec
from tests.support import own
from tests.support.populations import Pairs

SMALL = [
    *("--num-envs", "4", "--steps-per-cycle", "5", "--num-inferencers-per-device", "1"),
    *("--inference-devices", "0", "--update-devices", "0", "--compile-cache", "off"),
    *("--metrics-interval-s", "0"),
]
AGENT = ["--agent", "tests.support.own:MyAgent", "--env.id", "tests.support.own:MyEnv"]
TRIPLED = "tests.support.own:MyWrapper(factor=3)"
SPEC = EnvSpec(spaces.Box(-1, 1, (3,)), spaces.Discrete(2, dtype=np.int32))


def read(*words: str):
    return read_config([*words], "sebulba train")


def refused(capsys, *argv: str) -> str:
    assert cli.main(argv) == cli.EXIT_USAGE
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the folder of a run of one's own agent in one's own environment and wrapper."""
    folder = tmp_path_factory.mktemp("runs") / "mine"
    words = ["train", *AGENT, "--env.wrappers", TRIPLED, "--agent.sizes", "6", *SMALL]
    assert cli.main([*words, "--total-env-steps", "80", "--run-dir", str(folder)]) == 0
    return folder


def stranger(monkeypatch, tmp_path: Path) -> None:
    """Let what was written until now be somebody else's."""
    monkeypatch.setenv(trust.KEY_VARIABLE, str(tmp_path / "another-key"))
    trust.signed("run", {})


# The agent, the environment and the wrapper.


@pytest.mark.slow
def test_the_run_names_them_as_they_were_typed(run):
    config = json.loads((run / "config.json").read_text())
    assert (
        config["agent_class"]
        == config["preset"].replace("--agent ", "")
        == "tests.support.own:MyAgent"
    )
    assert config["agent_config"] == "tests.support.own:MyConfig" and config["agent"]["sizes"] == [
        6
    ]
    assert config["env"]["id"] == "tests.support.own:MyEnv" and config["env"]["wrappers"] == [
        TRIPLED
    ]
    assert (run / "learning_curve.png").exists()


def test_it_is_evaluated_and_loaded(run, capsys):
    assert cli.main(["eval", str(run), "--episodes", "2", "--num-envs", "2"]) == 0
    mean = float(capsys.readouterr().out.split()[2])
    assert mean % 3 == pytest.approx(0) or mean % 1.5 == pytest.approx(0)
    policy = sebulba.load_policy(run)
    assert type(policy.agent) is own.MyAgent
    assert policy(np.zeros(3, np.float32))[0] in (0, 1)


def test_it_is_filmed(run, tmp_path, capsys):
    film = tmp_path / "mine.gif"
    assert cli.main(["video", str(run), "--episodes", "2", "--out", str(film)]) == 0
    assert "6 pictures, 1.2 s" in capsys.readouterr().out and film.stat().st_size > 100


def test_it_is_exported(run, tmp_path, capsys):
    assert cli.main(["export", str(run), "--to", "stablehlo", "--out", str(tmp_path / "e")]) == 0
    assert (tmp_path / "e/policy.stablehlo").exists()
    assert "differs from the policy by at most" in capsys.readouterr().out


@pytest.mark.slow
def test_it_is_resumed_and_another_agent_is_refused(run, capsys):
    assert cli.main(["resume", str(run), "--total-env-steps", "120"]) == 0
    assert "resumed at 80 env steps" in capsys.readouterr().out
    other = refused(capsys, "resume", str(run), "--agent", "tests.support.own:NamedAgent")
    assert (
        "agent_class is 'tests.support.own:MyAgent' in the run"
        " and 'tests.support.own:NamedAgent' now" in other
    )
    other = refused(capsys, "resume", str(run), "--env.wrappers", "tests.support.own:MyWrapper")
    assert "env.wrappers is ['tests.support.own:MyWrapper(factor=3)'] in the run" in other


@pytest.mark.slow
def test_it_is_benchmarked(tmp_path, monkeypatch, capsys):
    def run(command, **options):
        assert command[1:4] == ["-m", "sebulba", "train"]
        return subprocess.CompletedProcess(command, cli.main(command[3:]))

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr("sebulba.tools.bench.harness.commit", lambda: ("abc", None, False))
    words = [*AGENT, *SMALL, "--total-env-steps", "40", "--seeds", "1", "--results", str(tmp_path)]
    assert cli.main(["learn", *words], command) == 0
    record = json.loads((tmp_path / "learn-MyAgent.json").read_text())
    assert record["config"]["agent_class"] == "tests.support.own:MyAgent" and record["seeds"] == 1
    assert record["command"].startswith("python -m benchmarks learn tests.support.own:MyAgent ")


def test_it_is_in_the_list_of_runs(run, capsys):
    assert cli.main(["runs", str(run)]) == 0
    assert "MyAgent MyEnv seed 0" in capsys.readouterr().out


def test_help_shows_its_options(capsys):
    assert cli.main(["train", *AGENT, "--help-all"]) == 0
    shown = capsys.readouterr().out
    assert "--agent.discount FLOAT" in shown and "How much the next reward counts." in shown
    assert "--agent.sizes [INT [INT ...]]" in shown and "--agent.undescribed" in shown
    assert "--agent-class" not in shown and "(default: tests.support.own:MyEnv)" not in shown
    assert "tests.support.own:MyAgent, your own" in shown


def test_a_configuration_keeps_all_but_the_agent():
    _, config = read("cartpole", "--agent=tests.support.own:MyAgent", "--agent.discount", "0.5")
    ours = PRESETS["cartpole"].make()
    assert config.agent == own.MyConfig(discount=0.5) and not config.anneal_learning_rate
    assert (config.env, config.num_envs) == (ours.env, ours.num_envs)
    # With hyper-parameters of the same kind, those of the configuration stay.
    _, config = read("cartpole-ppo", "--agent", "tests.support.own:BarePPO")
    assert config.agent == PRESETS["cartpole-ppo"].make().agent and config.anneal_learning_rate
    assert type(make_agent(SPEC, config.agent, config.agent_class)) is own.BarePPO
    name, config = read("tests.support.own:NoConfig")
    assert (name, config.agent) == ("tests.support.own:NoConfig", AgentConfig())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--agent"], "--agent needs a value; use --agent my_package:MyAgent"),
        (["--agent", "MyAgent"], "agent='MyAgent' must be 'module:attribute'"),
        (
            ["--agent", "tests.support.own:MyEnv"],
            "tests.support.own:MyEnv' names .* not a subclass of sebulba.Agent",
        ),
        (["--agent", "tests.support.own:MyAgnt"], "no attribute 'MyAgnt'; the nearest are MyAgent"),
        (["--agent", "no.such:Agent"], "the module 'no.such', which is not found"),
        (
            ["--agent", "tests.support.own:NoDefault"],
            "NeedsSize needs arguments .* every field a default",
        ),
    ],
)
def test_what_is_no_agent_is_refused(capsys, words, message):
    assert re.search(message, refused(capsys, "train", "cartpole", *words))


def test_where_there_are_many_agents_the_hyper_parameters_have_to_name_theirs():
    spec = sebulba.env_spec(Pairs)
    with pytest.raises(UsageError, match=r"its hyper-parameters, MyConfig, do not name it"):
        make_agent(spec, own.MyConfig(), "tests.support.own:MyAgent")  # type: ignore[arg-type]


# Whose code it is.


def test_nothing_of_a_stranger_is_imported(run, monkeypatch, tmp_path, capsys):
    stranger(monkeypatch, tmp_path)
    monkeypatch.delitem(sys.modules, "tests.support.own")
    config = str(run / "config.json")
    for words, what in (
        (["eval", str(run)], "the environment tests.support.own:MyEnv"),
        (["resume", str(run)], "the class 'tests.support.own:MyConfig', which would be imported"),
        (["train", config], "the class 'tests.support.own:MyConfig', which would be imported"),
        (["bench", "train", str(run)], "the class 'tests.support.own:MyConfig'"),
    ):
        said = refused(capsys, *words)
        assert what in said and "--trust" in said
    with pytest.raises(
        UsageError, match=r"names the class 'tests.support.own:MyConfig', which would be"
    ):
        sebulba.load_policy(run)
    folder = RunFolder(run)
    _, ours = read("cartpole", "--run-dir", str(run), "--resume")
    with pytest.raises(UsageError, match=r"is to be resumed, which imports"):
        choose_run_folder(ours, "cartpole")
    with pytest.raises(UsageError, match=r"names the class"):
        folder.check_resumable(ours)
    assert "tests.support.own" not in sys.modules


def test_a_configuration_file_of_a_stranger_names_no_agent(tmp_path, monkeypatch):
    file = tmp_path / "theirs.json"
    file.write_text(
        json.dumps({"config": "cartpole", "options": {"agent": "tests.support.own:MyAgent"}})
    )
    monkeypatch.delitem(sys.modules, "tests.support.own")
    with pytest.raises(UsageError, match=r"names the agent tests.support.own:MyAgent, .*--trust"):
        read(str(file))
    assert "tests.support.own" not in sys.modules
    _, config = read(str(file), "--trust", "--agent.discount", "0.5")
    assert config.agent_class == "tests.support.own:MyAgent" and config.agent.discount == 0.5
    for option in ("agent.torso.kind", "env.wrappers"):
        file.write_text(
            json.dumps({"config": "cartpole", "options": {option: "tests.support.own:X"}})
        )
        with pytest.raises(UsageError, match=r"names the (network|wrapper) '?tests.support.own:X"):
            read(str(file))


# Networks.


@pytest.mark.slow
def test_a_network_of_ones_own_is_trained_and_loaded(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    words = ["tests.support.own:QUICK", *SMALL, "--total-env-steps", "40", "--run-dir", str(folder)]
    assert cli.main(["train", *words]) == 0
    policy = sebulba.load_policy(folder)
    assert policy.acting_networks["torso"]["MyTorso_0"]["mine"]["kernel"].shape == (3, 8)
    stranger(monkeypatch, tmp_path)
    with pytest.raises(
        UsageError, match=r"names the network 'tests.support.own:MyTorso', which would be"
    ):
        sebulba.load_policy(folder)


def networks_of(config, spec=SPEC):
    agent = make_agent(spec, config)
    return jax.eval_shape(agent.new_networks, jax.random.key(0))


def leaves(networks) -> set[str]:
    return {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(networks)}


def test_every_agent_with_a_torso_takes_one_of_ones_own():
    torso = TorsoConfig("tests.support.own:MyTorso")
    box = dataclasses.replace(SPEC, action_space=spaces.Box(-1, 1, (2,)))
    # Policy and value apart, one for both, and an actor with two critics.
    torsos = {"impala": 2, "ppo": 2, "dqn": 1, "r2d2": 1, "sac": 3, "ddpg": 3}
    for name, number in torsos.items():
        config = dataclasses.replace(PRESETS[name].make().agent, torso=torso)
        names = leaves(networks_of(config, box if name in ("sac", "ddpg") else SPEC))
        assert sum("['MyTorso_0']['mine']['kernel']" in leaf for leaf in names) == number, name


def test_a_network_of_several_parts_is_given_all():
    space = spaces.Dict(
        {"x": spaces.Box(-1, 1, (3,)), "image": spaces.Box(0, 255, (9, 9, 2), np.uint8)}
    )
    spec = dataclasses.replace(SPEC, observation_space=space)
    networks = networks_of(ImpalaConfig(torso=TorsoConfig("tests.support.own:OfParts")), spec)
    assert networks["policy"]["kernel"].shape == (3 + 2, 2)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("tests.support.own:Flat", r"returns \(1,\); it must return features \[N, F\]"),
        ("tests.support.own:NeedsFeatures", "cannot be made without arguments .*'features'"),
        (
            "tests.support.own:MyEnv",
            "is <class 'tests.support.own.MyEnv'>; it must be a flax module",
        ),
        ("tests.support.own:QUICK", "must be a flax module"),
        ("tests.support.own:MyTorsi", "no attribute 'MyTorsi'; the nearest are MyTorso"),
    ],
)
def test_what_is_no_network_is_refused(kind, message):
    with pytest.raises(UsageError, match=f"torso.kind='{kind}'.*{message}"):
        networks_of(ImpalaConfig(torso=TorsoConfig(kind)))


# Experiments.


def test_an_experiment_is_an_attribute_of_a_module_or_a_file(tmp_path, monkeypatch):
    assert read("tests.support.own:QUICK") == ("tests.support.own:QUICK", own.QUICK)
    assert read("tests.support.own:slow")[1] == read("tests.support.own:READY")[1] == own.slow()
    assert read("tests.support.own:QUICK", "--num-envs", "8")[1].num_envs == 8
    monkeypatch.setattr(sys, "path", [*sys.path])
    file = tmp_path / "my_own_preset.py"
    file.write_text(
        "import dataclasses\nfrom tests.support.own import MyAgent, QUICK\n"
        "quick = dataclasses.replace(QUICK, seed=7)\nclass Mine(MyAgent):\n    pass\n"
    )
    assert read(f"{file}:quick")[1].seed == 7
    assert read(f"{file}:Mine")[1].agent_class == "my_own_preset:Mine"
    assert choose_run_folder(own.QUICK, f"{file}:quick").path.name.startswith("quick-")


def test_a_run_is_a_configuration_for_others(run):
    _, saved = RunFolder(run).read_config()
    for word in (str(run), str(run / "config.json")):
        name, config = read(word)
        assert name == "tests.support.own:MyAgent" and config == dataclasses.replace(
            saved, run_dir=None
        )


@pytest.mark.slow
def test_an_edited_run_may_be_a_configuration_unless_it_names_code(run, tmp_path):
    file = tmp_path / "mine.json"
    record = json.loads((run / "config.json").read_text())
    file.write_text(json.dumps({**record, "seed": 9}))
    with pytest.raises(UsageError, match=r"names the class .* changed after it had been signed"):
        read(str(file))
    assert read(str(file), "--trust")[1].seed == 9
    folder = RunFolder(tmp_path / "ours")
    folder.create()
    folder.write_config(PRESETS["cartpole"].make(), "cartpole", [])
    record = json.loads(folder.config.read_text())
    file.write_text(json.dumps({**record, "seed": 9}))
    assert read(str(file))[1] == dataclasses.replace(PRESETS["cartpole"].make(), seed=9)


@pytest.mark.parametrize(
    "words",
    [
        ("tests.support.own:MyAgent", "--agent.undescribed", "--env.id", "tests.support.own:MyEnv"),
        (
            "cartpole",
            "--agent",
            "tests.support.own:MyAgent",
            "--agent.discount",
            "0.5",
            "--agent.sizes",
            "3",
        ),
        (
            "tests.support.own:QUICK",
            "--num-envs",
            "8",
            "--env.wrappers",
            TRIPLED,
            "tests.support.own:MyWrapper",
        ),
    ],
)
def test_a_configuration_file_may_be_of_one_s_own(words, tmp_path):
    name, config = read(*words)
    file = tmp_path / "tuned.json"
    default = start_of(name, trust=False, command="").config
    write_config_file(file, name, config_options(config, name, default))
    with pytest.raises(UsageError, match=r"names the .*tests.support.own:.*nothing says who wrote"):
        read(str(file))
    assert read(str(file), "--trust")[1] == dataclasses.replace(config, trust=True)


def test_a_folder_of_configuration_files_names_them(tmp_path):
    (tmp_path / "small.json").write_text('{"config": "cartpole", "options": {"num-envs": 8}}')
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "sweep.json").write_text('{"config": "cartpole", "options": [], "seeds": 1}')
    with pytest.raises(UsageError, match=r"use a file in it: [^ ]*small.json$"):
        read(str(tmp_path))
    assert read(str(tmp_path / "small.json"))[1].num_envs == 8


def test_hyper_parameters_may_be_the_default_of_an_argument():
    class Plain(sebulba.Agent):
        def __init__(self, spec, config=own.MyConfig(discount=0.25)):  # noqa: B008
            super().__init__(spec, config)

    class Generic(sebulba.Agent[own.MyConfig]):
        def __init__(self, spec, config: own.MyConfig = own.MyConfig(discount=0.25)):  # noqa: B008
            super().__init__(spec, config)

    for agent_class in (Plain, Generic):
        assert config_of(agent_class) == own.MyConfig(discount=0.25)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("tests.support.own:MyEnv", "must be a subclass of sebulba.Agent, an ExperimentConfig"),
        ("tests.support.own:Quick", "no attribute 'Quick'; the nearest are QUICK"),
        ("nowhere.py:quick", "configuration file nowhere.py does not exist"),
        ("examples/impala.py", "configuration 'examples/impala.py' is unknown"),
        ("tests", "configuration file tests/config.json does not exist"),
    ],
)
def test_what_is_no_experiment_is_refused(word, message):
    with pytest.raises(UsageError, match=message):
        read(word)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("json.py", "the module 'json' that Python finds in .*another name"),
        ("my-preset.py", "name that Python cannot import; use one such as my_code.py"),
        ("my.preset.py", "name that Python cannot import"),
    ],
)
def test_a_file_with_a_name_that_is_no_module_s_is_refused(name, message, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / name).write_text("quick = 3\n")
    with pytest.raises(UsageError, match=message):
        read(f"{tmp_path / name}:quick")


def test_a_file_may_stand_wherever_a_module_may(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    file = tmp_path / "all_in_one.py"
    file.write_text(
        "import gymnasium\nfrom tests.support.own import *\n"
        "gymnasium.register('InAFile-v0', entry_point=MyEnv)\n"
        "class Mine(MyAgent): ...\n"
    )
    words = ["--agent", f"{file}:Mine", "--env.id", f"{file}:MyEnv"]
    _, config = read("cartpole", *words, "--env.wrappers", f"{file}:MyWrapper(factor=2)")
    assert config.agent_class == "all_in_one:Mine"
    kinds = [each.split()[1] for each in config.env.named_code()]
    assert kinds == ["environment", "wrapper"], "a file counts as code that somebody has to trust"
    spec = sebulba.env_spec(config.env.id, wrappers=config.env.wrappers)
    assert spec.observation_space.shape == (3,)
    assert sebulba.env_spec(f"{file}:InAFile-v0").observation_space.shape == (3,)
    assert read("cartpole", "--agent.torso", f"{file}:MyTorso")[1].named_code()
    with pytest.raises(UsageError, match=r"env file .*nowhere.py does not exist"):
        sebulba.env_spec(f"{tmp_path}/nowhere.py:MyEnv")


@pytest.fixture
def process(tmp_path, monkeypatch):
    """Return what begins a command as another process does, in a folder; code lies in tmp_path."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("_imported", "_bases", "_folders_of_runs"):
        monkeypatch.setattr(own_code, name, type(getattr(own_code, name))())

    def begin(folder: str) -> None:
        (tmp_path / folder).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / folder)
        for name in ("_imported", "_bases", "_folders_of_runs"):
            getattr(own_code, name).clear()
        sys.path[:] = [one for one in sys.path if not one.startswith(str(tmp_path))]
        for name, module in [*sys.modules.items()]:
            if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
                del sys.modules[name]

    yield begin
    begin("end")


SOURCE = """
from tests.support.own import *
class Mine(MyAgent): ...
class Always(MyEnv):
    def step(self, action):
        return super().step(action)[0], {reward}, True, False, {{}}
"""


def write_code(folder: Path, reward: float, name: str = "from_elsewhere") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_text(SOURCE.format(reward=reward))


def first_reward(run: Path) -> float:
    env = sebulba.load_env(run)
    env.reset(seed=0)
    reward = env.step(0)[1]
    env.close()
    return float(reward)


@pytest.mark.slow
@pytest.mark.parametrize("code", ["code/from_elsewhere.py", "from_elsewhere"])
def test_a_run_finds_its_code_from_any_folder(code, process, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    write_code((tmp_path / "work" / code).parent, 1)
    process("work")
    words = ["--agent", f"{code}:Mine", "--env.id", f"{code}:MyEnv"]
    words += ["--env.wrappers", f"{code}:MyWrapper(factor=2)", "--run-dir", str(run)]
    assert cli.main(["train", "impala", *words, *SMALL, "--total-env-steps", "80"]) == 0
    process("other")
    assert cli.main(["eval", str(run), "--episodes", "2"]) == 0
    process("other")
    assert cli.main(["resume", str(run), "--total-env-steps", "160"]) == 0
    process("other")
    assert type(sebulba.load_policy(run).agent).__name__ == "Mine"
    process("other")
    stranger(monkeypatch, tmp_path)
    capsys.readouterr()
    assert cli.main(["eval", str(run)]) == cli.EXIT_USAGE
    assert "--trust" in capsys.readouterr().err and "from_elsewhere" not in sys.modules
    assert not any(one.startswith(str(tmp_path)) for one in sys.path), "a stranger's folder"


def trained_on(reward: float, process, tmp_path: Path, *words: str) -> Path:
    """Return a run in an environment of a file that all such runs call the same."""
    folder = f"work{reward}"
    write_code(tmp_path / folder, reward)
    process(folder)
    run = tmp_path / f"run{reward}"
    words = ("--env.id", "from_elsewhere.py:Always", "--run-dir", str(run), *words)
    words += ("--no-anneal-learning-rate",)
    assert cli.main(["train", "impala", *words, *SMALL, "--total-env-steps", "80"]) == 0
    return run


@pytest.mark.slow
def test_code_of_the_same_name_is_never_that_of_another_run(process, tmp_path):
    runs = {reward: trained_on(reward, process, tmp_path) for reward in (1, 7)}
    for reward, run in runs.items():
        process("other")
        assert first_reward(run) == reward
    process("other")
    assert first_reward(runs[1]) == 1
    with pytest.raises(UsageError, match=r"the run has a module 'from_elsewhere' in .*work7, and "):
        first_reward(runs[7])
    assert first_reward(runs[1]) == 1
    with pytest.raises(UsageError, match=r"nowhere/from_elsewhere.py does not exist"):
        sebulba.env_spec("nowhere/from_elsewhere.py:Always")


@pytest.mark.slow
def test_a_copy_where_one_is_comes_before_the_code_that_trained(process, tmp_path, capsys):
    run = trained_on(1, process, tmp_path)
    write_code(tmp_path / "copy", 5)
    process("copy")
    assert cli.main(["eval", str(run), "--episodes", "2"]) == 0
    assert "mean return 5.00" in capsys.readouterr().out
    assert cli.main(["resume", str(run), "--total-env-steps", "160"]) == 0
    assert json.loads((run / "config.json").read_text())["code_folders"] == [str(tmp_path / "copy")]


@pytest.mark.slow
def test_processes_find_the_code_of_a_run_and_a_run_goes_on_in_them(process, tmp_path):
    run = trained_on(3, process, tmp_path)
    process("other")
    words = ["--cluster.address", "processes", "--total-env-steps", "160"]
    assert cli.main(["resume", str(run), *words]) == 0
    assert json.loads((run / "config.json").read_text())["cluster"]["address"] == "processes"


def test_no_file_writes_to_the_terminal_by_its_name():
    assert not is_attribute("/tmp/\x1b[2K.py:Y") and not is_attribute("a\n.py:Y")
    assert is_attribute("/tmp/my code.py:Y")


# Wrappers.


def test_wrappers_go_around_the_environment_the_first_innermost():
    stack = "gymnasium.wrappers:FrameStackObservation(stack_size=2)"
    factory = sebulba.make_env_factory(
        "tests.support.own:MyEnv", wrappers=[TRIPLED, stack, own.MyWrapper], num_threads=None
    )
    env = factory(2, [0, 1])
    try:
        assert env.spec.observation_space.shape == (2, 3)
        first = env.reset()
        right = first.obs[:, -1, 1] < 0.5
        assert env.step(right.astype(np.int32)).reward.tolist() == [6.0, 6.0]
    finally:
        env.close()


@pytest.mark.parametrize(
    ("wrapper", "message"),
    [
        ("gymnasium.wrappers:FrameStackObservation", "required argument: 'stack_size'; it takes"),
        (
            "tests.support.own:MyWrapper(factr=3)",
            "unexpected keyword argument 'factr'; it takes factor,",
        ),
        ("tests.support.own:MyWrapper(3)", "must be written as 'gymnasium.wrappers:FrameStack"),
        ("tests.support.own:MyWrapper(factor=", "must be written as"),
        ("tests.support.own:MyWrapper(factor=open('x'))", "must be written as"),
        ("tests.support.own:MyWrapper(**{})", "must be written as"),
        ("tests.support.own:MyWraper", "no attribute 'MyWraper'; the nearest are MyWrapper"),
        ("MyWrapper", "wrapper='MyWrapper' must be 'module:attribute'"),
        ("tests.support.own:QUICK", "name a class or a function"),
        ("gymnasium.wrappers.vector:NormalizeObservation", "is for vector environments"),
        ("tests.support.own:no_env", "returned 3; it must return a gymnasium.Env"),
        ("tests.support.own:fails", "cannot be made: AssertionError: it does not fit"),
        (3, "must be 'module:attribute' or a function of an environment"),
    ],
)
def test_what_is_no_wrapper_is_refused_before_any_worker_starts(wrapper, message):
    with pytest.raises(UsageError, match=message):
        sebulba.env_spec("tests.support.own:MyEnv", wrappers=[wrapper], vectorization="async")


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ("CartPole-v1", "'CartPole-v1' is made by envpool; drop them; or pass backend='gymnasium'"),
        ("tests.envs.test_jax_envs:OneState", "is written in JAX; drop them"),
        ("sebulba/CongestionControl-v0", "is a vector environment by itself"),
        ("tests.support.populations:Pairs", "many; wrap it in a function of your own"),
    ],
)
def test_wrappers_are_for_single_environments_of_gymnasium(env, message):
    with pytest.raises(UsageError, match=message):
        sebulba.env_spec(env, wrappers=["tests.support.own:MyWrapper"])
    with pytest.raises(UsageError, match=r"must be a tuple of wrappers or their names"):
        sebulba.env_spec("tests.support.own:MyEnv", wrappers="tests.support.own:MyWrapper")


def test_ids_of_gymnasium_take_wrappers():
    stack = "gymnasium.wrappers:FrameStackObservation(stack_size=2)"
    spec = sebulba.env_spec("CartPole-v1", backend="gymnasium", wrappers=[stack])
    assert spec.observation_space.shape == (2, 4)


@pytest.mark.parametrize("wrapper", ["NormalizeObservation", "NormalizeReward"])
def test_running_statistics_in_a_wrapper_are_said_with_what_to_use_instead(wrapper):
    said = rf"{wrapper} around .* keeps running statistics.*use --agent.normalize-observations"
    wrappers = ["gymnasium.wrappers:TimeAwareObservation", f"gymnasium.wrappers:{wrapper}"]
    with pytest.warns(UserWarning, match=said):
        sebulba.env_spec("CartPole-v1", backend="gymnasium", wrappers=wrappers)


def test_an_evaluation_says_that_it_lacks_the_statistics_of_a_wrapper(monkeypatch, capsys):
    wrappers = ("gymnasium.wrappers:NormalizeObservation",)
    env = EnvConfig("CartPole-v1", backend="gymnasium", wrappers=wrappers)
    monkeypatch.setattr(playing, "run_to_play", lambda given: (None, env))
    monkeypatch.setattr(playing, "policy_to_play", lambda *arguments: None)
    monkeypatch.setattr(evaluation, "evaluate", lambda *arguments, **options: "played")
    with pytest.warns(UserWarning, match="the policy does not have them: it plays worse"):
        assert playing.evaluate(["runs/x"]) == 0
    assert capsys.readouterr().out == "played\n"
