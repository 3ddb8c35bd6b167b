"""The tokens of a chat that the caches hold already, for a prompt that was tokenized anew.

A model may write a text in other tokens than a tokenizer makes of that text. An answer that comes
back in the next prompt would then differ from its cells, and be read again.
"""

from __future__ import annotations

from collections.abc import Sequence

from qdraft.session.text import TextVocab


def keep_tokens(vocab: TextVocab, known: Sequence[int], fresh: Sequence[int]) -> list[int]:
    """Return ``fresh`` with the tokens of ``known`` for the beginning that both have in common.

    The beginning has the same text in both, and the same control tokens. Unless all of its tokens
    are the same too, it ends before a control token of ``fresh``, where no text goes on.
    """
    aligned, n_known, n_fresh = _Aligned(vocab), 0, 0
    i = j = 0
    while i < len(known) and j < len(fresh) and aligned.take(known[i], fresh[j]):
        i, j = i + aligned.n_known, j + aligned.n_fresh
        if not aligned.at_boundary:
            continue
        is_same = n_known == n_fresh == i - 1 == j - 1 and known[i - 1] == fresh[j - 1]
        if is_same or j == len(fresh) or vocab.is_control(fresh[j]):
            n_known, n_fresh = i, j
    return [*known[:n_known], *fresh[n_fresh:]]


class _Aligned:
    """Two rows of tokens read side by side; ``n_known`` and ``n_fresh`` were read to their end."""

    def __init__(self, vocab: TextVocab) -> None:
        self._vocab = vocab
        self._left = [b"", b""]  # of each side's token: the bytes that the other has not had yet
        self.n_known = self.n_fresh = 0

    @property
    def at_boundary(self) -> bool:
        return not any(self._left)

    def take(self, known: int, fresh: int) -> bool:
        """Compare as far as both tokens go; return False if they differ."""
        both = (known, fresh)
        if self.at_boundary:
            if known == fresh:
                self.n_known = self.n_fresh = 1
                return True
            self._left = [self._bytes(token) for token in both]
        else:
            self._left = [
                left or self._bytes(token) for left, token in zip(self._left, both, strict=True)
            ]
        n = min(map(len, self._left))
        if n == 0 or self._left[0][:n] != self._left[1][:n]:
            return False
        self._left = [left[n:] for left in self._left]
        self.n_known, self.n_fresh = (int(not left) for left in self._left)
        return True

    def _bytes(self, token: int) -> bytes:
        """The text of a token; empty for a control token, which equals only itself."""
        return b"" if self._vocab.is_control(token) else self._vocab.piece(token)
