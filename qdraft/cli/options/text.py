"""What to generate: the prompt, and where the text ends."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from qdraft.cli.escapes import process_escapes
from qdraft.cli.options.group import Group, option
from qdraft.cli.standard_input import read_all, read_if_there
from qdraft.errors import UsageError
from qdraft.text_file import decode, read_text, require_unicode

_PANEL = "Prompt and text"


@dataclass(frozen=True, kw_only=True)
class TextOptions(Group):
    """The prompt, and where the text ends."""

    prompt: Annotated[
        str | None,
        option(
            _PANEL,
            "-p",
            "--prompt",
            help="Prompt; qdraft processes escapes such as \\n. - reads it from standard input. "
            "Text in a file or pipe on standard input goes before the prompt.",
        ),
    ] = None
    file: Annotated[
        str | None,
        option(
            _PANEL,
            "-f",
            "--file",
            help="Read the prompt from this file, as it is; - is standard input.",
        ),
    ] = None
    no_escape: Annotated[
        bool,
        option(_PANEL, "--no-escape", help="Do not process escapes in --prompt and --stop."),
    ] = False
    system: Annotated[
        str | None,
        option(_PANEL, "-sys", "--system", help="System message of the chat, as it is."),
    ] = None
    raw: Annotated[
        bool, option(_PANEL, "--raw", help="Continue the prompt as it is, without a chat template.")
    ] = False
    parse_special: Annotated[
        bool | None,
        option(
            _PANEL,
            "--parse-special/--no-parse-special",
            help="Read the names of control tokens in your own text as these tokens.",
            default="only without a chat template",
        ),
    ] = None
    special: Annotated[
        bool,
        option(_PANEL, "-sp", "--special", help="Show control tokens in the text."),
    ] = False
    n_predict: Annotated[
        int,
        option(_PANEL, "-n", "--n-predict", help="Tokens to generate at most; -1 sets no limit."),
    ] = -1
    ignore_eos: Annotated[
        bool, option(_PANEL, "--ignore-eos", help="Never end the text before --n-predict tokens.")
    ] = False
    stop: Annotated[
        list[str] | None,
        option(
            _PANEL,
            "--stop",
            help="End the text before this string; qdraft processes escapes such as \\n "
            "(repeatable).",
        ),
    ] = None

    def read_prompt(self) -> str:
        """Return the prompt. Raises UsageError if there is none."""
        prompt = self.prompt
        if prompt is not None:
            prompt = process_escapes(prompt, "--prompt", literally=self.no_escape)
        return read_prompt(prompt, self.file)

    def stops(self) -> tuple[str, ...]:
        """Return the stop strings. Raises UsageError."""
        return tuple(
            process_escapes(text, "--stop", literally=self.no_escape) for text in self.stop or ()
        )

    def system_message(self) -> str | None:
        """Return the system message; llama.cpp processes no escapes in it. Raises UsageError."""
        return self.system and process_escapes(self.system, "--system", literally=True)


def read_prompt(prompt: str | None, file: str | None) -> str:
    """Return the text of standard input, a blank line, and the prompt of -p or the file of -f.

    ``-`` as prompt or file waits for standard input, and so does a call with neither. Otherwise
    only what is there already is read. Input is UTF-8, or what its byte order mark says, with any
    newlines; the one newline that ends a file is not part of the prompt. Raises UsageError.
    """
    if prompt is not None and file not in (None, "-"):
        raise UsageError("--prompt cannot be combined with --file")
    require_unicode(prompt or "", "--prompt")
    own = None if prompt == "-" else prompt
    if file not in (None, "-"):
        own = read_text_file(Path(file))
    is_waited_for = "-" in (prompt, file)
    if own is None and not is_waited_for and (sys.stdin is None or sys.stdin.isatty()):
        raise UsageError(
            "there is no prompt", hint='give one with -p "...", with -f FILE or on standard input'
        )
    data = read_all() if own is None or is_waited_for else read_if_there()
    piped = _as_prompt(decode(data, "standard input"))
    return "\n\n".join(filter(None, (piped, own)))


def read_named(file: str) -> str:
    """Return the text of a file, or of standard input if it is called ``-``. Raises UsageError."""
    if file == "-":
        return _as_prompt(decode(read_all(), "standard input"))
    return read_text_file(Path(file))


def read_text_file(path: Path) -> str:
    """Return the text of a file. Raises UsageError if it is unreadable or not text."""
    return _as_prompt(read_text(path))


def _as_prompt(text: str) -> str:
    return text.replace("\r\n", "\n").removesuffix("\n")
