"""Where pictures are watched: a window, or the terminal."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import numpy as np
from PIL import Image

from sebulba.errors import UsageError
from sebulba.video.rendering import enlarged

T = TypeVar("T")
HALF_BLOCK = "▀"
"""Its colour is the upper of two pixels, the background's the lower."""


def open_screen(where: str | None) -> Window | Terminal:
    """Return a screen; for None the window where there is a display, else the terminal.

    Raises:
      UsageError: There is no such screen.
    """
    fault = _fault_of_window()
    if where == "window" and fault:
        raise UsageError(f"no window can be opened: {fault}; use --on terminal, or sebulba video")
    if where == "window" or (where is None and not fault):
        return Window()
    if not sys.stdout.isatty():
        raise UsageError(
            f"no window is available ({fault or 'not asked for'}), and the output is not a "
            "terminal; use sebulba video, which writes a file"
        )
    return Terminal()


def _fault_of_window() -> str | None:
    """Return why no window can be opened, None if one can."""
    if sys.platform.startswith("linux") and not (
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    ):
        return "DISPLAY is not set"
    try:
        import tkinter

        tkinter.Tk().destroy()
    except Exception as error:  # tkinter is missing, or its TclError
        return f"tkinter says: {error}"
    return None


class Window(AbstractContextManager):
    """A window of tkinter, which Python brings."""

    def __init__(self) -> None:
        """Open it."""
        import tkinter

        self._root = tkinter.Tk()
        self._root.resizable(False, False)
        self._label = tkinter.Label(self._root, borderwidth=0)
        self._label.pack()
        self._is_open = True
        self._root.protocol("WM_DELETE_WINDOW", self._close)

    def _close(self) -> None:
        self._is_open = False

    def show(self, picture: np.ndarray, caption: str) -> bool:
        """Show a picture; False once the window was closed."""
        from PIL import ImageTk

        image = ImageTk.PhotoImage(Image.fromarray(enlarged(picture)), master=self._root)
        self._label.configure(image=image)
        self._image: Any = image  # which tkinter does not keep
        self._root.title(caption)
        self._root.update()
        return self._is_open

    def __exit__(self, *exception: object) -> None:
        self._root.destroy()


class Terminal(AbstractContextManager):
    """The whole terminal, two pixels a character."""

    def __init__(self) -> None:
        """Take over the terminal when it is entered."""
        from rich.console import Console
        from rich.live import Live

        self._console = Console()
        self._live = Live(console=self._console, screen=True, auto_refresh=False)

    def show(self, picture: np.ndarray, caption: str) -> bool:
        """Show a picture as large as the terminal allows."""
        from rich.text import Text

        columns, rows = self._console.size
        text = in_half_blocks(picture, columns, rows - 1)
        text.append("\n")
        text.append_text(Text(caption[:columns], style="bold"))
        self._live.update(text, refresh=True)
        return True

    def __enter__(self) -> Terminal:
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()


def in_half_blocks(picture: np.ndarray, columns: int, rows: int) -> Any:
    """Return a picture ``[height, width, 3]`` as coloured text that fits into a terminal."""
    from rich.style import Style
    from rich.text import Text

    height, width, _ = picture.shape
    share = min(columns / width, 2 * rows / height)
    size = max(1, int(width * share)), max(2, int(height * share) // 2 * 2)
    pixels = np.asarray(Image.fromarray(picture).resize(size, Image.Resampling.BOX))
    text = Text(no_wrap=True, end="")
    for i in range(0, size[1], 2):
        if i:
            text.append("\n")
        for upper, lower in zip(pixels[i], pixels[i + 1], strict=True):
            style = Style(color=_colour(upper), bgcolor=_colour(lower))
            text.append(HALF_BLOCK, style=style)
    return text


def _colour(pixel: np.ndarray) -> Any:
    from rich.color import Color

    red, green, blue = pixel.tolist()
    return Color.from_rgb(red, green, blue)


def paced(shown: Iterable[T], per_second: float) -> Iterator[T]:
    """Yield so many in a second; one that is late is not waited for."""
    due = time.perf_counter()
    for one in shown:
        yield one
        due = max(due + 1 / per_second, time.perf_counter())
        time.sleep(max(0.0, due - time.perf_counter()))
