"""The package as a whole: dependencies point one way, imports are cheap, the wheel is complete."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "sebulba"
NETWORKS, EXTERNAL, SWEEP, LEAGUE, OFFLINE, BOARD, PQN, SETS = PACKAGES = [
    ROOT / f"packages/sebulba-{name}"
    for name in ("networks", "external", "sweep", "league", "offline", "board", "pqn", "sets")
]


def modules_in(root: Path, package: str) -> dict[str, Path]:
    """Return the files of a package that is in ``root``, by the names of the modules."""
    return {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for path in (root / package).rglob("*.py")
    }


MODULES = modules_in(ROOT, "sebulba")
OF_NETWORKS = modules_in(NETWORKS, "sebulba_networks")
OF_EXTERNAL = modules_in(EXTERNAL, "sebulba_external")
OF_LEAGUE = modules_in(LEAGUE, "sebulba_league")
APART = {**OF_NETWORKS, **OF_EXTERNAL, **modules_in(SWEEP, "sebulba_sweep"), **OF_LEAGUE}
APART |= modules_in(OFFLINE, "sebulba_offline")
APART |= modules_in(BOARD, "sebulba_board")
APART |= modules_in(PQN, "sebulba_pqn")
APART |= modules_in(SETS, "sebulba_sets")
EVERY = {**MODULES, **APART}

ORDER = (
    *("errors", "types", "support", "agent", "options"),
    *("envs", "metrics", "transport", "inference", "learning", "agents"),
    *("cluster", "policies", "checkpoints", "loops"),
    *("configs", "video", "runs", "tools", "commands"),
    "__main__",
)
"""The rooms, by folder or module below sebulba: one imports from those before it only."""

# What a room may import, where that is less than all before it.
CONTRACTS = {"errors", "types", "support", "agent", "options"}
ALLOWED = {
    "errors": set(),
    "types": set(),
    "support": {"errors", "types"},
    "agent": {"types", "errors"},
    "options": {"errors", "support"},
    "envs": CONTRACTS,
    "metrics": CONTRACTS,
    "transport": CONTRACTS,
    "inference": CONTRACTS | {"envs", "metrics", "transport"},
    "learning": CONTRACTS | {"metrics", "transport"},
    "agents": CONTRACTS,
    "policies": CONTRACTS | {"agents"},
    "checkpoints": CONTRACTS | {"transport"},
    "configs": {"errors", "support", "options", "agents"},
}


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def imports(module: str, *, at_import: bool) -> set[str]:
    """Return the modules of both packages that ``module`` imports.

    Args:
      module: Full name, of this package or of that of the networks.
      at_import: Only what runs when it is imported; otherwise also imports in functions and for
        type checkers.
    """
    return named_in(EVERY[module], at_import=at_import) & EVERY.keys() - {module}


def named_in(path: Path, *, at_import: bool) -> set[str]:
    """Return what a file imports: modules, and the names that it takes from them."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.update({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)})
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        if at_import and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return
        if at_import and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


@pytest.mark.parametrize("module", sorted(m for m in MODULES if m != "sebulba"))
def test_dependencies_point_one_way(module):
    own = room(module)
    assert own in ORDER, f"say in ORDER where {own} stands"
    before = set(ORDER[: ORDER.index(own)])
    imported = imports(module, at_import=False)
    assert not imported & APART.keys()
    rooms = {room(one) for one in imported} - {"", own}
    assert rooms <= before & ALLOWED.get(own, before)


def test_the_package_imports_nothing_of_a_checkout():
    outside = {"benchmarks", "docs", "examples", "tests"}
    rooms = {
        module: {name.partition(".")[0] for name in named_in(path, at_import=False)} & outside
        for module, path in MODULES.items()
    }
    assert not {module: found for module, found in rooms.items() if found}


def undescribed_fields(*sources: str) -> list[str]:
    """Return the fields of dataclasses and NamedTuples that no docstring line follows.

    A field that a base describes needs no other line.
    """
    found, described, bases = [], set(), {}
    for node in (node for source in sources for node in ast.walk(ast.parse(source))):
        if not isinstance(node, ast.ClassDef):
            continue
        bases[node.name] = [ast.unparse(base).partition("[")[0] for base in node.bases]
        marks = [ast.unparse(mark) for mark in (*node.decorator_list, *node.bases)]
        if not any("dataclass" in mark or "NamedTuple" in mark for mark in marks):
            continue
        for field, after in zip(node.body, [*node.body[1:], None], strict=True):
            if not isinstance(field, ast.AnnAssign) or "ClassVar" in ast.unparse(field.annotation):
                continue
            is_described = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            name = ast.unparse(field.target)
            if is_described:
                described.add((node.name, name))
            elif not name.startswith("_"):
                found.append((node.name, name))

    def is_inherited(cls: str, name: str) -> bool:
        return (cls, name) in described or any(is_inherited(b, name) for b in bases.get(cls, ()))

    return [f"{cls}.{name}" for cls, name in found if not is_inherited(cls, name)]


def test_every_field_has_a_docstring_line():
    source = "@dataclass\nclass A:\n    x: int\n    y: int = 0\n    'Y.'\n"
    below = "@dataclass\nclass B(A):\n    x: int = 1\n    y: int = 1\n"
    assert undescribed_fields(source, below) == ["A.x", "B.x"]
    assert not undescribed_fields(*(path.read_text() for path in EVERY.values()))


def test_there_is_no_import_cycle():
    graph = {module: imports(module, at_import=True) for module in EVERY}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path, module))
        if module not in done:
            for imported in sorted(graph[module]):
                visit(imported, (*path, module))
            done.add(module)

    for module in sorted(graph):
        visit(module, ())


def test_a_planted_import_is_seen(monkeypatch, tmp_path):
    planted = tmp_path / "planted.py"
    planted.write_text("def f():\n    from sebulba.agents import impala\n")
    monkeypatch.setitem(EVERY, "sebulba.inference.planted", planted)
    assert "sebulba.agents.impala" in imports("sebulba.inference.planted", at_import=False)
    assert not imports("sebulba.inference.planted", at_import=True)


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_what_the_command_line_needs_imports_no_jax():
    code = (
        "import os, sys\n"
        "before = dict(os.environ)\n"
        "import sebulba, sebulba.commands.cli, sebulba.configs.presets\n"
        "import sebulba.runs.folder\n"
        "assert dict(os.environ) == before\n"
        "heavy = {'jax', 'flax', 'envpool', 'gymnasium', 'matplotlib', 'rich', 'tensorboardX'}\n"
        "print(sorted(heavy & sys.modules.keys()))\n"
    )
    assert run_python(code) == "[]\n"


@pytest.mark.slow
def test_importing_everything_touches_no_device_and_no_environment_variable():
    modules = sorted(m for m in EVERY if not m.endswith("__main__"))
    code = (
        "import importlib, os, sys\n"
        "import jax, flax, envpool, matplotlib, pettingzoo\n"
        "before = dict(os.environ)\n"
        f"for module in {modules!r}: importlib.import_module(module)\n"
        "from jax._src import xla_bridge\n"
        "print(xla_bridge.backends_are_initialized(), dict(os.environ) == before)\n"
    )
    assert run_python(code) == "False True\n"


def test_everything_that_the_package_promises_is_there():
    import sebulba

    for name in sebulba.__all__:
        assert getattr(sebulba, name) is not None
    assert sorted(sebulba.__all__) == sebulba.__all__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = sebulba.nothing


def test_the_version_is_that_of_the_newest_release(monkeypatch):
    import sebulba

    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["versioningit"]
    releases = re.findall(r"^## \[(\d.*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert (
        tool["default-version"] == releases[0] and tool["vcs"]["default-tag"] == f"v{releases[0]}"
    )
    citation = (ROOT / "CITATION.cff").read_text()
    assert f'version: "{releases[0]}"' in citation
    assert sebulba.__version__ == importlib.metadata.version("sebulba")

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert sebulba.__version__ == "0+unknown"


def test_the_rooms_at_the_top_are_relative_links():
    for name in ("agents", "configs", "loops"):
        link = ROOT / name
        assert link.is_symlink() and str(link.readlink()) == f"sebulba/{name}"


NOT_COPIED = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
BUILD = """
import sys
from setuptools.build_meta import build_sdist, build_wheel
target = sys.argv[1]  # setuptools changes the words
build_sdist(target)
build_wheel(target)
"""


def build(copy: Path, folder: Path) -> None:
    """Build sdist and wheel of the package in ``copy`` into ``folder``."""
    command = [sys.executable, "-c", BUILD, str(folder)]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_nothing_else_and_the_sdist_the_documents(tmp_path):
    copy = tmp_path / "copy"
    trained = [path for path in (PACKAGE / "policies/trained").rglob("*") if path.is_file()]
    data = [PACKAGE / "py.typed", *trained]
    documents = [*(ROOT / "docs").rglob("*.*"), *(ROOT / "examples").rglob("*.*")]
    documents += [*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.json")]
    documents += [*(package / "README.md" for package in PACKAGES), *APART.values()]
    documents += [ROOT / "tests/package/test_package.py", *ROOT.glob("[A-Z]*.*"), ROOT / "Makefile"]
    documents = [path for path in documents if path.suffix != ".pyc" and path.is_file()]
    for path in [ROOT / "pyproject.toml", *documents, *PACKAGE.rglob("*.py"), *data]:
        target = copy / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    (copy / "agents").symlink_to("sebulba/agents")
    for package in PACKAGES:
        to = copy / package.relative_to(ROOT)
        shutil.copytree(package, to, ignore=NOT_COPIED, dirs_exist_ok=True)
    (copy / "LICENSE").write_bytes((ROOT / "LICENSE").read_bytes())
    build(copy, tmp_path)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {str(path.relative_to(ROOT)) for path in documents} <= inside
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = next(name for name in names if name.endswith("METADATA"))
        metadata = archive.read(info).decode()
        entry_points = archive.read(info.replace("METADATA", "entry_points.txt")).decode()
    files = {str(path.relative_to(ROOT)) for path in (*MODULES.values(), *data)}
    assert {name for name in names if ".dist-info/" not in name} == files
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "sebulba = sebulba.commands.cli:entry_point" in entry_points
    for wanted in (
        "Version: 0.2.0\n",
        "License-Expression: Apache-2.0",
        "Author: The Sebulba authors",
        "cuda",
        "tpu",
    ):
        assert re.search(wanted, metadata), wanted


def wheel_of(package: Path, tmp_path: Path) -> tuple[set[str], list[str]]:
    """Return the files of a package's wheel, and the packages that it needs without extras."""
    copy = tmp_path / "copy"
    shutil.copytree(package, copy, ignore=NOT_COPIED)
    build(copy, tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = next(name for name in names if name.endswith("METADATA"))
        needed = re.findall(r"Requires-Dist: ([\w-]+)[^;\n]*\n", archive.read(info).decode())
    assert any(name.endswith("licenses/LICENSE") for name in names)
    return {name for name in names if ".dist-info/" not in name}, needed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "needed"),
    [
        (NETWORKS, ["sebulba"]),
        (EXTERNAL, ["msgpack", "numpy"]),  # a client needs no JAX
        (SWEEP, ["sebulba", "optuna"]),
        (LEAGUE, ["sebulba"]),
        (SETS, ["sebulba"]),
        (OFFLINE, ["sebulba"]),
        (BOARD, ["sebulba", "starlette", "uvicorn"]),
        (PQN, ["sebulba"]),
    ],
)
def test_the_wheel_of_each_package_is_whole_and_needs_no_more(package, needed, tmp_path):
    names, found = wheel_of(package, tmp_path)
    root = package / package.name.replace("-", "_")
    data = [root / "py.typed", *root.glob("engine/*"), *root.glob("jax_call/*.cc")]
    data += [*root.glob("*.css"), *root.glob("*.js")]
    files = {str(path.relative_to(package)) for path in (*root.rglob("*.py"), *data)}
    assert (names, found) == (files, needed)


def test_packages_bring_what_sebulba_says_that_they_bring():
    from sebulba.support import plugins

    files = (ROOT / "packages").glob("*/pyproject.toml")
    projects = [tomllib.loads(file.read_text())["project"] for file in files]
    for group, said in plugins._APART.items():
        brought = {
            name: project["name"]
            for project in projects
            for name in project["entry-points"].get(group.name, {})
        }
        assert said == brought
