"""Text files that users write: UTF-8, or what their byte order mark says."""

from __future__ import annotations

import codecs
from pathlib import Path

from qdraft.errors import UsageError

# By their byte order marks; that of UTF-32 begins like the one of UTF-16.
_ENCODINGS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)


def read_bytes(path: Path | str, name: str = "", limit: int | None = None) -> bytes:
    """Return the content of a file of at most ``limit`` bytes.

    Raises UsageError, which calls the file ``name``, else by its path.
    """
    name = name or str(path)
    try:
        with open(path, "rb") as file:
            data = file.read() if limit is None else file.read(limit + 1)
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # a null character, or half of a surrogate pair
        raise UsageError(f"{name!r} cannot be the name of a file") from error
    if limit is not None and len(data) > limit:
        raise UsageError(f"{name} has more than {limit} bytes, so it is something else")
    return data


def read_text(path: Path | str, name: str = "") -> str:
    """Return the text of a file, without its byte order mark. Raises UsageError as ``decode``."""
    name = name or str(path)
    return decode(read_bytes(path, name), name)


def decode(data: bytes, name: str) -> str:
    """Return the text of these bytes, without their byte order mark and with its newlines.

    Raises UsageError, which calls the text ``name``, if the bytes are not in their encoding.
    """
    mark, encoding = find_encoding(data)
    try:
        return data[len(mark) :].decode(encoding)
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{name} is not {encoding[:6].strip('-').upper()} text",
            hint="save it as UTF-8, or as UTF-16 with a byte order mark",
        ) from error


def find_encoding(data: bytes) -> tuple[bytes, str]:
    """Return the byte order mark that the bytes start with, and their encoding: UTF-8 without."""
    return next((each for each in _ENCODINGS if data.startswith(each[0])), (b"", "utf-8"))


def require_unicode(text: str, name: str) -> None:
    """Raise UsageError unless the text can be written in UTF-8.

    Python stores bytes of the command line that are no text, and JSON's ``\\ud800``, as halves of
    surrogate pairs.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(f"{name} is not Unicode text: character {error.start + 1}") from error
