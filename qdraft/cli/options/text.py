"""What to generate: the prompt, and where the text ends."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from qdraft.cli.options.group import Group, option
from qdraft.errors import UsageError
from qdraft.text_file import decode, read_text, require_unicode

_PANEL = "Prompt and text"


@dataclass(frozen=True, kw_only=True)
class TextOptions(Group):
    """The prompt, and where the text ends."""

    prompt: Annotated[
        str | None, option(_PANEL, "-p", "--prompt", help="Prompt; - reads it from standard input.")
    ] = None
    file: Annotated[
        str | None,
        option(_PANEL, "-f", "--file", help="Read the prompt from this file; - is standard input."),
    ] = None
    system: Annotated[
        str | None, option(_PANEL, "-sys", "--system", help="System message of the chat.")
    ] = None
    raw: Annotated[
        bool, option(_PANEL, "--raw", help="Continue the prompt as it is, without a chat template.")
    ] = False
    n_predict: Annotated[
        int,
        option(_PANEL, "-n", "--n-predict", help="Tokens to generate at most; -1 sets no limit."),
    ] = -1
    stop: Annotated[
        list[str] | None,
        option(_PANEL, "--stop", help="End the text before this string (repeatable)."),
    ] = None

    def read_prompt(self) -> str:
        """Return the prompt. Raises UsageError if there is none."""
        return read_prompt(self.prompt, self.file)


def read_prompt(prompt: str | None, file: str | None) -> str:
    """Return the prompt of -p, -f or standard input (``-``, or a pipe if neither is given).

    Input is UTF-8, or what its byte order mark says, with any newlines; the one newline that ends
    a file is not part of the prompt. Raises UsageError.
    """
    if prompt is not None and file is not None:
        raise UsageError("--prompt cannot be combined with --file")
    piped = sys.stdin is not None and not sys.stdin.isatty()
    if "-" in (prompt, file) or (prompt is None and file is None and piped):
        return _as_prompt(decode(sys.stdin.buffer.read() if sys.stdin else b"", "standard input"))
    if file is not None:
        return read_text_file(Path(file))
    if prompt is None:
        raise UsageError(
            "there is no prompt", hint='give one with -p "...", with -f FILE or on standard input'
        )
    require_unicode(prompt, "--prompt")
    return prompt


def read_text_file(path: Path) -> str:
    """Return the text of a file. Raises UsageError if it is unreadable or not text."""
    return _as_prompt(read_text(path))


def _as_prompt(text: str) -> str:
    return text.replace("\r\n", "\n").removesuffix("\n")
