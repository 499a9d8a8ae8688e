"""HTML from Python, in which every text is escaped. Free of JAX."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sebulba.runs.summary import plain
from sebulba.tools.compare.tables import number

MOST_CHARACTERS = 300
"""Of a name or a value that is shown."""
MOST_ROWS = 500
"""Of a table with what a run folder says."""
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; media-src data:; base-uri 'none'"
)
"""What a browser may do for a page: load nothing, run nothing, draw the pictures and play the films
that are in it."""


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def tag(name: str, /, *inside: str | Html | None, **attributes: str | bool | None) -> Html:
    """Return an element.

    Args:
      name: Of the element.
      inside: What it contains; a ``str`` that is not ``Html`` is escaped, None is left out.
      attributes: Its attributes, escaped; ``class_`` is ``class``. True has no value, and None and
        False leave an attribute out.
    """
    words = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        words.append(key if value is True else f'{key}="{html.escape(_encodable(value))}"')
    opened = Html(f"<{' '.join(words)}>")
    if name in ("img", "input", "meta", "link"):
        return opened
    return Html(f"{opened}{joined(inside)}</{name}>")


def joined(parts: Iterable[str | Html | None]) -> Html:
    """Return the parts one after the other, escaped where they are not HTML."""
    return Html(
        "".join(
            part if isinstance(part, Html) else html.escape(_encodable(part))
            for part in parts
            if part is not None
        )
    )


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def text(value: Any, most: int = MOST_CHARACTERS) -> str:
    """Return what anybody may have written as one printable line of at most ``most`` characters."""
    words = "-" if value is None else value if isinstance(value, str) else str(value)
    if len(words) > most:
        words = f"{words[:most]}…"
    return plain(words)


def value_text(value: Any) -> str:
    """Return a value of a configuration or a result as a table shows it."""
    return number(value) if isinstance(value, float) else text(value)


def lines_text(words: str) -> str:
    """Return a text of several lines, each of them printable."""
    return "\n".join(plain(line.replace("\t", "    ")) for line in words.splitlines())


def stacked(words: str, most: int = MOST_CHARACTERS) -> str | Html:
    """Return ``text`` of each line of a figure, below each other."""
    lines = [text(line, most) for line in words.splitlines()]
    return lines[0] if len(lines) == 1 else joined(tag("div", line) for line in lines)


def table(
    head: Sequence[str], rows: Sequence[Sequence[str | Html]], class_: str | None = None
) -> Html:
    """Return a table of at most ``MOST_ROWS`` rows, and a line for the number of the others."""
    body = [tag("tr", *(tag("td", cell) for cell in row)) for row in rows[:MOST_ROWS]]
    more = len(rows) - len(body)
    parts = [tag("thead", tag("tr", *(tag("th", name) for name in head))) if head else None]
    whole = tag("table", *parts, tag("tbody", *body), class_=class_)
    return joined([whole, tag("p", f"and {more:,} more", class_="note") if more > 0 else None])


def section(title: str, *inside: str | Html | None) -> Html:
    """Return a part of a page under its title."""
    return tag("section", tag("h2", title), *inside)


def page(title: str, main: Html, *, head: Html | None = None, policy: str = POLICY) -> str:
    """Return a whole page."""
    style = Html(Path(__file__).with_name("style.css").read_text(encoding="utf-8"))
    whole = tag(
        "html",
        tag(
            "head",
            tag("meta", charset="utf-8"),
            tag("meta", http_equiv="Content-Security-Policy", content=policy),
            tag("meta", name="referrer", content="no-referrer"),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("title", title),
            tag("style", style),
            head,
        ),
        tag("body", tag("main", main)),
        lang="en",
    )
    return f"<!doctype html>\n{whole}\n"
