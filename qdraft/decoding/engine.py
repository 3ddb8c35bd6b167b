"""What the loop needs of a model: rows of logits, a cache that can be cut, a vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

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


class Engine(Protocol):
    """One model with one cache, which holds ``n_past`` tokens of one text."""

    @property
    def n_past(self) -> int:
        """Number of tokens in the cache."""
        ...

    @property
    def n_ctx(self) -> int:
        """Number of tokens that the cache can hold."""
        ...

    @property
    def vocab(self) -> Vocab: ...

    def eval(self, tokens: Sequence[int], logits: int) -> NDArray[np.float32]:
        """Decode ``tokens`` after the cached ones; rows for the last ``logits`` of them.

        Returns shape [logits, n_vocab], borrowed until the next eval. Raises
        ContextError beyond n_ctx and EngineError when decoding fails.
        """
        ...

    def truncate(self, n_past: int) -> None:
        """Cut the cache to its first ``n_past`` tokens (no-op when it has no more).

        Raises RollbackError when the backend refuses.
        """
        ...

    def close(self) -> None: ...
