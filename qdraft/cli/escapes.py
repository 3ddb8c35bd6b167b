"""Escapes in the text of options, as llama.cpp processes them."""

from __future__ import annotations

import re

from qdraft.errors import UsageError
from qdraft.text_file import require_unicode

# Those of llama.cpp's string_process_escapes. It leaves every other backslash as it is.
_ESCAPE = re.compile(rb"""\\(?:x([0-9a-fA-F]{2})|([nrt'"\\]))""")
_MEANINGS = {b"n": b"\n", b"r": b"\r", b"t": b"\t"}


def process_escapes(text: str, option: str, *, literally: bool = False) -> str:
    r"""Return the text of an option with ``\n``, ``\r``, ``\t``, ``\'``, ``\"``, ``\\`` and
    ``\xHH`` replaced by what they mean, unless it is meant ``literally``.

    ``\xHH`` is a byte, so that ``\xc3\xa9`` is one character. Raises UsageError if text or bytes
    are not Unicode.
    """
    require_unicode(text, option)
    try:
        return text if literally else _ESCAPE.sub(_meaning, text.encode()).decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{option} is not UTF-8 text, because of its escapes", hint="give --no-escape"
        ) from error


def _meaning(match: re.Match[bytes]) -> bytes:
    if match[1]:
        return bytes([int(match[1], 16)])
    return _MEANINGS.get(match[2], match[2])
