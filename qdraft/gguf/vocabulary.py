"""The tokens of a file's vocabulary, and where two of them differ."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from qdraft.gguf.header import TOKEN_TYPES, TOKENS, LongArray, Value, read_header

_NORMAL, _UNKNOWN, _CONTROL, _UNUSED = 1, 2, 3, 5  # llama_token_type of llama.h


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Texts and types (``llama_token_type``) of all tokens, by id."""

    texts: tuple[bytes, ...]
    types: tuple[int, ...]

    def is_special(self, token: int) -> bool:
        """Tell whether no ordinary text is made of a token: control, unknown or unused."""
        return self.types[token] in (_UNKNOWN, _CONTROL, _UNUSED)

    def is_unused(self, token: int) -> bool:
        """Tell, as llama.cpp does, whether a token only fills the vocabulary up."""
        kind, text = self.types[token], self.texts[token]
        return kind == _UNUSED or (kind == _CONTROL and b"unused" in text)

    def show(self, token: int) -> str:
        return repr(self.texts[token].decode("utf-8", "replace"))


@dataclass(frozen=True, slots=True)
class TokenDifferences:
    """Where two vocabularies differ, as ids.

    ``normal`` is the first token that ordinary text is made of and that has two texts, or that only
    one vocabulary has; None if there is none. ``special`` are the other tokens with two texts.
    """

    normal: int | None
    special: tuple[int, ...]


def read_vocabulary(path: Path) -> Vocabulary:
    """Read the vocabulary of a file; without token types, all tokens are normal.

    Raises ModelFileError as ``read_header`` does.
    """
    metadata = read_header(path, keep=(TOKENS, TOKEN_TYPES)).metadata
    texts = tuple(x for x in _items(metadata.get(TOKENS)) if isinstance(x, bytes))
    types = tuple(x for x in _items(metadata.get(TOKEN_TYPES)) if isinstance(x, int))
    return Vocabulary(texts, types if len(types) >= len(texts) else (_NORMAL,) * len(texts))


def compare_vocabularies(first: Vocabulary, second: Vocabulary) -> TokenDifferences:
    """Compare the tokens of two vocabularies; unused tokens at the end of one count as equal."""
    n = min(len(first.texts), len(second.texts))
    differing = [i for i in range(n) if first.texts[i] != second.texts[i]]
    of_text = [i for i in differing if not (first.is_special(i) and second.is_special(i))]
    special = tuple(i for i in differing if first.is_special(i) and second.is_special(i))
    normal = of_text[0] if of_text else None
    if normal is None:
        longer = max(first, second, key=lambda vocabulary: len(vocabulary.texts))
        rest = range(n, len(longer.texts))
        normal = next((i for i in rest if not longer.is_unused(i)), None)
    return TokenDifferences(normal, special)


def _items(value: Value | None) -> tuple[bytes | float, ...]:
    return value.items if isinstance(value, LongArray) else ()
