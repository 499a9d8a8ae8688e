"""The guide to many agents: its environment and its tree are as printed; test_pages runs it all."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import sebulba

PAGE = (Path(__file__).parents[2] / "docs" / "many-agents.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.S)


def test_the_environment_and_its_tree_are_as_printed(tmp_path, monkeypatch):
    (tmp_path / "tag.py").write_text(BLOCKS[0][1])
    monkeypatch.syspath_prepend(tmp_path)
    printed = next(text for kind, text in BLOCKS if kind == "text")
    assert sebulba.describe(sebulba.env_spec("tag:Tag")) == printed.strip()
    adapter = sebulba.make_env_factory("tag:Tag")(2, [0, 1])
    output = adapter.reset()
    for _ in range(45):
        x = output.obs["agents"]["observation"][..., 0]
        output = adapter.step({"agents": x.astype("int32") + 1})
    adapter.close()
    sys.modules.pop("tag")
