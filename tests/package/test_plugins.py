"""Installed packages bring environments, presets and commands; a broken one stops nobody else."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest

import sebulba
from sebulba.commands import cli
from sebulba.configs.experiment import EnvConfig
from sebulba.configs.preset import Preset, for_task
from sebulba.configs.presets import NEUTRAL, PRESETS, from_packages
from sebulba.envs.factory import env_source, make_env_factory
from sebulba.errors import UsageError
from sebulba.runs.writers import find_writer
from sebulba.support import plugins
from sebulba.support.moved import MovedModules
from tests.docs.test_readme import blocks
from tests.support.needs import needs_compiler
from tests.support.plugin_files import install, install_project

ROOT = Path(__file__).parents[2]


class Walk(gymnasium.Env):
    """Ends after as many steps as it is told."""

    observation_space = gymnasium.spaces.Box(0, 100, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, length=3, render_mode=None):
        self.length, self.place = length, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.place += 1
        obs = np.full(1, self.place, np.float32)
        return obs, 1.0, self.place == self.length, False, {}


ENVIRONMENTS = {"Walk-v0": Walk, "Other-v0": Walk}
PRESET = Preset("PPO, a walk", lambda: for_task(NEUTRAL["ppo"].make(), "walks:Walk-v0", {}))
PRESET_BY_NAME = {"walk-ppo": PRESET}
said: list[list[str]] = []


def command(argv):
    said.append(argv)
    return 3 if argv else None


HERE = "tests.package.test_plugins"


@pytest.fixture
def path(tmp_path, monkeypatch):
    """Return a folder on Python's path, for metadata of packages."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_the_plug_in_of_the_documentation_works_as_shown(tmp_path):
    (toml,) = [text for _, language, text in blocks("docs/plugins.md") if language == "toml"]
    (python,) = [text for _, language, text in blocks("docs/plugins.md") if language == "python"]
    (shell,) = [text for _, language, text in blocks("docs/plugins.md") if language == "sh"]
    (tmp_path / "sebulba_corridor.py").write_text(python)
    install_project(tmp_path, toml)
    assert shell.startswith("pip install --editable .\n")
    words = ("sebulba --help", "sebulba train --help", shell.partition("\n")[2])
    script = 'set -eu\nsebulba() { python -m sebulba "$@"; }\n' + "\n".join(words)
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env={
            **os.environ,
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)]),
            "JAX_PLATFORMS": "cpu",
        },
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sebulba corridor ...                of the package sebulba-corridor" in done.stdout
    assert "corridor-ppo" in done.stdout and "PPO, a corridor" in done.stdout
    assert "corridor:Corridor-v0 (sebulba-corridor 0.1.0)" in done.stdout + done.stderr
    assert "The best return in a corridor of 8 steps is -8." in done.stdout
    assert (tmp_path / "runs/short/policy").is_dir()


def test_an_environment_is_found_by_its_prefix(path):
    install(path, "theirs", {"sebulba.environments": {"walks": f"{HERE}:ENVIRONMENTS"}})
    for env_id in ("walks:Walk-v0", "walks/Walk-v0"):
        assert sebulba.env_spec(env_id).name == env_id
        assert env_source(env_id).versions == {"theirs": "1.0"}
        env = make_env_factory(env_id, length=2)(1, [0])
        env.reset()
        ends = [bool(env.step(np.zeros(1, np.int32)).terminated[0]) for _ in range(2)]
        env.close()
        assert ends == [False, True]
        assert not EnvConfig(env_id).named_code()
    assert EnvConfig("their_module:Walk-v0").named_code()
    with pytest.raises(
        UsageError,
        match=r"env='walks:Walk-v1' is not an environment of the package theirs; "
        r"the nearest are walks:Walk-v0",
    ):
        make_env_factory("walks:Walk-v1")
    with pytest.raises(UsageError, match="lenght"):
        make_env_factory("walks:Walk-v0", lenght=3)


def test_a_file_in_a_folder_of_that_name_is_still_a_file():
    assert plugins._PREFIX.match("walks/mine.py:Walk") is None
    assert plugins._PREFIX.match("walks:Walk")[1] == "walks"


@pytest.mark.parametrize("value", ["PRESET", "PRESET_BY_NAME"])
def test_a_preset_is_found_by_its_name(path, value, capsys):
    install(path, "theirs", {"sebulba.presets": {"walk-ppo": f"{HERE}:{value}"}})
    assert "walk-ppo" in from_packages() and "walk-ppo" in PRESETS and "walk-ppo" in list(PRESETS)
    assert len(PRESETS) == len(list(PRESETS))
    assert PRESETS["walk-ppo"] is PRESET
    assert cli.main(["train", "walk-ppo", "--help"]) == 0
    assert "PPO, a walk" in capsys.readouterr().out


def test_a_command_gets_its_words_and_returns_the_exit_code(path, capsys):
    install(path, "theirs", {"sebulba.commands": {"stroll": f"{HERE}:command"}})
    said.clear()
    assert cli.main(["stroll", "--far"]) == 3 and cli.main(["stroll"]) == 0
    assert said == [["--far"], []]
    assert cli.main(["strol"]) == cli.EXIT_USAGE
    assert "use stroll" in capsys.readouterr().err


def test_a_package_that_cannot_be_imported_stops_only_who_asks_for_it(path, capsys):
    (path / "broken_plugin.py").write_text("import a_library_that_nobody_has\n")
    groups = ("sebulba.environments", "sebulba.presets", "sebulba.commands", "sebulba.writers")
    install(path, "broken", {group: {"damaged": "broken_plugin:X"} for group in groups})
    asked = (
        lambda: make_env_factory("damaged:Walk-v0"),
        lambda: PRESETS["damaged"],
        lambda: find_writer("damaged"),
    )
    words = (
        r"'damaged' is brought by the package broken, which cannot be imported: its entry point "
        r"damaged = broken_plugin:X \(sebulba\.\w+\) raises ModuleNotFoundError: No module named "
        r"'a_library_that_nobody_has'; pip install --upgrade broken, or pip uninstall broken"
    )
    for ask in asked:
        with pytest.raises(UsageError, match=words):
            ask()
    assert cli.main(["damaged"]) == cli.EXIT_USAGE
    assert "the command 'damaged' is brought by the package broken" in capsys.readouterr().err
    assert PRESETS["cartpole"].make().env.id == "CartPole-v1"
    assert cli.main(["--help"]) == 0 and cli.main(["train", "--help"]) == 0
    assert "damaged" in (shown := capsys.readouterr().out) and "cannot be used" in shown
    assert "broken_plugin" not in sys.modules


def test_two_packages_of_one_name_are_refused_and_others_not(path):
    entries = {"sebulba.presets": {"walk-ppo": f"{HERE}:PRESET"}}
    install(path, "first", entries)
    install(
        path, "second", {"sebulba.presets": {**entries["sebulba.presets"], "b": f"{HERE}:PRESET"}}
    )
    words = r"the preset 'walk-ppo' is brought by the packages (first and second|second and first)"
    with pytest.raises(UsageError, match=words):
        _ = PRESETS["walk-ppo"]
    assert PRESETS["b"] is PRESET


@pytest.mark.parametrize(
    ("group", "name", "ask"),
    [
        ("sebulba.presets", "cartpole", lambda: PRESETS["cartpole"]),
        ("sebulba.environments", "gymnax", lambda: make_env_factory("gymnax:CartPole-v1")),
        ("sebulba.writers", "wandb", lambda: find_writer("wandb")),
        ("sebulba.commands", "train", lambda: cli._command(["train", "--help"])),
    ],
)
def test_a_package_cannot_take_a_name_of_sebulba(path, group, name, ask, capsys):
    install(path, "theirs", {group: {name: f"{HERE}:ENVIRONMENTS"}})
    words = f"'{name}' belongs to Sebulba, and the package theirs also brings it; pip uninst"
    with pytest.raises(UsageError, match=words):
        ask()
    assert cli.main(["--help"]) == 0
    assert capsys.readouterr().out.count("sebulba train CONFIG [options]") == 1


@pytest.mark.parametrize(
    ("group", "ask", "words"),
    [
        (
            "sebulba.presets",
            lambda: PRESETS["odd"],
            r"is \[\]; it must be a sebulba.configs.preset",
        ),
        ("sebulba.environments", lambda: make_env_factory("odd:X"), r"has \[\] for 'odd'; it must"),
    ],
)
def test_a_value_of_another_kind_is_refused(path, group, ask, words):
    install(path, "theirs", {group: {"odd": f"{HERE}:said"}})
    said.clear()
    with pytest.raises(UsageError, match=words):
        ask()


def test_importing_sebulba_finds_no_packages():
    code = "import sys, sebulba.commands.cli; print('importlib.metadata' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout == "False\n", done.stderr


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["train", "congestion-ppo"], "configuration 'congestion-ppo'"),
        (["train", "ppo", "--env.id", "sebulba/CartPole-v0"], "env='sebulba/CartPole-v0'"),
        (["networks", "play", "runs/one"], "the command 'networks'"),
    ],
    ids=["preset", "environment", "command"],
)
def test_a_package_of_sebulba_that_is_not_installed_is_named(monkeypatch, capsys, words, what):
    monkeypatch.setattr(plugins, "_entries", lambda group, path: {})
    assert cli.main(words) == cli.EXIT_USAGE
    assert (
        f"{what} is of the package sebulba-networks, which is not installed; pip install "
        "sebulba-networks (in a checkout: pip install ./packages/sebulba-networks)"
    ) in capsys.readouterr().err


@needs_compiler
def test_old_names_of_modules_that_moved_import_the_new_ones():
    code = (
        "import sebulba.envs.networks.options as old, sebulba_networks.options as new\n"
        "from sebulba.tools.networks import fairness\n"
        "import sebulba.commands.networks, pickle\n"
        "kind = pickle.loads(b'csebulba.envs.networks.options\\nCongestionControlOptions\\n.')\n"
        "assert old is new and kind is new.CongestionControlOptions\n"
        "print(new.__name__, new.__spec__.name, fairness.__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    names = "sebulba_networks.options sebulba_networks.options sebulba_networks.tools.fairness\n"
    assert done.stdout == names, done.stderr
    words = ["-m", "sebulba.envs.networks.build"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=300)
    assert done.stdout.endswith(".so\n"), done.stderr


def test_old_names_within_the_package_import_the_new_ones():
    code = (
        "import sebulba\n"
        "from sebulba.tools.check.agent_check import check_agent\n"
        "from sebulba.tools.check.env_check import check_env\n"
        "print(check_env is sebulba.check_env, check_agent is sebulba.check_agent)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout == "True True\n", done.stderr


def test_an_old_name_says_which_package_has_the_module(monkeypatch):
    find = importlib.util.find_spec
    missing = lambda name: None if name == "sebulba_networks" else find(name)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", missing)
    words = r"sebulba.envs.networks is now sebulba_networks of the package sebulba-networks, which"
    for error in (UsageError, ModuleNotFoundError):
        with pytest.raises(error, match=words):
            MovedModules.find_spec("sebulba.envs.networks")
    assert MovedModules.find_spec("sebulba.envs.nothing") is None
    assert MovedModules.find_spec("sebulba") is None
