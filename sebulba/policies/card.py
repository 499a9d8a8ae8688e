"""The card of a policy: what it is, for people, as Markdown beside its data."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

import sebulba
from sebulba.agent import Agent
from sebulba.support.files import flat
from sebulba.types import EnvSpec, MultiAgentSpec

CARD_FILE = "README.md"
"""Where folders are shown, this file is shown with them."""
LONGEST = 200
"""Characters of a value."""


def policy_card(agent: Agent, spec: EnvSpec, about: Mapping[str, Any]) -> str:
    """Return the card of a policy of one agent.

    Args:
      about: What is known of its training, by what it is called on the card.
    """
    facts = {
        "agent": type(agent).__name__,
        "environment": spec.name,
        "observes": spec.observation_space,
        "does": spec.action_space,
        **({"heeds legal actions in": spec.legal_actions} if spec.legal_actions else {}),
        **about,
        "saved by": f"Sebulba {sebulba.__version__}",
    }
    fields = dataclasses.asdict(agent.config) if dataclasses.is_dataclass(agent.config) else {}  # type: ignore[arg-type]
    table = _table({name: str(one) for name, one in flat(fields)})
    name = f"{type(agent).__name__} on {spec.name}" if spec.name else type(agent).__name__
    return _page(
        name,
        [type(agent).__name__, spec.name],
        facts,
        "action, state = policy(observation)  # of one environment, or a batch of them\n"
        "action, state = policy(observation, state)  # the next step of the episode",
        f"## Hyper-parameters\n\n{table}" if table else "",
    )


def population_card(members: Iterable[str], spec: MultiAgentSpec, about: Mapping[str, Any]) -> str:
    """Return the card of the policies of many agents, each of which has one in its folder."""
    groups = {f"group {name}": f"{len(group.slots)} agents" for name, group in spec.groups.items()}
    facts = {
        "members": ", ".join(members),
        "environment": spec.name,
        **groups,
        **about,
        "saved by": f"Sebulba {sebulba.__version__}",
    }
    return _page(
        f"Many agents on {spec.name}",
        ["multi-agent", spec.name],
        facts,
        "actions, state = policy(observations)  # dictionaries by the names of groups",
        "Each member has a folder with a policy, and a card, of its own.\n",
    )


def _page(name: str, tags: list[str], facts: Mapping[str, Any], use: str, more: str) -> str:
    words = ["reinforcement-learning", "sebulba", *filter(None, tags)]
    return f"""\
---
library_name: sebulba
tags: {json.dumps(words)}
---

# {_plain(name)}

A trained policy: `config.json` and arrays, no pickle.

{_table(facts)}
## Use

```python
import sebulba

policy = sebulba.load_policy("FOLDER")  # this folder
{use}
```

`policy` returns the greedy action, unless it was loaded with `explore=True`.

{more}"""


def _table(facts: Mapping[str, Any]) -> str:
    rows = [f"| {_plain(name)} | {_plain(value)} |\n" for name, value in facts.items() if value]
    return "".join(["| | |\n|---|---|\n", *rows]) if rows else ""


def _plain(value: Any) -> str:
    """Return a value as text that is no Markdown, and breaks no table."""
    words = " ".join(str(value).split())
    short = words if len(words) <= LONGEST else f"{words[:LONGEST]}..."
    return "".join(f"\\{c}" if c in '\\`*_[]<>|"#' else c for c in short)
