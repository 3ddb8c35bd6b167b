"""The two streams: text on stdout, talk on stderr; styles by meaning, one theme."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from rich.console import Console
from rich.text import Text
from rich.theme import Theme

from qdraft.types import Chunk, Origin

THEME = Theme(
    {
        "error": "bold red",
        "warning": "bold yellow",
        "hint": "cyan",
        "label": "dim",
        # Told apart without colour too: plain, underlined, reversed.
        "origin.draft": "green",
        "origin.bonus": "cyan underline",
        "origin.residual": "yellow reverse",
        "origin.target": "bold",
    }
)


def talk_console() -> Console:
    """stderr; honours NO_COLOR, emits no escape codes in a pipe."""
    return Console(stderr=True, theme=THEME, highlight=False, emoji=False)


def show_line(kind: str, message: str) -> None:
    """One line on stderr, such as "error: ..." (kind: error, warning, hint)."""
    line = Text(f"{kind}: ", style=kind).append(" ".join(message.split()), style="default not bold")
    talk_console().print(line, soft_wrap=True)


class LogToTalk(logging.Handler):
    """Log records as lines on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith("qdraft.llama.cpp"):
            talk_console().print(Text(record.getMessage(), style="label"), soft_wrap=True)
        else:
            show_line(record.levelname.lower(), record.getMessage())


class TextStream:
    """Writes the text to stdout as it comes; ``color`` styles tokens by where they came from."""

    def __init__(self, *, color: bool = False, file: TextIO | None = None) -> None:
        self._file = file or sys.stdout
        self._console = Console(file=self._file, theme=THEME, highlight=False) if color else None
        self._at_line_start = True

    def write(self, chunk: Chunk) -> None:
        if not chunk.text:
            return
        if self._console is None:
            self._file.write(chunk.text)
        else:
            style = f"origin.{(chunk.origin or Origin.TARGET).value}"
            self._console.print(Text(chunk.text, style=style), end="", soft_wrap=True)
        self._file.flush()
        self._at_line_start = chunk.text.endswith("\n")

    def end(self) -> None:
        """A newline where the text has none and a terminal would run on."""
        if not self._at_line_start:
            self._file.write("\n")
            self._file.flush()
        self._at_line_start = True
