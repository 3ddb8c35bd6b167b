"""Where the user of a chat types: with history and completion, or a plain line."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import Output
from prompt_toolkit.output.defaults import create_output

from qdraft.chat.commands import COMMANDS

PROMPT, _MORE = "> ", ". "
_QUOTES = '"""'
_PATHS = ("read",)
Words = Callable[[str], Iterable[str]]
"""Takes the name of a command; returns words that its argument may be."""


class Terminal(Protocol):
    """Where the user types."""

    @property
    def can_edit(self) -> bool:
        """Tell whether ``read`` can begin with a text to edit."""
        ...

    def read(self, text: str = "") -> str | None:
        """Return what the user sends, after Ctrl-C on it "", at the end None.

        ``text`` is in the line at first, if the terminal can edit.
        """
        ...


def is_open(text: str) -> bool:
    """Tell whether a text began with three quotes that do not end yet."""
    start = text.lstrip()
    return start.startswith(_QUOTES) and not _is_closed(start)


def _is_closed(text: str) -> bool:
    return len(text.rstrip()) >= 2 * len(_QUOTES) and text.rstrip().endswith(_QUOTES)


def without_quotes(text: str) -> str:
    """Return the text between three quotes and three quotes, else the text as it is."""
    start = text.strip()
    if not start.startswith(_QUOTES):
        return text
    inner = start[len(_QUOTES) :]
    return inner.removesuffix(_QUOTES).strip("\n") if _is_closed(start) else inner.strip("\n")


def open_terminal(words: Words, history: Path | None) -> Terminal:
    """Return the terminal on the standard streams; ``history`` None keeps none on disk."""
    shown = next((s for s in (sys.stdout, sys.stderr) if s.isatty()), None)
    if shown is None or os.environ.get("TERM") == "dumb":
        return PlainTerminal()
    return EditingTerminal(words, open_history(history), output=create_output(shown))


class EditingTerminal:
    """A terminal with line editing, history and completion."""

    can_edit = True

    def __init__(
        self,
        words: Words,
        history: History,
        *,
        input: Input | None = None,
        output: Output | None = None,
    ) -> None:
        self._session: PromptSession[str] = PromptSession(
            PROMPT,
            history=history,
            completer=CommandCompleter(words),
            complete_while_typing=False,
            multiline=Condition(lambda: is_open(self._session.default_buffer.text)),
            prompt_continuation=_MORE,
            key_bindings=_bindings(),
            input=input,
            output=output,
        )

    def read(self, text: str = "") -> str | None:
        try:
            return without_quotes(self._session.prompt(default=text))
        except EOFError:
            return None


def _bindings() -> KeyBindings:
    """Alt-Enter begins a line, and Ctrl-C clears what was typed."""
    bindings = KeyBindings()

    @bindings.add("escape", "enter")
    def _begin_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @bindings.add("c-c")
    @bindings.add("<sigint>")
    def _clear(event: KeyPressEvent) -> None:
        event.current_buffer.reset()
        event.app.exit(result="")

    return bindings


class CommandCompleter(Completer):
    """Completes commands, and what may follow them."""

    def __init__(self, words: Words) -> None:
        self._words = words
        self._paths = PathCompleter(expanduser=True)

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterable[Completion]:
        before = document.text_before_cursor
        name, space, argument = before.removeprefix("/").partition(" ")
        if not before.startswith("/"):
            return
        if not space:
            for command in COMMANDS.values():
                if command.name.startswith(name):
                    yield Completion(f"/{command.name}", -len(before), display_meta=command.help)
        elif name in _PATHS:
            inner = Document(argument, len(argument))
            yield from self._paths.get_completions(inner, complete_event)
        else:
            for word in self._words(name):
                if word.startswith(argument):
                    yield Completion(word, -len(argument))


def open_history(path: Path | None) -> History:
    """Return the history in a file, which only the user may read; else one in memory."""
    if path is None:
        return InMemoryHistory()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(path))


class _Cancelled(Exception):
    """Ctrl-C while a plain line was typed."""


class PlainTerminal:
    """Lines as the terminal itself edits them, for terminals that cannot move the cursor."""

    can_edit = False

    def read(self, text: str = "") -> str | None:
        with _cancelling():
            try:
                return self._read()
            except _Cancelled:
                print(file=sys.stderr)
                return ""

    def _read(self) -> str | None:
        lines = ""
        prompt = PROMPT
        while True:
            print(prompt, end="", file=sys.stderr, flush=True)
            line = sys.stdin.readline()
            lines += line
            if not line:
                print(file=sys.stderr)
            if not line or not is_open(lines):
                break
            prompt = _MORE
        return without_quotes(lines.removesuffix("\n")) if lines else None


@contextmanager
def _cancelling() -> Iterator[None]:
    """Have Ctrl-C raise what cannot be taken for another signal that stops the command."""

    def cancel(_number: int, _frame: Any) -> None:
        raise _Cancelled

    old = signal.signal(signal.SIGINT, cancel)
    try:
        yield
    finally:
        with suppress(TypeError):  # a handler that Python did not set
            signal.signal(signal.SIGINT, old)
