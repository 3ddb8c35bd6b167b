"""What the loop needs of a model: a text in a cache, rows of logits, and a vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray


class Vocab(Protocol):
    """Tokens and their text."""

    @property
    def n_tokens(self) -> int:
        """Size of the vocabulary."""
        ...

    def is_end(self, token: int) -> bool:
        """True for every end-of-generation token (end of sequence, end of turn, ...)."""
        ...

    def piece(self, token: int) -> bytes:
        """The bytes that a token adds to the text; empty for control tokens."""
        ...


class TokenSequence(Protocol):
    """One text in the cache of one model: the cache holds its first ``n_past`` tokens."""

    @property
    def n_past(self) -> int:
        """Number of tokens in the cache."""
        ...

    @property
    def n_ctx(self) -> int:
        """Number of tokens that the cache can hold."""
        ...

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens in the cache, oldest first."""
        ...

    @property
    def vocab(self) -> Vocab: ...

    def eval(self, tokens: Sequence[int], logits: int) -> NDArray[np.float32]:
        """Decode ``tokens`` after the cached ones; return rows for the last ``logits`` of them.

        The rows have shape [logits, n_vocab] and are borrowed until the next eval. Raises
        ContextError beyond n_ctx and EngineError if decoding fails.
        """
        ...

    def checkpoint(self, n_ahead: int | None = None) -> None:
        """Remember this place: ``truncate`` may come back to it.

        It costs next to nothing, and nothing at all if the cache can be cut anywhere. Only the last
        place is sure to be remembered. ``n_ahead`` says that at most so many tokens of the next
        eval will be taken back.
        """
        ...

    def truncate(self, n_past: int) -> None:
        """Cut the cache to at most ``n_past`` tokens; do nothing if it has no more.

        A model with a recurrent state goes back to a place that it remembers, or to the start, so
        the cache may hold fewer tokens afterwards: whoever goes on feeds ``tokens[n_past:]`` first.
        Raises RollbackError if the backend refuses.
        """
        ...

    def keep(self, tokens: Sequence[int]) -> int:
        """Cut the cache to a common prefix with ``tokens``; return its length.

        It is the longest one, or the longest that a model with a recurrent state can go back to.
        """
        ...

    def close(self) -> None:
        """Give the cells back; no other method may be called afterwards."""
        ...


@runtime_checkable
class Features(Protocol):
    """What a sequence may offer beside ``TokenSequence``, for drafters that need it."""

    def features(self, n: int) -> NDArray[np.float32]:
        """The hidden states of the last ``n`` tokens of the last eval, shape [n, n_embd].

        They are borrowed until the next eval.
        """
        ...


def n_common(tokens: Sequence[int], others: Sequence[int]) -> int:
    """The length of the longest common prefix."""
    pairs = zip(tokens, others, strict=False)
    different = (i for i, (token, other) in enumerate(pairs) if token != other)
    return next(different, min(len(tokens), len(others)))
