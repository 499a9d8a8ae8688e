"""Reads JSON files, and writes files and folders that are whole even if the process is killed."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import re
import shutil
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from sebulba.errors import UsageError, refusing, shown

PARTIAL = ".partial-"
"""Prefix of the name of a file or folder that is being written; nothing ever reads such a one."""
AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Of Linux: names are those of the working directory; two names are exchanged."""
MOST_JSON_BYTES = 2**26
"""Bytes of a JSON file that is read; those of a run have some thousands."""
MOST_NESTED = 100
"""Levels of a JSON object that is read; what goes through it calls itself for each."""


def absolute(path: str | Path) -> Path:
    """Return the path from the root: an environment may change the working directory later."""
    try:
        return Path(os.path.abspath(path))
    except OSError:  # the working directory was deleted
        return Path(path)


def parse_json(text: str | bytes, make_object: Callable | None = None) -> Any:
    """Return what a JSON text says.

    Args:
      make_object: Makes an object from its pairs of keys and values; None makes a dict.

    Raises:
      ValueError: It is no JSON, is not UTF-8, or is nested too deeply to be read.
    """
    try:
        text = text if isinstance(text, str) else text.decode()
        return json.loads(text, object_pairs_hook=make_object)
    except RecursionError as error:
        raise ValueError("its JSON is nested too deeply") from error


def check_regular(file: Path, *, links: bool = True, most: int | None = None) -> None:
    """Raise UsageError if a file is a pipe or a device, reading which might never end.

    Args:
      file: It need not exist.
      links: Let it be a link, which may lead anywhere.
      most: Bytes that it may have; None lets it have any number.
    """
    if not links:
        check_no_link(file)
    # os.path's functions are False for names that no file can have.
    if os.path.exists(file) and not os.path.isfile(file):
        raise UsageError(f"{file} is not a regular file; give another")
    if most is not None and os.path.exists(file) and os.path.getsize(file) > most:
        raise UsageError(f"{file} has more than {most:,} bytes; no run wrote it")


def check_folder_of(file: str | Path | None, option: str = "") -> None:
    """Raise UsageError unless the folder exists in which ``file``, if any, will be written."""
    if file is not None and not os.path.isdir(absolute(file).parent):
        where = f"{option} {shown(str(file))}".strip()
        raise UsageError(f"{where} is in a folder that does not exist; make it")


def make_folder(folder: Path, option: str) -> None:
    """Make the folder that ``option`` names, if it is not there; UsageError if it cannot be."""
    with refusing(f"{option} {shown(str(folder))} cannot be made", "use another"):
        folder.mkdir(parents=True, exist_ok=True)


def check_no_link(path: Path) -> None:
    """Raise UsageError if a file or folder is a link, which may lead anywhere."""
    if os.path.islink(path):
        raise UsageError(
            f"{path} is a link, which no run makes; replace it by the file that it points to"
        )


def read_json_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a run.

    Raises:
      UsageError: The file is missing or damaged.
    """
    try:
        return _json_object(file, parse_json)
    except OSError as error:
        raise UsageError(
            f"{file} cannot be read ({error.strerror}); give the folder of a run, such as runs/NAME"
        ) from error
    except ValueError as error:
        raise UsageError(f"{file} is damaged ({error}); restore it or train again") from error


def read_edited_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file that people edit; a byte order mark is skipped.

    Raises:
      UsageError: It cannot be read, is not JSON, or has a key twice; the line and remedy are named.
    """
    try:
        return _json_object(file, _parse_edited)
    except OSError as error:
        raise UsageError(f"{file} cannot be read ({error.strerror}); use another file") from error
    except json.JSONDecodeError as error:
        raise UsageError(
            f"{file} is not JSON: line {error.lineno}, column {error.colno}: {error.msg}; correct "
            "that line (JSON has no comments, no comma after the last value, and double quotes)"
        ) from error
    except ValueError as error:
        raise UsageError(f"{file} is not usable ({error}); correct it") from error


def _json_object(file: Path, parse: Callable[[bytes], Any]) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
      OSError: It cannot be read.
      ValueError: It is too large, nested too deeply, or no JSON object.
      UsageError: It is a pipe or a device.
    """
    check_regular(file)
    if file.stat().st_size > MOST_JSON_BYTES:
        raise ValueError(f"it has more than {MOST_JSON_BYTES:,} bytes")
    record = parse(file.read_bytes())
    _check_depth(record)
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    return record


def _parse_edited(data: bytes) -> Any:
    """Return what a JSON text says, with or without a byte order mark.

    Raises:
      ValueError: It is no JSON, or has a key twice.
    """
    text = data.decode("utf-8-sig")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        given = dict(pairs)
        if len(given) < len(pairs):
            keys = [key for key, _ in pairs]
            key = next(key for key in keys if keys.count(key) > 1)
            raise ValueError(f"the key {shown(key)} occurs twice, {_in_lines(text, {key})}")
        return given

    return parse_json(text, once)


def lines_of_keys(file: Path, *options: str) -> str:
    """Return in which lines of a file that people edit keys are, such as "in line 2 and 3".

    Args:
      options: Dotted names; each is a key as it is, or nested with its last part as the key.
    """
    text = file.read_text(encoding="utf-8-sig")
    keys = {key for name in options for key in (name, name.rpartition(".")[2])}
    return _in_lines(text, keys)


def _in_lines(text: str, keys: Collection[str]) -> str:
    is_key = [re.compile(re.escape(json.dumps(key)) + r"\s*:") for key in keys]
    lines = enumerate(text.splitlines(), 1)
    numbers = [str(n) for n, line in lines if any(key.search(line) for key in is_key)]
    return f"in line {' and '.join(numbers)}"


def _check_depth(record: Any) -> None:
    """Raise ValueError if a JSON value has more than ``MOST_NESTED`` levels."""
    level = [record]
    for _ in range(MOST_NESTED + 1):
        inner = [
            v.values() if isinstance(v, dict) else v for v in level if isinstance(v, dict | list)
        ]
        level = [value for values in inner for value in values]
    if level:
        raise ValueError(f"its JSON has more than {MOST_NESTED} levels")


def write_json(file: str | Path, record: Mapping[str, Any]) -> None:
    """Write a report as JSON that people can read: a list of numbers or words takes one line.

    Raises:
      UsageError: The file cannot be written.
    """
    flat_list = re.compile(r"\[\n\s+([^\[\]{}]*?)\n\s*\]")
    text = json.dumps(record, indent=2)
    text = flat_list.sub(lambda found: "[" + re.sub(r"\n\s+", " ", found[1]) + "]", text)
    write_report(file, text + "\n")


def write_report(file: str | Path, text: str) -> None:
    """Write a file that somebody named; UsageError if it cannot be written."""
    with refusing(f"{shown(str(file))} cannot be written", "use another name"):
        Path(file).write_text(text, encoding="utf-8")


@contextlib.contextmanager
def whole(file: Path) -> Iterator[Path]:
    """Yield another name for a file, which gets its own once it is written.

    Nothing is left if that fails; a full disk has no room for parts of files.
    """
    partial = file.with_name(f"{PARTIAL}{file.name}")
    try:
        yield partial
        if partial.exists():
            partial.replace(file)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def write_whole(file: Path, text: str) -> None:
    """Write a file such that it is never there in part, even if the process is killed."""
    with whole(file) as partial, open(partial, "w", encoding="utf-8") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())


def dataclass_from_json(cls: type, fields: Mapping[str, Any]) -> Any:
    """Rebuild a dataclass from ``dataclasses.asdict`` after a trip through JSON.

    A class whose ``of_record(fields)`` completes records of earlier versions is asked for it.
    """
    fields = getattr(cls, "of_record", dict)(fields)
    hints = typing.get_type_hints(cls)

    def restore(hint: Any, value: Any) -> Any:
        if dataclasses.is_dataclass(hint) and isinstance(hint, type) and isinstance(value, dict):
            return dataclass_from_json(hint, value)
        # A list was a tuple: JSON has no tuples, and frozen configurations have no lists.
        return tuple(restore(None, item) for item in value) if isinstance(value, list) else value

    return cls(**{name: restore(hints[name], value) for name, value in fields.items()})


def flat(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a nested mapping by dotted name."""
    for name, value in record.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def flush_to_disk(folder: Path) -> None:
    """Flush everything in ``folder``, so that it survives a loss of power."""
    for path, _, names in os.walk(folder):
        for name in names:
            with open(Path(path, name), "rb") as file:
                os.fsync(file.fileno())
        flush_folder_to_disk(Path(path))


def flush_folder_to_disk(folder: Path) -> None:
    """Flush the names of what is directly in ``folder``, so that they survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` make a folder, which then takes the place of ``folder``.

    Args:
      folder: The folder to replace; it need not exist yet.
      write: Makes and fills the folder at the path it is given; if it raises, ``folder`` stays.
    """
    new, old = folder.with_name(f"{PARTIAL}{folder.name}"), _aside(folder)
    shutil.rmtree(new, ignore_errors=True)
    try:
        write(new)
        flush_to_disk(new)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    take_place(new, folder, old)


def take_place(new: Path, folder: Path, aside: Path) -> None:
    """Let ``new`` have the name of ``folder``, at once where the file system can, and delete that.

    Args:
      new: A folder that is whole and on the disk.
      folder: The one to replace; it need not exist.
      aside: Name that ``folder`` has for a moment where names cannot be exchanged: there a kill may
        leave that name and not the other.

    Raises:
      OSError: ``new`` cannot be renamed; ``folder`` is as it was.
    """
    if not folder.exists():
        new.rename(folder)
    elif exchange(new, folder):
        aside = new
    else:
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
        try:
            new.rename(folder)
        except OSError:
            aside.rename(folder)
            raise
    flush_folder_to_disk(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)


def exchange(one: Path, other: Path) -> bool:
    """Let two files or folders have each other's name, at once.

    Returns:
      False if the system or the file system cannot; nothing has changed then.
    """
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):  # not of Linux, or an old glibc
        return False
    names = os.fsencode(one), os.fsencode(other)
    return rename(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE) == 0


def put_right(folder: Path) -> None:
    """Put the old ``folder`` back if ``replace_folder`` was killed after moving it aside."""
    if not folder.exists() and _aside(folder).exists():
        _aside(folder).rename(folder)


def _aside(folder: Path) -> Path:
    return folder.with_name(f"{PARTIAL}old-{folder.name}")
