r"""Text that is not qdraft's own, made harmless to read: names in files, words of servers, texts.

Whoever can name a tensor, a model or a file could otherwise set the reader's clipboard, or write
over what stands on the screen. What has no glyph of its own is shown as its number, for example
``\x1b``.
"""

from __future__ import annotations

import json
import re
import unicodedata
from typing import Any

# Control characters; marks that have no width or that turn the direction of the text around;
# halves of pairs; separators of lines and paragraphs.
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
# Letters without a glyph: fillers of Hangul, and blank Braille.
_BLANK = frozenset("\u115f\u1160\u2800\u3164\uffa0")
_UNUSUAL = re.compile(r"[^ -~\n\t]")
# What a terminal acts on, and what shows a line of code in another order than it has. Joiners and
# marks of direction stay: emoji and several scripts are written with them.
_ACTED_ON = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
LIMIT = 300  # characters of a name


def escape(text: str) -> str:
    """Show what cannot be seen; newlines and tabs stay."""
    return _UNUSUAL.sub(_show_hidden, text)


def one_line(text: str, limit: int = LIMIT) -> str:
    """Show what cannot be seen, newlines and tabs too; cut to ``limit`` characters and a mark."""
    if len(text) > limit:
        text = text[:limit] + "..."
    return escape(text).replace("\n", "\\n").replace("\t", "\\t")


def escape_controls(text: str) -> str:
    """Show the characters of a text that a terminal acts on; a line may end as on Windows."""
    return _ACTED_ON.sub(_number, text.replace("\r\n", "\n"))


def dump_json(value: Any, *, ascii_only: bool = False, **options: Any) -> str:
    r"""Return JSON in which hidden characters are ``\u`` and a number, which changes no value."""
    text = json.dumps(value, ensure_ascii=ascii_only, **options)
    return _UNUSUAL.sub(
        lambda match: json.dumps(match[0])[1:-1] if _is_hidden(match[0]) else match[0], text
    )


def _is_hidden(character: str) -> bool:
    return unicodedata.category(character) in _HIDDEN or character in _BLANK


def _show_hidden(match: re.Match[str]) -> str:
    return _number(match) if _is_hidden(match[0]) else match[0]


def _number(match: re.Match[str]) -> str:
    code = ord(match[0])
    if 0xDC80 <= code <= 0xDCFF:  # a byte of a file name that is not UTF-8
        code -= 0xDC00
    return (
        f"\\x{code:02x}"
        if code < 0x100
        else f"\\u{code:04x}"
        if code < 0x10000
        else f"\\U{code:08x}"
    )
