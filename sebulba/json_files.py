"""Reading the JSON files of a run folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sebulba.errors import UsageError


def read_json_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a run.

    Raises:
      UsageError: It is missing or damaged.
    """
    try:
        record = json.loads(file.read_text())
    except OSError as error:
        raise UsageError(
            f"{file} cannot be read ({error.strerror}); give the folder of a run, such as runs/NAME"
        ) from error
    except ValueError as error:
        raise UsageError(f"{file} is damaged ({error}); restore it or train again") from error
    if not isinstance(record, dict):
        raise UsageError(f"{file} is damaged (not a JSON object); restore it or train again")
    return record
