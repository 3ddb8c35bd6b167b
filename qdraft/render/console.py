"""The two streams: text and figures on stdout, everything else on stderr; one theme."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from rich.color import ColorSystem
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text
from rich.theme import Theme

from qdraft.decoding.records import Chunk, Origin
from qdraft.render.foreign import dump_json, escape, escape_controls, one_line

THEME = Theme(
    {
        "error": "bold red",
        "warning": "bold yellow",
        "info": "cyan",
        "hint": "cyan",
        "label": "dim",
        "reasoning": "dim",
        # These differ without colour too: plain, underlined, reversed, bold.
        "origin.draft": "green",
        "origin.bonus": "cyan underline",
        "origin.residual": "yellow reverse",
        "origin.target": "bold",
    }
)


_LONGEST_LINE = 4000  # characters, room for two paths


class SafeConsole(Console):
    """A console that shows the control characters of its texts; only styles emit escape codes."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=escape(segment.text))


def talk_console() -> Console:
    """The console on stderr: it honours NO_COLOR and emits no escape codes in a pipe."""
    return SafeConsole(stderr=True, theme=THEME, highlight=False, emoji=False, markup=False)


def table_console() -> Console:
    """The console on stdout, for figures: it emits no escape codes in a pipe."""
    return SafeConsole(theme=THEME, highlight=False, emoji=False, markup=False)


def show_line(kind: str, message: str) -> None:
    """Print one line on stderr, for example "error: ..."; ``kind`` is a style of the theme."""
    words = one_line(" ".join(message.split()), _LONGEST_LINE)
    line = Text(f"{kind}: ", style=kind).append(words, style="default not bold")
    talk_console().print(line, soft_wrap=True)


def show_path(path: Path) -> None:
    """Print a path on stdout: as it is for a pipe, on one line for a terminal."""
    print(one_line(str(path), _LONGEST_LINE) if sys.stdout.isatty() else path)


class LogToTalk(logging.Handler):
    """Prints log records as lines on stderr; between ``hold`` and ``show_held`` it keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self._held: list[logging.LogRecord] | None = None

    @staticmethod
    def active() -> list[LogToTalk]:
        """Return the handlers that show the log of qdraft."""
        return [
            each for each in logging.getLogger("qdraft").handlers if isinstance(each, LogToTalk)
        ]

    def hold(self) -> None:
        if self._held is None:
            self._held = []

    def show_held(self) -> None:
        """Print what was held."""
        held, self._held = self._held, None
        for record in held or ():
            self.emit(record)

    def emit(self, record: logging.LogRecord) -> None:
        if self._held is not None:
            self._held.append(record)
        elif record.name.startswith("qdraft.llama.cpp"):
            talk_console().print(Text(record.getMessage(), style="label"), soft_wrap=True)
        else:
            show_line(record.levelname.lower(), record.getMessage())


def show_json(report: dict[str, Any]) -> None:
    """Print one object on one line of stdout, as ``json_text`` writes it."""
    print(json_text(report), flush=True)


def json_text(report: dict[str, Any]) -> str:
    """Return one object on one line.

    Characters are escaped if they have no glyph or stdout cannot take Unicode. Dataclasses become
    objects, paths become text, and figures that are not finite become null.
    """
    utf8 = "utf" in (sys.stdout.encoding or "").lower()
    return dump_json(_plain(report), ascii_only=not utf8, allow_nan=False)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (str, int, float)) or value is None else str(value)


def _meet(first: IO[str], second: IO[str]) -> bool:
    """Tell whether two streams go to one terminal, or to one file or pipe."""
    if first.isatty() and second.isatty():
        return True
    try:
        return os.path.sameopenfile(first.fileno(), second.fileno())
    except (OSError, ValueError):  # a stream without a descriptor
        return False


class TextStream:
    """Writes the text to stdout token by token; ``color`` styles tokens by where they came from.

    The reasoning goes to stderr before it, unless ``reasoning`` is False.

    Without a terminal there is no colour, and the characters are exactly those of the text. On a
    terminal, control characters of the text are shown as their numbers unless ``raw``.
    """

    def __init__(
        self,
        *,
        color: bool = False,
        raw: bool = False,
        reasoning: bool = True,
        console: Console | None = None,
    ) -> None:
        self._console = console or Console(theme=THEME)
        self._raw = raw
        self._shows_reasoning = reasoning
        self._is_reasoning = False  # the last that was written
        self._filters = not raw and self._console.file.isatty()
        self._color = color and self._console.is_terminal and not self._console.legacy_windows
        self._n_written = 0

    def write(self, chunk: Chunk) -> None:
        if chunk.reasoning and self._shows_reasoning:
            self._write_reasoning(chunk.reasoning)
        if not chunk.text:
            return
        self._end_reasoning("\n\n")
        if _meet(self._console.file, sys.stderr):
            for handler in LogToTalk.active():  # a line would stand in the middle of the text
                handler.hold()
        text = self._filtered(chunk.text)
        if self._color:
            style = self._console.get_style(f"origin.{(chunk.origin or Origin.TARGET).value}")
            if self._console.no_color:
                style = style.without_color
            text = style.render(text, color_system=ColorSystem.STANDARD)
        self._console.file.write(text)
        self._console.file.flush()
        self._n_written += len(chunk.text)

    def _write_reasoning(self, text: str) -> None:
        for handler in LogToTalk.active():
            handler.hold()
        talk = talk_console()
        if not self._is_reasoning:
            text = "reasoning:\n" + text
        self._is_reasoning = True
        if talk.file.isatty() and not self._raw:
            text = escape_controls(text)
        if talk.is_terminal and not talk.legacy_windows:
            text = talk.get_style("reasoning").render(text, color_system=ColorSystem.STANDARD)
        talk.file.write(text)
        talk.file.flush()

    def _end_reasoning(self, newlines: str) -> None:
        if self._is_reasoning:
            self._is_reasoning = False
            sys.stderr.write(newlines)
            sys.stderr.flush()

    def end(self, text: str) -> None:
        """Write the rest of the whole ``text``, and a newline if the text does not end with one."""
        self._end_reasoning("\n")
        rest = self._filtered(text[self._n_written :])
        self._console.file.write(rest + ("\n" if text and not text.endswith("\n") else ""))
        self._console.file.flush()
        self._n_written = len(text)
        for handler in LogToTalk.active():
            handler.show_held()

    def _filtered(self, text: str) -> str:
        return escape_controls(text) if self._filters else text
