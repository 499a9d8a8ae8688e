"""Imports what names such as ``my_pkg:MyAgent`` and ``my_file.py:MyEnv`` name. Free of JAX."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from sebulba.errors import UsageError, refusing
from sebulba.support.checks import nearest, require

ATTRIBUTE = re.compile(r"([^\W\d][\w.]*|[^:]+\.py):[^\W\d][\w.]*")
"""``module:attribute`` or ``FILE.py:attribute``, which is not Gymnasium's ``module:Id-v0``."""

CODE_FOLDERS = "code_folders"
"""Entry of the records of runs and policies with what ``code_folders`` returned."""

_imported: set[str] = set()
"""Modules that ``import_module`` imported in this process."""

_bases: list[str] = []
"""Folders from which relative names of files were found in this process."""

_folders_of_runs: list[str] = []
"""Folders that ``find_code_in`` was given in this process, the last first."""


def is_attribute(value: str) -> bool:
    """Tell whether a text has the form ``module:attribute`` or ``FILE.py:attribute``."""
    return value.isprintable() and ATTRIBUTE.fullmatch(value) is not None


def load_attribute(name: str, value: str) -> Any:
    """Import what ``module:attribute`` or ``FILE.py:attribute`` names.

    Args:
      name: What the value was given for, for messages.

    Raises:
      UsageError: It has another form, or there is no such module or attribute.
    """
    rule = "must be 'module:attribute' or 'FILE.py:attribute'"
    require(is_attribute(value), name, value, rule, "use for example my_package:MyClass")
    module, _, path = value.partition(":")
    found = import_module(name, value, module)
    for attribute in path.split("."):
        if not hasattr(found, attribute):
            raise UsageError(
                f"{name}={value!r}: {module!r} has no attribute {attribute!r}"
                f"{nearest(attribute, _own_names(found))}"
            )
        found = getattr(found, attribute)
    return found


def _own_names(found: Any) -> list[str]:
    """Return the names of what is in a module or class, but for the modules that it imports."""
    return [one for one in dir(found) if not isinstance(getattr(found, one, None), ModuleType)]


def import_module(name: str, value: str, module: str) -> Any:
    """Import a module, or a file of Python, that ``value``, given for ``name``, names.

    Raises:
      UsageError: There is none. What the module raises itself is raised as it is.
    """
    if module.endswith(".py"):
        module = module_of_file(name, Path(module))
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module exists, but one that it imports does not
        raise UsageError(
            f"{name}={value!r} names the module {module!r}, which is not found; check the name, "
            "the folder you are in and PYTHONPATH"
        ) from error
    _imported.add(module)
    return found


def module_of_file(name: str, file: Path) -> str:
    """Return the module that a file of Python is, and let Python find it.

    Args:
      name: What the file was given for, for messages.

    Raises:
      UsageError: It is missing, or Python has another module of that name.
    """
    file = _found(name, file)
    if not file.stem.isidentifier():
        raise UsageError(
            f"{name} file {file} has a name that Python cannot import; use one such as my_code.py"
        )
    folder = str(file.absolute().parent)
    is_new = folder not in sys.path
    import_from(folder)
    origin = None
    with contextlib.suppress(ValueError):  # of a module without a spec, __main__
        found = importlib.util.find_spec(file.stem)
        origin = found.origin if found is not None else None
    if origin is None or not os.path.exists(origin) or not os.path.samefile(origin, file):
        sys.path[:] = [one for one in sys.path if not is_new or one != folder]
        raise UsageError(
            f"{name} file {file} has the name of the module {file.stem!r} that Python finds in "
            f"{origin}; give it another name"
        )
    return file.stem


def class_name(cls: type) -> str:
    """Return ``module:class``, as ``load_attribute`` takes it.

    Raises:
      UsageError: The class is inside a function, where nothing can import it.
    """
    if "<locals>" in cls.__qualname__:
        raise UsageError(
            f"class {cls.__qualname__} is inside a function, so no saved policy can import it; "
            "move it to the top level of its module"
        )
    return f"{cls.__module__}:{cls.__qualname__}"


def import_from(folder: str) -> None:
    """Let Python find modules in a folder, after all others but those of runs."""
    if folder not in sys.path:
        of_runs = (i for i, one in enumerate(sys.path) if one in _folders_of_runs)
        sys.path.insert(next(of_runs, len(sys.path)), folder)


def import_from_here() -> None:
    """Let ``my_package.envs:MyEnv`` be found in the current folder, after what is installed.

    Raises:
      UsageError: The current folder was deleted.
    """
    with refusing("the current folder was deleted", "change to an existing folder"):
        here = os.getcwd()
    if "" not in sys.path:
        import_from(here)


def code_folders(*classes: type) -> list[str]:
    """Return the folders from which code of one's own came here, other than installed code.

    A run keeps them, so that what it names is found from any folder.

    Args:
      classes: Whose modules count, too, besides those that ``import_module`` imported.
    """
    modules = {*_imported, *(cls.__module__ for cls in classes)}
    folders = {_folder_of(name.partition(".")[0]) for name in modules}
    return sorted({folder for folder in folders if folder is not None} | {*_bases})


def find_code_in(folders: Any) -> None:
    """Let Python find modules and files in the folders of a run, after all others.

    Only for records that are trusted: whoever names a folder names code.

    Args:
      folders: What ``code_folders`` returned when the record was written; what is not there is
        left out.

    Raises:
      UsageError: The run has a module whose name one of another run has in this process.
    """
    given = folders if isinstance(folders, list) else []
    named = [one for one in given if isinstance(one, str) and os.path.isabs(one)]
    there = [one for one in named if os.path.isdir(one)]
    others = {*_folders_of_runs}.difference(there)
    for module in [one for one in sys.modules if "." not in one] if others else ():
        if (loaded := _folder_of(module)) not in others:
            continue
        for folder in there:
            if Path(folder, f"{module}.py").exists() or Path(folder, module).is_dir():
                raise UsageError(
                    f"the run has a module {module!r} in {folder}, and this process has loaded "
                    f"another one, in {loaded}; use separate processes, or rename one of them"
                )
    sys.path += [one for one in there if one not in sys.path]
    _folders_of_runs[:] = [*there, *(one for one in _folders_of_runs if one not in there)]


def search_path() -> tuple[list[str], list[str]]:
    """Return where this process finds modules and files, for ``use_search_path`` of another."""
    return list(sys.path), [*_bases, *_folders_of_runs]


def use_search_path(path: list[str], folders: list[str]) -> None:
    """Find modules and files where the process does that called ``search_path``.

    What this machine does not have is left out.
    """
    sys.path.extend(one for one in path if one not in sys.path and os.path.exists(one))
    _folders_of_runs[:] = [one for one in folders if os.path.isdir(one)]


def _found(name: str, file: Path) -> Path:
    """Return a file; one with a relative name may be relative to a folder of a run."""
    for base in ("", *_bases, *_folders_of_runs):
        if os.path.isfile(os.path.join(base, file)):
            if not file.is_absolute() and (folder := base or os.getcwd()) not in _bases:
                _bases.append(folder)
            return Path(base, file)
    raise UsageError(f"{name} file {file} does not exist; check its path")


def _folder_of(package: str) -> str | None:
    """Return where Python found a package or module; None if it is installed, or a script."""
    found = getattr(sys.modules.get(package), "__dict__", {})  # no getattr: some import by it
    paths = [*found.get("__path__", ()), found.get("__file__") or ""]
    if package in ("sebulba", "__main__") or not paths[0]:
        return None
    folder = os.path.dirname(os.path.realpath(paths[0]))
    library = os.path.realpath(sysconfig.get_path("stdlib"))
    is_installed = {"site-packages", "dist-packages"} & set(Path(folder).parts)
    return None if is_installed or f"{folder}/".startswith(f"{library}/") else folder
